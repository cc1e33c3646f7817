#!/usr/bin/env bash
# Makes pictures of docs/pictures: census.png, a census of four real QEMU guests; top.png, page.png, dark.png and
# phone.png of a made-up host. With names only those: docs/picture.sh top. A census needs root. Installs what it draws with (aha, tmux,
# Chromium) from Debian.
set -euo pipefail
cd "$(dirname "$0")/.."

need() { command -v "$1" >/dev/null || apt-get install -y --no-install-recommends "$1" fonts-dejavu-core; }
need aha
need tmux
command -v chromium >/dev/null || need chromium-headless-shell
browser=$(command -v chromium-headless-shell || command -v chromium)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# What a terminal shows, from standard input, as a picture NAME of so many pixels' width, with the command above it.
draw() {
    local name=$1 command=$2 width=$3
    cat >"$scratch/$name.ansi"
    {
        printf '<meta charset=utf-8><style>body{margin:0;background:#14161a;color:#d6d9e0}'
        printf 'pre{font:15px/1.3 "DejaVu Sans Mono",monospace;padding:18px 22px;margin:0}</style><pre>'
        printf '$ %s\n' "$command"
        aha --no-header --black <"$scratch/$name.ansi"
        printf '</pre>'
    } >"$scratch/$name.html"
    "$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
        --disable-component-update --disable-sync --user-data-dir="$scratch/profile" --hide-scrollbars \
        --window-size="$width,$(($(wc -l <"$scratch/$name.ansi") * 20 + 70))" \
        --screenshot="docs/pictures/$name.png" "file://$scratch/$name.html"
}

census() {
    labs/setup.sh
    cargo build --release -p pagefold -p pagefold-labs
    target/release/pagefold-lab fleet --guests 4 --memory 128 --shared-mib 16 --unique-mib 16 --name-prefix web -- \
        target/release/pagefold --color always census --vm web-0 --vm web-1 --vm web-2 --vm web-3 --top 5 |
        draw census 'pagefold census --vm web-0 --vm web-1 --vm web-2 --vm web-3 --top 5' 1180
}

top() {
    cargo build -p pagefold-watch --example top
    tmux() { env TERM=xterm-256color tmux -S "$scratch/tmux" "$@"; }
    tmux -f /dev/null new-session -d -x 120 -y 32 "target/debug/examples/top fixtures/status.json"
    until tmux capture-pane -p | grep -q 'q quit'; do sleep 0.2; done
    tmux send-keys 2
    until tmux capture-pane -p | grep -q 'Processes'; do sleep 0.2; done
    # aha takes default colors for the end of what is reversed.
    tmux capture-pane -e -p | sed 's/7m\x1b\[39m\x1b\[49m/7m/g' | draw top 'pagefold top' 1130
    tmux kill-server
}

page() {
    PAGEFOLD_PICTURES=$scratch cargo test -p pagefold-watch --test browser it_fits
    cp "$scratch/light.png" docs/pictures/page.png
    cp "$scratch/dark.png" docs/pictures/dark.png
    cp "$scratch/phone.png" docs/pictures/phone.png
}

[ $# -gt 0 ] || set -- census top page
for name; do "$name"; done
