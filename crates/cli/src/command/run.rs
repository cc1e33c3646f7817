//! `pagefold run`: starts a program with its whole process tree enrolled in KSM, or merged in user space ([`user_engine`]),
//! and becomes it.
//!
//! This process turns into the program by exec, so its number, parent, terminal, process group, limits and descriptors
//! are what they would have been. The ways to enrol it ([`enroll_method`]) are tried, best first, on a copy of this program. For
//! prctl, which is inherited, that is proof; what a library did in the program is looked at after exec ([`preload_check`]).

mod companion;
mod enroll_method;
mod policy_driver;
mod preload_check;
mod program_loader;
mod user_engine;

use crate::CommandOutcome;
use crate::command::enrolled_domains::{EnrolledDomains, SIDE_CHANNEL_NOTE};
use crate::command_line::{GlobalOptions, parse_bytes, parse_cpu_share, parse_duration};
use crate::config::Config;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use enroll_method::{PreparedEnroll, ProgramEnrollMethod};
use pagefold_base::domain::TrustDomain;
use pagefold_base::identity::Identity;
use pagefold_base::process::Process;
use pagefold_base::{Absent, Bytes, Pid, ProcessId};
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use pagefold_linux::launch::{self, StderrPolicy};
use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process;
use std::time::Duration;

/// The longest name that the kernel keeps of a program (include/linux/sched.h, `TASK_COMM_LEN`, less the end).
const MAX_TASK_NAME_BYTES: usize = 15;

/// What somebody is told who cannot see all processes of the host.
const HIDDEN_PROCESSES_WARNING: &str = "others may be enrolled who cannot be seen from here (root on the host sees all, from Linux 6.14 \
    on), of other trust domains too: what is equal merges with theirs";

const EXAMPLES: &str = "\
Examples:
  pagefold run -- ./server --port 80            enrolled, with all that it starts
  pagefold run --verbose -- make -j8            and say how, on standard error
  mpirun -np 4 pagefold run -- ./solver         every rank
  mpirun -np 4 pagefold run --no-aslr -- ./solver
  pagefold run --policy guided -- mpirun -np 4 ./solver
                                                merge what pays and lasts while the job runs
  pagefold run --dry-run -- ./program           only say which way would be taken
  mpirun -np 4 pagefold run --engine user -- ./solver
                                                without KSM and root, in user space, at barriers
  pagefold run --engine user --report -- python3 crunch.py

The program replaces pagefold: same process, exit status, signals and terminal. Enrolled memory merges while ksmd runs \
(/sys/kernel/mm/ksm/run). Do not enrol what holds secrets: a program that the configuration excludes is refused by its \
name, user, cgroup or container (`pagefold config default` shows whom); what it starts is not looked at.

KSM merges with whatever else is enrolled on the host: who can time writes to his own memory can tell whether others \
hold the same page. So a program is not enrolled whole while anybody of another trust domain is, unless \
--across-domains is given. A domain is a user or a virtual machine of root's, if the configuration does not say \
otherwise; `--policy guided` keeps them apart. Only root sees whom other users have enrolled: who cannot see it is \
enrolled beside them, which --verbose and --dry-run say.

Ways: prctl is inherited by all that the program starts, and complete. preload needs programs that are linked \
dynamically with glibc, adds a thread to each where the kernel refuses prctl there too, and sets LD_PRELOAD: what the \
program starts is not enrolled if it is linked statically, setuid, or started without that variable. A process beside \
it says so on standard error, of what begins in its first ten seconds; where that is a pipe, of the program alone. \
inject needs the right to trace the program, and leaves a process beside it until all that it started have ended.

With --policy a process beside the program drives KSM until all that it started have ended, and then puts back what \
there was. One such process drives at a time; others take over when it ends. `guided` enrols nothing whole: it takes a \
census of the tree now and then and merges what pays and lasts; put it before mpirun, so that it sees all ranks.

With --engine user a preloaded library merges what is equal in large allocations of the program and of what it starts, \
with nobody but the members of its domain. An MPI program is merged when MPI_Barrier or MPI_Allreduce return, if no other \
threads run than MPI's; any other program beside its work, for which writers have to wait for moments: that takes \
Linux 6.4 and userfaultfd (CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd). Memory that \
MPI may write to at any time (receives that are not waited for, windows) is left alone, and so is all of a process that \
has a device, direct I/O or io_uring open. Not for programs that pin memory in other ways, or that make system calls on \
large memory past the C library: those are not seen.

Exit status: the program's; 127 it was not found, 126 it cannot be executed, 2 pagefold could not enrol it.";

/// Arguments of `run`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArguments {
    /// Who merges
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = MergeEngine::Kernel)]
    engine: MergeEngine,
    /// With whom to merge, for the engine `user`: whoever names the same domain [default: its MPI job, else itself]
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// By how much the program may become slower, for the engine `user` [default: 2]
    #[arg(long, value_name = "PERCENT", value_parser = parse_cpu_share)]
    max_slowdown: Option<f64>,
    /// For how long each process that is merged runs at least, for the engine `user`: merges that are expected to pay
    /// may take what --max-slowdown allows of that time from the beginning on, which is when most is to be merged
    /// [default: 0]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    lifetime: Option<Duration>,
    /// The smallest allocation that is merged, for the engine `user` [default: 1MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    threshold: Option<Bytes>,
    /// Keep what is merged on each NUMA node by itself, for the engine `user`: for processes that stay on a node
    #[arg(long)]
    per_node: bool,
    /// Have each process say on standard error at its end what was merged, for the engine `user`
    #[arg(long)]
    report: bool,
    /// How to enrol it [default: the first of these that works]
    #[arg(long, value_enum, value_name = "WAY")]
    way: Option<ProgramEnrollMethod>,
    /// Merge across trust domains too: enrol it although somebody of another one is. Whoever can write to a merged page
    /// can tell by the time it takes that somebody else has the same content: only for domains that may know that of
    /// each other
    #[arg(long)]
    across_domains: bool,
    /// Merge also a virtual machine whose owner forbids it: QEMU's mem-merge=off, merge=off of a memory backend,
    /// libvirt's <nosharepages/>
    #[arg(long)]
    ignore_opt_out: bool,
    /// Run it also where it cannot or must not be enrolled, or KSM not be driven, with a warning
    #[arg(long)]
    best_effort: bool,
    /// Drive KSM while it runs: default, ksmtuned, advisor or advisor:SECONDS, flat-out, guided or a TOML file
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// ksmd's share of one CPU at most, for the policy `guided` [default: 10]
    #[arg(long, value_name = "PERCENT", value_parser = parse_cpu_share, requires = "policy")]
    cpu: Option<f64>,
    /// Drive KSM although another program that writes its settings runs
    #[arg(long, requires = "policy")]
    force: bool,
    /// Start it without address space randomisation, so that more pages of several processes are alike
    ///
    /// Pages with addresses in them differ between processes whose memory lies elsewhere. Without randomisation
    /// whoever finds a memory error in the program knows the addresses to attack: for jobs that read trusted input. All
    /// that the program starts is without it too, but for setuid programs.
    #[arg(long)]
    no_aslr: bool,
    /// Say on standard error which way was taken
    #[arg(long, short, visible_alias = "how")]
    verbose: bool,
    /// Say which way would be taken, and why the others would not, and start nothing
    #[arg(long)]
    dry_run: bool,
    /// Say whether this process is enrolled
    #[arg(long, hide = true)]
    probe: bool,
    /// The program and its arguments
    #[arg(required_unless_present = "probe", trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Who merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MergeEngine {
    /// The kernel's KSM
    Kernel,
    /// A library in the program, without KSM and without root
    User,
}

/// Become the program.
pub fn run(options: &RunArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if global.host != "live" {
        bail!("--host {}: a program can be started on this machine only", global.host);
    }
    if options.probe {
        enroll_method::run_probe()?;
        return Ok(CommandOutcome::Done);
    }
    let command: Vec<CString> =
        options.command.iter().map(|word| CString::new(word.as_bytes())).collect::<Result<_, _>>()?;
    let name = options.command.first().context("no program was named")?;
    let config = Config::load(global)?.with_opt_out_ignored(options.ignore_opt_out);
    let short = Path::new(name).file_name().unwrap_or(name).to_string_lossy();
    let process = future_process(&options.command, &short);
    let excluded = exclusion_reason(&config, &process, &short);
    options.check_engine_options()?;
    if options.engine == MergeEngine::User {
        let variables = match excluded.map_or_else(|| user_engine::prepare_variables(options, name), |why| bail!(why)) {
            Ok(variables) => variables,
            Err(why) if options.best_effort && !options.dry_run => {
                eprintln!("pagefold: not merged: {why:#}");
                Vec::new()
            }
            Err(why) if options.dry_run => return Err(why),
            Err(why) => bail!("{why:#}; --best-effort runs it all the same"),
        };
        if options.dry_run {
            crate::output::print_stdout(&format!(
                "would be merged in user space, {}\n",
                user_engine::describe(&variables)
            ))?;
            return Ok(CommandOutcome::Done);
        }
        if options.verbose && !variables.is_empty() {
            eprintln!("pagefold: merged in user space, {}", user_engine::describe(&variables));
        }
        return exec_program(options, name, &command, &variables);
    }
    let domains = config.domains(None);
    let own = domains.domain(&process);
    let drive = |name| policy_driver::PolicyDriver::new(name, options.cpu, options.across_domains, config, global);
    let policy = options.policy.as_deref().map(drive).transpose()?;
    let guided = policy.as_ref().is_some_and(policy_driver::PolicyDriver::is_guided);
    // What is merged range by range must not be enrolled whole.
    let (mut ready, passed) =
        if guided || excluded.is_some() { (None, Vec::new()) } else { choose_enroll_method(options, name) };
    // Looked for now that this process is enrolled, if it inherits that: of two that start at once one sees the other,
    // where the kernel tells who is (from 6.14 on).
    let neighbours = match &ready {
        Some(_) if !options.across_domains => Some(
            EnrolledDomains::observe(&LiveHost::new(), &domains, Some(process.id)).map_err(|why| format!("{why:#}")),
        ),
        _ => None,
    };
    let foreign = match &neighbours {
        Some(Ok(neighbours)) => foreign_domain_reason(neighbours, &own, &short),
        Some(Err(why)) => Some(why.clone()),
        None => None,
    };
    if foreign.is_some()
        && let Some(ready) = ready.take()
    {
        ready.undo_preparation()?;
    }
    let refused = excluded.or(foreign);
    let unseen = matches!(neighbours, Some(Ok(EnrolledDomains { may_be_incomplete: true, .. })))
        .then_some(HIDDEN_PROCESSES_WARNING);
    if options.dry_run {
        if let Some(why) = refused {
            bail!(why);
        }
        if guided {
            crate::output::print_stdout("would be merged range by range while it runs\n")?;
            return Ok(CommandOutcome::Done);
        }
        return print_dry_run(ready.as_ref(), &passed, unseen);
    }
    match &ready {
        Some(ready) if options.verbose => {
            eprintln!("pagefold: enrolled in KSM {}{}", ready.describe(), rejected_methods_note(&passed));
            unseen.iter().for_each(|unseen| eprintln!("pagefold: {unseen}"));
        }
        Some(_) => {}
        None if guided && refused.is_none() => {}
        None => {
            let why = refused.unwrap_or_else(|| failure_summary(&passed));
            if !options.best_effort {
                bail!("{why}; --best-effort runs it all the same");
            }
            eprintln!("pagefold: not enrolled in KSM: {why}");
        }
    }
    let policy = match policy.map(|policy| policy.check(options.force, global).map(|()| policy)).transpose() {
        Err(why) if options.best_effort => {
            eprintln!("pagefold: KSM is not driven: {why:#}");
            None
        }
        Err(why) => return Err(why.context("not started, which --best-effort does all the same")),
        Ok(policy) => policy,
    };
    // Held until exec, which closes them.
    let _companion = match &ready {
        Some(PreparedEnroll::Companion) => {
            let exclusions = crate::config::Config::load(global)?.exclusions;
            let excluded = |process: &Process| exclusions.reason(process);
            Some(spawn_companion(StderrPolicy::KeepIfNoReader, |this| {
                companion::enroll_tree(&LiveHost::new(), this, &excluded)
            })?)
        }
        Some(PreparedEnroll::Preload(value)) => {
            let library = enroll_method::last_preloaded_file(value);
            let watch =
                spawn_companion(StderrPolicy::Keep, |this| preload_check::check_tree(&LiveHost::new(), this, library));
            watch.inspect_err(|why| eprintln!("pagefold: what comes of preloading is not looked at: {why:#}")).ok()
        }
        _ => None,
    };
    let enrolled = ready == Some(PreparedEnroll::Inherited);
    let drive = |drive: policy_driver::PolicyDriver| {
        spawn_companion(StderrPolicy::KeepIfNoReader, move |this| {
            // The program is to be enrolled, and not who stays beside it.
            if enrolled && let Err(why) = launch::set_merge_any(false) {
                eprintln!("pagefold: what drives KSM is enrolled too: {why}");
            }
            drive.run(this);
        })
    };
    let _driver = policy.map(drive).transpose()?;
    let variables: Vec<(CString, CString)> = match ready {
        Some(PreparedEnroll::Preload(value)) => vec![(c"LD_PRELOAD".to_owned(), value)],
        _ => Vec::new(),
    };
    exec_program(options, name, &command, &variables)
}

/// Become the program with some variables. Returns only with an error, and ends where there is no such program.
fn exec_program(
    options: &RunArguments,
    name: &OsString,
    command: &[CString],
    variables: &[(CString, CString)],
) -> anyhow::Result<CommandOutcome> {
    if options.no_aslr {
        launch::disable_address_randomization().context("personality(ADDR_NO_RANDOMIZE): leave out --no-aslr")?;
    }
    launch::discard_pending_sigchld();
    let error = launch::exec_program(&command[0], command, variables);
    eprintln!("pagefold: {}: {error}", name.display());
    // As shells and env(1) do.
    process::exit(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

impl RunArguments {
    /// Whether all that was said is for the same engine.
    fn check_engine_options(&self) -> anyhow::Result<()> {
        let user = [
            ("--domain", self.domain.is_some()),
            ("--max-slowdown", self.max_slowdown.is_some()),
            ("--lifetime", self.lifetime.is_some()),
            ("--threshold", self.threshold.is_some()),
            ("--per-node", self.per_node),
            ("--report", self.report),
        ];
        let kernel = [
            ("--way", self.way.is_some()),
            ("--across-domains", self.across_domains),
            ("--policy", self.policy.is_some()),
        ];
        let (foreign, engine): (&[_], _) =
            if self.engine == MergeEngine::User { (&kernel, "kernel") } else { (&user, "user") };
        match foreign.iter().find(|(_, given)| *given) {
            Some((name, _)) => bail!("{name} is for --engine {engine}"),
            None => Ok(()),
        }
    }
}

/// What this process will be once it is the program, with its user, cgroup and container. Known by the name that it is
/// started by: whom a setuid program runs as, what it turns into or starts in its turn is not.
fn future_process(command: &[OsString], name: &str) -> Process {
    let host = LiveHost::new();
    let this = host.open(Pid(process::id())).and_then(|handle| observe::process(&host, &*handle));
    let unknown = |why| Process::absent(ProcessId { pid: Pid(process::id()), start_time: 0 }, &why);
    let this = this.unwrap_or_else(unknown);
    let arguments: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let vm = Identity::new(&arguments, &BTreeMap::new(), this.cgroup.as_deref().ok()).vm;
    Process {
        comm: name.chars().take(MAX_TASK_NAME_BYTES).collect(),
        identity: Identity { vm, ..this.identity },
        arguments: Ok(arguments),
        ..this
    }
}

/// Why the configuration has a program left alone, if it does.
fn exclusion_reason(config: &Config, process: &Process, name: &str) -> Option<String> {
    Some(format!("{name} must not be enrolled in KSM: {}", config.exclusions.reason(process)?))
}

/// Why a program must not be enrolled whole beside those who are enrolled, if so.
fn foreign_domain_reason(enrolled: &EnrolledDomains, own: &TrustDomain, name: &str) -> Option<String> {
    let other = enrolled.domains.iter().find(|domain| *domain != own)?;
    Some(format!(
        "{name} is of the trust domain {own} and would share pages with {other}, of which somebody is enrolled in KSM \
         already, and {SIDE_CHANNEL_NOTE}: --policy guided keeps them apart, --across-domains does not"
    ))
}

/// The first way that works, and why those before it do not.
fn choose_enroll_method(
    options: &RunArguments,
    name: &OsString,
) -> (Option<PreparedEnroll>, Vec<(ProgramEnrollMethod, anyhow::Error)>) {
    let mut passed = Vec::new();
    for way in ProgramEnrollMethod::BEST_FIRST.into_iter().filter(|&way| options.way.is_none_or(|wanted| wanted == way))
    {
        match enroll_method::prepare_method(way, name) {
            Ok(ready) => return (Some(ready), passed),
            Err(why) => passed.push((way, why)),
        }
    }
    (None, passed)
}

fn print_dry_run(
    prepared: Option<&PreparedEnroll>,
    rejected: &[(ProgramEnrollMethod, anyhow::Error)],
    hidden_warning: Option<&str>,
) -> anyhow::Result<CommandOutcome> {
    match prepared {
        Some(ready) => {
            let unseen = hidden_warning.map_or_else(String::new, |unseen| format!("{unseen}\n"));
            crate::output::print_stdout(&format!(
                "would be enrolled in KSM {}{}\n{unseen}",
                ready.describe(),
                rejected_methods_note(rejected)
            ))?;
            Ok(CommandOutcome::Done)
        }
        None => bail!("{}", failure_summary(rejected)),
    }
}

/// Why better ways were passed over, in parentheses.
fn rejected_methods_note(rejected: &[(ProgramEnrollMethod, anyhow::Error)]) -> String {
    if rejected.is_empty() { String::new() } else { format!(" ({})", join_reasons(rejected)) }
}

/// Why nothing works, in a line.
fn failure_summary(rejected: &[(ProgramEnrollMethod, anyhow::Error)]) -> String {
    if LiveHost::new().read("sys/kernel/mm/ksm/run") == Err(Absent::NotOnThisKernel) {
        return "there is no /sys/kernel/mm/ksm: boot a kernel with CONFIG_KSM=y, or mount /sys".to_owned();
    }
    format!("cannot enrol it in KSM: {}", join_reasons(rejected))
}

fn join_reasons(rejected: &[(ProgramEnrollMethod, anyhow::Error)]) -> String {
    rejected.iter().map(|(way, why)| format!("{way}: {why:#}")).collect::<Vec<_>>().join("; ")
}

/// Leave a process behind that does something about this one, once it is the program.
fn spawn_companion(errors: StderrPolicy, work: impl FnOnce(ProcessId)) -> anyhow::Result<launch::CompanionHandle> {
    let this = LiveHost::new().open(Pid(process::id())).map_err(anyhow::Error::msg)?.id();
    launch::spawn_companion(errors, || work(this)).context("cannot leave a process behind")
}
