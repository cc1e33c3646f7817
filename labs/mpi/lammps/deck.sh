#!/bin/sh
# LAMMPS: a melting Lennard-Jones crystal, each rank a quarter of the box. Atoms move between ranks every 20 steps,
# which rewrites arrays that have the same value for all atoms. The result is the energy after the last step.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in
    quick) box=20 steps=40 ;;
    endless) box=40 steps=100000000 ;;
    *) box=60 steps=360 ;;
    esac
    sed -e "s/@box@/$box/g" -e "s/@steps@/$steps/" "$here/melt.lj" > melt.lj
    ;;
run) launch lmp -in melt.lj -log none ;;
result) awk '/^Loop time/ { print last } NF { last = $0 }' output ;;
esac
