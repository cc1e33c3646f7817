//! Tests inside an emulated machine: its init runs scenes and prints their results, which the test checks afterwards.

use crate::assets::GuestAssets;
use crate::client::lab_binary;
use crate::machine::{self, EmulatedMachine};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An emulated machine with a recent kernel that has Pagefold and the labs at its root.
#[derive(Clone, Debug)]
pub struct SceneMachine<'a> {
    /// The name of its init in `labs/guest`. It prints `ENDED` at the end.
    pub init: &'a str,
    /// More programs, and their paths in the machine.
    pub programs: &'a [(&'a Path, &'a str)],
    /// Options of QEMU: memory, CPUs.
    pub options: &'a [&'a str],
    /// Additions to the kernel's command line.
    pub kernel_arguments: &'a str,
    /// How long the scenes may take.
    pub timeout: Duration,
}

impl SceneMachine<'_> {
    /// Runs all scenes. `None`, with the reason on standard output, if this machine lacks what they need.
    ///
    /// # Panics
    /// If the programs were not built, or if the scenes did not end in time.
    pub fn run(&self) -> Option<Scenes> {
        let kernel = match find_kernel() {
            Ok(kernel) => kernel,
            Err(why) => {
                println!("skipped: {why}");
                return None;
            }
        };
        let lab = lab_binary().expect("the labs are not built");
        let pagefold = lab.with_file_name("pagefold");
        assert!(pagefold.exists(), "{}: cargo build -p pagefold --all-features", pagefold.display());
        let programs = [&[(lab.as_path(), "pagefold-lab"), (&pagefold, "pagefold")], self.programs].concat();
        let folder = tempfile::tempdir().expect("a folder for the machine");
        let machine = EmulatedMachine {
            kernel: &kernel,
            init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("guest").join(self.init),
            programs: &programs,
            files: &[],
            options: self.options,
            kernel_arguments: self.kernel_arguments,
        };
        let output = machine.run(folder.path(), self.timeout, &mut || Ok(())).expect("a machine");
        assert!(output.lines().any(|line| line == "ENDED"), "{output}");
        Some(Scenes { output })
    }
}

/// The recent kernel, if everything else that a machine needs is there, too.
fn find_kernel() -> anyhow::Result<PathBuf> {
    let directory = GuestAssets::default_directory();
    GuestAssets::find(&directory)?;
    machine::find_busybox()?;
    Ok(GuestAssets::find_recent_kernel(&directory)?)
}

/// What the scenes printed: lines `KIND NAME TEXT`, each of a named scene.
#[derive(Clone, Debug)]
pub struct Scenes {
    /// All output of the machine.
    pub output: String,
}

impl Scenes {
    /// The text of the first line of a kind and scene.
    ///
    /// # Panics
    /// If there is none.
    pub fn line(&self, kind: &str, name: &str) -> &str {
        let prefix = format!("{kind} {name} ");
        let found = self.output.lines().find_map(|line| line.strip_prefix(&*prefix));
        found.unwrap_or_else(|| panic!("no {prefix}in {}", self.output))
    }

    /// The exit status of a command: its line `EXIT`.
    ///
    /// # Panics
    /// If there is none.
    pub fn exit(&self, name: &str) -> i32 {
        self.line("EXIT", name).parse().expect("an exit status is a number")
    }

    /// The report of a command: its lines `JSON`.
    ///
    /// # Panics
    /// If they are not JSON.
    pub fn json(&self, name: &str) -> Value {
        let prefix = format!("JSON {name} ");
        let json: String = self.output.lines().filter_map(|line| line.strip_prefix(&*prefix)).collect();
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{name}: {error}: {}", self.output))
    }
}
