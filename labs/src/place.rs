//! Places a process on CPUs and NUMA nodes, changes other settings, and undoes everything when standard input closes.
//! Fault tests kill this command at each step.

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use pagefold_base::memory::MemoryPolicy;
use pagefold_base::{AddressRange, IdSet, Pid};
use pagefold_host::action::{Action, Exchange, ThreadId, domain_definition_path};
use pagefold_host::knob::Knob;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session::ChangeLifetime;
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use pagefold_numa::threads::{self, ThreadPlacement, ThreadRole};
use std::io;
use std::path::PathBuf;

/// Minimum size of the regions whose pages are moved.
const MIN_REGION_BYTES: u64 = 1 << 20;

#[derive(Args)]
pub struct PlaceArguments {
    /// The process
    pid: u32,
    /// The state directory for locks and journals
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// Let its main thread run on these CPUs only
    #[arg(long, value_name = "LIST")]
    cpus: Option<IdSet>,
    /// Move its private anonymous memory to this NUMA node, and let memory that it touches later come from there
    #[arg(long, value_name = "NODE")]
    node: Option<u32>,
    /// With --cpus: the UUID of the domain of libvirt whose first virtual CPU gets the CPUs instead, through libvirt
    #[arg(long, value_name = "UUID", requires = "cpus")]
    libvirt: Option<String>,
    /// With --libvirt: the iothread that gets the CPUs instead, by the name of its thread
    #[arg(long, value_name = "NAME", requires = "libvirt")]
    iothread: Option<String>,
    /// Replace a text in the definition of the domain of libvirt that the process runs: TEXT=TEXT
    #[arg(long, value_name = "TEXT=TEXT", value_parser = parse_setting)]
    definition: Option<(String, String)>,
    /// Write a setting that Pagefold knows, by its path: PATH=VALUE
    #[arg(long, value_name = "PATH=VALUE", value_parser = parse_setting)]
    setting: Option<(String, String)>,
}

fn parse_setting(text: &str) -> Result<(String, String)> {
    let (path, value) = text.split_once('=').context("a setting must have the form PATH=VALUE")?;
    Ok((path.trim_start_matches('/').to_owned(), value.to_owned()))
}

/// Apply the requested changes, each in a session of its class, print `PLACED`, and undo them when standard input
/// closes.
pub fn run(arguments: &PlaceArguments) -> Result<()> {
    let host = LiveHost::new();
    let mut sessions = Vec::new();
    for class in ResourceClass::ALL {
        let actions = build_actions(&host, arguments)?;
        let actions: Vec<Action> = actions.into_iter().filter(|action| action.class() == class).collect();
        if actions.is_empty() {
            continue;
        }
        let (mut session, ..) = Session::begin(&host, &arguments.state, class)?;
        for action in &actions {
            let outcome = session.apply(action, ChangeLifetime::Temporary)?;
            for (range, why) in outcome.missed_ranges {
                println!("missed {range}: {why}");
            }
        }
        sessions.push(session);
    }
    println!("PLACED");
    io::copy(&mut io::stdin(), &mut io::sink())?;
    for mut session in sessions.into_iter().rev() {
        for failed in session.undo_all()? {
            println!("not undone: {failed}");
        }
    }
    Ok(())
}

fn build_actions(host: &LiveHost, arguments: &PlaceArguments) -> Result<Vec<Action>> {
    let to_error = |why| anyhow!("{why}");
    let handle = host.open(Pid(arguments.pid)).map_err(to_error)?;
    let process = handle.id();
    let mut actions = Vec::new();
    if let Some(cpus) = &arguments.cpus {
        let threads = threads::read_threads(host, &*handle, true).map_err(to_error)?;
        let domains = observe::libvirt_domains(host).unwrap_or_default();
        let domain = domains.iter().find(|domain| Some(&domain.uuid) == arguments.libvirt.as_ref());
        if arguments.libvirt.is_some() && domain.is_none() {
            bail!("libvirt has no such domain");
        }
        let tid = domain.map_or(Some(&process.pid), |domain| domain.vcpu_threads.get(&0));
        let is_placed = |thread: &&ThreadPlacement| match &arguments.iothread {
            Some(name) => thread.role == ThreadRole::Iothread(name.clone()),
            None => Some(&thread.tid) == tid,
        };
        let thread = threads.iter().find(is_placed).context("the process has no such thread")?;
        let pin = domain.and_then(|domain| thread.libvirt_pin(domain));
        let from = handle.thread_cpus(thread.tid).map_err(to_error)?;
        let thread = ThreadId { process, tid: thread.tid, start_time: thread.start_time };
        actions.push(Action::SetAffinity { thread, cpus: Exchange { from, to: cpus.clone() }, pin });
    }
    if let Some((old, new)) = &arguments.definition {
        let domains = observe::libvirt_domains(host).map_err(to_error)?;
        let domain = domains.into_iter().find(|domain| domain.pid == process.pid);
        let domain = domain.context("the process runs no domain of libvirt")?;
        let text = host.read(&domain_definition_path(&domain.name)).map_err(to_error)?;
        let from = String::from_utf8(text)?;
        let definition = Exchange { to: from.replacen(old, new, 1), from };
        actions.push(Action::DefineDomain { uuid: domain.uuid, name: domain.name, definition });
    }
    if let Some(node) = arguments.node {
        let regions = observe::regions(&*handle).map_err(to_error)?;
        let private = regions.iter().filter(|region| region.inode == 0 && region.permissions == *b"rw-p");
        let ranges: Vec<AddressRange> =
            private.map(|region| region.range).filter(|range| range.bytes().0 >= MIN_REGION_BYTES).collect();
        let policy = Exchange { from: MemoryPolicy::Default, to: MemoryPolicy::Prefer(node) };
        actions.push(Action::MovePages { process, ranges: ranges.clone(), node });
        actions.push(Action::SetMemoryPolicy { process, ranges, policy });
    }
    if let Some((path, value)) = &arguments.setting {
        let knob = Knob::from_path(path).with_context(|| format!("{path} is not a setting that Pagefold writes"))?;
        actions.push(Action::Write { knob, value: value.clone() });
    }
    Ok(actions)
}
