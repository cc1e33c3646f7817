//! From what the daemon remembers and what the host says now to the document that is shown.

use pagefold_base::ksm::{Ksm as Counters, RMAP_ITEM_BYTES};
use pagefold_base::process::Process;
use pagefold_base::{Absent, Counts, Pages, ProcessId};
use pagefold_daemon::decide::{Leaving, Member as Known, Mode as Told, Standing};
use pagefold_daemon::run::{Fair, Said, Settings, Snapshot, Used};
use pagefold_daemon::wire::*;
use pagefold_doctor::examine;
use pagefold_doctor::wire::{DoctorReport, FindingReport, VerdictName};
use pagefold_host::{Host, observe, parse};
use pagefold_output::wire::{Classes, Who};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// Whom to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// Every member.
    All,
    /// Those that wait for their first census: to look at all takes a while where there are many. The others are left
    /// out.
    New,
}

/// The document.
pub fn status(host: &dyn Host, snapshot: &Snapshot, whom: Whom, findings: Vec<FindingReport>) -> Status {
    let (rules, budget) = (snapshot.state.rules(), snapshot.state.budget());
    let (standing, why) = snapshot.state.standing();
    let memory = observe::memory(host);
    let counters = observe::ksm(host).ok();
    let vmstat = observe::vmstat(host).unwrap_or_default();
    let page = host.page_size().bytes();
    let shares = Shares { page, counters: counters.as_ref() };
    let known = snapshot.state.members();
    // Who only observes takes no census, and nobody waits for one.
    let awaits = |known: &Known| known.is_new() && known.is_open() && rules.mode != Told::Observe;
    let chosen = |who: &&Process| whom == Whom::All || known.get(&who.id).is_some_and(awaits);
    let managed = snapshot.who.iter().filter(|who| known.contains_key(&who.id)).count();
    let mut members: Vec<Member> =
        snapshot.who.iter().filter(chosen).filter_map(|who| member(host, snapshot, who, &shares)).collect();
    members.sort_by_key(|member| (Reverse(member.resident), member.pid));
    let domains = domains(&members);
    let (workloads, workloads_left_out) = first(sums::workloads(&members), SUMS);
    let (cgroups, cgroups_left_out) = first(sums::cgroups(&members), SUMS);
    members.truncate(MEMBERS);
    let members_left_out = (managed - members.len()) as u64;
    let findings_by_verdict = by_verdict(&findings);
    let is_wrong = |finding: &FindingReport| [VerdictName::Warn, VerdictName::Fail].contains(&finding.verdict);
    let since = |name: &str, before: Option<u64>| Some(vmstat.get(name)?.saturating_sub(before?));
    Status {
        schema: SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: host.describe(),
        pid: std::process::id(),
        time: unix(SystemTime::now()),
        uptime_seconds: snapshot.started.elapsed().unwrap_or_default().as_secs_f64(),
        mode: match rules.mode {
            Told::Observe => Mode::Observe,
            Told::Advise => Mode::Advise,
            Told::Act => Mode::Act,
        },
        state: match standing {
            Standing::Starting => State::Starting,
            Standing::Working => State::Working,
            Standing::Resting => State::Resting,
            Standing::Paused => State::Paused,
            Standing::Yielding => State::Yielding,
        },
        why,
        memory: Memory {
            total: memory.as_ref().ok().and_then(|memory| Some(memory.total.as_ref().ok()?.0)),
            available: memory.as_ref().ok().and_then(|memory| Some(memory.available.as_ref().ok()?.0)),
            free: memory.as_ref().ok().and_then(|memory| Some(memory.free.as_ref().ok()?.0)),
            anon_huge: memory.as_ref().ok().and_then(|memory| Some(memory.anon_huge.as_ref().ok()?.0)),
            pressure_percent: observe::pressure(host).ok().map(|pressure| pressure.some.avg10),
        },
        goal: Goal { keep_available: rules.keep_available.map(|bytes| bytes.0) },
        bounds: bounds(&snapshot.settings, budget.left()),
        ksm: counters.as_ref().map(|counters| ksm(counters, vmstat.get("cow_ksm").copied())),
        saved: counters.as_ref().map(|counters| saved(counters, by_splitting(snapshot), page)).unwrap_or_default(),
        cpu: Cpu { ksmd: snapshot.ksmd.map(used), pagefold: Some(used(snapshot.own)) },
        resident: own_resident(page),
        arrivals: if snapshot.programs.is_ok() { Arrivals::ProcConnector } else { Arrivals::Polling },
        passes: passes(snapshot),
        decisions_by_reason: snapshot
            .reasons
            .iter()
            .map(|(reason, count)| (reason.word().to_owned(), *count))
            .collect(),
        huge_pages_split: since("thp_split_page", snapshot.before.0),
        cow_breaks: since("cow_ksm", snapshot.before.1),
        census: census(snapshot, host),
        domains,
        members,
        members_left_out,
        workloads,
        workloads_left_out,
        cgroups,
        cgroups_left_out,
        sharing: sharing(snapshot, page),
        decisions: snapshot.decisions.iter().take(DECISIONS).map(told).collect(),
        findings: findings.into_iter().filter(is_wrong).collect(),
        findings_by_verdict,
    }
}

/// The first of them, and how many are left out.
fn first<T>(mut all: Vec<T>, most: usize) -> (Vec<T>, u64) {
    let left_out = all.len().saturating_sub(most) as u64;
    all.truncate(most);
    (all, left_out)
}

/// All that the doctor finds on a host, worst first, what is in order among it.
pub fn findings(host: &dyn Host, settings: &Settings) -> Vec<FindingReport> {
    let trust = examine::Trust { domains: settings.domains.clone(), exclusions: settings.exclusions.clone() };
    let facts = examine::facts(host, &[], &trust);
    DoctorReport::of_host(host.describe(), &facts).findings
}

/// How many there are of each verdict; nothing where nobody was asked.
fn by_verdict(findings: &[FindingReport]) -> BTreeMap<VerdictName, u64> {
    let verdicts =
        [VerdictName::NotApplicable, VerdictName::Ok, VerdictName::Unknown, VerdictName::Warn, VerdictName::Fail];
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count() as u64;
    if findings.is_empty() { BTreeMap::new() } else { verdicts.map(|verdict| (verdict, count(verdict))).into() }
}

fn unix(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn used(used: Used) -> CpuUse {
    CpuUse { seconds: used.all.as_secs_f64(), percent: used.share * 100.0 }
}

fn bounds(settings: &Settings, left: f64) -> Bounds {
    Bounds {
        cpu_percent: settings.rules.cpu * 100.0,
        burst_seconds: settings.rules.burst.as_secs_f64(),
        burst_left_seconds: left,
        metadata: settings.max_metadata.map(|bytes| bytes.0),
        regions_per_process: settings.max_regions,
        split_huge_pages: settings.split_huge_pages,
    }
}

fn ksm(counters: &Counters, cow_ksm: Option<u64>) -> Ksm {
    let known = |value: &Result<u64, Absent>| value.as_ref().ok().copied();
    Ksm {
        run: known(&counters.run),
        pages_to_scan: known(&counters.pages_to_scan),
        sleep_millisecs: known(&counters.sleep_millisecs),
        pages_shared: known(&counters.pages_shared),
        pages_sharing: known(&counters.pages_sharing),
        pages_unshared: known(&counters.pages_unshared),
        pages_volatile: known(&counters.pages_volatile),
        pages_scanned: known(&counters.pages_scanned),
        pages_skipped: known(&counters.pages_skipped),
        ksm_zero_pages: counters.ksm_zero_pages.as_ref().ok().copied(),
        full_scans: known(&counters.full_scans),
        general_profit: counters.general_profit.as_ref().ok().copied(),
        cow_ksm,
    }
}

/// Pages of zeros that were freed as huge pages were split, which KSM does not count.
fn by_splitting(snapshot: &Snapshot) -> Pages {
    snapshot.by_splitting.values().copied().sum()
}

/// What merging saves: by the kernel's counters, and what was freed as huge pages were split. Before 6.6 pages of zeros
/// are merged like others.
fn saved(counters: &Counters, by_splitting: Pages, page: u64) -> Saved {
    let duplicate = counters.pages_sharing.as_ref().ok().map(|pages| pages * page);
    let zero = counters.ksm_zero_pages.as_ref().ok().map(|pages| (*pages).max(0).unsigned_abs() * page);
    let split_zero = by_splitting.0 * page;
    let gross = duplicate.map(|duplicate| duplicate + zero.unwrap_or(0) + split_zero);
    let net = counters.general_profit.as_ref().ok().map(|profit| profit + split_zero.cast_signed());
    let merged = counters.pages_shared.as_ref().ok().zip(counters.pages_sharing.as_ref().ok());
    let duplicate_net = merged
        .map(|(shared, sharing)| (sharing * page).cast_signed() - ((shared + sharing) * RMAP_ITEM_BYTES).cast_signed());
    let metadata = gross.zip(net).map(|(gross, net)| (gross.cast_signed() - net).max(0).unsigned_abs());
    Saved {
        gross,
        duplicate,
        zero,
        split_zero: Some(split_zero).filter(|bytes| *bytes > 0),
        duplicate_net,
        metadata,
        net,
    }
}

/// What KSM counts of what merging saves on a host, gross, where it can be read.
pub fn counted_by_ksm(host: &dyn Host) -> Option<u64> {
    saved(&observe::ksm(host).ok()?, Pages::ZERO, host.page_size().bytes()).gross
}

fn own_resident(page: u64) -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? * page)
}

fn passes(snapshot: &Snapshot) -> Passes {
    Passes {
        passes: snapshot.passes.0,
        merges: snapshot.passes.1,
        seconds: snapshot.took.0.as_secs_f64(),
        cpu_seconds: snapshot.took.1.as_secs_f64(),
        predicted: snapshot.reached.0.0,
        reached: snapshot.reached.1.0,
        last: snapshot.last.map(|last| Pass {
            time: unix(last.at),
            seconds: last.seconds,
            cpu_seconds: last.cost.as_secs_f64(),
            processes: last.processes,
            predicted: last.predicted.0,
            reached: last.net.map(|net| net.0),
        }),
    }
}

fn census(snapshot: &Snapshot, host: &dyn Host) -> Option<Census> {
    let (at, not_seen) = snapshot.census?;
    let mut sum = Counts::default();
    for counts in snapshot.counts.values() {
        sum += *counts;
    }
    let classes = Classes::bytes(&sum, host.page_size());
    Some(Census { time: unix(at), processes: snapshot.counts.len() as u64, not_seen, classes })
}

/// What a merged page of a process saves on average: frames are shared by all who map them. How many map its own is in
/// its page tables alone, and to walk those of everybody whenever somebody asks would cost more than what is looked at
/// here.
struct Shares<'a> {
    page: u64,
    counters: Option<&'a Counters>,
}

impl Shares<'_> {
    /// Bytes that merging saves for somebody with so many pages on KSM frames.
    fn saved(&self, merging: u64) -> Option<u64> {
        let counters = self.counters?;
        let (shared, sharing) = (*counters.pages_shared.as_ref().ok()?, *counters.pages_sharing.as_ref().ok()?);
        let all = (shared + sharing).max(1);
        Some((u128::from(merging * self.page) * u128::from(sharing) / u128::from(all)) as u64)
    }

    /// What somebody takes by now of whom the page tables were walked: its own memory that is resident since then counts
    /// in full, and what was merged since then saves by the mean. How many map files and shared memory is seen by the
    /// next walk alone.
    fn since(&self, fair: &Fair, own: Option<u64>, merging: Option<u64>) -> u64 {
        let saved = |merging: Option<u64>| merging.and_then(|merging| self.saved(merging));
        let then = fair.merging.map(|pages| pages.0);
        // Where one of the two is not known there is no difference to tell.
        let more = match (saved(merging), saved(then)) {
            (Some(now), Some(then)) => now.cast_signed() - then.cast_signed(),
            _ => 0,
        };
        let grown = own.map_or(0, |own| own.cast_signed() - fair.own.0.cast_signed());
        (fair.pss.0.cast_signed() + grown - more).max(0).unsigned_abs()
    }
}

fn member(host: &dyn Host, snapshot: &Snapshot, who: &Process, shares: &Shares<'_>) -> Option<Member> {
    let known = snapshot.state.members().get(&who.id)?;
    let handle = host.open(who.id.pid).ok().filter(|handle| handle.id() == who.id);
    let ksm =
        handle.as_ref().map(|handle| parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages")));
    let statm = handle.and_then(|handle| parse::statm(&handle.read("statm").ok()?).ok());
    let merging = ksm.as_ref().and_then(|ksm| ksm.merging_pages.as_ref().ok().copied());
    let zeros = ksm.as_ref().and_then(|ksm| Some(ksm.zero_pages.as_ref().ok()?.max(&0).unsigned_abs()));
    let pages = merging.map(|merging| merging + zeros.unwrap_or(0));
    let by_share = merging.and_then(|merging| shares.saved(merging));
    let resident = known.resident.0;
    let fair = snapshot.fair.get(&who.id);
    let by_splitting = snapshot.by_splitting.get(&who.id).map_or(0, |pages| pages.0);
    let own = statm.map(|statm| statm.own(host.page_size()).0);
    // Pages of zeros that KSM placed are not resident.
    let estimate = || by_share.map(|saved| resident.saturating_sub(saved));
    let kind = kind(who);
    let wire = Who::of(who, Some(&known.domain));
    let (state, why) = standing(snapshot, who.id, known, pages.unwrap_or(0) * shares.page);
    Some(Member {
        pid: who.id.pid.0,
        start_time: who.id.start_time,
        label: wire.label(),
        kind,
        workload: workload(who, kind),
        uid: wire.uid,
        cgroup: wire.cgroup,
        domain: known.domain.to_string(),
        resident: Some(resident),
        shared: statm.map(|statm| (statm.shared.0 * shares.page).min(resident)),
        merged: pages.map(|pages| pages * shares.page),
        footprint: fair.map(|fair| shares.since(fair, own, merging).min(resident)).or_else(estimate),
        footprint_age_seconds: fair.map(|fair| fair.at.elapsed().unwrap_or_default().as_secs()),
        saved: by_share.map(|saved| saved + (zeros.unwrap_or(0) + by_splitting) * shares.page),
        metadata: ksm.and_then(|ksm| Some(ksm.rmap_items.ok()? * RMAP_ITEM_BYTES)),
        ranges: snapshot.ranges.get(&who.id).copied().unwrap_or(0),
        state,
        why,
    })
}

fn kind(who: &Process) -> Kind {
    match who {
        _ if who.identity.vm.is_some() => Kind::Vm,
        _ if who.identity.container.is_some() => Kind::Container,
        _ if who.identity.job.is_some() => Kind::Job,
        _ => Kind::Process,
    }
}

/// What it belongs to, by name.
fn workload(who: &Process, kind: Kind) -> String {
    let identity = &who.identity;
    let name = match kind {
        Kind::Vm => identity.vm.as_ref().and_then(|vm| vm.name.clone()),
        Kind::Container => identity.container.clone(),
        Kind::Job => identity.job.as_ref().map(|job| job.name.clone()),
        Kind::Process => None,
    };
    name.unwrap_or_else(|| format!("{} {}", who.comm, who.id.pid))
}

fn standing(snapshot: &Snapshot, id: ProcessId, known: &Known, merged: u64) -> (MemberState, String) {
    let next = || {
        let since = snapshot.started.elapsed().unwrap_or_default();
        let left = known.next.saturating_sub(since);
        format!("looked at again in {}", human(left))
    };
    let still = |what: &str| leaves(what, known.leaving.as_ref(), snapshot.started.elapsed().unwrap_or_default());
    match known {
        Known { excluded: Some(why), .. } => (MemberState::Excluded, still(why)),
        Known { withdrawn: true, .. } => (MemberState::Withdrawn, still("an operator withdrew it")),
        Known { leaving: Some(leaving), .. } => (MemberState::BackedOff, still(leaving.reason.of_leaving())),
        known if known.is_new() => (MemberState::Arriving, "not looked at yet".to_owned()),
        known if known.enrolled && merged > 0 => (MemberState::Merged, next()),
        known if known.is_backed_off(snapshot.state.rules()) => (MemberState::BackedOff, next()),
        _ => {
            let nothing =
                snapshot.counts.get(&id).is_some_and(|counts| counts.duplicate() + counts.zero == Pages::ZERO);
            (MemberState::Followed, if nothing { format!("nothing to merge yet; {}", next()) } else { next() })
        }
    }
}

/// Why nothing more is merged of somebody, and what becomes of what is merged.
fn leaves(what: &str, leaving: Option<&Leaving>, now: Duration) -> String {
    match leaving {
        None => what.to_owned(),
        Some(Leaving { refused: None, .. }) => format!("{what}: it is withdrawn when that may be"),
        Some(Leaving { refused: Some(why), next, .. }) => {
            let again = human(next.saturating_sub(now));
            format!("{what}: not withdrawn yet ({why}), tried again in {again}")
        }
    }
}

fn human(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..100 => format!("{seconds} s"),
        seconds => format!("{} min", seconds / 60),
    }
}

fn domains(members: &[Member]) -> Vec<DomainShare> {
    let mut shares: BTreeMap<&str, DomainShare> = BTreeMap::new();
    let add = |sum: Option<u64>, value: Option<u64>| match (sum, value) {
        (None, None) => None,
        (sum, value) => Some(sum.unwrap_or(0) + value.unwrap_or(0)),
    };
    for member in members {
        let share = shares.entry(&member.domain).or_insert_with(|| empty(&member.domain));
        share.members += 1;
        share.resident = add(share.resident, member.resident);
        share.merged = add(share.merged, member.merged);
        share.saved = add(share.saved, member.saved);
        share.metadata = add(share.metadata, member.metadata);
    }
    let mut shares: Vec<DomainShare> = shares.into_values().collect();
    shares.sort_by_key(|share| Reverse(share.saved));
    if shares.len() > DOMAINS {
        let rest = shares.split_off(DOMAINS - 1);
        shares.push(rest.iter().fold(empty("others"), |sum, share| DomainShare {
            members: sum.members + share.members,
            resident: add(sum.resident, share.resident),
            merged: add(sum.merged, share.merged),
            saved: add(sum.saved, share.saved),
            metadata: add(sum.metadata, share.metadata),
            ..sum
        }));
    }
    shares
}

fn empty(name: &str) -> DomainShare {
    DomainShare { name: name.to_owned(), members: 0, resident: None, merged: None, saved: None, metadata: None }
}

/// The matrix of those who share most.
fn sharing(snapshot: &Snapshot, page: u64) -> Option<Sharing> {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for ((one, _), pages) in snapshot.shared.pages() {
        *sums.entry(one).or_default() += pages.0;
    }
    let mut parties: Vec<(u64, &str)> = sums.into_iter().map(|(label, sum)| (sum, label)).collect();
    parties.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
    parties.truncate(PARTIES);
    let pages =
        |one: &str, other: &str| snapshot.shared.pages().get(&(one.to_owned(), other.to_owned())).map_or(0, |p| p.0);
    let row = |one: &str| parties.iter().map(|(_, other)| pages(one, other) * page).collect();
    let shared = parties.iter().map(|(_, one)| row(one)).collect();
    (!parties.is_empty())
        .then(|| Sharing { parties: parties.iter().map(|(_, label)| (*label).to_owned()).collect(), shared })
}

pub(super) fn told(Said { at, whom, decision }: &Said) -> Decision {
    Decision {
        time_ms: at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64,
        what: decision.what.word().to_owned(),
        whom: whom.clone(),
        reason: decision.reason.word().to_owned(),
        why: decision.why.clone(),
        predicted: decision.predicted.map(|bytes| bytes.0),
        acted: decision.acted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::domain::Domain;
    use pagefold_base::{Bytes, Pid};
    use pagefold_daemon::decide::{Arrival, Reason, Rules};

    #[test]
    fn what_is_saved_is_told_by_class() {
        let counters = |zeros: &[u8]| {
            parse::ksm(|name| match name {
                "pages_shared" => Ok(b"2".to_vec()),
                "pages_sharing" => Ok(b"10".to_vec()),
                "general_profit" => Ok(b"51968".to_vec()),
                "ksm_zero_pages" if !zeros.is_empty() => Ok(zeros.to_vec()),
                _ => Err(Absent::NotOnThisKernel),
            })
        };
        let saved = |zeros: &[u8], split: u64| saved(&counters(zeros), Pages(split), 4096);
        let of = |saved: Saved| (saved.gross, saved.duplicate, saved.zero);
        assert_eq!(of(saved(b"3", 0)), (Some(13 * 4096), Some(10 * 4096), Some(3 * 4096)));
        assert_eq!(of(saved(b"", 0)), (Some(10 * 4096), Some(10 * 4096), None), "absent is not zero");
        // By hand: 64 bytes for each of 2 + 10 pages, and of 8 more that are not merged.
        let found = saved(b"3", 0);
        assert_eq!(found.duplicate_net, Some(10 * 4096 - 12 * 64));
        assert_eq!((found.metadata, found.net), (Some(20 * 64), Some(13 * 4096 - 20 * 64)));
        // What splitting huge pages freed is saved as well, and takes no metadata.
        let split = saved(b"3", 5);
        assert_eq!((split.gross, split.split_zero), (Some(18 * 4096), Some(5 * 4096)));
        assert_eq!((split.metadata, split.net), (Some(20 * 64), Some(18 * 4096 - 20 * 64)));
        assert_eq!(found.split_zero, None);
    }

    #[test]
    fn a_fair_share_moves_with_what_is_resident_and_merged_since() {
        let counters = parse::ksm(|name| match name {
            "pages_shared" => Ok(b"1".to_vec()),
            "pages_sharing" => Ok(b"3".to_vec()),
            _ => Err(Absent::NotOnThisKernel),
        });
        let shares = Shares { page: 4096, counters: Some(&counters) };
        let (pss, own) = (Bytes(600 * 4096), Bytes(1000 * 4096));
        let fair = Fair { at: SystemTime::now(), pss, own, merging: Some(Pages(100)) };
        let since = |fair: &Fair, own: u64, merging| shares.since(fair, Some(own * 4096), merging) / 4096;
        assert_eq!(since(&fair, 1000, Some(100)), 600, "nothing has changed");
        assert_eq!(since(&fair, 1050, Some(100)), 650, "50 pages more");
        assert_eq!(since(&fair, 1000, Some(140)), 570, "three in four of 40 are saved");
        assert_eq!(since(&fair, 1000, Some(60)), 630, "and were");
        assert_eq!(since(&fair, 1000, None), 600);
        assert_eq!(since(&Fair { merging: None, ..fair }, 1000, Some(60)), 600);
        assert_eq!(since(&fair, 100, Some(100)), 0, "no less than nothing");
        assert_eq!(shares.since(&fair, None, None), fair.pss.0, "as it was, where nothing else is known");
    }

    #[test]
    fn who_could_not_be_withdrawn_is_told_with_the_reason() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let (domain, likeness, resident) = (Domain::Host, String::new(), Bytes(1 << 30));
        let arrival = Arrival { process, domain, likeness, excluded: None, resident };
        let second = Duration::from_secs(1);
        let mut member = Known::new(arrival, Duration::ZERO, &Rules::default());
        let told = |member: &Known| leaves("an operator withdrew it", member.leaving.as_ref(), 3 * second);
        assert_eq!(told(&member), "an operator withdrew it");
        member.leave(Reason::Operator, Duration::ZERO);
        assert_eq!(told(&member), "an operator withdrew it: it is withdrawn when that may be");
        member.stay("there is not the memory for it".to_owned(), Duration::ZERO, Duration::ZERO);
        let again = "an operator withdrew it: not withdrawn yet (there is not the memory for it), tried again in 7 s";
        assert_eq!(told(&member), again);
    }
}
