#!/bin/bash
# Prolog of slurm.conf: runs as root on the node, before the first step of a job. It starts watch.sh, which watches the
# job until epilog.sh. The script never fails, because Slurm drains a node whose prolog fails.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
trap 'exit 0' EXIT

[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || exit 0
watch=$(dirname "$(readlink -f "$0")")/watch.sh

# In a separate unit or session, because slurmd kills the process group of a prolog. watch.sh must have started before
# the prolog ends: `setsid --fork` does not wait for that.
if [ -d /run/systemd/system ]; then
    given=()
    for name in PAGEFOLD_BINARY PAGEFOLD_JOBS PAGEFOLD_PAUSE; do given+=("--setenv=$name=${!name:-}"); done
    timeout 10 systemd-run --quiet --collect --unit="pagefold-job-$SLURM_JOB_ID" --property=Nice=10 "${given[@]}" \
        "$watch" "$SLURM_JOB_ID"
else
    setsid --wait sh -c '"$@" &' sh nice -n 10 "$watch" "$SLURM_JOB_ID"
fi < /dev/null > /dev/null 2>&1
