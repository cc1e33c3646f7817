#!/bin/sh
# PostgreSQL with sessions that hold sorted results in their own memory, half of them equal in all sessions. Prints the
# process IDs of the sessions and READY, and ends when standard input closes. Usage: postgres.sh SESSIONS ROWS
set -eu
here=$(cd "$(dirname "$0")" && pwd)
sessions=$1 rows=$2

set -- /usr/lib/postgresql/*/bin/postgres
[ -x "$1" ] || { echo "postgres.sh: PostgreSQL is missing: run labs/setup.sh as root" >&2; exit 1; }
for program; do programs=$(dirname "$program"); done

folder=$(mktemp -d)
# The server refuses root.
as_nobody() {
    program=$1
    shift
    setpriv --reuid=65534 --regid=65534 --clear-groups "$programs/$program" "$@"
}
stop() {
    exec 9>&-
    as_nobody pg_ctl stop -D "$folder/data" -m immediate -s || true
    rm -rf "$folder"
}
trap stop EXIT
trap 'exit 1' HUP INT TERM
chown 65534:65534 "$folder"
cd "$folder"

# Descriptor 9 keeps the sessions open: only this script has it.
mkfifo hold
exec 9<> hold
as_nobody initdb -D "$folder/data" --auth=trust --no-sync --username=postgres > log
as_nobody pg_ctl start -D "$folder/data" -w -s -l "$folder/server.log" \
    -o "-k $folder -c listen_addresses= -c shared_buffers=32MB -c work_mem=1GB -c jit=off" 9>&- < /dev/null
for session in $(seq "$sessions"); do
    # Opened while the script is there; a redirection of the whole group would keep a copy of the descriptor.
    (exec 8< hold 9>&-; cat "$here/postgres-session.sql"; exec cat <&8) < /dev/null | (
        exec 9>&-
        "$programs/psql" -X -q -t -A -v ON_ERROR_STOP=1 -v "rows=$rows" -h "$folder" -U postgres > "session-$session" ||
            touch failed
    ) &
done
for session in $(seq "$sessions"); do
    until grep -q held "session-$session" 2> /dev/null; do
        [ ! -e failed ] && [ -e data/postmaster.pid ] || { cat server.log >&2; exit 1; }
        sleep 0.2
    done
    head -n 1 "session-$session"
done
echo READY
cat > /dev/null
