//! libvirt's state of a running domain: `/run/libvirt/qemu/NAME.xml` (`qemuDomainObjPrivateXMLFormat` in
//! src/qemu/qemu_domain.c and `virDomainObjFormat` in src/conf/domain_conf.c, libvirt 9.0). Only root can read it.
//!
//! The file has the whole definition of the domain, also passwords of its displays; nothing of these is kept.

use super::text::malformed;
use pagefold_base::libvirt::LibvirtDomain;
use pagefold_base::{Pid, Reading};
use roxmltree::{Document, Node, ParsingOptions};

/// The largest file that is read. A domain with hundreds of devices has some 100 KiB.
const MAX_STATE_BYTES: usize = 4 << 20;

/// The most XML nodes that are read.
const MAX_XML_NODES: u32 = 200_000;

/// Parses the state of a running domain.
///
/// # Errors
/// `Malformed` if it is no such state, or too large.
pub fn libvirt_domain_state(bytes: &[u8]) -> Reading<LibvirtDomain> {
    let bad = |what: &str| malformed(what, &bytes[..bytes.len().min(80)]);
    if bytes.len() > MAX_STATE_BYTES {
        return Err(bad("the state of a libvirt domain is too large"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| bad("the state of a libvirt domain is not UTF-8"))?;
    let options = ParsingOptions { nodes_limit: MAX_XML_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|_| bad("not XML"))?;
    let status = document.root_element();
    let number = |node: Node<'_, '_>, name: &str| node.attribute(name).and_then(|text| text.parse::<u32>().ok());
    if !status.has_tag_name("domstatus") {
        return Err(bad("not the state of a libvirt domain"));
    }
    let domain = get(status, "domain").ok_or_else(|| bad("a libvirt state without a domain"))?;
    let text_of = |name: &str| get(domain, name).and_then(|node| node.text()).map(str::to_owned);
    let vcpus = get(status, "vcpus").into_iter().flat_map(|vcpus| vcpus.children());
    let memory = get(domain, "numatune").and_then(|tune| get(tune, "memory"));
    let is_strict = |memory: &Node<'_, '_>| memory.attribute("mode") == Some("strict");
    Ok(LibvirtDomain {
        name: text_of("name").ok_or_else(|| bad("a libvirt domain without a name"))?,
        uuid: text_of("uuid").ok_or_else(|| bad("a libvirt domain without a UUID"))?,
        pid: Pid(number(status, "pid").ok_or_else(|| bad("a libvirt state without a pid"))?),
        vcpu_threads: vcpus.filter_map(|vcpu| Some((number(vcpu, "id")?, Pid(number(vcpu, "pid")?)))).collect(),
        strict_nodes: memory.filter(is_strict).and_then(|memory| memory.attribute("nodeset")).map(str::to_owned),
    })
}

/// The parts of a definition that may be recorded. Descriptions, metadata, firmware strings, launch secrets and arguments
/// for QEMU are no such parts.
const RECORDED_PARTS: &[&str] = &[
    "blkiotune",
    "clock",
    "cpu",
    "cputune",
    "currentMemory",
    "devices",
    "features",
    "iothreadids",
    "iothreads",
    "maxMemory",
    "memory",
    "memoryBacking",
    "memtune",
    "name",
    "numatune",
    "on_crash",
    "on_poweroff",
    "on_reboot",
    "os",
    "pm",
    "resource",
    "uuid",
    "vcpu",
    "vcpus",
];

/// Elements that have secrets or arbitrary texts, at any depth (docs/formatdomain.rst of libvirt 11).
const SECRET_ELEMENTS: &[&str] = &[
    "auth",
    "cmdline",
    "cookies",
    "encryption",
    "identity",
    "initarg",
    "initenv",
    "launchSecurity",
    "parameter",
    "secret",
    "sysinfo",
];

/// Whether an attribute may hold a secret: a password, or the query of a disk's URL, which may have a signed token.
fn is_secret_attribute(name: &str) -> bool {
    name.starts_with("passw") || name == "query"
}

/// libvirt's state or persistent definition of a domain without what may be secret: of a state only what
/// [`libvirt_domain_state`] reads, of a definition the parts that describe its resources and devices. Passwords of
/// displays, secrets, metadata, kernel command lines and comments are removed; the rest stays byte for byte.
///
/// # Errors
/// `Malformed` if it is no XML of a domain: then nothing of it may be recorded.
pub fn strip_libvirt_secrets(bytes: &[u8]) -> Reading<Vec<u8>> {
    let bad = |what: &str| malformed(what, b"");
    if bytes.len() > MAX_STATE_BYTES {
        return Err(bad("the XML of a libvirt domain is too large"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| bad("the XML of a libvirt domain is not UTF-8"))?;
    let options = ParsingOptions { nodes_limit: MAX_XML_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|_| bad("not XML of a libvirt domain"))?;
    let root = document.root_element();
    let is_state = root.has_tag_name("domstatus");
    if !is_state && !root.has_tag_name("domain") {
        return Err(bad("not the XML of a libvirt domain"));
    }
    let is_kept = |node: Node<'_, '_>| {
        let parent = node.parent().filter(Node::is_element);
        let name = node.tag_name();
        let is_allowed = match parent.map(|parent| parent.tag_name().name()) {
            Some("domstatus") => ["domain", "vcpus"].contains(&name.name()),
            Some("domain") if is_state => ["name", "numatune", "uuid"].contains(&name.name()),
            Some("domain") => RECORDED_PARTS.contains(&name.name()),
            _ => true,
        };
        is_allowed && name.namespace().is_none() && !SECRET_ELEMENTS.contains(&name.name())
    };
    let mut removed = Vec::new();
    let mut pending = vec![document.root()];
    while let Some(parent) = pending.pop() {
        for node in parent.children() {
            if node.is_comment() || node.is_pi() || node.is_element() && !is_kept(node) {
                removed.push(node.range());
            } else if node.is_element() {
                let secrets = node.attributes().filter(|attribute| is_secret_attribute(attribute.name()));
                removed.extend(secrets.map(|attribute| attribute.range()));
                pending.push(node);
            }
        }
    }
    removed.sort_unstable_by_key(|range| range.start);
    let (mut kept, mut position) = (String::new(), root.range().start);
    for range in removed.into_iter().filter(|range| range.start >= root.range().start && range.end <= root.range().end)
    {
        kept.push_str(&text[position..range.start]);
        position = range.end;
    }
    kept.push_str(&text[position..root.range().end]);
    kept.push('\n');
    Ok(kept.into_bytes())
}

/// The first child element with a name.
fn get<'d, 'i>(parent: Node<'d, 'i>, name: &str) -> Option<Node<'d, 'i>> {
    parent.children().find(|node| node.has_tag_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Absent;
    use proptest::prelude::*;

    const STATE: &str = "<!--
WARNING: THIS IS AN AUTO-GENERATED FILE. CHANGES TO IT ARE LIKELY TO BE
OVERWRITTEN AND LOST.
-->

<domstatus state='running' reason='booted' pid='4711'>
  <taint flag='high-privileges'/>
  <monitor path='/var/lib/libvirt/qemu/domain-1-db/monitor.sock' type='unix'/>
  <vcpus>
    <vcpu id='0' pid='4722'/>
    <vcpu id='1' pid='4723'/>
  </vcpus>
  <domain type='kvm' id='1'>
    <name>db numa,x=1 &amp; co</name>
    <uuid>c7a5fdbd-cdaf-9455-926a-d65c16db1809</uuid>
    <numatune><memory mode='strict' nodeset='0-1'/></numatune>
    <devices><graphics type='vnc' passwd='secret'/></devices>
  </domain>
</domstatus>
";

    #[test]
    fn state_of_a_running_domain_is_parsed() {
        let domain = libvirt_domain_state(STATE.as_bytes()).unwrap();
        assert_eq!((domain.name.as_str(), domain.pid), ("db numa,x=1 & co", Pid(4711)));
        assert_eq!(domain.uuid, "c7a5fdbd-cdaf-9455-926a-d65c16db1809");
        assert_eq!(domain.vcpu_threads, [(0, Pid(4722)), (1, Pid(4723))].into());
        assert_eq!(domain.strict_nodes.as_deref(), Some("0-1"));
        let free = STATE.replace("mode='strict'", "mode='preferred'");
        assert_eq!(libvirt_domain_state(free.as_bytes()).unwrap().strict_nodes, None);
    }

    #[test]
    fn recorded_state_has_no_secrets_and_the_same_meaning() {
        let stripped = strip_libvirt_secrets(STATE.as_bytes()).unwrap();
        assert_eq!(libvirt_domain_state(&stripped), libvirt_domain_state(STATE.as_bytes()));
        let text = String::from_utf8(stripped).unwrap();
        for removed in ["secret", "WARNING", "monitor", "devices"] {
            assert!(!text.contains(removed), "{removed}: {text}");
        }
    }

    #[test]
    fn recorded_definition_has_no_secrets() {
        let definition = "<?xml version='1.0'?><!DOCTYPE domain>
<!-- secret0 -->
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>db</name>
  <description>secret1</description>
  <metadata><owner xmlns='http://example.com'>secret2</owner></metadata>
  <sysinfo type='fwcfg'><entry name='opt/key'>secret3</entry></sysinfo>
  <os><type>hvm</type><cmdline>token=secret4</cmdline></os>
  <cpu mode='host-passthrough'/>
  <devices>
    <disk type='network'><driver name='qemu' cache='none'/>
      <source protocol='rbd' name='pool/image'><auth username='u'><secret type='ceph' uuid='secret5'/></auth></source>
    </disk>
    <graphics type='vnc' port='-1' passwd='secret6' passwdValidTo='secret7' listen='127.0.0.1'/>
    <!-- secret8 -->
    <disk type='network'><source protocol='https' name='image' query='signature=secret10'><host name='h'/></source></disk>
    <disk type='network'><source protocol='ssh' name='i'><identity keyfile='/secret11'/></source></disk>
    <interface type='bridge'><filterref filter='f'><parameter name='KEY' value='secret12'/></filterref></interface>
  </devices>
  <qemu:commandline><qemu:arg value='secret9'/></qemu:commandline>
</domain>
";
        // roxmltree refuses document type declarations, so nothing of such a file is recorded.
        assert!(strip_libvirt_secrets(definition.as_bytes()).is_err());
        let definition = definition.replace("<!DOCTYPE domain>", "");
        let text = String::from_utf8(strip_libvirt_secrets(definition.as_bytes()).unwrap()).unwrap();
        assert!(!text.contains("secret"), "{text}");
        assert_eq!(Document::parse(&text).unwrap().root_element().tag_name().name(), "domain");
        for kept in [
            "<cpu mode='host-passthrough'/>",
            "<driver name='qemu' cache='none'/>",
            "protocol='rbd' name='pool/image'",
            "<graphics type='vnc' port='-1'   listen='127.0.0.1'/>",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
    }

    #[test]
    fn other_texts_are_malformed() {
        let without = |part: &str| STATE.replace(part, "");
        let deep = format!("<domstatus pid='1'>{}</domstatus>", "<a>".repeat(150_000));
        for text in ["", "x", "<a/>", "<domstatus pid='1'/>", &deep, &without(" pid='4711'"), &STATE[..STATE.len() / 2]]
        {
            assert!(matches!(libvirt_domain_state(text.as_bytes()), Err(Absent::Malformed(_))), "{:.80}", text);
        }
        assert!(matches!(libvirt_domain_state(&[b'<', 0xff]), Err(Absent::Malformed(_))));
        assert!(matches!(libvirt_domain_state(&vec![b' '; MAX_STATE_BYTES + 1]), Err(Absent::Malformed(_))));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in 0..STATE.len(), other in any::<u8>()) {
            let _ = libvirt_domain_state(&bytes);
            let _ = strip_libvirt_secrets(&bytes);
            let mut changed = STATE.as_bytes().to_vec();
            changed[cut] = other;
            let _ = libvirt_domain_state(&changed);
            let _ = strip_libvirt_secrets(&changed);
        }
    }
}
