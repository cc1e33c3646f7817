use super::*;
use proptest::prelude::*;

/// A domain as `virsh dumpxml --inactive` prints it, with parts that Pagefold knows nothing of.
const DOMAIN: &str = "<domain type='kvm'>
  <name>web</name>
  <!-- do not touch -->
  <metadata>
    <app:info xmlns:app='http://example.org/'>a &amp; b</app:info>
  </metadata>
  <memory unit='GiB'>4</memory>
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
    <locked/>
  </memoryBacking>
  <vcpu placement='static'>8</vcpu>
  <features>
    <acpi/>
    <apic/>
  </features>
  <cpu mode='custom' match='exact' check='none'>
    <model fallback='forbid'>Skylake-Server</model>
    <feature policy='disable' name='x2apic'/>
  </cpu>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file='/vm/web.img'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'>
      <target dev='sda' bus='sata'/>
    </disk>
    <interface type='bridge'>
      <source bridge='br0'/>
      <model type='virtio'/>
    </interface>
  </devices>
</domain>
";

fn set(option: &VmOption) -> String {
    let after = set_option(DOMAIN, option).unwrap_or_else(|why| panic!("{option:?}: {why}"));
    Document::parse(&after).unwrap();
    after
}

/// The lines that an option removes and adds.
fn changes(option: &VmOption) -> (Vec<String>, Vec<String>) {
    let after = set(option);
    let difference = |of: &str, without: &str| -> Vec<String> {
        of.lines()
            .filter(|line| !without.lines().any(|other| other == *line))
            .map(|line| line.trim().to_owned())
            .collect()
    };
    (difference(DOMAIN, &after), difference(&after, DOMAIN))
}

fn texts(lines: &[&str]) -> Vec<String> {
    lines.iter().map(|line| (*line).to_owned()).collect()
}

#[test]
fn host_model_keeps_features_and_drops_the_named_model() {
    let (removed, added) = changes(&VmOption::HostCpuModel);
    let expected =
        ["<cpu mode='custom' match='exact' check='none'>", "<model fallback='forbid'>Skylake-Server</model>"];
    assert_eq!((removed, added), (texts(&expected), texts(&["<cpu mode='host-passthrough' check='none'>"])));
    let bare = "<domain type='kvm'><name>a</name></domain>";
    let after = set_option(bare, &VmOption::HostCpuModel).unwrap();
    assert_eq!(after, "<domain type='kvm'><name>a</name>\n  <cpu mode='host-passthrough'/>\n</domain>");
    assert_eq!(set_option(&after, &VmOption::HostCpuModel), Ok(after));
}

#[test]
fn features_go_where_libvirt_has_them() {
    let feature = |name: &str, enable| VmOption::CpuFeature { name: name.to_owned(), enable };
    assert_eq!(changes(&feature("kvm-pv-eoi", true)).1, ["<apic eoi='on'/>"]);
    assert_eq!(changes(&feature("kvm_pv_unhalt", true)).1, ["<pvspinlock state='on'/>"]);
    assert_eq!(changes(&feature("kvm-hint-dedicated", true)).1, ["<kvm>", "<hint-dedicated state='on'/>", "</kvm>"]);
    assert_eq!(changes(&feature("x2apic", true)).1, ["<feature policy='require' name='x2apic'/>"]);
    assert_eq!(changes(&feature("invtsc", true)).1, ["<feature policy='require' name='invtsc'/>"]);
    let (_, added) = changes(&VmOption::HyperVSpinlocks { retries: 0x1fff });
    assert_eq!(added, ["<hyperv>", "<spinlocks retries='8191' state='on'/>", "</hyperv>"]);
    assert!(set_option(DOMAIN, &feature("kvm-asyncpf", true)).is_err());
    assert!(set_option(DOMAIN, &feature("a'/><x", true)).is_err());
    assert!(set_option(DOMAIN, &VmOption::CpuPowerManagement { enable: true }).is_err());
}

#[test]
fn memory_backing_keeps_what_its_owner_chose() {
    let (removed, added) = changes(&VmOption::MergeableMemory);
    assert_eq!(removed, ["<source type='memfd'/>", "<access mode='shared'/>"]);
    assert_eq!(added, Vec::<String>::new());
    for (element, reason) in [
        ("<nosharepages/>", "its owner forbids merging"),
        ("<hugepages/>", "huge pages of the pool"),
        ("<hugepages><page size='1' unit='GiB'/></hugepages>", "huge pages of the pool"),
    ] {
        let kept = DOMAIN.replace("<locked/>", element);
        let why = set_option(&kept, &VmOption::MergeableMemory).unwrap_err();
        assert!(why.contains(reason), "{element}: {why}");
    }
    let shared = DOMAIN.replace("type='bridge'", "type='vhostuser'");
    assert!(set_option(&shared, &VmOption::MergeableMemory).is_err());
}

#[test]
fn disk_is_found_by_target_and_by_the_alias_that_libvirt_gives_it() {
    for disk in ["vda", "virtio-disk0", "drive-virtio-disk0"] {
        let (_, added) = changes(&VmOption::DiskCacheNone { disk: disk.to_owned() });
        assert_eq!(added, ["<driver cache='none' name='qemu' type='raw'/>"], "{disk}");
    }
    let disk = || "vda".to_owned();
    assert!(set_option(DOMAIN, &VmOption::DiskCacheNone { disk: "vdb".to_owned() }).is_err());
    assert!(set_option(DOMAIN, &VmOption::DiskAio { disk: disk(), interface: "native".to_owned() }).is_err());
    let uring = VmOption::DiskAio { disk: disk(), interface: "io_uring".to_owned() };
    assert_eq!(changes(&uring).1, ["<driver io='io_uring' name='qemu' type='raw'/>"]);
    let (_, added) = changes(&VmOption::DiskIoThreads { disk: disk(), count: 1 });
    assert_eq!(added, ["<driver iothread='1' name='qemu' type='raw'/>", "<iothreads>1</iothreads>"]);
    let (_, added) = changes(&VmOption::DiskIoThreads { disk: disk(), count: 2 });
    assert!(added.contains(&"<iothreads><iothread id='1'/><iothread id='2'/></iothreads>".to_owned()), "{added:?}");
    assert!(set_option(DOMAIN, &VmOption::DiskIoThreads { disk: "sda".to_owned(), count: 1 }).is_err());
    assert_eq!(
        (target_index("vda"), target_index("vdz"), target_index("vdaa"), target_index("x")),
        (Some(0), Some(25), Some(26), None)
    );
}

#[test]
fn interface_gets_a_driver() {
    for network in ["hostnet0", "net0"] {
        let (_, added) = changes(&VmOption::NetworkQueues { network: network.to_owned(), count: 8 });
        assert_eq!(added, ["<driver queues='8' name='vhost'/>"], "{network}");
    }
    assert!(set_option(DOMAIN, &VmOption::VhostNet { network: "net1".to_owned() }).is_err());
}

#[test]
fn nodes_have_equal_parts_and_are_bound() {
    let plain = plain_memory();
    let pinned = plain.replace("<features>", "<cputune><vcpupin vcpu='7' cpuset='9'/></cputune>\n  <features>");
    for (before, own_pins) in [(&plain, 8), (&pinned, 7)] {
        let after = set_option(before, &virtual_nodes(&["0-7", "8-15"])).unwrap();
        for line in [
            "<cell id='0' cpus='0-3' memory='2097152' unit='KiB'/>",
            "<cell id='1' cpus='4-7' memory='2097152' unit='KiB'/>",
            "<memnode cellid='0' mode='strict' nodeset='0'/>",
            "<memnode cellid='1' mode='strict' nodeset='1'/>",
        ] {
            assert!(after.contains(line), "{line}: {after}");
        }
        assert_eq!(after.matches("<vcpupin ").count(), 8);
        assert_eq!(after.matches("cpuset='0-7'").count() + after.matches("cpuset='8-15'").count(), own_pins);
        assert!(
            after.contains("<vcpupin vcpu='3' cpuset='0-7'/>") && after.contains("<vcpupin vcpu='4' cpuset='8-15'/>")
        );
        assert_eq!(set_option(&after, &virtual_nodes(&["0-7", "8-15"])), Ok(after.clone()));
        assert!(set_option(&after, &virtual_nodes(&["0-7"; 4])).is_err());
    }
    assert!(set_option(&plain, &virtual_nodes(&["0-7"; 3])).unwrap_err().contains("equal"));
    let elsewhere = pinned.replace("cpuset='9'", "cpuset='0'");
    assert!(set_option(&elsewhere, &virtual_nodes(&["0-7", "8-15"])).unwrap_err().contains("<vcpupin>"));
}

#[test]
fn each_node_has_whole_sockets() {
    let topology_after = |topology: &str| {
        let before = plain_memory().replace("  </cpu>", &format!("    <topology {topology}/>\n  </cpu>"));
        let after = set_option(&before, &virtual_nodes(&["0-7", "8-15"]))?;
        Ok::<_, String>(after.lines().find(|line| line.contains("<topology")).unwrap().trim().to_owned())
    };
    let after = topology_after("sockets='1' dies='1' cores='4' threads='2'");
    assert_eq!(after.as_deref(), Ok("<topology sockets='2' dies='1' cores='2' threads='2'/>"));
    let whole = topology_after("sockets='4' cores='2' threads='1'");
    assert_eq!(whole.as_deref(), Ok("<topology sockets='4' cores='2' threads='1'/>"));
    let unequal = topology_after("sockets='1' cores='1' threads='8'").unwrap_err();
    assert!(unequal.contains("<topology> cannot be split"), "{unequal}");
}

#[test]
fn machine_that_is_placed_or_has_special_memory_is_not_split() {
    assert!(set_option(DOMAIN, &virtual_nodes(&["0", "1"])).unwrap_err().contains("<memoryBacking>"));
    for (from, to, reason) in [
        ("<locked/>", "<hugepages/>", "<memoryBacking>"),
        ("<locked/>", "<access mode='shared'/>", "<memoryBacking>"),
        ("<locked/>", "<allocation mode='immediate'/>", "<memoryBacking>"),
        ("<features>", "<numatune><memory mode='strict' nodeset='0'/></numatune><features>", "<numatune>"),
        ("placement='static'", "placement='auto'", "placed"),
        ("placement='static'", "placement='static' cpuset='0-3'", "placed"),
    ] {
        let xml = plain_memory().replace(from, to);
        let why = set_option(&xml, &virtual_nodes(&["0", "1"])).unwrap_err();
        assert!(why.contains(reason), "{to}: {why}");
    }
}

/// The domain with private memory that is not in a file.
fn plain_memory() -> String {
    DOMAIN.replace("    <source type='memfd'/>\n    <access mode='shared'/>\n", "")
}

/// Virtual nodes on the host nodes 0, 1 and so on, which have these CPUs.
fn virtual_nodes(cpus: &[&str]) -> VmOption {
    let nodes = (0..).zip(cpus).map(|(id, cpus)| HostNode { id, cpus: cpus.parse().unwrap() });
    VmOption::VirtualNodes { host_nodes: nodes.collect() }
}

#[test]
fn iothreads_that_a_disk_has_are_no_change() {
    let threads = |count| VmOption::DiskIoThreads { disk: "vda".to_owned(), count };
    for count in [1, 2] {
        let with = set(&threads(count));
        assert_eq!(set_option(&with, &threads(count)), Ok(with.clone()));
    }
    for count in [1, 3] {
        assert!(set_option(&set(&threads(2)), &threads(count)).unwrap_err().contains("already"));
    }
}

#[test]
fn single_iothread_gets_a_second_one_beside_it() {
    let threads = |count| VmOption::DiskIoThreads { disk: "vda".to_owned(), count };
    let two = set_option(&set(&threads(1)), &threads(2)).unwrap();
    assert!(two.contains("<iothreads><iothread id='1'/><iothread id='2'/></iothreads>"), "{two}");
    assert!(two.contains("<iothreads>2</iothreads>") && !two.contains("iothread='1'"), "{two}");
    assert_eq!(set_option(&two, &threads(2)), Ok(two.clone()));
    assert!(!two.contains("queues="), "the disk keeps a queue for each virtual CPU: {two}");
}

#[test]
fn comments_metadata_and_other_devices_stay() {
    let all = [
        VmOption::HostCpuModel,
        VmOption::MergeableMemory,
        VmOption::DiskCacheNone { disk: "vda".to_owned() },
        VmOption::NetworkQueues { network: "net0".to_owned(), count: 2 },
    ];
    let after = all.iter().fold(DOMAIN.to_owned(), |xml, option| set_option(&xml, option).unwrap());
    for part in [
        "<!-- do not touch -->",
        "<app:info xmlns:app='http://example.org/'>a &amp; b</app:info>",
        "<locked/>",
        "<target dev='sda' bus='sata'/>",
    ] {
        assert!(after.contains(part), "{part}: {after}");
    }
}

proptest! {
    #[test]
    fn no_text_panics(text in "(<(domain|cpu|disk|devices|memory|vcpu)( [a-z]=')?|[a-z<>/'= ]|</domain>){0,20}") {
        for option in [VmOption::HostCpuModel, VmOption::MergeableMemory, virtual_nodes(&["0", "1"]),
            VmOption::DiskCacheNone { disk: "vda".to_owned() }] {
            let _ = set_option(&text, &option);
            let _ = set_option(&format!("<domain>{text}</domain>"), &option);
        }
    }
}

#[test]
fn clocks_of_hypervisors_are_timers() {
    let feature = |name: &str, enable| VmOption::CpuFeature { name: name.to_owned(), enable };
    let domain = "<domain>\n  <name>a</name>\n</domain>";
    let with = set_option(domain, &feature("hv-time", true)).unwrap();
    let expected = "<domain>\n  <name>a</name>\n  <clock offset='utc'>\n    <timer name='hypervclock' present='yes'/>\n  \
                    </clock>\n</domain>";
    assert_eq!(with, expected);
    assert_eq!(set_option(&with, &feature("hv_time", true)), Ok(with.clone()));
    let off =
        "<domain>\n  <clock offset='localtime'>\n    <timer name='kvmclock' present='no'/>\n  </clock>\n</domain>";
    assert_eq!(set_option(off, &feature("kvmclock", true)), Ok(off.replace("'no'", "'yes'")));
    assert_eq!(set_option(off, &feature("kvmclock", false)), Ok(off.to_owned()));
    let named = off.replace(" present='no'", "");
    assert_eq!(set_option(&named, &feature("kvmclock", true)), Ok(named.clone()));
}
