//! `pagefold run --engine user`: unmodified programs read the same memory content as without the engine, and their
//! memory is merged.

use crate::test_programs::{self, PAGEFOLD_BINARY, compile, has_program, lossy_text, refusal_line};
use pagefold_labs::client::install_executable;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const NOBODY_UID: u32 = 65534;

/// A user's directory, with programs that the user can start and the user's domains.
struct UserDirectory {
    folder: TempDir,
    user: u32,
}

impl UserDirectory {
    fn new(user: u32) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        for (file, name) in
            [(Path::new(PAGEFOLD_BINARY), "pagefold"), (test_programs::adopt_library(), "libpagefold_adopt.so")]
        {
            install_executable(file, &folder.path().join(name), 0o755).unwrap();
        }
        if nix::unistd::geteuid().is_root() {
            chown(folder.path(), Some(user), Some(user)).unwrap();
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        Self { folder, user }
    }

    fn for_current_user() -> Self {
        Self::new(nix::unistd::geteuid().as_raw())
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn compile(&self, compiler: &str, source: &str, flags: &[&str]) -> PathBuf {
        compile(compiler, source, flags, self.path())
    }

    /// A program started as the user.
    fn user_command(&self, program: &str) -> Command {
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

    /// `pagefold run --engine user` that also adopts small allocations and runs at full speed.
    fn run_user_engine(&self) -> Command {
        let mut command = self.user_command(self.path().join("pagefold").to_str().unwrap());
        command.args(self.run_arguments());
        command
    }

    fn run_arguments(&self) -> [&str; 8] {
        ["run", "--engine", "user", "--max-slowdown", "100", "--min-block", "64KiB", "--report"]
    }

    /// Run a program under mpirun with three ranks.
    fn run_ranks(&self, words: &[&str], program: &Path, arguments: &[&str]) -> Output {
        let mut command = self.user_command("mpirun");
        command.args(["--allow-run-as-root", "--oversubscribe", "-np", "3"]).args(words).arg(program).args(arguments);
        command.output().unwrap()
    }
}

/// Whether this user can block writers; prints `skipped: why` if not.
fn can_block_writers(directory: &UserDirectory) -> bool {
    let output = directory.run_user_engine().args(["--dry-run", "--", "true"]).output().unwrap();
    if !output.status.success() {
        println!("skipped: {}", lossy_text(&output.stderr).trim());
    }
    output.status.success()
}

/// Whether a report shows that memory was merged.
fn has_merged(report: &str) -> bool {
    report.contains(" merged at most") && !report.contains(", 0 B merged")
}

#[test]
fn program_always_reads_what_it_wrote() {
    let directory = UserDirectory::for_current_user();
    if !has_program("gcc") || !can_block_writers(&directory) {
        return;
    }
    let program = directory.compile("gcc", "blocks.c", &["-pthread"]);
    let without_engine = Command::new(&program).args(["1", "300"]).output().unwrap();
    assert!(
        without_engine.status.success(),
        "the program fails without the engine: {}",
        lossy_text(&without_engine.stderr)
    );
    let milliseconds = std::env::var("PAGEFOLD_SOAK").map_or("2500", |_| "60000");
    for seed in ["1", "2"] {
        // A slow machine gets more time to merge.
        let merges = [milliseconds, "15000"].iter().any(|milliseconds| {
            let output =
                directory.run_user_engine().arg("--").arg(&program).args([seed, milliseconds]).output().unwrap();
            let stderr = lossy_text(&output.stderr);
            assert!(output.status.success(), "{seed}: {stderr}");
            assert_eq!(lossy_text(&output.stdout), "all memory as it was written\n", "{seed}: {stderr}");
            has_merged(&stderr)
        });
        assert!(merges, "{seed}");
    }
    // Started by a shell, at the default pace. A killed program must not disturb the others.
    let killed =
        format!("{} 3 60000 & sleep 1; kill -9 $!; wait; exec {} 4 1500", program.display(), program.display());
    let output = directory.run_user_engine().args(["--domain", "x", "--", "sh", "-c", &killed]).output().unwrap();
    assert_eq!(lossy_text(&output.stdout), "all memory as it was written\n", "{}", lossy_text(&output.stderr));
}

#[test]
fn program_with_open_device_is_not_merged() {
    let directory = UserDirectory::for_current_user();
    if !has_program("gcc") || !can_block_writers(&directory) || !Path::new("/dev/userfaultfd").exists() {
        return println!("skipped: needs gcc and /dev/userfaultfd");
    }
    let program = directory.compile("gcc", "blocks.c", &["-pthread"]);
    let script = format!("exec 9<> /dev/userfaultfd; exec {} 1 5000", program.display());
    let output = directory.run_user_engine().args(["--", "sh", "-c", &script]).output().unwrap();
    let stderr = lossy_text(&output.stderr);
    assert!(output.status.success() && stderr.contains("not merged: /dev/userfaultfd is open"), "{stderr}");
    // A child prints it only once, too.
    let (mut lines, count) = (stderr.lines().collect::<Vec<_>>(), stderr.lines().count());
    assert!(lines.iter().all(|line| line.contains("not merged: /dev/userfaultfd is open")), "{stderr}");
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), count, "{stderr}");
}

/// Frees merged blocks while a merge maps another one, and prints whether the merge continued afterwards.
const FREE_DURING_MERGE_C: &str = r#"#include <fcntl.h>
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
fn memory_is_freed_during_a_merge() {
    let directory = UserDirectory::for_current_user();
    if !has_program("gcc") || !can_block_writers(&directory) {
        return;
    }
    let source = directory.path().join("frees.c");
    fs::write(&source, FREE_DURING_MERGE_C).unwrap();
    let program = directory.compile("gcc", source.to_str().unwrap(), &[]);
    // With such a long minimum run time no merge is cut short.
    let output = directory.run_user_engine().args(["--min-runtime", "10h", "--"]).arg(&program).output().unwrap();
    let stderr = lossy_text(&output.stderr);
    assert!(output.status.success() && has_merged(&stderr), "{stderr}");
    assert_eq!(lossy_text(&output.stdout), "freed beside a merge\n", "{stderr}");
}

/// Uses interfaces by which external writers can change its memory, and keeps mergeable memory for a while.
const EXTERNAL_WRITER_C: &str = r#"#define _GNU_SOURCE
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
fn program_with_external_writers_is_not_merged() {
    let directory = UserDirectory::for_current_user();
    if !has_program("gcc") || !can_block_writers(&directory) {
        return;
    }
    let path = directory.path().join("written.c");
    fs::write(&path, EXTERNAL_WRITER_C).unwrap();
    let program = directory.compile("gcc", path.to_str().unwrap(), &["-pthread"]);
    for (interface, why) in [
        ("direct I/O", " is open for direct I/O, which writes"),
        ("ring", "not merged: anon_inode:[io_uring] is open"),
        ("pinned", "not merged: some of its memory is pinned"),
        ("xdp", "not merged: an AF_XDP socket is open"),
        ("mutex", "not merged: it has mutexes"),
        ("nothing", ""),
    ] {
        let output = directory.run_user_engine().arg("--").arg(&program).arg(interface).output().unwrap();
        let stderr = lossy_text(&output.stderr);
        match output.status.code() {
            Some(77) => println!("skipped: the kernel does not permit {interface}"),
            code => assert!(code == Some(0) && stderr.contains(why), "{interface}: {stderr}"),
        }
        assert!(interface != "nothing" || !stderr.contains("not merged"), "{stderr}");
    }
}

#[test]
fn exit_and_robust_mutexes_work_as_without_the_engine() {
    let directory = UserDirectory::for_current_user();
    if !has_program("gcc") || !can_block_writers(&directory) {
        return;
    }
    let run = |source: &str| {
        let path = directory.path().join("program.c");
        let head = "#include <pthread.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n\
                    static char *volatile block;\n\
                    static void fill(void) { memset(block = malloc(8 << 20), 3, 8 << 20); }\n";
        fs::write(&path, format!("{head}{source}")).unwrap();
        let program = directory.compile("gcc", path.to_str().unwrap(), &["-pthread"]);
        let output =
            directory.run_user_engine().args(["--", "timeout", "--signal=KILL", "60"]).arg(program).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        lossy_text(&output.stderr)
    };
    // The main thread exits first. The merge thread must exit with it, or the process would not end.
    run("static void *works(void *none) { fill(); usleep(900000); return none; }\n\
         int main(void) { pthread_t thread; fill(); return pthread_create(&thread, 0, works, 0) || \
         usleep(500000) || (pthread_exit(0), 1); }\n");
    let stderr = run("int main(void) { pthread_mutexattr_t kind; fill(); return pthread_mutexattr_init(&kind) || \
                    pthread_mutexattr_setprotocol(&kind, PTHREAD_PRIO_INHERIT) || sleep(1) || block[77] != 3; }\n");
    assert!(stderr.contains("not merged: it has mutexes"), "{stderr}");
}

#[test]
fn ranks_merge_at_safe_points_unprivileged() {
    if !has_program("mpicc") || !has_program("mpirun") {
        return;
    }
    let shrunk = |output: &Output| -> i64 {
        assert!(output.status.success(), "{output:?}");
        let text = lossy_text(&output.stdout);
        let text = text.trim().strip_prefix("ranks=3 shrunk=").unwrap_or_else(|| panic!("{output:?}"));
        text.parse().unwrap()
    };
    let root = nix::unistd::geteuid().is_root();
    let directory = if root { UserDirectory::new(NOBODY_UID) } else { UserDirectory::for_current_user() };
    let program = directory.compile("mpicc", "safe.c", &["-pthread"]);
    let mut launcher = vec![directory.path().join("pagefold").to_str().unwrap().to_owned()];
    launcher.extend(directory.run_arguments().map(str::to_owned));
    launcher.push("--".to_owned());
    let launcher: Vec<&str> = launcher.iter().map(String::as_str).collect();
    assert!(shrunk(&directory.run_ranks(&[], &program, &["8", "5"])) < 2);
    // Of 24 MiB, half is the same in all three ranks and a quarter is zero: 14 MiB could be saved. A slow machine gets
    // more time.
    let merges_enough = |program: &Path, before: &[&str], after: &[&str]| {
        ["60", "1000"].iter().any(|steps| {
            let output = directory.run_ranks(&launcher, program, &[before, &["8", steps], after].concat());
            shrunk(&output) >= 10 && lossy_text(&output.stderr).matches(" merged at most").count() == 3
        })
    };
    assert!(merges_enough(&program, &[], &[]));
    // The allowance of an hour is available at the first of three barriers.
    let slowdown_index = launcher.iter().position(|word| *word == "100").unwrap();
    let mut with_min_runtime = launcher.clone();
    with_min_runtime.splice(slowdown_index..=slowdown_index, ["0.01", "--min-runtime", "1h"]);
    let output = directory.run_ranks(&with_min_runtime, &program, &["8", "0"]);
    assert_eq!(lossy_text(&output.stderr).matches("2.00 MiB of zeros freed").count(), 3, "{output:?}");
    // Another thread could write, so the engine blocks writers where it can.
    if directory.run_user_engine().args(["--dry-run", "--", "true"]).output().unwrap().status.success() {
        assert!(merges_enough(&program, &[], &["threads"]));
    } else {
        let output = directory.run_ranks(&launcher, &program, &["8", "60", "threads"]);
        assert!(shrunk(&output) < 2 && lossy_text(&output.stderr).contains("not merged: "), "{output:?}");
    }
    // MPI loaded by a module of an interpreter.
    let module = directory.compile("mpicc", "safe.c", &["-pthread", "-shared", "-fPIC", "-Dmain=entry"]);
    let plugin = directory.compile("gcc", "plugin.c", &["-ldl"]);
    assert!(merges_enough(&plugin, &[module.to_str().unwrap()], &[]));

    let flags = ["-pthread", "-DFORTRAN", "-lmpi_usempif08", "-lmpi_mpifh"];
    assert!(merges_enough(&directory.compile("mpicc", "safe.c", &flags), &[], &[]));
}

#[test]
fn real_programs_have_the_same_output() {
    let directory = UserDirectory::for_current_user();
    if !can_block_writers(&directory) {
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
        if !has_program(program) {
            continue;
        }
        let without = directory.user_command("sh").args(["-c", script]).output().unwrap();
        let mut command = directory.run_user_engine();
        // Nothing but the program's own output.
        let with = command.args(["--", "sh", "-c", script]).output().unwrap();
        assert_eq!(lossy_text(&with.stdout), lossy_text(&without.stdout), "{program}: {}", lossy_text(&with.stderr));
        assert_eq!(with.status.code(), without.status.code(), "{program}: {}", lossy_text(&with.stderr));
        assert!(!lossy_text(&with.stderr).contains("not merged"), "{program}: {}", lossy_text(&with.stderr));
    }
}

#[test]
fn unmergeable_program_is_refused_before_start() {
    let directory = UserDirectory::for_current_user();
    if has_program("gcc") {
        let static_program = directory.compile("gcc", "tree.c", &["-static"]);
        let stderr = refusal_line(directory.run_user_engine().arg("--").arg(&static_program));
        assert!(stderr.contains("is linked statically") && stderr.contains("--best-effort"), "{stderr}");
        let output =
            directory.run_user_engine().args(["--best-effort", "--"]).arg(&static_program).arg("x").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "the exit status must be the program's own");
        assert!(lossy_text(&output.stderr).starts_with("pagefold: not merged: "), "{}", lossy_text(&output.stderr));
    }
    assert!(
        refusal_line(directory.run_user_engine().args(["--method", "prctl", "--", "true"]))
            .contains("--method is for --engine kernel")
    );
    assert!(refusal_line(directory.run_user_engine().args(["--domain", "a/b", "--", "true"])).contains("a/b"));
    let stderr = refusal_line(test_programs::run_command().args(["--domain", "x", "--", "true"]));
    assert!(stderr.contains("--domain is for --engine user"), "{stderr}");
    let open = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|value| value.trim() == "1");
    if open || !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root to become a user without access to userfaultfd");
    }
    let directory = UserDirectory::new(NOBODY_UID);
    let stderr = refusal_line(directory.run_user_engine().args(["--", "true"]));
    assert!(stderr.contains("userfaultfd") && stderr.contains("--best-effort"), "{stderr}");
    let output = directory
        .run_user_engine()
        .args(["--best-effort", "--", "sh", "-c", "echo $LD_PRELOAD; exit 7"])
        .output()
        .unwrap();
    assert_eq!((output.status.code(), lossy_text(&output.stdout).as_str()), (Some(7), "\n"));
}
