use super::*;
use pagefold_base::IdSet;
use proptest::prelude::*;

/// The arguments of a machine that a script starts.
const SCRIPT: &str = "qemu-system-x86_64 -name web -machine q35,accel=kvm -cpu Skylake-Server,+vmx,-avx -smp 8,sockets=2 -m 4G \
    -drive file=/vm/web.img,if=none,id=d0,format=raw -device virtio-blk-pci,drive=d0,id=disk0 \
    -netdev tap,id=n0,ifname=tap0,script=no -device virtio-net-pci,netdev=n0 -nographic";

/// The memory, a disk and a network as libvirt 11 writes them.
const LIBVIRT: &[&str] = &[
    "qemu-system-x86_64",
    "-object",
    r#"{"qom-type":"memory-backend-memfd","id":"pc.ram","share":true,"x-use-canonical-path-for-ramblock-id":false,"size":1073741824}"#,
    "-blockdev",
    r#"{"driver":"file","filename":"/vm/a,b.img","node-name":"libvirt-1-storage","read-only":false}"#,
    "-blockdev",
    r#"{"node-name":"libvirt-1-format","driver":"raw","file":"libvirt-1-storage"}"#,
    "-device",
    r#"{"driver":"virtio-blk-pci","bus":"pci.4","drive":"libvirt-1-format","id":"virtio-disk0","bootindex":1}"#,
    "-netdev",
    r#"{"type":"tap","fd":"25","id":"hostnet0"}"#,
];

fn script() -> Vec<String> {
    SCRIPT.split_ascii_whitespace().map(str::to_owned).collect()
}

fn libvirt() -> Vec<String> {
    LIBVIRT.iter().map(|argument| (*argument).to_owned()).collect()
}

/// The arguments that an option changes or adds, in order.
fn changed(arguments: &[String], option: &VmOption) -> Vec<String> {
    let after = set_option(arguments, option).unwrap_or_else(|why| panic!("{option:?}: {why}"));
    assert_eq!(set_option(&after, option).as_ref().ok(), Some(&after).filter(|_| !is_once_only(option)), "{option:?}");
    after.into_iter().filter(|argument| !arguments.contains(argument)).collect()
}

/// Options that a second attempt refuses, because the machine has them.
fn is_once_only(option: &VmOption) -> bool {
    matches!(option, VmOption::VirtualNodes { .. } | VmOption::DiskIoThreads { .. })
}

fn refusal(arguments: &[String], option: &VmOption) -> String {
    set_option(arguments, option).expect_err("it must be refused")
}

#[test]
fn cpu_model_and_features_replace_earlier_forms() {
    assert_eq!(changed(&script(), &VmOption::HostCpuModel), ["host,+vmx,-avx"]);
    let feature = |name: &str, enable| VmOption::CpuFeature { name: name.to_owned(), enable };
    assert_eq!(changed(&script(), &feature("kvm-pv-eoi", true)), ["Skylake-Server,+vmx,-avx,kvm-pv-eoi=on"]);
    assert_eq!(changed(&script(), &feature("avx", true)), ["Skylake-Server,+vmx,avx=on"]);
    let plain = ["qemu".to_owned()];
    assert_eq!(changed(&plain, &VmOption::HostCpuModel), ["-cpu", "host"]);
    assert_eq!(changed(&plain, &feature("x2apic", false)), ["-cpu", "qemu64,x2apic=off"]);
    let power = VmOption::CpuPowerManagement { enable: true };
    assert_eq!(changed(&script(), &power), ["-overcommit", "cpu-pm=on"]);
    let locked = ["qemu", "-overcommit", "mem-lock=on,cpu-pm=off"].map(str::to_owned);
    assert_eq!(changed(&locked, &power), ["mem-lock=on,cpu-pm=on"]);
}

#[test]
fn spinlock_retries_replace_earlier_forms() {
    let option = VmOption::HyperVSpinlocks { retries: 0x1fff };
    assert_eq!(changed(&script(), &option), ["Skylake-Server,+vmx,-avx,hv-spinlocks=0x1fff"]);
    let low = ["qemu", "-cpu", "host,hv_spinlocks=0"].map(str::to_owned);
    assert_eq!(changed(&low, &option), ["host,hv_spinlocks=0x1fff"]);
}

#[test]
fn disk_options_follow_the_nodes_of_a_disk() {
    let cache = |disk: &str| VmOption::DiskCacheNone { disk: disk.to_owned() };
    let aio =
        |disk: &str, interface: &str| VmOption::DiskAio { disk: disk.to_owned(), interface: interface.to_owned() };
    for disk in ["d0", "disk0"] {
        let drive = "file=/vm/web.img,if=none,id=d0,format=raw";
        assert_eq!(changed(&script(), &cache(disk)), [format!("{drive},cache=none")]);
        assert!(refusal(&script(), &aio(disk, "native")).contains("cache=none"));
        assert_eq!(changed(&script(), &aio(disk, "io_uring")), [format!("{drive},aio=io_uring")]);
    }
    let direct = set_option(&libvirt(), &cache("virtio-disk0")).unwrap();
    let nodes: Vec<&String> =
        direct.iter().filter(|argument| argument.contains(r#""cache":{"direct":true}"#)).collect();
    assert_eq!(nodes.len(), 2, "{direct:?}");
    assert!(nodes[0].contains("/vm/a,b.img"));
    let [storage] = &changed(&direct, &aio("libvirt-1-format", "native"))[..] else { panic!() };
    assert!(storage.contains(r#""aio":"native""#) && storage.contains("libvirt-1-storage"), "{storage}");
    assert!(refusal(&script(), &cache("d1")).contains("d1"));
}

#[test]
fn iothreads_come_before_the_device() {
    let threads = |disk: &str, count| VmOption::DiskIoThreads { disk: disk.to_owned(), count };
    let after = set_option(&script(), &threads("disk0", 1)).unwrap();
    let position = |text: &str| after.iter().position(|argument| argument == text).unwrap();
    assert!(position("iothread,id=disk0-io0") < position("virtio-blk-pci,drive=d0,id=disk0,iothread=disk0-io0"));
    assert!(refusal(&script(), &threads("disk0", 2)).contains("JSON"));
    let [first, second, device] = &changed(&libvirt(), &threads("virtio-disk0", 2))[..] else { panic!() };
    assert_eq!([first, second], ["iothread,id=virtio-disk0-io0", "iothread,id=virtio-disk0-io1"]);
    assert!(device.contains(r#""iothread-vq-mapping":[{"iothread":"virtio-disk0-io0"},"#), "{device}");
    assert!(refusal(&after, &threads("disk0", 1)).contains("already"));
    assert!(refusal(&after, &threads("disk0", 2)).contains("JSON"));
    // A second iothread beside the first one.
    let one = set_option(&libvirt(), &threads("virtio-disk0", 1)).unwrap();
    let [object, device] = &changed(&one, &threads("virtio-disk0", 2))[..] else { panic!() };
    assert_eq!(object, "iothread,id=virtio-disk0-io1");
    let mapping = r#""iothread-vq-mapping":[{"iothread":"virtio-disk0-io0"},{"iothread":"virtio-disk0-io1"}]"#;
    assert!(device.contains(mapping) && !device.contains(r#""iothread":"virtio-disk0-io0","#), "{device}");
    let two = set_option(&one, &threads("virtio-disk0", 2)).unwrap();
    assert!(refusal(&two, &threads("virtio-disk0", 2)).contains("already"));
}

#[test]
fn network_queues_need_a_tap_that_qemu_opens() {
    let queues = |network: &str| VmOption::NetworkQueues { network: network.to_owned(), count: 4 };
    let why = refusal(&script(), &queues("n0"));
    assert!(why.contains("ip tuntap add dev tap0 mode tap multi_queue") && why.contains("vectors=10"), "{why}");
    let with_queues = |text: &str, queues: &str| -> Vec<String> {
        let replace = |argument: &String| argument.replace(text, queues);
        script().iter().map(replace).collect()
    };
    assert!(refusal(&with_queues("script=no", "queues=1"), &queues("n0")).contains("multi_queue"));
    let one = VmOption::NetworkQueues { network: "n0".to_owned(), count: 1 };
    let why = refusal(&with_queues("script=no", "queues=8"), &one);
    assert!(why.contains("created with one queue") && !why.contains("multi_queue"), "{why}");
    // A device with several queues has them already.
    assert_eq!(
        changed(&with_queues("script=no", "queues=8"), &queues("n0")),
        ["tap,id=n0,ifname=tap0,queues=4", "virtio-net-pci,netdev=n0,mq=on,vectors=10"]
    );
    // QEMU creates a device that has no name.
    assert_eq!(
        changed(&with_queues("ifname=tap0,script=no", "script=no"), &queues("n0")),
        ["tap,id=n0,script=no,queues=4", "virtio-net-pci,netdev=n0,mq=on,vectors=10"]
    );
    assert_eq!(
        changed(&script(), &VmOption::VhostNet { network: "n0".to_owned() }),
        ["tap,id=n0,ifname=tap0,script=no,vhost=on"]
    );
    assert!(refusal(&libvirt(), &queues("hostnet0")).contains("open files"));
    let user = ["qemu", "-netdev", "user,id=u"].map(str::to_owned);
    assert!(refusal(&user, &VmOption::VhostNet { network: "u".to_owned() }).contains("only tap"));
}

#[test]
fn memory_becomes_private_unless_a_device_shares_it() {
    let [memory] = &changed(&libvirt(), &VmOption::MergeableMemory)[..] else { panic!() };
    assert!(memory.contains(r#""qom-type":"memory-backend-ram""#) && !memory.contains("share"), "{memory}");
    let shared =
        ["qemu", "-object", "memory-backend-memfd,id=m,seal=on,size=1G", "-object", "memory-backend-ram,id=n,share=on"];
    assert_eq!(
        set_option(&shared.map(str::to_owned), &VmOption::MergeableMemory).unwrap(),
        ["qemu", "-object", "memory-backend-ram,id=m,size=1G", "-object", "memory-backend-ram,id=n"]
    );
    let mut shared = libvirt();
    shared.extend(["-netdev", "vhost-user,id=n,chardev=c"].map(str::to_owned));
    assert!(refusal(&shared, &VmOption::MergeableMemory).contains("vhost-user"));
}

#[test]
fn memory_that_the_owner_keeps_from_merging_stays() {
    let refused = |options: &str| {
        let line: Vec<String> = format!("qemu {options}").split(' ').map(str::to_owned).collect();
        refusal(&line, &VmOption::MergeableMemory)
    };
    for options in [
        "-machine pc,mem-merge=off -object memory-backend-memfd,id=m,size=1G",
        "-object memory-backend-ram,id=m,share=on,merge=off,size=1G",
        r#"-object {"qom-type":"memory-backend-memfd","id":"m","merge":false,"size":1024}"#,
    ] {
        assert!(refused(options).starts_with("its owner forbids merging"), "{options}");
    }
    for options in [
        "-mem-path /dev/hugepages",
        "-object memory-backend-file,id=m,mem-path=/x,,y,share=on,size=1G",
        "-object memory-backend-memfd,id=m,hugetlb=on,size=1G",
        r#"-object {"qom-type":"memory-backend-memfd","id":"m","hugetlb":true,"size":1024}"#,
    ] {
        assert!(refused(options).contains("huge pages of the pool"), "{options}");
    }
}

#[test]
fn nodes_have_equal_parts_and_are_bound() {
    assert_eq!(
        changed(&script(), &virtual_nodes(&[0, 2])),
        [
            "-object",
            "memory-backend-ram,id=vnode0,size=2048M,policy=bind,host-nodes=0",
            "-numa",
            "node,nodeid=0,cpus=0-3,memdev=vnode0",
            "-object",
            "memory-backend-ram,id=vnode1,size=2048M,policy=bind,host-nodes=2",
            "-numa",
            "node,nodeid=1,cpus=4-7,memdev=vnode1"
        ]
    );
    assert!(refusal(&script(), &virtual_nodes(&[0, 1, 2])).contains("equal"));
    let split = set_option(&script(), &virtual_nodes(&[0, 1])).unwrap();
    assert!(refusal(&split, &virtual_nodes(&[0, 1])).contains("already"));
}

#[test]
fn each_node_has_whole_sockets() {
    let smp_after = |smp: &str| {
        let line = ["qemu", "-m", "4G", "-smp", smp].map(str::to_owned);
        set_option(&line, &virtual_nodes(&[0, 1])).map(|after| after[4].clone())
    };
    for (before, after) in [
        ("8", "8,sockets=2"),
        ("8,sockets=1,cores=4,threads=2", "8,sockets=2,cores=2,threads=2"),
        ("cpus=8,cores=8,maxcpus=8", "cpus=8,cores=4,maxcpus=8,sockets=2"),
        ("8,dies=2", "8,dies=2,sockets=2"),
        ("8,sockets=4", "8,sockets=4"),
        ("8,sockets=2,cores=4", "8,sockets=2,cores=4"),
        ("12,sockets=3,cores=4", "12,sockets=2,cores=6"),
    ] {
        assert_eq!(smp_after(before).as_deref(), Ok(after), "{before}");
    }
    for (before, reason) in [
        ("4,maxcpus=8", "plugged later"),
        ("6,sockets=1,cores=3,threads=2", "cannot be split"),
        ("8,threads=x", "cannot be split"),
    ] {
        assert!(smp_after(before).is_err_and(|why| why.contains(reason)), "{before}");
    }
}

#[test]
fn machine_with_special_memory_is_not_split() {
    for options in [
        "-mem-path /dev/hugepages",
        "--mem-prealloc",
        "-object memory-backend-memfd,id=m,size=1G",
        "-object memory-backend-ram,id=m,size=1G,share=on",
        "-object memory-backend-ram,id=m,size=1G,prealloc=on",
        r#"-object {"qom-type":"memory-backend-ram","id":"m","size":1024,"prealloc":true}"#,
    ] {
        let mut line = script();
        line.extend(options.split(' ').map(str::to_owned));
        assert!(refusal(&line, &virtual_nodes(&[0, 1])).contains("special"), "{options}");
    }
    let mut plain = script();
    plain.extend(["-object", "memory-backend-ram,id=dimm,size=1G,share=off"].map(str::to_owned));
    assert!(set_option(&plain, &virtual_nodes(&[0, 1])).is_ok());
}

/// Virtual nodes on these nodes of the host.
fn virtual_nodes(ids: &[u32]) -> VmOption {
    VmOption::VirtualNodes { host_nodes: ids.iter().map(|&id| HostNode { id, cpus: IdSet::default() }).collect() }
}

fn options() -> impl Strategy<Value = VmOption> {
    let name = "[a-z0-9-]{1,6}";
    prop_oneof![
        Just(VmOption::HostCpuModel),
        Just(VmOption::MergeableMemory),
        (name, any::<bool>()).prop_map(|(name, enable)| VmOption::CpuFeature { name, enable }),
        (0..4_u32).prop_map(|count| virtual_nodes(&(0..count).collect::<Vec<_>>())),
        name.prop_map(|disk| VmOption::DiskCacheNone { disk }),
        (name, name).prop_map(|(disk, interface)| VmOption::DiskAio { disk, interface }),
        (name, 0..4_u32).prop_map(|(disk, count)| VmOption::DiskIoThreads { disk, count }),
        (name, 0..9_u32).prop_map(|(network, count)| VmOption::NetworkQueues { network, count }),
    ]
}

proptest! {
    #[test]
    fn no_command_line_panics(
        arguments in prop::collection::vec("(-(device|drive|blockdev|object|netdev|cpu|smp|m|numa|machine)|[a-z0-9=,{}\":\\.]{0,20})", 0..12),
        option in options(),
    ) {
        let _ = set_option(&arguments, &option);
    }

    #[test]
    fn values_without_change_are_rendered_as_they_were(text in "[a-z]{1,4}(,[a-z]{1,3}=([a-z0-9/]|,,){0,6}){0,4}") {
        prop_assert_eq!(OptionValue::parse(&text).render(), text);
    }
}
