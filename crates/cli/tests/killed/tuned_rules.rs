//! Changes the setting of each rule that `tune apply` carries out on a real kernel: an emulated machine with SVM, NUMA
//! nodes, an NVMe disk, frequencies and idle states. All rules are applied together and undone, then each one is
//! applied, undone and killed. A rule without a row fails, unless [`NOT_TESTED`] names why.

use crate::modules::compile_guest_program;
use crate::{PAGEFOLD_BINARY, SETTING_POINTS, SHORT_JOURNAL_POINTS};
use pagefold_doctor::decide::audit::rule_summaries;
use pagefold_doctor::decide::change::ApplyMethod;
use pagefold_doctor::decide::{ksm_rule_summaries, process_rule_summaries};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::machine::{self, EmulatedMachine};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The emulated machine takes minutes for its kills on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(900);

const MODULES: [&str; 5] = ["irqbypass", "kvm", "kvm-amd", "mq-deadline", "acpi-cpufreq"];

/// Programs of kmod, by their names in the guest.
const PROGRAMS: [&str; 2] = ["sbin/modprobe", "sbin/depmod"];

/// At which points a change is killed.
#[derive(Clone, Copy, PartialEq)]
enum Kills {
    /// At each time of each point.
    All,
    /// Where the setting has just changed, and at the last point.
    Few,
}

/// A rule with its setting.
struct Row {
    rule: &'static str,
    /// A pattern for the files of the setting.
    files: &'static str,
    /// What the guest writes to spoil the setting.
    written: &'static str,
    /// The value that the kernel then shows, of several files with commas.
    wrong: &'static str,
    /// The value after `tune apply`.
    tuned: &'static str,
    kills: Kills,
}

const fn row(
    rule: &'static str,
    files: &'static str,
    written: &'static str,
    wrong: &'static str,
    tuned: &'static str,
) -> Row {
    Row { rule, files, written, wrong, tuned, kills: Kills::Few }
}

/// Live changes take the same steps, so one of them is killed at each point. The reload of a module, and undos, are
/// killed at each point by [`crate::modules`] and [`crate::tuning`].
const ROWS: &[Row] = &[
    row("ksm-nodes", "/sys/kernel/mm/ksm/merge_across_nodes", "1", "1", "0"),
    row("ksm-run", "/sys/kernel/mm/ksm/run", "0", "0", "1"),
    row("kvm-ept", "/sys/module/kvm_amd/parameters/npt", "0", "N", "Y"),
    row("kvm-nested", "/sys/module/kvm_amd/parameters/nested", "1", "1", "0"),
    row("kvm-halt-poll", "/sys/module/kvm/parameters/halt_poll_ns", "400000", "400000", "50000"),
    row("kvm-nx-huge-pages", "/sys/module/kvm/parameters/nx_huge_pages", "1", "Y", "N"),
    row("host-clocksource", "/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet", "hpet", "tsc"),
    row(
        "cpu-governor",
        "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor",
        "schedutil",
        "schedutil",
        "performance",
    ),
    row("cpu-idle-states", "/sys/devices/system/cpu/cpu*/cpuidle/state2/disable", "0", "0,0", "1,1"),
    row("numa-balancing", "/proc/sys/kernel/numa_balancing", "0", "0", "1"),
    Row { kills: Kills::All, ..row("zone-reclaim", "/proc/sys/vm/zone_reclaim_mode", "1", "1", "0") },
    row("thp-guest-ram", "/sys/kernel/mm/transparent_hugepage/enabled", "never", "never", "madvise"),
    row("thp-shared-memory", "/sys/kernel/mm/transparent_hugepage/shmem_enabled", "never", "never", "advise"),
    row("sched-autogroup", "/proc/sys/kernel/sched_autogroup_enabled", "1", "1", "0"),
    row("sched-base-slice", "/sys/kernel/debug/sched/base_slice_ns", "400000", "400000", "1400000"),
    row("preemption-model", "/sys/kernel/debug/sched/preempt", "full", "full", "lazy"),
    row("nvme-scheduler", "/sys/block/nvme0n1/queue/scheduler", "mq-deadline", "mq-deadline", "none"),
    row("io-uring", "/proc/sys/kernel/io_uring_disabled", "2", "2", "0"),
];

/// Rules whose change no guest makes, and why. Those that an emulated CPU lacks must be `not_applicable` in the guest.
const NOT_TESTED: [(&str, Untested); 3] = [
    // QEMU emulates no CPU that reports pause loops (`pausefilter`, `ple`).
    ("kvm-ple", Untested::NotOnThisCpu),
    // QEMU emulates no CPU with a virtual APIC.
    ("kvm-apicv", Untested::NotOnThisCpu),
    // Pagefold does not load kvm again; the guest checks the refusal.
    ("kvm-tdp-mmu", Untested::Refused),
];

#[derive(Clone, Copy, PartialEq)]
enum Untested {
    NotOnThisCpu,
    Refused,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Whether a row of the document's table of findings that are left to the operator names a rule.
fn is_left_to_operator(table: &str, rule: &str) -> bool {
    let names = table.lines().flat_map(|row| row.split('|').nth(1).unwrap_or_default().split('`'));
    names.into_iter().any(|name| name == rule || name.strip_suffix('*').is_some_and(|start| rule.starts_with(start)))
}

#[test]
fn each_rule_that_is_carried_out_is_tested_on_a_kernel() {
    let document = fs::read_to_string(repository().join("docs/settings.md")).unwrap();
    let (_, table) = document.split_once("| findings | why |\n|---|---|\n").unwrap();
    let table = table.split_once("\n\n").unwrap().0;
    let all = rule_summaries().into_iter().chain(ksm_rule_summaries()).chain(process_rule_summaries());
    let is_made = |method: ApplyMethod| matches!(method, ApplyMethod::Live | ApplyMethod::ModuleReload);
    let carried_out: BTreeSet<&str> = all
        .filter(|rule| is_made(rule.details.method) && !is_left_to_operator(table, rule.id))
        .map(|rule| rule.id)
        .collect();
    let listed = ROWS.iter().map(|row| row.rule).chain(NOT_TESTED.iter().map(|(rule, _)| *rule));
    assert_eq!(listed.clone().count(), listed.clone().collect::<BTreeSet<_>>().len(), "a rule is listed twice");
    assert_eq!(carried_out, listed.collect(), "the rules that are carried out, and those of this test");
}

/// The tables of the firmware for processors, compiled.
fn compile_processors(folder: &Path) -> Result<PathBuf, String> {
    let table = folder.join("processors");
    let mut compiler = Command::new("iasl");
    compiler.arg("-p").arg(&table).arg(repository().join("labs/guest/processors.asl"));
    let output = compiler.output().map_err(|error| format!("iasl: {error}: run labs/setup.sh"))?;
    assert!(output.status.success(), "{output:?}");
    Ok(table.with_extension("aml"))
}

/// Boots the machine. Returns its output.
fn run_machine() -> Result<String, String> {
    let directory = GuestAssets::default_directory();
    GuestAssets::find(&directory).map_err(|why| why.to_string())?;
    let kernel = GuestAssets::find_recent_kernel(&directory).map_err(|why| why.to_string())?;
    machine::find_busybox().map_err(|why| why.to_string())?;
    let modules = MODULES.map(|name| directory.join(format!("modules-recent/{name}.ko")));
    let kmod = PROGRAMS.map(|path| Path::new("/").join(path));
    if let Some(missing) = modules.iter().chain(&kmod).find(|file| !file.exists()) {
        return Err(format!("{} is missing: run labs/setup.sh", missing.display()));
    }
    let folder = tempfile::tempdir().unwrap();
    let stand_in = compile_guest_program(folder.path(), "machine-stand-in")?;
    let processors = format!("file={}", compile_processors(folder.path())?.display());
    let disk = folder.path().join("nvme");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let disk = format!("file={},if=none,id=nvme,format=raw", disk.display());
    let paths = MODULES.map(|name| format!("modules/{name}.ko"));
    let mut programs: Vec<(&Path, &str)> =
        vec![(&stand_in, "bin/qemu-system-x86_64"), (Path::new(PAGEFOLD_BINARY), "bin/pagefold")];
    programs.extend(kmod.iter().map(PathBuf::as_path).zip(PROGRAMS));
    programs.extend(modules.iter().map(PathBuf::as_path).zip(paths.iter().map(String::as_str)));
    let line = |row: &Row| {
        let kills = if row.kills == Kills::All { "all" } else { "few" };
        format!("{} {} {} {kills}\n", row.rule, row.files, row.written)
    };
    let rules: String = ROWS.iter().map(line).collect();
    let machine = EmulatedMachine {
        kernel: &kernel,
        init: &repository().join("labs/guest/init-tune"),
        programs: &programs,
        files: &[("rules", &rules)],
        options: &[
            // Clocks and idle states of a host that is a virtual machine itself are not judged.
            ["-cpu", "EPYC,+svm,-hypervisor", "-smp", "2", "-m", "1G"].as_slice(),
            &["-object", "memory-backend-ram,id=m0,size=640M", "-numa", "node,memdev=m0,cpus=0"],
            &["-object", "memory-backend-ram,id=m1,size=192M", "-numa", "node,memdev=m1,cpus=1"],
            &["-object", "memory-backend-ram,id=m2,size=192M", "-numa", "node,memdev=m2"],
            &["-drive", &disk],
            &["-device", "nvme,drive=nvme,serial=1"],
            &["-acpitable", &processors],
        ]
        .concat(),
        // A change of the frequency takes a TSC without these flags from the clocks.
        kernel_arguments: "tsc=nowatchdog setcpuid=constant_tsc,nonstop_tsc",
    };
    Ok(machine.run(folder.path(), TIMEOUT, &mut || Ok(())).expect("a machine"))
}

/// The lines that begin with words, without them.
fn lines<'a>(output: &'a str, words: &str) -> Vec<&'a str> {
    output.lines().filter_map(|line| line.strip_prefix(words)?.strip_prefix(' ')).collect()
}

/// Asserts that all rules together were applied, verified and undone.
fn assert_all_together(output: &str) {
    assert_eq!(lines(output, "STATUS"), ["apply 0", "verify 0", "undo 0"], "{output}");
    for (phase, value) in [
        ("spoiled", (|row| row.wrong) as fn(&Row) -> &'static str),
        ("tuned", |row| row.tuned),
        ("undone", |row| row.wrong),
    ] {
        let expected: Vec<String> = ROWS.iter().map(|row| format!("{} {}", row.rule, value(row))).collect();
        assert_eq!(lines(output, &format!("VALUE {phase}")), expected, "{phase}: {output}");
    }
    let in_force = lines(output, "VERIFY").into_iter().filter(|line| line.starts_with("in force: ")).count();
    // The idle state of two CPUs, and the file of modprobe.d.
    assert_eq!(in_force, ROWS.len() + 2, "{output}");
}

/// The verdicts in the guest of all rules about the host.
fn verdicts<'a>(output: &'a str, phase: &str) -> BTreeMap<&'a str, &'a str> {
    lines(output, &format!("VERDICT {phase}")).into_iter().filter_map(|line| line.split_once(' ')).collect()
}

/// Asserts that each rule disapproves of the wrong value and approves of the other. The verdicts are stored, as
/// `rule-verdicts.txt` counts them.
fn assert_verdicts(output: &str) {
    let (spoiled, tuned) = (verdicts(output, "spoiled"), verdicts(output, "tuned"));
    let mut list = String::new();
    for Row { rule, .. } in ROWS {
        let (before, after) = (spoiled[rule], tuned[rule]);
        assert!(["warn", "fail"].contains(&before) && after == "ok", "{rule}: {before}, {after}: {output}");
        list += &format!("{rule}: {after}, {before}\n");
    }
    for (rule, _) in NOT_TESTED.iter().filter(|(_, why)| *why == Untested::NotOnThisCpu) {
        assert_eq!(spoiled[rule], "not_applicable", "{rule}");
    }
    let path = repository().join("fixtures/expected/guest-verdicts.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(path, list).unwrap();
        return;
    }
    let expected = fs::read_to_string(path).unwrap();
    assert_eq!(list, expected, "guest-verdicts.txt differs: if this is right, run with UPDATE_GOLDEN=1");
}

/// Asserts that a module which Pagefold does not load again stays as it is.
fn assert_refusal(output: &str) {
    let [refusal] = lines(output, "REFUSED")[..] else { panic!("{output}") };
    assert!(refusal.starts_with("2 tdp_mmu=N ") && refusal.contains("does not load kvm again"), "{refusal}");
    for (rule, _) in NOT_TESTED.iter().filter(|(_, why)| *why == Untested::Refused) {
        assert!(refusal.contains(rule), "{refusal}");
        assert_eq!(verdicts(output, "refused")[rule], "warn", "{output}");
    }
}

/// What a kill left.
struct Kill<'a> {
    /// The number and the name of the point.
    point: &'a str,
    /// The value after the kill, after `recover`, and after the undo of what was kept.
    values: Vec<&'a str>,
    is_kept: bool,
    line: &'a str,
}

impl<'a> Kill<'a> {
    fn parse(line: &'a str) -> Self {
        let mut parts = line.split('|');
        let mut part = || parts.next().unwrap_or_else(|| panic!("{line}"));
        let (point, result) = (part(), part());
        let of_key = |key: &str| result.split(' ').filter_map(|word| word.strip_prefix(key)).collect::<Vec<_>>();
        assert_eq!(of_key("killed="), ["137"], "killed by SIGKILL, as a shell reports it: {line}");
        assert!(of_key("recovered=") == ["0"] && of_key("undone=").iter().all(|status| *status == "0"), "{line}");
        let (values, is_kept) = (of_key("value="), of_key("kept=") == ["yes"]);
        assert_eq!(values.len(), if is_kept { 3 } else { 2 }, "{line}");
        Self { point, values, is_kept, line }
    }
}

/// Asserts that a kill lost no value: what is not kept is restored by `recover`, and the rest by the undo.
fn assert_restored(row: &Row, kill: &Kill<'_>) {
    assert_eq!(kill.values.last(), Some(&row.wrong), "{}", kill.line);
    assert!([row.wrong, row.tuned].contains(&kill.values[1]), "{}", kill.line);
    match kill.point.split_once(' ').unwrap().1 {
        // The first of several files, or a module that is absent.
        "after writing a setting" | "after unloading a module" => {
            assert!(kill.values[0] != row.wrong && !kill.is_kept, "{}", kill.line);
        }
        "after removing a journal" => {
            assert!(kill.values[..2] == [row.tuned, row.tuned] && kill.is_kept, "{}", kill.line);
        }
        _ => {}
    }
}

/// Asserts that each rule was applied, undone and killed where its row says.
fn assert_each(output: &str) {
    for row in ROWS {
        let rule = row.rule;
        let result = format!("apply=0 value={} undo=0 value={}", row.tuned, row.wrong);
        assert_eq!(lines(output, &format!("RULE {rule}")), [result], "{output}");
        let kills: Vec<Kill<'_>> = lines(output, &format!("KILL {rule}")).into_iter().map(Kill::parse).collect();
        kills.iter().for_each(|kill| assert_restored(row, kill));
        let reached = lines(output, &format!("POINT {rule}")).into_iter().map(|line| {
            let (point, times) = line.rsplit_once(": ").unwrap();
            (point, times.parse::<u64>().unwrap())
        });
        let reached: BTreeMap<&str, u64> = reached.collect();
        match row.kills {
            Kills::Few => assert_eq!(kills.len(), 2, "{rule}: {output}"),
            Kills::All => {
                assert_eq!(kills.len() as u64, reached.values().sum::<u64>(), "{rule}: {output}");
                for point in SHORT_JOURNAL_POINTS.iter().chain(SETTING_POINTS) {
                    assert!(reached.contains_key(point), "{rule}: {point} was not reached: {output}");
                }
            }
        }
    }
}

#[test]
fn rules_change_a_real_kernel_and_survive_kill() {
    let output = match run_machine() {
        Ok(output) => output,
        Err(why) => return println!("skipped: {why}"),
    };
    assert!(output.lines().any(|line| line == "ENDED"), "{output}");
    assert_all_together(&output);
    assert_verdicts(&output);
    assert_each(&output);
    assert_refusal(&output);
    assert_eq!(lines(&output, "BY-HAND"), ["apply=0 npt=Y undo=0 npt=N"], "{output}");
}
