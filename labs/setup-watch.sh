#!/bin/sh
# Prepares what the tests of crates/watch start: headless Chromium, tmux, and Prometheus' promtool. promtool is unpacked
# into .cache/watch and never installed, because its package would start a server. It skips steps that are done already,
# so it may run each time. Needs Debian after `apt-get update`, and root only if packages are missing.
set -eu

labs=$(cd "$(dirname "$0")" && pwd)
cache=${labs%/*}/.cache/watch

say() { echo "setup: $*" >&2; }

command -v apt-get > /dev/null && command -v dpkg > /dev/null || { say "this needs Debian's apt-get and dpkg"; exit 1; }

missing=
command -v chromium-headless-shell > /dev/null || command -v chromium > /dev/null || missing="$missing chromium-headless-shell"
command -v tmux > /dev/null || missing="$missing tmux"
# Without a font a page has no visible text.
[ -d /usr/share/fonts/truetype ] || missing="$missing fonts-liberation"
if [ -n "$missing" ] && [ "$(id -u)" -ne 0 ]; then
    say "tests that need these packages will be skipped:$missing"
elif [ -n "$missing" ]; then
    say "installing$missing"
    # Unquoted: one word for each package.
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >&2
fi

if [ ! -x "$cache/promtool" ]; then
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    say "downloading prometheus for its promtool"
    # Without apt's sandbox user, which may not write here.
    (cd "$work" && apt-get -q -o APT::Sandbox::User=root download prometheus >&2)
    dpkg -x "$work"/*.deb "$work/root"
    mv "$work/root/usr/bin/promtool" "$cache/promtool"
fi
say "ready: $cache"
