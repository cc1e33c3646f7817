#!/bin/bash
# TaskProlog of slurm.conf: as the user before each task. What it prints as `export NAME=value` is in the task's
# environment. It does something for jobs that ask for it, as by `PAGEFOLD=user sbatch ...`:
#
#   PAGEFOLD=kernel  each program is enrolled in KSM from its start, as by `pagefold run`
#   PAGEFOLD=user    MPI programs merge in user space at their barriers, as by `pagefold run --engine user`, with the
#                    other ranks of their job on the node: the job is the domain
#
# A program that is statically linked or set-uid starts as without it. The libraries are looked for in
# $PAGEFOLD_LIBRARIES, else /usr/local/lib/pagefold and /usr/lib/pagefold.

case ${PAGEFOLD:-} in
kernel) name=libpagefold_preload.so ;;
user) name=libpagefold_adopt.so ;;
*) exit 0 ;;
esac
folders=(/usr/local/lib/pagefold /usr/lib/pagefold)
[ -z "${PAGEFOLD_LIBRARIES:-}" ] || folders=("$PAGEFOLD_LIBRARIES")
library=
for folder in "${folders[@]}"; do
    [ ! -r "$folder/$name" ] || { library=$folder/$name; break; }
done
[ -n "$library" ] || exit 0

[ "$PAGEFOLD" != user ] || echo "export PAGEFOLD_DOMAIN=mpi-${SLURM_JOB_ID:-$$}"
echo "export LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}"
exit 0
