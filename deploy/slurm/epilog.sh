#!/bin/bash
# Epilog of slurm.conf: as root on the node, after a job. Ends watch.sh and keeps the job's last account in
# $PAGEFOLD_LOG/JOB.json. There is nothing to withdraw: what was merged went with the job's processes. It never fails: an
# epilog that does drains the node.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
trap 'exit 0' EXIT

[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || exit 0
jobs=${PAGEFOLD_JOBS:-/run/pagefold-jobs}
log=${PAGEFOLD_LOG:-/var/log/pagefold/jobs}

if [ -d /run/systemd/system ]; then
    timeout 10 systemctl stop "pagefold-job-$SLURM_JOB_ID.service"
elif pid=$(cat "$jobs/$SLURM_JOB_ID.pid"); then
    # Its number may be another's by now.
    grep -qz watch.sh "/proc/$pid/cmdline" && kill -TERM "$pid"
fi < /dev/null > /dev/null 2>&1

[ -s "$jobs/$SLURM_JOB_ID.json" ] || exit 0
umask 077
mkdir -p "$log" && mv "$jobs/$SLURM_JOB_ID.json" "$log/$SLURM_JOB_ID.json"
