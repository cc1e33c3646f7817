#!/bin/bash
# Compares the flow along a line with exact solutions. Runs tiny problems in all modes, with one and three processes,
# with and without MPI. Compares the results bit by bit, and checks masses, energy, momentum, and the memory use of each
# mode. check.sh LIB_DIR, which has libpagefold.so.
#
# Needs Open MPI, and a kernel with KSM for the mode `ksm` (otherwise those runs are skipped and counted). It does not
# wait for merges of the kernel, so that it needs nothing from ksmd.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -eq 1 ] || { echo "usage: check.sh LIB_DIR" >&2; exit 2; }
work=$(mktemp -d /tmp/hera-check.XXXXXX)
domains=$(mktemp -d /dev/shm/hera-check.XXXXXX)
trap 'rm -rf "$work" "$domains"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PAGEFOLD_RUNTIME=$domains
failed=0 skipped=0

wrong() { echo "check: $*" >&2; failed=1; }
skip() { echo "skipped: $*"; skipped=$((skipped + 1)); }
value() { grep -o "\b$2=[^ ]*" "$1" | tail -n 1 | cut -d= -f2; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < b) }'; }

has_mpi=1
if ! command -v mpicxx > /dev/null; then
    has_mpi=0
    MPICXX=true
    export MPICXX
    skip "runs with MPI: no mpicxx"
fi
"$here/build.sh" "$work" "$1"

# run OUTPUT COMMAND...: with a time limit far above what the command takes.
run() {
    local output=$1
    shift
    timeout 300 "$@" > "$work/$output" 2> "$work/errors" || { wrong "$* failed: $(cat "$work/errors")"; return 1; }
}

# same OUTPUT OTHER: whether both have the same cells.
same() {
    local one other
    one=$(value "$work/$1" checksum) other=$(value "$work/$2" checksum)
    [ -n "$one" ] && [ "$one" = "$other" ] || wrong "$1 has $one, $2 has $other"
}

run exact "$work/riemann" || cat "$work/exact"

tiny="--roots 3 --levels 2 --spheres 3 --steps 8 --sample 0 --max-slowdown -1"
modes="plain blocks engine"
if [ -e /sys/kernel/mm/ksm ]; then modes="$modes ksm"; else skip "mode ksm: this kernel has no KSM"; fi
run reference "$work/hera" $tiny --ranks 2 || exit 1
for ranks in 1 3; do
    for mode in $modes; do
        run "own-$ranks-$mode" "$work/hera" $tiny --ranks $ranks --memory $mode || continue
        same reference "own-$ranks-$mode"
        [ $has_mpi = 1 ] || continue
        mpi="mpirun -np $ranks --oversubscribe --bind-to none"
        run "mpi-$ranks-$mode" $mpi "$work/hera-mpi" $tiny --memory $mode || continue
        same reference "mpi-$ranks-$mode"
    done
    for mode in blocks engine; do
        plain=$(value "$work/own-$ranks-plain" mean_mib) less=$(value "$work/own-$ranks-$mode" mean_mib)
        below "$less" "$plain" || wrong "$ranks ranks use $less MiB with $mode, $plain with plain"
    done
done
[ "$(value "$work/reference" regridded)" -gt 0 ] || wrong "nothing was coarsened"

# Other code paths: slow functions, and other choices of written cells.
every="--writes all --memory"
for option in "--slow" "--writes all" "--writes changed" "$every blocks" "$every engine"; do
    run other "$work/hera" $tiny $option && same reference other
done

# The runs above coarsen blocks. These runs refine blocks in front of a shock, and move them to other ranks.
moving="--roots 4 --levels 2 --spheres 0 --mach 8 --steps 32"
run moving-1 "$work/hera" $moving --ranks 1
run moving-3 "$work/hera" $moving --ranks 3 --memory blocks
same moving-1 moving-3
[ "$(value "$work/moving-1" regridded)" -gt 0 ] || wrong "the shock was not followed"

# Every run has checked masses and energy; momentum is conserved where there are no walls.
run periodic "$work/hera" --roots 2 --levels 2 --spheres 2 --steps 30 --periodic
below "$(value "$work/periodic" momentum)" 1e-12 || wrong "momentum is not conserved"

[ $failed = 0 ] && echo "check: all results are correct, $skipped skipped"
exit $failed
