#!/bin/sh
# ABINIT: the ground state of a silicon crystal, eight atoms, its k-points distributed to four ranks. The result is the
# total energy.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in quick) cutoff=6 steps=2 ;; *) cutoff=38 steps=16 ;; esac
    cp /usr/share/abinit/psp/14si.pspnc .
    sed -e "s/@cutoff@/$cutoff/" -e "s/@steps@/$steps/" "$here/silicon.abi" > silicon.abi
    ;;
run) launch abinit silicon.abi ;;
result) grep ' etotal ' silicon.abo | head -n 1 ;;
esac
