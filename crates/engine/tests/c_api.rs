//! The C interface, tested by its example. The system's compiler builds the example against the header and the shared
//! library of this tree, and against the installed ones. Also tests the manual page.

mod library;

use library::{build_directory, library_and_domains_root};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Whether a program is installed; prints what is skipped if not.
fn has_program(program: &str, purpose: &str) -> bool {
    let is_installed = Command::new(program).arg("--version").output().is_ok();
    if !is_installed {
        println!("skipped: no {purpose}");
    }
    is_installed
}

fn crate_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Compile a C program with some flags; the command runs it with the library in a folder. `None` without a compiler.
fn compile_with_flags(flags: &[String], library: &Path, root: &TempDir, source: &Path) -> Option<Command> {
    if !has_program("cc", "C compiler") {
        return None;
    }
    let program = root.path().join("program");
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]).arg(source);
    compile.args(flags).arg("-o").arg(&program);
    assert!(compile.status().expect("the compiler runs").success());
    let mut run = Command::new(program);
    run.env("LD_LIBRARY_PATH", library).env("PAGEFOLD_RUNTIME", root.path());
    Some(run)
}

/// Compile a C program with the header of this tree and the library of this build.
fn compile_with_this_build(root: &TempDir, source: &Path) -> Option<Command> {
    let header = format!("-I{}", crate_path("include").display());
    let library = format!("-L{}", root.path().display());
    compile_with_flags(&[header, library, "-lpagefold".to_owned()], root.path(), root, source)
}

/// Run `examples/c/ranks`, and check that three ranks merge all their common memory.
fn assert_ranks_merge_shared_memory(mut run: Command) {
    let output = run.args(["3", "16"]).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.ends_with("all memory as it was written\n"), "{output:?}");
    let numbers_before = |rank: &str, unit: &str| -> Vec<u64> {
        let words: Vec<&str> = rank.split_ascii_whitespace().collect();
        let number_before = |index: usize| words[index - 1].parse().ok();
        words
            .iter()
            .enumerate()
            .filter(|(_, word)| **word == unit)
            .filter_map(|(index, _)| number_before(index))
            .collect()
    };
    let ranks: Vec<&str> = text.lines().filter(|line| line.starts_with("rank ")).collect();
    assert_eq!(ranks.len(), 3, "{text}");
    for rank in ranks {
        // 16 MiB are 4096 pages: all of the table, and all but one of the work array.
        assert_eq!(numbers_before(rank, "pages"), [4096], "{rank}");
        assert_eq!(numbers_before(rank, "of"), [4095], "{rank}");
        // The monitor thread sees all savings, less the table: either stored once, or once by each rank at the same
        // time.
        assert_eq!(numbers_before(rank, "merges"), [2], "{rank}");
        let [_, saved] = numbers_before(rank, "MiB")[..] else { panic!("{rank}") };
        assert!((47..80).contains(&saved), "{rank}");
    }
}

#[test]
fn c_ranks_merge_shared_memory() {
    let root = library_and_domains_root();
    let Some(run) = compile_with_this_build(&root, &crate_path("examples/c/ranks.c")) else { return };
    assert_ranks_merge_shared_memory(run);
}

#[test]
fn pkg_config_finds_the_installed_library() {
    if !has_program("make", "make") || !has_program("pkg-config", "pkg-config") {
        return;
    }
    let (root, folder) = (library_and_domains_root(), tempfile::tempdir().expect("a directory"));
    // Cargo built everything with this test. A build with other features would replace that library.
    let cargo = folder.path().join("cargo");
    let pass_on = format!("[ \"$1\" = build ] || exec '{}' \"$@\"\n", env!("CARGO"));
    std::fs::write(&cargo, pass_on).expect("a file");
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "install-library", "PREFIX=/opt/here", "LIBDIR=/opt/here/lib/there"]);
    make.arg(format!("CARGO=sh {}", cargo.display())).arg(format!("BUILT={}", build_directory().display()));
    make.arg(format!("DESTDIR={}", folder.path().display())).current_dir(crate_path("../.."));
    // An outer make sets its own flags.
    let output = make.env_remove("MAKEFLAGS").output().expect("it exists");
    assert!(output.status.success(), "{output:?}");

    let prefix = folder.path().join("opt/here");
    let library = prefix.join("lib/there");
    let pkg_config = |arguments: &[&str]| -> Vec<String> {
        let mut command = Command::new("pkg-config");
        command
            .args(arguments)
            .arg("pagefold")
            .env_remove("PKG_CONFIG_PATH")
            .env("PKG_CONFIG_SYSROOT_DIR", folder.path());
        let output = command.env("PKG_CONFIG_LIBDIR", library.join("pkgconfig")).output().expect("it exists");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).split_ascii_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(pkg_config(&["--modversion"]), [env!("CARGO_PKG_VERSION")]);
    let flags = pkg_config(&["--cflags", "--libs"]);
    let paths = [format!("-I{}", prefix.join("include").display()), format!("-L{}", library.display())];
    assert_eq!(flags.split_last().map(|(last, paths)| (last.as_str(), paths)), Some(("-lpagefold", &paths[..])));
    let Some(run) = compile_with_flags(&flags, &library, &root, &crate_path("examples/c/ranks.c")) else { return };
    assert_ranks_merge_shared_memory(run);
    assert!(prefix.join("share/man/man3/pagefold.3").exists());
}

#[test]
fn manual_page_is_well_formed() {
    if !has_program("groff", "groff") {
        return;
    }
    // All warnings except for lines that cannot be broken, which depend on the width.
    let mut groff = Command::new("groff");
    groff.args(["-man", "-Tutf8", "-z", "-ww", "-Wbreak"]).arg(crate_path("man/pagefold.3"));
    let output = groff.output().expect("it exists");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn manual_page_covers_the_header() {
    let read = |path: &str| std::fs::read_to_string(crate_path(path)).expect("it exists");
    let (header, page) = (read("include/pagefold.h"), read("man/pagefold.3"));
    // Declarations start in the first column.
    let declared = header.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_alphabetic()));
    // The page describes the inline functions that call these.
    let declared = declared.filter(|line| !line.contains("_sized("));
    let functions: Vec<&str> = declared.filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next()).collect();
    assert!(functions.len() >= 16 && functions.contains(&"pagefold_join"), "{functions:?}");
    for function in functions {
        assert!(page.contains(&format!("{function}(")), "{function} is not in the synopsis");
    }
    for structure in ["pagefold_options", "pagefold_merge_counters"] {
        let (_, fields) = header.split_once(&format!("typedef struct {structure} {{\n")).expect("it is declared");
        let (fields, _) = fields.split_once('}').expect("it ends");
        let fields: Vec<&str> =
            fields.lines().filter_map(|line| line.split_once(';')?.0.rsplit([' ', '*']).next()).collect();
        assert!(fields.len() > 5, "{fields:?}");
        for field in fields.into_iter().filter(|&field| field != "size") {
            assert!(page.contains(&format!(".TP\n.I {field}\n")), "{field} of {structure} is not described");
        }
    }
}

/// The exit code of a C program: the number of the failed check, or 0. `None` without a compiler.
fn run_c_program(name: &str, text: &str) -> Option<i32> {
    let root = library_and_domains_root();
    let source = root.path().join(name);
    std::fs::write(&source, text).expect("a file");
    let status = compile_with_this_build(&root, &source)?.status().expect("it runs");
    Some(status.code().unwrap_or_else(|| panic!("{name}: {status}")))
}

#[test]
fn c_errors_are_reported() {
    assert_eq!(run_c_program("wrong.c", ERRORS_C).unwrap_or(0), 0);
}

#[test]
fn c_status_reports_merged_pages() {
    assert_eq!(run_c_program("status.c", STATUS_C).unwrap_or(0), 0);
}

#[test]
fn c_structures_of_other_sizes_are_filled() {
    assert_eq!(run_c_program("sizes.c", STRUCTURE_SIZES_C).unwrap_or(0), 0);
}

#[test]
fn merge_is_refused_while_an_io_uring_buffer_is_registered() {
    match run_c_program("pinned.c", REGISTERED_BUFFER_C) {
        Some(77) => println!("skipped: the kernel does not permit io_uring"),
        other => assert_eq!(other.unwrap_or(0), 0),
    }
}

#[test]
fn merged_memory_survives_the_main_thread() {
    assert_eq!(run_c_program("ended.c", MAIN_THREAD_ENDS_C).unwrap_or(0), 0);
}

#[test]
fn c_program_is_merged_while_running() {
    match run_c_program("running.c", MERGE_WHILE_RUNNING_C) {
        Some(77) => println!("skipped: userfaultfd is not permitted"),
        other => assert_eq!(other.unwrap_or(0), 0),
    }
}

#[test]
fn signal_handler_can_write_during_a_merge() {
    match run_c_program("handlers.c", SIGNAL_HANDLERS_C) {
        Some(77) => println!("skipped: userfaultfd is not permitted"),
        other => assert_eq!(other.unwrap_or(0), 0),
    }
}

/// A thread signals all other threads without pause. The handler writes to memory that is being merged: first by a
/// background thread, then by the main thread itself. SIGALRM ends a program that hangs.
const SIGNAL_HANDLERS_C: &str = r#"#define _GNU_SOURCE
#include <pagefold.h>
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#define PAGE ((size_t)4096)
#define PAGES ((size_t)2048)
static char *volatile memory;
static volatile sig_atomic_t writes;
static atomic_bool ends;
static void writes_to_memory(int signal)
{
	(void)signal;
	if (memory)
		memory[(size_t)writes % PAGES * PAGE] = 1;
	writes++;
}
static void *sends(void *none)
{
	while (!atomic_load(&ends)) {
		DIR *threads = opendir("/proc/self/task");
		for (struct dirent *thread; threads && (thread = readdir(threads));) {
			pid_t id = atoi(thread->d_name);
			if (id > 0 && id != gettid())
				syscall(SYS_tgkill, getpid(), id, SIGPROF);
		}
		if (threads)
			closedir(threads);
		usleep(50);
	}
	return none;
}
static char *filled(pagefold_engine *engine)
{
	char *block = pagefold_allocate(engine, PAGES * PAGE);
	for (size_t page = 0; block && page < PAGES; page++)
		memset(block + page * PAGE, (char)(1 + page % 100), PAGE);
	return memory = block;
}
static int differs(pagefold_engine *engine)
{
	char *block = memory;
	memory = NULL;
	/* The handler writes only to the first byte of a page. */
	for (size_t byte = 0; byte < PAGES * PAGE; byte++)
		if (byte % PAGE && block[byte] != (char)(1 + byte / PAGE % 100))
			return 1;
	return pagefold_free(engine, block, PAGES * PAGE);
}
int main(void)
{
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.max_slowdown = -1;
	pagefold_engine *engine = pagefold_join("handlers", &options);
	if (!engine)
		return 1;
	alarm(300);
	signal(SIGPROF, writes_to_memory);
	pagefold_background *background = pagefold_merge_in_background(engine, 1);
	if (!background)
		return strstr(pagefold_error(), "needs Linux 6.4 and userfaultfd") ? 77 : 2;
	pthread_t sender;
	if (pthread_create(&sender, NULL, sends, NULL))
		return 3;
	uint64_t merged = 0;
	for (int round = 0; round < 4; round++) {
		pagefold_member_status before, status;
		if (!filled(engine) || pagefold_get_member_status(engine, &before))
			return 4;
		do {
			usleep(1000);
			if (pagefold_get_member_status(engine, &status))
				return 5;
		} while (status.merge_count < before.merge_count + 2);
		if (differs(engine))
			return 6;
		pagefold_merge_counters totals;
		if (pagefold_get_merge_totals(engine, &totals))
			return 9;
		merged = totals.pages_merged;
	}
	if (merged < PAGES || pagefold_end_background(background))
		return 7;
	for (int round = 0; round < 20; round++) {
		pagefold_merge_counters counters;
		if (!filled(engine) || pagefold_merge_while_running(engine, &counters) ||
		    counters.pages_scanned < PAGES / 2 || differs(engine))
			return 8;
	}
	int handled = writes;
	usleep(1000);
	while (writes == handled)
		usleep(1000); /* The main thread receives signals again. */
	atomic_store(&ends, 1);
	pthread_join(sender, NULL);
	pagefold_leave(engine);
	return 0;
}
"#;

const MERGE_WHILE_RUNNING_C: &str = r#"#include <pagefold.h>
#include <string.h>
#include <unistd.h>
#define PAGE ((size_t)4096)
int main(void)
{
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.max_slowdown = -1;
	pagefold_engine *engine = pagefold_join("running", &options);
	char *memory = pagefold_allocate(engine, 40 * PAGE);
	if (!memory)
		return 1;
	for (size_t page = 0; page < 20; page++)
		memset(memory + page * PAGE, 1 + page % 2, PAGE);
	pagefold_merge_counters counters;
	if (pagefold_merge_while_running(engine, &counters))
		return strstr(pagefold_error(), "needs Linux 6.4 and userfaultfd") ? 77 : 2;
	if (counters.pages_merged != 20 || counters.contents_stored != 2)
		return 3;
	for (size_t page = 20; page < 40; page++)
		memset(memory + page * PAGE, 1 + page % 2, PAGE);
	pagefold_background *background = pagefold_merge_in_background(engine, 0.5);
	if (!background)
		return 4;
	pagefold_member_status status = { 0 };
	for (int tries = 0; tries < 6000 && status.merged != 40; tries++) {
		usleep(10000);
		if (pagefold_get_member_status(engine, &status))
			return 5;
	}
	if (status.merged != 40 || status.store_bytes != 2 * PAGE)
		return 6;
	if (pagefold_end_background(background) || pagefold_end_background(NULL))
		return 7;
	for (size_t page = 0; page < 40; page++)
		for (size_t byte = 0; byte < PAGE; byte++)
			if (memory[page * PAGE + byte] != (char)(1 + page % 2))
				return 8;
	if (pagefold_advise(engine, memory, PAGE, PAGEFOLD_REWRITTEN) ||
	    !pagefold_advise(engine, memory, 1, PAGEFOLD_REWRITTEN))
		return 9;
	if (pagefold_free(engine, memory, 40 * PAGE))
		return 10;
	pagefold_leave(engine);
	return 0;
}
"#;

const REGISTERED_BUFFER_C: &str = r#"#define _GNU_SOURCE
#include <linux/io_uring.h>
#include <pagefold.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#define PAGE ((size_t)4096)
#define PAGES 16
/* Read the file into the registered buffer, which is pinned, and wait for that. */
static int read_fixed(int ring, const struct io_uring_params *sizes, int file, char *buffer)
{
	size_t bytes = sizes->sq_off.array + sizes->sq_entries * sizeof(unsigned);
	char *queue = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	bytes = sizes->sq_entries * sizeof(struct io_uring_sqe);
	struct io_uring_sqe *entry = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	if (queue == MAP_FAILED || entry == MAP_FAILED)
		return 1;
	*entry = (struct io_uring_sqe){
		.opcode = IORING_OP_READ_FIXED, .fd = file, .addr = (unsigned long)buffer, .len = PAGES * PAGE };
	((unsigned *)(queue + sizes->sq_off.array))[0] = 0;
	__atomic_store_n((unsigned *)(queue + sizes->sq_off.tail), 1, __ATOMIC_RELEASE);
	return syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1;
}
int main(void)
{
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.max_slowdown = -1;
	pagefold_engine *engine = pagefold_join("pinned", &options);
	char *memory = pagefold_allocate(engine, PAGES * PAGE), *expected = malloc(PAGES * PAGE);
	if (!memory || !expected)
		return 1;
	for (size_t page = 0; page < PAGES; page++)
		memset(memory + page * PAGE, 1, PAGE);
	memset(expected, 7, PAGES * PAGE);
	int file = memfd_create("read", 0);
	if (write(file, expected, PAGES * PAGE) != (ssize_t)(PAGES * PAGE))
		return 2;
	struct iovec buffer = { memory, PAGES * PAGE };
	struct io_uring_params parameters = { 0 };
	int ring = (int)syscall(__NR_io_uring_setup, 4, &parameters);
	if (ring < 0)
		return 77;
	pagefold_member_status status;
	if (pagefold_get_member_status(engine, &status) || status.pinned_bytes != 0)
		return 3;
	if (syscall(__NR_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1))
		return 77;
	if (pagefold_get_member_status(engine, &status) || status.pinned_bytes != PAGES * PAGE)
		return 4;
	/* Each kind of merge is refused with the reason. */
	if (pagefold_merge(engine, NULL) != -1 || !strstr(pagefold_error(), "64.0 KiB of this process is pinned"))
		return 5;
	if (pagefold_merge_while_running(engine, NULL) != -1 || !strstr(pagefold_error(), "is pinned"))
		return 6;
	pagefold_background *background = pagefold_merge_in_background(engine, 0.5);
	if (background) {
		usleep(100000);
		if (pagefold_end_background(background) != -1 || !strstr(pagefold_error(), "is pinned"))
			return 7;
	}
	if (read_fixed(ring, &parameters, file, memory))
		return 8;
	if (memcmp(memory, expected, PAGES * PAGE))
		return 9;
	/* The caller may vouch for it: nothing is read into the buffer any more. */
	pagefold_leave(engine);
	options.merge_while_pinned = 1;
	engine = pagefold_join("pinned", &options);
	pagefold_merge_counters counters;
	if (pagefold_adopt(engine, memory, PAGES * PAGE) || pagefold_merge(engine, &counters) ||
	    counters.pages_merged != PAGES)
		return 10;
	if (memcmp(memory, expected, PAGES * PAGE))
		return 11;
	pagefold_leave(engine);
	return 0;
}
"#;

const MAIN_THREAD_ENDS_C: &str = r#"#include <pagefold.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define PAGE ((size_t)4096)
static void *works(void *none)
{
	(void)none;
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.max_slowdown = -1;
	usleep(200000);
	pagefold_engine *leaves = pagefold_join("ended", &options), *stays = pagefold_join("ended", &options);
	char *memory = pagefold_allocate(leaves, 40 * PAGE), *other = pagefold_allocate(stays, 40 * PAGE);
	if (!memory || !other)
		exit(1);
	for (size_t page = 0; page < 40; page++)
		memset(memory + page * PAGE, 1 + page % 2, PAGE);
	pagefold_merge_counters counters;
	if (pagefold_merge(leaves, &counters) || counters.pages_merged != 40)
		exit(2);
	pagefold_leave(leaves);
	for (int merge = 0; merge < 5; merge++) {
		/* Replaces the contents that were freed. */
		for (size_t page = 0; page < 40; page++)
			memset(other + page * PAGE, 3 + merge * 3 + page % 2, PAGE);
		if (pagefold_merge(stays, NULL))
			exit(3);
	}
	for (size_t byte = 0; byte < 40 * PAGE; byte++)
		if (memory[byte] != (char)(1 + byte / PAGE % 2))
			exit(4);
	exit(0);
}
int main(void)
{
	pthread_t thread;
	if (pthread_create(&thread, NULL, works, NULL))
		return 5;
	pthread_exit(NULL);
}
"#;

const STATUS_C: &str = r#"#include <pagefold.h>
#include <string.h>
#define PAGE ((size_t)4096)
int main(void)
{
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.max_slowdown = -1;
	pagefold_engine *engine = pagefold_join("status", &options);
	/* Sixty pages of ten contents, forty of zeros, and a hundred that are never touched. */
	char *memory = pagefold_allocate(engine, 200 * PAGE), *more = pagefold_allocate(engine, PAGE);
	if (!memory || !more)
		return 1;
	for (size_t page = 0; page < 100; page++)
		memset(memory + page * PAGE, page < 60 ? 1 + page % 10 : 0, PAGE);
	if (pagefold_merge(engine, NULL))
		return 2;
	pagefold_member_status status;
	if (pagefold_get_member_status(engine, &status) || status.pages != 201 || status.merged != 60 ||
	    status.zeros != 40 || status.rewritten_pages != 0 || status.store_bytes != 10 * PAGE ||
	    status.merge_count != 1 || status.note_bytes != 8 * 201 || status.overhead_ns == 0 || status.overhead_ns >= status.elapsed_ns)
		return 3;
	size_t count = 7;
	if (pagefold_get_region_statuses(engine, NULL, &count) || count != 2)
		return 4;
	pagefold_region_status regions[2];
	count = 1;
	if (pagefold_get_region_statuses(engine, regions, &count) || count != 2 ||
	    regions[0].memory != (void *)(memory < more ? memory : more))
		return 5;
	if (pagefold_get_region_statuses(engine, regions, &count) || count != 2)
		return 6;
	pagefold_region_status *region = regions[0].memory == (void *)memory ? &regions[0] : &regions[1];
	if (region->bytes != 200 * PAGE || region->merged != 60 || region->zeros != 40 || region->rewritten_pages != 0 ||
	    region->saved_bytes != (60 - 10 + 40) * (int64_t)PAGE)
		return 7;
	pagefold_domain_status domain;
	if (pagefold_get_domain_status(engine, &domain) || domain.members != 1 || domain.pages != 201 ||
	    domain.merged != 60 || domain.zeros != 40 || domain.rewritten_pages != 0 || domain.stored_contents != 10 ||
	    domain.saved_bytes != (60 - 10 + 40) * (int64_t)PAGE || domain.index_bytes == 0 ||
	    domain.overhead_bytes <= domain.index_bytes)
		return 8;
	if (pagefold_get_region_statuses(engine, NULL, NULL) != -1 || strcmp(pagefold_error(), "count is NULL"))
		return 9;
	if (pagefold_get_domain_status(engine, NULL) != -1 || strcmp(pagefold_error(), "status is NULL"))
		return 10;
	pagefold_merge_counters totals;
	if (pagefold_get_merge_totals(engine, &totals) || totals.pages_merged != 60 || totals.zeros_freed != 40)
		return 11;
	pagefold_leave(engine);
	return 0;
}
"#;

/// Programs that were compiled with structures that end after their second word, and with structures that are larger
/// than the library's.
const STRUCTURE_SIZES_C: &str = r#"#include <pagefold.h>
#include <string.h>
#define PAGE ((size_t)4096)
#define UNTOUCHED 0x5555555555555555u
static uint64_t words[100];
static void *fresh(void) { return memset(words, 0x55, sizeof words); }
/* Whether only the first two words were written. */
static int fits(void)
{
	for (int word = 2; word < 100; word++)
		if (words[word] != UNTOUCHED)
			return 0;
	return words[0] != UNTOUCHED && words[1] != UNTOUCHED;
}
/* Whether so many words were written, with zeros behind the library's structure. */
static int grows(size_t known, size_t count)
{
	for (size_t word = known / 8; word < 100; word++)
		if (words[word] != (word < count ? 0 : UNTOUCHED))
			return 0;
	return words[0] != UNTOUCHED;
}
int main(void)
{
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.max_slowdown = -1;
	pagefold_engine *engine = pagefold_join("sizes", &options);
	char *memory = pagefold_allocate(engine, 20 * PAGE), *more = pagefold_allocate(engine, 10 * PAGE);
	if (!memory || !more)
		return 1;
	memset(memory, 1, 20 * PAGE);
	if (pagefold_merge_sized(engine, fresh(), 16) || !fits() || words[0] != 20)
		return 2;
	if (pagefold_merge_sized(engine, fresh(), 800 - 8) || !grows(sizeof(pagefold_merge_counters), 99))
		return 3;
	if (pagefold_get_merge_totals_sized(engine, fresh(), 16) || !fits())
		return 4;
	if (pagefold_get_member_status_sized(engine, fresh(), 16) || !fits() || words[0] != 30 || words[1] != 20)
		return 5;
	if (pagefold_get_member_status_sized(engine, fresh(), 400) || !grows(sizeof(pagefold_member_status), 50))
		return 6;
	if (pagefold_get_domain_status_sized(engine, fresh(), 16) || !fits() || words[0] != 1 || words[1] != 30)
		return 7;
	size_t count = 1;
	if (pagefold_get_region_statuses_sized(engine, fresh(), &count, 16) || count != 2 || !fits())
		return 8;
	/* Two structures, each with a word that the library does not know. */
	size_t size = sizeof(pagefold_region_status) + 8;
	if (pagefold_get_region_statuses_sized(engine, fresh(), &count, size) || count != 2 || words[size / 8 - 1] != 0 ||
	    words[size / 4 - 1] != 0 || words[size / 4] != UNTOUCHED || words[1] + words[size / 8 + 1] != 30 * PAGE)
		return 9;
	size_t wrong[] = { 0, 7, 12, 1 << 20 };
	for (int each = 0; each < 4; each++)
		if (pagefold_get_member_status_sized(engine, fresh(), wrong[each]) != -1 || words[0] != UNTOUCHED ||
		    !strstr(pagefold_error(), "is not a valid size of the structure") ||
		    pagefold_merge_sized(engine, fresh(), wrong[each]) != -1 || words[0] != UNTOUCHED)
			return 10;
	if (pagefold_merge_sized(engine, NULL, 0))
		return 11;
	pagefold_leave(engine);
	return 0;
}
"#;

const ERRORS_C: &str = r#"#include <pagefold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(void)
{
	pagefold_options options = PAGEFOLD_OPTIONS_INIT;
	options.size = 8;
	if (pagefold_join("x", &options) || !strstr(pagefold_error(), "PAGEFOLD_OPTIONS_INIT"))
		return 1;
	options = (pagefold_options)PAGEFOLD_OPTIONS_INIT;
	options.min_runtime = -1;
	if (pagefold_join("x", &options) || !strstr(pagefold_error(), "min_runtime of -1 s"))
		return 5;
	options.min_runtime = 0.0 / 0.0;
	if (pagefold_join("x", &options) || !strstr(pagefold_error(), "min_runtime of NaN s"))
		return 6;
	if (pagefold_join("../x", NULL) || !strstr(pagefold_error(), "is not a valid domain name"))
		return 2;
	const char *jobs[] = { "PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_JOBID" };
	for (int job = 0; job < 3; job++)
		unsetenv(jobs[job]);
	if (pagefold_join(NULL, NULL) || !strstr(pagefold_error(), "this is not an MPI rank"))
		return 7;
	if (pagefold_merge(NULL, NULL) != -1 || strcmp(pagefold_error(), "engine is NULL"))
		return 3;
	pagefold_engine *engine = pagefold_join("x", NULL);
	if (!engine || pagefold_adopt(engine, (void *)1, 4096) != -1 || !strstr(pagefold_error(), "is not page-aligned"))
		return 4;
	pagefold_leave(engine);
	pagefold_leave(NULL);
	return 0;
}
"#;
