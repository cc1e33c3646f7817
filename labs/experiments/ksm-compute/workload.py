"""Simulates collisions with Pythia, then walks along pointers, in memory that ksmd may merge.

Prints the CPU time of the two parts: `pythia SECONDS` and `walk SECONDS`. Both do the same work in each run.
"""

import ctypes
import os
import resource
import subprocess
import sys

PR_SET_MEMORY_MERGE = 67
EVENTS = int(os.environ.get("LAB_EVENTS", "60"))
WALK = sys.argv[1]


def cpu_seconds(who):
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


# Inherited by the pointer walk, also over exec (Linux 6.7).
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) != 0:
    sys.exit(f"PR_SET_MEMORY_MERGE: {os.strerror(ctypes.get_errno())}")

import pythia8mc  # noqa: E402  (its memory shall be mergeable)

generator = pythia8mc.Pythia("", False)
for line in ("Print:quiet = on", "Beams:eCM = 13000.", "HardQCD:all = on", "PhaseSpace:pTHatMin = 20.",
             "Random:setSeed = on", "Random:seed = 1"):
    generator.readString(line)
generator.init()
start = cpu_seconds(resource.RUSAGE_SELF)
tracks = 0
for _ in range(EVENTS):
    if generator.next():
        tracks += generator.event.size()
print(f"pythia {cpu_seconds(resource.RUSAGE_SELF) - start:.6f} s, {tracks} entries")
subprocess.run([WALK], check=True, stdout=subprocess.DEVNULL)
print(f"walk {cpu_seconds(resource.RUSAGE_CHILDREN):.6f} s")
