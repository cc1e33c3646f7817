// The load of tests of `pagefold vcpu gang`: virtual machines whose vCPUs contend for one ticket lock each.
//
// Usage: gang-load VMS VCPUS[,VCPUS...] kvm|threads [SPINS [HOGS [NODES]]]
//
// The machines have these numbers of vCPUs, the last number for all others.
//
// kvm: real guests of KVM, of a few instructions without paging. threads: stand-ins, processes with threads that do the
// same. With SPINS, a vCPU that has spun this often yields: a guest by Hyper-V's hypercall for long spin waits, which KVM
// treats like a pause-loop exit (kvm_hv_hypercall, arch/x86/kvm/hyperv.c), a stand-in by sched_yield(2). HOGS ordinary
// processes use a CPU each. With NODES, the machine with the number N, from 0 on, has 8 MiB of memory on the NUMA node
// N modulo NODES, which is its home. Prints READY with the process numbers of the machines; then serves lines of standard input:
//
//   measure NAME MS    runs for so long and prints RESULT NAME with operations a second, Jain's fairness index of the
//                      machines, and the co-run fraction: of the time in which a machine has CPUs, the share in which it
//                      has as many as it can use. It is computed from the events sched_switch and sched_wakeup. idle is
//                      the number of vCPUs that neither worked nor spun. home is the share of the CPU time of the
//                      machines on CPUs of their homes, and 0 without NODES. CPUs are divided evenly among nodes.
//   stop, go           stops and continues the machines (and the hogs): they sleep.
//   hogs N             starts or ends hogs
//   ext                gives all vCPUs the policy SCHED_EXT
//
// The first machine writes the operations of all machines to /run/operations every 10 ms or more.
// The threads are named like QEMU's vCPUs. It ends with its input.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_VMS 16
#define MAX_VCPUS 32
#define MAX_HOGS 16
#define TRACING "/sys/kernel/tracing/"

// One for each vCPU, at 0x3000 of a guest's memory. The guest knows the offsets.
struct cell {
	uint32_t operations, spins, yields, seed, max_spins, padding[11];
};
// The memory of a guest: its code at 0x1000, the lock at 0x2000 and 0x2040, the cells.
struct memory {
	char unused[0x1000], code[0x1000];
	volatile uint32_t next_ticket, padding1[15], now_served, padding2[0x3f0 - 1];
	volatile struct cell cells[MAX_VCPUS];
};
static struct shared {
	volatile int ready, stops, ends;
	int tids[MAX_VMS][MAX_VCPUS];
} *shared;
static struct memory *memories[MAX_VMS];
static int vms, vcpus[MAX_VMS], is_kvm, max_spins, nodes;
static pid_t machines[MAX_VMS], hogs[MAX_HOGS];

// The guest. edi: its cell. A turn is 40 rounds of a loop and a pause. It works for 12 to 27 turns, takes the lock, works
// for 5 turns, and releases it.
extern const char guest_begin[], guest_end[];
__asm__(".pushsection .rodata\n"
	".global guest_begin, guest_end\n"
	".code32\n"
	".macro TURN\n"
	"	movl $40, %ecx\n"
	"9:	decl %ecx\n"
	"	jnz 9b\n"
	"	pause\n"
	".endm\n"
	"guest_begin:\n"
	"	imull $1664525, 12(%edi), %eax\n"
	"	addl $1013904223, %eax\n"
	"	movl %eax, 12(%edi)\n"
	"	shrl $28, %eax\n"
	"	leal 12(%eax), %edx\n"
	"1:	TURN\n"
	"	decl %edx\n"
	"	jnz 1b\n"
	"	movl $1, %ebp\n"
	"	lock xaddl %ebp, 0x2000\n"
	"	xorl %edx, %edx\n"
	"2:	cmpl %ebp, 0x2040\n"
	"	je 3f\n"
	"	TURN\n"
	"	incl 4(%edi)\n"
	"	incl %edx\n"
	"	cmpl $0, 16(%edi)\n"
	"	je 2b\n"
	"	cmpl 16(%edi), %edx\n"
	"	jb 2b\n"
	"	incl 8(%edi)\n"
	"	movl $8, %eax\n"		// HvNotifyLongSpinWait
	"	xorl %edx, %edx\n"
	"	xorl %ebx, %ebx\n"
	"	xorl %ecx, %ecx\n"
	"	vmmcall\n"
	"	xorl %edx, %edx\n"
	"	jmp 2b\n"
	"3:	movl $5, %edx\n"
	"4:	TURN\n"
	"	decl %edx\n"
	"	jnz 4b\n"
	"	incl %ebp\n"
	"	movl %ebp, 0x2040\n"
	"	incl (%edi)\n"
	"	jmp guest_begin\n"
	"guest_end:\n"
	".code64\n"
	".popsection\n");

static void die(const char *what)
{
	perror(what);
	_exit(1);
}

static void turn(void)
{
	for (int i = 0; i < 40; i++)
		__asm__ volatile("");
	__builtin_ia32_pause();
}

static void run_stand_in(struct memory *m, int number)
{
	volatile struct cell *c = &m->cells[number];
	for (;;) {
		while (shared->stops)
			usleep(1000);
		c->seed = c->seed * 1664525 + 1013904223;
		for (uint32_t i = 12 + (c->seed >> 28); i; i--)
			turn();
		uint32_t ticket = __sync_fetch_and_add(&m->next_ticket, 1), spun = 0;
		while (m->now_served != ticket) {
			turn();
			c->spins++;
			if (c->max_spins && ++spun >= c->max_spins) {
				c->yields++;
				sched_yield();
				spun = 0;
			}
		}
		for (int i = 0; i < 5; i++)
			turn();
		m->now_served = ticket + 1;
		c->operations++;
	}
}

static void run_guest(int vm, int number)
{
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vcpu = ioctl(vm, KVM_CREATE_VCPU, number);
	if (vcpu < 0)
		die("KVM_CREATE_VCPU");
	struct kvm_run *run = mmap(0, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	struct kvm_sregs sregs;
	ioctl(vcpu, KVM_GET_SREGS, &sregs);
	struct kvm_segment segment = { .limit = ~0u, .selector = 8, .type = 11, .present = 1, .db = 1, .s = 1, .g = 1 };
	sregs.cs = segment;
	segment.type = 3;
	segment.selector = 16;
	sregs.ds = sregs.es = sregs.fs = sregs.gs = sregs.ss = segment;
	sregs.cr0 |= 1;
	if (ioctl(vcpu, KVM_SET_SREGS, &sregs) < 0)
		die("KVM_SET_SREGS");
	struct kvm_mp_state runnable = { KVM_MP_STATE_RUNNABLE };
	ioctl(vcpu, KVM_SET_MP_STATE, &runnable);
	struct { struct kvm_cpuid2 header; struct kvm_cpuid_entry2 entries[4]; } cpuid = { .header.nent = 4, .entries = {
		{ .function = 0, .eax = 1 },
		{ .function = 1, .ecx = 1u << 31, .edx = 1 << 9 },
		{ .function = 0x40000000, .eax = 0x40000001, .ebx = 0x7263694d, .ecx = 0x666f736f, .edx = 0x76482074 },
		{ .function = 0x40000001, .eax = 0x31237648 } } };
	if (ioctl(vcpu, KVM_SET_CPUID2, &cpuid) < 0)
		die("KVM_SET_CPUID2");
	// Hypercalls of Hyper-V need an operating system's identity: HV_X64_MSR_GUEST_OS_ID.
	struct { struct kvm_msrs header; struct kvm_msr_entry entry; } msr = { .header.nmsrs = 1,
		.entry = { .index = 0x40000000, .data = 0x8100000000000001 } };
	if (number == 0 && ioctl(vcpu, KVM_SET_MSRS, &msr) != 1)
		die("KVM_SET_MSRS");
	struct kvm_regs registers = { .rip = 0x1000, .rflags = 2, .rdi = 0x3000 + sizeof(struct cell) * number };
	if (ioctl(vcpu, KVM_SET_REGS, &registers) < 0)
		die("KVM_SET_REGS");
	__sync_fetch_and_add(&shared->ready, 1);
	for (;;) {
		while (shared->stops)
			usleep(1000);
		if (ioctl(vcpu, KVM_RUN, 0) == 0 && run->exit_reason != KVM_EXIT_INTR) {
			printf("unexpected exit %d of a guest\n", run->exit_reason);
			_exit(1);
		}
	}
}

static int this_vm, vm_descriptor;
static void *run_vcpu(void *argument)
{
	int number = (int)(intptr_t)argument;
	struct memory *m = memories[this_vm];
	char name[16];
	snprintf(name, sizeof name, "CPU %d/KVM", number);
	prctl(PR_SET_NAME, name);
	shared->tids[this_vm][number] = gettid();
	m->cells[number].seed = this_vm * 77 + number * 13 + 1;
	m->cells[number].max_spins = max_spins;
	if (is_kvm)
		run_guest(vm_descriptor, number);
	__sync_fetch_and_add(&shared->ready, 1);
	run_stand_in(m, number);
	return NULL;
}

static void write_operations(int file)
{
	char text[32];
	unsigned long long sum = 0;
	for (int vm = 0; vm < vms; vm++)
		for (int i = 0; i < vcpus[vm]; i++)
			sum += memories[vm]->cells[i].operations;
	// Of a fixed length, so that a reader never sees a part of an old number.
	if (pwrite(file, text, snprintf(text, sizeof text, "%020llu\n", sum), 0) < 0)
		die("/run/operations");
}

static void ignore(int signal) { (void)signal; }

static void put_memory_on(int node)
{
	size_t size = 8 << 20;
	unsigned long mask = 1ul << node;
	char *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (syscall(SYS_mbind, memory, size, 2 /* MPOL_BIND */, &mask, 64, 0))
		die("mbind");
	memset(memory, 1, size);
}

static void run_machine(int number)
{
	pthread_t threads[MAX_VCPUS];
	struct sigaction action = { .sa_handler = ignore };
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sigaction(SIGUSR1, &action, NULL);
	this_vm = number;
	if (nodes)
		put_memory_on(number % nodes);
	if (is_kvm) {
		int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
		if (kvm < 0)
			die("/dev/kvm");
		vm_descriptor = ioctl(kvm, KVM_CREATE_VM, 0);
		ioctl(vm_descriptor, KVM_SET_TSS_ADDR, 0xfffbd000ul);
		if (ioctl(vm_descriptor, KVM_CREATE_IRQCHIP, 0) < 0)
			die("KVM_CREATE_IRQCHIP");
		memcpy(memories[number]->code, guest_begin, guest_end - guest_begin);
		struct kvm_userspace_memory_region region = { .memory_size = sizeof(struct memory) + 0x1000 - sizeof(struct memory) % 0x1000,
			.userspace_addr = (uintptr_t)memories[number] };
		if (ioctl(vm_descriptor, KVM_SET_USER_MEMORY_REGION, &region) < 0)
			die("KVM_SET_USER_MEMORY_REGION");
	}
	for (int i = 0; i < vcpus[number]; i++)
		pthread_create(&threads[i], NULL, run_vcpu, (void *)(intptr_t)i);
	int counter = number ? -1 : open("/run/operations", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	// A guest leaves KVM_RUN only for a signal.
	for (int stopped = 0, wakes = 0;; wakes++) {
		usleep(2000);
		if (counter >= 0 && wakes % 5 == 0)
			write_operations(counter);
		if (is_kvm && shared->stops && !stopped)
			for (int i = 0; i < vcpus[number]; i++)
				pthread_kill(threads[i], SIGUSR1);
		stopped = shared->stops;
	}
}

static void set_hogs(int count)
{
	for (int i = 0; i < MAX_HOGS; i++) {
		if (i < count && !hogs[i]) {
			hogs[i] = fork();
			if (!hogs[i]) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				prctl(PR_SET_NAME, "hog");
				for (;;) {
					if (shared->stops)
						usleep(1000);
					turn();
				}
			}
		} else if (i >= count && hogs[i]) {
			kill(hogs[i], SIGKILL);
			waitpid(hogs[i], NULL, 0);
			hogs[i] = 0;
		}
	}
}

static void set_ext_policy(void)
{
	struct sched_param parameters = { 0 };
	for (int vm = 0; vm < vms; vm++)
		for (int i = 0; i < vcpus[vm]; i++)
			if (sched_setscheduler(shared->tids[vm][i], 7 /* SCHED_EXT */, &parameters))
				die("SCHED_EXT");
}

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void write_file(const char *path, const char *text)
{
	int file = open(path, O_WRONLY | O_TRUNC);
	if (file >= 0 && write(file, text, strlen(text)) < 0)
		perror(path);
	if (file >= 0)
		close(file);
}

// ---- co-run ----

static struct { int running, runnable; double full, partial; } machine_times[MAX_VMS];
static char is_running[MAX_VMS][MAX_VCPUS], is_runnable[MAX_VMS][MAX_VCPUS];
static int running_cpu[MAX_VMS][MAX_VCPUS];
// The share of CPU time on the CPUs of homes, of the last measurement.
static double home_share;

static int find_thread(int tid, int *vm, int *vcpu)
{
	for (*vm = 0; *vm < vms; ++*vm)
		for (*vcpu = 0; *vcpu < vcpus[*vm]; ++*vcpu)
			if (shared->tids[*vm][*vcpu] == tid)
				return 1;
	return 0;
}

static void set_state(int tid, int cpu, int runs, int can_run)
{
	int vm, vcpu;
	if (!find_thread(tid, &vm, &vcpu))
		return;
	machine_times[vm].running += runs - is_running[vm][vcpu];
	machine_times[vm].runnable += can_run - is_runnable[vm][vcpu];
	is_running[vm][vcpu] = runs;
	running_cpu[vm][vcpu] = cpu;
	is_runnable[vm][vcpu] = can_run;
}

// The first part of the trace only tells which threads run.
static double corun_fraction(double begin, long cpus)
{
	FILE *trace = fopen(TRACING "trace", "r");
	char line[512];
	double last = 0, full = 0, partial = 0, used = 0, used_at_home = 0;
	long configured_cpus = sysconf(_SC_NPROCESSORS_CONF);
	memset(machine_times, 0, sizeof machine_times);
	memset(is_running, 0, sizeof is_running);
	memset(is_runnable, 0, sizeof is_runnable);
	while (trace && fgets(line, sizeof line, trace)) {
		char *event = strstr(line, ": sched_"), *field, state;
		double now;
		if (!event)
			continue;
		*event = 0;
		field = strrchr(line, ' ');
		now = field ? atof(field + 1) : 0;
		event += 2;
		// The CPU is in the brackets before the time: [002].
		field = strrchr(line, '[');
		int cpu = field ? atoi(field + 1) : 0;
		for (int vm = 0; vm < vms && last >= begin; vm++) {
			long usable = machine_times[vm].runnable < cpus ? machine_times[vm].runnable : cpus;
			if (usable && machine_times[vm].running >= usable)
				full += now - last;
			else if (usable && machine_times[vm].running)
				partial += now - last;
			for (int i = 0; nodes && i < vcpus[vm]; i++)
				if (is_running[vm][i]) {
					used += now - last;
					if (running_cpu[vm][i] * nodes / configured_cpus == vm % nodes)
						used_at_home += now - last;
				}
		}
		last = now;
		if (!strncmp(event, "sched_switch", 12)) {
			field = strstr(event, "prev_pid=");
			int previous = field ? atoi(field + 9) : 0;
			field = strstr(event, "prev_state=");
			state = field ? field[11] : 'R';
			field = strstr(event, "next_pid=");
			set_state(previous, cpu, 0, state == 'R');
			set_state(field ? atoi(field + 9) : 0, cpu, 1, 1);
		} else if (!strncmp(event, "sched_wakeup", 12) && (field = strstr(event, " pid="))) {
			int vm, vcpu, tid = atoi(field + 5);
			if (find_thread(tid, &vm, &vcpu) && !is_running[vm][vcpu])
				set_state(tid, cpu, 0, 1);
		}
	}
	if (trace)
		fclose(trace);
	home_share = used > 0 ? used_at_home / used : 0;
	return full + partial > 0 ? full / (full + partial) : 0;
}

// Takes each CPU for a moment, so that the trace tells what runs there: a thread that runs without a switch appears in no
// event.
static void visit_cpus(void)
{
	cpu_set_t all, one;
	CPU_ZERO(&all);
	for (int cpu = 0; cpu < sysconf(_SC_NPROCESSORS_CONF); cpu++) {
		CPU_SET(cpu, &all);
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		// Refused if the CPU is offline.
		sched_setaffinity(0, sizeof one, &one);
	}
	sched_setaffinity(0, sizeof all, &all);
}

static void measure(const char *name, int milliseconds)
{
	uint64_t before[MAX_VMS] = { 0 }, after[MAX_VMS] = { 0 }, spins = 0, yields = 0;
	uint32_t progress[MAX_VMS][MAX_VCPUS];
	int idle = 0;
	double sum = 0, squares = 0;
	write_file(TRACING "trace", "");
	write_file(TRACING "tracing_on", "1");
	visit_cpus();
	usleep(50000);
	for (int vm = 0; vm < vms; vm++)
		for (int i = 0; i < vcpus[vm]; i++) {
			progress[vm][i] = memories[vm]->cells[i].operations + memories[vm]->cells[i].spins;
			before[vm] += memories[vm]->cells[i].operations;
			spins -= memories[vm]->cells[i].spins;
			yields -= memories[vm]->cells[i].yields;
		}
	double begin = seconds();
	usleep(milliseconds * 1000);
	for (int vm = 0; vm < vms; vm++)
		for (int i = 0; i < vcpus[vm]; i++) {
			idle += progress[vm][i] == memories[vm]->cells[i].operations + memories[vm]->cells[i].spins;
			after[vm] += memories[vm]->cells[i].operations;
			spins += memories[vm]->cells[i].spins;
			yields += memories[vm]->cells[i].yields;
		}
	double time = seconds() - begin;
	write_file(TRACING "tracing_on", "0");
	shared->stops = 1;	// the trace is read in peace
	usleep(20000);
	double corun = corun_fraction(begin, sysconf(_SC_NPROCESSORS_ONLN));
	for (int vm = 0; vm < vms; vm++) {
		double rate = (after[vm] - before[vm]) / time;
		sum += rate;
		squares += rate * rate;
	}
	printf("RESULT %s rate=%.0f jain=%.4f corun=%.4f spins=%llu yields=%llu idle=%d home=%.4f rates=", name, sum,
	       squares > 0 ? sum * sum / (vms * squares) : 0, corun, (unsigned long long)spins, (unsigned long long)yields,
	       idle, home_share);
	for (int vm = 0; vm < vms; vm++)
		printf("%s%.0f", vm ? "," : "", (after[vm] - before[vm]) / time);
	printf("\n");
	shared->stops = 0;
}

int main(int count, char **arguments)
{
	char line[256], name[128];
	int number;
	if (count < 4)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	vms = atoi(arguments[1]);
	int all_vcpus = 0;
	char *widths = arguments[2];
	for (int vm = 0; vm < vms; vm++) {
		vcpus[vm] = atoi(widths);
		all_vcpus += vcpus[vm];
		if (strchr(widths, ','))
			widths = strchr(widths, ',') + 1;
	}
	is_kvm = !strcmp(arguments[3], "kvm");
	max_spins = count > 4 ? atoi(arguments[4]) : 0;
	nodes = count > 6 ? atoi(arguments[6]) : 0;
	shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int vm = 0; vm < vms; vm++)
		memories[vm] = mmap(0, 0x10000, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	write_file(TRACING "buffer_size_kb", "8000");
	write_file(TRACING "trace_clock", "mono");
	write_file(TRACING "tracing_on", "0");
	write_file(TRACING "events/sched/sched_switch/enable", "1");
	write_file(TRACING "events/sched/sched_wakeup/enable", "1");
	shared->stops = 1;
	for (int vm = 0; vm < vms; vm++) {
		machines[vm] = fork();
		if (!machines[vm])
			run_machine(vm);
	}
	while (shared->ready < all_vcpus)
		usleep(2000);
	printf("READY");
	for (int vm = 0; vm < vms; vm++)
		printf(" %d", machines[vm]);
	printf("\n");
	shared->stops = 0;
	set_hogs(count > 5 ? atoi(arguments[5]) : 0);
	while (fgets(line, sizeof line, stdin)) {
		if (sscanf(line, "measure %127s %d", name, &number) == 2)
			measure(name, number);
		else if (sscanf(line, "hogs %d", &number) == 1)
			set_hogs(number);
		else if (!strcmp(line, "ext\n"))
			set_ext_policy();
		else
			shared->stops = !strcmp(line, "stop\n");
	}
	set_hogs(0);
	for (int vm = 0; vm < vms; vm++) {
		kill(machines[vm], SIGKILL);
		waitpid(machines[vm], NULL, 0);
	}
	return 0;
}
