#!/bin/sh
# NWChem: the energy of water molecules in a row by density functional theory, in a Gaussian basis. The result is that
# energy.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../common.sh"

case $1 in
prepare)
    case $2 in quick) molecules=2 ;; *) molecules=28 ;; esac
    { sed '/@molecules@/q' "$here/water.nw" | sed '$d'
      awk -v n=$molecules 'BEGIN { for (i = 0; i < n; i++) {
          printf "  O %.3f 0.000 0.119\n  H %.3f 0.763 -0.477\n  H %.3f -0.763 -0.477\n", 3 * i, 3 * i, 3 * i } }'
      sed '1,/@molecules@/d' "$here/water.nw"; } > water.nw
    ;;
run) launch nwchem.openmpi water.nw ;;
result) grep 'Total DFT energy' output ;;
esac
