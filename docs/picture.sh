#!/usr/bin/env bash
# Makes the pictures of docs/pictures that show this host: census.png, a census of four QEMU guests; top.png, page.png,
# dark.png and phone.png of a daemon that merges eight guests for six minutes. With names only
# those: docs/picture.sh census. Needs root. Installs what it draws with (aha, tmux, Chromium) from Debian.
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

# Guests and programs arrive one after the other while the daemon runs. One guest is of another trust domain.
daemon() {
    labs/setup.sh
    cargo build --release -p pagefold -p pagefold-labs
    cat >"$scratch/pagefold.toml" <<'END'
[[domain]]
name = "web"
users = ["root"]
vms = ["web-*"]
[[domain]]
name = "build"
users = ["root"]
vms = ["build-*"]
[daemon]
mode = "act"
http = "127.0.0.1:9750"
keep_available = "22GiB"
END
    local state=$scratch/state
    target/release/pagefold --config "$scratch/pagefold.toml" --state "$state" daemon &
    trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$scratch"' EXIT
    fleet() { sleep infinity | target/release/pagefold-lab fleet --memory 384 "$@" >/dev/null & }
    fleet --guests 4 --shared-mib 128 --unique-mib 48 --name-prefix web
    sleep 150
    fleet --guests 3 --shared-mib 96 --unique-mib 96 --name-prefix build
    sleep 100
    fleet --guests 1 --shared-mib 128 --unique-mib 64 --name-prefix db
    sleep 120
    shoot() {
        local name=$1 size=$2 scheme=$3
        "$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
            --disable-component-update --disable-sync --user-data-dir="$scratch/profile" --hide-scrollbars \
            --blink-settings="preferredColorScheme=$scheme" --window-size="$size" --timeout=4000 \
            --screenshot="docs/pictures/$name.png" http://127.0.0.1:9750/
    }
    shoot page 1280,1180 1
    shoot dark 1280,1180 0
    shoot phone 390,1180 1
    tmux() { env TERM=xterm-256color tmux -S "$scratch/tmux" "$@"; }
    tmux -f /dev/null new-session -d -x 120 -y 32 "target/release/pagefold --state $state top"
    until tmux capture-pane -p | grep -q 'q quit'; do sleep 0.2; done
    tmux send-keys 2
    until tmux capture-pane -p | grep -q 'Processes'; do sleep 0.2; done
    # aha takes default colors for the end of what is reversed.
    tmux capture-pane -e -p | sed 's/7m\x1b\[39m\x1b\[49m/7m/g' | draw top 'pagefold top' 1130
    tmux kill-server
}

[ $# -gt 0 ] || set -- census daemon
for name; do "$name"; done
