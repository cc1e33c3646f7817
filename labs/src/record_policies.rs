//! Recordings of the scheduler under several policies, made inside the emulated machine of `pagefold vcpu gang`.

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use pagefold_labs::gang_machine::run_gang_scenes;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// CPUs of the machine. Two virtual machines have as many vCPUs each.
const CPUS: u32 = 4;

/// The machine takes minutes on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(900);

/// The names of the recordings' files and of the recordings in [`SCENES`].
const RECORDINGS: [(&str, &str); 4] = [
    ("EEVDF without PLE", "eevdf"),
    ("EEVDF with PLE", "ple"),
    ("spread, throttled yield", "throttled"),
    ("gang", "gang"),
];

/// Two guests of KVM whose vCPUs contend for one ticket lock each, first without and then with exits of spinning vCPUs.
const SCENES: &str = "
record() {
    sleep 0.1
    pagefold vcpu record /run/schedule-$1 --duration 100ms $targets > /run/said 2>&1 || sed 's/^/FAILED /' /run/said
    say stop
    sleep 0.1
    gzip -c /run/schedule-$1 | od -A n -v -t x1 | sed \"s/^/RECORDED $1/\"
    say go
    sleep 0.05
}
load 2 4 kvm
record eevdf
end_load
load 2 4 kvm 40
record ple
gang --policy throttled-yield
record throttled
end_gang throttled
gang
record gang
end_gang gang
end_load
";

#[derive(Args)]
pub struct RecordPoliciesArguments {
    /// The folder for the recordings, which `pagefold vcpu map` reads
    folder: PathBuf,
    /// `pagefold`, built with the feature `gang` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pagefold: Option<PathBuf>,
}

/// Record the policies.
pub fn run(arguments: &RecordPoliciesArguments) -> Result<()> {
    let beside = || -> Result<PathBuf> { Ok(std::env::current_exe()?.with_file_name("pagefold")) };
    let pagefold = arguments.pagefold.clone().map_or_else(beside, Ok)?;
    let output = run_gang_scenes(&pagefold, CPUS, SCENES, TIMEOUT).map_err(|why| anyhow!(why))?;
    fs::create_dir_all(&arguments.folder).with_context(|| format!("cannot create {}", arguments.folder.display()))?;
    for (name, recording) in RECORDINGS {
        let compressed = transferred_bytes(&output, recording)?;
        ensure!(!compressed.is_empty(), "the machine made no recording {recording}: {output}");
        decompress(&compressed, &arguments.folder.join(name))?;
    }
    Ok(())
}

/// The bytes of a recording in the lines that the machine printed.
fn transferred_bytes(output: &str, recording: &str) -> Result<Vec<u8>> {
    let prefix = format!("RECORDED {recording} ");
    let numbers = output.lines().filter_map(|line| line.strip_prefix(&*prefix)).flat_map(str::split_whitespace);
    numbers.map(|number| u8::from_str_radix(number, 16).with_context(|| format!("{prefix}{number}"))).collect()
}

fn decompress(bytes: &[u8], path: &Path) -> Result<()> {
    let file = fs::File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    let mut gzip = Command::new("gzip").arg("-dc").stdin(Stdio::piped()).stdout(file).spawn().context("gzip")?;
    gzip.stdin.take().context("gzip has no input")?.write_all(bytes)?;
    let status = gzip.wait()?;
    ensure!(status.success(), "gzip: {status}");
    Ok(())
}
