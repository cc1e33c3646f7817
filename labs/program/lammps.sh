#!/bin/sh
# LAMMPS on four ranks, all on the first CPU, so that ksmd has another. Prints the process IDs of the ranks and READY
# after some steps, and ends when standard input closes. Usage: lammps.sh SIZE (of labs/mpi/lammps/deck.sh)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
deck=$here/../mpi/lammps/deck.sh

folder=$(mktemp -d)
launcher=
stop() {
    [ -z "$launcher" ] || kill "$launcher" 2> /dev/null || true
    wait || true
    rm -rf "$folder"
}
trap stop EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"

sh "$deck" prepare "$1"
taskset -c 0 sh "$deck" run "$1" > output 2>&1 < /dev/null &
launcher=$!
# The lines of the steps follow the one of their columns.
until awk '/^ *Step / { steps = 1 } steps && $1 ~ /^[0-9]+$/ && $1 > 0 { found = 1 } END { exit !found }' output; do
    kill -0 "$launcher" 2> /dev/null || { cat output >&2; exit 1; }
    sleep 0.5
done
for rank in $(cat "/proc/$launcher/task/$launcher/children"); do
    [ "$(cat "/proc/$rank/comm")" != lmp ] || echo "$rank"
done
echo READY
cat > /dev/null
