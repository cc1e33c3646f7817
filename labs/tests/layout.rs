//! Compares the regions that `pagefold-lab layout` reports with the kernel's view of its memory.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pagefold_labs::client::{RunningLab, lab_binary};
use pagefold_labs::layout_spec::SPEC_HELP;
use pagefold_labs::output_lines::RegionLine;

/// The sums of the smaps fields of all VMAs within a range, in KiB; the number and flags of these VMAs.
#[derive(Debug, Default)]
struct SmapsTotals {
    vma_count: u64,
    kib: HashMap<String, u64>,
    /// The flags that all of them have.
    common_flags: Vec<String>,
}

impl SmapsTotals {
    fn of_region(pid: u32, region: &RegionLine) -> Self {
        let mut sums = Self::default();
        let mut inside = false;
        for line in fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap().lines() {
            let (head, rest) = line.split_once(' ').unwrap();
            if let Some((start, end)) = head.split_once('-') {
                let address = |text| u64::from_str_radix(text, 16).unwrap();
                let (start, end) = (address(start), address(end));
                inside = start < region.end_address() && end > region.start;
                if inside {
                    assert!(start >= region.start && end <= region.end_address(), "{line} is not within {region:?}");
                    sums.vma_count += 1;
                }
            } else if inside && head == "VmFlags:" {
                let flags: Vec<_> = rest.split_whitespace().map(str::to_owned).collect();
                if sums.vma_count == 1 {
                    sums.common_flags = flags;
                } else {
                    sums.common_flags.retain(|flag| flags.contains(flag));
                }
            } else if inside && let Some(kib) = rest.trim().strip_suffix(" kB") {
                *sums.kib.entry(head.trim_end_matches(':').to_owned()).or_default() += kib.parse::<u64>().unwrap();
            }
        }
        sums
    }

    fn pages(&self, field: &str, region: &RegionLine) -> u64 {
        self.kib[field] * 1024 / region.page_size
    }
}

/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PM_MMAP_EXCLUSIVE: u64 = 1 << 56;
const PM_PRESENT: u64 = 1 << 63;

fn read_pagemap(pid: u32, region: &RegionLine) -> Vec<u64> {
    let mut entries = vec![0; usize::try_from(region.pages).unwrap() * 8];
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).unwrap();
    pagemap.read_exact_at(&mut entries, region.start / region.page_size * 8).unwrap();
    entries.chunks(8).map(|entry| u64::from_ne_bytes(entry.try_into().unwrap())).collect()
}

fn count_present_pages(pid: u32, region: &RegionLine) -> u64 {
    read_pagemap(pid, region).iter().filter(|&entry| entry & PM_PRESENT != 0).count() as u64
}

fn read_pages(pid: u32, region: &RegionLine) -> Vec<Vec<u8>> {
    let size = usize::try_from(region.page_size).unwrap();
    let mut bytes = vec![0; usize::try_from(region.pages).unwrap() * size];
    File::open(format!("/proc/{pid}/mem")).unwrap().read_exact_at(&mut bytes, region.start).unwrap();
    bytes.chunks(size).map(<[u8]>::to_vec).collect()
}

/// How many pages have each content.
fn count_by_content(pages: Vec<Vec<u8>>) -> HashMap<Vec<u8>, u64> {
    let mut counts = HashMap::new();
    for page in pages {
        *counts.entry(page).or_default() += 1;
    }
    counts
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|&byte| byte == 0)
}

const EVERY_REGION_KIND: &str = "zero=10,unique=11,within=12,copies=3,shared-content=book:13,text=14,pattern=15,elf=16,\
                          volatile=17,shared-memory=18,file=19,file-written=20,untouched=21,read-zero=22,\
                          fork-shared=23";

fn base_pages_per_huge_page() -> Result<u64, String> {
    let path = "/sys/kernel/mm/transparent_hugepage";
    let enabled = fs::read_to_string(format!("{path}/enabled")).map_err(|error| format!("{path}: {error}"))?;
    if enabled.contains("[never]") {
        return Err(format!("transparent huge pages are off ({path}/enabled)"));
    }
    let size: u64 = fs::read_to_string(format!("{path}/hpage_pmd_size")).unwrap().trim().parse().unwrap();
    Ok(size / page_size())
}

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

#[test]
fn regions_match_their_description() {
    let lab = RunningLab::start_layout(&[EVERY_REGION_KIND]).unwrap();
    let kinds: Vec<_> = lab.lines().iter().map(|region| region.kind.as_str()).collect();
    assert_eq!(
        kinds.len(),
        SPEC_HELP.lines().count() - 1 - "huge, huge-zero, rewritten-zero, rewritten-text".split(',').count(),
        "{kinds:?}"
    );
    for region in lab.lines() {
        let smaps = SmapsTotals::of_region(lab.pid(), region);
        assert_eq!((smaps.vma_count, region.vmas), (1, 1), "{region:?}");
        assert_eq!(smaps.pages("Anonymous", region), region.resident, "{region:?}");
        assert_eq!(smaps.kib["AnonHugePages"], 0, "{region:?}");
        let rss = match region.kind.as_str() {
            "file" | "shared-memory" => region.pages,
            _ => region.resident,
        };
        assert_eq!(smaps.pages("Rss", region), rss, "{region:?}");
        // The shared zero page is mapped, but is not memory of the process.
        let mapped = if region.kind == "read-zero" { region.pages } else { rss };
        assert_eq!(count_present_pages(lab.pid(), region), mapped, "{region:?}");
        if region.resident > 0 {
            let pages = read_pages(lab.pid(), region);
            assert_eq!(pages.iter().filter(|page| is_zero(page)).count() as u64, region.zero, "{region:?}");
            let counts = count_by_content(pages);
            assert_eq!(counts.len() as u64, region.distinct, "{region:?}");
            let copies = region.pages / region.distinct;
            assert!(counts.values().all(|&count| count == copies), "{region:?}");
        }
    }
    assert_eq!(count_present_pages(lab.pid(), lab.first_region("untouched")), 0, "reading the others touched nothing");
}

#[test]
fn processes_share_only_intended_contents() {
    let spec = EVERY_REGION_KIND;
    let labs = ["a", "b"].map(|salt| RunningLab::start_layout(&[spec, "--salt", salt]).unwrap());
    let [left, right] = labs.each_ref().map(|lab| {
        lab.lines().iter().filter(|region| region.resident > 0).map(|region| (region, lab.pid())).collect::<Vec<_>>()
    });
    let mut everything: HashMap<Vec<u8>, &str> = HashMap::new();
    for ((region, pid), (other, other_pid)) in left.iter().zip(&right) {
        let common = ["zero", "shared-content", "text", "pattern", "elf"].contains(&region.kind.as_str());
        let pages = count_by_content(read_pages(*pid, region));
        let others = count_by_content(read_pages(*other_pid, other));
        assert_eq!(pages == others, common, "{}", region.kind);
        assert_eq!(pages.keys().any(|page| others.contains_key(page)), common, "{}", region.kind);
        for page in pages.into_keys() {
            let before = everything.insert(page, &region.kind);
            assert_eq!(before, None, "a page of {} is also one of another region", region.kind);
        }
    }
}

#[test]
fn same_salt_gives_same_contents() {
    let [left, right] = [(), ()].map(|()| {
        let lab = RunningLab::start_layout(&["unique=5,within=4,unique=5", "--salt", "s"]).unwrap();
        lab.lines().iter().map(|region| read_pages(lab.pid(), region)).collect::<Vec<_>>()
    });
    assert_eq!(left, right);
    assert!(left[0].iter().all(|page| !left[2].contains(page)), "regions of one process differ");
}

#[test]
fn volatile_pages_change_and_stay_unique() {
    let lab = RunningLab::start_layout(&["volatile=40,unique=40", "--interval", "1"]).unwrap();
    let (volatile, still) = (lab.first_region("volatile"), lab.first_region("unique"));
    let before = (read_pages(lab.pid(), volatile), read_pages(lab.pid(), still));
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let now = read_pages(lab.pid(), volatile);
        assert_eq!(count_by_content(now.clone()).len(), 40);
        if now.iter().zip(&before.0).all(|(now, before)| now != before) {
            break;
        }
        assert!(Instant::now() < deadline, "some page never changed");
        std::thread::yield_now();
    }
    assert_eq!(read_pages(lab.pid(), still), before.1);
}

#[test]
fn hot_pages_are_rewritten_with_same_contents() {
    let lab = RunningLab::start_layout(&["rewritten-zero=5,rewritten-text=6", "--interval", "1"]).unwrap();
    for (kind, distinct, zero) in [("rewritten-zero", 1, 5), ("rewritten-text", 1, 0)] {
        let region = lab.first_region(kind);
        let before = read_pages(lab.pid(), region);
        assert_eq!((count_by_content(before.clone()).len(), region.zero), (distinct, zero));
        // Writes from outside are overwritten.
        let memory = File::options().write(true).open(format!("/proc/{}/mem", lab.pid())).unwrap();
        memory.write_all_at(b"foreign", region.start + page_size() + 9).unwrap();
        let began = Instant::now();
        while read_pages(lab.pid(), region) != before {
            assert!(began.elapsed() < Duration::from_secs(60), "{kind} is not written over");
        }
    }
}

#[test]
fn huge_regions_consist_of_huge_pages() {
    let pages = match base_pages_per_huge_page() {
        Ok(pages) => pages,
        Err(why) => return println!("skipped: {why}"),
    };
    let lab = RunningLab::start_layout(&[
        &format!("huge={},huge-zero={pages},unique={}", 2 * pages, 2 * pages),
        "--fragment",
    ])
    .unwrap();
    for region in lab.lines() {
        let smaps = SmapsTotals::of_region(lab.pid(), region);
        let huge = region.kind != "unique";
        assert_eq!(smaps.pages("AnonHugePages", region), if huge { region.pages } else { 0 }, "{region:?}");
        assert_eq!(smaps.pages("Rss", region), region.pages);
        assert_eq!(smaps.vma_count, if huge { 1 } else { region.pages });
        assert_eq!(count_by_content(read_pages(lab.pid(), region)).len() as u64, region.distinct);
    }
    let refused =
        Command::new(lab_binary().unwrap()).args(["layout", "huge=1"]).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains(&format!("a multiple of {pages}")));
}

#[test]
fn regions_are_split_as_requested() {
    let lab = RunningLab::start_layout(&["unique=10,zero=2,untouched=9,volatile=3", "--regions", "4"]).unwrap();
    let vmas: Vec<_> = lab.lines().iter().map(|region| region.vmas).collect();
    assert_eq!(vmas, [4, 2, 4, 1]);
    for region in lab.lines() {
        let smaps = SmapsTotals::of_region(lab.pid(), region);
        assert_eq!(smaps.vma_count, region.vmas, "{region:?}");
        assert_eq!(smaps.pages("Anonymous", region), region.resident, "{region:?}");
    }
    let lab = RunningLab::start_layout(&["within=10,read-zero=3", "--fragment"]).unwrap();
    for region in lab.lines() {
        assert_eq!((region.vmas, SmapsTotals::of_region(lab.pid(), region).vma_count), (region.pages, region.pages));
    }
}

#[test]
fn untouched_tebibytes_use_no_memory() {
    let pages = (20 << 40) / page_size();
    let lab = RunningLab::start_layout(&[&format!("untouched={pages},unique=1")]).unwrap();
    let smaps = SmapsTotals::of_region(lab.pid(), lab.first_region("untouched"));
    assert_eq!((smaps.kib["Size"], smaps.kib["Rss"]), (20 << 30, 0));
}

#[test]
fn forked_child_shares_only_intended_pages() {
    let child = {
        let lab = RunningLab::start_layout(&["unique=8,fork-shared=9,zero=3"]).unwrap();
        let shared = lab.first_region("fork-shared");
        let child = shared.child.expect("a child");
        assert_eq!(read_pages(child, shared), read_pages(lab.pid(), shared));
        for entries in [read_pagemap(lab.pid(), shared), read_pagemap(child, shared)] {
            assert!(
                entries.iter().all(|entry| entry & PM_PRESENT != 0 && entry & PM_MMAP_EXCLUSIVE == 0),
                "{entries:x?}"
            );
        }
        for kind in ["unique", "zero"] {
            let region = lab.first_region(kind);
            assert!(read_pagemap(lab.pid(), region).iter().all(|entry| entry & PM_MMAP_EXCLUSIVE != 0), "{kind}");
            assert_eq!(SmapsTotals::of_region(child, region).vma_count, 0, "{kind}");
        }
        child
    };
    assert!(!fs::exists(format!("/proc/{child}")).unwrap(), "the child ended with the lab");
}

#[test]
fn mergeable_flag_is_visible_in_smaps() {
    if !fs::exists("/sys/kernel/mm/ksm").unwrap() {
        return println!("skipped: this kernel has no KSM (/sys/kernel/mm/ksm)");
    }
    let mergeable = |arguments: &[&str]| {
        let lab = RunningLab::start_layout(arguments).unwrap();
        lab.lines()
            .iter()
            .map(|region| SmapsTotals::of_region(lab.pid(), region).common_flags.contains(&"mg".into()))
            .collect::<Vec<_>>()
    };
    assert_eq!(mergeable(&["unique=4,volatile=2,shared-memory=2"]), [false, false, false]);
    assert_eq!(mergeable(&["unique=4,volatile=2,shared-memory=2", "--mergeable", "--fragment"]), [true, true, false]);
    match RunningLab::start_layout(&["unique=4", "--merge-any"]) {
        Err(error) if !fs::exists("/proc/self/ksm_stat").unwrap() => {
            println!("skipped: no PR_SET_MEMORY_MERGE on this kernel ({error})");
        }
        lab => assert!(
            SmapsTotals::of_region(lab.as_ref().unwrap().pid(), lab.as_ref().unwrap().first_region("unique"))
                .common_flags
                .contains(&"mg".into())
        ),
    }
}

#[test]
fn process_runs_as_requested_user() {
    if !fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0) {
        return println!("skipped: becoming another user needs root");
    }
    let lab = RunningLab::start_layout(&["unique=3,fork-shared=2,volatile=2", "--uid", "64321"]).unwrap();
    for pid in [lab.pid(), lab.first_region("fork-shared").child.unwrap()] {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        for field in ["Uid", "Gid"] {
            assert!(status.contains(&format!("{field}:\t64321\t64321\t64321\t64321\n")), "{status}");
        }
        let maps = fs::metadata(format!("/proc/{pid}/maps")).unwrap();
        assert_eq!(maps.uid(), 64321, "it is readable to its user");
    }
}

#[test]
fn impossible_layouts_are_rejected() {
    for arguments in [&["nought=1"][..], &[], &["unique=1", "--fragment", "--regions", "2"]] {
        let error = RunningLab::start_layout(arguments).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Other);
        assert!(error.to_string().contains("exit status: 2"), "{error}");
    }
}
