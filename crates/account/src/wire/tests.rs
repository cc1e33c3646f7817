use super::*;
use crate::decide::reconcile::reconcile;
use crate::decide::{Frames, MappedPages, MappingShares};
use crate::text;
use pagefold_base::identity::{Identity, Job, Monitor, Vm};
use pagefold_base::ksm::{Ksm, ProcessKsm};
use pagefold_base::memory::MemInfo;
use pagefold_base::process::{Process, SmapsRollup};
use pagefold_base::{Absent, Bytes, Pages, Pid, ProcessId};
use pagefold_output::text::TextStyle;
use pagefold_output::wire;
use std::num::NonZeroU64;

const PAGES_PER_MIB: u64 = 256;

const REMEDY: &str = "Run as root to see all.";

fn page() -> PageSize {
    PageSize::new(4096).unwrap()
}

fn process(pid: u32, comm: &str, identity: Identity) -> Process {
    Process {
        id: ProcessId { pid: Pid(pid), start_time: 7 },
        comm: comm.to_owned(),
        state: 'S',
        kernel_thread: false,
        uid: Ok(1000),
        setuid: false,
        arguments: Ok(Vec::new()),
        cgroup: Ok("/machine.slice".to_owned()),
        identity,
        ksm: ProcessKsm::absent(&Absent::NotOnThisKernel),
        seccomp: Ok(0),
        pinned: Ok(Bytes::ZERO),
    }
}

fn vm(name: &str) -> Identity {
    let vm = Vm {
        monitor: Monitor::Qemu,
        name: Some(name.to_owned()),
        uuid: None,
        memory_bytes: None,
        backends: Vec::new(),
        mem_merge: true,
        vfio: false,
        control_socket: None,
    };
    Identity { vm: Some(vm), ..Identity::default() }
}

fn shares(entries: &[(u64, u64)]) -> MappingShares {
    let mut shares = MappingShares::default();
    for &(mappings, pages) in entries {
        shares.add(NonZeroU64::new(mappings).unwrap(), pages);
    }
    shares
}

/// Two machines, a job rank for which KSM costs more than it saves, and a process of a user that may not read frames.
/// The machines share 60 MiB of KSM pages with each other and 40 MiB of zeros with the kernel. One page in each was
/// written since ksmd's last visit.
fn sample_accounts() -> Vec<Account> {
    let guest = |pid, name| {
        let mapped = MappedPages {
            shares: shares(&[(1, 100 * PAGES_PER_MIB + 1), (2, 60 * PAGES_PER_MIB - 1)]),
            ksm: shares(&[(2, 60 * PAGES_PER_MIB - 1)]),
            ..MappedPages::default()
        };
        let ksm = ProcessKsm {
            rmap_items: Ok(200 * PAGES_PER_MIB),
            merging_pages: Ok(60 * PAGES_PER_MIB),
            zero_pages: Ok(40 * PAGES_PER_MIB as i64),
            profit: Ok((100 * PAGES_PER_MIB * 4096) as i64 - (200 * PAGES_PER_MIB * 64) as i64),
            merge_any: Ok(false),
            mergeable: Ok(true),
        };
        let pss = Ok(Bytes(130 << 20));
        let footprint = Footprint::exact(page(), mapped, pss, Ok(Bytes::ZERO), &ksm);
        Account { process: process(pid, "qemu-system-x86", vm(name)), footprint }
    };
    let none = ProcessKsm {
        rmap_items: Ok(0),
        merging_pages: Ok(0),
        zero_pages: Ok(0),
        profit: Ok(0),
        merge_any: Ok(false),
        mergeable: Ok(false),
    };
    let job = Identity { job: Some(Job { name: "slurm:9.0".to_owned(), rank: Some(3) }), ..Identity::default() };
    let mapped = MappedPages { shares: shares(&[(1, 10 * PAGES_PER_MIB)]), ..MappedPages::default() };
    let scanned = ProcessKsm { rmap_items: Ok(10 * PAGES_PER_MIB), profit: Ok(-163_840), ..none.clone() };
    let rank = Footprint::exact(page(), mapped, Ok(Bytes(10 << 20)), Ok(Bytes(1 << 20)), &scanned);
    let rollup = SmapsRollup {
        rss: Ok(Bytes(8 << 20)),
        pss: Ok(Bytes(6 << 20)),
        private_clean: Ok(Bytes::ZERO),
        private_dirty: Ok(Bytes(5 << 20)),
        anonymous: Ok(Bytes(5 << 20)),
        anon_huge: Ok(Bytes::ZERO),
        ksm: Ok(Bytes::ZERO),
        swap: Ok(Bytes::ZERO),
    };
    let estimate = Footprint::estimated(page(), &rollup, &none, &sample_ksm(), Absent::Denied).unwrap();
    vec![
        guest(101, "web1"),
        guest(102, "web2"),
        Account { process: process(103, "cp2k", job), footprint: rank },
        Account { process: process(104, "sshd", Identity::default()), footprint: estimate },
    ]
}

fn sample_ksm() -> Ksm {
    let absent = Err(Absent::NotOnThisKernel);
    Ksm {
        run: Ok(0),
        pages_to_scan: absent.clone(),
        sleep_millisecs: absent.clone(),
        pages_shared: Ok(60 * PAGES_PER_MIB),
        pages_sharing: Ok(60 * PAGES_PER_MIB),
        pages_unshared: absent.clone(),
        pages_volatile: absent.clone(),
        pages_scanned: absent.clone(),
        pages_skipped: absent.clone(),
        full_scans: absent.clone(),
        max_page_sharing: Ok(256),
        merge_across_nodes: absent.clone(),
        use_zero_pages: absent.clone(),
        ksm_zero_pages: Ok(80 * PAGES_PER_MIB as i64),
        general_profit: Ok((140 * PAGES_PER_MIB * 4096) as i64 - (410 * PAGES_PER_MIB * 64) as i64),
        stable_node_chains: Ok(0),
        stable_node_dups: Ok(0),
        smart_scan: absent.clone(),
        advisor_mode: Err(Absent::NotOnThisKernel),
        advisor_target_scan_time: absent,
    }
}

fn reconciliation(accounts: &[Account]) -> Reconciliation {
    let frames = Frames {
        distinct: Pages(270 * PAGES_PER_MIB + 1),
        anonymous: Pages(270 * PAGES_PER_MIB + 1),
        ksm: Pages(60 * PAGES_PER_MIB - 1),
        ksm_mappings: Pages(120 * PAGES_PER_MIB - 2),
        zero: Pages(80 * PAGES_PER_MIB),
        ..Frames::default()
    };
    let none = || Err(Absent::NotOnThisKernel);
    let memory = MemInfo {
        total: none(),
        free: none(),
        available: none(),
        anon: Ok(Bytes(275 << 20)),
        anon_huge: none(),
        swap_total: none(),
        swap_free: none(),
        hugetlb: Ok(Bytes::ZERO),
    };
    reconcile(page(), accounts, &frames, &sample_ksm(), &memory)
}

fn report(by: GroupBy, explain: bool) -> AccountReport {
    let accounts = sample_accounts();
    let reconciliation = reconciliation(&accounts);
    let unscanned = [UnscannedProcess { pid: Pid(1), comm: Some("init".to_owned()), why: Absent::Denied }];
    let reconciliation_input =
        ReconciliationInput { reconciliation: &reconciliation, processes: 4, unscanned: &unscanned };
    AccountReport::from_input(&AccountInput {
        host: "this host".to_owned(),
        page_size: page(),
        group_by: by,
        accounts: &accounts,
        unscanned: &unscanned,
        reconciliation: explain.then_some(reconciliation_input),
        seconds: 0.5,
    })
}

fn render_report(by: GroupBy, width: u16) -> String {
    text::render(&report(by, false), 3, REMEDY, TextStyle { width, color: false })
}

#[test]
fn processes_are_shown_in_a_wide_terminal() {
    insta::assert_snapshot!(render_report(GroupBy::Process, 160), @r"
    Account of this host: 4 processes cost 276 MiB, by RSS 338 MiB; merging saves them 134 MiB net. 1 of them estimated.

     pid  name             RSS       PSS   private       KSM  KSM zero  fair share  unmerged  saved, net      swap  share
     101  web1         160 MiB   130 MiB   100 MiB  60.0 MiB  40.0 MiB     130 MiB   200 MiB    66.9 MiB         ·  █████▋
     102  web2         160 MiB   130 MiB   100 MiB  60.0 MiB  40.0 MiB     130 MiB   200 MiB    66.9 MiB         ·  █████▋
     103  cp2k #3     10.0 MiB  10.0 MiB  10.0 MiB         ·         ·    10.0 MiB  10.0 MiB    -160 KiB  1.00 MiB  ▍
          total of 4   338 MiB   276 MiB   215 MiB   120 MiB  80.0 MiB    ~276 MiB  ~416 MiB    ~134 MiB  1.00 MiB
    … and 1 more (--top 4 shows all)

    ~ marks estimates (1 of 4 processes): the frames could not be read (permission denied), so the fair share is Pss, and the savings by KSM are the host's mean for
    each merged page. Run as root for exact figures.
    Not scanned for lack of permission: 1 process, such as 1 (init). Run as root to see all.
    ");
}

#[test]
fn processes_are_shown_in_a_narrow_terminal() {
    insta::assert_snapshot!(render_report(GroupBy::Process, 80), @r"
    Account of this host: 4 processes cost 276 MiB, by RSS 338 MiB; merging saves
    them 134 MiB net. 1 of them estimated.

     pid  name             RSS       KSM  fair share  unmerged  saved, net
     101  web1         160 MiB  60.0 MiB     130 MiB   200 MiB    66.9 MiB
     102  web2         160 MiB  60.0 MiB     130 MiB   200 MiB    66.9 MiB
     103  cp2k #3     10.0 MiB         ·    10.0 MiB  10.0 MiB    -160 KiB
          total of 4   338 MiB   120 MiB    ~276 MiB  ~416 MiB    ~134 MiB
    … and 1 more (--top 4 shows all)
    Columns that do not fit: KSM zero, swap, PSS, private (--json has all).

    ~ marks estimates (1 of 4 processes): the frames could not be read (permission
    denied), so the fair share is Pss, and the savings by KSM are the host's mean
    for each merged page. Run as root for exact figures.
    Not scanned for lack of permission: 1 process, such as 1 (init). Run as root to see all.
    ");
}

#[test]
fn accounts_are_grouped_by_machine() {
    insta::assert_snapshot!(render_report(GroupBy::Vm, 100), @r"
    Account of this host: 4 processes cost 276 MiB, by RSS 338 MiB; merging saves them 134 MiB net. 1 of
    them estimated.

     name    processes       RSS       PSS   private       KSM  fair share   unmerged  saved, net
     web1            1   160 MiB   130 MiB   100 MiB  60.0 MiB     130 MiB    200 MiB    66.9 MiB
     web2            1   160 MiB   130 MiB   100 MiB  60.0 MiB     130 MiB    200 MiB    66.9 MiB
     others          2  18.0 MiB  16.0 MiB  15.0 MiB         ·   ~16.0 MiB  ~16.0 MiB   ~-160 KiB
     total           4   338 MiB   276 MiB   215 MiB   120 MiB    ~276 MiB   ~416 MiB    ~134 MiB
    Columns that do not fit: KSM zero, swap (--json has all).

    ~ marks estimates (1 of 4 processes): the frames could not be read (permission denied), so the fair
    share is Pss, and the savings by KSM are the host's mean for each merged page. Run as root for exact
    figures.
    Not scanned for lack of permission: 1 process, such as 1 (init). Run as root to see all.
    ");
}

#[test]
fn counter_differences_are_explained() {
    let text = text::render(&report(GroupBy::Process, true), 0, REMEDY, TextStyle { width: 100, color: false });
    let (_, explained) = text.split_once("The fair shares").unwrap();
    insta::assert_snapshot!(explained, @r"
     of all processes against the frames in use
                                       bytes
     fair shares of 3 processes  283,119,616  270 MiB
     = frames in use, each once  283,119,616  270 MiB
    They add up exactly, in integers.

    The account against the kernel's counters
     what                                   account   kernel  difference
     sum of Pss, smaps_rollup               270 MiB  270 MiB   +4.00 KiB
     AnonPages, meminfo                     270 MiB  275 MiB   -5.00 MiB
     pages_shared                            15,359   15,360          -1
     pages_sharing                           15,359   15,360          -1
     sum of ksm_merging_pages                30,718   30,720          -2
     ksm_zero_pages                          20,480   20,480           ·
     stable_node_dups - stable_node_chains        0        0           ·
     Hugetlb, meminfo                           0 B      0 B           ·
     pages mapped to the huge zero page           0        -           -
     general_profit                         134 MiB  134 MiB   -4.00 KiB
     sum of ksm_process_profit              134 MiB  194 MiB   -60.0 MiB

    Why they differ
    sum of Pss, smaps_rollup: Pss is rounded down for each page and to whole kB, and was read at another
      time than the frames.
    AnonPages, meminfo: anonymous memory of processes that were not read or grew since, including this
      program; the counter is summed from parts per CPU and may lag by 125 pages for each of them.
    pages_shared: the counter is stale: frames whose pages were written or unmapped leave it when ksmd
      visits them; or they are mapped by processes that were not read.
    pages_sharing: -2 pages written or unmapped since ksmd's last visit; +1 frames counted as shared
      that are not mapped any more, or not by the processes read.
    sum of ksm_merging_pages: the counters are stale: pages that were written or unmapped leave them
      when ksmd visits them; as a saving it overstates by pages_shared, 15359 pages, because it counts
      the kept copy.
    general_profit: the kernel counts the pages merged at ksmd's last visit, the account those merged
      now; both pay 64 bytes of metadata for each page that ksmd keeps.
    sum of ksm_process_profit: the kernel counts the pages merged at ksmd's last visit, the account
      those merged now; it overstates by pages_shared, 60.0 MiB, because it charges the kept copy to no
      process.
    A page is 4.00 KiB.

    ~ marks estimates (1 of 4 processes): the frames could not be read (permission denied), so the fair
    share is Pss, and the savings by KSM are the host's mean for each merged page. Run as root for exact
    figures.
    Not scanned for lack of permission: 1 process, such as 1 (init). Run as root to see all.
    Not in the balance and not in the comparison: 1 process with estimated figures.
    ");
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    for width in [60, 72, 80, 100, 120, 160, 250] {
        for by in [GroupBy::Process, GroupBy::Vm, GroupBy::Cgroup, GroupBy::Job, GroupBy::Step, GroupBy::User] {
            let text = text::render(&report(by, true), 2, REMEDY, TextStyle { width, color: false });
            let tables = text.lines().filter(|line| line.starts_with(' '));
            for line in tables {
                assert!(line.chars().count() <= usize::from(width), "{width}: {line}");
            }
        }
    }
}

#[test]
fn group_sums_equal_the_total() {
    let total = report(GroupBy::Process, false).total;
    for by in [GroupBy::Vm, GroupBy::Cgroup, GroupBy::Job, GroupBy::Step, GroupBy::User] {
        let report = report(by, false);
        assert_eq!(report.total, total);
        let sum = |field: fn(&FootprintReport) -> u64| report.groups.iter().map(|group| field(&group.footprint)).sum();
        let sums: [u64; 3] = [sum(|f| f.rss), sum(|f| f.fair_share), sum(|f| f.ksm_pages)];
        assert_eq!(sums, [total.rss, total.fair_share, total.ksm_pages], "{}", report.by);
        assert_eq!(report.groups.iter().map(|group| group.processes).sum::<u64>(), 4);
    }
}

#[test]
fn json_matches_its_schema() {
    let schema: serde_json::Value = serde_json::from_str(&wire::json_schema::<AccountReport>()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let report: serde_json::Value = serde_json::from_str(&wire::to_json(&report(GroupBy::Vm, true))).unwrap();
    let faults: Vec<String> = validator.iter_errors(&report).map(|fault| fault.to_string()).collect();
    assert!(faults.is_empty(), "{faults:?}");
    assert_eq!(report["schema"], "pagefold.account/1");
    let rank = report["processes"].as_array().unwrap().iter().find(|process| process["pid"] == 103).unwrap();
    assert_eq!(rank["profit"], -163_840);
    assert!(rank.get("estimate_reason").is_none());
    let estimate = report["processes"].as_array().unwrap().iter().find(|process| process["pid"] == 104).unwrap();
    assert_eq!(estimate["estimate_reason"], "permission denied");
    assert!(estimate.get("hugetlb").is_none(), "an unknown figure is absent and not 0");
    let mut wrong = report.clone();
    wrong["total"]["rss"] = "much".into();
    assert!(!validator.is_valid(&wrong));
}

#[test]
fn engine_savings_are_shown_if_present() {
    let mapped = |engine: &[(u64, u64)]| {
        let parts: Vec<(u64, u64)> = engine.iter().copied().chain([(1, 2 * PAGES_PER_MIB)]).collect();
        MappedPages { shares: shares(&parts), engine: shares(engine), ..MappedPages::default() }
    };
    let none = ProcessKsm::absent(&Absent::NotOnThisKernel);
    let footprint =
        |engine: &[(u64, u64)]| Footprint::exact(page(), mapped(engine), Ok(Bytes::ZERO), Ok(Bytes::ZERO), &none);
    let account =
        |pid, engine| Account { process: process(pid, "rank", Identity::default()), footprint: footprint(engine) };
    let accounts = [account(1, &[(4, 8 * PAGES_PER_MIB)]), account(2, &[])];
    let report = AccountReport::from_input(&AccountInput {
        host: "this host".to_owned(),
        page_size: page(),
        group_by: GroupBy::Process,
        accounts: &accounts,
        unscanned: &[],
        reconciliation: None,
        seconds: 0.0,
    });
    let total = &report.total;
    let engine = (total.engine_pages, total.engine_fair_share, total.engine_saved);
    assert_eq!(engine, (Some(8 * PAGES_PER_MIB), Some(2 << 20), Some(6 << 20)));
    insta::assert_snapshot!(text::render(&report, 3, REMEDY, TextStyle { width: 160, color: false }), @r"
    Account of this host: 2 processes cost 6.00 MiB, by RSS 12.0 MiB; the savings by merging are unknown; the user-space engine saves them 6.00 MiB. All frames were
    read.

     pid  name             RSS  PSS   private  KSM  KSM zero  fair share  unmerged  saved, net    engine  engine saves  share
       1  rank        10.0 MiB    ·  2.00 MiB    ·         ?    4.00 MiB         ?           ?  8.00 MiB      6.00 MiB  ████████
       2  rank        2.00 MiB    ·  2.00 MiB    ·         ?    2.00 MiB         ?           ?         ·             ·  ████
          total of 2  12.0 MiB    ·  4.00 MiB    ·         ?    6.00 MiB         ?           ?  8.00 MiB      6.00 MiB
    ");
}
