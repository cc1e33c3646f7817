#!/bin/sh
# Quantum ESPRESSO: the ground state of a lattice of silane molecules, its k-points distributed to four pools. So each
# rank has its own tables, equal to those of the other ranks. The result is the total energy.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in quick) box=12 cutoff=20 points=2 ;; *) box=20 cutoff=60 points=4 ;; esac
    sed -e "s/@box@/$box/" -e "s/@cutoff@/$cutoff/" -e "s/@points@/$points/g" "$here/silane.in" > silane.in
    ;;
run) launch pw.x -nk 4 -in silane.in ;;
result) grep '^!' output ;;
esac
