#!/bin/bash
# Enrolls and unenrolls running programs thousands of times while they work and ksmd merges at full speed, and each
# checks itself: a busy multithreaded program of the lab, one in Go (whose threads run on small stacks of their own),
# and PostgreSQL under load, by its own consistency checks. Then, without ksmd, it runs the injection tests in their
# long form: targets receive signals, are stopped and continued, end threads, fork, and execute other programs. Needs
# root; labs/setup.sh installs what it needs.
#
# CYCLES=N sets the number of cycles for the busy program and the database (10000). The program in Go and the tests go
# through a tenth of them. The script takes the lock for KSM, and restores its settings.

set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || { echo "soak: skipped: needs root"; exit 0; }
cycles=${CYCLES:-10000}
ksm=/sys/kernel/mm/ksm
[ -w "$ksm/run" ] || { echo "soak: skipped: this kernel has no KSM, or /sys is read-only"; exit 0; }

cargo build --release --package pagefold-labs
lab=$PWD/target/release/pagefold-lab
work=$(mktemp -d /tmp/pagefold-soak.XXXXXX)
chmod 755 "$work"
# In the order that the kernel requires: it takes pages_to_scan only while no advisor is on.
names="advisor_mode pages_to_scan sleep_millisecs use_zero_pages run"
declare -A before
finish() {
    release
    rm -rf "$work"
}

# release: restore KSM's settings, and release the lock.
release() {
    local name
    for name in $names; do
        [ -z "${before[$name]:-}" ] || put "$name" "${before[$name]}" || echo "soak: $name was ${before[$name]}" >&2
    done
    before=()
    exec 8>&-
}

# The value of a setting: the word in brackets if there are several words.
value() { sed 's/.*\[\(.*\)\].*/\1/' "$ksm/$1"; }

# Settings that a kernel lacks are skipped: the advisor came with 6.8, use_zero_pages with 6.6.
put() { [ ! -e "$ksm/$1" ] || [ "$(value "$1")" = "$2" ] || echo "$2" > "$ksm/$1"; }

# merge_hard: take KSM's lock, and let ksmd run without a pause.
merge_hard() {
    exec 8> /run/pagefold-test.lock
    flock 8
    local name
    for name in $names; do
        [ ! -e "$ksm/$name" ] || before[$name]=$(value "$name")
    done
    put advisor_mode none
    put pages_to_scan 20000
    put sleep_millisecs 0
    put use_zero_pages 0
    put run 1
}

# COW breaks of merged pages since boot, by writes or by unenrolling.
cow_ksm() { awk '$1 == "cow_ksm" { print $2 }' /proc/vmstat; }

# COW breaks since the last call; there must be some.
copies() {
    local all
    all=$(cow_ksm)
    echo "soak: $((all - copied)) COW breaks"
    [ "$all" -gt "$copied" ]
    copied=$all
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

merge_hard
copied=$(cow_ksm)

# start NAME COMMAND...: starts a program that runs until NAME.in, its standard input, closes; its process number is in
# $target.
start() {
    local name=$1
    shift
    mkfifo "$work/$name.in"
    "$@" < "$work/$name.in" > "$work/$name.out" &
    target=$!
    exec 9> "$work/$name.in"
    until grep -q READY "$work/$name.out"; do
        kill -0 "$target"
        sleep 0.1
    done
}

# check NAME WORDS: closes the input, and expects a successful exit.
check() {
    exec 9>&-
    wait "$target"
    grep "$2" "$work/$1.out"
}

# enroll_and_unenroll N: enrolls and unenrolls the target N times. A range that is refused would test no injection.
enroll_and_unenroll() {
    # The pause lets ksmd scan a page twice, which a merge needs.
    "$lab" advise "$target" mergeable --cycles "$1" --pause 8 > "$work/advised"
    if grep -m 3 '^missed' "$work/advised" >&2; then
        echo "soak: $(grep -c '^missed' "$work/advised") ranges were missed" >&2
        return 1
    fi
    cat "$work/advised"
}

echo "soak: $cycles cycles on a busy program"
start busy "$lab" busy --threads 4 --memory 2
enroll_and_unenroll "$cycles"
check busy "all right"
copies

if command -v go > /dev/null; then
    echo "soak: $((cycles / 10)) cycles on a program in Go"
    cp labs/tests/targets/busy.go "$work/"
    (cd "$work" && go build -o busy-go busy.go)
    start go "$work/busy-go"
    enroll_and_unenroll "$((cycles / 10))"
    check go "all right"
    copies
else
    echo "soak: skipped: a program in Go: needs go"
fi

# The test takes KSM's lock itself.
release
echo "soak: $cycles cycles on PostgreSQL under load"
PAGEFOLD_SOAK_CYCLES=$cycles cargo test --release --package pagefold-labs --test database a_server -- --nocapture
echo "soak: $((cycles / 10)) cycles on programs that receive signals, are stopped, fork and execute other programs"
PAGEFOLD_SOAK_CYCLES=$((cycles / 10)) cargo test --release --package pagefold-labs --test inject
echo "soak: all right"
