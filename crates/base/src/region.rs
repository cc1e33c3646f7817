//! A region of a process's address space, and whether KSM can merge its pages.

use crate::reading::{Absent, Reading};
use crate::units::{AddressRange, Bytes};

/// The flags of `VmFlags:` in `/proc/PID/smaps` that Pagefold uses (fs/proc/task_mmu.c, `show_smap_vma_flags`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmFlags(u16);

impl VmFlags {
    /// `sh`: VM_SHARED.
    pub const SHARED: Self = Self(1 << 0);
    /// `ms`: VM_MAYSHARE.
    pub const MAY_SHARE: Self = Self(1 << 1);
    /// `pf`: VM_PFNMAP.
    pub const PFN_MAP: Self = Self(1 << 2);
    /// `io`: VM_IO.
    pub const IO: Self = Self(1 << 3);
    /// `de`: VM_DONTEXPAND.
    pub const DONT_EXPAND: Self = Self(1 << 4);
    /// `ht`: VM_HUGETLB.
    pub const HUGETLB: Self = Self(1 << 5);
    /// `mm`: VM_MIXEDMAP.
    pub const MIXED_MAP: Self = Self(1 << 6);
    /// `dp`: VM_DROPPABLE (6.11).
    pub const DROPPABLE: Self = Self(1 << 7);
    /// `mg`: VM_MERGEABLE.
    pub const MERGEABLE: Self = Self(1 << 8);
    /// `hg`: VM_HUGEPAGE.
    pub const HUGE_PAGE: Self = Self(1 << 9);
    /// `lo`: VM_LOCKED.
    pub const LOCKED: Self = Self(1 << 10);
    /// `uw` or `um`: registered with userfaultfd.
    pub const USERFAULT: Self = Self(1 << 11);

    const MNEMONICS: [(&'static str, Self); 13] = [
        ("sh", Self::SHARED),
        ("ms", Self::MAY_SHARE),
        ("pf", Self::PFN_MAP),
        ("io", Self::IO),
        ("de", Self::DONT_EXPAND),
        ("ht", Self::HUGETLB),
        ("mm", Self::MIXED_MAP),
        ("dp", Self::DROPPABLE),
        ("mg", Self::MERGEABLE),
        ("hg", Self::HUGE_PAGE),
        ("lo", Self::LOCKED),
        ("um", Self::USERFAULT),
        ("uw", Self::USERFAULT),
    ];

    /// The flag of a two-letter mnemonic; none for one that Pagefold does not use.
    pub fn from_mnemonic(mnemonic: &str) -> Self {
        Self::MNEMONICS.iter().find(|(name, _)| *name == mnemonic).map_or(Self(0), |&(_, flag)| flag)
    }

    /// All flags of both.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether any flag of `other` is set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// Address and kind of a region: a line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapsEntry {
    /// Its addresses.
    pub range: AddressRange,
    /// `r`, `w`, `x` and `s` or `p`, as printed.
    pub permissions: [u8; 4],
    /// Inode of the mapped file; 0 for none.
    pub inode: u64,
    /// Path or bracketed name, as printed; invalid UTF-8 is replaced.
    pub name: String,
}

/// A region: one entry of `/proc/PID/smaps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its addresses.
    pub range: AddressRange,
    /// `r`, `w`, `x` and `s` or `p`, as printed.
    pub permissions: [u8; 4],
    /// Inode of the mapped file; 0 for none.
    pub inode: u64,
    /// Path or bracketed name, as printed; invalid UTF-8 is replaced.
    pub name: String,
    /// Resident bytes, of any kind.
    pub rss: Bytes,
    /// Resident anonymous bytes: the pages that KSM can merge.
    pub anonymous: Bytes,
    /// Resident bytes mapped as anonymous huge pages.
    pub anon_huge: Bytes,
    /// Resident bytes that are KSM pages (6.6).
    pub ksm: Reading<Bytes>,
    /// Swapped-out bytes.
    pub swap: Bytes,
    /// Resident bytes of hugetlb pages, which `rss` leaves out.
    pub hugetlb: Bytes,
    /// `VmFlags:`.
    pub flags: VmFlags,
}

impl MapsEntry {
    /// What adjacent mappings have in common if the kernel has split them from one: permissions, inode and name.
    pub fn backing(&self) -> (&[u8; 4], u64, &str) {
        (&self.permissions, self.inode, &self.name)
    }
}

impl Region {
    /// As that of [`MapsEntry::backing`].
    pub fn backing(&self) -> (&[u8; 4], u64, &str) {
        (&self.permissions, self.inode, &self.name)
    }

    /// Whether it may continue the memory of the region before it, which the kernel has split off, for example because
    /// advice was given for a part of it.
    pub fn continues(&self, previous: &Self) -> bool {
        previous.range.end == self.range.start && previous.backing() == self.backing()
    }
}

/// Why KSM cannot merge pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ineligible {
    /// Shared memory: `MAP_SHARED`, memfd, tmpfs, QEMU's `share=on`.
    Shared,
    /// Pages of the page cache, which the kernel shares already. A region has this reason if it has no other pages.
    File,
    /// hugetlb pages.
    Hugetlb,
    /// VM_IO or VM_PFNMAP: device memory.
    DeviceMemory,
    /// VM_DONTEXPAND or VM_MIXEDMAP: special mappings of drivers and of the kernel (`[vdso]`, `[vvar]`).
    Special,
    /// VM_DROPPABLE.
    Droppable,
    /// `memfd_secret`.
    Secret,
    /// Guest RAM pinned for a passed-through device.
    Vfio,
}

impl Ineligible {
    /// A short phrase for reports.
    pub fn phrase(self) -> &'static str {
        match self {
            Self::Shared => "shared memory",
            Self::File => "file pages",
            Self::Hugetlb => "hugetlb",
            Self::DeviceMemory => "device memory",
            Self::Special => "special mapping",
            Self::Droppable => "droppable",
            Self::Secret => "secret memory",
            Self::Vfio => "pinned for VFIO",
        }
    }
}

impl Region {
    /// Whether it maps memory rather than a file on a disk: no file at all, a memfd, POSIX and System V shared memory,
    /// anonymous shared memory (mm/shmem.c `shmem_zero_setup`, ipc/shm.c `newseg`), hugetlb pages, or a file in the
    /// folders where libvirt and QEMU keep guest RAM.
    pub fn is_memory(&self) -> bool {
        self.inode == 0 || self.flags.has(VmFlags::HUGETLB) || self.is_memory_object()
    }

    /// Whether its name is that of a memory object that several processes can map.
    pub fn is_memory_object(&self) -> bool {
        ["/memfd:", "/dev/shm/", "/dev/zero", "/SYSV", "/run/shm/", "/var/lib/libvirt/qemu/ram/"]
            .iter()
            .any(|prefix| self.name.starts_with(prefix))
    }

    /// Why none of the region's pages can be merged, or `None` if its anonymous pages can.
    ///
    /// Mirrors `vma_ksm_compatible` (mm/ksm.c, 6.18): not VM_SHARED, VM_MAYSHARE, VM_SPECIAL (VM_IO, VM_DONTEXPAND,
    /// VM_PFNMAP, VM_MIXEDMAP), VM_HUGETLB or VM_DROPPABLE. DAX mappings cannot be recognized from these flags; they
    /// have file pages unless written privately.
    pub fn ineligible(&self) -> Option<Ineligible> {
        if self.name.starts_with("/secretmem") {
            return Some(Ineligible::Secret);
        }
        if self.flags.has(VmFlags::HUGETLB) {
            return Some(Ineligible::Hugetlb);
        }
        if self.flags.has(VmFlags::IO.with(VmFlags::PFN_MAP)) {
            return Some(Ineligible::DeviceMemory);
        }
        if self.flags.has(VmFlags::SHARED.with(VmFlags::MAY_SHARE)) || self.permissions[3] == b's' {
            return Some(Ineligible::Shared);
        }
        if self.flags.has(VmFlags::DONT_EXPAND.with(VmFlags::MIXED_MAP)) {
            return Some(Ineligible::Special);
        }
        if self.flags.has(VmFlags::DROPPABLE) {
            return Some(Ineligible::Droppable);
        }
        None
    }

    /// Whether the region may have KSM pages now: it is enrolled, or the kernel counts some.
    pub fn may_have_merged_pages(&self) -> bool {
        self.flags.has(VmFlags::MERGEABLE) || matches!(&self.ksm, Ok(bytes) if bytes.0 > 0)
    }

    /// A region with all counts zero, as a base for others.
    pub fn empty(range: AddressRange) -> Self {
        Self {
            range,
            permissions: *b"rw-p",
            inode: 0,
            name: String::new(),
            rss: Bytes::ZERO,
            anonymous: Bytes::ZERO,
            anon_huge: Bytes::ZERO,
            ksm: Err(Absent::NotOnThisKernel),
            swap: Bytes::ZERO,
            hugetlb: Bytes::ZERO,
            flags: VmFlags::default(),
        }
    }
}
