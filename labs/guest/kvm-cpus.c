/* kvm-cpus COUNT [hold]: a virtual machine with COUNT vCPUs whose first one starts all others by INIT and SIPI, as the
 * firmware and the kernel of a PC do. It prints CPUS N once N vCPUs have run guest code. With `hold` it keeps the
 * machine until standard input ends. It needs only /dev/kvm, and no memory of the guest beyond 64 KiB.
 *
 * The guest runs in real mode. Its data segment has a limit of 4 GiB, so that it reaches the local APIC. */
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define MEMORY_BYTES 0x10000
/* Where the code of the first vCPU and of the others is; the latter is the page of SIPI vector 8. */
#define FIRST_CODE 0x1000
#define OTHER_CODE 0x8000
#define MAX_CPUS 16

extern char first_code[], first_code_end[], other_code[], other_code_end[];
__asm__(".section .rodata\n.code16\n"
        "first_code:\n"
        "  movl $0xfee00000, %ebx\n"
        "  movl $0x1ff, 0xf0(%ebx)\n"    /* enable the local APIC */
        "  movl $0xc4500, 0x300(%ebx)\n" /* INIT to all others */
        "  movl $0xc4608, 0x300(%ebx)\n" /* SIPI to all others, vector 8 */
        "1: pause\n"
        "  movl %ds:0x900, %eax\n"
        "  cmpl %ds:0x904, %eax\n"
        "  jne 1b\n"
        "  outb %al, $0x10\n"
        "2: hlt\n"
        "  jmp 2b\n"
        "first_code_end:\n"
        "other_code:\n"
        "  xorw %ax, %ax\n"
        "  movw %ax, %ds\n"
        "  lock incl %ds:0x900\n"
        "1: hlt\n"
        "  jmp 1b\n"
        "other_code_end:\n"
        ".code64\n.text\n");

static void fail(const char *what)
{
    printf("FAILED %s: %s\n", what, strerror(errno));
    exit(1);
}

static void *run_vcpu(void *argument)
{
    int vcpu = (int)(intptr_t)argument;
    while (ioctl(vcpu, KVM_RUN, 0) == 0 || errno == EINTR || errno == EAGAIN)
        ;
    return 0;
}

int main(int count, char **arguments)
{
    setbuf(stdout, 0);
    int cpus = count > 1 ? atoi(arguments[1]) : 1;
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
    if (cpus < 1 || cpus > MAX_CPUS || kvm < 0)
        fail("open /dev/kvm");
    int machine = ioctl(kvm, KVM_CREATE_VM, 0);
    if (machine < 0)
        fail("KVM_CREATE_VM");
    char *memory = mmap(0, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct kvm_userspace_memory_region region = {0, 0, 0, MEMORY_BYTES, (uintptr_t)memory};
    if (ioctl(machine, KVM_CREATE_IRQCHIP, 0) < 0 || ioctl(machine, KVM_SET_USER_MEMORY_REGION, &region) < 0)
        fail("the machine");
    memcpy(memory + FIRST_CODE, first_code, first_code_end - first_code);
    memcpy(memory + OTHER_CODE, other_code, other_code_end - other_code);
    *(uint32_t *)(memory + 0x904) = cpus - 1;
    int vcpus[MAX_CPUS];
    for (int i = 0; i < cpus; i++)
        if ((vcpus[i] = ioctl(machine, KVM_CREATE_VCPU, i)) < 0)
            fail("KVM_CREATE_VCPU");
    struct kvm_sregs sregs;
    struct kvm_regs regs = {.rip = FIRST_CODE, .rflags = 2};
    if (ioctl(vcpus[0], KVM_GET_SREGS, &sregs) < 0)
        fail("KVM_GET_SREGS");
    sregs.cs.base = sregs.cs.selector = 0;
    sregs.ds.base = sregs.ds.selector = 0;
    sregs.ds.limit = 0xffffffff;
    sregs.ds.g = 1;
    if (ioctl(vcpus[0], KVM_SET_SREGS, &sregs) < 0 || ioctl(vcpus[0], KVM_SET_REGS, &regs) < 0)
        fail("the registers");
    struct kvm_run *run = mmap(0, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpus[0], 0);
    for (int i = 1; i < cpus; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, run_vcpu, (void *)(intptr_t)vcpus[i]);
    }
    while (ioctl(vcpus[0], KVM_RUN, 0) == 0 && run->exit_reason != KVM_EXIT_IO)
        ;
    if (run->exit_reason != KVM_EXIT_IO)
        fail("KVM_RUN");
    printf("CPUS %u\n", *(uint32_t *)(memory + 0x900) + 1);
    char byte;
    if (count > 2)
        while (read(0, &byte, 1) > 0)
            ;
    return 0;
}
