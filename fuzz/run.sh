#!/bin/sh
# Run every fuzz target for the given number of seconds (default 60), from the seeds and the corpus of earlier runs.
# Then run random calls of the user-space engine for the same time, in processes that check their memory.
#
#   fuzz/run.sh [SECONDS_PER_TARGET]
#
# Needs a C++ compiler for libFuzzer. Uses the nightly toolchain if it is installed; otherwise it permits the default
# toolchain to use the unstable options that the sanitizers need. Exits with 1 if a target failed; the failing input is
# in fuzz/artifacts. The engine's calls depend on a printed seed: PAGEFOLD_SEED=NUMBER repeats them.
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
