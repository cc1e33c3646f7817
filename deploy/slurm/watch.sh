#!/bin/bash
# Usage: watch.sh JOB
#
# Has the daemon look at what a job starts, as it starts it, and keeps what the job truly takes: the account of its
# processes each minute, the last one in $PAGEFOLD_JOBS/JOB.json. It ends with the job's cgroup, or after ten minutes
# without one. Nobody waits for it.
#
#   PAGEFOLD_BINARY  the program, `pagefold` of /usr/local/bin or /usr/bin
#   PAGEFOLD_JOBS    where it keeps things, /run/pagefold-jobs
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

# wait_for COMMAND...: what epilog.sh sends comes through meanwhile, as the shell would be deaf to it until the end of
# what it runs itself: epilog.sh takes the last account away, and none may come after it.
wait_for() {
    "$@" &
    wait $!
}

# slurm/uid_1000/job_7 with v1 of cgroups, slurmstepd.scope/job_7 below a slice with v2, with the node's name before
# slurmstepd or after slurm where Slurm was built for several on a machine, as Debian's is.
cgroup() { find /sys/fs/cgroup -maxdepth 6 -type d -name "job_$job" -path '*slurm*' -print -quit 2> /dev/null; }

# Accounts by the number of the job's processes, so that nothing depends on which hierarchy is mounted where.
account() {
    local -a of=()
    for pid in "$@"; do of+=(--pid "$pid"); done
    wait_for timeout 50 "$pagefold" account --by job --json "${of[@]}" > "$jobs/$job.new" 2> /dev/null
    # 3: a process ended meanwhile. Where slurmstepd alone was seen, between steps or at the end, it is no account.
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
        # Refused of who is small or not there yet: the daemon finds those by itself.
        [ -n "${known[$pid]:-}" ] || wait_for timeout 10 "$pagefold" enrol "$pid" > /dev/null 2>&1
        known[$pid]=1
    done
    [ ${#pids[@]} -eq 0 ] || account "${pids[@]}"
    wait_for sleep "${PAGEFOLD_PAUSE:-60}"
done
