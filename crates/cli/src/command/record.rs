//! `pagefold record`: a folder from which every read-only command can be run again, elsewhere.

use crate::arguments::{Global, Targets, duration};
use crate::{Outcome, output, progress, source};
use anyhow::Context;
use clap::Args;
use pagefold_census::Index;
use pagefold_census::pages::Pages;
use pagefold_drive::policy;
use pagefold_host::act::setting_now;
use pagefold_host::observe::{self, Nodes};
use pagefold_host::recording::{Tap, pages::kind_line};
use pagefold_host::{Host, examine, parse, room};
use pagefold_model::Pid;
use pagefold_model::census::Census;
use pagefold_model::doctor::tuner;
use pagefold_model::domain::DomainRule;
use pagefold_model::identity::Identity;
use pagefold_model::ksm::Setting;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold record /tmp/host
  pagefold record --name 'qemu-*' /tmp/vms
  pagefold --host recording:/tmp/host census
  tar czf host.tar.gz -C /tmp host

Page contents are replaced by fingerprints under a key that is thrown away. Of environments only the
variables that name a job are kept, of command lines the first word, except for virtual machines and
programs that tune KSM. Only you may enter the folder; look it through before you give it away.";

/// Contents whose kinds are kept.
const KINDS: usize = 256;

/// Arguments of `record`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    /// The folder to make; it must not exist or be empty
    directory: PathBuf,
    /// Pause between the two passes that tell volatile pages; 0 for one pass
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = duration)]
    settle: Duration,
    #[command(flatten)]
    targets: Targets,
}

/// Make the recording.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    let host = source::open(global)?;
    let root = &options.directory;
    let tap = Tap::new(&*host, root, keeps_arguments)
        .with_context(|| format!("cannot record into {}: name a new folder", root.display()))?;
    let stop = progress::stop_on_signal().context("cannot handle signals")?;
    let census_options = pagefold_census::Options {
        selection: source::selection(&options.targets, global)?,
        domains: DomainRule::default().into(),
        settle: options.settle,
        threads: std::thread::available_parallelism().map_or(1, Into::into),
        sample: None,
        seed: 0,
        top: KINDS,
        rows: 0,
        matrix: Default::default(),
        ..Default::default()
    };
    let (census, index) = progress::show(host.page_size(), &stop, |progress| {
        pagefold_census::take(&tap, &census_options, progress, &stop)
    })?;
    source::seen(!census.subjects.is_empty(), &census_options.selection, &census.unseen, global)?;
    tap.show_only(shown(&*host, &census));
    // What the doctor and the account read beside; the tap keeps it.
    let facts = examine::facts(&tap, &[], &Default::default());
    for process in &facts.processes {
        let handle = tap.open(process.process.id.pid);
        // Absence is kept too.
        let _ = handle.map(|handle| observe::rollup(&*handle));
    }
    let _ = observe::huge_page_bytes(&tap);
    // The same for what `policy show` and `unmerge --dry-run` go by.
    for setting in Setting::ALL {
        let _ = setting_now(&tap, setting);
    }
    let _ = policy::observe(&tap);
    let cgroups = census.subjects.iter().filter_map(|subject| subject.process.cgroup.clone().ok()).collect();
    let _ = room::room(&tap, &cgroups);
    let nodes = Nodes::observe(&tap).unwrap_or_default();
    let lines = write_pages(&tap, &census, &index, &nodes, root)?;
    write_lines(
        &root.join("contents.txt"),
        census.contents.iter().filter_map(|content| Some(kind_line(content.fingerprint, content.kind?))),
    )?;
    let about = format!(
        "kernel = {:?}\narchitecture = {:?}\npagefold = {:?}\nsettle_seconds = {}\npartial = {}\n",
        observe::kernel(&tap).unwrap_or_default(),
        std::env::consts::ARCH,
        env!("CARGO_PKG_VERSION"),
        census.settle.unwrap_or_default().as_secs_f64(),
        census.partial,
    );
    tap.finish(&about).with_context(|| format!("cannot write to {}", root.display()))?;
    output::print(&format!(
        "Recorded {} with {lines} lines of pages in {path}.\n\
         Look it through, then attach it: tar czf recording.tar.gz -C {path} .\n",
        match census.subjects.len() {
            1 => "1 process".to_owned(),
            count => format!("{count} processes"),
        },
        path = root.display(),
    ))?;
    Ok(if census.partial || !census.unseen.is_empty() { Outcome::Partial } else { Outcome::Done })
}

/// The processes of the census, and ksmd, of which the doctor wants to know the CPU.
fn shown(host: &dyn Host, census: &Census) -> BTreeSet<Pid> {
    let is_ksmd = |pid: &Pid| {
        let stat = host.open(*pid).and_then(|handle| handle.read("stat")).and_then(|stat| parse::stat(&stat));
        stat.is_ok_and(|stat| stat.comm == "ksmd" && stat.flags & parse::PF_KTHREAD != 0)
    };
    let ksmd = host.pids().unwrap_or_default().into_iter().find(is_ksmd);
    let seen = census.subjects.iter().map(|subject| subject.process.id.pid);
    seen.chain(census.unseen.iter().map(|unseen| unseen.pid)).chain(ksmd).collect()
}

/// Whether a command line is kept whole.
fn keeps_arguments(comm: &str, arguments: &[String]) -> bool {
    tuner(comm, arguments).is_some() || Identity::of(arguments, &Default::default(), None).vm.is_some()
}

/// Write the pages of every process and the frames of all. Returns how many lines of pages.
fn write_pages(host: &dyn Host, census: &Census, index: &Index, nodes: &Nodes, root: &Path) -> anyhow::Result<usize> {
    let mut pages = Pages::new(host, index);
    // A process that went away since keeps what was read of its files; it just has no pages.
    let mut lines: Vec<_> = (0..census.subjects.len()).map(|i| pages.of(census, i).unwrap_or_default()).collect();
    let frames = pages.renumber(&mut lines, nodes);
    for (subject, lines) in census.subjects.iter().zip(&lines) {
        write_lines(&root.join("pages").join(format!("{}.txt", subject.process.id.pid)), lines)?;
    }
    write_lines(&root.join("frames.txt"), frames)?;
    Ok(lines.iter().map(Vec::len).sum())
}

fn write_lines<T: Display>(path: &Path, lines: impl IntoIterator<Item = T>) -> anyhow::Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        for line in lines {
            writeln!(file, "{line}")?;
        }
        file.flush()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
