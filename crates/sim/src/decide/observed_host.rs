//! The memory of a host's processes, as a scan of their contents found it.

use super::scenario::HostSpec;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedContent {
    /// Zeros.
    Zero,
    /// Contents that changed between two passes.
    Volatile,
    /// Contents that no other page has.
    Unique,
    /// A content by its number, which other pages may have, too.
    Numbered(u32),
}

/// Neighboring pages with one kind of contents. Pages with a numbered content have that one content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedRun {
    /// What the pages hold.
    pub content: ObservedContent,
    /// The number of pages.
    pub pages: u64,
    /// Whether huge pages map them.
    pub is_huge: bool,
}

/// A process, which a scenario calls a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedMachine {
    /// Processes with one name may be of one template.
    pub family: String,
    /// The NUMA node to which its memory is bound.
    pub node: Option<u8>,
    /// Its vCPUs; 0 if none is known.
    pub vcpus: u32,
    /// Its pages, by address.
    pub runs: Vec<ObservedRun>,
    /// The rank of the content of each page but zeros in the order of bytes, from 1; pages of the host with one content
    /// have one rank. Empty if the order is not known.
    pub ranks: Vec<u32>,
}

impl ObservedMachine {
    /// Adds a page behind the last one.
    pub fn push(&mut self, content: ObservedContent, is_huge: bool) {
        match self.runs.last_mut() {
            Some(last) if (last.content, last.is_huge) == (content, is_huge) => last.pages += 1,
            _ => self.runs.push(ObservedRun { content, pages: 1, is_huge }),
        }
    }

    /// The number of its pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(|run| run.pages).sum()
    }
}

/// A host and its processes.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedHost {
    /// The host.
    pub spec: HostSpec,
    /// Its processes.
    pub machines: Vec<ObservedMachine>,
    /// Contents have numbers below this one.
    pub numbered_contents: u32,
    /// Seconds between the two passes, if there were two.
    pub pass_seconds: Option<f64>,
}
