//! Members in a cgroup that has little memory left: none is killed for what merging takes, and what fits is merged.

mod member;

use member::{Member, PAGE, Told, root};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A cgroup of the memory controller, v1 or v2. Removed when dropped.
struct Cgroup {
    path: PathBuf,
    limit: &'static str,
    used: &'static str,
}

impl Cgroup {
    fn make(name: &str) -> Option<Self> {
        let (one, two) = (Path::new("/sys/fs/cgroup/memory"), Path::new("/sys/fs/cgroup"));
        let name = format!("pagefold-test-{name}-{}", std::process::id());
        let (path, limit, used) = if one.join("memory.limit_in_bytes").exists() {
            (one.join(name), "memory.limit_in_bytes", "memory.usage_in_bytes")
        } else {
            (two.join(name), "memory.max", "memory.current")
        };
        std::fs::create_dir(&path).ok()?;
        let cgroup = Self { path, limit, used };
        cgroup.path.join(limit).exists().then_some(cgroup)
    }

    fn take(&self, member: &Member) {
        std::fs::write(self.path.join("cgroup.procs"), member.child.id().to_string()).expect("root may");
    }

    fn used(&self) -> u64 {
        let text = std::fs::read_to_string(self.path.join(self.used)).expect("it is there");
        text.trim().parse().expect("a number")
    }

    fn leave(&self, headroom: u64) {
        let limit = self.used() + headroom;
        std::fs::write(self.path.join(self.limit), limit.to_string()).expect("root may");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Members that were just killed are still in it for a moment.
        let end = Instant::now() + Duration::from_secs(5);
        while std::fs::remove_dir(&self.path).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn members_with_little_headroom_are_not_killed_and_merge_what_fits() {
    const PAGES: u64 = 20_000;
    for headroom in [1, 2, 4, 8, 16] {
        let root = root();
        let Some(cgroup) = Cgroup::make(&headroom.to_string()) else {
            println!("skipped: no cgroup with a memory limit can be made here");
            return;
        };
        let mut members = [0; 2].map(|_| Member::start(&root, PAGES, &[]));
        for member in &mut members {
            cgroup.take(member);
            member.tell(&format!("fill 0 {PAGES} 7"));
            // What the member itself remembers of each page that may be merged is there before.
            member.tell(&format!("advise 0 {PAGES} 1"));
            assert_eq!(member.merge().of("merged"), 0);
            member.tell(&format!("advise 0 {PAGES} 0"));
        }
        cgroup.leave(headroom * MIB);
        let mut merged = 0;
        for _ in 0..8 {
            members.iter_mut().for_each(|member| member.say("merge"));
            for member in &mut members {
                let told = member.answer().unwrap_or_else(|| panic!("killed with {headroom} MiB of headroom"));
                merged += Told(told).of("merged");
            }
        }
        members.iter_mut().for_each(Member::check);
        let used = cgroup.used();
        println!("{headroom} MiB of headroom: {merged} of {} pages merged, {} MiB in use", 2 * PAGES, used / MIB);
        if headroom >= 16 {
            assert_eq!(merged, 2 * PAGES);
            assert!(used < 2 * PAGES * PAGE * 3 / 4, "{used} bytes in use");
        }
        drop(members);
    }
}

#[test]
fn members_with_little_headroom_are_not_killed_while_written_pages_become_ordinary_memory() {
    const PAGES: u64 = 12_000;
    for headroom in [3, 4, 8] {
        let root = root();
        let Some(cgroup) = Cgroup::make(&format!("written-{headroom}")) else {
            println!("skipped: no cgroup with a memory limit can be made here");
            return;
        };
        let mut members = [0; 2].map(|_| Member::start(&root, PAGES, &[]));
        for member in &mut members {
            cgroup.take(member);
            member.tell(&format!("fill 0 {PAGES} 7"));
            member.merge();
        }
        assert_eq!(members[0].merge().of("merged"), PAGES);
        members.iter_mut().for_each(|member| drop(member.tell(&format!("fill 0 {PAGES} 8"))));
        cgroup.leave(headroom * MIB);
        let (mut broken, mut merged) = (0, 0);
        for _ in 0..12 {
            members.iter_mut().for_each(|member| member.say("merge"));
            for member in &mut members {
                let told = Told(member.answer().unwrap_or_else(|| panic!("killed with {headroom} MiB of headroom")));
                (broken, merged) = (broken + told.of("broken"), merged + told.of("merged"));
                // Else pages that were written soon after a merge are left alone.
                member.tell(&format!("advise 0 {PAGES} 0"));
            }
        }
        members.iter_mut().for_each(Member::check);
        println!("{headroom} MiB of headroom: {broken} pages written, {merged} merged again");
        assert!(broken >= 2 * PAGES);
        if headroom >= 8 {
            assert!(merged > PAGES, "{merged} of {} pages merged again", 2 * PAGES);
        }
    }
}
