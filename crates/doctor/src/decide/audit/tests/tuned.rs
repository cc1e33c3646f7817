//! Profiles of tuned: includes, order and scripts.

use super::*;
use crate::decide::audit::tuned::{active_profiles, read_profiles};

fn settings(files: &[(&str, &str)]) -> SettingFacts {
    let mut settings = SettingFacts::default();
    files.iter().for_each(|(path, text)| put(&mut settings, path, text));
    settings
}

/// The file that unmerges all pages, with these files below `/usr/lib/tuned` and the active profile `a`.
fn unmerging_file(files: &[(&str, &str)]) -> Option<String> {
    let files: Vec<(String, &str)> =
        files.iter().map(|(path, text)| (format!("usr/lib/tuned/{path}"), *text)).collect();
    let active = [("etc/tuned/active_profile", "a\n")];
    let files: Vec<(&str, &str)> =
        active.into_iter().chain(files.iter().map(|(path, text)| (&**path, *text))).collect();
    active_profiles(&settings(&files)).ok().flatten()?.find_unmerging_file()
}

const UNMERGE: &str = "[sysfs]\n# stop ksmd\n/sys/kernel/mm/ksm/run = 2  # all pages\n";

#[test]
fn included_profiles_come_first_and_later_options_override_them() {
    let includes_b = "[main]\ninclude=b\n";
    let file = |name: &str| Some(format!("usr/lib/tuned/{name}/tuned.conf"));
    assert_eq!(unmerging_file(&[("a/tuned.conf", UNMERGE)]), file("a"));
    assert_eq!(unmerging_file(&[("a/tuned.conf", includes_b), ("b/tuned.conf", UNMERGE)]), file("b"));
    let [keep, replace] =
        ["/sys/kernel/mm/ksm/run=0", "x=1\nreplace=1"].map(|lines| format!("{includes_b}[sysfs]\n{lines}\n"));
    assert_eq!(unmerging_file(&[("a/tuned.conf", &keep), ("b/tuned.conf", UNMERGE)]), None);
    assert_eq!(unmerging_file(&[("a/tuned.conf", &replace), ("b/tuned.conf", UNMERGE)]), None);
    // Profiles that include each other, and one that is not there.
    let circle = [("a/tuned.conf", "[main]\ninclude = b, -none; ${x}\n"), ("b/tuned.conf", "[main]\ninclude=a\n")];
    assert_eq!(unmerging_file(&circle), None);
    for condition in ["uname_regex=aarch64", "cpuinfo_regex=x", "enabled=false"] {
        assert_eq!(unmerging_file(&[("a/tuned.conf", &format!("{UNMERGE}{condition}\n"))]), None, "{condition}");
    }
    let named = UNMERGE.replace("[sysfs]", "[ksm]\ntype=sysfs");
    assert_eq!(unmerging_file(&[("a/tuned.conf", &named)]), file("a"));
}

#[test]
fn scripts_of_a_profile_that_unmerge_are_found() {
    let script = |line: &str| {
        let text = format!("#!/bin/sh\n. /usr/lib/tuned/functions\nstart() {{\n    {line}\n}}\nprocess $@\n");
        unmerging_file(&[("a/tuned.conf", "[script]\nscript=${i:PROFILE_DIR}/script.sh\n"), ("a/script.sh", &text)])
    };
    let found = Some("usr/lib/tuned/a/script.sh".to_owned());
    assert_eq!(script("disable_ksm"), found);
    assert_eq!(script("echo 2 > /sys/kernel/mm/ksm/run"), found);
    for harmless in ["# disable_ksm", "enable_ksm", "cat /sys/kernel/mm/ksm/run"] {
        assert_eq!(script(harmless), None, "{harmless}");
    }
    let outside = [("a/tuned.conf", "[script]\nscript=../b/script.sh\n"), ("b/script.sh", "disable_ksm\n")];
    assert_eq!(unmerging_file(&outside), None);
}

#[test]
fn profiles_below_etc_come_before_those_of_the_package() {
    let files = |directory: &str, text: &str| (format!("{directory}/a/tuned.conf"), text.to_owned());
    let own = files("etc/tuned", "[main]\ninclude=a\n[sysfs]\n/sys/kernel/mm/ksm/run=1\n");
    let packaged = files("usr/lib/tuned", UNMERGE);
    let active = ("etc/tuned/active_profile".to_owned(), "other a\n".to_owned());
    let all: Vec<(&str, &str)> = [&active, &own, &packaged].map(|(path, text)| (path.as_str(), text.as_str())).into();
    let profiles = active_profiles(&settings(&all)).ok().flatten().unwrap();
    assert_eq!((profiles.names.as_str(), profiles.find_unmerging_file()), ("other a", None));
    let mut read = Vec::new();
    read_profiles(|path| {
        read.push(path.to_owned());
        all.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned())
    });
    assert!(read.contains(&own.0) && read.contains(&packaged.0), "{read:?}");
    assert!(active_profiles(&settings(&[])).ok().unwrap().is_none());
}

/// Makes a profile of tuned active.
pub(in crate::decide) fn put_profile(facts: &mut HostFacts, name: &str, text: &str) {
    for (path, text) in
        [("etc/tuned/active_profile".to_owned(), name), (format!("usr/lib/tuned/{name}/tuned.conf"), text)]
    {
        let file = SettingFile { text: Ok(text.to_owned()), mode: Ok(0o644) };
        facts.settings.files.insert(path, file);
    }
}

#[test]
fn profile_of_tuned_that_unmerges_is_named_with_its_file() {
    let mut facts = healthy();
    facts.tuners = Ok(Vec::new());
    put_profile(&mut facts, "rt", "[sysfs]\n/sys/kernel/mm/ksm/run=2\n");
    let judge = |facts: &HostFacts| examine_host(facts).into_iter().find(|found| found.rule == "ksm-tuners").unwrap();
    assert_eq!(judge(&facts).verdict, Fine, "tuned does not run, and pages are merged");
    facts.ksm.as_mut().unwrap().run = Ok(2);
    let found = judge(&facts);
    assert_eq!((found.verdict, found.value.as_str()), (Warn, "rt: run = 2 by /usr/lib/tuned/rt/tuned.conf"));
}
