#!/bin/sh
# Meep: a pulse of light in a box with a dielectric slab and absorbing layers, in three dimensions. Until the light
# arrives most fields are zeros, and each step rewrites them. The result is the energy that passed two planes.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare) ;;
run)
    case $2 in quick) resolution=5 time=12 ;; *) resolution=20 time=11 ;; esac
    launch meep "resolution=$resolution" "run-time=$time" "$here/slab.ctl"
    ;;
result) grep '^flux1:' output | tail -n 3 ;;
esac
