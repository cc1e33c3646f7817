//! One process: why is nothing of it merging?
//!
//! Asking for one process says that it should merge; what would be a warning for the host is therefore a failure here
//! where nothing of the process can merge for it.

use super::cost::settled;
use super::enrolment::{PRCTL_EXEC, SECCOMP, START_ENROLLED, blocked_by_reason, lost_flag};
use super::fleet::{Fleet, blocked, bytes_of, is_share, total};
use super::security::KEYS;
use super::settings::{ksm, pace, placed_zeros};
use super::{Finding, HostFacts, Missing, Outcome, ProcessFacts, Rule, Scope, Verdict, is_set, need, set};
use pagefold_base::identity::{Monitor, Vm};
use pagefold_base::reading::Absent;
use pagefold_base::region::{Ineligible, Region};
use pagefold_base::units::{Bytes, NetBytes, Pages};

const fn rule(id: &'static str, source: &'static str, why: &'static str) -> Rule {
    Rule { id, source, why, needs_ksm: true }
}

type Judge = fn(&Rule, &HostFacts, &ProcessFacts) -> Outcome;

const RULES: [(Rule, Judge); 11] = [
    (
        rule(
            "process-run",
            "/sys/kernel/mm/ksm/run",
            "ksmd merges only while run is 1; what is enrolled waits until then.",
        ),
        run,
    ),
    (
        rule(
            "process-enrolled",
            "/proc/PID/smaps (mg), /proc/PID/ksm_stat",
            "ksmd looks only at memory that is enrolled, by madvise(MADV_MERGEABLE) of the process itself or by \
             prctl(PR_SET_MEMORY_MERGE) of it or of who started it.",
        ),
        enrolled,
    ),
    (
        rule(
            "process-mem-merge",
            "/proc/PID/cmdline",
            "QEMU enrols guest RAM by itself unless mem-merge=off or merge=off forbids it (libvirt: <nosharepages/>).",
        ),
        mem_merge,
    ),
    (rule("process-eligible", "/proc/PID/smaps (VmFlags)", "KSM takes private anonymous pages only."), eligible),
    (
        rule(
            "process-pinned",
            "/proc/PID/status (VmPin), /proc/PID/cmdline",
            "ksmd passes over a page that a driver has pinned, since the device would go on with the old frame: a \
             device that is passed through pins all guest RAM.",
        ),
        pinned,
    ),
    (rule("process-prctl-exec", "/proc/PID/ksm_stat (ksm_merge_any)", PRCTL_EXEC), prctl_exec),
    (rule("process-seccomp", "/proc/PID/status (Seccomp)", SECCOMP), seccomp),
    (
        rule(
            "process-scanned",
            "/proc/PID/ksm_stat (ksm_rmap_items)",
            "ksmd comes to the processes in turn, and merges a page when it comes to it for the second time. \
             From 6.7 to 6.9 it never came to a process that had inherited the prctl flag over exec (\"mm/ksm: fix ksm \
             exec support for prctl\", 6.10 and stable).",
        ),
        scanned,
    ),
    (
        rule(
            "process-merging",
            "/proc/PID/ksm_stat (ksm_merging_pages, ksm_zero_pages), /proc/PID/smaps (KSM)",
            "Where ksmd has looked and merged nothing, there may be nothing equal to merge, or it changes between two \
             passes. A census tells which.",
        ),
        merging,
    ),
    (
        rule(
            "process-profit",
            "/proc/PID/ksm_stat (ksm_process_profit)",
            "64 bytes of metadata for each page that ksmd looks at: below one merged page in 64, the process costs \
             memory.",
        ),
        profit,
    ),
    (rule("process-keys", "/proc/PID/cmdline", KEYS), keys),
];

const PACE: Rule = rule(
    "process-pace",
    "/sys/kernel/mm/ksm/pages_to_scan, /sys/kernel/mm/ksm/sleep_millisecs",
    "A page is merged in the second pass over all enrolled memory of the host that finds it unchanged.",
);

const REGION: Rule = rule(
    "process-region",
    "/proc/PID/smaps (VmFlags)",
    "KSM takes private anonymous pages only; nothing of this region is ever merged.",
);

pub(super) fn examine(host: &HostFacts, facts: &ProcessFacts) -> Vec<Finding> {
    let pid = facts.process.id.pid;
    let kernel = match &host.ksm {
        Err(Absent::NotOnThisKernel) => Some("this kernel has no KSM"),
        _ if facts.process.kernel_thread => Some("a kernel thread has no memory of its own"),
        _ if facts.process.is_zombie() => Some("a dead process has no memory"),
        _ => None,
    };
    let again = format!("pagefold doctor --pid {pid}");
    let settle = |rule: &Rule, outcome: Outcome| outcome.unwrap_or_else(|missing| rule.unknown(&missing, &again));
    let mut findings: Vec<_> = match kernel {
        Some(reason) => vec![RULES[1].0.not_applicable(reason, facts.name())],
        None => {
            let judged = RULES.iter().map(|(rule, judge)| settle(rule, judge(rule, host, facts)));
            judged.chain([settle(&PACE, process_pace(host, facts))]).chain(regions(facts)).collect()
        }
    };
    for finding in &mut findings {
        finding.scope = Scope::Process(facts.process.id);
        finding.source = finding.source.replace("PID", &pid.to_string());
    }
    findings
}

/// The remedy that enrols the process: by its own means where it has them, otherwise from outside, and never past a
/// seccomp filter.
fn enrol(facts: &ProcessFacts) -> Vec<String> {
    let pid = facts.process.id.pid;
    match &facts.process.identity.vm {
        Some(vm) if vm.monitor == Monitor::Qemu => merge_property(vm, true),
        _ if facts.process.seccomp == Ok(0) => vec![
            "# needs gdb and the C library in the process; stops it for a moment:".into(),
            format!("gdb -p {pid} -batch -ex 'call (int)prctl(67,1,0,0,0)'"),
            "# or start it enrolled:".into(),
            START_ENROLLED.into(),
        ],
        _ => vec!["# start it enrolled, before it sets its seccomp filter:".into(), START_ENROLLED.into()],
    }
}

/// The remedy that takes the process out of KSM, with the same care.
fn withdraw(facts: &ProcessFacts) -> Vec<String> {
    let process = &facts.process;
    match &process.identity.vm {
        Some(vm) if vm.monitor == Monitor::Qemu => merge_property(vm, false),
        _ if process.seccomp == Ok(0) && process.ksm.merge_any == Ok(true) => {
            vec![format!("gdb -p {} -batch -ex 'call (int)prctl(67,0,0,0,0)'", process.id.pid)]
        }
        _ => {
            vec!["# start it anew, not enrolled; where it enrols itself by madvise, its configuration may tell".into()]
        }
    }
}

/// Guest RAM is enrolled and withdrawn over QMP while the guest runs.
fn merge_property(vm: &Vm, merge: bool) -> Vec<String> {
    let name = plain(vm.name.as_deref().unwrap_or_default(), "NAME");
    let mut lines =
        vec!["# guest RAM without a backend of its own is /objects/pc.ram (machine types pc and q35)".to_owned()];
    if vm.control.is_none() {
        lines.push("# this taints the domain for libvirt (custom-monitor) until it is started anew:".to_owned());
    }
    let ids: Vec<_> = vm.backends.iter().map(|backend| backend.id.as_str()).collect();
    for id in if ids.is_empty() { vec!["pc.ram"] } else { ids } {
        let object = plain(id, "ID");
        let arguments = format!("{{\"path\":\"/objects/{object}\",\"property\":\"merge\",\"value\":{merge}}}");
        let set = format!("{{\"execute\":\"qom-set\",\"arguments\":{arguments}}}");
        lines.push(match &vm.control {
            Some(socket) => format!(
                "printf '{{\"execute\":\"qmp_capabilities\"}}{set}' | socat -t2 - UNIX-CONNECT:{}",
                path(socket)
            ),
            None => format!("virsh qemu-monitor-command {name} '{set}'"),
        });
    }
    lines
}

/// The path of a socket in QEMU's syntax: `unix:/run/qmp,server=on`.
fn path(socket: &str) -> &str {
    let socket = socket.strip_prefix("unix:").unwrap_or(socket);
    plain(socket.split(',').next().unwrap_or(socket), "SOCKET")
}

/// A name that somebody else gave, if a shell and JSON take it as it is; otherwise a word to put it for.
fn plain<'a>(name: &'a str, otherwise: &'a str) -> &'a str {
    let safe = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    if !name.is_empty() && !name.starts_with('-') && name.chars().all(safe) { name } else { otherwise }
}

fn enrolment_verify(facts: &ProcessFacts) -> String {
    format!("grep -q '^VmFlags:.* mg' /proc/{}/smaps", facts.process.id.pid)
}

fn is_enrolled(facts: &ProcessFacts) -> Result<bool, Missing> {
    need("enrolment", &facts.enrolled()).copied()
}

/// Stopped fails an enrolled process; to one that is not enrolled it does not matter yet.
fn run(rule: &Rule, host: &HostFacts, facts: &ProcessFacts) -> Outcome {
    let run = *need("run", &ksm(host)?.run)?;
    let value = format!("run = {run}");
    if run == 1 {
        return Ok(rule.ok("ksmd is on", value));
    }
    let verdict = if is_enrolled(facts)? { Verdict::Fail } else { Verdict::Warn };
    Ok(rule.finding(verdict, "ksmd is off", value).remedy([set("run", 1)]).verify(is_set("run", 1)))
}

/// Not enrolled is a failure: nothing can merge. Enrolled for less than half of what could be is a warning.
fn enrolled(rule: &Rule, _: &HostFacts, facts: &ProcessFacts) -> Outcome {
    if !is_enrolled(facts)? {
        return Ok(rule.fail("not enrolled", facts.name()).remedy(enrol(facts)).verify(enrolment_verify(facts)));
    }
    if facts.regions.is_err() {
        return Ok(rule.ok("enrolled", "ksm_mergeable = yes, regions unreadable"));
    }
    let (mergeable, eligible) = (facts.mergeable(), facts.eligible());
    let value = format!("{mergeable} of {eligible} eligible");
    if eligible > Bytes::ZERO && !is_share(mergeable.0, eligible.0, 50) {
        return Ok(rule.warn("only a part is enrolled", value).remedy(enrol(facts)).verify(enrolment_verify(facts)));
    }
    Ok(rule.ok("enrolled", value))
}

/// Off is a failure of what was asked here, and as the operator of the machine wanted it.
fn mem_merge(rule: &Rule, _: &HostFacts, facts: &ProcessFacts) -> Outcome {
    need("command line", &facts.process.arguments)?;
    let Some(vm) = facts.process.identity.vm.as_ref() else {
        return Ok(rule.not_applicable("no virtual machine", facts.name()));
    };
    if vm.monitor != Monitor::Qemu {
        return Ok(rule.not_applicable("this monitor does not enrol guest RAM by itself", facts.name()));
    }
    let off: Vec<_> = vm.backends.iter().filter(|backend| !backend.merge).map(|b| b.id.clone()).collect();
    let value = match (vm.mem_merge, off.as_slice()) {
        (true, []) => return Ok(rule.ok("QEMU enrols guest RAM", "mem-merge=on")),
        (false, _) => "mem-merge=off".to_owned(),
        (true, off) => format!("merge=off of {}", off.join(", ")),
    };
    // The property may have been set over QMP since.
    let verdict = if facts.enrolled() == Ok(true) { Verdict::Warn } else { Verdict::Fail };
    Ok(rule
        .finding(verdict, "its owner forbids merging: QEMU is told not to enrol guest RAM", value)
        .remedy(
            ["# pagefold leaves it alone, but for --ignore-opt-out, and opted_out = false in the configuration."
                .to_owned()]
            .into_iter()
            .chain(["# To have QEMU enrol it while it runs, if its owner agrees:".to_owned()])
            .chain(merge_property(vm, true)),
        )
        .verify(enrolment_verify(facts)))
}

/// Most of the memory out of reach is a failure, a tenth a warning. The regions are listed one by one below.
fn eligible(rule: &Rule, _: &HostFacts, facts: &ProcessFacts) -> Outcome {
    need("regions", &facts.regions)?;
    let sums = blocked_by_reason([facts].into_iter());
    let out = total(sums.values().copied());
    let reach = facts.eligible();
    let all = out.0.saturating_add(reach.0);
    let value = format!("{reach} eligible, {out} not");
    if all == 0 {
        return Ok(rule.not_applicable("no resident memory of its own", value));
    }
    let (verdict, title) = match () {
        () if is_share(out.0, all, 50) => (Verdict::Fail, "most of its memory cannot be merged"),
        () if is_share(out.0, all, 10) => (Verdict::Warn, "part of its memory cannot be merged"),
        () => return Ok(rule.ok("its memory can be merged", value)),
    };
    let worst = sums.into_iter().max_by_key(|&(why, bytes)| (bytes, std::cmp::Reverse(why)));
    let remedy = worst.map_or(Vec::new(), |(why, _)| release(why, facts));
    Ok(rule.finding(verdict, title, value).remedy(remedy).verify(enrolment_verify(facts)))
}

/// What would make memory of that kind eligible.
fn release(why: Ineligible, facts: &ProcessFacts) -> Vec<String> {
    let vm = facts.process.identity.vm.as_ref();
    let text: &[&str] = match (why, vm.map(|vm| vm.monitor)) {
        (Ineligible::Shared, Some(Monitor::Qemu)) => &[
            "# QEMU: share=off, or memory-backend-ram instead of memory-backend-memfd; in libvirt remove",
            "# <source type='memfd'/> and <access mode='shared'/>. vhost-user and virtiofs need shared memory.",
        ],
        (Ineligible::Shared, Some(Monitor::CloudHypervisor)) => {
            &["# cloud-hypervisor: --memory shared=off,mergeable=on"]
        }
        (Ineligible::Shared, _) => &["# map it privately: MAP_PRIVATE instead of MAP_SHARED, memfd or shm"],
        (Ineligible::Hugetlb, Some(Monitor::Qemu)) => &[
            "# QEMU: memory-backend-ram without -mem-path and hugetlb=on; in libvirt remove <hugepages/>.",
            "# Transparent huge pages stay possible, and are split only where something merges.",
        ],
        (Ineligible::Hugetlb, _) => &["# use transparent huge pages instead of hugetlb: madvise(MADV_HUGEPAGE)"],
        (Ineligible::Vfio, _) => &["# give the guest a virtio device instead of the one passed through"],
        (
            Ineligible::Secret
            | Ineligible::Droppable
            | Ineligible::DeviceMemory
            | Ineligible::Special
            | Ineligible::File,
            _,
        ) => &["# nothing: this memory is kept out of KSM on purpose"],
    };
    text.iter().map(|&line| line.to_owned()).collect()
}

/// Regions smaller than this are only in the sums.
const LISTED: Bytes = Bytes(1 << 20);

/// A finding for each region of a MiB or more that KSM cannot take, the largest first: a warning each, for the failure
/// is judged over all of them.
fn regions(facts: &ProcessFacts) -> Vec<Finding> {
    let mut out: Vec<(&Region, Ineligible, Bytes)> = facts
        .regions
        .iter()
        .flatten()
        .filter_map(|region| blocked(facts, region).map(|(why, bytes)| (region, why, bytes)))
        .filter(|&(_, _, bytes)| bytes >= LISTED)
        .collect();
    out.sort_by_key(|&(region, _, bytes)| (std::cmp::Reverse(bytes), region.range));
    out.into_iter()
        .map(|(region, why, bytes)| {
            let name = if region.name.is_empty() { "anonymous" } else { &region.name };
            let name = name.escape_debug();
            REGION
                .warn(format!("{bytes} of {}", why.phrase()), format!("{} {name}", region.range))
                .remedy(release(why, facts))
                .verify(enrolment_verify(facts))
        })
        .collect()
}

/// A device that is passed through fails a machine: all of its RAM is pinned. Other pinned memory is a warning where it
/// is a tenth or more.
fn pinned(rule: &Rule, _: &HostFacts, facts: &ProcessFacts) -> Outcome {
    if facts.process.identity.vm.as_ref().is_some_and(|vm| vm.vfio) {
        return Ok(rule
            .fail("a device that is passed through pins guest RAM", "VFIO device on the command line")
            .remedy(release(Ineligible::Vfio, facts))
            .verify(format!("! tr '\\0' '\\n' < /proc/{}/cmdline | grep -q vfio", facts.process.id.pid)));
    }
    need("command line", &facts.process.arguments)?;
    let pinned = *need("VmPin", &facts.process.pinned)?;
    need("regions", &facts.regions)?;
    let value = format!("VmPin = {pinned}");
    if is_share(pinned.0, facts.eligible().0.max(1), 10) {
        let remedy = "# end the I/O that pins it: RDMA registrations, io_uring fixed buffers, device drivers";
        return Ok(rule
            .warn("part of its memory is pinned", value)
            .remedy([remedy])
            .verify(format!("grep VmPin /proc/{}/status", facts.process.id.pid)));
    }
    Ok(rule.ok("nothing worth mentioning is pinned", value))
}

/// A failure where nothing is enrolled for it: the one who started the process wanted it to be. A warning where part of
/// it is enrolled by madvise.
fn prctl_exec(rule: &Rule, host: &HostFacts, facts: &ProcessFacts) -> Outcome {
    if !*need("ksm_merge_any of the process or its parent", &lost_flag(facts))? {
        return Ok(rule.ok("it has lost no merge flag of its parent", flag(facts)));
    }
    let verdict = if is_enrolled(facts)? { Verdict::Warn } else { Verdict::Fail };
    let release = host.kernel.as_deref().unwrap_or("unknown release");
    Ok(rule
        .finding(verdict, "its parent has the merge flag and it has not", format!("{}; kernel {release}", flag(facts)))
        .remedy(enrol(facts))
        .verify(format!("grep 'ksm_merge_any: yes' /proc/{}/ksm_stat", facts.process.id.pid)))
}

fn flag(facts: &ProcessFacts) -> String {
    let word = |reading: &pagefold_base::Reading<bool>| match reading {
        Ok(true) => "yes".to_owned(),
        Ok(false) => "no".to_owned(),
        Err(absent) => absent.to_string(),
    };
    format!("ksm_merge_any: {}, of the parent: {}", word(&facts.process.ksm.merge_any), word(&facts.parent_merge_any))
}

/// A filter is a warning where the process is not enrolled yet, since that narrows the ways to enrol it.
fn seccomp(rule: &Rule, _: &HostFacts, facts: &ProcessFacts) -> Outcome {
    let mode = *need("seccomp mode", &facts.process.seccomp)?;
    let value = format!("Seccomp = {mode}");
    if mode == 0 {
        return Ok(rule.ok("no seccomp filter", value));
    }
    if is_enrolled(facts)? {
        return Ok(rule.ok("it is enrolled, and its filter does not undo that", value));
    }
    Ok(rule
        .warn("it is not enrolled and has a seccomp filter", value)
        .remedy(enrol(facts))
        .verify(enrolment_verify(facts)))
}

/// Enrolled and never looked at is a warning: how often ksmd has gone round since the process started is not known, so
/// that it may still come.
fn scanned(rule: &Rule, host: &HostFacts, facts: &ProcessFacts) -> Outcome {
    if !is_enrolled(facts)? {
        return Ok(rule.not_applicable("not enrolled", facts.name()));
    }
    let items = *need("ksm_rmap_items", &facts.process.ksm.rmap_items)?;
    let bytes = bytes_of(host.page_size, Pages(items));
    let value = format!("ksm_rmap_items = {items} ({bytes})");
    if items > 0 {
        return Ok(rule.ok("ksmd has looked at it", value));
    }
    if *need("run", &ksm(host)?.run)? != 1 {
        return Ok(rule.not_applicable("ksmd is off", value));
    }
    Ok(rule
        .warn("ksmd has not looked at it", value)
        .remedy(["# wait for the time that process-pace gives; if it stays so, start it anew, enrolled"])
        .verify(format!("grep -v '^ksm_rmap_items 0$' /proc/{}/ksm_stat | grep rmap_items", facts.process.id.pid)))
}

/// Looked at and nothing merged is a warning that points to the census.
fn merging(rule: &Rule, host: &HostFacts, facts: &ProcessFacts) -> Outcome {
    let pid = facts.process.id.pid;
    let merged = *need("ksm_merging_pages", &facts.process.ksm.merging_pages)?;
    let zeros = placed_zeros(host, &facts.process.ksm.zero_pages)?;
    let pages = Pages(merged.saturating_add(zeros));
    // The counters are those of ksmd's last visit; smaps tells of now, from 6.6 on.
    let now = facts.regions.iter().flatten().map(|region| region.ksm.clone()).collect::<Result<Vec<_>, _>>();
    let now = match now {
        Ok(regions) if !regions.is_empty() => format!("; {} now", total(regions.into_iter())),
        _ => String::new(),
    };
    let value = format!("{merged} pages merged, {zeros} zero pages: {}{now}", bytes_of(host.page_size, pages));
    if pages > Pages::ZERO {
        return Ok(rule.ok("it is merging", value));
    }
    if !is_enrolled(facts)? {
        return Ok(rule.not_applicable("not enrolled", value));
    }
    let tracked = Pages(*need("ksm_rmap_items", &facts.process.ksm.rmap_items)?);
    if tracked == Pages::ZERO {
        return Ok(rule.not_applicable("ksmd has not looked at it", value));
    }
    let verify = format!("grep -v '^ksm_merging_pages 0$' /proc/{pid}/ksm_stat | grep merging_pages");
    if *need("run", &ksm(host)?.run)? == 1 && !settled(host, &Fleet::of(host), &[facts], tracked)? {
        return Ok(rule
            .finding(Verdict::Unknown, "cannot tell: ksmd has not come round often enough", value)
            .remedy(["# wait for the time that process-pace gives, then ask again"])
            .verify(verify));
    }
    Ok(rule
        .warn("ksmd has looked and merged nothing", value)
        .remedy([format!("pagefold census --pid {pid}")])
        .verify(verify))
}

/// A loss is a failure once ksmd has had its passes, as for the host; until then a warning.
///
/// `ksm_process_profit` (6.4) is (ksm_merging_pages + ksm_zero_pages) x page size - ksm_rmap_items x 64 and counts the
/// kept copy as saved, too (mm/ksm.c): what it calls a loss is one.
fn profit(rule: &Rule, host: &HostFacts, facts: &ProcessFacts) -> Outcome {
    let profit = *need("ksm_process_profit", &facts.process.ksm.profit)?;
    let value = format!("{} net", NetBytes(profit));
    if profit >= 0 {
        return Ok(rule.ok("it costs no memory to merge it", value));
    }
    let tracked = Pages(*need("ksm_rmap_items", &facts.process.ksm.rmap_items)?);
    let settled = settled(host, &Fleet::of(host), &[facts], tracked)?;
    let pid = facts.process.id.pid;
    let mut remedy = vec![
        "# see where its duplicates are:".to_owned(),
        format!("pagefold census --pid {pid}"),
        "# if there are none, take it out:".to_owned(),
    ];
    remedy.extend(withdraw(facts));
    Ok(rule
        .finding(
            if settled { Verdict::Fail } else { Verdict::Warn },
            "merging it costs more memory than it saves",
            value,
        )
        .remedy(remedy)
        .verify(format!("! grep 'ksm_process_profit -' /proc/{pid}/ksm_stat")))
}

/// A warning: no harm by itself, and easily avoided.
fn keys(rule: &Rule, _: &HostFacts, facts: &ProcessFacts) -> Outcome {
    need("command line", &facts.process.arguments)?;
    if !facts.holds_secrets() {
        return Ok(rule.ok("not known to hold keys", facts.name()));
    }
    if !is_enrolled(facts)? {
        return Ok(rule.ok("it holds secrets and is not enrolled: leave it so", facts.name()));
    }
    let pid = facts.process.id.pid;
    Ok(rule
        .warn("it holds secrets and is enrolled", facts.name())
        .remedy(withdraw(facts))
        .verify(format!("! grep -q '^VmFlags:.* mg' /proc/{pid}/smaps")))
}

/// The pace of the host, for the process shares it with everybody who is enrolled. That of a host without the memory of
/// the process would promise too much to one that is not.
fn process_pace(host: &HostFacts, facts: &ProcessFacts) -> Outcome {
    if !is_enrolled(facts)? {
        return Ok(PACE.not_applicable("not enrolled", facts.name()));
    }
    pace(&PACE, host, &Fleet::of(host))
}
