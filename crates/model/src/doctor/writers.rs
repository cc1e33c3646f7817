//! Programs that write KSM's settings, and the kernel's own advisor.

use super::enrolment::some_of;
use super::fleet::Fleet;
use super::settings::{advisor_is_on, ksm};
use super::{HostFacts, HostRule, Missing, Outcome, Rule, Tuner, is_set, need, set};

pub(super) const RULES: &[HostRule] = &[
    HostRule {
        rule: Rule {
            id: "ksm-tuners",
            source: "/proc/*/cmdline",
            why: "These daemons set run, pages_to_scan and sleep_millisecs by rules of their own, mostly by free \
                  memory: what is set by hand lasts until their next turn, and with enough free memory they stop \
                  ksmd.",
            needs_ksm: true,
        },
        judge: tuners,
    },
    HostRule {
        rule: Rule {
            id: "ksm-advisor-writer",
            source: "/sys/kernel/mm/ksm/advisor_mode",
            why: "While the advisor is on, a write to pages_to_scan fails with EINVAL; the daemons do not look at the \
                  error, and only their run and sleep_millisecs take effect. Each write of advisor_mode resets \
                  pages_to_scan.",
            needs_ksm: true,
        },
        judge: advisor_writer,
    },
];

fn sorted(facts: &HostFacts) -> Result<Vec<Tuner>, Missing> {
    let mut tuners = need("command lines", &facts.tuners)?.clone();
    tuners.sort_unstable();
    tuners.dedup();
    Ok(tuners)
}

fn names(tuners: &[Tuner]) -> String {
    some_of(&tuners.iter().map(|tuner| tuner.name().to_owned()).collect::<Vec<_>>())
}

/// One daemon is a warning, for it may be wanted, and whoever sets KSM by hand must know. Two are a failure: they undo
/// each other. tuned and ksmctl write once and are fine alone; tuned is what to ask when `run` is 2.
fn tuners(rule: &Rule, facts: &HostFacts, _: &Fleet) -> Outcome {
    let tuners = sorted(facts)?;
    let daemons: Vec<_> = tuners.iter().copied().filter(|tuner| tuner.writes_rate()).collect();
    let stop = |which: &[Tuner]| which.iter().flat_map(|tuner| tuner.stop()).copied().collect::<Vec<_>>();
    Ok(match daemons.as_slice() {
        [] if tuners.contains(&Tuner::Tuned) && *need("run", &ksm(facts)?.run)? == 2 => rule
            .warn("tuned may have stopped ksmd and unmerged everything", names(&tuners))
            .remedy(
                ["tuned-adm active", "# realtime-virtual-host and cpu-partitioning do; another profile does not:"]
                    .into_iter()
                    .chain(stop(&[Tuner::Tuned])),
            )
            .verify("tuned-adm active | grep -v -e realtime-virtual-host -e cpu-partitioning"),
        [] if tuners.is_empty() => rule.ok("nothing tunes KSM", "none found"),
        [] => rule.ok("nothing tunes KSM after boot", names(&tuners)),
        [one] => rule
            .warn(format!("{} tunes KSM", one.name()), names(&tuners))
            .remedy(
                ["# to set KSM by hand instead:"]
                    .into_iter()
                    .chain(stop(&[*one]))
                    .chain(["# it may have stopped ksmd at the end: cat /sys/kernel/mm/ksm/run"]),
            )
            .verify("pagefold doctor"),
        several => rule
            .fail(format!("{} programs tune KSM against each other", several.len()), names(&tuners))
            .remedy(["# keep one of them and stop the others:"].into_iter().chain(stop(several)))
            .verify("pagefold doctor"),
    })
}

/// A failure: the daemon believes that it sets the rate and does not.
fn advisor_writer(rule: &Rule, facts: &HostFacts, _: &Fleet) -> Outcome {
    if !advisor_is_on(ksm(facts)?)? {
        return Ok(rule.not_applicable("the advisor is off", "none"));
    }
    let daemons: Vec<_> = sorted(facts)?.into_iter().filter(|tuner| tuner.writes_rate()).collect();
    if daemons.is_empty() {
        return Ok(rule.ok("the advisor alone sets the rate", "scan-time"));
    }
    Ok(rule
        .fail("the advisor and a daemon both set the rate", format!("scan-time, {}", names(&daemons)))
        .remedy(["# leave the rate to the daemon:".to_owned(), set("advisor_mode", "none")])
        .verify(is_set("advisor_mode", "'\\[none\\] scan-time'")))
}
