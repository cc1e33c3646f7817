//! The programs for which settings are exported read the files: sysctl, modprobe, tuned and Ansible, which runs sysctl and
//! systemd-tmpfiles. They run in a mount namespace in which /proc/sys, /proc/irq, /sys, /etc and /usr/lib are scratch files,
//! and the values that they write there are compared. Each needs root and its program.

#![forbid(unsafe_code)]

use pagefold_tune::decide::export::{ExportFormat, Settings, render};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Settings as `tune` exports them.
const WRITES: &[(&str, &str)] = &[
    ("proc/irq/33/smp_affinity_list", "0-1"),
    ("proc/sys/kernel/numa_balancing", "1"),
    ("proc/sys/kernel/sched_autogroup_enabled", "0"),
    ("proc/sys/vm/swappiness", "10"),
    ("proc/sys/vm/watermark_scale_factor", "10"),
    ("sys/block/nvme0n1/queue/scheduler", "none"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
    ("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "performance"),
    ("sys/kernel/debug/sched/preempt", "lazy"),
    ("sys/kernel/mm/ksm/run", "1"),
    ("sys/kernel/mm/transparent_hugepage/defrag", "defer+madvise"),
    ("sys/module/kvm/parameters/halt_poll_ns", "50000"),
    ("sys/module/kvm/parameters/nx_huge_pages", "N"),
];

/// Values that only an imported file can bring, each with a meaning to one of the programs or formats.
const ODD_VALUES: &[&str] = &[
    "-", "-1", "+1", "=", "a=b", "0-3,8", "a b", "100%", "%d", "a\\nb", "\\", "\"q\"", "'q'", "\"", "a#b", "a # b",
    "#", ";a", "${x}", "$(id)", "{{ x }}", "{% x %}", "{# x #}", "<5", ">5", "|a", "!a", "~", "[x]", "on", "Off",
    "yes", "N", "true", "null", "0x1f", "é", "&a", "a: b",
];

/// Those that Ansible gives sysctl: each takes a task, which takes long.
const ODD_ANSIBLE_SYSCTLS: [&str; 10] = ["-", "a b", "100%", "\"q\"", "a#b", "${x}", "{{ x }}", "on", "null", "a: b"];

fn settings(writes: impl IntoIterator<Item = (String, String)>) -> Settings {
    let options: BTreeMap<String, String> =
        [("nested", "0"), ("npt", "1")].map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    Settings {
        writes: writes.into_iter().collect(),
        modules: [("kvm_amd".to_owned(), options)].into(),
        boot: (vec!["mitigations=off".to_owned()], vec!["clocksource=tsc".to_owned(), "nohz=on".to_owned()]),
        omitted: vec![("change virtual machine web".to_owned(), "a reason with {{ signs }} and [brackets]".to_owned())],
    }
}

fn usual_settings() -> Settings {
    settings(WRITES.iter().map(|(path, value)| ((*path).to_owned(), (*value).to_owned())))
}

/// Each odd value as a sysctl, a file of sysfs and a parameter of a module.
fn odd_settings() -> Settings {
    let of_value = |(number, value): (usize, &&str)| {
        let paths = ["proc/sys/kernel/odd", "sys/kernel/odd", "sys/module/odd/parameters/odd"];
        paths.map(|path| (format!("{path}{number}"), (*value).to_owned()))
    };
    settings(ODD_VALUES.iter().enumerate().flat_map(of_value))
}

/// Why a test cannot run here.
fn missing_need(programs: &[&str]) -> Option<String> {
    if fs::metadata("/proc/self").is_ok_and(|process| process.uid() != 0) {
        return Some("it needs root for a mount namespace".to_owned());
    }
    let may_mount =
        Command::new("unshare").args(["--mount", "true"]).output().is_ok_and(|output| output.status.success());
    if !may_mount {
        return Some("unshare --mount is not permitted".to_owned());
    }
    let exists = |program: &&&str| {
        ["usr/sbin", "usr/bin", "sbin", "bin"].iter().any(|folder| Path::new("/").join(folder).join(program).exists())
    };
    let missing = programs.iter().find(|program| !exists(program));
    missing.map(|program| format!("{program} is missing: run labs/setup.sh"))
}

/// Makes the files of the settings, runs `$commands` and copies what is in the files and in /etc to `$out`.
const SCENE: &str = r#"
set -e
mount -t tmpfs none /proc/sys
mount -t tmpfs none /proc/irq
mount -t tmpfs none /sys
mount -t tmpfs none /boot
mount -t tmpfs none /run
mount -t tmpfs none /var/log
# What is written to these directories stays in memory.
for directory in etc usr/lib; do
    layers="/run/layers/$directory"
    mkdir -p "$layers/upper" "$layers/work"
    mount -t overlay -o "lowerdir=/$directory,upperdir=$layers/upper,workdir=$layers/work" none "/$directory"
done
for directory in sysctl.d tmpfiles.d modprobe.d tuned; do
    mkdir -p "/etc/$directory"
    mount -t tmpfs none "/etc/$directory"
done
mkdir -p "/usr/lib/modules/$(uname -r)"
mount -t tmpfs none "/usr/lib/modules/$(uname -r)"
while read -r path; do
    mkdir -p "/${path%/*}"
    # tuned reads the previous value.
    echo > "/$path"
done < paths
sh -ec "$commands" > "$out/log" 2>&1 || { cat "$out/log" >&2; exit 1; }
while read -r path; do
    mkdir -p "$out/${path%/*}"
    cp "/$path" "$out/$path"
done < paths
mkdir -p "$out/etc"
cp -R /etc/sysctl.d /etc/tmpfiles.d /etc/modprobe.d "$out/etc/"
[ ! -e /etc/tuned/bootcmdline ] || cp /etc/tuned/bootcmdline "$out/etc/"
"#;

/// What the programs left.
struct Scene {
    folder: tempfile::TempDir,
}

impl Scene {
    /// Exports the settings to the file `exported.EXTENSION`, and runs commands of a shell with it.
    fn run(settings: &Settings, format: ExportFormat, extension: &str, commands: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(format!("exported.{extension}")), render(settings, format)).unwrap();
        let paths: String = settings.writes.keys().map(|path| format!("{path}\n")).collect();
        fs::write(folder.path().join("paths"), paths).unwrap();
        let out = folder.path().join("out");
        fs::create_dir(&out).unwrap();
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "--propagation", "private", "sh", "-c", SCENE]).current_dir(folder.path());
        shell.env("out", &out).env("commands", commands).env("HOME", folder.path()).env("LC_ALL", "C.UTF-8");
        shell.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("ANSIBLE_COLLECTIONS_PATH", collections());
        // The host's configuration would apply instead.
        fs::write(folder.path().join("ansible.cfg"), "").unwrap();
        shell.env("ANSIBLE_CONFIG", folder.path().join("ansible.cfg"));
        let output: Output = shell.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        Self { folder }
    }

    /// A file below the root, as the programs left it; the copy of a file that nothing wrote is one line break.
    fn read(&self, path: &str) -> String {
        let path = self.folder.path().join("out").join(path);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// The value of a setting, if it was written.
    fn value(&self, path: &str) -> Option<String> {
        let text = self.read(path);
        let value = text.trim_end_matches('\n');
        (!value.is_empty()).then(|| value.to_owned())
    }
}

/// Whether a comment of an export names a setting with its value.
fn is_named(export: &str, path: &str, value: &str) -> bool {
    let name = path.rsplit('/').next().unwrap();
    let ends = ["=", " = "].map(|sign| format!("{name}{sign}{value}"));
    export.lines().any(|line| line.starts_with('#') && ends.iter().any(|end| line.ends_with(end)))
}

/// Asserts that the program wrote each setting, and for odd values that it wrote it, or that a comment names it.
fn assert_values(format: ExportFormat, scene: &Scene, settings: &Settings, reads: fn(&str) -> bool) {
    let export = render(settings, format);
    let is_usual = settings.writes.keys().all(|path| !path.contains("odd"));
    let mut differences = Vec::new();
    for (path, value) in &settings.writes {
        let written = scene.value(path);
        let is_right = match written.as_deref() {
            Some(written) => written == value && reads(path),
            None => is_named(&export, path, value) && !(is_usual && reads(path)),
        };
        if !is_right {
            differences.push(format!("{path}: exported {value:?}, written {written:?}"));
        }
    }
    assert!(differences.is_empty(), "{format:?}: {differences:#?}\n{export}");
}

/// The lines `options` of a module as modprobe reads them from a folder of modprobe.d.
fn module_options(folder: &Path, module: &str) -> Vec<String> {
    let output = Command::new("/sbin/modprobe").arg("-C").arg(folder).arg("--showconfig").output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let prefix = format!("options {module} ");
    text.lines().filter_map(|line| Some(line.strip_prefix(&prefix)?.to_owned())).collect()
}

fn is_sysctl(path: &str) -> bool {
    path.starts_with("proc/sys/")
}

#[test]
fn sysctl_writes_the_exported_values() {
    if let Some(why) = missing_need(&["sysctl"]) {
        return println!("skipped: {why}");
    }
    for settings in [usual_settings(), odd_settings()] {
        let scene = Scene::run(&settings, ExportFormat::Sysctl, "conf", "sysctl -p exported.conf");
        assert_values(ExportFormat::Sysctl, &scene, &settings, is_sysctl);
    }
}

#[test]
fn modprobe_reads_the_exported_options() {
    if let Some(why) = missing_need(&["modprobe"]) {
        return println!("skipped: {why}");
    }
    let read = |settings: &Settings, module: &str| {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("exported.conf"), render(settings, ExportFormat::Modprobe)).unwrap();
        module_options(folder.path(), module)
    };
    assert_eq!(read(&usual_settings(), "kvm_amd"), ["nested=0 npt=1"]);
    assert_eq!(read(&usual_settings(), "kvm"), ["halt_poll_ns=50000 nx_huge_pages=N"]);
    let odd = odd_settings();
    let (export, options) = (render(&odd, ExportFormat::Modprobe), read(&odd, "odd"));
    let [options] = &options[..] else { panic!("{options:?}") };
    let options: Vec<&str> = options.split(' ').collect();
    for (number, value) in ODD_VALUES.iter().enumerate() {
        let is_set = options.contains(&format!("odd{number}={value}").as_str());
        // The kernel removes quotes (kernel/params.c, `next_arg`).
        let is_plain = !value.contains(['"', ' ']);
        assert!(is_set && is_plain || is_named(&export, &format!("odd{number}"), value), "{value}: {options:?}");
    }
}

/// tuned knows a module by modinfo(8).
const TUNED: &str = r#"
cp "$modules"/*.ko "/lib/modules/$(uname -r)"
depmod
mkdir -p /etc/tuned/pagefold /var/log/tuned
cp exported.conf /etc/tuned/pagefold/tuned.conf
printf 'daemon = 0\nreapply_sysctl = 0\n' > /etc/tuned/tuned-main.conf
printf 'TUNED_BOOT_CMDLINE=\nTUNED_BOOT_INITRD_ADD=\n' > /etc/tuned/bootcmdline
touch /etc/modprobe.d/tuned.conf
tuned --no-dbus --profile pagefold --log /var/log/tuned/log < /dev/null
cat /var/log/tuned/log
"#;

/// The folder that labs/setup.sh fills.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache").canonicalize().unwrap_or_default()
}

fn collections() -> PathBuf {
    cache().join("ansible")
}

#[test]
fn tuned_applies_the_exported_profile() {
    let modules = cache().join("fleet/modules-recent");
    let missing_modules =
        || (!modules.join("kvm-amd.ko").exists()).then(|| "no kvm-amd.ko: run labs/setup.sh".to_owned());
    if let Some(why) = missing_need(&["tuned", "modinfo", "depmod"]).or_else(missing_modules) {
        return println!("skipped: {why}");
    }
    let commands = format!("modules={}\n{TUNED}", modules.display());
    for settings in [usual_settings(), odd_settings()] {
        let scene = Scene::run(&settings, ExportFormat::Tuned, "conf", &commands);
        assert_values(ExportFormat::Tuned, &scene, &settings, |path| !path.starts_with("proc/irq/"));
        assert_eq!(
            scene.read("etc/bootcmdline").lines().next(),
            Some("TUNED_BOOT_CMDLINE=\"clocksource=tsc nohz=on\"")
        );
        assert_eq!(
            module_options(&scene.folder.path().join("out/etc/modprobe.d"), "kvm_amd"),
            ["nested=0 npt=1"],
            "{}",
            scene.read("log")
        );
        let export = render(&settings, ExportFormat::Tuned);
        assert!(export.contains("\n# for the kernel command line: without mitigations=off\n"), "{export}");
    }
}

const ANSIBLE: &str = r#"
cat > play.yml << 'END'
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.import_tasks: exported.yml
END
ansible-playbook --syntax-check --inventory localhost, play.yml
ansible-playbook --inventory localhost, play.yml
"#;

#[test]
fn ansible_runs_the_exported_tasks() {
    let collection = collections().join("ansible_collections/ansible/posix");
    let missing_collection =
        || (!collection.exists()).then(|| "no collection ansible.posix: run labs/setup.sh".to_owned());
    let needs = missing_need(&["ansible-playbook", "sysctl", "systemd-tmpfiles", "modprobe"]);
    if let Some(why) = needs.or_else(missing_collection) {
        return println!("skipped: {why}");
    }
    let mut odd = odd_settings();
    odd.writes.retain(|path, value| !is_sysctl(path) || ODD_ANSIBLE_SYSCTLS.contains(&value.as_str()));
    for settings in [usual_settings(), odd] {
        let scene = Scene::run(&settings, ExportFormat::Ansible, "yml", ANSIBLE);
        assert_values(ExportFormat::Ansible, &scene, &settings, |_| true);
        let options = module_options(&scene.folder.path().join("out/etc/modprobe.d"), "kvm_amd");
        assert_eq!(options, ["nested=0 npt=1"]);
        let log = scene.read("log");
        for message in ["to be without mitigations=off", "to be clocksource=tsc", "to be nohz=on"] {
            assert!(log.contains(message), "{log}");
        }
        // What a boot reads.
        let stored = scene.read("etc/sysctl.d/90-pagefold.conf") + &scene.read("etc/tmpfiles.d/pagefold.conf");
        let count = settings.writes.iter().filter(|(path, _)| scene.value(path).is_some()).count();
        assert_eq!(stored.lines().count(), count, "{stored}");
    }
    let scene = Scene::run(&Settings::default(), ExportFormat::Ansible, "yml", ANSIBLE);
    assert!(scene.read("log").contains("PLAY"));
}
