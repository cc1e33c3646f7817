#!/bin/bash
# Usage: labs/deb/test.sh PACKAGE
#
# Installs a package in a fresh Debian 12 that systemd has started in a QEMU guest, and tests it: labs/deb/guest.sh. The
# guest has Debian's cloud kernel of labs/setup.sh and an initramfs with the complete system. Needs mmdebstrap, cpio,
# lintian, QEMU and, to unpack a system, root. The guest's processor has XSAVE: injection needs it, and QEMU's default
# lacks it.

set -euo pipefail
package=$(realpath "$1")
labs=$(cd "$(dirname "$0")/.." && pwd)
cache=${labs%/*}/.cache
[ "$(id -u)" -eq 0 ] || { echo "skipped: root unpacks a Debian"; exit 0; }
[ -s "$cache/fleet/vmlinuz" ] || { echo "skipped: no guest kernel (make setup)"; exit 0; }

mkdir -p "$cache/deb"
work=$(mktemp -d "$cache/deb/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# The project has no mail address.
lintian --allow-root --fail-on error --suppress-tags bogus-mail-host,bogus-mail-host-in-debian-changelog "$package"

archive() { (cd "$1" && find . -xdev | cpio --quiet -o -H newc -R 0:0); }

if [ ! -s "$cache/deb/debian.cpio" ]; then
    echo "unpacking a Debian"
    mmdebstrap --quiet --mode=root --variant=minbase --include=systemd-sysv bookworm "$work/root" \
        --customize-hook='cd "$1" && rm -rf usr/share/doc/* usr/share/man/* usr/share/locale/* var/lib/apt/lists/* var/cache/apt/*'
    archive "$work/root" > "$work/debian.cpio"
    mv "$work/debian.cpio" "$cache/deb/debian.cpio"
fi

units=$work/more/etc/systemd/system
mkdir -p "$units/multi-user.target.wants"
cp "$package" "$work/more/pagefold.deb"
install -m 755 "$labs/deb/guest.sh" "$work/more/guest.sh"
# The console is for the test alone.
ln -s /dev/null "$units/serial-getty@ttyS0.service"
cat > "$units/test.service" << END
[Unit]
Description=Test of the package
After=basic.target
[Service]
Environment=TERM=dumb SYSTEMD_PAGER=
ExecStart=/guest.sh
StandardOutput=tty
TTYPath=/dev/console
END
ln -s ../test.service "$units/multi-user.target.wants/test.service"
(cat "$cache/deb/debian.cpio"; archive "$work/more") > "$work/initramfs.cpio"

timeout 1800 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 1280 -display none -no-reboot -nic none \
    -kernel "$cache/fleet/vmlinuz" -initrd "$work/initramfs.cpio" -serial stdio -monitor none \
    -append "console=ttyS0 rdinit=/sbin/init panic=-1 nokaslr mitigations=off no_timer_check noreplace-smp \
cryptomgr.notests quiet systemd.show_status=0" < /dev/null | sed -u 's/\r$//' | tee "$cache/deb/log"
grep -qx 'RESULT 0' "$cache/deb/log" || { echo "the package's test failed (or its guest did not end)"; exit 1; }
echo "the package installs, runs and is removed"
