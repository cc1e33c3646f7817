//! The same comparison with the kernels of emulated machines, which have two NUMA nodes.

use super::{ON_THIS_KERNEL, Outcome};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::machine::{self, EmulatedMachine};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Two nodes with a CPU each.
const OPTIONS: &[&str] = &[
    "-smp",
    "2,sockets=2",
    "-m",
    "1024M",
    "-cpu",
    "max,-rdrand,-rdseed",
    "-object",
    "memory-backend-ram,id=node0,size=512M",
    "-object",
    "memory-backend-ram,id=node1,size=512M",
    "-numa",
    "node,nodeid=0,cpus=0,memdev=node0",
    "-numa",
    "node,nodeid=1,cpus=1,memdev=node1",
];

/// The first and the third layout of each kind: 31. With `PAGEFOLD_SOAK` the machines play all.
const PLAYED_LAYOUTS: &str = "-1\n-3\n";

const TIMEOUT: Duration = Duration::from_secs(900);

/// Plays the layouts on Debian's kernel and on the recent one, at the same time. Prints what they print.
pub fn play_on_guest_kernels() -> Outcome {
    let directory = GuestAssets::default_directory();
    let kernels = [
        GuestAssets::find(&directory).map(|assets| assets.kernel).map_err(|why| why.to_string()),
        GuestAssets::find_recent_kernel(&directory).map_err(|why| why.to_string()),
    ];
    let mut outcome = Outcome::default();
    std::thread::scope(|scope| {
        let machines = kernels.map(|kernel| scope.spawn(move || run_machine(&kernel?)));
        for machine in machines {
            match machine.join().expect("the machine is run") {
                Ok(output) => outcome.add(read_output(&output)),
                Err(why) => println!("skipped: {why}"),
            }
        }
    });
    outcome
}

fn run_machine(kernel: &PathBuf) -> Result<String, String> {
    machine::find_busybox().map_err(|why| why.to_string())?;
    let folder = tempfile::tempdir().map_err(|why| why.to_string())?;
    let program = std::env::current_exe().map_err(|why| why.to_string())?;
    let layouts = if std::env::var_os("PAGEFOLD_SOAK").is_some() { "" } else { PLAYED_LAYOUTS };
    let init = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/guest/init-test");
    let machine = EmulatedMachine {
        kernel,
        init: &init,
        programs: &[(&program, "test/program")],
        files: &[("test/arguments", &format!("{ON_THIS_KERNEL}\n{layouts}"))],
        options: OPTIONS,
        kernel_arguments: "nokaslr",
    };
    machine.run(folder.path(), TIMEOUT, &mut || Ok(())).map_err(|why| why.to_string())
}

/// # Panics
/// If the machine did not end.
fn read_output(output: &str) -> Outcome {
    let release = output.lines().find(|line| line.starts_with("Linux ")).unwrap_or("a machine");
    assert!(output.lines().any(|line| line.starts_with("ENDED ")), "{release} did not end in time: {output}");
    let mut outcome = Outcome::default();
    for line in output.lines() {
        let name = |rest: &str| rest.split([',', ':']).next().unwrap_or(rest).to_owned();
        if line.starts_with("equal: ") {
            outcome.equal += 1;
        } else if let Some(rest) = line.strip_prefix("different: ") {
            outcome.differing.push(format!("{} on {release}", name(rest)));
        } else if !line.starts_with("skipped: ") && !line.contains(" comparisons of all counters") {
            continue;
        }
        println!("{release}: {line}");
    }
    assert!(outcome.equal + outcome.differing.len() > 0, "{release} played nothing: {output}");
    outcome
}
