#!/bin/sh
# Builds hera (forked processes), hera-mpi, and riemann, which tests the flow: build.sh OUT_DIR LIB_DIR, where LIB_DIR
# has libpagefold.so.
#
# Without fused multiplication and addition, so that results do not depend on the compiler's choice between them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
[ $# -eq 2 ] || { echo "usage: build.sh OUT_DIR LIB_DIR" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
library=$(cd "$2" && pwd)
flags="-std=c++17 -O2 -g -ffp-contract=off -Wall -Wextra -I$here/../../crates/engine/include"
link="-L$library -Wl,-rpath,$library -lpagefold -pthread"
${CXX:-g++} $flags "$here/hera.cpp" -o "$out/hera" $link
${MPICXX:-mpicxx} $flags -DHERA_MPI -DOMPI_SKIP_MPICXX "$here/hera.cpp" -o "$out/hera-mpi" $link
${CXX:-g++} $flags "$here/riemann.cpp" -o "$out/riemann"
