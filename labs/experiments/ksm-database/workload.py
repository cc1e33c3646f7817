"""Boots two guests without KVM, each with PostgreSQL and equal tables in memory; pgbench looks rows up in one of them.

A look-up follows the pointers of a B-tree. QEMU asks for huge pages for the memory of guests, and permits ksmd to merge
it. ksmd, if it runs, has time to merge the guests before the look-ups. Prints the CPU time of the measured guest's QEMU
and the rate, the huge pages that its memory has before and after, how much of it is merged, and how many huge pages the
host has split meanwhile.

usage: workload.py WORK_DIRECTORY
"""

import os
import subprocess
import sys
import time

MEMORY_MIB = 768
TRANSACTIONS = int(os.environ.get("LAB_TRANSACTIONS", "3000"))
# Without ksmd the guests wait for the shorter time.
WAIT_SECONDS = 2.0
MERGE_SECONDS = float(os.environ.get("LAB_MERGE_SECONDS", "30"))
OPTIONS = "console=ttyS0 mitigations=off no_timer_check panic=-1 quiet cryptomgr.notests tsc=reliable"


class Guest:
    """A guest with its serial line."""

    def __init__(self, work):
        command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-M", "pc,mem-merge=on", "-nodefaults"]
        command += ["-no-user-config", "-display", "none", "-no-reboot", "-nic", "none", "-cpu", "max", "-smp", "1"]
        command += ["-m", f"{MEMORY_MIB}M", "-kernel", ".cache/fleet/vmlinuz", "-initrd", f"{work}/ksm-database.cpio"]
        command += ["-append", f"{OPTIONS} lab_transactions={TRANSACTIONS}", "-serial", "stdio"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_for(self, wanted):
        """The rest of the line of the guest that begins so."""
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if line.startswith(wanted):
                return line[len(wanted) :].strip()
        sys.exit(f"the guest did not print {wanted}: {''.join(seen)}")

    def write(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self):
        self.process.kill()
        self.process.wait()

    def memory_kib(self, name):
        return read_number(f"/proc/{self.process.pid}/smaps_rollup", name + ":")

    def cpu_seconds(self):
        # Fields 14 and 15; the name, field 2, has no space.
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            words = file.read().split()
        return (int(words[13]) + int(words[14])) / os.sysconf("SC_CLK_TCK")


def read_number(path, name):
    with open(path, encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.split()[0] == name), 0)


def is_ksmd_running():
    with open("/sys/kernel/mm/ksm/run", encoding="ascii") as file:
        return file.read().strip() == "1"


def wait_for_merging(guest):
    """Until a second has merged less than one percent of the guest's memory, which has begun to merge."""
    time.sleep(WAIT_SECONDS)
    limit = time.monotonic() + MERGE_SECONDS
    merged = 0
    while is_ksmd_running() and time.monotonic() < limit:
        time.sleep(1)
        before, merged = merged, guest.memory_kib("KSM")
        if merged > guest.memory_kib("Rss") / 4 and merged - before < MEMORY_MIB << 10 >> 7:
            return


def measure(measured, other):
    splits = read_number("/proc/vmstat", "thp_split_page")
    for guest in (measured, other):
        guest.wait_for("LOADED")
    huge = measured.memory_kib("AnonHugePages")
    wait_for_merging(measured)
    measured.write("go")
    measured.wait_for("STARTED")
    start = measured.cpu_seconds()
    measured.wait_for("ENDED")
    seconds = measured.cpu_seconds() - start
    rate = measured.wait_for("transactions ")
    print(f"transactions {rate}")
    print(f"transaction {seconds / TRANSACTIONS * 1e6:.2f} us of CPU")
    # A metric must be above 0.
    print(f"AnonHugePages {measured.memory_kib('AnonHugePages') + 4} KiB, before {huge} KiB")
    print(f"merged {measured.memory_kib('KSM')} KiB of {measured.memory_kib('Rss')} KiB")
    print(f"thp_split_page {read_number('/proc/vmstat', 'thp_split_page') - splits + 1}")


def main():
    guests = [Guest(sys.argv[1]), Guest(sys.argv[1])]
    try:
        measure(*guests)
    finally:
        for guest in guests:
            guest.end()


main()
