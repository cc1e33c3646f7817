#!/bin/sh
# Prepares what `pagefold-lab fleet` boots: QEMU, and in .cache/fleet a kernel (Debian's cloud kernel with its KVM
# modules, unpacked and never installed), an initramfs (busybox and guest/init) and QEMU's guest agent. Also prepares
# what tests start: compilers for C, C++ and tables of firmware, Open MPI, the headers of libelf and zlib, pkg-config, groff,
# the SQLite shell, PostgreSQL (no server is set up), libvirt (its daemons are not started), and the programs that read
# exported settings: sysctl, kmod, tuned (it is not started), and Ansible with the collection ansible.posix in
# .cache/ansible. It skips steps that are done already, so it may run each time. Needs Debian on amd64 after
# `apt-get update`, and root only if packages are missing.
set -eu

labs=$(cd "$(dirname "$0")" && pwd)
cache=${labs%/*}/.cache/fleet

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

command -v apt-get > /dev/null && command -v dpkg > /dev/null || fail "this needs Debian's apt-get and dpkg"

missing=
command -v gcc > /dev/null || missing="$missing gcc libc6-dev"
command -v g++ > /dev/null || missing="$missing g++"
command -v mpirun > /dev/null || missing="$missing openmpi-bin"
command -v mpicc > /dev/null || missing="$missing libopenmpi-dev"
command -v pkg-config > /dev/null || missing="$missing pkg-config"
[ -e /usr/include/libelf.h ] || missing="$missing libelf-dev zlib1g-dev"
command -v groff > /dev/null || missing="$missing groff-base"
command -v sqlite3 > /dev/null || missing="$missing sqlite3"
command -v numad > /dev/null || missing="$missing numad"
command -v iasl > /dev/null || missing="$missing acpica-tools"
command -v modprobe > /dev/null || [ -x /sbin/modprobe ] || missing="$missing kmod"
command -v sysctl > /dev/null || [ -x /sbin/sysctl ] || missing="$missing procps"
[ -x /usr/sbin/tuned ] || missing="$missing tuned"
command -v ansible-playbook > /dev/null || missing="$missing ansible-core"
set -- /usr/lib/postgresql/*/bin/pg_amcheck
[ -e "$1" ] || missing="$missing postgresql"
architecture=$(dpkg --print-architecture)
[ "$architecture" != amd64 ] || [ -x /usr/sbin/libvirtd ] || missing="$missing libvirt-daemon-system"
if [ -n "$missing" ] && [ "$(id -u)" -ne 0 ]; then
    say "tests that need these packages will be skipped:$missing"
    missing=
fi
# Services of new packages are not started: tests start what they need.
policy=/usr/sbin/policy-rc.d
install() (
    [ $# -gt 0 ] || exit 0
    say "installing $*"
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        trap 'exit 1' HUP INT TERM
        printf '#!/bin/sh\nexit 101\n' > "$policy"
        chmod 755 "$policy"
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >&2
)
# Debian's package creates and starts a database cluster, unless this file forbids it during the installation.
clusters=/etc/postgresql-common/createcluster.conf
case $missing in *postgresql*)
    install postgresql-common
    cp -p "$clusters" "$clusters.pagefold"
    trap 'mv "$clusters.pagefold" "$clusters"' EXIT
    trap 'exit 1' HUP INT TERM
    sed -i 's/^#*create_main_cluster .*/create_main_cluster = false/' "$clusters"
    ;;
esac
# Unquoted: one word for each package.
install $missing
if [ -e "$clusters.pagefold" ]; then
    mv "$clusters.pagefold" "$clusters"
    trap - EXIT
fi

# The collection ansible.posix, of the package of all collections, which is not installed.
ansible=${labs%/*}/.cache/ansible
if [ ! -s "$ansible/ansible_collections/ansible/posix/plugins/modules/sysctl.py" ]; then
    mkdir -p "$ansible"
    download=$(mktemp -d "$ansible/download.XXXXXX")
    say "downloading ansible"
    if (cd "$download" && apt-get -q -o APT::Sandbox::User=root download ansible >&2 && dpkg -x ./*.deb root); then
        rm -rf "$ansible/ansible_collections"
        mkdir -p "$ansible/ansible_collections/ansible"
        mv "$download"/root/usr/lib/python3/dist-packages/ansible_collections/ansible/posix \
            "$ansible/ansible_collections/ansible/posix"
    else
        rm -rf "$download"
        fail "cannot download the collection ansible.posix"
    fi
    rm -rf "$download"
fi

if [ "$architecture" != amd64 ]; then
    say "the guests are amd64 and this machine is not: tests that boot guests will be skipped"
    exit 0
fi

missing=
command -v qemu-system-x86_64 > /dev/null || missing="$missing qemu-system-x86"
command -v cpio > /dev/null || missing="$missing cpio"
command -v xz > /dev/null || missing="$missing xz-utils"
dpkg-query -W -f '${db:Status-Status}' busybox-static 2> /dev/null | grep -qx installed ||
    missing="$missing busybox-static"
if [ -n "$missing" ]; then
    [ "$(id -u)" -eq 0 ] || fail "needs root: apt-get install --no-install-recommends$missing"
    install $missing
fi

mkdir -p "$cache"
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

if [ ! -s "$cache/vmlinuz" ] || [ ! -s "$cache/modules/kvm-amd.ko" ]; then
    # The meta package depends on the current versioned one.
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" && $2 ~ /^linux-image-/ { print $2; exit }')
    [ -n "$package" ] || fail "apt knows no linux-image-cloud-amd64: run apt-get update"
    say "downloading $package"
    # Without apt's sandbox user, which may not write here.
    (cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$package" >&2)
    dpkg -x "$work"/*.deb "$work/kernel"
    mv "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
    # KVM for guests that run virtual machines; the kernel above has to be of the same package.
    mkdir -p "$work/modules"
    for module in virt/lib/irqbypass arch/x86/kvm/kvm arch/x86/kvm/kvm-amd; do
        mv "$work"/kernel/lib/modules/*/kernel/"$module".ko "$work/modules/"
    done
    rm -rf "$cache/modules"
    mv "$work/modules" "$cache/modules"
    mv "$work/vmlinuz" "$cache/vmlinuz"
fi

# A recent kernel, for guests with features that Debian's stable kernel lacks (PAGEMAP_SCAN: Linux 6.7). It comes from
# Debian's backports, by package lists of its own, so that the system's lists stay as they are.
if [ ! -s "$cache/vmlinuz-recent" ] || [ ! -s "$cache/modules-recent/acpi-cpufreq.ko" ]; then
    mkdir -p "$work/apt/lists/partial"
    echo "deb http://deb.debian.org/debian trixie-backports main" > "$work/apt/sources.list"
    set -- -q -o "Dir::Etc::SourceList=$work/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o "Dir::State::Lists=$work/apt/lists" -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" \
        -o APT::Sandbox::User=root
    # linux-image-VERSION of these kernels has no files: the kernel is in linux-binary-VERSION.
    if apt-get "$@" update > /dev/null &&
        image=$(apt-cache "$@" depends linux-image-cloud-amd64 |
            awk '$1 == "Depends:" && $2 ~ /^linux-image-/ { print $2; exit }') && [ -n "$image" ]; then
        package=linux-binary-${image#linux-image-}
        modules=linux-modules-${image#linux-image-}
        say "downloading $package and $modules"
        mkdir "$work/recent"
        (cd "$work/recent" && apt-get "$@" download "$package" "$modules" >&2 &&
            for file in ./*.deb; do dpkg -x "$file" kernel; done)
        mkdir "$work/modules-recent"
        for module in virt/lib/irqbypass arch/x86/kvm/kvm arch/x86/kvm/kvm-amd drivers/net/tun drivers/net/tap \
            drivers/vhost/vhost_iotlb drivers/vhost/vhost drivers/vhost/vhost_net block/mq-deadline \
            drivers/cpufreq/acpi-cpufreq; do
            xz -dc "$work"/recent/kernel/usr/lib/modules/*/kernel/"$module".ko.xz > "$work/modules-recent/${module##*/}.ko"
        done
        rm -rf "$cache/modules-recent"
        mv "$work/modules-recent" "$cache/modules-recent"
        mv "$work"/recent/kernel/usr/lib/modules/*/vmlinuz "$work/vmlinuz-recent"
        mv "$work/vmlinuz-recent" "$cache/vmlinuz-recent"
    else
        say "no recent kernel: tests that need one will be skipped"
    fi
fi

# The guest agent, which runs in a guest with the libraries of this machine.
if [ ! -s "$cache/qemu-ga" ]; then
    say "downloading qemu-guest-agent"
    mkdir "$work/agent"
    (cd "$work/agent" && apt-get -q -o APT::Sandbox::User=root download qemu-guest-agent >&2 && dpkg -x ./*.deb root)
    mv "$work/agent/root/usr/sbin/qemu-ga" "$cache/qemu-ga"
fi

if [ ! -s "$cache/initramfs.cpio" ] || [ "$labs/guest/init" -nt "$cache/initramfs.cpio" ]; then
    say "building the initramfs"
    root=$work/root
    for directory in bin dev proc sys; do mkdir -p "$root/$directory"; done
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp "$labs/guest/init" "$root/init"
    chmod 755 "$root/init" "$root/bin/busybox"
    # Not compressed: unpacking in the guest would take longer than loading by QEMU.
    (cd "$root" && find . | cpio --quiet -o -H newc -R 0:0) > "$work/initramfs.cpio"
    mv "$work/initramfs.cpio" "$cache/initramfs.cpio"
fi
say "ready: $cache"
