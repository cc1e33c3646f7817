//! The standard output of `pagefold-lab`: one line of JSON for each region or guest, then a line that starts with
//! [`READY_PREFIX`].

use serde::{Deserialize, Serialize};

/// The start of the line that follows the last line of JSON: `READY pid=4711`, `READY guests=4`.
pub const READY_PREFIX: &str = "READY ";

/// A laid-out region. `resident`, `zero` and `distinct` are as in [`crate::layout_spec::ExpectedPages`].
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
    /// The number of its VMAs.
    pub vmas: u64,
    /// Resident private anonymous pages, without the shared zero page.
    pub resident: u64,
    /// The resident pages that contain zeros.
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
    /// Its name in QEMU.
    pub name: String,
    /// Its process number.
    pub pid: u32,
    /// Its memory, in MiB.
    pub memory_mib: u32,
    /// The socket of its QMP monitor.
    pub qmp: String,
    /// The socket of its serial line. The guest's shell runs each line that is written there.
    pub serial: String,
}
