#!/bin/sh
# CP2K: path-integral molecular dynamics of a water molecule, DFT on Gaussians and plane waves (GPW). Each rank computes
# one of the four beads alone: it has all grid tables, equal to those of the other ranks, and its own fields. The result
# is the energy after the last steps.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in quick) box=5 cutoff=120 steps=1 ;; *) box=10 cutoff=280 steps=4 ;; esac
    sed -e "s/@box@/$box/g" -e "s/@cutoff@/$cutoff/" -e "s/@steps@/$steps/" "$here/water.inp" > water.inp
    ;;
run) launch cp2k -i water.inp ;;
result) grep '^ PINT| Total energy' output | tail -n 3 ;;
esac
