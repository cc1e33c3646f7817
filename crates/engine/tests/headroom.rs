//! Members in a cgroup with little free memory: merging never gets one killed, and pages are merged as far as memory
//! suffices.

mod member;

use member::{MemberAnswer, MemberProcess, PAGE_BYTES, domains_root};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BYTES_PER_MIB: u64 = 1 << 20;

/// Bytes that the kernel charges to a cgroup in advance on each CPU, as part of its usage: `MEMCG_CHARGE_BATCH` pages
/// (include/linux/memcontrol.h, Linux 6.18).
const CHARGE_BATCH_BYTES: u64 = 64 * PAGE_BYTES;

/// A cgroup of the memory controller, v1 or v2. Removed on drop.
struct MemoryCgroup {
    path: PathBuf,
    limit_file: &'static str,
    usage_file: &'static str,
}

impl MemoryCgroup {
    fn create(name: &str) -> Option<Self> {
        let (v1_root, v2_root) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let name = format!("pagefold-test-{name}-{}", std::process::id());
        let (path, limit, used) = if v1_root.join("memory.limit_in_bytes").exists() {
            (v1_root.join(name), "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            (v2_root.join(name), "memory.max", "memory.current")
        };
        std::fs::create_dir(&path).ok()?;
        let cgroup = Self { path, limit_file: limit, usage_file: used };
        cgroup.path.join(limit).exists().then_some(cgroup)
    }

    fn add_member(&self, member: &MemberProcess) {
        std::fs::write(self.path.join("cgroup.procs"), member.child.id().to_string()).expect("permission");
    }

    fn used_bytes(&self) -> u64 {
        let text = std::fs::read_to_string(self.path.join(self.usage_file)).expect("it exists");
        text.trim().parse().expect("a number")
    }

    /// Let the members use `headroom` bytes more, whatever the kernel charges in advance on each CPU later.
    fn set_headroom(&self, headroom: u64) {
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
        let limit = self.used_bytes() + headroom + cpus * CHARGE_BATCH_BYTES;
        std::fs::write(self.path.join(self.limit_file), limit.to_string()).expect("permission");
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // Members that were just killed remain in the cgroup for a moment.
        let end = Instant::now() + Duration::from_secs(5);
        while std::fs::remove_dir(&self.path).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn members_with_little_headroom_survive_and_merge_what_fits() {
    const MEMBER_PAGES: u64 = 20_000;
    for headroom in [1, 2, 4, 8, 16] {
        let root = domains_root();
        let Some(cgroup) = MemoryCgroup::create(&headroom.to_string()) else {
            println!("skipped: cannot create a cgroup with a memory limit");
            return;
        };
        let mut members = [0; 2].map(|_| MemberProcess::start(&root, MEMBER_PAGES, &[]));
        for member in &mut members {
            cgroup.add_member(member);
            member.run_command(&format!("fill 0 {MEMBER_PAGES} 7"));
            // Allocates the member's records of mergeable pages in advance.
            member.run_command(&format!("advise 0 {MEMBER_PAGES} 1"));
            assert_eq!(member.run_merge().number("pages_merged"), 0);
            member.run_command(&format!("advise 0 {MEMBER_PAGES} 0"));
        }
        cgroup.set_headroom(headroom * BYTES_PER_MIB);
        let mut merged = 0;
        for _ in 0..8 {
            members.iter_mut().for_each(|member| member.send_command("merge"));
            for member in &mut members {
                let answer = member.read_answer().unwrap_or_else(|| panic!("killed with {headroom} MiB of headroom"));
                merged += MemberAnswer(answer).number("pages_merged");
            }
        }
        members.iter_mut().for_each(MemberProcess::check_memory);
        let used = cgroup.used_bytes();
        println!(
            "{headroom} MiB of headroom: {merged} of {} pages merged, {} MiB in use",
            2 * MEMBER_PAGES,
            used / BYTES_PER_MIB
        );
        if headroom >= 16 {
            assert_eq!(merged, 2 * MEMBER_PAGES);
            assert!(used < 2 * MEMBER_PAGES * PAGE_BYTES * 3 / 4, "{used} bytes in use");
        }
        drop(members);
    }
}

#[test]
fn members_with_little_headroom_survive_restoring_pages() {
    const MEMBER_PAGES: u64 = 12_000;
    for headroom in [3, 4, 8] {
        let root = domains_root();
        let Some(cgroup) = MemoryCgroup::create(&format!("written-{headroom}")) else {
            println!("skipped: cannot create a cgroup with a memory limit");
            return;
        };
        let mut members = [0; 2].map(|_| MemberProcess::start(&root, MEMBER_PAGES, &[]));
        for member in &mut members {
            cgroup.add_member(member);
            member.run_command(&format!("fill 0 {MEMBER_PAGES} 7"));
            member.run_merge();
        }
        assert_eq!(members[0].run_merge().number("pages_merged"), MEMBER_PAGES);
        members.iter_mut().for_each(|member| drop(member.run_command(&format!("fill 0 {MEMBER_PAGES} 8"))));
        cgroup.set_headroom(headroom * BYTES_PER_MIB);
        let (mut broken, mut merged) = (0, 0);
        for _ in 0..12 {
            members.iter_mut().for_each(|member| member.send_command("merge"));
            for member in &mut members {
                let answer = MemberAnswer(
                    member.read_answer().unwrap_or_else(|| panic!("killed with {headroom} MiB of headroom")),
                );
                (broken, merged) = (broken + answer.number("cow_breaks"), merged + answer.number("pages_merged"));
                // Otherwise pages that were written soon after a merge are skipped.
                member.run_command(&format!("advise 0 {MEMBER_PAGES} 0"));
            }
        }
        members.iter_mut().for_each(MemberProcess::check_memory);
        println!("{headroom} MiB of headroom: {broken} pages written, {merged} merged again");
        assert!(broken >= 2 * MEMBER_PAGES);
        if headroom >= 8 {
            assert!(merged > MEMBER_PAGES, "{merged} of {} pages merged again", 2 * MEMBER_PAGES);
        }
    }
}
