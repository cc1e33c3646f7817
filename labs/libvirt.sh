#!/bin/sh
# A libvirt in its own namespaces: starts libvirtd and a domain for each DOMAIN, each on QEMU without KVM and with
# libvirt's default sandbox. Needs root and libvirt-daemon-system, which labs/setup.sh installs.
#
#   labs/libvirt.sh DIRECTORY ASSETS DOMAIN...
#
# DIRECTORY is an empty directory that every user may enter: libvirt keeps its files and the guests' serial lines
# (NAME.serial) there. ASSETS is the directory with the kernel and initramfs of labs/setup.sh. A DOMAIN is
# NAME:MIB:SAME:OWN, as in `pagefold-lab fleet`, optionally followed by a colon and XML that goes into the domain:
# web-0:128:24:4:<memoryBacking>...
#
# It prints READY when all domains run; the guests print READY on their serial lines later. Then it runs each line of
# standard input as a shell command, whose output ends with `END STATUS`. When standard input closes, or this script is
# killed, all its processes end: the shell is the first process of a PID namespace. Only DIRECTORY stays on the host.
set -eu

if [ "${PAGEFOLD_LIBVIRT:-}" != inside ]; then
    export PAGEFOLD_LIBVIRT=inside
    exec unshare --mount --net --ipc --pid --fork --kill-child --mount-proc "$0" "$@"
fi

directory=$1 assets=$2
shift 2
fail() { echo "libvirt: $*" >&2; exit 1; }

# Only this namespace sees these: the host's own libvirt, if any, is not touched.
for folder in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt run; do
    mkdir -p "$directory/$folder"
    chmod 755 "$directory/$folder"
    mount --bind "$directory/$folder" "/$folder"
done
# libvirt gives the ownership of boot files to the user that QEMU runs as.
mkdir "$directory/boot"
cp "$assets/vmlinuz" "$assets/initramfs.cpio" "$directory/boot"
chmod 755 "$directory" "$directory/boot"

# Devices without KVM. If root may use KVM and QEMU's user may not, libvirt probes QEMU at each start, which takes
# seconds.
mkdir "$directory/dev"
mount -t tmpfs -o mode=755 dev "$directory/dev"
(cd /dev && cp -a null zero full random urandom tty ptmx "$directory/dev")
for folder in pts shm; do
    mkdir "$directory/dev/$folder"
    mount --bind "/dev/$folder" "$directory/dev/$folder"
done
# libvirt gives each domain its own devices, and would see the mounts below /dev twice.
umount --recursive --lazy /dev 2> /dev/null || :
mount --move "$directory/dev" /dev

# No log daemon and no cgroups: both would be the host's.
cat > /etc/libvirt/qemu.conf << 'QEMU'
stdio_handler = "file"
cgroup_controllers = []
QEMU
cat > /etc/libvirt/libvirtd.conf << 'LIBVIRTD'
auth_unix_rw = "none"
unix_sock_group = "root"
LIBVIRTD
libvirtd --config /etc/libvirt/libvirtd.conf > "$directory/libvirtd.log" 2>&1 &
daemon=$!
tries=0
until [ -S /run/libvirt/libvirt-sock ]; do
    kill -0 "$daemon" 2> /dev/null || fail "libvirtd ended: $(tail -n 5 "$directory/libvirtd.log")"
    tries=$((tries + 1))
    [ "$tries" -lt 300 ] || fail "libvirtd has no socket after 30 s: $(tail -n 5 "$directory/libvirtd.log")"
    sleep 0.1
done

virsh() { timeout 60 virsh -q -c qemu:///system "$@"; }

for domain in "$@"; do
    name=${domain%%:*} rest=${domain#*:}
    mib=${rest%%:*} rest=${rest#*:}
    same=${rest%%:*} rest=${rest#*:}
    own=${rest%%:*}
    extra=
    case $rest in *:*) extra=${rest#*:} ;; esac
    cat > "$directory/$name.xml" << XML
<domain type='qemu'>
  <name>$name</name>
  <memory unit='MiB'>$mib</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>$directory/boot/vmlinuz</kernel>
    <initrd>$directory/boot/initramfs.cpio</initrd>
    <cmdline>console=ttyS0 nokaslr mitigations=off no_timer_check panic=-1 quiet noreplace-smp cryptomgr.notests lab.name=$name lab.same=$same lab.own=$own</cmdline>
  </os>
  <features><acpi/></features>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  $extra
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <serial type='file'><source path='$directory/$name.serial'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
XML
    virsh create "$directory/$name.xml" >&2 || fail "cannot start $name: $(tail -n 5 "$directory/libvirtd.log")"
    echo "libvirt: $name is started" >&2
done

echo READY
while read -r line; do
    status=0
    eval "$line" || status=$?
    echo "END $status"
done
