//! What `pagefold-lab layout` says about its memory, against what the kernel says about it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pagefold_labs::client::{Lab, binary};
use pagefold_labs::lines::Region;
use pagefold_labs::spec::HELP;

/// What smaps says about all VMAs within a range, in KiB, by field; their number and flags beside them.
#[derive(Debug, Default)]
struct Smaps {
    vmas: u64,
    kib: HashMap<String, u64>,
    /// The flags that every one of them has.
    flags: Vec<String>,
}

impl Smaps {
    fn of(pid: u32, region: &Region) -> Self {
        let mut sums = Self::default();
        let mut inside = false;
        for line in fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap().lines() {
            let (head, rest) = line.split_once(' ').unwrap();
            if let Some((start, end)) = head.split_once('-') {
                let address = |text| u64::from_str_radix(text, 16).unwrap();
                let (start, end) = (address(start), address(end));
                inside = start < region.end() && end > region.start;
                if inside {
                    assert!(start >= region.start && end <= region.end(), "{line} is not within {region:?}");
                    sums.vmas += 1;
                }
            } else if inside && head == "VmFlags:" {
                let flags: Vec<_> = rest.split_whitespace().map(str::to_owned).collect();
                if sums.vmas == 1 {
                    sums.flags = flags;
                } else {
                    sums.flags.retain(|flag| flags.contains(flag));
                }
            } else if inside && let Some(kib) = rest.trim().strip_suffix(" kB") {
                *sums.kib.entry(head.trim_end_matches(':').to_owned()).or_default() += kib.parse::<u64>().unwrap();
            }
        }
        sums
    }

    fn pages(&self, field: &str, region: &Region) -> u64 {
        self.kib[field] * 1024 / region.page_size
    }
}

/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const EXCLUSIVE: u64 = 1 << 56;
const PRESENT: u64 = 1 << 63;

fn pagemap(pid: u32, region: &Region) -> Vec<u64> {
    let mut entries = vec![0; usize::try_from(region.pages).unwrap() * 8];
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).unwrap();
    pagemap.read_exact_at(&mut entries, region.start / region.page_size * 8).unwrap();
    entries.chunks(8).map(|entry| u64::from_ne_bytes(entry.try_into().unwrap())).collect()
}

fn present(pid: u32, region: &Region) -> u64 {
    pagemap(pid, region).iter().filter(|&entry| entry & PRESENT != 0).count() as u64
}

fn contents(pid: u32, region: &Region) -> Vec<Vec<u8>> {
    let size = usize::try_from(region.page_size).unwrap();
    let mut bytes = vec![0; usize::try_from(region.pages).unwrap() * size];
    File::open(format!("/proc/{pid}/mem")).unwrap().read_exact_at(&mut bytes, region.start).unwrap();
    bytes.chunks(size).map(<[u8]>::to_vec).collect()
}

/// How often each content occurs.
fn counted(pages: Vec<Vec<u8>>) -> HashMap<Vec<u8>, u64> {
    let mut counts = HashMap::new();
    for page in pages {
        *counts.entry(page).or_default() += 1;
    }
    counts
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|&byte| byte == 0)
}

const EVERY_KIND: &str = "zero=10,unique=11,within=12,copies=3,shared-content=book:13,text=14,pattern=15,elf=16,\
                          volatile=17,shared-memory=18,file=19,file-written=20,untouched=21,read-zero=22,\
                          fork-shared=23";

fn huge_pages_in_base_pages() -> Result<u64, String> {
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
fn every_region_is_what_it_says() {
    let lab = Lab::layout(&[EVERY_KIND]).unwrap();
    let kinds: Vec<_> = lab.lines().iter().map(|region| region.kind.as_str()).collect();
    assert_eq!(
        kinds.len(),
        HELP.lines().count() - 1 - "huge, huge-zero, hot-zero, hot-text".split(',').count(),
        "{kinds:?}"
    );
    for region in lab.lines() {
        let smaps = Smaps::of(lab.pid(), region);
        assert_eq!((smaps.vmas, region.vmas), (1, 1), "{region:?}");
        assert_eq!(smaps.pages("Anonymous", region), region.resident, "{region:?}");
        assert_eq!(smaps.kib["AnonHugePages"], 0, "{region:?}");
        let rss = match region.kind.as_str() {
            "file" | "shared-memory" => region.pages,
            _ => region.resident,
        };
        assert_eq!(smaps.pages("Rss", region), rss, "{region:?}");
        // The shared zero page is mapped, but no memory of the process.
        let mapped = if region.kind == "read-zero" { region.pages } else { rss };
        assert_eq!(present(lab.pid(), region), mapped, "{region:?}");
        if region.resident > 0 {
            let pages = contents(lab.pid(), region);
            assert_eq!(pages.iter().filter(|page| is_zero(page)).count() as u64, region.zero, "{region:?}");
            let counts = counted(pages);
            assert_eq!(counts.len() as u64, region.distinct, "{region:?}");
            let copies = region.pages / region.distinct;
            assert!(counts.values().all(|&count| count == copies), "{region:?}");
        }
    }
    assert_eq!(present(lab.pid(), lab.region("untouched")), 0, "reading the others touched nothing");
}

#[test]
fn two_processes_share_the_contents_they_should_and_no_others() {
    let spec = EVERY_KIND;
    let labs = ["a", "b"].map(|salt| Lab::layout(&[spec, "--salt", salt]).unwrap());
    let [left, right] = labs.each_ref().map(|lab| {
        lab.lines().iter().filter(|region| region.resident > 0).map(|region| (region, lab.pid())).collect::<Vec<_>>()
    });
    let mut everything: HashMap<Vec<u8>, &str> = HashMap::new();
    for ((region, pid), (other, other_pid)) in left.iter().zip(&right) {
        let common = ["zero", "shared-content", "text", "pattern", "elf"].contains(&region.kind.as_str());
        let pages = counted(contents(*pid, region));
        let others = counted(contents(*other_pid, other));
        assert_eq!(pages == others, common, "{}", region.kind);
        assert_eq!(pages.keys().any(|page| others.contains_key(page)), common, "{}", region.kind);
        for page in pages.into_keys() {
            let before = everything.insert(page, &region.kind);
            assert_eq!(before, None, "a page of {} is also one of another region", region.kind);
        }
    }
}

#[test]
fn the_same_salt_makes_the_same_contents() {
    let [left, right] = [(), ()].map(|()| {
        let lab = Lab::layout(&["unique=5,within=4,unique=5", "--salt", "s"]).unwrap();
        lab.lines().iter().map(|region| contents(lab.pid(), region)).collect::<Vec<_>>()
    });
    assert_eq!(left, right);
    assert!(left[0].iter().all(|page| !left[2].contains(page)), "regions of one process differ");
}

#[test]
fn volatile_pages_all_change_and_stay_unique() {
    let lab = Lab::layout(&["volatile=40,unique=40", "--interval", "1"]).unwrap();
    let (volatile, still) = (lab.region("volatile"), lab.region("unique"));
    let before = (contents(lab.pid(), volatile), contents(lab.pid(), still));
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let now = contents(lab.pid(), volatile);
        assert_eq!(counted(now.clone()).len(), 40);
        if now.iter().zip(&before.0).all(|(now, before)| now != before) {
            break;
        }
        assert!(Instant::now() < deadline, "some page never changed");
        std::thread::yield_now();
    }
    assert_eq!(contents(lab.pid(), still), before.1);
}

#[test]
fn hot_pages_are_written_over_with_what_they_hold() {
    let lab = Lab::layout(&["hot-zero=5,hot-text=6", "--interval", "1"]).unwrap();
    for (kind, distinct, zero) in [("hot-zero", 1, 5), ("hot-text", 1, 0)] {
        let region = lab.region(kind);
        let before = contents(lab.pid(), region);
        assert_eq!((counted(before.clone()).len(), region.zero), (distinct, zero));
        // What is written to it from outside does not stay.
        let memory = File::options().write(true).open(format!("/proc/{}/mem", lab.pid())).unwrap();
        memory.write_all_at(b"foreign", region.start + page_size() + 9).unwrap();
        let began = Instant::now();
        while contents(lab.pid(), region) != before {
            assert!(began.elapsed() < Duration::from_secs(60), "{kind} is not written over");
        }
    }
}

#[test]
fn huge_regions_consist_of_huge_pages() {
    let pages = match huge_pages_in_base_pages() {
        Ok(pages) => pages,
        Err(why) => return println!("skipped: {why}"),
    };
    let lab =
        Lab::layout(&[&format!("huge={},huge-zero={pages},unique={}", 2 * pages, 2 * pages), "--fragment"]).unwrap();
    for region in lab.lines() {
        let smaps = Smaps::of(lab.pid(), region);
        let huge = region.kind != "unique";
        assert_eq!(smaps.pages("AnonHugePages", region), if huge { region.pages } else { 0 }, "{region:?}");
        assert_eq!(smaps.pages("Rss", region), region.pages);
        assert_eq!(smaps.vmas, if huge { 1 } else { region.pages });
        assert_eq!(counted(contents(lab.pid(), region)).len() as u64, region.distinct);
    }
    let refused = Command::new(binary().unwrap()).args(["layout", "huge=1"]).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains(&format!("a multiple of {pages}")));
}

#[test]
fn regions_are_cut_as_asked() {
    let lab = Lab::layout(&["unique=10,zero=2,untouched=9,volatile=3", "--regions", "4"]).unwrap();
    let vmas: Vec<_> = lab.lines().iter().map(|region| region.vmas).collect();
    assert_eq!(vmas, [4, 2, 4, 1]);
    for region in lab.lines() {
        let smaps = Smaps::of(lab.pid(), region);
        assert_eq!(smaps.vmas, region.vmas, "{region:?}");
        assert_eq!(smaps.pages("Anonymous", region), region.resident, "{region:?}");
    }
    let lab = Lab::layout(&["within=10,read-zero=3", "--fragment"]).unwrap();
    for region in lab.lines() {
        assert_eq!((region.vmas, Smaps::of(lab.pid(), region).vmas), (region.pages, region.pages));
    }
}

#[test]
fn tebibytes_of_untouched_memory_cost_nothing() {
    let pages = (20 << 40) / page_size();
    let lab = Lab::layout(&[&format!("untouched={pages},unique=1")]).unwrap();
    let smaps = Smaps::of(lab.pid(), lab.region("untouched"));
    assert_eq!((smaps.kib["Size"], smaps.kib["Rss"]), (20 << 30, 0));
}

#[test]
fn a_forked_child_shares_the_pages_it_should_and_no_others() {
    let child = {
        let lab = Lab::layout(&["unique=8,fork-shared=9,zero=3"]).unwrap();
        let shared = lab.region("fork-shared");
        let child = shared.child.expect("a child");
        assert_eq!(contents(child, shared), contents(lab.pid(), shared));
        for entries in [pagemap(lab.pid(), shared), pagemap(child, shared)] {
            assert!(entries.iter().all(|entry| entry & PRESENT != 0 && entry & EXCLUSIVE == 0), "{entries:x?}");
        }
        for kind in ["unique", "zero"] {
            let region = lab.region(kind);
            assert!(pagemap(lab.pid(), region).iter().all(|entry| entry & EXCLUSIVE != 0), "{kind}");
            assert_eq!(Smaps::of(child, region).vmas, 0, "{kind}");
        }
        child
    };
    assert!(!fs::exists(format!("/proc/{child}")).unwrap(), "the child ended with the lab");
}

#[test]
fn what_is_mergeable_is_said_by_the_kernel() {
    if !fs::exists("/sys/kernel/mm/ksm").unwrap() {
        return println!("skipped: this kernel has no KSM (/sys/kernel/mm/ksm)");
    }
    let mergeable = |arguments: &[&str]| {
        let lab = Lab::layout(arguments).unwrap();
        lab.lines().iter().map(|region| Smaps::of(lab.pid(), region).flags.contains(&"mg".into())).collect::<Vec<_>>()
    };
    assert_eq!(mergeable(&["unique=4,volatile=2,shared-memory=2"]), [false, false, false]);
    assert_eq!(mergeable(&["unique=4,volatile=2,shared-memory=2", "--mergeable", "--fragment"]), [true, true, false]);
    match Lab::layout(&["unique=4", "--merge-any"]) {
        Err(error) if !fs::exists("/proc/self/ksm_stat").unwrap() => {
            println!("skipped: no PR_SET_MEMORY_MERGE on this kernel ({error})");
        }
        lab => assert!(
            Smaps::of(lab.as_ref().unwrap().pid(), lab.as_ref().unwrap().region("unique")).flags.contains(&"mg".into())
        ),
    }
}

#[test]
fn another_user_owns_the_process() {
    if !fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0) {
        return println!("skipped: becoming another user needs root");
    }
    let lab = Lab::layout(&["unique=3,fork-shared=2,volatile=2", "--uid", "64321"]).unwrap();
    for pid in [lab.pid(), lab.region("fork-shared").child.unwrap()] {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        for field in ["Uid", "Gid"] {
            assert!(status.contains(&format!("{field}:\t64321\t64321\t64321\t64321\n")), "{status}");
        }
        let maps = fs::metadata(format!("/proc/{pid}/maps")).unwrap();
        assert_eq!(maps.uid(), 64321, "it is readable to its user");
    }
}

#[test]
fn what_cannot_be_laid_out_is_an_error() {
    for arguments in [&["nought=1"][..], &[], &["unique=1", "--fragment", "--regions", "2"]] {
        let error = Lab::layout(arguments).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Other);
        assert!(error.to_string().contains("exit status: 2"), "{error}");
    }
}
