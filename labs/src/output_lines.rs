//! What `pagefold-lab` prints on standard output: one line of JSON for each region or guest, then a line that begins
//! with [`READY_PREFIX`].

use serde::{Deserialize, Serialize};

/// How the line begins that follows the last line of JSON: `READY pid=4711`, `READY guests=4`.
pub const READY_PREFIX: &str = "READY ";

/// A region as it was laid out. `resident`, `zero` and `distinct` are as in [`crate::layout_spec::ExpectedPages`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionLine {
    /// The name of its kind in the SPEC.
    pub kind: String,
    /// The name of its content, for `shared-content`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// Its first address.
    pub start: u64,
    /// Its size in base pages.
    pub pages: u64,
    /// The size of a base page in bytes.
    pub page_size: u64,
    /// The VMAs it consists of.
    pub vmas: u64,
    /// Resident private anonymous pages, the shared zero page not among them.
    pub resident: u64,
    /// Those of them that hold zeros.
    pub zero: u64,
    /// The number of different contents among the resident pages.
    pub distinct: u64,
    /// The child that shares its pages copy-on-write, for `fork-shared`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub child: Option<u32>,
}

impl RegionLine {
    /// The address after its last page.
    #[must_use]
    pub fn end_address(&self) -> u64 {
        self.start + self.pages * self.page_size
    }
}

/// A running virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestLine {
    /// Its name, as QEMU was told.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Its memory, in MiB.
    pub memory_mib: u32,
    /// The socket of its QMP monitor.
    pub qmp: String,
    /// The socket of its serial line. What is written there runs in the guest's shell, line by line.
    pub serial: String,
}
