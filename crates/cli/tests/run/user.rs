//! `pagefold run --engine user`: programs that know nothing of it find their memory as without it, and it is merged.

use crate::programs::{self, PAGEFOLD, compile, present, refusal, text};
use pagefold_labs::client::install;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const NOBODY: u32 = 65534;

/// A user's place: programs that he may start, and domains of his own.
struct Home {
    folder: TempDir,
    user: u32,
}

impl Home {
    fn of(user: u32) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        for (file, name) in [(Path::new(PAGEFOLD), "pagefold"), (programs::adopts(), "libpagefold_adopt.so")] {
            install(file, &folder.path().join(name), 0o755).unwrap();
        }
        if nix::unistd::geteuid().is_root() {
            chown(folder.path(), Some(user), Some(user)).unwrap();
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        Self { folder, user }
    }

    fn own() -> Self {
        Self::of(nix::unistd::geteuid().as_raw())
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn compile(&self, compiler: &str, source: &str, flags: &[&str]) -> PathBuf {
        compile(compiler, source, flags, self.path())
    }

    /// Something that the user starts.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("PAGEFOLD_RUNTIME", self.path().join("domains"))
            .env("HOME", self.path())
            .env("TMPDIR", self.path());
        command.current_dir(self.path());
        if nix::unistd::geteuid().is_root() {
            command.uid(self.user).gid(self.user);
        }
        command
    }

    /// `pagefold run --engine user`, of small allocations too, and as fast as may be.
    fn run(&self) -> Command {
        let mut command = self.command(self.path().join("pagefold").to_str().unwrap());
        command.args(self.words());
        command
    }

    fn words(&self) -> [&str; 8] {
        ["run", "--engine", "user", "--max-slowdown", "100", "--threshold", "64KiB", "--report"]
    }

    /// The same under mpirun, for three ranks of a program.
    fn ranks(&self, words: &[&str], program: &Path, arguments: &[&str]) -> Output {
        let mut command = self.command("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "-np", "3"]).args(words).arg(program).args(arguments);
        command.output().unwrap()
    }
}

/// Whether writers can be held up by this user; says that the test is skipped otherwise.
fn holds(home: &Home) -> bool {
    let output = home.run().args(["--dry-run", "--", "true"]).output().unwrap();
    if !output.status.success() {
        println!("skipped: {}", text(&output.stderr).trim());
    }
    output.status.success()
}

/// Whether a report tells that anything was merged.
fn merged(report: &str) -> bool {
    report.contains(" merged at most") && !report.contains("had 0 B merged")
}

#[test]
fn whatever_a_program_does_to_merged_memory_it_finds_what_it_wrote() {
    let home = Home::own();
    if !present("gcc") || !holds(&home) {
        return;
    }
    let program = home.compile("gcc", "blocks.c", &["-pthread"]);
    let alone = Command::new(&program).args(["1", "300"]).output().unwrap();
    assert!(alone.status.success(), "the program itself is right: {}", text(&alone.stderr));
    let milliseconds = std::env::var("PAGEFOLD_SOAK").map_or("2500", |_| "60000");
    for seed in ["1", "2"] {
        // A slow machine gets more time to have merged anything.
        let merges = [milliseconds, "15000"].iter().any(|milliseconds| {
            let output = home.run().arg("--").arg(&program).args([seed, milliseconds]).output().unwrap();
            let said = text(&output.stderr);
            assert!(output.status.success(), "{seed}: {said}");
            assert_eq!(text(&output.stdout), "all memory as it was written\n", "{seed}: {said}");
            merged(&said)
        });
        assert!(merges, "{seed}");
    }
    // Started by what was started; at the default pace, and one that is killed leaves nothing in anybody's way.
    let killed =
        format!("{} 3 60000 & sleep 1; kill -9 $!; wait; exec {} 4 1500", program.display(), program.display());
    let output = home.run().args(["--domain", "x", "--", "sh", "-c", &killed]).output().unwrap();
    assert_eq!(text(&output.stdout), "all memory as it was written\n", "{}", text(&output.stderr));
}

#[test]
fn a_program_that_has_a_device_open_is_left_alone_and_says_why() {
    let home = Home::own();
    if !present("gcc") || !holds(&home) || !Path::new("/dev/userfaultfd").exists() {
        return println!("skipped: needs gcc and /dev/userfaultfd");
    }
    let program = home.compile("gcc", "blocks.c", &["-pthread"]);
    let script = format!("exec 9<> /dev/userfaultfd; exec {} 1 5000", program.display());
    let output = home.run().args(["--", "sh", "-c", &script]).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("not merged: /dev/userfaultfd is open"), "{said}");
    // A child says it once, too.
    let (mut lines, count) = (said.lines().collect::<Vec<_>>(), said.lines().count());
    assert!(lines.iter().all(|line| line.contains("not merged: /dev/userfaultfd is open")), "{said}");
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), count, "{said}");
}

/// Frees blocks that are merged while a merge maps another one, and says whether that went on afterwards.
const FREES_BESIDE: &str = r#"#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define PAGE ((size_t)4096)
#define LARGE ((size_t)16384)
#define SMALL ((size_t)64)
static uint64_t entries[LARGE];
/* How many pages of a block are a file's, which merged ones are: bit 61 of /proc/self/pagemap. */
static size_t merged(int pagemap, const char *block, size_t pages)
{
	size_t count = 0;
	if (pread(pagemap, entries, pages * 8, (uintptr_t)block / PAGE * 8) != (ssize_t)(pages * 8))
		exit(2);
	for (size_t page = 0; page < pages; page++)
		count += entries[page] >> 61 & 1;
	return count;
}
/* Pairs of equal pages. */
static char *filled(size_t pages, uint64_t tag)
{
	char *block = malloc(pages * PAGE);
	for (size_t page = 0; page < pages; page++)
		for (size_t word = 0; word < PAGE / 8; word++)
			((uint64_t *)(block + page * PAGE))[word] = tag << 32 | page / 2;
	return block;
}
int main(void)
{
	int pagemap = open("/proc/self/pagemap", O_RDONLY), beside = 0;
	for (uint64_t round = 1; round <= 6 && !beside; round++) {
		char *small[8], *large;
		for (size_t at = 0; at < 8; at++)
			small[at] = filled(SMALL, 1000 * round + at);
		/* Their merge is over. */
		for (int tries = 0; tries < 20000 && merged(pagemap, small[7], SMALL) == 0; tries++)
			usleep(1000);
		large = filled(LARGE, round);
		for (int tries = 0; tries < 200000 && merged(pagemap, large, LARGE) == 0; tries++)
			usleep(50);
		size_t before = merged(pagemap, large, LARGE);
		for (size_t at = 0; at < 8; at++)
			free(small[at]);
		size_t after = merged(pagemap, large, LARGE);
		/* A merge that is over has mapped all of it. */
		beside = before > 0 && after < LARGE;
		for (size_t page = 0; page < LARGE; page++)
			for (size_t word = 0; word < PAGE / 8; word++)
				if (((uint64_t *)(large + page * PAGE))[word] != (round << 32 | page / 2))
					return 3;
		free(large);
	}
	puts(beside ? "freed beside a merge" : "freed after each merge");
	return 0;
}
"#;

#[test]
fn memory_is_freed_while_a_merge_goes_on() {
    let home = Home::own();
    if !present("gcc") || !holds(&home) {
        return;
    }
    let source = home.path().join("frees.c");
    fs::write(&source, FREES_BESIDE).unwrap();
    let program = home.compile("gcc", source.to_str().unwrap(), &[]);
    // With so much time no merge is cut short.
    let output = home.run().args(["--lifetime", "10h", "--"]).arg(&program).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && merged(&said), "{said}");
    assert_eq!(text(&output.stdout), "freed beside a merge\n", "{said}");
}

/// Does what may have others write to its memory, and has some to merge for a while.
const WRITTEN_BY_OTHERS: &str = r#"#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
int main(int count, char **words)
{
	int kind = count > 1 ? words[1][0] : 0, opened = 0;
	char *block = malloc(8 << 20);
	memset(block, 3, 8 << 20);
	struct io_uring_params ring = { 0 };
	struct iovec some = { block, 1 << 16 };
	pthread_mutexattr_t mutex;
	switch (kind) {
	case 'd': opened = open("/bin/sh", O_RDONLY | O_DIRECT); break;
	case 'r': opened = syscall(__NR_io_uring_setup, 4, &ring); break;
	case 'p':
		opened = syscall(__NR_io_uring_setup, 4, &ring);
		if (opened >= 0)
			opened = syscall(__NR_io_uring_register, opened, IORING_REGISTER_BUFFERS, &some, 1);
		break;
	case 'x': opened = socket(AF_XDP, SOCK_RAW, 0); break;
	case 'm': pthread_mutexattr_init(&mutex); pthread_mutexattr_setrobust(&mutex, PTHREAD_MUTEX_ROBUST); break;
	}
	return opened < 0 ? 77 : sleep(1) || block[77] != 3;
}
"#;

#[test]
fn a_program_whose_memory_others_may_write_to_is_left_alone_and_says_why() {
    let home = Home::own();
    if !present("gcc") || !holds(&home) {
        return;
    }
    let path = home.path().join("written.c");
    fs::write(&path, WRITTEN_BY_OTHERS).unwrap();
    let program = home.compile("gcc", path.to_str().unwrap(), &["-pthread"]);
    for (does, why) in [
        ("direct I/O", " is open for direct I/O, which writes"),
        ("ring", "not merged: anon_inode:[io_uring] is open"),
        ("pinned", "not merged: some of its memory is pinned"),
        ("xdp", "not merged: an AF_XDP socket is open"),
        ("mutex", "not merged: it has mutexes"),
        ("nothing", ""),
    ] {
        let output = home.run().arg("--").arg(&program).arg(does).output().unwrap();
        let said = text(&output.stderr);
        match output.status.code() {
            Some(77) => println!("skipped: the kernel lets nobody have {does}"),
            code => assert!(code == Some(0) && said.contains(why), "{does}: {said}"),
        }
        assert!(does != "nothing" || !said.contains("not merged"), "{said}");
    }
}

#[test]
fn a_process_ends_as_its_threads_do_and_its_mutexes_are_the_kernels() {
    let home = Home::own();
    if !present("gcc") || !holds(&home) {
        return;
    }
    let run = |source: &str| {
        let path = home.path().join("program.c");
        let head = "#include <pthread.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n\
                    static char *volatile block;\n\
                    static void fill(void) { memset(block = malloc(8 << 20), 3, 8 << 20); }\n";
        fs::write(&path, format!("{head}{source}")).unwrap();
        let program = home.compile("gcc", path.to_str().unwrap(), &["-pthread"]);
        let output = home.run().args(["--", "timeout", "--signal=KILL", "60"]).arg(program).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        text(&output.stderr)
    };
    // The main thread ends first, and with it the thread that merges, or the process would not.
    run("static void *works(void *none) { fill(); usleep(900000); return none; }\n\
         int main(void) { pthread_t thread; fill(); return pthread_create(&thread, 0, works, 0) || \
         usleep(500000) || (pthread_exit(0), 1); }\n");
    let said = run("int main(void) { pthread_mutexattr_t kind; fill(); return pthread_mutexattr_init(&kind) || \
                    pthread_mutexattr_setprotocol(&kind, PTHREAD_PRIO_INHERIT) || sleep(1) || block[77] != 3; }\n");
    assert!(said.contains("not merged: it has mutexes"), "{said}");
}

#[test]
fn ranks_are_merged_at_safe_points_without_any_privilege() {
    if !present("mpicc") || !present("mpirun") {
        return;
    }
    let shrunk = |output: &Output| -> i64 {
        assert!(output.status.success(), "{output:?}");
        let told = text(&output.stdout);
        let told = told.trim().strip_prefix("ranks=3 shrunk=").unwrap_or_else(|| panic!("{output:?}"));
        told.parse().unwrap()
    };
    let root = nix::unistd::geteuid().is_root();
    let home = if root { Home::of(NOBODY) } else { Home::own() };
    let program = home.compile("mpicc", "safe.c", &["-pthread"]);
    let mut words = vec![home.path().join("pagefold").to_str().unwrap().to_owned()];
    words.extend(home.words().map(str::to_owned));
    words.push("--".to_owned());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    assert!(shrunk(&home.ranks(&[], &program, &["8", "5"])) < 2);
    // Of 24 MiB, half are the same in all three, and a quarter is zeros: 14 MiB could go. A slow machine gets more
    // time.
    let shrinks = |program: &Path, before: &[&str], after: &[&str]| {
        ["60", "1000"].iter().any(|steps| {
            let output = home.ranks(&words, program, &[before, &["8", steps], after].concat());
            shrunk(&output) >= 10 && text(&output.stderr).matches(" merged at most").count() == 3
        })
    };
    assert!(shrinks(&program, &[], &[]));
    // What the bound allows of an hour is there at the first of three barriers.
    let bound = words.iter().position(|word| *word == "100").unwrap();
    let mut early = words.clone();
    early.splice(bound..=bound, ["0.01", "--lifetime", "1h"]);
    let output = home.ranks(&early, &program, &["8", "0"]);
    assert_eq!(text(&output.stderr).matches("gave 2.00 MiB of zeros back").count(), 3, "{output:?}");
    // Another thread could write: what can be held up, is.
    if home.run().args(["--dry-run", "--", "true"]).output().unwrap().status.success() {
        assert!(shrinks(&program, &[], &["threads"]));
    } else {
        let output = home.ranks(&words, &program, &["8", "60", "threads"]);
        assert!(shrunk(&output) < 2 && text(&output.stderr).contains("not merged: "), "{output:?}");
    }
    // MPI that comes with a module of an interpreter.
    let module = home.compile("mpicc", "safe.c", &["-pthread", "-shared", "-fPIC", "-Dmain=entry"]);
    let plugin = home.compile("gcc", "plugin.c", &["-ldl"]);
    assert!(shrinks(&plugin, &[module.to_str().unwrap()], &[]));

    let flags = ["-pthread", "-DFORTRAN", "-lmpi_usempif08", "-lmpi_mpifh"];
    assert!(shrinks(&home.compile("mpicc", "safe.c", &flags), &[], &[]));
}

#[test]
fn real_programs_say_what_they_say_without_it() {
    let home = Home::own();
    if !holds(&home) {
        return;
    }
    let scripts = [
        ("sort", "seq 1 200000 | sort -r -S 32M --parallel=2 | cksum"),
        ("bash", "bash -c 'a=(); for i in {1..200000}; do a+=($i); done; echo ${#a[@]} ${a[77777]}'"),
        (
            "perl",
            "perl -e '$a = \"x\" x 5000000; $a .= \"y\" x 5000000; %h = map { $_ => 1 } 1..50000; \
                  print length($a), \" \", scalar(keys %h), \"\\n\"; if (fork) { wait } else { print substr($a, -2) }'",
        ),
        (
            "sqlite3",
            "sqlite3 :memory: 'WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c LIMIT 100000) \
                     SELECT count(*), sum(x), length(group_concat(x)) FROM c'",
        ),
        (
            "python3",
            "python3 -c 'b=[bytearray(3<<20) for i in range(9)]; b[3]+=b\"x\"*(1<<22); l=list(range(500000)); \
                     print(sum(map(len, b)), b[3][-1], sum(l))'",
        ),
        ("gcc", "printf 'int f(int a){return a*2;}' | gcc -O2 -S -x c -o - - | cksum"),
    ];
    for (program, script) in scripts {
        if !present(program) {
            continue;
        }
        let without = home.command("sh").args(["-c", script]).output().unwrap();
        let mut command = home.run();
        // Nothing but what it is asked to say.
        let with = command.args(["--", "sh", "-c", script]).output().unwrap();
        assert_eq!(text(&with.stdout), text(&without.stdout), "{program}: {}", text(&with.stderr));
        assert_eq!(with.status.code(), without.status.code(), "{program}: {}", text(&with.stderr));
        assert!(!text(&with.stderr).contains("not merged"), "{program}: {}", text(&with.stderr));
    }
}

#[test]
fn what_cannot_be_merged_is_refused_before_it_starts() {
    let home = Home::own();
    if present("gcc") {
        let fixed = home.compile("gcc", "tree.c", &["-static"]);
        let said = refusal(home.run().arg("--").arg(&fixed));
        assert!(said.contains("is linked statically") && said.contains("--best-effort"), "{said}");
        let output = home.run().args(["--best-effort", "--"]).arg(&fixed).arg("x").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "the program's own status, for its own reason");
        assert!(text(&output.stderr).starts_with("pagefold: not merged: "), "{}", text(&output.stderr));
    }
    assert!(refusal(home.run().args(["--way", "prctl", "--", "true"])).contains("--way is for --engine kernel"));
    assert!(refusal(home.run().args(["--domain", "a/b", "--", "true"])).contains("a/b"));
    let said = refusal(programs::run().args(["--domain", "x", "--", "true"]));
    assert!(said.contains("--domain is for --engine user"), "{said}");
    let open = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|value| value.trim() == "1");
    if open || !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root, to be a user who may not have userfaultfd");
    }
    let home = Home::of(NOBODY);
    let said = refusal(home.run().args(["--", "true"]));
    assert!(said.contains("userfaultfd") && said.contains("--best-effort"), "{said}");
    let output = home.run().args(["--best-effort", "--", "sh", "-c", "echo $LD_PRELOAD; exit 7"]).output().unwrap();
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(7), "\n"));
}
