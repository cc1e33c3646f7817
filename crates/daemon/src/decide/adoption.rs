//! What a daemon takes over from the previous one: the ranges that it enrolled and left merged.
//!
//! The record of enrollments may name ranges of processes that have ended, whose pid another process has now, and
//! ranges that the program has unmapped or another program has unenrolled since. [`decide_adoption`] compares it with
//! the host. Adopted ranges are watched and unenrolled like ranges that this daemon enrolled itself. Beside the ranges,
//! the record says with which processes a process could share pages ([`SharingScope`]), so that it is unenrolled if the
//! configuration no longer permits that.

use super::{DaemonRules, DaemonState, DecisionKind, DecisionReason, Effect, TrackedProcess};
use pagefold_base::domain::TrustDomain;
use pagefold_base::units::ProcessId;
use pagefold_base::{Absent, AddressRange, Reading};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// With which processes a process could share its merged pages.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SharingScope {
    /// With none: its trust domain is itself.
    Itself,
    /// With those of this trust domain.
    Domain(String),
    /// With those of all domains, or it is not known.
    AllDomains,
}

/// The texts of the scopes that have no name.
const ITSELF_TEXT: &str = "itself";
const ALL_DOMAINS_TEXT: &str = "all domains";
const DOMAIN_PREFIX: &str = "domain ";

impl fmt::Display for SharingScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Itself => f.write_str(ITSELF_TEXT),
            Self::Domain(domain) => write!(f, "{DOMAIN_PREFIX}{domain}"),
            Self::AllDomains => f.write_str(ALL_DOMAINS_TEXT),
        }
    }
}

impl SharingScope {
    /// The scope of a merge of a process.
    pub fn of_merge(domain: &TrustDomain, across_domains: bool) -> Self {
        match domain {
            _ if across_domains => Self::AllDomains,
            domain if domain.is_single_process() => Self::Itself,
            domain => Self::Domain(domain.to_string()),
        }
    }

    /// The scope with this text. Where the record has another text or none, it is not known.
    pub fn from_label(label: Option<&str>) -> Self {
        match label {
            Some(ITSELF_TEXT) => Self::Itself,
            Some(text) => {
                text.strip_prefix(DOMAIN_PREFIX).map_or(Self::AllDomains, |domain| Self::Domain(domain.to_owned()))
            }
            None => Self::AllDomains,
        }
    }

    /// Whether a process of a trust domain may have such shared pages.
    fn is_permitted(&self, domain: &TrustDomain, rules: &DaemonRules) -> bool {
        rules.across_domains
            || match self {
                Self::Itself => true,
                Self::Domain(name) => domain.to_string() == *name,
                Self::AllDomains => false,
            }
    }
}

/// What the record says about a process, and what the host says now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedProcess {
    /// The process.
    pub process: ProcessId,
    /// Its ranges in the record.
    pub ranges: Vec<AddressRange>,
    /// The scopes of its merges.
    pub scopes: BTreeSet<SharingScope>,
    /// Its memory now; `Vanished` if it has ended, whatever process has its pid.
    pub memory: Reading<ProcessMemory>,
}

/// The memory of a process that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Recorded ranges that still belong to the mapping that was enrolled.
    pub same_mapping: Vec<AddressRange>,
    /// Enrolled ranges, whatever program enrolled them.
    pub enrolled: Vec<AddressRange>,
}

/// A process that is taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdoptedProcess {
    /// The process.
    pub process: ProcessId,
    /// Its adopted ranges, ascending and disjoint.
    pub ranges: Vec<AddressRange>,
    /// The scopes of its merges.
    pub scopes: BTreeSet<SharingScope>,
}

/// Why recorded ranges are not taken over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StaleReason {
    /// The process has ended.
    Ended,
    /// The program has unmapped or replaced the memory.
    OtherMapping,
    /// They are no longer enrolled.
    NotEnrolled,
    /// The memory cannot be read. The ranges stay in the record.
    Unreadable(Absent),
}

impl fmt::Display for StaleReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("the process has ended"),
            Self::OtherMapping => f.write_str("the program has unmapped or replaced the memory"),
            Self::NotEnrolled => f.write_str("they were unenrolled meanwhile"),
            Self::Unreadable(why) => write!(f, "the process cannot be read: {why}"),
        }
    }
}

/// What a daemon takes over, and what not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adoption {
    /// The processes that are taken over.
    pub adopted: Vec<AdoptedProcess>,
    /// The other ranges, with the reason.
    pub stale: Vec<(ProcessId, StaleReason, Vec<AddressRange>)>,
}

impl Adoption {
    /// The ranges that the record keeps.
    pub fn kept_ranges(&self) -> BTreeMap<ProcessId, Vec<AddressRange>> {
        let adopted = self.adopted.iter().map(|adopted| (adopted.process, adopted.ranges.clone()));
        let unreadable = self.stale.iter().filter(|(_, why, _)| matches!(why, StaleReason::Unreadable(_)));
        adopted.chain(unreadable.map(|(process, _, ranges)| (*process, ranges.clone()))).collect()
    }
}

/// Decide which recorded ranges are taken over: those that are still enrolled and belong to the mapping that was
/// enrolled.
pub fn decide_adoption(recorded: Vec<RecordedProcess>) -> Adoption {
    let mut adoption = Adoption::default();
    for RecordedProcess { process, ranges, scopes, memory } in recorded {
        let ranges = AddressRange::union(ranges);
        let memory = match memory {
            Ok(memory) => memory,
            Err(why) => {
                let reason = if why == Absent::Vanished { StaleReason::Ended } else { StaleReason::Unreadable(why) };
                adoption.stale.push((process, reason, ranges));
                continue;
            }
        };
        let same_mapping = intersect(&ranges, &AddressRange::union(memory.same_mapping));
        let adopted = intersect(&same_mapping, &AddressRange::union(memory.enrolled));
        let replaced = subtract(&ranges, &same_mapping);
        let unenrolled = subtract(&same_mapping, &adopted);
        for (reason, ranges) in [(StaleReason::OtherMapping, replaced), (StaleReason::NotEnrolled, unenrolled)] {
            if !ranges.is_empty() {
                adoption.stale.push((process, reason, ranges));
            }
        }
        if !adopted.is_empty() {
            adoption.adopted.push(AdoptedProcess { process, ranges: adopted, scopes });
        }
    }
    adoption
}

/// The common parts of two lists of ascending, disjoint ranges.
fn intersect(one: &[AddressRange], other: &[AddressRange]) -> Vec<AddressRange> {
    let overlaps = |range: &AddressRange| {
        let first = other.partition_point(|candidate| candidate.end <= range.start);
        other[first..].iter().map_while(|candidate| candidate.overlap(*range)).collect::<Vec<_>>()
    };
    one.iter().flat_map(overlaps).collect()
}

/// The parts of ascending, disjoint ranges outside of others.
fn subtract(ranges: &[AddressRange], excluded: &[AddressRange]) -> Vec<AddressRange> {
    ranges.iter().flat_map(|range| range.subtract(excluded)).collect()
}

impl DaemonState {
    /// Take over processes of the previous daemon. Those that are not tracked yet are taken over when they arrive.
    pub(super) fn adopt(&mut self, adopted: Vec<(ProcessId, BTreeSet<SharingScope>)>, effects: &mut Vec<Effect>) {
        if adopted.is_empty() {
            return;
        }
        let processes: Vec<ProcessId> = adopted.iter().map(|(process, _)| *process).collect();
        let why = "an earlier daemon merged parts of it, and they are watched again";
        effects.push(self.report_decision(DecisionKind::Adopt, &processes, DecisionReason::Restarted, why));
        let (now, rules) = (self.now, self.rules.clone());
        for (process, scopes) in adopted {
            match self.tracked.get_mut(&process) {
                Some(tracked) => tracked.adopt(&scopes, now, &rules),
                None => {
                    self.adopt_on_arrival.insert(process, scopes);
                }
            }
        }
        let interval = self.rules.min_scan_interval;
        self.merged_check = ((now + interval).min(self.merged_check.0), interval);
    }
}

impl TrackedProcess {
    /// Take over what the previous daemon enrolled in it. Its first merge counts as judged, except where the previous
    /// daemon passed on that it was not. It is unenrolled if it is excluded now, or if it may share pages with processes
    /// that it must not share with any more.
    pub(super) fn adopt(&mut self, scopes: &BTreeSet<SharingScope>, now: Duration, rules: &DaemonRules) {
        (self.enrolled, self.maybe_merged) = (true, true);
        self.net_known |= self.is_new;
        if self.exclusion_reason.is_some() {
            self.request_unenroll(DecisionReason::Excluded, now);
        }
        if !scopes.iter().all(|scope| scope.is_permitted(&self.domain, rules)) {
            self.unenroll_if_shared(now);
        }
        if self.unenrolled_by_operator {
            self.request_unenroll(DecisionReason::Operator, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::units::Pid;
    use proptest::prelude::*;

    const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };

    fn ranges(pairs: &[(u64, u64)]) -> Vec<AddressRange> {
        pairs.iter().map(|&(start, end)| AddressRange { start, end }).collect()
    }

    fn recorded(pairs: &[(u64, u64)], memory: Reading<ProcessMemory>) -> RecordedProcess {
        RecordedProcess { process: PROCESS, ranges: ranges(pairs), scopes: [SharingScope::Itself].into(), memory }
    }

    fn memory(same_mapping: &[(u64, u64)], enrolled: &[(u64, u64)]) -> Reading<ProcessMemory> {
        Ok(ProcessMemory { same_mapping: ranges(same_mapping), enrolled: ranges(enrolled) })
    }

    #[test]
    fn enrolled_parts_of_the_same_mapping_are_adopted() {
        let everything = [(0, 100)];
        for (record, memory, adopted, stale) in [
            (&[(10, 20), (20, 40)][..], memory(&everything, &everything), &[(10, 40)][..], vec![]),
            (
                &[(10, 40)],
                memory(&everything, &[(0, 20), (30, 35)]),
                &[(10, 20), (30, 35)],
                vec![(StaleReason::NotEnrolled, ranges(&[(20, 30), (35, 40)]))],
            ),
            (
                &[(10, 20), (30, 40)],
                memory(&[(10, 20)], &everything),
                &[(10, 20)],
                vec![(StaleReason::OtherMapping, ranges(&[(30, 40)]))],
            ),
            (&[(10, 20)], memory(&everything, &[]), &[], vec![(StaleReason::NotEnrolled, ranges(&[(10, 20)]))]),
            (&[(10, 20)], Err(Absent::Vanished), &[], vec![(StaleReason::Ended, ranges(&[(10, 20)]))]),
        ] {
            let adoption = decide_adoption(vec![recorded(record, memory)]);
            let found: Vec<AddressRange> = adoption.adopted.iter().flat_map(|one| one.ranges.clone()).collect();
            assert_eq!(found, ranges(adopted), "{record:?}");
            let reasons: Vec<_> = adoption.stale.iter().map(|(_, why, ranges)| (why.clone(), ranges.clone())).collect();
            assert_eq!(reasons, stale, "{record:?}");
            assert_eq!(adoption.kept_ranges().values().flatten().copied().collect::<Vec<_>>(), ranges(adopted));
        }
    }

    #[test]
    fn unreadable_process_stays_in_the_record() {
        let adoption = decide_adoption(vec![recorded(&[(10, 20)], Err(Absent::Denied))]);
        assert_eq!(adoption.adopted, []);
        assert_eq!(adoption.kept_ranges(), BTreeMap::from([(PROCESS, ranges(&[(10, 20)]))]));
    }

    #[test]
    fn unknown_label_permits_no_sharing() {
        let web = TrustDomain::Group("web".to_owned());
        let domains = [web.clone(), TrustDomain::User(7), TrustDomain::Vm(None, 7), TrustDomain::Process(7)];
        let (strict, open) = (DaemonRules::default(), DaemonRules { across_domains: true, ..DaemonRules::default() });
        for domain in &domains {
            let scope = SharingScope::of_merge(domain, false);
            assert_eq!(SharingScope::from_label(Some(&scope.to_string())), scope);
            assert!(scope.is_permitted(domain, &strict));
            assert_eq!(scope.is_permitted(&web, &strict), *domain == web || domain.is_single_process());
            assert!(scope.is_permitted(&web, &open));
            let across = SharingScope::of_merge(domain, true);
            assert!(!across.is_permitted(domain, &strict) && across.is_permitted(domain, &open));
            assert_eq!(SharingScope::from_label(Some(&across.to_string())), SharingScope::AllDomains);
        }
        for label in [None, Some(""), Some("of another version")] {
            assert_eq!(SharingScope::from_label(label), SharingScope::AllDomains);
        }
    }

    /// Ranges of few pages, so that they touch and overlap often.
    fn any_ranges() -> impl Strategy<Value = Vec<AddressRange>> {
        let range = (0u64..40, 1u64..8).prop_map(|(start, pages)| AddressRange { start, end: start + pages });
        prop::collection::vec(range, 0..8)
    }

    fn any_recorded() -> impl Strategy<Value = RecordedProcess> {
        let memory = prop_oneof![
            6 => (any_ranges(), any_ranges())
                .prop_map(|(same_mapping, enrolled)| Ok(ProcessMemory { same_mapping, enrolled })),
            1 => Just(Err(Absent::Vanished)),
            1 => Just(Err(Absent::Denied)),
        ];
        (any_ranges(), memory).prop_map(|(ranges, memory)| RecordedProcess {
            process: PROCESS,
            ranges,
            scopes: BTreeSet::new(),
            memory,
        })
    }

    fn holds(ranges: &[AddressRange], page: u64) -> bool {
        ranges.iter().any(|range| range.contains(page))
    }

    proptest! {
        /// Each page of the record is adopted or stale, never both. Adopted is exactly what is recorded, enrolled, and
        /// in the same mapping of a running process.
        #[test]
        fn each_recorded_page_is_adopted_or_stale(recorded in any_recorded()) {
            let adoption = decide_adoption(vec![recorded.clone()]);
            for page in 0..50 {
                let is_adopted = adoption.adopted.iter().any(|one| holds(&one.ranges, page));
                let stale_count = adoption.stale.iter().filter(|(.., ranges)| holds(ranges, page)).count();
                let is_recorded = holds(&recorded.ranges, page);
                prop_assert_eq!(usize::from(is_adopted) + stale_count, usize::from(is_recorded));
                let is_valid = recorded
                    .memory
                    .as_ref()
                    .is_ok_and(|memory| holds(&memory.same_mapping, page) && holds(&memory.enrolled, page));
                prop_assert_eq!(is_adopted, is_recorded && is_valid);
            }
        }

        /// A second restart adopts the same again, and finds nothing stale.
        #[test]
        fn adoption_is_stable(recorded in any_recorded()) {
            let first = decide_adoption(vec![recorded.clone()]);
            for adopted in first.adopted {
                let ranges = adopted.ranges.clone();
                let again = decide_adoption(vec![RecordedProcess { ranges, ..recorded.clone() }]);
                prop_assert_eq!((again.adopted, again.stale), (vec![adopted], vec![]));
            }
        }

        /// Processes do not affect each other.
        #[test]
        fn each_process_is_decided_by_itself(all in prop::collection::vec(any_recorded(), 0..4)) {
            let together = decide_adoption(all.clone());
            let alone: Vec<Adoption> = all.into_iter().map(|one| decide_adoption(vec![one])).collect();
            prop_assert_eq!(together.adopted, alone.iter().flat_map(|one| one.adopted.clone()).collect::<Vec<_>>());
            prop_assert_eq!(together.stale, alone.iter().flat_map(|one| one.stale.clone()).collect::<Vec<_>>());
        }
    }
}
