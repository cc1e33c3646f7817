use super::*;
use pagefold_base::engine::EngineTimeUse;
use pagefold_base::{AddressRange, Bytes, Pid, ProcessId};
use pagefold_output::text::TextStyle;

fn tally(pages: u64, merged: u64, zeros: u64, rewritten: u64) -> PageTally {
    PageTally { pages: Pages(pages), merged: Pages(merged), zeros: Pages(zeros), rewritten_pages: Pages(rewritten) }
}

fn member(pid: u32, tally: PageTally, bound: Option<f64>) -> EngineMember {
    let start = 0x7f00_0000_0000;
    EngineMember {
        process: ProcessId { pid: Pid(pid), start_time: 5 },
        reported_at: Duration::from_secs(95),
        last_merge: bound.map(|_| Duration::from_millis(94_500)),
        merges: 3,
        merge_time: Duration::from_millis(12),
        time_use: EngineTimeUse {
            elapsed: Duration::from_secs(51),
            spent: Duration::from_secs(1),
            max_slowdown: bound,
        },
        notes: Bytes(4 * tally.pages.0),
        tally,
        region_count: 1,
        regions: vec![RegionTally { range: AddressRange { start, end: start + tally.pages.0 * 4096 }, tally }],
    }
}

fn sample_report() -> EngineReport {
    let page = PageSize::new(4096).unwrap();
    let domain = EngineDomain {
        name: "job42".to_owned(),
        owner: 1000,
        page_size: page,
        members: vec![member(11, tally(2560, 1200, 256, 3), Some(0.02)), member(12, tally(1280, 1200, 0, 0), None)],
        ended_members: 2,
        unreadable_members: 1,
        stored: Pages(1200),
        index: Bytes(65536),
        files: Bytes(131_072),
    };
    let unreadable =
        UnreadableDirectory { path: "/dev/shm/pagefold-7".to_owned(), reason: "/dev/shm/pagefold-7 is odd".to_owned() };
    let comms = vec!["hera".to_owned(), "a\x1b[2J".to_owned()];
    EngineReport::from_domains(page, &[(domain, comms)], vec![unreadable], Duration::from_secs(100))
}

#[test]
fn report_figures_match_member_records() {
    let report = sample_report();
    let domain = &report.domains[0];
    assert_eq!((domain.references_pages, domain.stored, domain.sharing), (2400, 1200 * 4096, Some(2.0)));
    assert_eq!(domain.usage.saved, (1200 + 256) * 4096);
    assert_eq!(domain.overhead, 131_072 + 4 * (2560 + 1280));
    assert_eq!(domain.net, domain.usage.saved - domain.overhead as i64);
    let saved: Vec<i64> = domain.members.iter().map(|member| member.usage.saved / 4096).collect();
    assert_eq!(saved, [600 + 256, 600]);
    assert_eq!(domain.members[0].slowdown, 0.02);
    assert_eq!(domain.members[0].last_merge_seconds_ago, Some(5.5));
    assert!(report.is_incomplete());
}

#[test]
fn details_are_rendered() {
    insta::assert_snapshot!(crate::command::engine::text::render_details(&sample_report(), 1, TextStyle { width: 150, color: false }), @r"
    Domain job42 of user 1000: 2 members, 15.0 MiB adopted; saves 5.69 MiB, net 5.55 MiB after 143 KiB of overhead (64.0 KiB index).
    Store: 1,200 pages, 4.69 MiB; mapped by 2,400 pages of members: 2.00 pages share one.

    Members
     pid  name   adopted    merged     zeros  rewritten     saved  merges     time       last  slowdown   bound
      11  hera  10.0 MiB  4.69 MiB  1.00 MiB   12.0 KiB  3.34 MiB       3  12.0 ms  5.5 s ago    2.00 %  2.00 %
    … and 1 more (--top 2 shows all)

    Regions
     pid  addresses                   adopted    merged     zeros  rewritten     saved
      11  7f0000000000-7f0000a00000  10.0 MiB  4.69 MiB  1.00 MiB   12.0 KiB  3.34 MiB
    … and 1 more (--top 2 shows all)
    Not counted in job42: 2 members that have ended; the next merge removes their records.
    Not counted in job42: 1 record of a member that could not be read or is invalid.

    Not seen:
    /dev/shm/pagefold-7 is odd
    ");
    let all = crate::command::engine::text::render_details(&sample_report(), 9, TextStyle::default());
    assert!(all.contains("a\\u{1b}[2J") && !all.contains('\x1b'), "names cannot control the terminal: {all}");
}

#[test]
fn list_is_rendered() {
    insta::assert_snapshot!(crate::command::engine::text::render_list(&sample_report(), TextStyle::default()), @r"
     domain   uid  members   adopted    merged     zeros  rewritten     saved     store  overhead       net
     job42   1000        2  15.0 MiB  9.38 MiB  1.00 MiB   12.0 KiB  5.69 MiB  4.69 MiB   143 KiB  5.55 MiB
    Not counted in job42: 2 members that have ended; the next merge removes their records.
    Not counted in job42: 1 record of a member that could not be read or is invalid.

    Not seen:
    /dev/shm/pagefold-7 is odd
    ");
}

#[test]
fn empty_list_is_reported() {
    let none = EngineReport::from_domains(PageSize::new(4096).unwrap(), &[], Vec::new(), Duration::ZERO);
    assert!(crate::command::engine::text::render_list(&none, TextStyle::default()).starts_with("There is no domain"));
    assert!(!none.is_incomplete());
}

#[test]
fn json_matches_its_schema() {
    let schema = serde_json::from_str(&pagefold_output::wire::json_schema::<EngineReport>()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    assert!(validator.is_valid(&serde_json::to_value(sample_report()).unwrap()));
}
