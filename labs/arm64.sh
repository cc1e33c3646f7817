#!/bin/bash
# Runs tests that depend on the kernel of 64-bit Arm. QEMU emulates one machine for each test program, with Debian's
# kernel (unpacked and never installed), busybox, the C library of the cross compiler, and the injection targets.
#
#     labs/arm64.sh                        # the injection tests
#     labs/arm64.sh ARGUMENTS              # other tests: arguments of `cargo test`
#     labs/arm64.sh run PROGRAM ARGUMENTS  # cargo calls this
#
# CPU=cortex-a72 is a processor without scalable vectors, branch targets and tags; the default has all features of QEMU.
# SECONDS_AT_MOST limits the time of a test program. Downloads and build results stay in .cache/arm64; the kernel there
# is used until it is removed. Needs Debian on amd64, and root only if packages are missing.

set -euo pipefail
cd "$(dirname "$0")/.."
cache=.cache/arm64
target=aarch64-unknown-linux-gnu
libraries=/usr/aarch64-linux-gnu/lib
work=
qemu=

say() { echo "arm64: $*" >&2; }
fail() { say "$*"; exit 1; }
finish() {
    [ -z "$qemu" ] || kill "$qemu" 2> /dev/null || true
    [ -z "$work" ] || rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

# apt commands for another architecture and release than this machine's, whose own lists do not change.
foreign() {
    local apt=$PWD/$work/apt command=$1
    shift
    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
    touch "$apt/status"
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian %s main\n' \
        trixie trixie-backports > "$apt/sources.list"
    # Without apt's sandbox user, which may not write here.
    "$command" -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Default-Release=trixie-backports \
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
        -o Dir::State="$apt/state" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
        -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- "$@"
}

# The dependency of a package whose name starts with $2.
dependency() {
    foreign apt-cache depends "$1" | awk -v name="^$2" '$1 == "Depends:" && $2 ~ name && !found++ { print $2 }'
}

prepare() {
    .ci/debian gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-system-arm cpio debian-archive-keyring
    rustup target list --installed | grep -qx "$target" || rustup target add "$target"
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/work.XXXXXX")
    if [ ! -s "$cache/vmlinuz" ] || [ ! -s "$cache/busybox" ]; then
        say "downloading the lists of Debian's packages for arm64"
        foreign apt-get -q=2 update >&2
        # The meta package depends on the versioned one, which, since 7.0 or so, depends on the one with the kernel.
        local image binary
        image=$(dependency linux-image-cloud-arm64 linux-image-)
        [ -n "$image" ] || fail "Debian has no linux-image-cloud-arm64"
        binary=$(dependency "$image" linux-binary-)
        say "downloading ${binary:=$image}"
        (
            cd "$work"
            work=. foreign apt-get -q=2 download "$binary" busybox-static >&2
        )
        local package
        for package in "$work"/*.deb; do dpkg -x "$package" "$work/root"; done
        # Debian 13 has changed the paths of these files.
        find "$work/root" -type f -name 'vmlinuz*' -exec mv {} "$work/vmlinuz" \;
        find "$work/root" -type f -name busybox -path '*/bin/*' -exec mv {} "$work/busybox" \;
        mv "$work/vmlinuz" "$work/busybox" "$cache/"
    fi
    local source=labs/tests/targets/states.c
    if [ ! -s "$cache/base.cpio" ] ||
        [ -n "$(find labs/guest/init-test labs/tests/targets "$0" -newer "$cache/base.cpio")" ]; then
        say "building the initramfs"
        local root=$work/base
        mkdir -p "$root"/{bin,dev,lib,proc,run,sys,test,tmp}
        cp "$cache/busybox" "$root/bin/busybox"
        cp labs/guest/init-test "$root/init"
        chmod 755 "$root/init" "$root/bin/busybox"
        cp "$libraries"/{ld-linux-aarch64.so.1,libc.so.6,libm.so.6,libgcc_s.so.1} "$root/lib/"
        local options=(-O1 -Wall -Werror -pthread "$source")
        aarch64-linux-gnu-gcc "${options[@]}" -o "$root/test/states"
        aarch64-linux-gnu-gcc "${options[@]}" -static -o "$root/test/states-static"
        archive "$root" > "$work/base.cpio"
        mv "$work/base.cpio" "$cache/base.cpio"
    fi
    rm -rf "$work"
    work=
}

# archive DIRECTORY: not compressed, because unpacking would take longer than loading.
archive() { (cd "$1" && find . | cpio --quiet -o -H newc -R 0:0); }

# run PROGRAM ARGUMENTS...: returns its exit status, which the machine must have printed.
run() {
    local program=$1
    shift
    work=$(mktemp -d "$cache/work.XXXXXX")
    local lab
    lab=$(dirname "$program")/../pagefold-lab
    mkdir -p "$work/own/test"
    cp "$program" "$work/own/test/program"
    [ ! -x "$lab" ] || cp "$lab" "$work/own/test/pagefold-lab"
    : > "$work/own/test/arguments"
    [ $# -eq 0 ] || printf '%s\n' "$@" > "$work/own/test/arguments"
    # The kernel unpacks one archive after the other.
    { cat "$cache/base.cpio"; archive "$work/own"; } > "$work/initramfs.cpio"
    local machine=(-M "virt,mem-merge=off" -cpu "${CPU:-max,pauth-impdef=on}" -smp 2 -m 2G -nographic -no-reboot -nodefaults
        -chardev "stdio,id=console,logfile=$work/output" -serial chardev:console)
    # In the background, so that signals arrive here. Huge pages with madvise only, so that tests control them.
    timeout "${SECONDS_AT_MOST:-1800}" qemu-system-aarch64 "${machine[@]}" -kernel "$cache/vmlinuz" \
        -initrd "$work/initramfs.cpio" -append "console=ttyAMA0 quiet panic=-1 transparent_hugepage=madvise" \
        < /dev/null &
    qemu=$!
    wait "$qemu" || fail "the machine did not end by itself: exit status $?"
    qemu=
    local status
    status=$(sed -n 's/^ENDED \([0-9]*\)\r*$/\1/p' "$work/output")
    [ -n "$status" ] || fail "the machine ended before the tests did"
    grep -q '^test result: ' "$work/output" || fail "no test result"
    exit "$status"
}

if [ "${1:-}" = run ]; then
    shift
    run "$@"
fi

prepare
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$PWD/labs/arm64.sh run"
[ $# -gt 0 ] || set -- --package pagefold-labs --test inject -- --show-output
# Optimized: the emulated machine is many times slower than this one.
exec cargo test ${LOCKED:+"$LOCKED"} --release --all-features --target "$target" "$@"
