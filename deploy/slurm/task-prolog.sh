#!/bin/bash
# TaskProlog of slurm.conf: runs as the user before each task. Slurm adds each line `export NAME=value` that it prints
# to the task's environment. It acts only for jobs that request it, as by `PAGEFOLD=user sbatch ...`:
#
#   PAGEFOLD=kernel  each program is enrolled in KSM from its start, as by `pagefold run`
#   PAGEFOLD=user    MPI programs merge in user space at their barriers, as by `pagefold run --engine user`, with the
#                    other ranks of their job on the node: the job is the domain
#
# A statically linked or setuid program starts without the library. The libraries are in $PAGEFOLD_LIBRARIES, else in
# /usr/local/lib/pagefold or /usr/lib/pagefold.

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
