#!/bin/bash
# Usage: watch.sh JOB
#
# Asks the daemon to scan each process of a job when it starts. Each minute it writes the account of the job's
# processes; the last account stays in $PAGEFOLD_JOBS/JOB.json. It ends with the job's cgroup, or after ten minutes
# without one. No other script waits for it.
#
#   PAGEFOLD_BINARY  the program, `pagefold` of /usr/local/bin or /usr/bin
#   PAGEFOLD_JOBS    the directory of its files, /run/pagefold-jobs
#   PAGEFOLD_PAUSE   seconds between two accounts, 60

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
job=$1
pagefold=${PAGEFOLD_BINARY:-pagefold}
jobs=${PAGEFOLD_JOBS:-/run/pagefold-jobs}
umask 077
mkdir -p "$jobs"
echo $$ > "$jobs/$job.pid"
trap 'rm -f "$jobs/$job.pid" "$jobs/$job.new"' EXIT
trap 'kill $! 2> /dev/null; exit 0' TERM

# wait_for COMMAND...: run a command in the background and wait for it, so that the shell handles epilog.sh's signal at
# once and not after the command. epilog.sh moves the last account away, and none may follow.
wait_for() {
    "$@" &
    wait $!
}

# The job's cgroup: slurm/uid_1000/job_7 with cgroups v1, slurmstepd.scope/job_7 below a slice with v2. If Slurm was
# built for several nodes on a machine, as in Debian, the node's name is before slurmstepd or after slurm.
cgroup() { find /sys/fs/cgroup -maxdepth 6 -type d -name "job_$job" -path '*slurm*' -print -quit 2> /dev/null; }

# Selects the job's processes by pid, so that the account is independent of the mounted cgroup hierarchies.
account() {
    local -a of=()
    for pid in "$@"; do of+=(--pid "$pid"); done
    wait_for timeout 50 "$pagefold" account --by job --json "${of[@]}" > "$jobs/$job.new" 2> /dev/null
    # 3: a process ended meanwhile. An account of slurmstepd alone, between steps or at the end, is discarded.
    case $? in 0 | 3) ! grep -qF "\"slurm:$job\"" "$jobs/$job.new" || mv "$jobs/$job.new" "$jobs/$job.json" ;; esac
}

folder=
for ((second = 0; second < 600; second++)); do
    folder=$(cgroup)
    [ -z "$folder" ] || break
    wait_for sleep 1
done

declare -A known
while [ -n "$folder" ] && [ -d "$folder" ]; do
    mapfile -t pids < <(find "$folder" -name cgroup.procs -exec cat {} + 2> /dev/null | sort -un)
    for pid in "${pids[@]}"; do
        # The daemon refuses small or unknown processes; it finds these itself later.
        [ -n "${known[$pid]:-}" ] || wait_for timeout 10 "$pagefold" enroll "$pid" > /dev/null 2>&1
        known[$pid]=1
    done
    [ ${#pids[@]} -eq 0 ] || account "${pids[@]}"
    wait_for sleep "${PAGEFOLD_PAUSE:-60}"
done
