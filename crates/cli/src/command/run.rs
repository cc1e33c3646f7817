//! `pagefold run`: starts a program with its process tree enrolled in KSM, or merged in user space ([`user_engine`]),
//! and becomes it.
//!
//! This process becomes the program by exec, so PID, parent, terminal, process group, limits and descriptors are the
//! same as without Pagefold. It tries the enroll methods ([`enroll_method`]), best first, on a copy of this program.
//! For prctl, which is inherited, that is proof. Whether a preloaded library worked is checked after exec
//! ([`preload_check`]).

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
use pagefold_base::domain::{DomainConfig, TrustDomain};
use pagefold_base::identity::Identity;
use pagefold_base::process::Process;
use pagefold_base::{Absent, Bytes, Pid, ProcessId};
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use pagefold_linux::launch::{self, CompanionHandle, StderrPolicy};
use policy_driver::PolicyDriver;
use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process;
use std::time::Duration;

/// The longest program name that the kernel stores (include/linux/sched.h, `TASK_COMM_LEN`, less the NUL).
const MAX_TASK_NAME_BYTES: usize = 15;

/// The warning where not all processes of the host are visible.
const HIDDEN_PROCESSES_WARNING: &str = "processes may be enrolled that are not visible here, also of other trust \
    domains (root on the host sees all, since Linux 6.14): identical pages merge with theirs";

const EXAMPLES: &str = "\
Examples:
  pagefold run -- ./server --port 80            enrolled, with all processes that it starts
  pagefold run --verbose -- make -j8            also print the method to standard error
  mpirun -np 4 pagefold run -- ./solver         every rank
  mpirun -np 4 pagefold run --no-aslr -- ./solver
  pagefold run --policy guided -- mpirun -np 4 ./solver
                                                merge pages with net savings while the job runs
  pagefold run --dry-run -- ./program           only print the method
  mpirun -np 4 pagefold run --engine user -- ./solver
                                                merge in user space, at barriers, without KSM and root
  pagefold run --engine user --report -- python3 crunch.py

The program replaces pagefold: same process, exit status, signals and terminal. Enrolled memory merges while ksmd runs \
(/sys/kernel/mm/ksm/run). Do not enroll programs that hold secrets. A program that the configuration excludes by name, \
user, cgroup or container is refused (see `pagefold config default`); its child processes are not checked.

KSM merges all enrolled memory of the host. A process that times writes to its own memory can tell whether another \
process has the same page. So a program is not enrolled whole while a process of another trust domain is enrolled, \
unless --across-domains is given. By default, each user, each virtual machine and each setuid program is a \
domain; the configuration can change that. `--policy guided` keeps domains apart. Only root sees the enrolled processes of other \
users. Without root the program is enrolled beside them; --verbose and --dry-run say so.

Methods: prctl is inherited by all processes that the program starts, and covers all their memory. preload sets \
LD_PRELOAD and needs programs that are linked dynamically with glibc. Where the kernel refuses prctl in the program \
too, it adds a thread to each. Child processes are not enrolled if they are linked statically, setuid, or started \
without that variable. A companion process reports these on standard error, for processes that start in the first ten \
seconds; if standard error is a pipe, for the program only. inject needs permission to trace the program. It leaves a \
companion process until the program and all its descendants have ended.

With --policy, a companion process controls KSM until the program and all its descendants have ended, and then \
restores the settings. Only one companion controls KSM at a time; others take over when it ends. `guided` does not \
enroll whole processes. It repeatedly takes a census of the process tree and merges stable pages with net savings. Put \
it before mpirun, so that it covers all ranks.

With --engine user, a preloaded library merges identical pages in large allocations of the program and its children, \
only with members of the same domain. It merges an MPI program when MPI_Barrier or MPI_Allreduce returns, if no \
threads but MPI's run. It merges other programs while they run; writers then wait for short times. That needs \
Linux 6.4 and userfaultfd (CAP_SYS_PTRACE, vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd). It skips \
memory that MPI may write to at any time (pending receives, windows). It skips processes that have a device, direct \
I/O or io_uring open. Do not use it for programs that pin memory in other ways, or that make system calls on large \
memory without the C library: the library does not see these.

Exit status: that of the program; 127 not found, 126 cannot be executed, 2 pagefold could not enroll it.";

/// Arguments of `run`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArguments {
    /// The merge engine
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = MergeEngine::Kernel)]
    engine: MergeEngine,
    /// With --engine user: merge with programs of the same domain name [default: its MPI job, otherwise itself]
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// With --engine user: maximum slowdown of the program [default: 2]
    #[arg(long, value_name = "PERCENT", value_parser = parse_cpu_share)]
    max_slowdown: Option<f64>,
    /// With --engine user: a run time that each merged process is sure to reach. The CPU time that --max-slowdown
    /// allows for it may be spent early, when there is most to merge [default: 0]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    min_runtime: Option<Duration>,
    /// With --engine user: the smallest allocation that is merged [default: 1MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    min_block: Option<Bytes>,
    /// With --engine user: merge each NUMA node separately, for processes that stay on a node
    #[arg(long)]
    per_node: bool,
    /// With --engine user: each process prints its merge results to standard error when it ends
    #[arg(long)]
    report: bool,
    /// The enroll method [default: the first of these that works]
    #[arg(long, value_enum, value_name = "METHOD")]
    method: Option<ProgramEnrollMethod>,
    /// Enroll the program even if a process of another trust domain is enrolled. A process can tell by the time of a
    /// write that another process has the same page content: use this only if these domains may learn each other's page
    /// contents
    #[arg(long)]
    across_domains: bool,
    /// Also merge a virtual machine whose owner forbids it: QEMU's mem-merge=off, merge=off of a memory backend,
    /// libvirt's `<nosharepages/>`
    #[arg(long)]
    ignore_opt_out: bool,
    /// If the program cannot or must not be enrolled, or KSM cannot be controlled, print a warning and run it anyway
    #[arg(long)]
    best_effort: bool,
    /// Control KSM while the program runs: default, ksmtuned, advisor or advisor:SECONDS, flat-out, guided or a TOML
    /// file
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// With --policy guided: maximum CPU use of ksmd, as a percentage of one CPU [default: 10]
    #[arg(long, value_name = "PERCENT", value_parser = parse_cpu_share, requires = "policy")]
    cpu: Option<f64>,
    /// Control KSM although another program that writes its settings is running
    #[arg(long, requires = "policy")]
    force: bool,
    /// Start the program without address space randomization, so that more pages of its processes are identical
    ///
    /// Pages that contain addresses differ between processes with different address layouts. Without randomization, an
    /// attacker who finds a memory error in the program knows its addresses: use this only for jobs with trusted input.
    /// Child processes inherit it, except setuid programs.
    #[arg(long)]
    no_aslr: bool,
    /// Print the enroll method to standard error
    #[arg(long, short, visible_alias = "how")]
    verbose: bool,
    /// Print the enroll method, and why better methods do not work; start nothing
    #[arg(long)]
    dry_run: bool,
    /// Print whether this process is enrolled
    #[arg(long, hide = true)]
    probe: bool,
    /// The program and its arguments
    #[arg(required_unless_present = "probe", trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// The merge engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MergeEngine {
    /// The kernel's KSM
    Kernel,
    /// A library in the program, without KSM and without root
    User,
}

/// The program to start.
struct Program<'o> {
    /// As given.
    name: &'o OsString,
    file_name: String,
    command: Vec<CString>,
    /// This process as it will be after exec.
    process: Process,
}

impl<'o> Program<'o> {
    fn new(command: &'o [OsString]) -> anyhow::Result<Self> {
        let arguments = command.iter().map(|word| CString::new(word.as_bytes())).collect::<Result<_, _>>()?;
        let name = command.first().context("no program was named")?;
        let file_name = Path::new(name).file_name().unwrap_or(name).to_string_lossy().into_owned();
        let process = future_process(command, &file_name);
        Ok(Self { name, file_name, command: arguments, process })
    }
}

/// How the program is enrolled in KSM, or why not.
struct ProgramEnrollment {
    /// `None` if no method works, if the program must not be enrolled, or if it is merged range by range.
    prepared: Option<PreparedEnroll>,
    /// Better methods, and why they do not work.
    rejected: Vec<(ProgramEnrollMethod, anyhow::Error)>,
    /// Why the program must not be enrolled, if so.
    refusal: Option<String>,
    /// The warning where not all processes are visible.
    hidden_warning: Option<&'static str>,
}

/// Enroll this process and become the program.
pub fn run(options: &RunArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if global.host != "live" {
        bail!("--host {}: a program can be started on this machine only", global.host);
    }
    if options.probe {
        enroll_method::run_probe()?;
        return Ok(CommandOutcome::Done);
    }
    let program = Program::new(&options.command)?;
    let config = Config::load(global)?.with_opt_out_ignored(options.ignore_opt_out);
    let exclusion = exclusion_reason(&config, &program);
    options.check_engine_options()?;
    match options.engine {
        MergeEngine::User => run_with_user_engine(options, &program, exclusion),
        MergeEngine::Kernel => run_with_ksm(options, global, &program, config, exclusion),
    }
}

/// Become the program, merged in user space.
fn run_with_user_engine(
    options: &RunArguments,
    program: &Program<'_>,
    exclusion: Option<String>,
) -> anyhow::Result<CommandOutcome> {
    let prepared = exclusion.map_or_else(|| user_engine::prepare_variables(options, program.name), |why| bail!(why));
    let variables = match prepared {
        Ok(variables) => variables,
        Err(why) if options.best_effort && !options.dry_run => {
            eprintln!("pagefold: not merged: {why:#}");
            Vec::new()
        }
        Err(why) if options.dry_run => return Err(why),
        Err(why) => bail!("{why:#}; --best-effort runs it anyway"),
    };
    if options.dry_run {
        let description = user_engine::describe(&variables);
        crate::output::print_stdout(&format!("would be merged in user space, {description}\n"))?;
        return Ok(CommandOutcome::Done);
    }
    if options.verbose && !variables.is_empty() {
        eprintln!("pagefold: merged in user space, {}", user_engine::describe(&variables));
    }
    exec_program(options, program, &variables)
}

/// Become the program, merged by KSM.
fn run_with_ksm(
    options: &RunArguments,
    global: &GlobalOptions,
    program: &Program<'_>,
    config: Config,
    exclusion: Option<String>,
) -> anyhow::Result<CommandOutcome> {
    let domains = config.domains(None);
    let new_driver = |name| PolicyDriver::new(name, options.cpu, options.across_domains, config, global);
    let driver = options.policy.as_deref().map(new_driver).transpose()?;
    let is_guided = driver.as_ref().is_some_and(PolicyDriver::is_guided);
    let enrollment = ProgramEnrollment::prepare(options, program, &domains, is_guided, exclusion)?;
    if options.dry_run {
        return enrollment.print_dry_run(is_guided);
    }
    enrollment.report(options, is_guided)?;
    let driver = check_driver(driver, options, global)?;
    // These handles stay open until exec closes them.
    let _companion = start_enroll_companion(enrollment.prepared.as_ref(), global)?;
    let is_inherited = enrollment.prepared == Some(PreparedEnroll::Inherited);
    let _driver = driver.map(|driver| start_policy_companion(driver, is_inherited)).transpose()?;
    let variables = match enrollment.prepared {
        Some(PreparedEnroll::Preload(value)) => vec![(c"LD_PRELOAD".to_owned(), value)],
        _ => Vec::new(),
    };
    exec_program(options, program, &variables)
}

impl ProgramEnrollment {
    /// Enroll this process, or prepare to enroll the program, unless the configuration or an enrolled process forbids
    /// it.
    fn prepare(
        options: &RunArguments,
        program: &Program<'_>,
        domains: &DomainConfig,
        is_guided: bool,
        exclusion: Option<String>,
    ) -> anyhow::Result<Self> {
        // With `guided`, which merges range by range, the process must not be enrolled whole.
        let (mut prepared, rejected) = if is_guided || exclusion.is_some() {
            (None, Vec::new())
        } else {
            choose_enroll_method(options, program.name)
        };
        // Checked after this process is enrolled, if the method is inherited. So if two programs start at once, at
        // least one sees the other, where the kernel reports enrolled processes (since 6.14).
        let enrolled = (prepared.is_some() && !options.across_domains)
            .then(|| EnrolledDomains::observe(&LiveHost::new(), domains, Some(program.process.id)));
        let foreign_domain = match &enrolled {
            Some(Ok(enrolled)) => foreign_domain_reason(enrolled, &domains.domain(&program.process), program),
            Some(Err(why)) => Some(format!("{why:#}")),
            None => None,
        };
        if foreign_domain.is_some()
            && let Some(prepared) = prepared.take()
        {
            prepared.undo_preparation()?;
        }
        let hidden_warning = matches!(enrolled, Some(Ok(EnrolledDomains { may_be_incomplete: true, .. })))
            .then_some(HIDDEN_PROCESSES_WARNING);
        Ok(Self { prepared, rejected, refusal: exclusion.or(foreign_domain), hidden_warning })
    }

    fn print_dry_run(&self, is_guided: bool) -> anyhow::Result<CommandOutcome> {
        if let Some(why) = &self.refusal {
            bail!("{why}");
        }
        let text = match &self.prepared {
            _ if is_guided => "would be merged range by range while it runs\n".to_owned(),
            Some(prepared) => {
                let warning = self.hidden_warning.map_or_else(String::new, |warning| format!("{warning}\n"));
                let rejected = rejected_methods_note(&self.rejected);
                format!("would be enrolled in KSM {}{rejected}\n{warning}", prepared.describe())
            }
            None => bail!("{}", failure_summary(&self.rejected)),
        };
        crate::output::print_stdout(&text)?;
        Ok(CommandOutcome::Done)
    }

    /// Report the method to standard error with --verbose. Without a method, fail or warn.
    fn report(&self, options: &RunArguments, is_guided: bool) -> anyhow::Result<()> {
        match &self.prepared {
            Some(prepared) if options.verbose => {
                let rejected = rejected_methods_note(&self.rejected);
                eprintln!("pagefold: enrolled in KSM {}{rejected}", prepared.describe());
                self.hidden_warning.iter().for_each(|warning| eprintln!("pagefold: {warning}"));
            }
            Some(_) => {}
            None if is_guided && self.refusal.is_none() => {}
            None => {
                let why = self.refusal.clone().unwrap_or_else(|| failure_summary(&self.rejected));
                if !options.best_effort {
                    bail!("{why}; --best-effort runs it anyway");
                }
                eprintln!("pagefold: not enrolled in KSM: {why}");
            }
        }
        Ok(())
    }
}

/// Check that the policy can control KSM. With --best-effort, a policy that cannot is left out with a warning.
fn check_driver(
    driver: Option<PolicyDriver>,
    options: &RunArguments,
    global: &GlobalOptions,
) -> anyhow::Result<Option<PolicyDriver>> {
    match driver.map(|driver| driver.check(options.force, global).map(|()| driver)).transpose() {
        Err(why) if options.best_effort => {
            eprintln!("pagefold: KSM is not controlled: {why:#}");
            Ok(None)
        }
        checked => checked.context("the program was not started; --best-effort runs it anyway"),
    }
}

/// Start the companion process of the enroll method, if it needs one: it enrolls the program by injection, or checks
/// that preloading works.
fn start_enroll_companion(
    prepared: Option<&PreparedEnroll>,
    global: &GlobalOptions,
) -> anyhow::Result<Option<CompanionHandle>> {
    match prepared {
        Some(PreparedEnroll::Companion) => {
            let exclusions = Config::load(global)?.exclusions;
            let exclusion_reason = |process: &Process| exclusions.reason(process);
            let enroll = |this| companion::enroll_tree(&LiveHost::new(), this, &exclusion_reason);
            spawn_companion(StderrPolicy::KeepIfNoReader, enroll).map(Some)
        }
        Some(PreparedEnroll::Preload(value)) => {
            let library = enroll_method::last_preloaded_file(value);
            let check = |this| preload_check::check_tree(&LiveHost::new(), this, library);
            let checker = spawn_companion(StderrPolicy::Keep, check);
            Ok(checker.inspect_err(|why| eprintln!("pagefold: cannot check whether preloading works: {why:#}")).ok())
        }
        _ => Ok(None),
    }
}

/// Start the companion process that controls KSM.
fn start_policy_companion(driver: PolicyDriver, is_enrolled: bool) -> anyhow::Result<CompanionHandle> {
    spawn_companion(StderrPolicy::KeepIfNoReader, move |this| {
        // Only the program must be enrolled, not its companion process.
        if is_enrolled && let Err(why) = launch::set_merge_any(false) {
            eprintln!("pagefold: the companion process that controls KSM stays enrolled: {why}");
        }
        driver.run(this);
    })
}

/// Become the program, with additional environment variables. If exec fails, the process exits; other errors are
/// returned.
fn exec_program(
    options: &RunArguments,
    program: &Program<'_>,
    variables: &[(CString, CString)],
) -> anyhow::Result<CommandOutcome> {
    if options.no_aslr {
        launch::disable_address_randomization().context("personality(ADDR_NO_RANDOMIZE): leave out --no-aslr")?;
    }
    launch::discard_pending_sigchld();
    let error = launch::exec_program(&program.command[0], &program.command, variables);
    eprintln!("pagefold: {}: {error}", program.name.display());
    // As shells and env(1) do.
    process::exit(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

impl RunArguments {
    /// Check that all given options are for the same engine.
    fn check_engine_options(&self) -> anyhow::Result<()> {
        let user = [
            ("--domain", self.domain.is_some()),
            ("--max-slowdown", self.max_slowdown.is_some()),
            ("--min-runtime", self.min_runtime.is_some()),
            ("--min-block", self.min_block.is_some()),
            ("--per-node", self.per_node),
            ("--report", self.report),
        ];
        let kernel = [
            ("--method", self.method.is_some()),
            ("--across-domains", self.across_domains),
            ("--policy", self.policy.is_some()),
        ];
        let (other_options, engine): (&[_], _) =
            if self.engine == MergeEngine::User { (&kernel, "kernel") } else { (&user, "user") };
        match other_options.iter().find(|(_, given)| *given) {
            Some((name, _)) => bail!("{name} is for --engine {engine}"),
            None => Ok(()),
        }
    }
}

/// This process as it will be after exec, with its user, cgroup and container. It is identified by its program name.
/// The user of a setuid program, later execs and child processes are not known.
fn future_process(command: &[OsString], name: &str) -> Process {
    let host = LiveHost::new();
    let this = host.open(Pid(process::id())).and_then(|handle| observe::process(&host, &*handle));
    let unread_process = |why| Process::absent(ProcessId { pid: Pid(process::id()), start_time: 0 }, &why);
    let this = this.unwrap_or_else(unread_process);
    let arguments: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let vm = Identity::new(&arguments, &BTreeMap::new(), this.cgroup.as_deref().ok()).vm;
    Process {
        comm: name.chars().take(MAX_TASK_NAME_BYTES).collect(),
        identity: Identity { vm, ..this.identity },
        arguments: Ok(arguments),
        ..this
    }
}

/// Why the configuration excludes a program, if it does.
fn exclusion_reason(config: &Config, program: &Program<'_>) -> Option<String> {
    let reason = config.exclusions.reason(&program.process)?;
    Some(format!("{} must not be enrolled in KSM: {reason}", program.file_name))
}

/// Why a program must not be enrolled whole beside the enrolled processes, if so.
fn foreign_domain_reason(
    enrolled: &EnrolledDomains,
    own_domain: &TrustDomain,
    program: &Program<'_>,
) -> Option<String> {
    let foreign_domain = enrolled.domains.iter().find(|domain| *domain != own_domain)?;
    let name = &program.file_name;
    Some(format!(
        "{name} is in the trust domain {own_domain} and would share pages with {foreign_domain}, which has a process \
         enrolled in KSM, and {SIDE_CHANNEL_NOTE}: --policy guided keeps domains apart, --across-domains does not"
    ))
}

/// The first method that works, and why better ones do not.
fn choose_enroll_method(
    options: &RunArguments,
    name: &OsString,
) -> (Option<PreparedEnroll>, Vec<(ProgramEnrollMethod, anyhow::Error)>) {
    let is_allowed = |method: &ProgramEnrollMethod| options.method.is_none_or(|only| only == *method);
    let mut rejected = Vec::new();
    for method in ProgramEnrollMethod::BEST_FIRST.into_iter().filter(is_allowed) {
        match enroll_method::prepare_method(method, name) {
            Ok(prepared) => return (Some(prepared), rejected),
            Err(why) => rejected.push((method, why)),
        }
    }
    (None, rejected)
}

/// Why better methods were rejected, in parentheses.
fn rejected_methods_note(rejected: &[(ProgramEnrollMethod, anyhow::Error)]) -> String {
    if rejected.is_empty() { String::new() } else { format!(" ({})", join_reasons(rejected)) }
}

/// Why no method works, in one line.
fn failure_summary(rejected: &[(ProgramEnrollMethod, anyhow::Error)]) -> String {
    if LiveHost::new().read("sys/kernel/mm/ksm/run") == Err(Absent::NotOnThisKernel) {
        return "there is no /sys/kernel/mm/ksm: boot a kernel with CONFIG_KSM=y, or mount /sys".to_owned();
    }
    format!("cannot enroll it in KSM: {}", join_reasons(rejected))
}

fn join_reasons(rejected: &[(ProgramEnrollMethod, anyhow::Error)]) -> String {
    rejected.iter().map(|(method, why)| format!("{method}: {why:#}")).collect::<Vec<_>>().join("; ")
}

/// Start a companion process that runs `work` for this process after it has become the program.
fn spawn_companion(stderr_policy: StderrPolicy, work: impl FnOnce(ProcessId)) -> anyhow::Result<CompanionHandle> {
    let this = LiveHost::new().open(Pid(process::id())).map_err(anyhow::Error::msg)?.id();
    launch::spawn_companion(stderr_policy, || work(this)).context("cannot start a companion process")
}
