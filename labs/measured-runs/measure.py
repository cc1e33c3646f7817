#!/usr/bin/env python3
"""Measures runs of three short workloads, in turns, for the simulated campaigns of `pagefold_labs::campaigns`.

Prints CSV to standard output: one line per round, with the wall time and the CPU time of each workload in microseconds.
The workloads are the same in every round, so all differences between rounds are noise of the machine.

Usage: measure.py ROUNDS > runs.csv
"""
import os
import random
import resource
import subprocess
import sys
import tempfile
import time


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


rounds = int(sys.argv[1])
with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
    random.seed(1)
    data = os.path.join(folder, "data")
    numbers = os.path.join(folder, "numbers")
    with open(data, "wb") as file:
        file.write(random.randbytes(12 << 20))
    with open(numbers, "w") as file:
        file.writelines(f"{random.randrange(10**9)}\n" for _ in range(60_000))
    workloads = {
        # Compute: a hash of 12 MiB in memory.
        "hash": ["sha256sum", data],
        # Memory and compute: a numeric sort of 60,000 lines on one thread.
        "sort": ["sort", "--parallel=1", "-n", "-o", "/dev/null", numbers],
        # Kernel: 40 processes.
        "spawn": ["sh", "-c", "for i in $(seq 40); do /bin/true; done"],
    }
    environment = {**os.environ, "LC_ALL": "C"}
    print(",".join(f"{name}_wall_microseconds,{name}_cpu_microseconds" for name in workloads))
    for _ in range(rounds):
        times = []
        for command in workloads.values():
            cpu, start = cpu_seconds(), time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
            times += [round((time.perf_counter() - start) * 1e6), round((cpu_seconds() - cpu) * 1e6)]
        print(",".join(map(str, times)), flush=True)
