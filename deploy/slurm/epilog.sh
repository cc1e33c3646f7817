#!/bin/bash
# Epilog of slurm.conf: runs as root on the node, after a job. It ends watch.sh and keeps the job's last account in
# $PAGEFOLD_LOG/JOB.json (/var/log/pagefold/jobs). It removes the files of the job's engine domain in /dev/shm, because
# no later job uses that name and would remove them. Nothing needs to be unenrolled: merged pages end with the job's
# processes. The script never fails, because Slurm drains a node whose epilog fails.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
trap 'exit 0' EXIT

[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || exit 0
jobs=${PAGEFOLD_JOBS:-/run/pagefold-jobs}
log=${PAGEFOLD_LOG:-/var/log/pagefold/jobs}

if [ -d /run/systemd/system ]; then
    timeout 10 systemctl stop "pagefold-job-$SLURM_JOB_ID.service"
elif pid=$(cat "$jobs/$SLURM_JOB_ID.pid"); then
    # Another process may have the number by now.
    if grep -qz watch.sh "/proc/$pid/cmdline" && kill -TERM "$pid"; then
        # Wait: it may be about to write an account.
        for ((tenth = 0; tenth < 20; tenth++)); do
            [ -e "$jobs/$SLURM_JOB_ID.pid" ] || break
            sleep 0.1
        done
    fi
fi < /dev/null > /dev/null 2>&1

# As the user, because the directory may contain arbitrary files of the user.
if [[ ${SLURM_JOB_UID:-} =~ ^[0-9]+$ ]]; then
    shopt -s nullglob
    domain=/dev/shm/pagefold-$SLURM_JOB_UID/mpi-$SLURM_JOB_ID
    left=("$domain" "$domain".node*)
    timeout 10 setpriv --reuid "$SLURM_JOB_UID" --regid "${SLURM_JOB_GID:-65534}" --clear-groups rm -rf -- "${left[@]}"
fi < /dev/null > /dev/null 2>&1

[ -s "$jobs/$SLURM_JOB_ID.json" ] || exit 0
umask 077
mkdir -p "$log" && mv "$jobs/$SLURM_JOB_ID.json" "$log/$SLURM_JOB_ID.json"
