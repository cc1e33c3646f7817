#!/usr/bin/env bash
# Takes a census of a small fleet of real programs on this machine, merges what pays, shows what that saved, and cleans
# up. KSM's settings come back.
#
# As root, where `labs/setup.sh` has made ready: four QEMU guests that share most of what they hold. Otherwise: four
# perl interpreters, each with the same book of words in memory, and no merging, which needs root.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
# pagefold tells with its exit status that a verdict is no (1) or that something was not seen (3): both are results.
pagefold() {
    say "pagefold $*"
    target/release/pagefold "$@" || case $? in 1 | 3) ;; *) return 1 ;; esac
}

look() {
    pagefold census "$@"
    pagefold doctor
    if [ "$(id -u)" -eq 0 ]; then
        # The guests are root's own, so each may know what the others hold.
        pagefold merge --across-domains "$@"
    fi
    pagefold account "$@"
    if [ "$(id -u)" -ne 0 ]; then
        say "This was one's own processes alone. As root, 'make demo' starts virtual machines and sees everything."
    fi
}

if [ "${1-}" = look ]; then
    shift
    look "$@"
    exit
fi

say "Building (release)"
cargo build --release -p pagefold -p pagefold-labs

if [ "$(id -u)" -eq 0 ] && command -v qemu-system-x86_64 >/dev/null && [ -e .cache/fleet ]; then
    # Who drives ksmd holds this, as the tests do.
    exec 9>/run/pagefold-test.lock
    flock 9
    say "Starting four QEMU guests of 128 MiB: 16 MiB of data the same in all, 16 MiB of its own in each"
    target/release/pagefold-lab fleet --guests 4 --memory 128 --same 16 --own 16 --names web \
        -- labs/demo.sh look --vm web-0 --vm web-1 --vm web-2 --vm web-3
else
    say "Starting four perl interpreters with the same book of words in each (no root or no QEMU here)"
    pids=()
    # shellcheck disable=SC2317 # called by the trap
    cleanup() { kill "${pids[@]}" 2>/dev/null || true; }
    trap cleanup EXIT
    arguments=()
    for _ in 1 2 3 4; do
        # A long string lies alike in every process; what holds addresses, as the table of its words, does not.
        perl -e 'open my $text, "<", "LICENSE-APACHE" or die; my $book = join("", <$text>) x 1600;
            my %words; $words{$_}++ for split /\W+/, substr $book, 0, 1 << 20; sleep 600' &
        pids+=("$!")
        arguments+=(--pid "$!")
    done
    sleep 3
    look "${arguments[@]}"
fi
