#!/bin/sh
# Gerris: vortices of an incompressible fluid in a periodic square, on a quadtree that adapts to them; each rank has a
# quarter. The result is the kinetic energy at the end.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in quick) level=5 end=0.05 ;; *) level=8 end=0.2 ;; esac
    sed -e "s/@level@/$level/g" -e "s/@end@/$end/" "$here/vortices.gfs" > vortices.gfs
    ;;
run) launch gerris2D vortices.gfs ;;
result) tail -n 1 energy ;;
esac
