#!/bin/sh
# GROMACS: molecular dynamics of water, each rank a quarter of the box. The result is the volume and the number of
# steps, because floating-point sums differ in their order from run to run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"
export GMX_MAXBACKUP=-1

case $1 in
prepare)
    case $2 in quick) box=4 steps=100 ;; *) box=10 steps=1200 ;; esac
    cp "$here/water.top" water.top
    sed -e "s/@steps@/$steps/" "$here/water.mdp" > water.mdp
    gmx -quiet solvate -cs spc216.gro -box $box $box $box -p water.top -o water.gro > prepared 2>&1
    gmx -quiet grompp -f water.mdp -c water.gro -p water.top -o water.tpr >> prepared 2>&1 || { cat prepared >&2; exit 1; }
    ;;
run) launch gmx_mpi mdrun -s water.tpr -deffnm water -ntomp 1 -reprod -notunepme -dlb no ;;
result) awk '/Step +Time/ { getline; print $1 } / Potential / { getline; print $1 }' water.log | tail -n 2 ;;
esac
