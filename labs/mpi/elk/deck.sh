#!/bin/sh
# Elk: the ground state of an aluminum crystal with a basis of linearized augmented plane waves, its k-points
# distributed to four ranks. The result is the total energy of the last step.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in quick) points=2 steps=2 ;; *) points=8 steps=40 ;; esac
    sed -e "s/@points@/$points/g" -e "s/@steps@/$steps/" "$here/elk.in" > elk.in
    ;;
run) launch elk-lapw ;;
result) tail -n 1 TOTENERGY.OUT ;;
esac
