#!/bin/bash
# Usage: labs/slurm.sh BUILT
#
# Runs jobs under a Slurm of one node with the scripts of deploy/slurm and the programs in BUILT, and checks the
# results. Jobs are enrolled and accounted for, and get what they request. They neither fail nor drain the node if the
# daemon hangs, if there is no daemon, and if pagefold is not installed. Needs Slurm, munge and Open MPI with its
# compiler, and root.
#
# The cluster has its own configuration, key, ports and directory below /tmp, and is removed at the end. Jobs belong to
# the user `nobody`, and the daemon manages only that user's programs. The script takes the lock for KSM, and restores
# its settings. On a machine with both versions of cgroups it uses v1: Slurm 22.05 refuses v2 there.

set -uo pipefail
built=$(realpath "$1")
labs=$(cd "$(dirname "$0")" && pwd)
[ "$(id -u)" -eq 0 ] || { echo "skipped: needs root"; exit 0; }
ksm=/sys/kernel/mm/ksm
[ -w "$ksm/run" ] || { echo "skipped: this kernel has no KSM, or /sys is read-only"; exit 0; }
for program in slurmctld slurmd sbatch srun munged mpirun mpicc; do
    command -v "$program" > /dev/null || { echo "slurm: there is no $program"; exit 1; }
done

node=$(hostname -s)
work=$(mktemp -d /tmp/pagefold-slurm.XXXXXX)
chmod 755 "$work"
export SLURM_CONF=$work/slurm.conf
daemon=
job=0
failures=0

pass() { echo "PASS $*"; }
fail() {
    echo "FAIL $*"
    failures=$((failures + 1))
}

# check WHAT COMMAND...: passes if the command succeeds.
check() {
    local what=$1
    shift
    if "$@" > /dev/null 2>&1; then pass "$what"; else fail "$what"; fi
}

# comes SECONDS COMMAND...: whether the command succeeds within that time.
comes() {
    local end=$((SECONDS + $1))
    shift
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.3
    done
}

# A process that init has not reaped yet counts as ended.
gone() { ! grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2> /dev/null; }

# ended FILE: ends the process whose number is in FILE, and waits for its end.
ended() {
    local pid
    pid=$(cat "$1" 2> /dev/null) || return 0
    kill "$pid" 2> /dev/null
    comes 20 gone "$pid" || kill -KILL "$pid" 2> /dev/null
}

stop_daemon() {
    [ -n "$daemon" ] || return 0
    kill -CONT "$daemon"
    kill -TERM "$daemon"
    wait "$daemon"
    daemon=
}

settings() { (cd "$ksm" && grep -s . run pages_to_scan sleep_millisecs advisor_mode max_page_sharing smart_scan); }

cgroups() { find /sys/fs/cgroup -depth -type d -path '*slurm*' 2> /dev/null; }

finish() {
    stop_daemon
    scancel --user nobody > /dev/null 2>&1
    comes 20 idle
    for server in slurmd slurmctld munged; do ended "$work/$server.pid"; done
    cgroups | while read -r folder; do rmdir "$folder"; done 2> /dev/null
    rmdir /dev/shm/pagefold-65534 2> /dev/null
    if [ "$failures" -gt 0 ]; then
        for ((; job > 0; job--)); do rm -rf "/dev/shm/pagefold-65534/mpi-$job"*; done
        echo "the logs of the servers and jobs are in $work"
    else
        rm -rf "$work"
    fi
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

idle() { [ "$(sinfo --noheader --format=%T)" = idle ] && [ -z "$(squeue --noheader)" ]; }

# The lock of this script, shared with other tests.
exec 8> /run/pagefold-test.lock
flock 8
if pgrep -x slurmctld > /dev/null || pgrep -x slurmd > /dev/null; then
    echo "slurm: this machine already runs Slurm, which this test must not disturb"
    exit 1
fi
before=$(settings)

mkdir "$work"/{state,spool,lib,jobs}
install -d -m 777 "$work/out"
cp -r "$labs/../deploy/slurm" "$work/scripts"
cp "$built/pagefold-lab" "$work/"
cp "$built"/libpagefold_{preload,adopt}.so "$work/lib/"
mpicc -O2 -pthread -o "$work/safe" "$labs/run/safe.c" || exit 1

# Slurm runs its prolog and epilog with its own environment only.
for script in prolog epilog; do
    cat > "$work/$script" << END
#!/bin/bash
. "$work/site"
exec "$work/scripts/$script.sh"
END
    chmod 755 "$work/$script"
done

# site PAGEFOLD: sets which program the scripts find. That wrapper logs its arguments and exit status.
site() {
    cat > "$work/site" << END
export PAGEFOLD_BINARY=$1 PAGEFOLD_JOBS=$work/jobs PAGEFOLD_LOG=$work/kept PAGEFOLD_PAUSE=1
END
}
cat > "$work/pagefold" << END
#!/bin/bash
"$built/pagefold" "\$@"
status=\$?
[ "\$1" != enroll ] || echo "enroll \$2 \$status" >> "$work/asked"
exit \$status
END
chmod 755 "$work/pagefold"
: > "$work/asked"

cat > "$work/pagefold.toml" << END
[daemon]
cpu_rate = "80%"
cpu_burst = "60s"
max_cpu_seconds_per_mib = 10.0
[daemon.tracked]
users = ["nobody"]
END

cat > "$SLURM_CONF" << END
ClusterName=pagefold
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
KillWait=2
Prolog=$work/prolog
Epilog=$work/epilog
TaskProlog=$work/scripts/task-prolog.sh
PrologFlags=Alloc
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=1500 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP
END
version=1
[ ! -e /sys/fs/cgroup/cgroup.controllers ] || version=2
cat > "$work/cgroup.conf" << END
CgroupPlugin=cgroup/v$version
ConstrainCores=yes
ConstrainRAMSpace=yes
END
[ $version = 1 ] || [ -d /run/systemd/system ] || echo IgnoreSystemd=yes >> "$work/cgroup.conf"

(umask 077 && head -c 1024 /dev/urandom > "$work/munge.key")
munged --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munged.pid" \
    --log-file="$work/munged.log" --seed-file="$work/munge.seed" || exit 1
slurmctld && slurmd || exit 1
comes 30 idle || { fail "a Slurm of one node, with version $version of cgroups"; exit 1; }
pass "a Slurm of one node, with version $version of cgroups: $(slurmd -V)"

start_daemon() {
    "$built/pagefold" --config "$work/pagefold.toml" daemon --mode act > "$work/daemon.log" 2>&1 8>&- &
    daemon=$!
    comes 30 "$built/pagefold" status
}

# submit [NAME=VALUE...] -- SCRIPT: submits a job of the user nobody; its number is in $job.
submit() {
    local -a with=()
    while [ "$1" != -- ]; do
        with+=("$1")
        shift
    done
    job=$(cd "$work" && runuser -u nobody -- env "${with[@]}" sbatch --parsable --ntasks=2 --overcommit \
        --chdir="$work/out" --output="$work/out/%j.out" "$2")
    [ -n "$job" ] || { fail "Slurm accepts a job"; exit 1; }
}

# Two programs with 64 MiB each, half of it equal in both, until the file `enough-JOB` exists.
cat > "$work/twice" << END
#!/bin/bash
mkfifo in-\$SLURM_JOB_ID
for copy in 1 2; do "$work/pagefold-lab" mixture --mib 64 --duplicate-share 50% < in-\$SLURM_JOB_ID & done
exec 9> in-\$SLURM_JOB_ID
until [ -e enough-\$SLURM_JOB_ID ]; do sleep 0.2; done
exec 9>&-
wait
echo finished
END
cat > "$work/ranks" << END
#!/bin/bash
mpirun --oversubscribe -np 2 "$work/safe" 32 60
srun --mpi=pmix --ntasks=2 --overcommit "$work/safe" 32 60
echo finished
END

said() { grep -q "$1" "$work/out/$job.out"; }
targets() { sed -n 's/^READY pid=//p' "$work/out/$job.out"; }
running() { [ "$(targets | wc -l)" -eq 2 ]; }
enough() { touch "$work/out/enough-$job"; }
asked() { running && for pid in $(targets); do grep -qx "enroll $pid 0" "$work/asked" || return 1; done; }
mapped() { running && for pid in $(targets); do grep -q "$1" "/proc/$pid/maps" || return 1; done; }
told() { grep -qE "$1" "$work/jobs/$job.json"; }
shrunk() { [ "$(grep -cE '^ranks=2 shrunk=([5-9]|[1-9][0-9])$' "$work/out/$job.out")" -eq "$1" ]; }
# done_with STATE: the job ended in this state, its watcher has ended, no file of it is left, and the node is idle.
done_with() {
    comes 60 idle || return 1
    scontrol show job "$job" | grep -q "JobState=$1 " || return 1
    comes 5 left_nothing
}
left_nothing() {
    [ -z "$(ls -A "$work/jobs" 2> /dev/null)" ] && ! pgrep -f "$work/scripts/watch.sh" && \
        ! ls /dev/shm/pagefold-65534/mpi-"$job"*
}
kept() { grep -q "\"slurm:$job\"" "$work/kept/$job.json"; }
not_kept() { [ ! -e "$work/kept/$job.json" ]; }

site "$work/pagefold"
check "the daemon starts" start_daemon

submit -- "$work/twice"
check "a job starts" comes 60 running
check "the daemon manages the programs of the job" comes 30 asked
check "the daemon merges them, according to the account" comes 60 told '"ksm_pages": [1-9]'
enough
check "the job ends, and leaves nothing" done_with COMPLETED
check "the job's last account is kept" kept

submit PAGEFOLD=kernel PAGEFOLD_LIBRARIES="$work/lib" -- "$work/twice"
check "a job with PAGEFOLD=kernel starts" comes 60 running
check "the job's programs load the library" mapped libpagefold_preload.so
check "the daemon merges them, according to the account" comes 60 told '"ksm_pages": [1-9]'
scancel "$job"
check "the canceled job leaves nothing" done_with CANCELLED
check "the job's last account is kept" kept

submit PAGEFOLD=user PAGEFOLD_LIBRARIES="$work/lib" -- "$work/ranks"
check "a job with PAGEFOLD=user ends, and leaves nothing" done_with COMPLETED
check "ranks of mpirun and of srun were merged" shrunk 2
submit -- "$work/ranks"
check "the same job without PAGEFOLD ends, and leaves nothing" done_with COMPLETED
check "nothing was merged" shrunk 0

kill -STOP "$daemon"
submit -- "$work/twice"
check "a job starts while the daemon hangs" comes 60 running
enough
check "the job ends, and leaves nothing" done_with COMPLETED
stop_daemon
check "the daemon ends, and KSM's settings are as before" test "$before" = "$(settings)"

submit -- "$work/twice"
check "a job starts without a daemon" comes 60 running
check "the job is accounted for" comes 60 told "\"slurm:$job\""
enough
check "the job ends, and leaves nothing" done_with COMPLETED
check "the job's last account is kept" kept

site "$work/nothing"
submit PAGEFOLD=user PAGEFOLD_LIBRARIES="$work/nothing" -- "$work/twice"
check "a job starts without pagefold" comes 60 running
enough
check "the job ends, and leaves nothing" done_with COMPLETED
check "the job has no account" not_kept

mv "$work/scripts" "$work/gone"
mkdir "$work/scripts"
cp "$work"/gone/*log.sh "$work/scripts/"
submit -- "$work/twice"
check "a job starts without watch.sh" comes 60 running
enough
check "the job ends, and leaves nothing" done_with COMPLETED

check "the node was never drained" test -z "$(grep -iE 'drain|set to down' "$work/slurmctld.log")"
echo "$failures checks failed"
[ "$failures" -eq 0 ]
