//! One process: why is none of its memory merging?
//!
//! The operator asks about one process because it should merge. So a warning for the host is a failure here if it
//! prevents all merging in the process. [`catalog`] has what the rules say of themselves.

mod catalog;

use super::cost::has_settled;
use super::enrollment::{START_ENROLLED_COMMAND, ineligible_bytes_by_reason, lacks_parent_merge_flag};
use super::host_processes::{HostProcesses, bytes_of, ineligible_bytes, is_at_least_percent, total};
use super::settings::{judge_pace, ksm, placed_zeros};
use super::{
    Finding, HostFacts, MissingReading, ProcessFacts, RuleInfo, RuleResult, Scope, Verdict, is_set_command, require,
    set_command,
};
use catalog::{PACE_RULE, PROCESS_RULES, ProcessRule, REGION_RULE};
use pagefold_base::identity::{Monitor, Vm};
use pagefold_base::reading::Absent;
use pagefold_base::region::{Ineligible, Region};
use pagefold_base::units::{Bytes, NetBytes, Pages};

/// All rules about a process.
pub(super) fn rules() -> impl Iterator<Item = &'static RuleInfo> {
    PROCESS_RULES.iter().map(|rule| &rule.rule).chain([&PACE_RULE, &REGION_RULE])
}

pub(super) fn examine(host: &HostFacts, facts: &ProcessFacts) -> Vec<Finding> {
    let pid = facts.process.id.pid;
    let skip_reason = match &host.ksm {
        Err(Absent::NotOnThisKernel) => Some("this kernel has no KSM"),
        _ if facts.process.kernel_thread => Some("a kernel thread has no memory of its own"),
        _ if facts.process.is_zombie() => Some("a dead process has no memory"),
        _ => None,
    };
    let retry_command = format!("pagefold doctor --pid {pid}");
    let finding_or_unknown = |rule: &'static RuleInfo, outcome: RuleResult| {
        outcome.unwrap_or_else(|missing| rule.unknown(&missing, &retry_command))
    };
    let mut findings: Vec<_> = match skip_reason {
        Some(reason) => vec![PROCESS_RULES[1].rule.not_applicable(reason, facts.name())],
        None => {
            let judged = PROCESS_RULES
                .iter()
                .map(|ProcessRule { rule, judge }| finding_or_unknown(rule, judge(rule, host, facts)));
            judged
                .chain([finding_or_unknown(&PACE_RULE, judge_process_pace(host, facts))])
                .chain(region_findings(facts))
                .collect()
        }
    };
    for finding in &mut findings {
        finding.scope = Scope::Process(facts.process.id);
        finding.source = finding.source.replace("PID", &pid.to_string());
    }
    findings
}

/// The remedy that enrolls the process: by its own means where it has them, otherwise from outside, and never past a
/// seccomp filter.
fn enroll_remedy(facts: &ProcessFacts) -> Vec<String> {
    let pid = facts.process.id.pid;
    match &facts.process.identity.vm {
        Some(vm) if vm.monitor == Monitor::Qemu => qom_merge_commands(vm, true),
        _ if facts.process.seccomp == Ok(0) => vec![
            "# needs gdb and the C library in the process; stops it for a moment:".into(),
            format!("gdb -p {pid} -batch -ex 'call (int)prctl(67,1,0,0,0)'"),
            "# or start it enrolled:".into(),
            START_ENROLLED_COMMAND.into(),
        ],
        _ => vec!["# start it enrolled, before it sets its seccomp filter:".into(), START_ENROLLED_COMMAND.into()],
    }
}

/// The remedy that unenrolls the process, with the same care.
fn unenroll_remedy(facts: &ProcessFacts) -> Vec<String> {
    let process = &facts.process;
    match &process.identity.vm {
        Some(vm) if vm.monitor == Monitor::Qemu => qom_merge_commands(vm, false),
        _ if process.seccomp == Ok(0) && process.ksm.merge_any == Ok(true) => {
            vec![format!("gdb -p {} -batch -ex 'call (int)prctl(67,0,0,0,0)'", process.id.pid)]
        }
        _ => {
            vec!["# restart it without enrolling it; if it enrolls itself by madvise, see its configuration".into()]
        }
    }
}

/// Guest RAM is enrolled and unenrolled over QMP while the guest runs.
fn qom_merge_commands(vm: &Vm, merge: bool) -> Vec<String> {
    let name = shell_safe_or(vm.name.as_deref().unwrap_or_default(), "NAME");
    let mut lines =
        vec!["# guest RAM without a backend of its own is /objects/pc.ram (machine types pc and q35)".to_owned()];
    if vm.control_socket.is_none() {
        lines.push("# this taints the domain for libvirt (custom-monitor) until it is restarted:".to_owned());
    }
    let ids: Vec<_> = vm.backends.iter().map(|backend| backend.id.as_str()).collect();
    for id in if ids.is_empty() { vec!["pc.ram"] } else { ids } {
        let object = shell_safe_or(id, "ID");
        let arguments = format!("{{\"path\":\"/objects/{object}\",\"property\":\"merge\",\"value\":{merge}}}");
        let set = format!("{{\"execute\":\"qom-set\",\"arguments\":{arguments}}}");
        lines.push(match &vm.control_socket {
            Some(socket) => format!(
                "printf '{{\"execute\":\"qmp_capabilities\"}}{set}' | socat -t2 - UNIX-CONNECT:{}",
                socket_path(socket)
            ),
            None => format!("virsh qemu-monitor-command {name} '{set}'"),
        });
    }
    lines
}

/// The path of a socket in QEMU's syntax: `unix:/run/qmp,server=on`.
fn socket_path(socket: &str) -> &str {
    let socket = socket.strip_prefix("unix:").unwrap_or(socket);
    shell_safe_or(socket.split(',').next().unwrap_or(socket), "SOCKET")
}

/// A name from an untrusted source, if it is safe in a shell and in JSON; otherwise a placeholder.
fn shell_safe_or<'a>(name: &'a str, otherwise: &'a str) -> &'a str {
    let safe = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    if !name.is_empty() && !name.starts_with('-') && name.chars().all(safe) { name } else { otherwise }
}

fn enrollment_check_command(facts: &ProcessFacts) -> String {
    format!("grep -q '^VmFlags:.* mg' /proc/{}/smaps", facts.process.id.pid)
}

fn require_enrolled(facts: &ProcessFacts) -> Result<bool, MissingReading> {
    require("enrollment", &facts.is_enrolled()).copied()
}

/// A stopped ksmd is a failure for an enrolled process; for one that is not enrolled it does not matter yet.
fn judge_run(rule: &'static RuleInfo, host: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    let run = *require("run", &ksm(host)?.run)?;
    let value = format!("run = {run}");
    if run == 1 {
        return Ok(rule.ok("ksmd is on", value));
    }
    let verdict = if require_enrolled(facts)? { Verdict::Fail } else { Verdict::Warn };
    Ok(rule.finding(verdict, "ksmd is off", value).remedy([set_command("run", 1)]).verify(is_set_command("run", 1)))
}

/// A process that is not enrolled is a failure: nothing can merge. One with less than half of its eligible memory
/// enrolled is a warning.
fn judge_enrolled(rule: &'static RuleInfo, _: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    if !require_enrolled(facts)? {
        return Ok(rule
            .fail("not enrolled", facts.name())
            .remedy(enroll_remedy(facts))
            .verify(enrollment_check_command(facts)));
    }
    require("regions", &facts.regions)?;
    let (mergeable, eligible) = (facts.mergeable(), facts.eligible());
    let value = format!("{mergeable} of {eligible} eligible");
    if eligible > Bytes::ZERO && !is_at_least_percent(mergeable.0, eligible.0, 50) {
        return Ok(rule
            .warn("only a part is enrolled", value)
            .remedy(enroll_remedy(facts))
            .verify(enrollment_check_command(facts)));
    }
    Ok(rule.ok("enrolled", value))
}

/// Merging forbidden by the VM's owner is a failure here, although the owner intended it.
fn judge_mem_merge(rule: &'static RuleInfo, _: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    require("command line", &facts.process.arguments)?;
    let Some(vm) = facts.process.identity.vm.as_ref() else {
        return Ok(rule.not_applicable("no virtual machine", facts.name()));
    };
    if vm.monitor != Monitor::Qemu {
        return Ok(rule.not_applicable("this monitor does not enroll guest RAM by itself", facts.name()));
    }
    let opted_out: Vec<_> = vm.backends.iter().filter(|backend| !backend.merge).map(|b| b.id.clone()).collect();
    let value = match (vm.mem_merge, opted_out.as_slice()) {
        (true, []) => return Ok(rule.ok("QEMU enrolls guest RAM", "mem-merge=on")),
        (false, _) => "mem-merge=off".to_owned(),
        (true, opted_out) => format!("merge=off of {}", opted_out.join(", ")),
    };
    // The property may have been changed over QMP since.
    let verdict = if facts.is_enrolled() == Ok(true) { Verdict::Warn } else { Verdict::Fail };
    Ok(rule
        .finding(verdict, "its owner forbids merging: QEMU is told not to enroll guest RAM", value)
        .remedy(
            ["# pagefold leaves it alone, except with --ignore-opt-out or opted_out = false in the configuration."
                .to_owned()]
            .into_iter()
            .chain(["# To have QEMU enroll it while it runs, if its owner agrees:".to_owned()])
            .chain(qom_merge_commands(vm, true)),
        )
        .verify(enrollment_check_command(facts)))
}

/// If most of the memory is ineligible, that is a failure; a tenth is a warning. The regions are listed one by one
/// below.
fn judge_eligible(rule: &'static RuleInfo, _: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    require("regions", &facts.regions)?;
    let sums = ineligible_bytes_by_reason([facts].into_iter());
    let ineligible = total(sums.values().copied());
    let eligible = facts.eligible();
    let total_bytes = ineligible.0.saturating_add(eligible.0);
    let value = format!("{eligible} eligible, {ineligible} not");
    if total_bytes == 0 {
        return Ok(rule.not_applicable("no resident memory of its own", value));
    }
    let (verdict, title) = match () {
        () if is_at_least_percent(ineligible.0, total_bytes, 50) => {
            (Verdict::Fail, "most of its memory cannot be merged")
        }
        () if is_at_least_percent(ineligible.0, total_bytes, 10) => {
            (Verdict::Warn, "part of its memory cannot be merged")
        }
        () => return Ok(rule.ok("its memory can be merged", value)),
    };
    let worst = sums.into_iter().max_by_key(|&(why, bytes)| (bytes, std::cmp::Reverse(why)));
    let remedy = worst.map_or(Vec::new(), |(why, _)| eligibility_remedy(why, facts));
    Ok(rule.finding(verdict, title, value).remedy(remedy).verify(enrollment_check_command(facts)))
}

/// How to make memory of this kind eligible.
fn eligibility_remedy(why: Ineligible, facts: &ProcessFacts) -> Vec<String> {
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

/// Smaller regions are only part of the sums.
const MIN_LISTED_REGION_BYTES: Bytes = Bytes(1 << 20);

/// A warning for each region of a MiB or more that KSM cannot merge, the largest first. The failure is judged over all
/// regions.
fn region_findings(facts: &ProcessFacts) -> Vec<Finding> {
    let mut ineligible: Vec<(&Region, Ineligible, Bytes)> = facts
        .regions
        .iter()
        .flatten()
        .filter_map(|region| ineligible_bytes(facts, region).map(|(why, bytes)| (region, why, bytes)))
        .filter(|&(_, _, bytes)| bytes >= MIN_LISTED_REGION_BYTES)
        .collect();
    ineligible.sort_by_key(|&(region, _, bytes)| (std::cmp::Reverse(bytes), region.range));
    ineligible
        .into_iter()
        .map(|(region, why, bytes)| {
            let name = if region.name.is_empty() { "anonymous" } else { &region.name };
            let name = name.escape_debug();
            REGION_RULE
                .warn(format!("{bytes} of {}", why.phrase()), format!("{} {name}", region.range))
                .remedy(eligibility_remedy(why, facts))
                .verify(enrollment_check_command(facts))
        })
        .collect()
}

/// A passed-through device is a failure for a VM: all of its RAM is pinned. Other pinned memory is a warning if it is a
/// tenth or more.
fn judge_pinned(rule: &'static RuleInfo, _: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    if facts.process.identity.vm.as_ref().is_some_and(|vm| vm.vfio) {
        return Ok(rule
            .fail("a passed-through device pins guest RAM", "VFIO device on the command line")
            .remedy(eligibility_remedy(Ineligible::Vfio, facts))
            .verify(format!("! tr '\\0' '\\n' < /proc/{}/cmdline | grep -q vfio", facts.process.id.pid)));
    }
    require("command line", &facts.process.arguments)?;
    let pinned = *require("VmPin", &facts.process.pinned)?;
    require("regions", &facts.regions)?;
    let value = format!("VmPin = {pinned}");
    if is_at_least_percent(pinned.0, facts.eligible().0.max(1), 10) {
        let remedy = "# end the I/O that pins it: RDMA registrations, io_uring fixed buffers, device drivers";
        return Ok(rule
            .warn("part of its memory is pinned", value)
            .remedy([remedy])
            .verify(format!("grep VmPin /proc/{}/status", facts.process.id.pid)));
    }
    Ok(rule.ok("little or no memory is pinned", value))
}

/// A failure if nothing in the process is enrolled, since the merge flag of its parent shows that it should be. A
/// warning if part of it is enrolled by madvise.
fn judge_prctl_exec(rule: &'static RuleInfo, host: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    if !*require("ksm_merge_any of the process or its parent", &lacks_parent_merge_flag(facts))? {
        return Ok(rule.ok("no merge flag of its parent is missing", merge_flag_text(facts)));
    }
    let verdict = if require_enrolled(facts)? { Verdict::Warn } else { Verdict::Fail };
    let release = host.kernel.as_deref().unwrap_or("unknown release");
    Ok(rule
        .finding(
            verdict,
            "its parent has the merge flag, the process does not",
            format!("{}; kernel {release}", merge_flag_text(facts)),
        )
        .remedy(enroll_remedy(facts))
        .verify(format!("grep 'ksm_merge_any: yes' /proc/{}/ksm_stat", facts.process.id.pid)))
}

fn merge_flag_text(facts: &ProcessFacts) -> String {
    let word = |reading: &pagefold_base::Reading<bool>| match reading {
        Ok(true) => "yes".to_owned(),
        Ok(false) => "no".to_owned(),
        Err(absent) => absent.to_string(),
    };
    format!("ksm_merge_any: {}, of the parent: {}", word(&facts.process.ksm.merge_any), word(&facts.parent_merge_any))
}

/// A filter is a warning if the process is not enrolled yet, since that limits the ways to enroll it.
fn judge_seccomp(rule: &'static RuleInfo, _: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    let mode = *require("seccomp mode", &facts.process.seccomp)?;
    let value = format!("Seccomp = {mode}");
    if mode == 0 {
        return Ok(rule.ok("no seccomp filter", value));
    }
    if require_enrolled(facts)? {
        return Ok(rule.ok("it is enrolled, and its filter does not undo that", value));
    }
    Ok(rule
        .warn("it is not enrolled and has a seccomp filter", value)
        .remedy(enroll_remedy(facts))
        .verify(enrollment_check_command(facts)))
}

/// An enrolled process that ksmd has not scanned is a warning: the number of passes since the process started is not
/// known, so ksmd may still scan it.
fn judge_scanned(rule: &'static RuleInfo, host: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    if !require_enrolled(facts)? {
        return Ok(rule.not_applicable("not enrolled", facts.name()));
    }
    let items = *require("ksm_rmap_items", &facts.process.ksm.rmap_items)?;
    let bytes = bytes_of(host.page_size, Pages(items));
    let value = format!("ksm_rmap_items = {items} ({bytes})");
    if items > 0 {
        return Ok(rule.ok("ksmd has scanned it", value));
    }
    if *require("run", &ksm(host)?.run)? != 1 {
        return Ok(rule.not_applicable("ksmd is off", value));
    }
    Ok(rule
        .warn("ksmd has not scanned it", value)
        .remedy(["# wait for the time that process-pace gives; if that changes nothing, restart it enrolled"])
        .verify(format!("grep -v '^ksm_rmap_items 0$' /proc/{}/ksm_stat | grep rmap_items", facts.process.id.pid)))
}

/// A process that was scanned and not merged is a warning that suggests a census.
fn judge_merging(rule: &'static RuleInfo, host: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    let pid = facts.process.id.pid;
    let merged = *require("ksm_merging_pages", &facts.process.ksm.merging_pages)?;
    let zeros = placed_zeros(host, &facts.process.ksm.zero_pages)?;
    let pages = Pages(merged.saturating_add(zeros));
    // The counters are from ksmd's last scan of it; smaps is current, from 6.6 on.
    let merged_now = facts.regions.iter().flatten().map(|region| region.ksm.clone()).collect::<Result<Vec<_>, _>>();
    let merged_now = match merged_now {
        Ok(regions) if !regions.is_empty() => format!("; {} now", total(regions.into_iter())),
        _ => String::new(),
    };
    let value = format!("{merged} pages merged, {zeros} zero pages: {}{merged_now}", bytes_of(host.page_size, pages));
    if pages > Pages::ZERO {
        return Ok(rule.ok("it is merging", value));
    }
    if !require_enrolled(facts)? {
        return Ok(rule.not_applicable("not enrolled", value));
    }
    let tracked = Pages(*require("ksm_rmap_items", &facts.process.ksm.rmap_items)?);
    if tracked == Pages::ZERO {
        return Ok(rule.not_applicable("ksmd has not scanned it", value));
    }
    let verify = format!("grep -v '^ksm_merging_pages 0$' /proc/{pid}/ksm_stat | grep merging_pages");
    if *require("run", &ksm(host)?.run)? == 1 && !has_settled(host, &HostProcesses::new(host), &[facts], tracked)? {
        return Ok(rule
            .finding(Verdict::Unknown, "cannot tell: ksmd has not completed enough passes", value)
            .remedy(["# wait for the time that process-pace gives, then ask again"])
            .verify(verify));
    }
    Ok(rule
        .warn("ksmd has scanned it and merged nothing", value)
        .remedy([format!("pagefold census --pid {pid}")])
        .verify(verify))
}

/// A net loss is a failure once ksmd has completed its passes, as for the host; until then a warning.
///
/// `ksm_process_profit` (6.4) is (ksm_merging_pages + ksm_zero_pages) x page size - ksm_rmap_items x 64. It counts the
/// kept copy as saved, too (mm/ksm.c), so what it reports as a loss is a loss.
fn judge_profit(rule: &'static RuleInfo, host: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    let profit = *require("ksm_process_profit", &facts.process.ksm.profit)?;
    let value = format!("{} net", NetBytes(profit));
    if profit >= 0 {
        return Ok(rule.ok("it costs no memory to merge it", value));
    }
    let tracked = Pages(*require("ksm_rmap_items", &facts.process.ksm.rmap_items)?);
    let settled = has_settled(host, &HostProcesses::new(host), &[facts], tracked)?;
    let pid = facts.process.id.pid;
    let mut remedy = vec![
        "# see where its duplicates are:".to_owned(),
        format!("pagefold census --pid {pid}"),
        "# if there are none, take it out:".to_owned(),
    ];
    remedy.extend(unenroll_remedy(facts));
    Ok(rule
        .finding(
            if settled { Verdict::Fail } else { Verdict::Warn },
            "merging it costs more memory than it saves",
            value,
        )
        .remedy(remedy)
        .verify(format!("! grep 'ksm_process_profit -' /proc/{pid}/ksm_stat")))
}

/// A warning only: harmless by itself, and easily avoided.
fn judge_keys(rule: &'static RuleInfo, _: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    require("command line", &facts.process.arguments)?;
    if !facts.holds_secrets() {
        return Ok(rule.ok("not known to hold keys", facts.name()));
    }
    if !require_enrolled(facts)? {
        return Ok(rule.ok("it holds secrets and is not enrolled: leave it so", facts.name()));
    }
    let pid = facts.process.id.pid;
    Ok(rule
        .warn("it holds secrets and is enrolled", facts.name())
        .remedy(unenroll_remedy(facts))
        .verify(format!("! grep -q '^VmFlags:.* mg' /proc/{pid}/smaps")))
}

/// The pace of the host, since all enrolled processes share it. It is not reported for a process that is not enrolled:
/// without the process's memory it would be too optimistic.
fn judge_process_pace(host: &HostFacts, facts: &ProcessFacts) -> RuleResult {
    if !require_enrolled(facts)? {
        return Ok(PACE_RULE.not_applicable("not enrolled", facts.name()));
    }
    judge_pace(&PACE_RULE, host, &HostProcesses::new(host))
}
