//! What drives KSM while machines come and go: the policies that are in use, each followed step by step, and the
//! daemon.

use crate::merge::policies::{MergePolicy, PolicySchedule};
use crate::merge::readings::{cpu_seconds, ksmd_pid};
use crate::merge::trial;
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use rustix::process::{Pid, Signal};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long the daemon is given to put back what it changed.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A way to drive KSM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KsmDriverKind {
    /// A policy, on machines of which QEMU's whole process is enrolled.
    Policy(MergePolicy),
    /// `pagefold daemon`.
    Daemon,
}

impl KsmDriverKind {
    /// Those that are compared.
    pub const COMPARED: [Self; 4] = [
        Self::Policy(MergePolicy::Ksmtuned),
        Self::Policy(MergePolicy::Advisor200),
        Self::Policy(MergePolicy::Whole),
        Self::Daemon,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Policy(policy) => policy.name(),
            Self::Daemon => "pagefold daemon",
        }
    }

    /// Whether machines are started with all memory of QEMU enrolled: what a policy does not see it cannot merge, and
    /// all of it counts as what can be shared. The daemon enrols by itself.
    pub fn enrolls_whole_qemu(self) -> bool {
        matches!(self, Self::Policy(_))
    }
}

/// CPU seconds since a driver was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriverCpuSeconds {
    /// ksmd.
    pub ksmd: f64,
    /// Who drives it: nothing for a policy, which is followed from here at next to no cost.
    pub driver: f64,
}

impl DriverCpuSeconds {
    /// All of it.
    pub fn total(self) -> f64 {
        self.ksmd + self.driver
    }
}

/// KSM, driven.
pub struct KsmDriver<'k> {
    ksm: &'k KsmTestGuard,
    ksmd: u32,
    ksmd_seconds_before: f64,
    steps: Option<PolicySchedule>,
    daemon: Option<DaemonProcess>,
}

impl<'k> KsmDriver<'k> {
    /// Begin a policy, with what it goes by on this host.
    pub fn start_policy(policy: MergePolicy, ksm: &'k KsmTestGuard) -> Result<Self> {
        let host = pagefold_merge::policy::observe_host(&LiveHost::new());
        let steps = policy.schedule(&host).map_err(|why| anyhow!("settings of {}: {why}", policy.name()))?;
        let mut driver = Self::new(ksm)?;
        driver.steps = Some(steps);
        driver.poll(0.0)?;
        ksm.write_setting("run", 1);
        Ok(driver)
    }

    /// Start the daemon with a configuration.
    pub fn start_daemon(pagefold: &Path, config: &str, log: &Path, ksm: &'k KsmTestGuard) -> Result<Self> {
        let mut driver = Self::new(ksm)?;
        driver.daemon = Some(DaemonProcess::start(pagefold, config, log)?);
        Ok(driver)
    }

    fn new(ksm: &'k KsmTestGuard) -> Result<Self> {
        let ksmd = ksmd_pid()?;
        trial::wait_until_ksmd_forgets(ksm, ksmd)?;
        Ok(Self { ksm, ksmd, ksmd_seconds_before: thread_cpu_seconds(ksmd)?, steps: None, daemon: None })
    }

    /// Take the steps of a policy that are due so many seconds after its beginning, and see that the daemon is there.
    pub fn poll(&mut self, seconds: f64) -> Result<()> {
        if let Some(steps) = &mut self.steps {
            steps.write_due_settings(self.ksm, seconds).map_err(|why| anyhow!("a step of a policy: {why}"))?;
        }
        self.daemon.as_mut().map_or(Ok(()), DaemonProcess::check_alive)
    }

    /// What it has cost so far.
    pub fn read_cpu_seconds(&self) -> Result<DriverCpuSeconds> {
        let driver = self.daemon.as_ref().map(|daemon| cpu_seconds(daemon.child.id())).transpose()?;
        Ok(DriverCpuSeconds {
            ksmd: thread_cpu_seconds(self.ksmd)? - self.ksmd_seconds_before,
            driver: driver.unwrap_or(0.0),
        })
    }

    /// The daemon, where it is one.
    pub fn as_daemon(&self) -> Option<&DaemonProcess> {
        self.daemon.as_ref()
    }

    /// End it, with what is merged kept.
    pub fn stop(mut self) -> Result<()> {
        match self.daemon.take() {
            Some(daemon) => daemon.stop(),
            None => {
                self.ksm.write_setting("run", 0);
                Ok(())
            }
        }
    }
}

/// CPU seconds of a thread of the kernel, to the nanosecond (Documentation/scheduler/sched-stats.rst).
fn thread_cpu_seconds(pid: u32) -> Result<f64> {
    let schedstat = fs::read_to_string(format!("/proc/{pid}/schedstat"))?;
    let nanoseconds: f64 = schedstat.split(' ').next().unwrap_or_default().parse().context("schedstat")?;
    Ok(nanoseconds / 1e9)
}

/// A daemon that runs.
pub struct DaemonProcess {
    child: Child,
    pagefold: PathBuf,
    folder: tempfile::TempDir,
    log_path: PathBuf,
}

impl DaemonProcess {
    /// Start it, and wait until it answers. What it says goes into `log`, and its configuration beside that.
    pub fn start(pagefold: &Path, config: &str, log: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("pagefold.toml"), config)?;
        fs::write(log.with_extension("toml"), config)?;
        let mut command = daemon_command(pagefold, folder.path());
        // As the service has it: with a history, and a page that nobody looks at.
        command
            .args(["daemon", "--mode", "act", "--http", "127.0.0.1:0", "--history"])
            .arg(folder.path().join("history.db"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(log)?);
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut daemon = Self { child, pagefold: pagefold.to_owned(), folder, log_path: log.to_owned() };
        let began = Instant::now();
        while daemon.read_status().is_err() {
            daemon.check_alive()?;
            ensure!(began.elapsed() < DAEMON_EXIT_TIMEOUT, "the daemon does not answer");
            trial::sleep_unless_signaled(Duration::from_millis(50))?;
        }
        Ok(daemon)
    }

    /// How it stands: `pagefold status --json`. Asking costs it some CPU time.
    pub fn read_status(&self) -> Result<serde_json::Value> {
        let output = daemon_command(&self.pagefold, self.folder.path()).args(["status", "--json"]).output()?;
        ensure!(output.status.success(), "no status: {}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn check_alive(&mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(
            ended.is_none(),
            "the daemon ended ({ended:?}); {} ends with:\n{}",
            self.log_path.display(),
            self.last_log_lines()?
        );
        Ok(())
    }

    fn last_log_lines(&self) -> Result<String> {
        let said = fs::read_to_string(&self.log_path)?;
        let lines: Vec<&str> = said.lines().collect();
        Ok(lines[lines.len().saturating_sub(10)..].join("\n"))
    }

    /// Have it end, and see that it has put back what it changed.
    fn stop(mut self) -> Result<()> {
        let began = Instant::now();
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        while !trial::has_ended(self.child.id())? {
            ensure!(began.elapsed() < DAEMON_EXIT_TIMEOUT, "the daemon does not end");
            trial::sleep_unless_signaled(Duration::from_millis(20))?;
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "the daemon failed: {status}; its log ends with:\n{}", self.last_log_lines()?);
        Ok(())
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // Where something has failed: it puts the settings back.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

fn daemon_command(pagefold: &Path, folder: &Path) -> Command {
    let mut command = Command::new(pagefold);
    command.arg("--state").arg(folder.join("state")).arg("--config").arg(folder.join("pagefold.toml"));
    command
}
