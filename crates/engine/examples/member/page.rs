//! Pages, their expected contents, and the operations of a program on them.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::{ptr, slice};

pub const PAGE_BYTES: usize = 4096;

/// The content of a page: a seed and a page number, from which all its bytes follow.
pub type ExpectedContent = (u64, u64);

pub const ZERO_CONTENT: ExpectedContent = (0, 0);

/// The seed of file contents. The page number is that in the file.
pub const FILE_SEED: u64 = 10;

pub fn fill_page(page: &mut [u8], (seed, number): ExpectedContent) {
    let mut state = seed << 32 ^ number << 12;
    for word in page.as_chunks_mut::<8>().0 {
        // splitmix64 (G. Steele et al., OOPSLA 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        *word = if seed == 0 { [0; 8] } else { (value ^ value >> 31).to_ne_bytes() };
    }
}

pub fn filled_page(content: ExpectedContent) -> Vec<u8> {
    let mut page = vec![0; PAGE_BYTES];
    fill_page(&mut page, content);
    page
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PageAccess {
    Write,
    Read,
    NoAccess,
    Guarded,
    Unmapped,
}

/// A page of the program, at any address.
#[derive(Clone, Debug)]
pub struct ExpectedPage {
    pub address: usize,
    pub access: PageAccess,
    pub content: ExpectedContent,
    /// Contents with which the page may have been merged.
    pub merged_contents: Vec<ExpectedContent>,
    /// The page was added by growing another page. If its content is dropped, it reads as the next page of the store.
    pub is_growth_remainder: bool,
}

impl ExpectedPage {
    pub fn new(address: usize) -> Self {
        Self {
            address,
            access: PageAccess::Write,
            content: ZERO_CONTENT,
            merged_contents: Vec::new(),
            is_growth_remainder: false,
        }
    }

    /// Whether the possible contents are known after its content is dropped.
    pub fn may_be_dropped(&self) -> bool {
        self.is_readable() && !self.is_growth_remainder
    }

    pub fn pointer(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.address)
    }

    pub fn is_readable(&self) -> bool {
        matches!(self.access, PageAccess::Write | PageAccess::Read)
    }

    pub fn bytes(&self) -> &[u8] {
        assert!(self.is_readable());
        // SAFETY: the page is mapped readable, and this program writes to it through `&mut self` only.
        unsafe { slice::from_raw_parts(self.pointer(), PAGE_BYTES) }
    }

    pub fn write_content(&mut self, content: ExpectedContent) {
        if self.access == PageAccess::Write {
            // SAFETY: the page is mapped writable, and `&mut self` makes this the only borrow.
            fill_page(unsafe { slice::from_raw_parts_mut(self.pointer(), PAGE_BYTES) }, content);
            self.content = content;
        }
    }

    pub fn has_expected_content(&self) -> bool {
        !self.is_readable() || self.bytes() == filled_page(self.content)
    }

    pub fn advise(&self, advice: c_int) -> bool {
        // SAFETY: the page is no longer borrowed, and the caller determines the content afterwards.
        unsafe { libc::madvise(self.pointer().cast(), PAGE_BYTES, advice) == 0 }
    }

    /// The content was dropped: the page reads as zeros, or as the content with which it was merged.
    pub fn read_dropped_content(&mut self) -> bool {
        let content = [ZERO_CONTENT]
            .into_iter()
            .chain(self.merged_contents.iter().copied())
            .find(|&merged_content| self.bytes() == filled_page(merged_content));
        self.content = content.unwrap_or_else(|| panic!("page at {:#x} never had this content", self.address));
        content != Some(ZERO_CONTENT)
    }

    /// Map the page, unless another mapping has taken the address. Returns whether the page was mapped.
    pub fn map(&mut self) -> bool {
        let start = reserve_address_space(1, self.address);
        let is_mapped = start == self.address;
        if is_mapped {
            *self = Self::new(self.address);
            self.protect(PageAccess::Write);
        } else {
            // SAFETY: this function has just mapped the page.
            unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), PAGE_BYTES) };
        }
        is_mapped
    }

    pub fn unmap(&mut self) {
        if self.access != PageAccess::Unmapped {
            // SAFETY: there is no borrow of the page.
            unsafe { libc::munmap(self.pointer().cast(), PAGE_BYTES) };
            self.access = PageAccess::Unmapped;
        }
    }

    /// Map a page of a file, or new memory, over the page.
    pub fn map_replacement(&mut self, file: Option<(&File, u64)>) {
        let (kind, descriptor, number) = match file {
            Some((file, number)) => (0, file.as_raw_fd(), number),
            None => (libc::MAP_ANONYMOUS, -1, 0),
        };
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_FIXED | kind);
        let offset = (number * PAGE_BYTES as u64) as libc::off_t;
        // SAFETY: the replaced range is this page, and there is no borrow of it.
        let mapped = unsafe { libc::mmap(self.pointer().cast(), PAGE_BYTES, access, flags, descriptor, offset) };
        assert_eq!(mapped.expose_provenance(), self.address, "mmap: {}", std::io::Error::last_os_error());
        *self = Self::new(self.address);
        if file.is_some() {
            self.content = (FILE_SEED, number);
            // If written data are dropped there, the page reads as the file again.
            self.merged_contents.push(self.content);
        }
    }

    /// The page was moved away: keep other mappings from the address.
    pub fn reserve_old_address(&mut self) {
        assert_eq!(reserve_address_space(1, self.address), self.address, "the old address is not free");
        *self = Self { access: PageAccess::NoAccess, ..Self::new(self.address) };
    }

    pub fn protect(&mut self, access: PageAccess) {
        let protection = match access {
            PageAccess::Write => libc::PROT_READ | libc::PROT_WRITE,
            PageAccess::Read => libc::PROT_READ,
            _ => libc::PROT_NONE,
        };
        // SAFETY: the page is mapped, and there is no borrow of it.
        let result = unsafe { libc::mprotect(self.pointer().cast(), PAGE_BYTES, protection) };
        assert_eq!(result, 0, "mprotect: {}", std::io::Error::last_os_error());
        self.access = access;
    }
}

/// Reserve address space for some pages, mapped without access: at `address` if that is free, or elsewhere.
pub fn reserve_address_space(pages: usize, address: usize) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
    let start = unsafe {
        libc::mmap(ptr::with_exposed_provenance_mut(address), pages * PAGE_BYTES, libc::PROT_NONE, flags, -1, 0)
    };
    assert_ne!(start, libc::MAP_FAILED, "address space");
    start.expose_provenance()
}

/// Move mapped memory to a reserved range, and check that it is there.
pub fn move_mapping(source: usize, bytes: usize, destination: usize, added_bytes: usize) {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let pointer = |address: usize| ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: the moved memory is not borrowed, and the replaced range is empty address space.
    let moved = unsafe { libc::mremap(pointer(source), bytes, bytes + added_bytes, flags, pointer(destination)) };
    assert_eq!(moved.addr(), destination, "mremap: {}", std::io::Error::last_os_error());
}

/// The content of a file with so many pages.
pub fn file_content(pages: u64) -> Vec<u8> {
    (0..pages).map(|page| filled_page((FILE_SEED, page))).collect::<Vec<_>>().concat()
}

/// Whether a file with so many pages still has its content.
pub fn is_file_unchanged(mut file: &File, pages: u64) -> bool {
    let mut content = Vec::new();
    file.rewind().expect("a file");
    file.read_to_end(&mut content).expect("a file");
    content == file_content(pages)
}
