#!/bin/sh
# Prepares what `make bench-merge` needs beyond labs/setup.sh: a database and the simulations of labs/mpi, all from
# Debian (about 2 GB installed). It skips steps that are done already. Needs root only if packages are missing.
set -eu

# quantum-espresso-data has the pseudopotentials; cp2k-data has pseudopotentials and basis sets.
packages="sqlite3 openmpi-bin meep-mpi-default openfoam quantum-espresso quantum-espresso-data cp2k cp2k-data"
# Packages for the section `debian`. Gerris compiles expressions of its input, which needs libgfs-dev.
packages="$packages lammps gromacs gromacs-data nwchem-openmpi nwchem-data abinit abinit-data elk-lapw gerris libgfs-dev"

command -v apt-get > /dev/null || { echo "setup-bench: this needs Debian's apt-get" >&2; exit 1; }
missing=
for package in $packages; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null | grep -qx installed || missing="$missing $package"
done
if [ -n "$missing" ]; then
    [ "$(id -u)" -eq 0 ] || { echo "setup-bench: as root: apt-get install --no-install-recommends$missing" >&2; exit 1; }
    echo "setup-bench: installing$missing" >&2
    # Unquoted: one word for each package.
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >&2
fi
echo "setup-bench: ready" >&2
