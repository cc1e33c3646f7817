#!/bin/sh
# Quantum ESPRESSO: the ground state of silicon in a cell of eight atoms, its k-points dealt out to four pools, so that
# each rank has tables of its own that are equal to the others'. The result is the total energy.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in quick) cutoff=12 points=2 ;; *) cutoff=32 points=4 ;; esac
    sed -e "s/@cutoff@/$cutoff/" -e "s/@points@/$points/g" "$here/silicon.in" > silicon.in
    ;;
run) launch pw.x -nk 4 -in silicon.in ;;
result) grep '^!' output ;;
esac
