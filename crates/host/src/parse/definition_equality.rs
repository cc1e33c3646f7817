//! Whether two texts are the same definition of a domain of libvirt.
//!
//! libvirt stores a definition in its own form: it orders elements and attributes, indents them, leaves out comments, and
//! adds attributes with their defaults (src/conf/domain_conf.c, `virDomainDefFormatInternalSetRootName`). Elements of one
//! name keep their order, which has a meaning: that of disks and boot devices, for example.
//!
//! Limits: of the defaults only those are known that libvirt 9.0 adds to elements that Pagefold writes. With others, two
//! forms of one definition count as different.

use roxmltree::{Document, Node, ParsingOptions};
use std::collections::BTreeMap;

/// The most XML nodes that are compared.
const MAX_XML_NODES: u32 = 200_000;

/// The deepest nesting of elements that is compared: libxml2, which libvirt uses, refuses more (`xmlParserMaxDepth`).
const MAX_DEPTH: u32 = 256;

/// Whether libvirt adds an attribute with this value where there is none.
fn is_added_default(element: Node<'_, '_>, attribute: &str, value: &str) -> bool {
    match (element.tag_name().name(), attribute, value) {
        // The defaults depend on the mode (src/qemu/qemu_domain.c, `qemuDomainDefCPUPostParse`).
        ("cpu", "check", "none") => match element.attribute("mode") {
            Some("host-passthrough" | "maximum") => true,
            Some("custom") => element.document().root_element().attribute("type") == Some("qemu"),
            _ => false,
        },
        ("cpu", "migratable", "on") => element.attribute("mode") == Some("host-passthrough"),
        ("hyperv", "mode", "custom") => true,
        _ => false,
    }
}

/// Whether two texts are the same definition. Texts that are no XML are not.
pub fn is_same_definition(one: &str, other: &str) -> bool {
    let parse = |text| {
        let options = ParsingOptions { nodes_limit: MAX_XML_NODES, ..ParsingOptions::default() };
        Document::parse_with_options(text, options)
    };
    match (parse(one), parse(other)) {
        (Ok(one), Ok(other)) => is_same_element(one.root_element(), other.root_element(), 0),
        _ => false,
    }
}

fn is_same_element(one: Node<'_, '_>, other: Node<'_, '_>, depth: u32) -> bool {
    let (ones, others) = (children(one), children(other));
    depth < MAX_DEPTH
        && one.tag_name() == other.tag_name()
        && attributes(one) == attributes(other)
        && text(one) == text(other)
        && ones.len() == others.len()
        && ones.into_iter().zip(others).all(|(one, other)| is_same_element(one, other, depth + 1))
}

/// The elements within an element, ordered by name; those of one name keep their order.
fn children<'a, 'input>(element: Node<'a, 'input>) -> Vec<Node<'a, 'input>> {
    let mut children: Vec<Node<'a, 'input>> = element.children().filter(Node::is_element).collect();
    children.sort_by_key(|child| (child.tag_name().namespace(), child.tag_name().name()));
    children
}

/// The values of attributes by namespace and name, without defaults that libvirt adds.
fn attributes<'a>(element: Node<'a, '_>) -> BTreeMap<(Option<&'a str>, &'a str), &'a str> {
    let is_added =
        |attribute: &roxmltree::Attribute<'_, '_>| is_added_default(element, attribute.name(), attribute.value());
    let attributes = element.attributes().filter(|attribute| !is_added(attribute));
    attributes.map(|attribute| ((attribute.namespace(), attribute.name()), attribute.value())).collect()
}

/// The text of an element, without that of elements within it; empty if it is only white space.
fn text(element: Node<'_, '_>) -> String {
    let text: String = element.children().filter(Node::is_text).filter_map(|node| node.text()).collect();
    if text.trim().is_empty() { String::new() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A definition as Pagefold sends it, with its changes in place.
    const SENT: &str = "<!-- kept -->
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>db</name><title>A &amp; B</title>
  <os><boot dev='hd'/><boot dev='network'/></os>
  <features>
    <hyperv>
      <spinlocks retries='8191' state='on'/>
    </hyperv>
    <acpi/>
  </features>
  <cpu mode='host-passthrough' check='none'>
  </cpu>
  <qemu:commandline><qemu:arg value='-x'/></qemu:commandline>
</domain>
";

    /// The same as libvirt 9.0 stores it.
    const STORED: &str = "<domain xmlns:q=\"http://libvirt.org/schemas/domain/qemu/1.0\" type=\"kvm\">
  <name>db</name>
  <title>A &#38; B</title>
  <os>
    <boot dev='hd'/>
    <boot dev='network'/>
  </os>
  <features>
    <acpi/>
    <hyperv mode='custom'>
      <spinlocks state='on' retries='8191'/>
    </hyperv>
  </features>
  <cpu mode='host-passthrough' check='none' migratable='on'/>
  <q:commandline>
    <q:arg value='-x'/>
  </q:commandline>
</domain>";

    #[test]
    fn form_of_libvirt_is_the_same_definition() {
        assert!(is_same_definition(SENT, SENT));
        assert!(is_same_definition(SENT, STORED) && is_same_definition(STORED, SENT));
    }

    #[test]
    fn each_change_makes_another_definition() {
        for (before, after) in [
            ("type=\"kvm\"", "type=\"qemu\""),
            ("<name>db</name>", "<name>db2</name>"),
            ("&#38;", "and"),
            ("<boot dev='hd'/>\n    <boot dev='network'/>", "<boot dev='network'/>\n    <boot dev='hd'/>"),
            ("<acpi/>", ""),
            ("<acpi/>", "<acpi/><acpi/>"),
            ("<acpi/>", "<acpi/><apic/>"),
            ("mode='custom'", "mode='passthrough'"),
            ("migratable='on'", "migratable='off'"),
            ("check='none'", "check='full'"),
            ("retries='8191'", "retries='4095'"),
            ("value='-x'", "value='-y'"),
            ("qemu/1.0", "qemu/2.0"),
            ("</domain>", ""),
        ] {
            let changed = STORED.replacen(before, after, 1);
            assert_ne!(changed, STORED, "{before}");
            assert!(!is_same_definition(SENT, &changed), "{before} became {after}");
        }
        let [by_model, checked] = ["mode='custom'", "mode='custom' check='none'"]
            .map(|attributes| SENT.replace("mode='host-passthrough' check='none'", attributes));
        assert!(!is_same_definition(&by_model, &checked), "its default is another");
        let [by_model, checked] = [by_model, checked].map(|text| text.replace("type='kvm'", "type='qemu'"));
        assert!(is_same_definition(&by_model, &checked), "an emulated CPU is not checked");
        let deep = |depth: usize| "<a>".repeat(depth) + &"</a>".repeat(depth);
        assert!(is_same_definition(&deep(256), &deep(256)) && !is_same_definition(&deep(257), &deep(257)));
        assert!(!is_same_definition("", "") && !is_same_definition("db", "db"), "no XML");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_comparison_panic(
            one in "(<[ab] ?[xy]?(='.')?>|</[ab]>|<[ab]/>|[ -~]){0,12}",
            other in "(<[ab]>|</[ab]>|<[ab]/>|\\PC){0,12}",
        ) {
            prop_assert_eq!(is_same_definition(&one, &other), is_same_definition(&other, &one));
        }
    }
}
