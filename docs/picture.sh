#!/usr/bin/env bash
# Makes docs/pictures/census.png: a census of four real QEMU guests, as a terminal shows it. Needs root, and installs
# what it draws with (aha, Chromium) from Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

for program in aha chromium; do
    command -v "$program" >/dev/null || apt-get install -y --no-install-recommends "$program" fonts-dejavu-core
done
labs/setup.sh
cargo build --release -p pagefold -p pagefold-labs

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
target/release/pagefold-lab fleet --guests 4 --memory 128 --same 16 --own 16 --names web -- \
    target/release/pagefold --color always census --vm web-0 --vm web-1 --vm web-2 --vm web-3 --top 5 \
    >"$scratch/census.ansi"
{
    printf '<meta charset=utf-8><style>body{margin:0;background:#14161a;color:#d6d9e0}'
    printf 'pre{font:15px/1.3 "DejaVu Sans Mono",monospace;padding:18px 22px;margin:0}</style><pre>'
    printf '$ pagefold census --vm web-0 --vm web-1 --vm web-2 --vm web-3 --top 5\n'
    aha --no-header --black <"$scratch/census.ansi"
    printf '</pre>'
} >"$scratch/census.html"
lines=$(wc -l <"$scratch/census.ansi")
chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --user-data-dir="$scratch/profile" --hide-scrollbars \
    --window-size=1180,$((lines * 20 + 70)) --screenshot=docs/pictures/census.png "file://$scratch/census.html"
