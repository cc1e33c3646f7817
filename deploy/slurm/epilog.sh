#!/bin/bash
# Epilog of slurm.conf: as root on the node, after a job. Ends watch.sh, keeps the job's last account in
# $PAGEFOLD_LOG/JOB.json (/var/log/pagefold/jobs), and removes what a domain of the job's leaves in /dev/shm: no other
# job has that name, so that nobody would come to tidy up. There is nothing to withdraw: what was merged went with the
# job's processes. It never fails: an epilog that does drains the node.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
trap 'exit 0' EXIT

[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || exit 0
jobs=${PAGEFOLD_JOBS:-/run/pagefold-jobs}
log=${PAGEFOLD_LOG:-/var/log/pagefold/jobs}

if [ -d /run/systemd/system ]; then
    timeout 10 systemctl stop "pagefold-job-$SLURM_JOB_ID.service"
elif pid=$(cat "$jobs/$SLURM_JOB_ID.pid"); then
    # Its number may be another's by now.
    if grep -qz watch.sh "/proc/$pid/cmdline" && kill -TERM "$pid"; then
        # It may be just about to put an account there.
        for ((tenth = 0; tenth < 20; tenth++)); do
            [ -e "$jobs/$SLURM_JOB_ID.pid" ] || break
            sleep 0.1
        done
    fi
fi < /dev/null > /dev/null 2>&1

# As the user, who may have put anything there.
if [[ ${SLURM_JOB_UID:-} =~ ^[0-9]+$ ]]; then
    shopt -s nullglob
    domain=/dev/shm/pagefold-$SLURM_JOB_UID/mpi-$SLURM_JOB_ID
    left=("$domain" "$domain".node*)
    timeout 10 setpriv --reuid "$SLURM_JOB_UID" --regid "${SLURM_JOB_GID:-65534}" --clear-groups rm -rf -- "${left[@]}"
fi < /dev/null > /dev/null 2>&1

[ -s "$jobs/$SLURM_JOB_ID.json" ] || exit 0
umask 077
mkdir -p "$log" && mv "$jobs/$SLURM_JOB_ID.json" "$log/$SLURM_JOB_ID.json"
