#!/bin/bash
# Runs in a fresh Debian that systemd has started (labs/deb/test.sh): installs the package, tests it, and purges it. The
# last line is `RESULT` and the exit status. Time limits are long, because guests are emulated.

set -euo pipefail
exec 2>&1
trap 'status=$?; [ $status -eq 0 ] || journalctl --no-pager --lines=60; echo "RESULT $status"; systemctl poweroff -ff' EXIT

ksm=/sys/kernel/mm/ksm
state=/root/before

say() { echo "deb: $*"; }
fail() { say "FAILED: $*"; exit 1; }
until_so() { # WHAT COMMAND...
    local what=$1
    shift
    for ((second = 0; second < 300; second++)); do
        if "$@" > /dev/null 2>&1; then
            say "$what"
            return
        fi
        sleep 1
    done
    fail "did not happen: $what"
}
property() { systemctl show --value --property="$1" pagefold; }
settings() { (cd $ksm && grep . run pages_to_scan sleep_millisecs use_zero_pages 2> /dev/null || true); }
is_back() { [ "$(settings)" = "$(cat $state)" ]; }
is_held() { ! is_back; }
restarted() { [ "$(property NRestarts)" -ge "$1" ] && systemctl is-active --quiet pagefold; }
watchdog_moves() { [ "$(property WatchdogTimestampMonotonic)" -gt "$1" ]; }
saves() { [ "$(cat $ksm/pages_sharing)" -gt 4000 ]; }
has_adopted() { pagefold status --json | grep -q '"adopt"'; }

# The bounding set of the unit, as the mask in /proc.
mask() {
    local word mask=0 bit
    for word in $(property CapabilityBoundingSet); do
        case $word in
        cap_dac_override) bit=1 ;; cap_dac_read_search) bit=2 ;; cap_net_admin) bit=12 ;; cap_sys_ptrace) bit=19 ;;
        cap_sys_admin) bit=21 ;; cap_sys_nice) bit=23 ;; cap_sys_resource) bit=24 ;;
        *) fail "$word is not known to this test" ;;
        esac
        mask=$((mask | 1 << bit))
    done
    printf '%016x' $mask
}

echo '$memory .= sprintf "%-4096d", $_ for 1 .. 8192; sleep 100000;' > /tmp/twin.pl

# A program of another user, with its own seccomp filter, that uses 32 MiB: the same content in all of them.
twin() {
    systemd-run --quiet --unit="twin-$1" --property=User=nobody --property=SystemCallFilter=~@mount \
        --property=Environment=SLURM_JOB_ID=7 -- \
        perl /tmp/twin.pl
}

# Not the defaults, so that restored settings differ from settings that were never changed.
echo 321 > $ksm/pages_to_scan
echo 1 > $ksm/run
settings > $state

say "installing"
dpkg --install /pagefold.deb
systemctl is-enabled --quiet pagefold || fail "the service is not enabled"
until_so "the service is active: it has notified systemd" systemctl is-active --quiet pagefold
pid=$(property MainPID)
status=$(cat "/proc/$pid/status")
for set in CapPrm CapEff CapBnd; do
    grep -qx "$set:	$(mask)" <<< "$status" || fail "$set is not $(mask): $(grep Cap <<< "$status")"
done
say "capabilities are those of the unit: $(property CapabilityBoundingSet)"
grep -qx "NoNewPrivs:	1" <<< "$status" || fail "the daemon may gain privileges"
grep -qx "Seccomp:	0" <<< "$status" || fail "the daemon has a seccomp filter, so it cannot suspend those of others"
until_so "systemd hears that all is well" watchdog_moves "$(property WatchdogTimestampMonotonic)"
pagefold status
setpriv --reuid=65534 --clear-groups pagefold status && fail "any user may query the daemon"
pagefold config check > /dev/null
is_back || fail "the daemon changed a setting in advise mode"
systemd-analyze security --no-pager pagefold | tail -1

say "acting"
sed -i 's/^#mode = .*/mode = "act"/' /etc/pagefold/pagefold.toml
# A census takes several times as much CPU time in an emulated machine as on real CPUs, and more on a loaded host.
sed -i 's/^#max_cpu_seconds_per_mib = .*/max_cpu_seconds_per_mib = 2/' /etc/pagefold/pagefold.toml
systemctl reload pagefold
twin a
twin b
until_so "programs behind seccomp filters are merged" saves
until_so "the daemon controls KSM" is_held
pagefold status

say "restarting, as an upgrade does"
systemctl restart pagefold
until_so "the new daemon has taken over the merged pages" has_adopted
saves || fail "the restart unmerged pages"

say "stopping"
systemctl stop pagefold
is_back || fail "settings were not restored: $(settings)"
say "settings were restored"

say "killing"
systemctl start pagefold
until_so "the daemon controls KSM" is_held
kill -9 "$(property MainPID)"
until_so "systemd has restarted the daemon" restarted 1
until_so "the daemon controls KSM again" is_held
systemctl stop pagefold
is_back || fail "settings were not restored after the daemon was killed: $(settings)"
say "settings were restored"

say "hanging"
mkdir -p /etc/systemd/system/pagefold.service.d
printf '[Service]\nWatchdogSec=20\n' > /etc/systemd/system/pagefold.service.d/test.conf
systemctl daemon-reload
systemctl start pagefold
before=$(property NRestarts)
kill -STOP "$(property MainPID)"
until_so "the watchdog has restarted the daemon" restarted $((before + 1))

say "a job of Slurm"
slurm=/usr/share/doc/pagefold/examples/slurm
job=/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7
mkdir -p $job/step_0
systemctl show --value --property=MainPID twin-a > $job/step_0/cgroup.procs
SLURM_JOB_ID=7 $slurm/prolog.sh
until_so "the job's account is written" test -s /run/pagefold-jobs/7.json
SLURM_JOB_ID=7 $slurm/epilog.sh
grep -q 'slurm:7' /var/log/pagefold/jobs/7.json || fail "the account is not the job's: $(cat /var/log/pagefold/jobs/7.json)"
systemctl is-active --quiet pagefold-job-7 && fail "the watcher of the job is still running"
say "the account was kept when the job ended"

say "purging"
dpkg --listfiles pagefold > /root/files
rm -r /etc/systemd/system/pagefold.service.d
dpkg --purge pagefold
is_back || fail "settings were not restored: $(settings)"
[ "$(cat $ksm/pages_sharing)" -eq 0 ] || fail "pages stayed merged: $(cat $ksm/pages_sharing)"
left=$(while IFS= read -r file; do [ -d "$file" ] || [ ! -e "$file" ] || echo "$file"; done < /root/files)
[ -z "$left" ] || fail "left: $left"
for path in /etc/pagefold /run/pagefold /run/pagefold-jobs /var/log/pagefold /var/lib/pagefold /usr/lib/pagefold; do
    [ ! -e $path ] || fail "left: $path"
done
systemctl list-unit-files 'pagefold*' --no-legend | grep . && fail "a unit is left"
find /etc -name '*pagefold*' | grep . && fail "files of the package are left in /etc"
say "nothing is left"
