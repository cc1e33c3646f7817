#!/bin/sh
# OpenFOAM: a column of water collapses in a tank (volume of fluid, laminar). Fields are allocated and freed in each
# step. The result is the volume of water and the solver's last continuity error.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"
export WM_PROJECT_DIR=/usr/share/openfoam

case $1 in
prepare)
    case $2 in quick) cells=16 end=0.02 step=0.002 ;; *) cells=72 end=0.06 step=0.001 ;; esac
    cp -R "$here/case/." .
    sed -i "s/@cells@/$cells/g" system/blockMeshDict
    sed -i -e "s/@end@/$end/" -e "s/@step@/$step/" system/controlDict
    blockMesh > prepared
    setFields >> prepared
    decomposePar >> prepared
    ;;
run) launch interFoam -parallel ;;
result) for line in 'Phase-1 volume fraction' 'time step continuity errors'; do grep "^$line" output | tail -n 1; done ;;
esac
