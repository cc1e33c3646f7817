//! The library in unmodified programs, by `LD_PRELOAD` alone: what a program can see of it, and what it leaves behind.
//! `crates/cli/tests/run` tests whole programs, by `pagefold run`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A directory for programs and domains, in memory as by default.
fn runtime_directory() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    directory
}

/// The library, in cargo's output directory.
fn library_path() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let library = tests.with_file_name("libpagefold_adopt.so");
    assert!(library.exists(), "{} is built with this test", library.display());
    library
}

/// Whether there is a C compiler; prints that the test is skipped if not.
fn has_compiler() -> bool {
    let found = Command::new("gcc").arg("--version").output().is_ok();
    if !found {
        println!("skipped: needs gcc (`sudo make setup`)");
    }
    found
}

/// Compile a program or a library. `source` is a file name in `labs/run`, or a path.
fn compile(directory: &TempDir, source: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/run").join(source);
    let program = directory.path().join(source.file_stem().unwrap());
    let mut command = Command::new("gcc");
    command.args(["-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(&program).arg(source).args(flags);
    assert!(command.status().unwrap().success());
    program
}

/// Compile a program from the text of its `main`.
fn compile_text(directory: &TempDir, name: &str, text: &str, flags: &[&str]) -> PathBuf {
    let source = directory.path().join(name);
    std::fs::write(&source, format!("{TEST_PROGRAM_HEAD_C}{text}")).unwrap();
    compile(directory, source.to_str().unwrap(), flags)
}

/// A program with the library preloaded, in the domain `x`, without a bound; killed after some minutes if it hangs.
fn preloaded_command(directory: &TempDir, program: &Path) -> Command {
    command_with_preload(directory, library_path().to_str().unwrap(), program)
}

/// The same with more libraries. Only the program loads them.
fn command_with_preload(directory: &TempDir, libraries: &str, program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "300", "env", &format!("LD_PRELOAD={libraries}")]).arg(program);
    command.env("PAGEFOLD_RUNTIME", directory.path().join("domains")).env("PAGEFOLD_DOMAIN", "x");
    command.env("PAGEFOLD_MAX_SLOWDOWN", "100").env("PAGEFOLD_MIN_BLOCK", "65536").env("PAGEFOLD_REPORT", "1");
    command
}

fn lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The exit code of the program. `None` if it may not merge beside itself here; prints that the test is skipped.
fn exit_code(output: &Output) -> Option<i32> {
    if lossy_text(&output.stderr).contains("needs Linux 6.4 and userfaultfd") {
        println!("skipped: userfaultfd is not permitted");
        return None;
    }
    Some(output.status.code().unwrap_or_else(|| panic!("{output:?}")))
}

/// A figure of the library's report: the number before some words.
fn reported_number(stderr: &str, label: &str) -> u64 {
    let before = stderr.split_once(label).unwrap_or_else(|| panic!("{label} in {stderr}")).0;
    before.trim_end().rsplit(' ').next().unwrap().parse().unwrap()
}

/// `threads` reads how many threads the kernel counts, and allocates nothing (`num_threads` in proc_pid_stat(5)).
/// `becomes` waits until there are so many. `merged` waits until any page is merged.
const TEST_PROGRAM_HEAD_C: &str = r#"#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
static int threads(void)
{
	char line[1024] = { 0 };
	int file = open("/proc/self/stat", O_RDONLY), field = 2;
	if (file < 0 || read(file, line, sizeof line - 1) <= 0 || close(file))
		return -1;
	char *at = strrchr(line, ')');
	while (at && field < 20 && (at = strchr(at + 1, ' ')))
		field++;
	return at ? atoi(at) : -1;
}
static void *volatile small;
static inline int becomes(int count)
{
	int tries = 0;
	for (; threads() != count && tries < 12000; tries++) {
		free(small = malloc(77));
		usleep(10000);
	}
	return tries < 12000;
}
static int is_merged(void)
{
	char line[512];
	int found = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps))
		found |= strstr(line, "pagefold-store") != NULL;
	if (maps)
		fclose(maps);
	return found;
}
static inline int merged(void)
{
	for (int tries = 0; tries < 12000 && !is_merged(); tries++)
		usleep(10000);
	return is_merged();
}
static char *volatile block;
static char *fill(void) { return memset(block = malloc(8 << 20), 3, 8 << 20); }
"#;

#[test]
fn idle_barrier_only_reads_the_clock() {
    if !has_compiler() {
        return;
    }
    let directory = runtime_directory();
    let mpi = compile(&directory, "lonely_mpi.c", &["-shared", "-fPIC"]);
    let program = compile(&directory, "barriers.c", &[mpi.to_str().unwrap()]);
    let barriers = 1_000_000;
    let output = preloaded_command(&directory, &program).args([&barriers.to_string(), "1000"]).output().unwrap();
    let stderr = lossy_text(&output.stderr);
    assert!(output.status.success() && !stderr.contains(", 0 B merged"), "{output:?}");
    // All other safe points took no lock and made no system call. One asks every 5 ms at most, and a few for each
    // merge.
    let milliseconds: u64 = lossy_text(&output.stdout).trim().parse().unwrap();
    let (checked, merges) =
        (reported_number(&stderr, " safe points checked"), reported_number(&stderr, " merges took"));
    assert!(checked <= milliseconds / 5 + 4 * merges + 10 && checked < barriers / 2, "{milliseconds} ms: {stderr}");
}

#[test]
fn tool_that_intercepts_mpi_is_named() {
    if !has_compiler() {
        return;
    }
    let directory = runtime_directory();
    let mpi = compile(&directory, "lonely_mpi.c", &["-shared", "-fPIC"]);
    let tool = compile(&directory, "pmpi_tool.c", &["-shared", "-fPIC"]);
    let run = |program: &Path, preloads: &str| {
        let output = command_with_preload(&directory, preloads, program).args(["100000", "4"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        lossy_text(&output.stderr)
    };
    let program = compile(&directory, "barriers.c", &[mpi.to_str().unwrap()]);
    let (library, tool_path) = (library_path(), tool.to_str().unwrap());
    let library = library.to_str().unwrap();
    let stderr = run(&program, &format!("{tool_path}:{library}"));
    assert!(stderr.contains(&format!("not merged: MPI_Barrier of {tool_path} is called in place")), "{stderr}");
    let stderr = run(&program, &format!("{library}:{tool_path}"));
    assert!(stderr.contains(" merged at most") && !stderr.contains("not merged"), "{stderr}");
    // Without position-independent code the address of a function is in the program itself.
    let program = compile(&directory, "barriers.c", &["-no-pie", "-fno-pie", mpi.to_str().unwrap()]);
    let stderr = run(&program, library);
    assert!(stderr.contains(" merged at most") && !stderr.contains("not merged"), "{stderr}");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/run/pmpi_tool.c");
    let program = compile(&directory, "barriers.c", &[source.to_str().unwrap(), mpi.to_str().unwrap()]);
    let stderr = run(&program, library);
    assert!(stderr.contains(&format!("not merged: MPI_Barrier of {} is called", program.display())), "{stderr}");
}

#[test]
fn merged_program_can_change_its_user_namespace() {
    if !has_compiler() {
        return;
    }
    let directory = runtime_directory();
    let main = r#"int main(int count, char **words)
{
	fill();
	if (count > 1 && (!becomes(2) || !merged()))
		return 2;
	if (unshare(CLONE_NEWUSER))
		return 3;
	/* It continues to merge. */
	return count > 1 && !becomes(2) ? 4 : block[77] != 3;
}
"#;
    let program = compile_text(&directory, "namespace.c", main, &[]);
    if Command::new(&program).status().unwrap().code() != Some(0) {
        println!("skipped: user namespaces are not permitted");
        return;
    }
    let output = preloaded_command(&directory, &program).arg("merged").output().unwrap();
    assert_eq!(exit_code(&output).unwrap_or(0), 0, "{output:?}");
}

#[test]
fn forking_program_sees_only_its_own_threads() {
    if !has_compiler() {
        return;
    }
    let directory = runtime_directory();
    let main = r#"int main(void)
{
	fill();
	for (int fork_number = 0; fork_number < 5; fork_number++) {
		if (!becomes(2) || !merged())
			return 2;
		pid_t child = fork();
		if (child == 0)
			_exit(threads() != 1 || block[77] != 3 || !becomes(2));
		int status, count = threads();
		if (count != 1)
			return 3;
		if (waitpid(child, &status, 0) != child || status)
			return 4;
	}
	return block[77] != 3;
}
"#;
    let output = preloaded_command(&directory, &compile_text(&directory, "forks.c", main, &[])).output().unwrap();
    assert_eq!(exit_code(&output).unwrap_or(0), 0, "{output:?}");
}

#[test]
fn program_without_blocks_has_no_merge_thread() {
    if !has_compiler() {
        return;
    }
    let directory = runtime_directory();
    let main = r#"int main(void)
{
	usleep(500000);
	if (threads() != 1)
		return 2;
	for (int time = 0; time < 2; time++) {
		fill();
		if (!becomes(2) || !merged())
			return 3;
		free(block);
		if (!becomes(1))
			return 4;
	}
	return 0;
}
"#;
    let output = preloaded_command(&directory, &compile_text(&directory, "idles.c", main, &[])).output().unwrap();
    assert_eq!(exit_code(&output).unwrap_or(0), 0, "{output:?}");
}

/// A rank that runs through barriers until it is merged, prints that, and ends when its input closes; or kills itself
/// at once. Or a launcher that starts such ranks, and outlives them.
const RANK_PROGRAM_C: &str = r#"#include <signal.h>
int MPI_Init(int *count, char ***words);
int MPI_Barrier(void *comm);
int main(int count, char **words)
{
	if (count > 1 && !strcmp(words[1], "launch")) {
		for (int rank = 0; rank < 3; rank++)
			if (fork() == 0)
				return execl("/proc/self/exe", "rank", "killed", NULL), 2;
		for (int status, rank = 0; rank < 3; rank++)
			if (wait(&status) < 0 || !WIFSIGNALED(status))
				return 3;
		return 0;
	}
	MPI_Init(&count, &words);
	for (fill(); !is_merged(); usleep(1000))
		MPI_Barrier(NULL);
	if (count > 1)
		return raise(SIGKILL);
	char none;
	return write(1, "+", 1) != 1 || read(0, &none, 1) != 0;
}
"#;

#[test]
fn domain_directory_is_removed_with_simultaneous_exits() {
    if !has_compiler() {
        return;
    }
    let directory = runtime_directory();
    let mpi = compile(&directory, "lonely_mpi.c", &["-shared", "-fPIC"]);
    let program = compile_text(&directory, "ranks.c", RANK_PROGRAM_C, &[mpi.to_str().unwrap()]);
    let domain = directory.path().join("domains/x");
    for round in 0..3 {
        let ((wait, ends), (merged, says)) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
        let rank = || {
            let (input, output) = (wait.try_clone().unwrap(), says.try_clone().unwrap());
            preloaded_command(&directory, &program).stdin(input).stdout(output).spawn().unwrap()
        };
        let mut ranks: Vec<_> = (0..6).map(|_| rank()).collect();
        drop((wait, says));
        let mut all = [0; 6];
        std::io::Read::read_exact(&mut { merged }, &mut all).unwrap();
        assert!(domain.exists(), "they are members of a domain");
        drop(ends);
        assert!(ranks.iter_mut().all(|rank| rank.wait().unwrap().success()));
        assert!(!domain.exists(), "round {round}: {:?}", std::fs::read_dir(&domain).map(Iterator::count));
    }
}

#[test]
fn surviving_launcher_removes_domain_of_killed_ranks() {
    if !has_compiler() {
        return;
    }
    let directory = runtime_directory();
    let mpi = compile(&directory, "lonely_mpi.c", &["-shared", "-fPIC"]);
    let program = compile_text(&directory, "ranks.c", RANK_PROGRAM_C, &[mpi.to_str().unwrap()]);
    let output = preloaded_command(&directory, &program).arg("launch").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(directory.path().join("domains").exists(), "there was a domain");
    assert!(!directory.path().join("domains/x").exists());
}
