//! Properties of the rules under any facts.

use super::*;
use proptest::prelude::*;

/// A machine that no rule warns of.
pub(super) fn good_vm() -> VmFacts {
    let mut machine = VmFacts { guest: Some(Ok(guest::good_guest())), ..vm(500, GOOD_VM, &["0-7", "0-7"]) };
    machine.threads.as_mut().unwrap().push(vhost_worker("0-7"));
    machine
}

/// The command line of a machine that no rule warns of.
pub(super) const GOOD_VM: &str = "qemu-system-x86_64 -accel kvm -cpu host -smp 2 -m 1G -blockdev driver=file,filename=/dev/vg/a,node-name=f,\
     cache.direct=on,aio=native -device virtio-blk-pci,drive=f,id=disk,iothread=io0 \
     -netdev tap,id=net,vhost=on -device virtio-net-pci,netdev=net";

fn absent() -> impl Strategy<Value = Absent> {
    prop::sample::select(vec![Absent::Denied, Absent::Vanished, Absent::Malformed("x".to_owned())])
}

/// A text of the kind that the files have.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec!["", "0", "1", "Y", "N", "-1", "0-3", "[none] x", "[always] madvise", "tsc"])
            .prop_map(str::to_owned),
        "[ -~\n]{0,30}",
        any::<u64>().prop_map(|number| number.to_string()),
    ]
}

proptest! {
    #[test]
    fn any_texts_are_judged_without_panic(
        texts in prop::collection::vec((0..GOOD.len(), text()), 0..20),
        arguments in "(-(cpu|smp|device|drive|netdev) [a-z,=0-9]{0,12} ){0,6}",
    ) {
        let changes: Vec<_> = texts.iter().map(|(position, text)| (GOOD[*position].0, text.as_str())).collect();
        let machine = vm(500, &format!("qemu-system-x86_64 {arguments}"), &["0-7"]);
        let facts = host_with(&changes, vec![good_vm(), machine]);
        for found in examine(&facts) {
            prop_assert!(found.verdict < Warn || !found.remedy.is_empty(), "{found:?}");
            prop_assert!(found.verdict >= Warn || found.changes.is_empty(), "{found:?}");
        }
    }

    #[test]
    fn rules_without_readings_are_never_ok(why in absent()) {
        let mut facts = host_with(&[], vec![good_vm()]);
        for file in facts.settings.files.values_mut() {
            file.text = Err(why.clone());
        }
        for names in facts.settings.directories.values_mut() {
            *names = Err(why.clone());
        }
        for machine in &mut facts.settings.vms {
            machine.definition = Some(Err(why.clone()));
            machine.threads = Err(why.clone());
            machine.node_memory = Some(Err(why.clone()));
            machine.merged_pages = Err(why.clone());
            machine.iothread_loads = Err(why.clone());
            machine.throttling = Err(why.clone());
            machine.next_definition = Some(Err(why.clone()));
            machine.guest = Some(Err(why.clone()));
        }
        for found in examine(&facts) {
            prop_assert!(matches!(found.verdict, Unknown | NotApplicable), "{found:?}");
        }
    }

    #[test]
    fn a_rule_that_is_ok_has_read_all_of_its_files(position in 0..GOOD.len(), why in absent()) {
        // A rule that is no longer what it was with any other text must not be ok without the file.
        let path = GOOD[position].0;
        let good = examine(&host_with(&[], vec![good_vm()]));
        let mut facts = host_with(&[], vec![good_vm()]);
        facts.settings.files.get_mut(path).unwrap().text = Err(why);
        let unreadable = examine(&facts);
        let garbage = examine(&host_with(&[(path, "~")], vec![good_vm()]));
        for ((good, unreadable), garbage) in good.iter().zip(&unreadable).zip(&garbage) {
            prop_assert_eq!(good.rule, unreadable.rule);
            if good.verdict == Fine && garbage.verdict == Unknown {
                prop_assert_eq!(unreadable.verdict, Unknown, "{:?}", unreadable);
            }
        }
    }
}

#[test]
fn host_in_good_order_has_no_warning() {
    let findings = examine(&host_with(&[], vec![good_vm()]));
    let bad: Vec<_> = findings.iter().filter(|finding| finding.verdict > Fine).collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
pub(super) fn recording_without_settings_is_not_judged() {
    let mut facts = host_with(&[], vec![]);
    facts.settings = SettingFacts::default();
    for found in examine(&facts) {
        assert_eq!(found.verdict, NotApplicable, "{found:?}");
        note_tested(found.rule, NotApplicable);
    }
}

#[test]
fn ids_of_rules_are_unique_and_in_kebab_case() {
    let summaries = rule_summaries();
    let ids: BTreeSet<&str> = summaries.iter().map(|summary| summary.id).collect();
    assert_eq!(ids.len(), summaries.len());
    assert!(ids.iter().all(|id| id.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')), "{ids:?}");
}
