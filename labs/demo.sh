#!/usr/bin/env bash
# Merges memory of real programs on this machine, prints the savings, and cleans up.
#
# As root, after `labs/setup.sh`: a census of four QEMU guests with mostly equal memory, and KSM, whose settings are
# restored. Without root: a simulation on four ranks (`labs/hera`) that merges its own memory with the user engine.
# Without a C++ compiler, or as root without QEMU: a census of four perl interpreters, each with the same word list in
# memory, and no merging.
#
# `labs/demo.sh simulate [OPTION]...` shows the simulation to any user, with more options of hera.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
# Exit status 1 (a negative verdict) and 3 (something was not seen) of pagefold are results, not failures.
pagefold() {
    say "pagefold $*"
    target/release/pagefold "$@" || case $? in 1 | 3) ;; *) return 1 ;; esac
}

look() {
    pagefold doctor
    pagefold census "$@"
    if [ "$(id -u)" -eq 0 ]; then
        say "Each guest is a trust domain of its own, within which the census counts. All of them are yours: merge across"
        pagefold merge --across-domains "$@"
    fi
    pagefold account "$@"
    if [ "$(id -u)" -ne 0 ]; then
        say "This census covered your own processes only. As root, 'make demo' starts virtual machines, too."
    fi
}

if [ "${1-}" = look ]; then
    shift
    look "$@"
    exit
fi

# The simulation with its own memory, with an indirection that stores no groups of zeros, and with the user engine.
simulate() {
    local target=${CARGO_TARGET_DIR:-target} mode plain
    say "Building the user engine and a simulation that uses it (release)"
    cargo build --release -p pagefold-engine
    mkdir -p "$target/demo"
    cp "$target/release/libpagefold_engine.so" "$target/demo/libpagefold.so.0"
    ln -sf libpagefold.so.0 "$target/demo/libpagefold.so"
    # Ranks are ordinary processes here.
    MPICXX=true labs/hera/build.sh "$target/demo" "$target/demo"
    PAGEFOLD_RUNTIME=$(mktemp -d /dev/shm/pagefold-demo.XXXXXX)
    export PAGEFOLD_RUNTIME
    trap 'rm -rf "$PAGEFOLD_RUNTIME"' EXIT
    for mode in plain blocks engine; do
        say "hera --ranks 4 --memory $mode${*:+ $*}"
        "$target/demo/hera" --ranks 4 --steps 40 --min-runtime 2 --memory "$mode" "$@" | tee "$target/demo/$mode.txt"
    done
    plain=$(grep -o 'checksum=[^ ]*' "$target/demo/plain.txt")
    for mode in blocks engine; do
        grep -q "$plain" "$target/demo/$mode.txt" || { echo "the results of $mode differ" >&2; return 1; }
    done
    say "Six materials on 4 ranks: memory of all ranks (PSS, mean over the run) and the time of the run"
    for mode in plain blocks engine; do
        grep '^summary ' "$target/demo/$mode.txt" | sed "s/^summary/mode=$mode/"
    done | awk '
        BEGIN { printf "%-8s %10s %8s %8s %8s\n", "mode", "MiB", "gain", "s", "slower" }
        {
            for (i = 1; i <= NF; i++) { split($i, word, "="); of[word[1]] = word[2] }
            if (NR == 1) { memory = of["mean_mib"]; seconds = of["seconds"] }
            gain = 100 * (1 - of["mean_mib"] / memory); slower = 100 * (of["seconds"] / seconds - 1)
            printf "%-8s %10.1f %6.1f %% %8.1f %6.1f %%\n", of["mode"], of["mean_mib"], gain, of["seconds"], slower
        }'
    say "All three computed the same to the last bit: $plain. One run each: for intervals see 'make bench-hera'."
}

if [ "${1-}" = simulate ]; then
    shift
    simulate "$@"
    exit
fi
if [ "$(id -u)" -ne 0 ] && command -v g++ >/dev/null; then
    simulate
    exit
fi

say "Building (release)"
cargo build --release -p pagefold -p pagefold-labs

if [ "$(id -u)" -eq 0 ] && command -v qemu-system-x86_64 >/dev/null && [ -e .cache/fleet ]; then
    # The lock for ksmd and its settings, which tests take, too.
    exec 9>/run/pagefold-test.lock
    flock 9
    say "Starting four QEMU guests of 128 MiB: 16 MiB of data the same in all, 16 MiB of its own in each"
    target/release/pagefold-lab fleet --guests 4 --memory 128 --shared-mib 16 --unique-mib 16 --name-prefix web \
        -- labs/demo.sh look --vm web-0 --vm web-1 --vm web-2 --vm web-3
else
    say "Starting four perl interpreters with the same word list in each (no root or no QEMU here)"
    pids=()
    # shellcheck disable=SC2317 # called by the trap
    cleanup() { kill "${pids[@]}" 2>/dev/null || true; }
    trap cleanup EXIT
    arguments=()
    for _ in 1 2 3 4; do
        # A long string is laid out alike in every process; data with addresses, such as the table of its words, are
        # not.
        perl -e 'open my $text, "<", "LICENSE-APACHE" or die; my $book = join("", <$text>) x 1600;
            my %words; $words{$_}++ for split /\W+/, substr $book, 0, 1 << 20; sleep 600' &
        pids+=("$!")
        arguments+=(--pid "$!")
    done
    sleep 3
    look "${arguments[@]}"
fi
