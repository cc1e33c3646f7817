//! What agents in guests tell.

use super::*;
use crate::decide::audit::facts::GuestFacts;
use pagefold_base::guest::{GuestSystem, GuestVcpus};
use proptest::prelude::*;

const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
const CLOCKS: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
const DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";
/// Stands for the share of stolen time.
const STEAL: &str = "/proc/stat";
const CPUINFO: &str = "/proc/cpuinfo";
/// Stands for the lines about the timer.
const TIMER: &str = "/boot/config";

const FILES: [&str; 5] = [CLOCK, CLOCKS, DRIVER, STEAL, CPUINFO];

/// A Linux guest of two CPUs that no rule warns of.
pub(super) fn good_guest() -> GuestFacts {
    let files = [
        (CLOCK, "kvm-clock\n"),
        (CLOCKS, "kvm-clock tsc acpi_pm \n"),
        (DRIVER, "none\n"),
        (CPUINFO, "processor\t: 0\nflags\t\t: fpu tsc constant_tsc\n\nprocessor\t: 1\n"),
    ];
    GuestFacts {
        system: Ok(GuestSystem { id: "debian".to_owned() }),
        vcpus: Ok(GuestVcpus { online: 2, offline: 0 }),
        steal_percent: Ok(1.0),
        files: files.into_iter().map(|(path, text)| (path, Ok(text.as_bytes().to_vec()))).collect(),
        timer_configuration: Ok(b"CONFIG_NO_HZ_IDLE=y\nCONFIG_HZ_250=y\nCONFIG_HZ=250".to_vec()),
    }
}

fn set(guest: &mut GuestFacts, path: &'static str, bytes: Reading<Vec<u8>>) {
    match path {
        TIMER => guest.timer_configuration = bytes,
        STEAL => {
            let parse = |bytes: Vec<u8>| String::from_utf8(bytes).ok().and_then(|text| text.parse().ok());
            guest.steal_percent = bytes.and_then(|bytes| parse(bytes).ok_or_else(|| Absent::Malformed("x".to_owned())));
        }
        _ => {
            guest.files.insert(path, bytes);
        }
    }
}

fn guest_with(changes: &[(&'static str, &str)]) -> GuestFacts {
    let mut guest = good_guest();
    for (path, text) in changes {
        let bytes = match *text {
            ABSENT => Err(Absent::NotOnThisKernel),
            DENIED => Err(Absent::NoAnswer("refused".to_owned())),
            text => Ok(text.as_bytes().to_vec()),
        };
        set(&mut guest, path, bytes);
    }
    guest
}

fn machine(options: &str, vcpus: &[&str], guest: GuestFacts) -> VmFacts {
    VmFacts { guest: Some(Ok(guest)), ..vm(500, &format!("qemu-system-x86_64 -accel kvm {options}"), vcpus) }
}

const FEW_VCPUS: &[&str] = &["0-7"; 2];
/// More virtual CPUs than the host has CPUs.
const MANY_VCPUS: &[&str] = &["0-7"; 9];

/// A case: a rule, files of the guest that differ from [`good_guest`], options of QEMU, virtual CPUs, and the verdict.
type GuestCase =
    (&'static str, &'static [(&'static str, &'static str)], &'static str, &'static [&'static str], Verdict);

const INVARIANT: &str = "flags\t: tsc constant_tsc nonstop_tsc\n";
const PERIODIC: &str = "CONFIG_HZ_PERIODIC=y\nCONFIG_HZ=1000";

const CASES: &[GuestCase] = &[
    ("guest-clocksource", &[], "", FEW_VCPUS, Fine),
    ("guest-clocksource", &[(CLOCK, "tsc\n"), (CPUINFO, INVARIANT)], "", FEW_VCPUS, Fine),
    ("guest-clocksource", &[(CLOCK, "arch_sys_counter\n")], "", FEW_VCPUS, Fine),
    ("guest-clocksource", &[(CPUINFO, INVARIANT)], "", FEW_VCPUS, Warn),
    ("guest-clocksource", &[(CPUINFO, INVARIANT), (CLOCKS, "kvm-clock acpi_pm\n")], "", FEW_VCPUS, Warn),
    ("guest-clocksource", &[(CLOCK, "hpet\n")], "", FEW_VCPUS, Fail),
    ("guest-clocksource", &[(CLOCK, "acpi_pm\n")], "", FEW_VCPUS, Fail),
    ("guest-clocksource", &[(CLOCK, "jiffies\n")], "", FEW_VCPUS, Fail),
    ("guest-clocksource", &[(CLOCK, "refined-jiffies\n")], "", FEW_VCPUS, Fail),
    ("guest-clocksource", &[(CLOCK, "another\n")], "", FEW_VCPUS, NotApplicable),
    ("guest-clocksource", &[(CLOCK, ABSENT)], "", FEW_VCPUS, NotApplicable),
    ("guest-clocksource", &[(CPUINFO, ABSENT)], "", FEW_VCPUS, NotApplicable),
    ("guest-clocksource", &[(CLOCK, DENIED)], "", FEW_VCPUS, Unknown),
    ("guest-clocksource", &[(CLOCK, "")], "", FEW_VCPUS, Unknown),
    ("guest-clocksource", &[(CLOCK, "a b")], "", FEW_VCPUS, Unknown),
    (
        "guest-clocksource",
        &[(CLOCK, "a-name-that-is-longer-than-any-name-that-the-kernel-has-for-a-clock")],
        "",
        FEW_VCPUS,
        Unknown,
    ),
    ("guest-clocksource", &[(CPUINFO, DENIED)], "", FEW_VCPUS, Unknown),
    ("guest-clocksource", &[(CPUINFO, "x")], "", FEW_VCPUS, Unknown),
    ("guest-haltpoll", &[], "", FEW_VCPUS, Fine),
    ("guest-haltpoll", &[(DRIVER, "intel_idle\n")], "", MANY_VCPUS, Fine),
    ("guest-haltpoll", &[(DRIVER, "haltpoll\n")], "-cpu host", FEW_VCPUS, Fine),
    ("guest-haltpoll", &[(DRIVER, "haltpoll\n")], "-cpu EPYC,kvm-poll-control=on", FEW_VCPUS, Fine),
    ("guest-haltpoll", &[(DRIVER, "haltpoll\n")], "-cpu EPYC", FEW_VCPUS, Warn),
    ("guest-haltpoll", &[(DRIVER, "haltpoll\n")], "-cpu host,kvm-poll-control=off", FEW_VCPUS, Warn),
    ("guest-haltpoll", &[(DRIVER, "haltpoll\n")], "-cpu host", MANY_VCPUS, Warn),
    ("guest-haltpoll", &[(DRIVER, ABSENT)], "", FEW_VCPUS, NotApplicable),
    ("guest-haltpoll", &[(DRIVER, DENIED)], "", FEW_VCPUS, Unknown),
    ("guest-steal", &[], "", FEW_VCPUS, Fine),
    ("guest-steal", &[(STEAL, "10")], "", FEW_VCPUS, Fine),
    ("guest-steal", &[(STEAL, "10.1")], "", FEW_VCPUS, Warn),
    ("guest-steal", &[(STEAL, "30")], "", FEW_VCPUS, Warn),
    ("guest-steal", &[(STEAL, "30.1")], "", FEW_VCPUS, Fail),
    ("guest-steal", &[(STEAL, "30.1")], "-cpu host,kvm-steal-time=off", FEW_VCPUS, NotApplicable),
    ("guest-steal", &[(STEAL, ABSENT)], "", FEW_VCPUS, NotApplicable),
    ("guest-steal", &[(STEAL, DENIED)], "", FEW_VCPUS, Unknown),
    ("guest-steal", &[(STEAL, "x")], "", FEW_VCPUS, Unknown),
    ("guest-cpus-online", &[], "", FEW_VCPUS, Fine),
    ("guest-cpus-online", &[], "-smp 2", &[], Fine),
    ("guest-cpus-online", &[], "-smp 3", &[], Fail),
    ("guest-cpus-online", &[], "", &["0-7"; 3], Fail),
    ("guest-timer-frequency", &[], "", MANY_VCPUS, Fine),
    ("guest-timer-frequency", &[(TIMER, "CONFIG_NO_HZ_IDLE=y\nCONFIG_HZ=1000")], "", MANY_VCPUS, Fine),
    ("guest-timer-frequency", &[(TIMER, "CONFIG_HZ_PERIODIC=y\nCONFIG_HZ=250")], "", MANY_VCPUS, Fine),
    ("guest-timer-frequency", &[(TIMER, PERIODIC)], "", FEW_VCPUS, Fine),
    ("guest-timer-frequency", &[(TIMER, PERIODIC)], "", MANY_VCPUS, Warn),
    ("guest-timer-frequency", &[(TIMER, ABSENT)], "", MANY_VCPUS, NotApplicable),
    ("guest-timer-frequency", &[(TIMER, DENIED)], "", MANY_VCPUS, Unknown),
    ("guest-timer-frequency", &[(TIMER, "CONFIG_HZ=1000")], "", MANY_VCPUS, Unknown),
    ("guest-timer-frequency", &[(TIMER, "CONFIG_NO_HZ_IDLE=y\nCONFIG_HZ=x")], "", MANY_VCPUS, Unknown),
];

fn judge(rule: &str, machine: VmFacts) -> Finding {
    finding(&host_with(&[], vec![machine]), rule)
}

#[test]
pub(super) fn guests_have_their_verdicts() {
    for (rule, changes, options, vcpus, verdict) in CASES {
        let found = judge(rule, machine(options, vcpus, guest_with(changes)));
        assert_eq!(found.verdict, *verdict, "{rule} with {changes:?} and {options}: {found:?}");
        note_tested(rule, *verdict);
        assert_eq!(found.scope, Scope::Guest(ProcessId { pid: Pid(500), start_time: 500 }));
        assert!(!found.source.contains("PID"), "{found:?}");
        assert!(*verdict < Warn || (!found.remedy.is_empty() && found.verify.is_some()), "{found:?}");
        assert!(found.changes.is_empty(), "nothing is changed within a guest: {found:?}");
        if *verdict >= Warn && !changes.is_empty() {
            let denied: Vec<_> = changes.iter().map(|(path, _)| (*path, DENIED)).collect();
            assert_eq!(
                judge(rule, machine(options, vcpus, guest_with(&denied))).verdict,
                Unknown,
                "{rule}: {changes:?}"
            );
        }
    }
    let tested: BTreeSet<&str> = CASES.iter().map(|(rule, ..)| *rule).collect();
    let rules = rule_summaries().into_iter().filter(|summary| summary.topic == Topic::Guest);
    assert!(rules.into_iter().all(|summary| tested.contains(summary.id)));
}

#[test]
fn guests_are_judged_only_if_they_were_asked() {
    let mut quiet = machine("", FEW_VCPUS, good_guest());
    quiet.guest = None;
    let findings = examine_host(&host_with(&[], vec![quiet]));
    assert!(findings.iter().all(|finding| !finding.rule.starts_with("guest-")));
}

#[test]
pub(super) fn guests_without_an_answer_are_unknown_with_the_reason() {
    let rules: BTreeSet<&str> = CASES.iter().map(|(rule, ..)| *rule).collect();
    for rule in rules {
        let judge_absence = |why: Absent| {
            let machine = VmFacts { guest: Some(Err(why)), ..machine("", FEW_VCPUS, good_guest()) };
            judge(rule, machine)
        };
        let silent = judge_absence(Absent::NoAnswer("nothing within 1000 ms".to_owned()));
        assert!(silent.verdict == Unknown && silent.value.contains("nothing within 1000 ms"), "{silent:?}");
        assert!(silent.remedy[0].contains("qemu-guest-agent"), "{silent:?}");
        let of_libvirt = judge_absence(Absent::NotAsked("libvirt has the channel".to_owned()));
        assert!(
            of_libvirt.verdict == Unknown && of_libvirt.value.contains("libvirt has the channel"),
            "{of_libvirt:?}"
        );
        let command =
            format!("--libvirt-agent --topic guest --pid {} #", machine("", FEW_VCPUS, good_guest()).process.pid);
        assert!(of_libvirt.remedy[0].contains(&command), "{of_libvirt:?}");
        assert_eq!(judge_absence(Absent::Denied).remedy, ["sudo pagefold doctor --guest-agent"]);
        assert_eq!(judge_absence(Absent::Vanished).verdict, Unknown);
        assert_eq!(judge_absence(Absent::NotOnThisKernel).verdict, NotApplicable, "{rule}");
        note_tested(rule, Unknown);
        note_tested(rule, NotApplicable);
    }
}

#[test]
fn windows_has_only_the_rule_about_cpus() {
    let mut windows = good_guest();
    windows.system = Ok(GuestSystem { id: "mswindows".to_owned() });
    for path in FILES.into_iter().chain([TIMER]) {
        set(&mut windows, path, Err(Absent::NotOnThisKernel));
    }
    for summary in rule_summaries().iter().filter(|summary| summary.topic == Topic::Guest) {
        let found = judge(summary.id, machine("", FEW_VCPUS, windows.clone()));
        let expected = if summary.id == "guest-cpus-online" { Fine } else { NotApplicable };
        assert_eq!(found.verdict, expected, "{found:?}");
        assert!(expected == Fine || found.title == "the guest is not Linux", "{found:?}");
    }
}

#[test]
fn guests_without_kvm_have_no_clock_of_kvm() {
    let emulated = |definition| {
        let mut emulated = machine("", FEW_VCPUS, good_guest());
        emulated.definition = definition;
        ["guest-clocksource", "guest-haltpoll", "guest-steal"].map(|rule| judge(rule, emulated.clone()).verdict)
    };
    let command = ["qemu-system-x86_64", "-accel", "tcg"].map(str::to_owned);
    assert_eq!(emulated(Some(parse_vm_definition(&command))), [NotApplicable; 3]);
    assert_eq!(emulated(Some(Err(Absent::Denied))), [Unknown; 3]);
    assert_eq!(emulated(None), [NotApplicable; 3]);
}

#[test]
fn polling_of_the_host_decides_whether_both_poll() {
    let judge = |halt_poll_ns: &str| {
        let machine = machine("-cpu EPYC", FEW_VCPUS, guest_with(&[(DRIVER, "haltpoll\n")]));
        let path = "sys/module/kvm/parameters/halt_poll_ns";
        finding(&host_with(&[(path, halt_poll_ns)], vec![machine]), "guest-haltpoll").verdict
    };
    assert_eq!(["200000", "0", ABSENT, DENIED, "x"].map(judge), [Warn, Fine, Fine, Unknown, Unknown]);
}

#[test]
fn cpus_that_are_offline_and_cpus_that_never_came_up_have_other_remedies() {
    let judge = |vcpus: Reading<GuestVcpus>| {
        judge("guest-cpus-online", machine("", FEW_VCPUS, GuestFacts { vcpus, ..good_guest() }))
    };
    let offline = judge(Ok(GuestVcpus { online: 1, offline: 1 }));
    assert!(offline.verdict == Fail && offline.remedy[0].contains("echo 1"), "{offline:?}");
    let missing = judge(Ok(GuestVcpus { online: 1, offline: 0 }));
    assert!(missing.verdict == Fail && missing.remedy[0].contains("dmesg"), "{missing:?}");
    assert!(missing.value.contains("1 online and 0 offline in the guest, 2 of the machine"), "{missing:?}");
    assert_eq!(judge(Ok(GuestVcpus { online: 4, offline: 0 })).verdict, Fine, "plugged in since");
    assert_eq!(judge(Err(Absent::NoAnswer("refused".to_owned()))).verdict, Unknown);
    assert_eq!(judge(Err(Absent::Malformed("x".to_owned()))).verdict, Unknown);
}

fn answer() -> impl Strategy<Value = Reading<Vec<u8>>> {
    let words = ["tsc", "hpet", "kvm-clock", "haltpoll", "30.1", PERIODIC, INVARIANT, "CONFIG_HZ=18446744073709551616"];
    prop_oneof![
        prop::sample::select(words.to_vec()).prop_map(|word| Ok(word.as_bytes().to_vec())),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Ok),
        prop::sample::select(vec![Absent::Denied, Absent::NoAnswer("x".into()), Absent::NotOnThisKernel]).prop_map(Err),
    ]
}

proptest! {
    #[test]
    fn any_answers_are_judged_without_panic(
        answers in prop::collection::vec((0..=FILES.len(), answer()), 0..12),
        online in any::<u32>(),
        offline in any::<u32>(),
    ) {
        let mut guest = good_guest();
        guest.vcpus = Ok(GuestVcpus { online, offline });
        for (position, answer) in answers {
            set(&mut guest, FILES.get(position).copied().unwrap_or(TIMER), answer);
        }
        for found in examine(&host_with(&[], vec![machine("", FEW_VCPUS, guest)])) {
            prop_assert!(found.verdict < Warn || !found.remedy.is_empty(), "{found:?}");
            prop_assert!(found.value.chars().all(|character| !character.is_control()), "{found:?}");
        }
    }

    #[test]
    fn guests_that_answer_nothing_are_never_ok(why in prop::sample::select(vec![
        Absent::Denied, Absent::Vanished, Absent::NotOnThisKernel, Absent::NoAnswer("x".into()), Absent::Malformed("x".into()),
    ])) {
        let mut guest = good_guest();
        FILES.into_iter().chain([TIMER]).for_each(|path| set(&mut guest, path, Err(why.clone())));
        guest.vcpus = Err(why.clone());
        for found in examine(&host_with(&[], vec![machine("", FEW_VCPUS, guest)])) {
            let is_guest = matches!(found.scope, Scope::Guest(_));
            prop_assert!(!is_guest || matches!(found.verdict, Unknown | NotApplicable), "{found:?}");
        }
    }
}
