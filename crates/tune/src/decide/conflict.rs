//! Programs that write the same settings as `pagefold tune`. Pagefold does not fight them: a KSM setting that one of
//! them writes repeatedly is refused, and all others are named, so that the operator gives the value to that program.
//! A program that moves memory and threads of machines is a rival of `pagefold numa apply`.

/// A program that may change a setting back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// The program.
    pub program: &'static str,
    /// What it writes.
    pub writes: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

/// A row of the table.
struct TunerRow {
    /// Names of its process.
    names: &'static [&'static str],
    conflict: Conflict,
    /// The beginnings of paths that it writes.
    paths: &'static [&'static str],
    /// Whether it writes them again and again, so that a change would not last.
    repeats: bool,
    /// Whether it defines virtual machines.
    defines_machines: bool,
    /// Whether it moves memory and threads of virtual machines between nodes.
    places_machines: bool,
}

const KSM: &str = "sys/kernel/mm/ksm/";

/// The file that shows boot parameters.
pub const COMMAND_LINE: &str = "proc/cmdline";

/// Names and settings: tuned 2.24 `profiles/*/tuned.conf` and `tuned/plugins/plugin_{bootloader,modules,scheduler}.py`; ksmtuned 4.20150326; numad 0.5+20150602 `numad.c`
/// (sched_setaffinity(2) and migrate_pages(2); `khugepaged/scan_sleep_millisecs` when it starts and ends); KubeVirt
/// `pkg/virt-handler/ksm`; oVirt MOM `doc/ksm.rules`; Harvester node-manager `pkg/ksmtuned`; Kata ksm-throttler
/// `throttler.go`; irqbalance 1.9 (`/proc/irq/*/smp_affinity`); power-profiles-daemon 0.21 (energy preference and
/// governor).
const TUNERS: &[TunerRow] = &[
    TunerRow {
        names: &["tuned"],
        conflict: Conflict {
            program: "tuned",
            writes: "sysctls, CPU governors, huge pages, module and boot parameters of its profile, when it starts and \
                     when its profile changes",
            remedy: "put the values into a profile of your own (`pagefold tune export --format tuned`), or stop tuned",
        },
        paths: &[
            "proc/sys/",
            "sys/kernel/mm/transparent_hugepage/",
            "sys/kernel/debug/sched/",
            "sys/devices/system/cpu/",
            "sys/block/",
            "sys/module/",
            COMMAND_LINE,
            KSM,
        ],
        repeats: false,
        defines_machines: false,
        places_machines: false,
    },
    TunerRow {
        names: &["ksmtuned", "ksmctl"],
        conflict: Conflict {
            program: "ksmtuned",
            writes: "settings of KSM, every minute",
            remedy: "stop it: systemctl disable --now ksmtuned",
        },
        paths: &[KSM],
        repeats: true,
        defines_machines: false,
        places_machines: false,
    },
    TunerRow {
        names: &["numad"],
        conflict: Conflict {
            program: "numad",
            writes: "the CPUs and memory nodes of large processes, again and again, and the pause of khugepaged when it \
                     starts and ends",
            remedy: "stop it: systemctl disable --now numad",
        },
        paths: &["sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs"],
        repeats: false,
        defines_machines: false,
        places_machines: true,
    },
    TunerRow {
        names: &["virt-handler"],
        conflict: Conflict {
            program: "KubeVirt (virt-handler)",
            writes: "settings of KSM on the nodes that its ksmConfiguration selects; it also defines the virtual machines",
            remedy: "change the KubeVirt resource: a definition changed here is overwritten at the next start",
        },
        paths: &[KSM],
        repeats: true,
        defines_machines: true,
        places_machines: false,
    },
    TunerRow {
        names: &["momd"],
        conflict: Conflict {
            program: "oVirt MOM",
            writes: "settings of KSM, by the policy of the cluster",
            remedy: "change the policy in oVirt",
        },
        paths: &[KSM],
        repeats: true,
        defines_machines: false,
        places_machines: false,
    },
    TunerRow {
        names: &["harvester-node-manager"],
        conflict: Conflict {
            program: "Harvester (node-manager)",
            writes: "settings of KSM, by its Ksmtuned resource",
            remedy: "change the Ksmtuned resource of this node",
        },
        paths: &[KSM],
        repeats: true,
        defines_machines: false,
        places_machines: false,
    },
    TunerRow {
        names: &["ksm-throttler", "kata-ksm-throttler", "vc-throttler"],
        conflict: Conflict {
            program: "Kata ksm-throttler",
            writes: "settings of KSM, at each start of a virtual machine",
            remedy: "stop it: systemctl disable --now kata-ksm-throttler",
        },
        paths: &[KSM],
        repeats: true,
        defines_machines: false,
        places_machines: false,
    },
    TunerRow {
        names: &["pve-firewall", "pvestatd", "pvedaemon"],
        conflict: Conflict {
            program: "Proxmox VE",
            writes: "the definitions of its virtual machines, from /etc/pve",
            remedy: "change machines with `qm set`: a command line changed here is built anew at the next start",
        },
        paths: &[],
        repeats: false,
        defines_machines: true,
        places_machines: false,
    },
    TunerRow {
        names: &["libvirtd", "virtqemud"],
        conflict: Conflict {
            program: "libvirt",
            writes: "the definitions, cpusets and affinities of its virtual machines",
            remedy: "change machines through libvirt (`pagefold tune apply --define`)",
        },
        paths: &[],
        repeats: false,
        defines_machines: true,
        places_machines: false,
    },
    TunerRow {
        names: &["irqbalance"],
        conflict: Conflict {
            program: "irqbalance",
            writes: "the CPUs of interrupts, every ten seconds",
            remedy: "ban the interrupt (IRQBALANCE_ARGS=--banirq=N), or stop irqbalance",
        },
        paths: &["proc/irq/"],
        repeats: true,
        defines_machines: false,
        places_machines: false,
    },
    TunerRow {
        names: &["power-profiles-daemon"],
        conflict: Conflict {
            program: "power-profiles-daemon",
            writes: "CPU governors and energy preferences",
            remedy: "choose the profile with powerprofilesctl, or stop the daemon",
        },
        paths: &["sys/devices/system/cpu/"],
        repeats: false,
        defines_machines: false,
        places_machines: false,
    },
];

/// The names of processes that the table knows.
pub fn known_names() -> impl Iterator<Item = &'static str> {
    TUNERS.iter().flat_map(|row| row.names.iter().copied())
}

/// What a plan changes, as far as other programs may change the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangedThings {
    /// Paths below the root: settings, parameters of modules below `sys/module`, and [`COMMAND_LINE`].
    pub paths: Vec<String>,
    /// Whether machines are defined anew.
    pub defines_machines: bool,
    /// Whether memory and CPUs of machines are bound to nodes.
    pub places_machines: bool,
}

/// The running programs of the table that change one of these things.
pub fn find_conflicts(running: &[String], changed: &ChangedThings) -> Vec<Conflict> {
    let concerns = |row: &&TunerRow| {
        changed.paths.iter().any(|path| row.paths.iter().any(|prefix| path.starts_with(prefix)))
            || changed.defines_machines && row.defines_machines
            || changed.places_machines && row.places_machines
    };
    running_rows(running).filter(concerns).map(|row| row.conflict).collect()
}

/// The running program that writes a path again and again.
pub fn find_repeating_writer(running: &[String], path: &str) -> Option<Conflict> {
    let mut rows = running_rows(running).filter(|row| row.repeats);
    rows.find(|row| row.paths.iter().any(|prefix| path.starts_with(prefix))).map(|row| row.conflict)
}

/// The running programs that move memory and threads of virtual machines, against any other placement.
pub fn find_placement_rivals(running: &[String]) -> Vec<Conflict> {
    running_rows(running).filter(|row| row.places_machines).map(|row| row.conflict).collect()
}

fn running_rows(running: &[String]) -> impl Iterator<Item = &'static TunerRow> {
    TUNERS.iter().filter(move |row| row.names.iter().any(|name| running.iter().any(|running| running == name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_that_write_the_setting_conflict() {
        let running = ["tuned", "ksmtuned", "numad", "libvirtd"].map(str::to_owned);
        let programs = |path: &str, defines_machines, places_machines| -> Vec<&str> {
            let changed = ChangedThings { paths: vec![path.to_owned()], defines_machines, places_machines };
            find_conflicts(&running, &changed).iter().map(|conflict| conflict.program).collect()
        };
        assert_eq!(programs("proc/sys/vm/swappiness", false, false), ["tuned"]);
        assert_eq!(programs("sys/kernel/mm/ksm/run", false, false), ["tuned", "ksmtuned"]);
        assert_eq!(programs("sys/module/kvm/parameters/halt_poll_ns", true, false), ["tuned", "libvirt"]);
        assert_eq!(programs("sys/kernel/debug/sched/base_slice_ns", false, false), ["tuned"]);
        assert_eq!(programs("proc/irq/1/smp_affinity_list", true, true), ["numad", "libvirt"]);
        let writer = find_repeating_writer(&running, "sys/kernel/mm/ksm/run").map(|conflict| conflict.program);
        assert_eq!(writer, Some("ksmtuned"));
        assert_eq!(find_repeating_writer(&running, "proc/sys/vm/swappiness"), None);
        assert_eq!(find_repeating_writer(&[], "sys/kernel/mm/ksm/run"), None);
    }

    #[test]
    fn numad_is_the_rival_of_a_placement_and_of_no_other_setting() {
        let running = ["tuned", "libvirtd", "irqbalance", "numad"].map(str::to_owned);
        let programs: Vec<&str> = find_placement_rivals(&running).iter().map(|rival| rival.program).collect();
        assert_eq!(programs, ["numad"]);
        assert_eq!(find_placement_rivals(&running[..3]), []);
        assert_eq!(find_repeating_writer(&running, "proc/sys/kernel/numa_balancing"), None);
    }
}
