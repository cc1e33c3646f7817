//! Reloads kvm_amd in an emulated machine with SVM, and kills the change at every point. The changes need a module that
//! can be unloaded, so they run in one boot of a guest. Guests of the guest prove that each vCPU starts afterwards.

use crate::{FILE_REMOVAL_POINTS, MODULE_POINTS, PAGEFOLD_BINARY, kill_at_selected_points, parse_points};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::machine::{self, EmulatedMachine};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The emulated machine takes minutes for its kills on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(900);

const MODULES: [&str; 3] = ["irqbypass.ko", "kvm.ko", "kvm-amd.ko"];

/// Compile a program for a guest from its source in `labs/guest`.
pub(crate) fn compile_guest_program(folder: &Path, name: &str) -> Result<PathBuf, String> {
    let program = folder.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../labs/guest/{name}.c"));
    let mut compiler = Command::new("gcc");
    compiler.args(["-O1", "-static", "-pthread", "-o"]).arg(&program).arg(&source);
    let output = compiler.output().map_err(|error| format!("gcc: {error}: run labs/setup.sh"))?;
    assert!(output.status.success(), "{output:?}");
    Ok(program)
}

/// Boot the machine. Returns its output.
fn run_machine() -> Result<String, String> {
    let directory = GuestAssets::default_directory();
    let assets = GuestAssets::find(&directory).map_err(|why| why.to_string())?;
    machine::find_busybox().map_err(|why| why.to_string())?;
    let modules = MODULES.map(|name| directory.join("modules").join(name));
    if let Some(missing) = modules.iter().find(|module| !module.exists()) {
        return Err(format!("{} is missing: run labs/setup.sh", missing.display()));
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile_guest_program(folder.path(), "kvm-cpus")?;
    let paths = MODULES.map(|name| format!("modules/{name}"));
    let mut programs: Vec<(&Path, &str)> =
        vec![(&program, "bin/kvm-cpus"), (Path::new(PAGEFOLD_BINARY), "bin/pagefold")];
    programs.extend(modules.iter().map(PathBuf::as_path).zip(paths.iter().map(String::as_str)));
    let machine = EmulatedMachine {
        kernel: &assets.kernel,
        init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/guest/init-kvm"),
        programs: &programs,
        files: &[],
        options: &["-cpu", "EPYC,+svm", "-smp", "1", "-m", "768M"],
        kernel_arguments: "",
    };
    Ok(machine.run(folder.path(), TIMEOUT, &mut || Ok(())).expect("a machine"))
}

/// The result of a step: all words after its name.
fn step<'a>(output: &'a str, name: &str) -> BTreeMap<&'a str, &'a str> {
    let prefix = format!("STEP {name} ");
    let line =
        output.lines().find_map(|line| line.strip_prefix(&*prefix)).unwrap_or_else(|| panic!("{name}: {output}"));
    // `cpus` has the value `CPUS 4`.
    line.split(' ').filter_map(|word| word.split_once('=')).collect()
}

fn assert_steps(output: &str) {
    for (name, npt, file) in [
        ("before", "Y", "absent"),
        ("applied", "N", "npt=0"),
        ("undone", "Y", "absent"),
        ("held", "Y", "absent"),
        ("retried", "Y", "absent"),
        ("end", "Y", "absent"),
    ] {
        let step = step(output, name);
        assert_eq!((step["npt"], step["file"]), (npt, file), "{name}: {output}");
        let cpus = format!("STEP {name} npt={npt} cpus=CPUS 4 file=");
        assert!(output.contains(&cpus), "a guest does not see its CPUs: {output}");
    }
    let line = |prefix: &str| {
        output.lines().find(|line| line.starts_with(prefix)).unwrap_or_else(|| panic!("{prefix}: {output}"))
    };
    assert!(line("VERIFY in force: module kvm_amd").ends_with("npt=0"), "{output}");
    assert!(line("AGAIN ").contains("nothing is to be changed"), "{output}");
    let exits: u64 = line("EXITS ")["EXITS ".len()..].parse().unwrap_or_else(|error| panic!("{error}: {output}"));
    assert!(exits > 0, "no exits of a running machine were counted: {output}");
    assert!(line("REFUSED").contains("kvm-cpus (process "), "the holder is not named: {output}");
    let statuses: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("RC ")).collect();
    // Applied, undone, refused while a machine runs, applied, undone but for the module in use.
    assert_eq!(statuses[..5], ["apply 0", "undo 0", "apply 2", "apply 0", "undo 3"], "{output}");
    assert!(line("BUSY").contains("is in use") && line("BUSY").contains("\"will_retry\": true"), "{output}");
    assert_eq!(output.lines().filter(|line| *line == "HOLDER ALIVE").count(), 2, "a machine was lost: {output}");
}

/// Asserts that `tune undo` was killed at each of its points, and that the parameter and the file were restored afterwards.
fn assert_undo_survives_kill(output: &str) {
    let undos: BTreeMap<&str, &str> =
        output.lines().filter_map(|line| line.strip_prefix("UNDO ")?.split_once('|')).collect();
    let expected = FILE_REMOVAL_POINTS.iter().chain(MODULE_POINTS).chain(&["before removing a journal"]);
    for point in expected {
        assert!(undos.contains_key(point), "{point} was not reached: {output}");
    }
    for (point, result) in undos {
        assert_eq!(result, "killed=137 recovered=0 undone=0 npt=Y left=0", "{point}: {output}");
    }
}

#[test]
fn module_reload_survives_kill() {
    let output = match run_machine() {
        Ok(output) => output,
        Err(why) => return println!("skipped: {why}"),
    };
    assert!(output.lines().any(|line| line == "ENDED"), "{output}");
    assert_steps(&output);
    let points: String =
        output.lines().filter_map(|line| line.strip_prefix("POINT ")).flat_map(|line| [line, "\n"]).collect();
    let kills: BTreeMap<&str, &str> =
        output.lines().filter_map(|line| line.strip_prefix("KILL ")?.split_once('|')).collect();
    assert_undo_survives_kill(&output);
    kill_at_selected_points("module", &parse_points(&points), |point| {
        let result = kills[point];
        // 137: killed by SIGKILL, as a shell reports it.
        assert_eq!(result, "killed=137 recovered=0 undone=0 npt=Y file=absent left=0", "{point}: {output}");
        true
    });
}
