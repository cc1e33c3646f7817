/* machine: a virtual machine of KVM whose guest touches memory and changes its page tables, without an operating system.
 *
 * The guest runs in 64-bit mode. Its page table maps the 2 MiB from 2 MiB on by 512 entries. Each of the rounds writes a
 * word to each page of a window of 256 pages, then maps each page of the window to another frame, and flushes its TLB by
 * a write to CR3. KVM without nested paging has to follow each change in its shadow page tables.
 * Prints the time of the rounds by the host's clock, and the exits that KVM counted in them. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MEMORY_BYTES 0x600000
#define CODE 0x1000
#define STACK_TOP 0x9000
/* The levels of the page table; the last one maps the window. */
#define LEVEL4 0x10000
#define LEVEL3 0x11000
#define LEVEL2 0x12000
#define LEVEL1 0x13000
#define WINDOW 0x200000
#define PRESENT_WRITABLE 3
#define LARGE 0x80
#define PORT 0x10

extern char guest_code[], guest_code_end[];
/* r8: rounds. The xor of bit 20 moves each page of the window between two frames that are 1 MiB apart. */
__asm__(".section .rodata\n"
        "guest_code:\n"
        "  outb %al, $0x10\n"
        "1:\n"
        "  movl $0x200000, %ebx\n"
        "2: addq $1, (%rbx)\n"
        "  addl $0x1000, %ebx\n"
        "  cmpl $0x300000, %ebx\n"
        "  jne 2b\n"
        "  movl $0x13000, %ebx\n"
        "3: xorq $0x100000, (%rbx)\n"
        "  addl $8, %ebx\n"
        "  cmpl $0x13800, %ebx\n"
        "  jne 3b\n"
        "  movq %cr3, %rax\n"
        "  movq %rax, %cr3\n"
        "  decq %r8\n"
        "  jnz 1b\n"
        "  outb %al, $0x10\n"
        "4: hlt\n"
        "  jmp 4b\n"
        "guest_code_end:\n"
        ".text\n");

static void fail(const char *what) {
	printf("FAILED %s: %s\n", what, strerror(errno));
	exit(1);
}

static double seconds(void) {
	struct timespec now;
	if (clock_gettime(CLOCK_MONOTONIC, &now) != 0)
		fail("clock_gettime");
	return now.tv_sec + now.tv_nsec * 1e-9;
}

/* The exits of all machines, of which this is the only one. */
static long exits(void) {
	long count = -1;
	FILE *file = fopen("/sys/kernel/debug/kvm/exits", "r");
	if (!file || fscanf(file, "%ld", &count) != 1)
		fail("/sys/kernel/debug/kvm/exits");
	fclose(file);
	return count;
}

static void run_to_port(int vcpu, struct kvm_run *run) {
	if (ioctl(vcpu, KVM_RUN, 0) < 0)
		fail("KVM_RUN");
	if (run->exit_reason != KVM_EXIT_IO || run->io.port != PORT) {
		printf("FAILED exit %u\n", run->exit_reason);
		exit(1);
	}
}

int main(int count, char **arguments) {
	long rounds = count > 1 ? atol(arguments[1]) : 100;
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	if (kvm < 0 || rounds < 1)
		fail("/dev/kvm");
	int machine = ioctl(kvm, KVM_CREATE_VM, 0);
	if (machine < 0)
		fail("KVM_CREATE_VM");
	char *memory = mmap(0, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (memory == MAP_FAILED)
		fail("mmap");
	struct kvm_userspace_memory_region region = {0, 0, 0, MEMORY_BYTES, (uintptr_t)memory};
	if (ioctl(machine, KVM_SET_TSS_ADDR, 0xfffbd000ul) < 0 || ioctl(machine, KVM_SET_USER_MEMORY_REGION, &region) < 0)
		fail("the memory");
	memcpy(memory + CODE, guest_code, guest_code_end - guest_code);
	*(uint64_t *)(memory + LEVEL4) = LEVEL3 | PRESENT_WRITABLE;
	*(uint64_t *)(memory + LEVEL3) = LEVEL2 | PRESENT_WRITABLE;
	uint64_t *level2 = (uint64_t *)(memory + LEVEL2), *level1 = (uint64_t *)(memory + LEVEL1);
	level2[0] = 0 | LARGE | PRESENT_WRITABLE;
	level2[1] = LEVEL1 | PRESENT_WRITABLE;
	for (int i = 0; i < 512; i++)
		level1[i] = (WINDOW + i * 0x1000ul) | PRESENT_WRITABLE;

	int vcpu = ioctl(machine, KVM_CREATE_VCPU, 0);
	if (vcpu < 0)
		fail("KVM_CREATE_VCPU");
	struct kvm_run *run = mmap(0, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	if (run == MAP_FAILED)
		fail("mmap of the vCPU");
	/* Long mode has to be in the vCPU's CPUID. */
	static union {
		struct kvm_cpuid2 cpuid;
		char space[sizeof(struct kvm_cpuid2) + 128 * sizeof(struct kvm_cpuid_entry2)];
	} features;
	features.cpuid.nent = 128;
	if (ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &features.cpuid) < 0 || ioctl(vcpu, KVM_SET_CPUID2, &features.cpuid) < 0)
		fail("CPUID");
	struct kvm_sregs registers;
	if (ioctl(vcpu, KVM_GET_SREGS, &registers) < 0)
		fail("KVM_GET_SREGS");
	struct kvm_segment code = {.limit = 0xffffffff, .selector = 8, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1};
	struct kvm_segment data = {.limit = 0xffffffff, .selector = 16, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1};
	registers.cs = code;
	registers.ds = registers.es = registers.fs = registers.gs = registers.ss = data;
	registers.cr3 = LEVEL4;
	registers.cr4 = 0x20;       /* physical address extension */
	registers.cr0 = 0x80010033; /* paging, write protection, protected mode */
	registers.efer = 0x500;     /* long mode, enabled and active */
	if (ioctl(vcpu, KVM_SET_SREGS, &registers) < 0)
		fail("KVM_SET_SREGS");
	struct kvm_regs start = {.rip = CODE, .rsp = STACK_TOP, .r8 = rounds, .rflags = 2};
	if (ioctl(vcpu, KVM_SET_REGS, &start) < 0)
		fail("KVM_SET_REGS");

	run_to_port(vcpu, run);
	long exits_before = exits();
	double before = seconds();
	run_to_port(vcpu, run);
	double after = seconds();
	long counted = exits() - exits_before;
	/* Each round adds 1 to each page of the window. */
	long sum = 0;
	for (int page = 0; page < 512; page++)
		sum += *(uint64_t *)(memory + WINDOW + page * 0x1000ul);
	if (sum != rounds * 256) {
		printf("FAILED the guest wrote %ld words, not %ld\n", sum, rounds * 256);
		return 1;
	}
	printf("round %.3f us\nexits %.3f a round\n", (after - before) / rounds * 1e6, (double)counted / rounds);
	return 0;
}
