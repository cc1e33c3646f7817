#!/bin/bash
# TaskProlog of slurm.conf: as the user before each task. What it prints as `export NAME=value` is in the task's
# environment. It does something for jobs that ask for it, as by `PAGEFOLD=user sbatch ...`:
#
#   PAGEFOLD=kernel  each program is enrolled in KSM from its start, as by `pagefold run`
#   PAGEFOLD=user    MPI programs merge in user space at their barriers, as by `pagefold run --engine user`, with the
#                    other ranks of their job on the node: the job is the domain
#
# A program that is statically linked or set-uid starts as without it.

libraries=${PAGEFOLD_LIBRARIES:-/usr/lib/pagefold}
case ${PAGEFOLD:-} in
kernel) library=$libraries/libpagefold_preload.so ;;
user) library=$libraries/libpagefold_adopt.so ;;
*) exit 0 ;;
esac
[ -r "$library" ] || exit 0

[ "$PAGEFOLD" != user ] || echo "export PAGEFOLD_DOMAIN=mpi-${SLURM_JOB_ID:-$$}"
echo "export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}"
exit 0
