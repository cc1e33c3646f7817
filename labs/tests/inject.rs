//! System calls injected into programs in every state that could fail, and the injector killed at every step.
//!
//! The target checks itself (`tests/targets/states.c`: registers, vectors, memory, stack, signal mask, results of its
//! waits) and prints OK at the end. ksmd stays off, so no lock is needed. Without root, or if the C compiler or the
//! kernel cannot provide a kind of target, a test prints `skipped: ` and the reason. `PAGEFOLD_SOAK_CYCLES=N` sets the
//! number of cycles, as `labs/soak.sh` does.

#![forbid(unsafe_code)]

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagefold_host::Host;
use pagefold_labs::client::{self, RunningLab};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The path of `pagefold-lab`, wherever these tests run.
fn lab_binary() -> PathBuf {
    client::lab_binary().expect("cargo has built it")
}

/// The directory for compiled targets, or `PAGEFOLD_TARGETS` with precompiled ones, for a machine without a compiler.
/// Returns whether they are precompiled.
fn target_directory() -> (PathBuf, bool) {
    let made = std::env::var_os("PAGEFOLD_TARGETS").map(PathBuf::from);
    (made.clone().unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into()), made.is_some())
}

/// The program, dynamically or statically linked; `None` if it cannot be built.
fn build_target(kind: &str) -> Option<PathBuf> {
    static PROGRAMS: OnceLock<[Option<PathBuf>; 2]> = OnceLock::new();
    let build = |name: &str, more: &[&str]| {
        let (directory, made) = target_directory();
        if made {
            return Some(directory.join(name)).filter(|file| file.exists());
        }
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/targets/states.c");
        let file = directory.join(format!("{name}-{}", std::process::id()));
        let mut compiler = Command::new("cc");
        // Stack frames must be able to contain arrays that were never touched.
        compiler
            .args(["-O1", "-Wall", "-Werror", "-pthread", "-fno-stack-clash-protection", source, "-o"])
            .arg(&file)
            .args(more);
        compiler.status().is_ok_and(|status| status.success()).then_some(file)
    };
    let [dynamic, fixed] = PROGRAMS.get_or_init(|| [build("states", &[]), build("states-static", &["-static"])]);
    if kind == "static" { fixed.clone() } else { dynamic.clone() }
}

/// Whether these tests can run; prints the reason if not.
fn can_run() -> bool {
    let why = if !nix::unistd::geteuid().is_root() {
        "needs root: a container may forbid its users to trace"
    } else if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        "the targets are written for x86-64 and 64-bit Arm"
    } else if build_target("dynamic").is_none() {
        "needs a C compiler"
    } else if !Path::new("/sys/kernel/mm/ksm").exists() {
        "this kernel has no KSM"
    } else {
        return true;
    };
    println!("skipped: {why}");
    false
}

/// Whether the kernel preserves the remaining time of a call that is stopped; prints the reason for skipping if not.
fn timeouts_survive_stops() -> bool {
    let is_supported = cfg!(target_arch = "x86_64");
    if !is_supported {
        println!("skipped: this kernel does not show why it restarts a call, so the call starts again in full");
    }
    is_supported
}

/// A program that checks itself.
struct SelfCheckingTarget {
    child: Child,
    stdout: Option<std::process::ChildStdout>,
}

impl SelfCheckingTarget {
    /// A target that has entered one of the states of `states.c`.
    fn start(state: &str) -> Self {
        Self::start_program(&build_target("dynamic").expect("a compiler"), state)
    }

    fn start_program(program: &Path, state: &str) -> Self {
        Self::start_command(Command::new(program), state)
    }

    fn start_command(mut program: Command, state: &str) -> Self {
        let mut child =
            program.arg(state).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the target starts");
        let mut output = child.stdout.take().expect("piped");
        let mut printed = [0; 6];
        output.read_exact(&mut printed).expect("the target is ready");
        if &printed != b"READY\n" {
            let mut rest = String::new();
            output.read_to_string(&mut rest).expect("why it is not");
            panic!("{state}: {}{rest}", lossy_text(&printed));
        }
        // It prints this right before it enters the state.
        thread::sleep(Duration::from_millis(10));
        let victim = Self { child, stdout: Some(output) };
        if SLEEPING_STATES.contains(&state) {
            wait_until("it waits", || victim.status_field("State").starts_with('S'));
        }
        victim
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn send_signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).expect("it is alive");
    }

    /// A field of its status file.
    fn status_field(&self, field: &str) -> String {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it is alive");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field of the status");
        line.trim_start_matches(':').trim().to_owned()
    }

    /// Let the target finish and check itself.
    fn finish_and_check(mut self) -> String {
        self.send_signal(Signal::SIGUSR1);
        drop(self.child.stdin.take());
        let mut printed = String::new();
        self.stdout.take().expect("taken once").read_to_string(&mut printed).expect("its output");
        let status = self.child.wait().expect("its exit");
        assert!(status.success() && printed.contains("OK\n"), "{status}: {printed}");
        printed
    }
}

impl Drop for SelfCheckingTarget {
    fn drop(&mut self) {
        // The child of a failed test; its number is valid until it is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Run `pagefold-lab advise` on a process.
fn run_advise(pid: u32, arguments: &[&str], fault_point: &str) -> Output {
    let mut command = Command::new(lab_binary());
    command.args(["advise", &pid.to_string()]).args(arguments);
    if !fault_point.is_empty() {
        command.env("PAGEFOLD_FAULT_POINT", fault_point);
    }
    command.output().expect("the lab runs")
}

fn lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Run the action, and expect success.
fn advise_successfully(pid: u32, arguments: &[&str]) -> String {
    let output = run_advise(pid, arguments, "");
    assert!(output.status.success(), "{arguments:?}: {}", lossy_text(&output.stderr));
    lossy_text(&output.stdout)
}

/// Run the action, and expect a refusal.
fn advise_expecting_refusal(pid: u32, arguments: &[&str]) -> String {
    let output = run_advise(pid, arguments, "");
    assert_eq!(output.status.code(), Some(2), "{}", lossy_text(&output.stdout));
    lossy_text(&output.stderr)
}

fn count_enrolled_regions(pid: u32) -> usize {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("smaps");
    smaps.lines().filter(|line| line.starts_with("VmFlags:") && line.contains(" mg")).count()
}

/// Wait until a condition holds, at most for some seconds.
fn wait_until(condition: &str, is_met: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_met() {
        assert!(Instant::now() < deadline, "{condition}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// States in which the main thread sleeps.
const SLEEPING_STATES: &[&str] =
    &["sleep", "futex", "without_vdso", "pipe", "receive", "epoll", "epoll_again", "epoll_beside", "ppoll", "poll"];

const TARGET_STATES: &[&str] = &[
    "spin",
    "recurse",
    "futex",
    "without_vdso",
    "pipe",
    "receive",
    "epoll",
    "epoll_beside",
    "ppoll",
    "threads",
    "coroutine",
    "coroutine_above_zeros",
    "coroutine_above_untouched",
    "coroutine_on_main_stack",
    "stack_in_pieces",
    "stack_in_untouched_pieces",
    "stack_in_big_pieces",
    "vfork",
    "filtered",
    "filtered_throughout",
    "forbidden",
    "array",
    "signals",
    "storm",
];

/// States that need poll(2): 64-bit Arm has only ppoll(2).
const POLL_STATES: &[&str] = if cfg!(target_arch = "x86_64") { &["poll"] } else { &[] };

/// States of an x86-64 processor.
const X86_STATES: &[&str] = if cfg!(target_arch = "x86_64") { &["single_step"] } else { &[] };

#[test]
fn target_in_any_state_survives_enroll_and_unenroll() {
    if !can_run() {
        return;
    }
    for state in TARGET_STATES.iter().chain(POLL_STATES).chain(X86_STATES) {
        let victim = SelfCheckingTarget::start(state);
        if *state == "without_vdso" && cfg!(target_arch = "aarch64") {
            // In this state the code that ends signal handlers is nowhere else.
            assert!(advise_expecting_refusal(victim.pid(), &["mergeable"]).contains("no return from signal handlers"));
            victim.finish_and_check();
            continue;
        }
        for _ in 0..3 {
            advise_successfully(victim.pid(), &["mergeable"]);
            assert_ne!(count_enrolled_regions(victim.pid()), 0, "{state}");
            advise_successfully(victim.pid(), &["unmergeable"]);
            assert_eq!(count_enrolled_regions(victim.pid()), 0, "{state}");
        }
        let host = LiveHost::new();
        let handle = host.open(pagefold_base::Pid(victim.pid())).expect("it runs");
        for (what, whole) in [("unmergeable", false), ("whole-process", true), ("unenroll-process", false)] {
            advise_successfully(victim.pid(), &[what]);
            assert_eq!(handle.ask_merge_any(), Ok(whole), "{state}: {what}");
            // The kernel's view of the process from outside (6.14).
            let stat = fs::read_to_string(format!("/proc/{}/ksm_stat", victim.pid())).expect("ksm_stat");
            let merge_any = stat.lines().find_map(|line| line.strip_prefix("ksm_merge_any: "));
            assert!(merge_any.is_none_or(|merge_any| (merge_any == "yes") == whole), "{state}: {what}: {stat}");
        }
        victim.finish_and_check();
    }
}

#[test]
fn repeated_visits_do_not_grow_the_stack() {
    if !can_run() {
        return;
    }
    for state in [
        "spin",
        "threads",
        "coroutine",
        "coroutine_above_zeros",
        "coroutine_on_main_stack",
        "stack_in_pieces",
        "stack_in_untouched_pieces",
        "stack_in_big_pieces",
    ] {
        let victim = SelfCheckingTarget::start(state);
        advise_successfully(victim.pid(), &["mergeable"]);
        let stack = victim.status_field("VmStk");
        advise_successfully(victim.pid(), &["mergeable", "--cycles", "20"]);
        assert_eq!(victim.status_field("VmStk"), stack, "{state}");
        victim.finish_and_check();
    }
}

#[test]
fn stack_with_guard_page_is_refused() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("stack_with_guard");
    let output = advise_expecting_refusal(victim.pid(), &["mergeable"]);
    assert!(output.contains("no main stack that is readable and writable throughout"), "{output}");
    victim.finish_and_check();
}

#[test]
fn memory_below_the_stack_is_not_written() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("stack_above_memory");
    let output = advise_expecting_refusal(victim.pid(), &["mergeable"]);
    assert!(output.contains("its main stack"), "{output}");
    victim.finish_and_check();
    let victim = SelfCheckingTarget::start("stack_near_memory");
    advise_successfully(victim.pid(), &["mergeable", "--cycles", "20"]);
    victim.finish_and_check();
}

#[test]
fn static_program_is_enrolled() {
    let Some(program) = build_target("static").filter(|_| can_run()) else {
        println!("skipped: needs a C library to link statically");
        return;
    };
    let victim = SelfCheckingTarget::start_program(&program, "threads");
    advise_successfully(victim.pid(), &["mergeable", "--cycles", "20"]);
    victim.finish_and_check();
}

#[path = "inject/busy_host.rs"]
mod busy_host;
#[path = "inject/changing_targets.rs"]
mod changing_targets;
#[cfg(feature = "fault-points")]
#[path = "inject/killed_injector.rs"]
mod killed_injector;
#[path = "inject/stopped_injector.rs"]
mod stopped_injector;
#[path = "inject/target_identity.rs"]
mod target_identity;

#[test]
fn stopped_target_stays_stopped() {
    if !can_run() {
        return;
    }
    for state in ["spin", "futex", "threads"] {
        let victim = SelfCheckingTarget::start(state);
        for _ in 0..cycle_count(10).div_ceil(10) {
            victim.send_signal(Signal::SIGSTOP);
            wait_until("it stops", || victim.status_field("State").starts_with('T'));
            for (action, enrolls) in [("mergeable", true), ("unmergeable", false)] {
                advise_successfully(victim.pid(), &[action]);
                wait_until("it is stopped again", || victim.status_field("State").starts_with('T'));
                assert_eq!(count_enrolled_regions(victim.pid()) > 0, enrolls);
            }
            victim.send_signal(Signal::SIGCONT);
            wait_until("it continues", || !victim.status_field("State").starts_with('T'));
        }
        victim.finish_and_check();
    }
}

#[test]
fn stop_and_continue_signals_work_during_injection() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("threads");
    let pid = victim.pid();
    let injector =
        thread::spawn(move || advise_successfully(pid, &["mergeable", "--cycles", &cycle_count(60).to_string()]));
    while !injector.is_finished() {
        victim.send_signal(Signal::SIGSTOP);
        thread::sleep(Duration::from_micros(700));
        victim.send_signal(Signal::SIGCONT);
        thread::sleep(Duration::from_micros(300));
    }
    injector.join().expect("every cycle is done");
    victim.finish_and_check();
}

#[test]
fn injection_survives_thread_and_child_churn() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("storm");
    advise_successfully(victim.pid(), &["mergeable", "--cycles", &cycle_count(60).to_string()]);
    victim.finish_and_check();
}

#[test]
fn signals_are_neither_lost_nor_duplicated() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("signals");
    advise_successfully(victim.pid(), &["mergeable", "--cycles", &cycle_count(300).to_string()]);
    let output = victim.finish_and_check();
    let count: u64 = output.lines().find_map(|line| line.strip_prefix("signals ")).expect("a count").parse().unwrap();
    assert!(count > 300, "{count} signals only");
}

#[test]
fn interrupted_wait_takes_its_remaining_time() {
    if !can_run() || !timeouts_survive_stops() {
        return;
    }
    for (state, says) in [("sleep", "slept "), ("poll_fully", "waited ")] {
        let victim = SelfCheckingTarget::start(state);
        // If each stop restarted the wait, it would never end, nor would this loop.
        let begun = Instant::now();
        while run_advise(victim.pid(), &["mergeable", "--cycles", "20"], "").status.success() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{state}: it waits forever");
        }
        // It has ended, and checks itself that it did not wait too short.
        let output = victim.finish_and_check();
        assert!(output.contains(says), "{output}");
    }
}

#[test]
fn timeouts_expire_on_time_despite_stops() {
    if !can_run() || !timeouts_survive_stops() {
        return;
    }
    let victim = SelfCheckingTarget::start("ticks");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        advise_successfully(victim.pid(), &["mergeable", "--cycles", "50"]);
    }
    let output = victim.finish_and_check();
    let ticks: u32 = output.lines().find_map(|line| line.strip_prefix("ticks ")).expect("a count").parse().unwrap();
    // Undisturbed there would be twenty. If each stop restarted the timeout, it would never end.
    assert!(ticks >= 5, "{ticks} timeouts only");
}

#[test]
fn kernel_writes_to_other_stacks_are_kept() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("array");
    advise_successfully(victim.pid(), &["mergeable", "--cycles", &cycle_count(60).to_string()]);
    victim.finish_and_check();
}

#[test]
fn seccomp_filter_stays_in_force_for_own_calls() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("forbidden");
    advise_successfully(victim.pid(), &["mergeable", "--cycles", &cycle_count(60).to_string()]);
    victim.finish_and_check();
}

#[test]
fn seccomp_filter_added_meanwhile_spares_injection() {
    if !can_run() {
        return;
    }
    for _ in 0..10 {
        let victim = SelfCheckingTarget::start("filtered_by_another");
        wait_until("the filter comes", || {
            advise_successfully(victim.pid(), &["mergeable", "--cycles", "3"]);
            victim.status_field("Seccomp") == "2"
        });
        advise_successfully(victim.pid(), &["mergeable"]);
        victim.finish_and_check();
    }
}

#[test]
fn max_map_count_is_reported() {
    let limit = fs::read_to_string("/proc/sys/vm/max_map_count").expect("a limit");
    if !can_run() {
        return;
    }
    if limit.trim().parse::<u64>().expect("a number") > 1 << 17 {
        println!("skipped: vm.max_map_count is {}", limit.trim());
        return;
    }
    let victim = SelfCheckingTarget::start("regions");
    let output = advise_successfully(victim.pid(), &["mergeable", "--gap-pages", "16"]);
    assert!(output.contains("vm.max_map_count"), "{output}");
    victim.finish_and_check();
}

#[test]
fn traced_process_is_refused() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("futex");
    let pid = Pid::from_raw(victim.pid().cast_signed());
    ptrace::seize(pid, ptrace::Options::empty()).expect("we may trace it");
    let output = advise_expecting_refusal(victim.pid(), &["mergeable"]);
    assert!(output.contains("traces it"), "{output}");
    ptrace::interrupt(pid).expect("it can be interrupted");
    nix::sys::wait::waitpid(pid, None).expect("it stops");
    ptrace::detach(pid, None).expect("it can be released");
    advise_successfully(victim.pid(), &["mergeable"]);
    victim.finish_and_check();
}

#[test]
fn concurrent_injectors_take_turns() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("threads");
    let successes = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let output = run_advise(victim.pid(), &["mergeable", "--cycles", &cycle_count(40).to_string()], "");
                let stderr = lossy_text(&output.stderr);
                assert!(output.status.success() || stderr.contains("busy") || stderr.contains("traces it"), "{stderr}");
                successes.fetch_add(u32::from(output.status.success()), Ordering::Relaxed);
            });
        }
    });
    assert_ne!(successes.into_inner(), 0, "both failed");
    victim.finish_and_check();
}

#[test]
fn strict_seccomp_is_refused() {
    if !can_run() {
        return;
    }
    let mut victim = SelfCheckingTarget::start("strict");
    assert!(advise_expecting_refusal(victim.pid(), &["mergeable"]).contains("strict seccomp"));
    drop(victim.child.stdin.take());
    assert!(victim.child.wait().expect("its exit").success());
}

/// A user without privilege: `nobody`.
const NOBODY_UID: u32 = 65534;

#[test]
fn unprivileged_injection_refuses_seccomp_filter() {
    if !can_run() {
        return;
    }
    if fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() != "0") {
        return println!("skipped: needs kernel.yama.ptrace_scope to be 0: users may trace only their children here");
    }
    // In a directory in which a user may run them.
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let program = build_target("dynamic").expect("a compiler");
    let installed_path = |file: &Path| folder.path().join(file.file_name().expect("a file"));
    for file in [&program, &lab_binary()] {
        client::install_executable(file, &installed_path(file), 0o755).expect("a copy");
    }
    let user_command = |file: &Path| {
        let mut command = Command::new(installed_path(file));
        command.uid(NOBODY_UID).gid(NOBODY_UID).current_dir("/");
        command
    };
    // If one thread has no filter, Pagefold uses that one.
    for (state, refusal) in [("filtered_throughout", Some("only CAP_SYS_ADMIN may suspend")), ("filtered", None)] {
        let victim = SelfCheckingTarget::start_command(user_command(&program), state);
        let mut advise = user_command(&lab_binary());
        let output = advise.args(["advise", &victim.pid().to_string(), "mergeable"]).output().expect("the lab runs");
        let stderr = lossy_text(&output.stderr);
        assert_eq!(output.status.code(), Some(if refusal.is_some() { 2 } else { 0 }), "{state}: {stderr}");
        assert!(stderr.contains(refusal.unwrap_or_default()), "{state}: {stderr}");
        assert_eq!(count_enrolled_regions(victim.pid()) == 0, refusal.is_some(), "{state}");
        assert_eq!(victim.status_field("TracerPid"), "0");
        victim.finish_and_check();
    }
}

#[test]
fn kernel_threads_are_refused_zombie_leaders_live() {
    if !can_run() {
        return;
    }
    let printed = advise_expecting_refusal(2, &["whole-process"]);
    assert!(printed.contains("kernel"), "{printed}");
    let victim = SelfCheckingTarget::start("zombie");
    let output = run_advise(victim.pid(), &["whole-process"], "");
    assert!(matches!(output.status.code(), Some(0 | 2)), "{}", lossy_text(&output.stderr));
    victim.finish_and_check();
}

#[test]
fn program_of_32_bits_is_refused() {
    for waits in [true, false] {
        if can_run() {
            check_32_bit_program_is_refused(waits);
        }
    }
}

/// A program that waits in `pause` repeatedly, or one that runs in a loop.
fn check_32_bit_program_is_refused(waits: bool) {
    // Behind it, never executed, is 64-bit code that ends signal handlers: without it the target would be refused, too.
    let (machine, flags, pause, restorer) = if cfg!(target_arch = "x86_64") {
        // mov $29, %eax; int $0x80; jmp
        let pause = [0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7].as_slice();
        (3_u16, 0_u32, pause, [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05, 0xc3].as_slice())
    } else {
        // mov r7, #29; svc 0; b. EM_ARM, and EF_ARM_EABI_VER5, without which this kernel does not accept the file.
        let pause = [29, 0x70, 0xa0, 0xe3, 0, 0, 0, 0xef, 0xfc, 0xff, 0xff, 0xea].as_slice();
        (40, 0x0500_0000, pause, [0x1f, 0x20, 0x03, 0xd5, 0x68, 0x11, 0x80, 0xd2, 1, 0, 0, 0xd4].as_slice())
    };
    // jmp and b to themselves.
    let spin: &[u8] = if cfg!(target_arch = "x86_64") { &[0xeb, 0xfe] } else { &[0xfe, 0xff, 0xff, 0xea] };
    let code = [if waits { pause } else { spin }, restorer].concat();
    let (base, head) = (0x0804_8000_u32, 0x54_u32);
    let mut elf = b"\x7fELF\x01\x01\x01".to_vec();
    elf.resize(16, 0);
    let bytes = head + code.len() as u32;
    let half = |value: u16| value.to_le_bytes().to_vec();
    let word = |value: u32| value.to_le_bytes().to_vec();
    elf.extend([2, machine].map(half).concat());
    elf.extend([1, base + head, 52, 0, flags].map(word).concat());
    elf.extend([52, 32, 1, 0, 0, 0].map(half).concat());
    elf.extend([1, 0, base, base, bytes, bytes, 5, 0x1000].map(word).concat());
    elf.extend(code);
    let folder = tempfile::tempdir().expect("a folder");
    let [image, file] = ["image", "pause32"].map(|name| folder.path().join(name));
    fs::write(&image, elf).expect("a file");
    client::install_executable(&image, &file, 0o755).expect("a copy");
    let child = match Command::new(&file).spawn() {
        Ok(child) => child,
        Err(error) if error.raw_os_error() == Some(Errno::ENOEXEC as i32) => {
            return println!("skipped: this kernel runs no 32-bit programs");
        }
        Err(error) => panic!("{error}"),
    };
    let victim = SelfCheckingTarget { child, stdout: None };
    thread::sleep(Duration::from_millis(50));
    let output = advise_expecting_refusal(victim.pid(), &["whole-process"]);
    assert!(output.contains("32-bit"), "{output}");
    // Its pause was interrupted, and it is about to start the next.
    wait_until("it continues", || victim.status_field("State").starts_with(if waits { 'S' } else { 'R' }));
}

#[test]
fn int80_calls_from_64_bit_code_are_restarted() {
    if !can_run() {
        return;
    }
    if !cfg!(target_arch = "x86_64") {
        return println!("skipped: 64-bit code makes calls of 32-bit programs on x86-64 alone");
    }
    let mut probe = Command::new(build_target("dynamic").expect("a compiler"));
    let probe = probe.arg("compat_probe").stdin(Stdio::null()).output().expect("the target starts");
    if !lossy_text(&probe.stdout).contains("OK") {
        return println!("skipped: this kernel runs no calls of 32-bit programs (CONFIG_IA32_EMULATION)");
    }
    for state in ["compat_sleep", "compat_read"] {
        let victim = SelfCheckingTarget::start(state);
        advise_successfully(victim.pid(), &["mergeable", "--cycles", &cycle_count(60).to_string()]);
        victim.finish_and_check();
    }
}

#[test]
fn busy_program_survives_many_cycles() {
    if !can_run() {
        return;
    }
    let mut busy = Command::new(lab_binary())
        .args(["busy", "--threads", "3", "--memory", "2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the lab runs");
    let mut output = busy.stdout.take().expect("piped");
    let mut ready = [0; 6];
    output.read_exact(&mut ready).expect("it is ready");
    advise_successfully(busy.id(), &["mergeable", "--cycles", &cycle_count(300).to_string()]);
    drop(busy.stdin.take());
    let mut printed = String::new();
    output.read_to_string(&mut printed).expect("its output");
    assert!(busy.wait().expect("its exit").success() && printed.contains("all right"), "{printed}");
}

/// Number of cycles: `PAGEFOLD_SOAK_CYCLES` for the long form, and fewer on an emulated machine.
fn cycle_count(default_count: u32) -> u32 {
    std::env::var("PAGEFOLD_SOAK_CYCLES").map_or(default_count, |text| text.parse().expect("a number"))
}

#[test]
fn changed_ranges_are_reported_and_others_enrolled() {
    if !can_run() {
        return;
    }
    let lab = RunningLab::start_layout(&["unique=64"]).expect("a layout");
    let region = lab.first_region("unique");
    let range = format!("{:x}-{:x}", region.start, region.end_address());
    let output = advise_successfully(lab.pid(), &["mergeable", "1000-3000", &range]);
    assert!(output.contains("missed 00001000-00003000: not mapped any more\n"), "{output}");
    assert_eq!(count_enrolled_regions(lab.pid()), 1);
    // No range is left, so that no thread is stopped.
    assert!(advise_successfully(lab.pid(), &["mergeable", &range]).contains("stops 0 "));
}

#[test]
fn split_huge_pages_are_collapsed() {
    let Some(huge) = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok())
        .filter(|_| can_run())
    else {
        println!("skipped: needs root and transparent huge pages");
        return;
    };
    // Its memory is 4 MiB, at an unknown address.
    let victim = SelfCheckingTarget::start("futex");
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", victim.pid())).expect("smaps");
    let mut range = "";
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        if first == "Rss:" && second.parse::<u64>().is_ok_and(|kib| kib >= 4096) {
            break;
        }
        if !first.ends_with(':') {
            range = first;
        }
    }
    let (start, end) = range.split_once('-').expect("a range");
    let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).expect("an address"));
    let start = start.next_multiple_of(huge);
    if start + huge > end {
        println!("skipped: no whole huge page of {huge} bytes in 4 MiB");
        return;
    }
    let count = || {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", victim.pid())).expect("smaps");
        let huge = smaps.lines().filter_map(|line| line.strip_prefix("AnonHugePages:")?.trim().strip_suffix(" kB"));
        huge.map(|kib| kib.parse::<u64>().expect("a number") << 10).sum::<u64>()
    };
    let before = count();
    if before >= huge {
        println!("skipped: huge pages are allocated automatically here (transparent_hugepage/enabled)");
        return;
    }
    let output = advise_successfully(victim.pid(), &["collapse", &format!("{start:x}-{:x}", start + huge)]);
    if output.contains("no huge page was available") {
        println!("skipped: this machine's memory is too fragmented for a huge page");
        return;
    }
    assert!(!output.contains("missed"), "{output}");
    assert!(count() > before, "{before} bytes before, {} after", count());
    assert!(output.contains("stops 0 "), "{output}");
    let output = advise_successfully(victim.pid(), &["collapse", &format!("{huge:x}-{:x}", 2 * huge)]);
    assert!(output.contains("missed"), "{output}");
    victim.finish_and_check();
}

#[test]
fn unmerge_preserves_memory_contents() {
    if !can_run() {
        return;
    }
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let victim = SelfCheckingTarget::start("futex");
    // KSM's own counters stay until ksmd's next visit; smaps reads the page tables.
    let merged = || {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", victim.pid())).expect("smaps");
        let kib = smaps.lines().filter_map(|line| line.strip_prefix("KSM:")?.trim().strip_suffix(" kB"));
        kib.map(|kib| kib.parse::<u64>().expect("a number") / 4).sum::<u64>()
    };
    advise_successfully(victim.pid(), &["mergeable"]);
    ksm.scan_until_settled();
    // Its 4 MiB have sixteen different pages.
    assert!(merged() > 500, "{} pages", merged());
    let output = advise_successfully(victim.pid(), &["unmergeable"]);
    println!("{output}");
    assert_eq!(merged(), 0, "{output}");
    victim.finish_and_check();
}
