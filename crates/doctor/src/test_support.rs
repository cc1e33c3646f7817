//! What tests of decisions need and decisions may not have: state of a thread, and the parser of libvirt's definitions.

use crate::decide::Verdict;
use pagefold_base::Reading;
use pagefold_base::libvirt::LibvirtDefinition;
use std::cell::RefCell;
use std::collections::BTreeSet;

thread_local! {
    /// The verdicts that the tables of this thread have expected and found.
    static TESTED: RefCell<BTreeSet<(String, Verdict)>> = const { RefCell::new(BTreeSet::new()) };
}

/// Notes that a rule gave the verdict that a test expects.
pub fn note_tested(rule: &str, verdict: Verdict) {
    TESTED.with_borrow_mut(|tested| tested.insert((rule.to_owned(), verdict)));
}

/// The rules and verdicts that were noted on this thread since the last call.
pub fn take_tested() -> BTreeSet<(String, Verdict)> {
    TESTED.take()
}

/// The definition of a domain with these elements.
pub fn parse_domain(elements: &str) -> Reading<LibvirtDefinition> {
    let text = format!("<domain type='kvm'><name>web</name>{elements}</domain>");
    pagefold_host::parse::libvirt_definition(text.as_bytes())
}
