//! Programs that write KSM's settings, and the kernel's own advisor.

use super::audit::tuned::active_profiles;
use super::change::{ApplyMethod, SettingDetails};
use super::enrollment::join_first_names;
use super::host_processes::HostProcesses;
use super::settings::{advisor_is_on, ksm};
use super::{HostFacts, HostRule, MissingReading, RuleInfo, RuleResult, Verdict, is_set_command, require, set_command};
use pagefold_base::tuner::Tuner;

pub(super) const RULES: &[HostRule] = &[
    HostRule {
        rule: RuleInfo {
            id: "ksm-tuners",
            source: "/proc/*/cmdline, /etc/tuned/active_profile, /etc/tuned/*/tuned.conf, /usr/lib/tuned/*/tuned.conf",
            why: "These daemons set run, pages_to_scan and sleep_millisecs by rules of their own, mostly by free \
                  memory. Manual settings last until their next update, and with enough free memory they stop ksmd. \
                  Some profiles of tuned write 2 to run, which unmerges all pages.",
            needs_ksm: true,
            verdicts: Verdict::ALL,
            expected: "no program changes KSM's settings after boot, and no profile unmerges all pages",
            details: SettingDetails {
                benefit: "settings keep the values that an operator chose",
                risk: "without its daemon ksmd no longer adapts to free memory",
                method: ApplyMethod::Manual,
                undo: "start and enable the daemon again, or activate the old profile",
                counter: "run, pages_to_scan and sleep_millisecs in /sys/kernel/mm/ksm",
                versions: "all kernels with KSM",
                citation: "ksmtuned: /usr/sbin/ksmtuned, /etc/ksmtuned.conf; tuned: \
                           profiles/realtime-virtual-host/script.sh (disable_ksm)",
            },
        },
        judge: judge_tuners,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-advisor-writer",
            source: "/sys/kernel/mm/ksm/advisor_mode",
            why: "While the advisor is on, a write to pages_to_scan fails with EINVAL; the daemons ignore the error, \
                  and only their run and sleep_millisecs take effect. Each change of advisor_mode resets pages_to_scan.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_WARN,
            expected: "the advisor or a daemon sets the rate, not both",
            details: SettingDetails {
                benefit: "the rate of the daemon takes effect",
                risk: "pages_to_scan is 100 until the daemon writes it",
                method: ApplyMethod::Live,
                undo: "write scan-time to advisor_mode",
                counter: "advisor_mode and pages_to_scan in /sys/kernel/mm/ksm",
                versions: "Linux 6.8 and later",
                citation: "Linux 6.18: mm/ksm.c (pages_to_scan_store, set_advisor_defaults)",
            },
        },
        judge: judge_advisor_writer,
    },
];

fn sorted_tuners(facts: &HostFacts) -> Result<Vec<Tuner>, MissingReading> {
    let mut tuners = require("command lines", &facts.tuners)?.clone();
    tuners.sort_unstable();
    tuners.dedup();
    Ok(tuners)
}

fn tuner_names(tuners: &[Tuner]) -> String {
    join_first_names(&tuners.iter().map(|tuner| tuner.name().to_owned()).collect::<Vec<_>>())
}

/// The kernel's defaults of `pages_to_scan` and `sleep_millisecs` (mm/ksm.c, `DEFAULT_PAGES_TO_SCAN` and
/// `ksm_thread_sleep_millisecs`).
const KERNEL_DEFAULT_PACE: (u64, u64) = (100, 20);

/// A note on whether a program or operator has changed the pace. Changes by the advisor do not count.
fn describe_pace_changes(facts: &HostFacts) -> String {
    match facts.ksm.as_ref().map(|ksm| (&ksm.pages_to_scan, &ksm.sleep_millisecs, &ksm.advisor_mode)) {
        Ok((Ok(pages), Ok(sleep), mode))
            if (*pages, *sleep) != KERNEL_DEFAULT_PACE && mode.as_deref() != Ok("scan-time") =>
        {
            format!("none found; pages_to_scan = {pages} and sleep_millisecs = {sleep} are not the kernel's")
        }
        _ => "none found".to_owned(),
    }
}

/// An unknown program is only detected while it writes: a setting that changes during the examination is a warning. One
/// known daemon is a warning: it may be wanted, but the operator must know that it overwrites manual settings. Two are
/// a failure: they undo each other's settings. tuned and ksmctl write once and are fine alone, unless the active profile
/// of tuned unmerges everything. Where the profile is unknown, tuned may be the cause if `run` is 2. A profile without
/// tuned counts only if `run` is 2: tuned may have applied it once and ended.
fn judge_tuners(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    let tuners = match sorted_tuners(facts) {
        Err(_) if !facts.rewritten_settings.is_empty() => Vec::new(),
        tuners => tuners?,
    };
    let daemons: Vec<_> = tuners.iter().copied().filter(|tuner| tuner.writes_rate()).collect();
    let has_tuned = tuners.contains(&Tuner::Tuned);
    let is_relevant = daemons.is_empty() && (has_tuned || facts.ksm.as_ref().is_ok_and(|ksm| ksm.run == Ok(2)));
    let profiles = if is_relevant { active_profiles(&facts.settings)? } else { None };
    let unmerging = profiles.as_ref().and_then(|profiles| Some((&profiles.names, profiles.find_unmerging_file()?)));
    let stop_commands =
        |tuners: &[Tuner]| tuners.iter().flat_map(|tuner| tuner.stop_commands()).copied().collect::<Vec<_>>();
    Ok(match daemons.as_slice() {
        [] if !facts.rewritten_settings.is_empty() => rule
            .warn("another program changes KSM's settings now", facts.rewritten_settings.join(", "))
            .remedy([
                "# no known daemon runs; look for a unit, a timer or a script that writes them:",
                "grep -rlsI mm/ksm /etc /usr/lib/systemd /usr/lib/tmpfiles.d /usr/local",
            ])
            .verify("pagefold doctor"),
        [] if let Some((names, path)) = &unmerging => rule
            .warn(
                "the active profile of tuned stops ksmd and unmerges all pages",
                format!("{}: run = 2 by /{path}", names.escape_debug()),
            )
            .remedy([
                "tuned-adm list",
                "# activate another profile (tuned-adm profile NAME), or one below /etc/tuned that includes this one and has",
                "# /sys/kernel/mm/ksm/run = 1 in its section [sysfs]; a script of the profile still applies",
            ])
            .verify("pagefold doctor --topic ksm"),
        [] if has_tuned && profiles.is_none() && *require("run", &ksm(facts)?.run)? == 2 => rule
            .warn("tuned may have stopped ksmd and unmerged everything", tuner_names(&tuners))
            .remedy(
                ["tuned-adm active", "# realtime-virtual-host and cpu-partitioning do; another profile does not:"]
                    .into_iter()
                    .chain(stop_commands(&[Tuner::Tuned])),
            )
            .verify("tuned-adm active | grep -v -e realtime-virtual-host -e cpu-partitioning"),
        [] if tuners.is_empty() => rule.ok("no program that is known to tune KSM runs", describe_pace_changes(facts)),
        [] => rule.ok("nothing tunes KSM after boot", tuner_names(&tuners)),
        [daemon] => rule
            .warn(format!("{} tunes KSM", daemon.name()), tuner_names(&tuners))
            .remedy(
                ["# to set KSM by hand instead:"]
                    .into_iter()
                    .chain(stop_commands(&[*daemon]))
                    .chain(["# it may have stopped ksmd at the end: cat /sys/kernel/mm/ksm/run"]),
            )
            .verify("pagefold doctor"),
        several => rule
            .fail(format!("{} programs tune KSM against each other", several.len()), tuner_names(&tuners))
            .remedy(["# keep one of them and stop the others:"].into_iter().chain(stop_commands(several)))
            .verify("pagefold doctor"),
    })
}

/// A failure: the daemon's rate settings have no effect, and it does not notice.
fn judge_advisor_writer(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    if !advisor_is_on(ksm(facts)?)? {
        return Ok(rule.not_applicable("the advisor is off", "none"));
    }
    let daemons: Vec<_> = sorted_tuners(facts)?.into_iter().filter(|tuner| tuner.writes_rate()).collect();
    if daemons.is_empty() {
        return Ok(rule.ok("the advisor alone sets the rate", "scan-time"));
    }
    Ok(rule
        .fail("the advisor and a daemon both set the rate", format!("scan-time, {}", tuner_names(&daemons)))
        .remedy(["# leave the rate to the daemon:".to_owned(), set_command("advisor_mode", "none")])
        .verify(is_set_command("advisor_mode", "'\\[none\\] scan-time'")))
}
