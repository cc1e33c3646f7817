#!/bin/bash
# Usage: labs/slurm.sh BUILT
#
# Runs jobs under a Slurm of one node with the scripts of deploy/slurm and the programs in BUILT, and sees what they do:
# jobs are enrolled and accounted for, get what they ask for, and neither fail nor drain the node when the daemon hangs,
# when there is none, and when there is no pagefold at all. Needs Slurm, munge and Open MPI with its compiler, and root.
#
# The cluster has its own configuration, key, ports and folder below /tmp, and is gone in the end. Jobs belong to
# `nobody`, and the daemon manages that user's programs alone; KSM is nobody else's meanwhile, and its settings come
# back. On a machine with both versions of cgroups it is the first: Slurm 22.05 refuses the second there.

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

# check WHAT COMMAND...: whether it succeeds.
check() {
    local what=$1
    shift
    if "$@" > /dev/null 2>&1; then pass "$what"; else fail "$what"; fi
}

# comes SECONDS COMMAND...: whether it succeeds within that time.
comes() {
    local end=$((SECONDS + $1))
    shift
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.3
    done
}

# What init has not waited for yet has ended all the same.
gone() { ! grep -q '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status" 2> /dev/null; }

# ended FILE: whether the process whose number it holds has ended, which it is told to.
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
        echo "what the servers and jobs said is in $work"
    else
        rm -rf "$work"
    fi
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

idle() { [ "$(sinfo --noheader --format=%T)" = idle ] && [ -z "$(squeue --noheader)" ]; }

# One's own, and other tests' turn.
exec 8> /run/pagefold-test.lock
flock 8
if pgrep -x slurmctld > /dev/null || pgrep -x slurmd > /dev/null; then
    echo "slurm: there is a Slurm on this machine, which this must not disturb"
    exit 1
fi
before=$(settings)

mkdir "$work"/{state,spool,lib,jobs}
install -d -m 777 "$work/out"
cp -r "$labs/../deploy/slurm" "$work/scripts"
cp "$built/pagefold-lab" "$work/"
cp "$built"/libpagefold_{preload,adopt}.so "$work/lib/"
mpicc -O2 -pthread -o "$work/safe" "$labs/run/safe.c" || exit 1

# Slurm gives its prolog and epilog no other environment than its own.
for script in prolog epilog; do
    cat > "$work/$script" << END
#!/bin/bash
. "$work/site"
exec "$work/scripts/$script.sh"
END
    chmod 755 "$work/$script"
done

# site PAGEFOLD: which program the scripts find. That one writes down what it is asked and how that ended.
site() {
    cat > "$work/site" << END
export PAGEFOLD_BINARY=$1 PAGEFOLD_JOBS=$work/jobs PAGEFOLD_LOG=$work/kept PAGEFOLD_PAUSE=1
END
}
cat > "$work/pagefold" << END
#!/bin/bash
"$built/pagefold" "\$@"
status=\$?
[ "\$1" != enrol ] || echo "enrol \$2 \$status" >> "$work/asked"
exit \$status
END
chmod 755 "$work/pagefold"
: > "$work/asked"

cat > "$work/pagefold.toml" << END
[daemon]
cpu = "80%"
burst = "60s"
price = 10.0
[daemon.only]
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

# submit [NAME=VALUE...] -- SCRIPT: a job of nobody's; its number is in $job.
submit() {
    local -a with=()
    while [ "$1" != -- ]; do
        with+=("$1")
        shift
    done
    job=$(cd "$work" && runuser -u nobody -- env "${with[@]}" sbatch --parsable --ntasks=2 --overcommit \
        --chdir="$work/out" --output="$work/out/%j.out" "$2")
    [ -n "$job" ] || { fail "a job is taken"; exit 1; }
}

# Two programs with 64 MiB each, half of that the same in both, until somebody says that it is enough.
cat > "$work/twice" << END
#!/bin/bash
mkfifo in-\$SLURM_JOB_ID
for copy in 1 2; do "$work/pagefold-lab" mixture --mib 64 --duplicate 50% < in-\$SLURM_JOB_ID & done
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
asked() { running && for pid in $(targets); do grep -qx "enrol $pid 0" "$work/asked" || return 1; done; }
mapped() { running && for pid in $(targets); do grep -q "$1" "/proc/$pid/maps" || return 1; done; }
told() { grep -qE "$1" "$work/jobs/$job.json"; }
shrunk() { [ "$(grep -cE '^ranks=2 shrunk=([5-9]|[1-9][0-9])$' "$work/out/$job.out")" -eq "$1" ]; }
# done_with HOW: it ended so, nobody watches it, nothing of it stays, the node takes the next one.
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
check "the daemon takes what it starts" comes 30 asked
check "and merges it, as its account tells" comes 60 told '"ksm_pages": [1-9]'
enough
check "it ends, and leaves nothing" done_with COMPLETED
check "its last account is kept" kept

submit PAGEFOLD=kernel PAGEFOLD_LIBRARIES="$work/lib" -- "$work/twice"
check "a job with PAGEFOLD=kernel starts" comes 60 running
check "its programs have the library" mapped libpagefold_preload.so
check "they are merged, as its account tells" comes 60 told '"ksm_pages": [1-9]'
scancel "$job"
check "cancelled, it leaves nothing" done_with CANCELLED
check "its last account is kept" kept

submit PAGEFOLD=user PAGEFOLD_LIBRARIES="$work/lib" -- "$work/ranks"
check "a job with PAGEFOLD=user ends, and leaves nothing" done_with COMPLETED
check "its ranks were merged, by mpirun and by srun" shrunk 2
submit -- "$work/ranks"
check "the same without ends" done_with COMPLETED
check "and nothing was merged" shrunk 0

kill -STOP "$daemon"
submit -- "$work/twice"
check "a job starts while the daemon hangs" comes 60 running
enough
check "it ends, and leaves nothing" done_with COMPLETED
stop_daemon
check "the daemon ends, and KSM's settings are as before" test "$before" = "$(settings)"

submit -- "$work/twice"
check "a job starts without a daemon" comes 60 running
check "it is accounted for" comes 60 told "\"slurm:$job\""
enough
check "it ends, and leaves nothing" done_with COMPLETED
check "its last account is kept" kept

site "$work/nothing"
submit PAGEFOLD=user PAGEFOLD_LIBRARIES="$work/nothing" -- "$work/twice"
check "a job starts without pagefold" comes 60 running
enough
check "it ends, and leaves nothing" done_with COMPLETED
check "there is no account of it" not_kept

mv "$work/scripts" "$work/gone"
mkdir "$work/scripts"
cp "$work"/gone/*log.sh "$work/scripts/"
submit -- "$work/twice"
check "a job starts without watch.sh" comes 60 running
enough
check "it ends, and leaves nothing" done_with COMPLETED

check "the node was never drained" test -z "$(grep -iE 'drain|set to down' "$work/slurmctld.log")"
echo "$failures checks failed"
[ "$failures" -eq 0 ]
