"""Two instances of an SQLite database in memory, with equal content; one of them answers random look-ups.

A look-up follows the pointers of a B-tree in memory that is larger than the caches. The instances are started alike and
without randomized addresses, so that their memory has equal pointers, and equal pages, which ksmd may merge. Prints the
CPU time of a look-up, the huge pages of the process at its end, and how much of it is merged.
"""

import ctypes
import os
import resource
import sqlite3
import subprocess
import sys
import time

PR_SET_MEMORY_MERGE = 67
ROWS = int(os.environ.get("LAB_ROWS", "300000"))
LOOKUPS = int(os.environ.get("LAB_LOOKUPS", "60000"))
MERGE_SECONDS = float(os.environ.get("LAB_MERGE_SECONDS", "1"))
MAX_EXTRA_SECONDS = 10.0


def memory_kib(name):
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(name + ":")), 0)


def run_instances():
    """Starts one instance that waits, and one that answers."""
    # Inherited over exec (Linux 6.7).
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) != 0:
        sys.exit(f"PR_SET_MEMORY_MERGE: {os.strerror(ctypes.get_errno())}")
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = ["setarch", "--addr-no-randomize", sys.executable, __file__]
    waiting = subprocess.Popen([*command, "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    waiting.stdout.readline()
    try:
        sys.exit(subprocess.run([*command, "looks"], stdin=subprocess.DEVNULL, env=environment, check=False).returncode)
    finally:
        waiting.stdin.close()
        waiting.wait()


if len(sys.argv) == 1:
    run_instances()
database = sqlite3.connect(":memory:")
database.execute("PRAGMA cache_size = -1000000")
database.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, text TEXT)")
database.executemany("INSERT INTO entries VALUES (?, ?)", ((i * 7919 % ROWS, f"{i:0100d}") for i in range(ROWS)))
if sys.argv[1] == "waits":
    print("loaded", flush=True)
    sys.stdin.read()
    sys.exit()
# On a busy machine ksmd needs longer. The metric is CPU time, so the arms may wait for different times.
limit = time.monotonic() + MERGE_SECONDS
with open("/sys/kernel/mm/ksm/run", encoding="ascii") as file:
    if file.read().strip() == "1":
        limit += MAX_EXTRA_SECONDS
while time.monotonic() < limit and memory_kib("KSM") < memory_kib("Rss") / 2:
    time.sleep(0.1)

import random  # noqa: E402  (its state shall not be in the memory that is compared)

numbers = random.Random(1)
ids = [numbers.randrange(ROWS) for _ in range(LOOKUPS)]
start = resource.getrusage(resource.RUSAGE_SELF)
for i in ids:
    if database.execute("SELECT text FROM entries WHERE id = ?", (i,)).fetchone() is None:
        sys.exit(f"row {i} is missing")
stop = resource.getrusage(resource.RUSAGE_SELF)
seconds = stop.ru_utime + stop.ru_stime - start.ru_utime - start.ru_stime
print(f"lookup {seconds / LOOKUPS * 1e6:.4f} us")
# A metric must be above 0.
print(f"huge {memory_kib('AnonHugePages') + 4} KiB, merged {memory_kib('KSM')} KiB, resident {memory_kib('Rss')} KiB")
