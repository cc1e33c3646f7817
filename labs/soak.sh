#!/bin/bash
# Enrols and withdraws running programs thousands of times while they work and ksmd merges at full speed, and lets each
# check itself: a busy multi-threaded one of ours, one written in Go (whose threads run on small stacks of their own),
# and PostgreSQL under load, by its own consistency checks. Then, without ksmd, it runs the tests of injection in their
# long form: programs that get signals, are stopped and continued meanwhile, whose threads end, that fork and become
# others. As root; labs/setup.sh installs what it needs.
#
# CYCLES=N sets how many cycles the first and the database go through (10000); the one in Go and the tests go through a
# tenth of them. KSM is nobody else's meanwhile, and its settings come back.

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
# In an order in which the kernel takes them: pages_to_scan only while no advisor is on.
names="advisor_mode pages_to_scan sleep_millisecs use_zero_pages run"
declare -A before
finish() {
    release
    rm -rf "$work"
}

# release: put KSM's settings back, and let others have it.
release() {
    local name
    for name in $names; do
        [ -z "${before[$name]:-}" ] || put "$name" "${before[$name]}" || echo "soak: $name was ${before[$name]}" >&2
    done
    before=()
    exec 8>&-
}

# The value of a setting, which of several words is the one in brackets.
value() { sed 's/.*\[\(.*\)\].*/\1/' "$ksm/$1"; }

# What a kernel does not have is left out: the advisor came with 6.8, use_zero_pages with 6.6.
put() { [ ! -e "$ksm/$1" ] || [ "$(value "$1")" = "$2" ] || echo "$2" > "$ksm/$1"; }

# merge_hard: take KSM, and let ksmd run without a pause.
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

# Merged pages that got copies of their own, for a write or a withdrawal, since boot.
cow_ksm() { awk '$1 == "cow_ksm" { print $2 }' /proc/vmstat; }

# The same since the last call, of which there must be some.
copies() {
    local all
    all=$(cow_ksm)
    echo "soak: $((all - copied)) merged pages got copies of their own again"
    [ "$all" -gt "$copied" ]
    copied=$all
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

merge_hard
copied=$(cow_ksm)

# start NAME COMMAND...: runs until its standard input, NAME.in, is closed; its process number is in $target.
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

# check NAME WORDS: closes the input, and expects a good end.
check() {
    exec 9>&-
    wait "$target"
    grep "$2" "$work/$1.out"
}

# enrol_and_withdraw N: enrol and withdraw the target so many times. What is refused of it tells nothing of injection.
enrol_and_withdraw() {
    # The pause lets ksmd come by twice, as a merge takes.
    "$lab" advise "$target" mergeable --cycles "$1" --pause 8 > "$work/advised"
    if grep -m 3 '^missed' "$work/advised" >&2; then
        echo "soak: $(grep -c '^missed' "$work/advised") ranges were missed" >&2
        return 1
    fi
    cat "$work/advised"
}

echo "soak: $cycles cycles on a busy program"
start busy "$lab" busy --threads 4 --memory 2
enrol_and_withdraw "$cycles"
check busy "all right"
copies

if command -v go > /dev/null; then
    echo "soak: $((cycles / 10)) cycles on a program in Go"
    cp labs/tests/targets/busy.go "$work/"
    (cd "$work" && go build -o busy-go busy.go)
    start go "$work/busy-go"
    enrol_and_withdraw "$((cycles / 10))"
    check go "all right"
    copies
else
    echo "soak: skipped: a program in Go, there is no go"
fi

# It takes KSM itself.
release
echo "soak: $cycles cycles on PostgreSQL under load"
PAGEFOLD_SOAK_CYCLES=$cycles cargo test --release --package pagefold-labs --test database a_server -- --nocapture
echo "soak: $((cycles / 10)) cycles on programs that get signals, are stopped, fork and become others"
PAGEFOLD_SOAK_CYCLES=$((cycles / 10)) cargo test --release --package pagefold-labs --test inject
echo "soak: all right"
