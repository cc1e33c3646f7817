#!/bin/sh
# Run every fuzz target for so many seconds (60 unless told otherwise), from the seeds and from what earlier runs found;
# and as long random calls of the user-space engine, by processes that know what their memory has to hold.
#
#   fuzz/run.sh [SECONDS_PER_TARGET]
#
# Needs a C++ compiler for libFuzzer. Takes the nightly toolchain if it is installed, and otherwise lets the default
# one use the unstable options that the sanitizers need. Exits with 1 if a target failed; the input that broke it is in
# fuzz/artifacts. The engine's calls follow from a number that is printed: PAGEFOLD_SEED=NUMBER has them again.
set -eu
seconds=${1:-60}
cd "$(dirname "$0")/.."

cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked
if cargo +nightly --version >/dev/null 2>&1; then
    fuzz="cargo +nightly fuzz"
else
    export RUSTC_BOOTSTRAP=1
    fuzz="cargo fuzz"
fi

failed=
for target in $($fuzz list); do
    mkdir -p "fuzz/corpus/$target"
    echo "fuzzing $target for $seconds s"
    $fuzz run "$target" "fuzz/corpus/$target" "fuzz/seeds/$target" -- \
        -max_total_time="$seconds" -timeout=10 -print_final_stats=1 || failed="$failed $target"
done
echo "calling the engine at random for $seconds s"
cargo build --release -p pagefold-engine --example member
PAGEFOLD_FUZZ=$seconds cargo test --release -p pagefold-engine --test members random -- --nocapture ||
    failed="$failed engine"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
