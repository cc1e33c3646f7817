//! The drivers of KSM while guests come and go: the common policies, each simulated step by step, and the daemon.

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

/// Time limit for the daemon to undo its changes.
const DAEMON_EXIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A driver of KSM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KsmDriverKind {
    /// A policy, on guests whose whole QEMU process is enrolled.
    Policy(MergePolicy),
    /// `pagefold daemon`.
    Daemon,
}

impl KsmDriverKind {
    /// The drivers that are compared.
    pub const COMPARED: [Self; 4] = [
        Self::Policy(MergePolicy::Ksmtuned),
        Self::Policy(MergePolicy::Advisor200),
        Self::Policy(MergePolicy::Whole),
        Self::Daemon,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Policy(policy) => policy.name(),
            Self::Daemon => "pagefold daemon",
        }
    }

    /// Whether guests start with all memory of QEMU enrolled. A policy merges only enrolled memory, and all of it
    /// counts as shareable. The daemon enrolls by itself.
    pub fn enrolls_whole_qemu(self) -> bool {
        matches!(self, Self::Policy(_))
    }
}

/// CPU seconds since the driver was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriverCpuSeconds {
    /// ksmd.
    pub ksmd: f64,
    /// The driver: 0 for a policy, which this program runs at negligible cost.
    pub driver: f64,
}

impl DriverCpuSeconds {
    /// The sum of both.
    pub fn total(self) -> f64 {
        self.ksmd + self.driver
    }
}

/// KSM with its driver.
pub struct KsmDriver<'k> {
    ksm: &'k KsmTestGuard,
    ksmd: u32,
    ksmd_seconds_before: f64,
    steps: Option<PolicySchedule>,
    daemon: Option<DaemonProcess>,
}

impl<'k> KsmDriver<'k> {
    /// Start a policy, with the settings for this host.
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

    /// Take the policy steps that are due this many seconds after the start, and check that the daemon is running.
    pub fn poll(&mut self, seconds: f64) -> Result<()> {
        if let Some(steps) = &mut self.steps {
            steps.write_due_settings(self.ksm, seconds).map_err(|why| anyhow!("a step of a policy: {why}"))?;
        }
        self.daemon.as_mut().map_or(Ok(()), DaemonProcess::check_alive)
    }

    /// CPU time used so far.
    pub fn read_cpu_seconds(&self) -> Result<DriverCpuSeconds> {
        let driver = self.daemon.as_ref().map(|daemon| cpu_seconds(daemon.child.id())).transpose()?;
        Ok(DriverCpuSeconds {
            ksmd: thread_cpu_seconds(self.ksmd)? - self.ksmd_seconds_before,
            driver: driver.unwrap_or(0.0),
        })
    }

    /// The daemon, if it is the driver.
    pub fn as_daemon(&self) -> Option<&DaemonProcess> {
        self.daemon.as_ref()
    }

    /// Stop the driver and keep the merged pages.
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

/// CPU seconds of a kernel thread, to the nanosecond (Documentation/scheduler/sched-stats.rst).
fn thread_cpu_seconds(pid: u32) -> Result<f64> {
    let schedstat = fs::read_to_string(format!("/proc/{pid}/schedstat"))?;
    let nanoseconds: f64 = schedstat.split(' ').next().unwrap_or_default().parse().context("schedstat")?;
    Ok(nanoseconds / 1e9)
}

/// A running daemon.
pub struct DaemonProcess {
    child: Child,
    pagefold: PathBuf,
    folder: tempfile::TempDir,
    log_path: PathBuf,
}

impl DaemonProcess {
    /// Start the daemon and wait until it answers. Its output goes to `log`; its configuration is written beside the
    /// log.
    pub fn start(pagefold: &Path, config: &str, log: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("pagefold.toml"), config)?;
        fs::write(log.with_extension("toml"), config)?;
        let mut command = daemon_command(pagefold, folder.path());
        // Like the service: with a history, and with a web page that has no client.
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

    /// The output of `pagefold status --json`. The request costs the daemon some CPU time.
    pub fn read_status(&self) -> Result<serde_json::Value> {
        let output = daemon_command(&self.pagefold, self.folder.path()).args(["status", "--json"]).output()?;
        ensure!(output.status.success(), "pagefold status failed: {}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// The process ID of the daemon.
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
        let log = fs::read_to_string(&self.log_path)?;
        let lines: Vec<&str> = log.lines().collect();
        Ok(lines[lines.len().saturating_sub(10)..].join("\n"))
    }

    /// Stop the daemon, and check that it has undone its changes.
    fn stop(mut self) -> Result<()> {
        let start = Instant::now();
        rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        while !trial::has_ended(self.child.id())? {
            ensure!(start.elapsed() < DAEMON_EXIT_TIMEOUT, "the daemon did not exit in time");
            trial::sleep_unless_signaled(Duration::from_millis(20))?;
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "the daemon failed: {status}; its log ends with:\n{}", self.last_log_lines()?);
        Ok(())
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // After a failure the daemon still restores the settings when it is asked to exit.
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
