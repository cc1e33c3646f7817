//! The files installed beside the binary: the systemd unit, the configurations, the scripts for Slurm. `make test-deb`
//! tests the package itself in a guest.

use pagefold_labs::client;
use pagefold_labs::process_checks::wait_until;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn deploy_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(path)
}

fn unit_text() -> String {
    fs::read_to_string(deploy_path("systemd/pagefold.service")).unwrap()
}

/// The words of a setting in the unit.
fn setting_words<'a>(unit: &'a str, setting: &str) -> Vec<&'a str> {
    let value = |line: &'a str| line.strip_prefix(setting)?.strip_prefix('=');
    unit.lines().filter_map(value).flat_map(str::split_whitespace).collect()
}

#[test]
fn systemd_unit_is_well_formed() {
    let directory = tempfile::tempdir().unwrap();
    // Verify the unit with the built program, because the installed program may be missing.
    let path = directory.path().join("pagefold.service");
    fs::write(&path, unit_text().replace("/usr/bin/pagefold", env!("CARGO_BIN_EXE_pagefold"))).unwrap();
    let verify = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output();
    let Ok(Output { status, stderr, .. }) = verify else {
        return println!("skipped: needs systemd-analyze (systemd)");
    };
    // Keep only messages about this unit: systemd-analyze also checks other units of the machine.
    let stderr = String::from_utf8_lossy(&stderr);
    let messages: Vec<&str> = stderr.lines().filter(|line| line.contains("pagefold")).collect();
    assert!(messages.is_empty(), "{status}: {messages:#?}");
}

#[test]
fn systemd_unit_has_no_seccomp_filter() {
    // The settings that systemd implements with a seccomp filter, in part or whole: systemd.exec(5), systemd 257.
    let filter_settings = [
        "SystemCallFilter",
        "SystemCallLog",
        "SystemCallArchitectures",
        "RestrictAddressFamilies",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
        "LockPersonality",
        "MemoryDenyWriteExecute",
        "PrivateDevices",
        "ProtectClock",
        "ProtectHostname",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "DynamicUser",
    ];
    for setting in filter_settings {
        assert_eq!(
            setting_words(&unit_text(), setting),
            [""; 0],
            "{setting}: with a seccomp filter of its own, the daemon cannot suspend filters of other processes"
        );
    }
}

/// The process connector works only in the host's network namespace, and a pod has its own.
#[test]
fn pod_capabilities_match_the_unit_without_connector() {
    let manifest = fs::read_to_string(deploy_path("kubernetes/daemonset.yaml")).unwrap();
    let list = manifest
        .lines()
        .find_map(|line| line.trim().strip_prefix("add: [")?.strip_suffix(']'))
        .expect("the manifest adds no capabilities");
    let pod: Vec<String> = list.split(", ").map(|name| format!("CAP_{name}")).collect();
    let unit = unit_text();
    let service = setting_words(&unit, "CapabilityBoundingSet");
    let expected: Vec<&str> = service.iter().copied().filter(|name| *name != "CAP_NET_ADMIN").collect();
    assert_eq!(pod, expected);
    for capability in service {
        assert!(unit.contains(&format!("#   {capability} ")), "the unit has no comment about {capability}");
    }
}

#[test]
fn pod_configuration_is_accepted() {
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .arg("--config")
        .arg(deploy_path("kubernetes/pagefold.toml"))
        .args(["config", "check"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn imported_ksmtuned_configuration_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let (before, after) = (directory.path().join("ksmtuned.conf"), directory.path().join("pagefold.toml"));
    fs::write(&before, "# For ksmtuned.\nKSM_MONITOR_INTERVAL=30\nKSM_NPAGES_MAX=1250\nKSM_THRES_COEF=30\n").unwrap();
    let pagefold = |arguments: &[&str], file: &Path| {
        Command::new(env!("CARGO_BIN_EXE_pagefold")).args(arguments).arg(file).output().unwrap()
    };
    let imported = pagefold(&["config", "import-ksmtuned"], &before);
    let text = String::from_utf8(imported.stdout).unwrap();
    let expected = [
        "# kept: KSM_THRES_COEF=30: ",
        "# left out: KSM_MONITOR_INTERVAL=30: ",
        "\nkeep_available = ",
        "\ncpu_rate = ",
    ];
    assert!(expected.iter().all(|line| text.contains(line)), "{text}");
    fs::write(&after, text).unwrap();
    let output = pagefold(&["config", "check", "--config"], &after);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let absent = pagefold(&["config", "import-ksmtuned"], &directory.path().join("none"));
    assert!(!absent.status.success() && String::from_utf8_lossy(&absent.stderr).contains("cannot read"), "{absent:?}");
}

#[test]
fn slurm_scripts_always_succeed() {
    let empty_directory = tempfile::tempdir().unwrap();
    for (script, job) in [("prolog.sh", ""), ("prolog.sh", "../x"), ("epilog.sh", "7"), ("epilog.sh", "x")] {
        let mut command = Command::new(deploy_path("slurm").join(script));
        command
            .env("SLURM_JOB_ID", job)
            .env("PAGEFOLD_JOBS", empty_directory.path())
            .env("PAGEFOLD_LOG", empty_directory.path());
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success() && output.stdout.is_empty(), "{script} {job:?}: {output:?}");
    }
}

#[test]
fn slurm_tasks_get_the_job_settings() {
    let libraries = tempfile::tempdir().unwrap();
    let folder = libraries.path().display().to_string();
    let task = |engine: &str| {
        let mut command = Command::new(deploy_path("slurm/task-prolog.sh"));
        command.env("PAGEFOLD", engine).env("PAGEFOLD_LIBRARIES", libraries.path()).env("SLURM_JOB_ID", "7");
        let output = command.env("LD_PRELOAD", "").output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(task("user"), "", "LD_PRELOAD must not name a missing library");
    for library in ["preload", "adopt"] {
        fs::write(libraries.path().join(format!("libpagefold_{library}.so")), "").unwrap();
    }
    assert_eq!(task(""), "");
    assert_eq!(task("kernel"), format!("export LD_PRELOAD={folder}/libpagefold_preload.so\n"));
    let user = format!("export PAGEFOLD_DOMAIN=mpi-7\nexport LD_PRELOAD={folder}/libpagefold_adopt.so\n");
    assert_eq!(task("user"), user);
}

/// A cgroup like one made by slurmstepd. Dropping it removes all the directories made for it.
struct SlurmStepCgroup(PathBuf);

impl SlurmStepCgroup {
    fn new(job: u32) -> Result<Self, String> {
        let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup/freezer", "/sys/fs/cgroup"].map(Path::new);
        let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists()).ok_or("needs cgroups")?;
        let path = root.join(format!("slurmstepd.scope/job_{job}"));
        fs::create_dir_all(path.join("step_0")).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self(path))
    }

    fn add_process(&self, pid: u32) {
        fs::write(self.0.join("step_0/cgroup.procs"), pid.to_string()).expect("cannot enter the cgroup");
    }
}

impl Drop for SlurmStepCgroup {
    fn drop(&mut self) {
        // Processes may take a moment to leave the cgroup. The shared parent may contain other jobs.
        let started = Instant::now();
        while fs::remove_dir(self.0.join("step_0")).is_err() && started.elapsed() < Duration::from_secs(10) {
            sleep(Duration::from_millis(10));
        }
        let _ = fs::remove_dir(&self.0);
        let _ = self.0.parent().map(fs::remove_dir);
    }
}

/// A program that is killed when this is dropped.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn slurm_job_is_accounted() {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root to make cgroups and read other processes");
    }
    let job = std::process::id();
    let cgroup = match SlurmStepCgroup::new(job) {
        Ok(cgroup) => cgroup,
        Err(why) => return println!("skipped: {why}"),
    };
    let directory = tempfile::tempdir().unwrap();
    let (jobs, log) = (directory.path().join("jobs"), directory.path().join("log"));
    let script = |name: &str| {
        let mut command = Command::new(deploy_path("slurm").join(name));
        command.env("SLURM_JOB_ID", job.to_string()).env("PAGEFOLD_JOBS", &jobs).env("PAGEFOLD_LOG", &log);
        command.env("PAGEFOLD_BINARY", env!("CARGO_BIN_EXE_pagefold")).env("PAGEFOLD_PAUSE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    };
    let mut watch = KilledOnDrop(script("watch.sh").arg(job.to_string()).spawn().unwrap());
    let mut lab = Command::new(client::lab_binary().expect("pagefold-lab is not built"));
    let lab = lab.args(["layout", "zero=2048"]).env("SLURM_JOB_ID", job.to_string());
    let lab = KilledOnDrop(lab.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
    cgroup.add_process(lab.0.id());
    let account_file = jobs.join(format!("{job}.json"));
    let account = || -> Option<Value> { serde_json::from_slice(&fs::read(&account_file).ok()?).ok() };
    wait_until("the job's account", || account().is_some());
    let text = account().unwrap().to_string();
    assert!(text.contains(&format!("slurm:{job}")), "{text}");
    drop(lab);
    drop(cgroup);
    wait_until("the exit of watch.sh", || watch.0.try_wait().unwrap().is_some());
    assert!(script("epilog.sh").status().unwrap().success());
    assert!(!account_file.exists() && log.join(format!("{job}.json")).exists());
}
