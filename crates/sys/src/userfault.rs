//! userfaultfd(2) for one purpose: to block writers to some pages while these pages are compared.
//!
//! Pages are write-protected, and a write waits in the kernel until the protection is removed (mm/userfaultfd.c,
//! fs/userfaultfd.c; Documentation/admin-guide/mm/userfaultfd.rst). No code has to read events for that. Writes by the
//! kernel, such as read(2) into such a page, must wait, too. So the process must be allowed to handle kernel faults:
//! `CAP_SYS_PTRACE`, `vm.unprivileged_userfaultfd`, or access to `/dev/userfaultfd` (6.1). Structures are those of
//! include/uapi/linux/userfaultfd.h.
//!
//! Limits: pages pinned before for a device, or for direct or asynchronous I/O, are written despite the protection. A
//! futex(2) word that the kernel has to write (priority inheritance, the death of a robust owner, the end of a thread)
//! does not wait; the write fails.

use rustix::mm::{UserfaultfdFlags, userfaultfd};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}

nix::ioctl_none!(
    /// `USERFAULTFD_IOC_NEW`.
    userfaultfd_new, 0xaa, 0x00
);
nix::ioctl_readwrite!(
    /// `UFFDIO_API`.
    uffdio_api, 0xaa, 0x3f, UffdioApi
);
nix::ioctl_readwrite!(
    /// `UFFDIO_REGISTER`.
    uffdio_register, 0xaa, 0x00, UffdioRegister
);
nix::ioctl_read!(
    /// `UFFDIO_UNREGISTER`, as for `UFFDIO_WAKE`.
    uffdio_unregister, 0xaa, 0x01, UffdioRange
);
nix::ioctl_read!(
    /// `UFFDIO_WAKE`, which only reads its argument, despite its number.
    uffdio_wake, 0xaa, 0x02, UffdioRange
);
nix::ioctl_readwrite!(
    /// `UFFDIO_WRITEPROTECT`.
    uffdio_writeprotect, 0xaa, 0x06, UffdioWriteprotect
);

/// A userfaultfd that can block writers of this process.
#[derive(Debug)]
pub struct UserfaultFd {
    descriptor: OwnedFd,
    registered_ranges: Mutex<Vec<Range<u64>>>,
}

impl UserfaultFd {
    /// Open a userfaultfd.
    ///
    /// # Errors
    /// `EPERM` and `EACCES` if it is not permitted; `ENOSYS` and `EINVAL` if the kernel (before 6.4) cannot protect
    /// anonymous and shared memory, and untouched pages.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the descriptor alone has no effect; the operations on it below change no content.
        let descriptor = match unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) } {
            Ok(descriptor) => descriptor,
            Err(error) => Self::open_device().map_err(|_| io::Error::from(error))?,
        };
        let features = UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_WP_UNPOPULATED;
        let mut api = UffdioApi { api: UFFD_API, features, ioctls: 0 };
        // SAFETY: `api` is a valid, readable and writable `uffdio_api`.
        unsafe { uffdio_api(descriptor.as_raw_fd(), &raw mut api) }?;
        Ok(Self { descriptor, registered_ranges: Mutex::default() })
    }

    /// From `/dev/userfaultfd`.
    fn open_device() -> io::Result<OwnedFd> {
        let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
        // SAFETY: the call takes its flags by value; without flags the descriptor is the same as from userfaultfd(0).
        let descriptor = unsafe { userfaultfd_new(device.as_raw_fd()) }?;
        // SAFETY: the call has just created the descriptor, and no other object owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Register a range of whole, mapped pages.
    ///
    /// # Errors
    /// `EINVAL` for memory that cannot be protected, `EBUSY` if another userfaultfd has part of it, `ENOMEM` if there
    /// would be too many mappings.
    pub fn register(&self, range: Range<u64>) -> io::Result<()> {
        let uffdio = UffdioRange { start: range.start, len: range.end - range.start };
        let mut register = UffdioRegister { range: uffdio, mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: `register` is a valid, readable and writable `uffdio_register`; no content changes.
        unsafe { uffdio_register(self.descriptor.as_raw_fd(), &raw mut register) }?;
        self.registered_ranges.lock().unwrap_or_else(PoisonError::into_inner).push(range);
        Ok(())
    }

    /// Block writers to a registered range until the returned value is dropped.
    ///
    /// # Errors
    /// `ENOENT` if part of it is not registered, `EAGAIN` while the process is being forked.
    pub fn write_protect(&self, range: Range<u64>) -> io::Result<WriteProtectedRange<'_>> {
        let protected = WriteProtectedRange { userfault_fd: self, range };
        protected.set_protection(UFFDIO_WRITEPROTECT_MODE_WP)?;
        Ok(protected)
    }
}

impl Drop for UserfaultFd {
    /// Closing the descriptor is not enough if a child that was forked meanwhile also has it open.
    fn drop(&mut self) {
        let registered = std::mem::take(self.registered_ranges.get_mut().unwrap_or_else(PoisonError::into_inner));
        for range in registered {
            let mut range = UffdioRange { start: range.start, len: range.end - range.start };
            // SAFETY: `range` is a valid `uffdio_range`, which the kernel only reads. Parts that were mapped anew are
            // skipped.
            let _ = unsafe { uffdio_unregister(self.descriptor.as_raw_fd(), &raw mut range) };
        }
    }
}

/// A write-protected range. Writers continue when it is dropped.
#[derive(Debug)]
pub struct WriteProtectedRange<'u> {
    userfault_fd: &'u UserfaultFd,
    range: Range<u64>,
}

impl WriteProtectedRange<'_> {
    fn ioctl_range(&self) -> UffdioRange {
        UffdioRange { start: self.range.start, len: self.range.end - self.range.start }
    }

    fn set_protection(&self, mode: u64) -> io::Result<()> {
        let mut protect = UffdioWriteprotect { range: self.ioctl_range(), mode };
        loop {
            // SAFETY: `protect` is a valid, readable and writable `uffdio_writeprotect`; no content changes.
            match unsafe { uffdio_writeprotect(self.userfault_fd.descriptor.as_raw_fd(), &raw mut protect) } {
                // Mappings are changing, for example in a fork.
                Err(nix::errno::Errno::EAGAIN) => std::thread::yield_now(),
                result => return Ok(result.map(|_| ())?),
            }
        }
    }
}

impl Drop for WriteProtectedRange<'_> {
    fn drop(&mut self) {
        // If all or part of the range was mapped anew, there is no protection to remove, and waiting writers must
        // retry.
        if self.set_protection(0).is_err() {
            let mut range = self.ioctl_range();
            // SAFETY: `range` is a valid `uffdio_range`, which the kernel only reads.
            let _ = unsafe { uffdio_wake(self.userfault_fd.descriptor.as_raw_fd(), &raw mut range) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;
    use std::time::Duration;

    #[test]
    fn writers_wait_until_protection_is_dropped() {
        let userfault = match UserfaultFd::new() {
            Ok(userfault) => userfault,
            Err(error) => {
                println!("skipped: no userfaultfd here: {error}");
                return;
            }
        };
        let mut memory = Mapping::anonymous(4 * crate::mapping::page_size()).unwrap();
        memory.as_mut_slice().fill(1);
        let range = memory.address()..memory.address() + memory.len() as u64;
        userfault.register(range.clone()).unwrap();
        let first = memory.as_mut_slice().as_mut_ptr().cast();
        // SAFETY: the word is aligned, mapped and writable, and from here on only atomic operations use it.
        let word = unsafe { AtomicU64::from_ptr(first) };
        let initial = word.load(Ordering::SeqCst);
        let protected = userfault.write_protect(range).unwrap();
        thread::scope(|scope| {
            let writer = scope.spawn(|| word.store(7, Ordering::SeqCst));
            thread::sleep(Duration::from_millis(50));
            assert_eq!(word.load(Ordering::SeqCst), initial, "it waits");
            assert!(!writer.is_finished());
            drop(protected);
            writer.join().unwrap();
        });
        assert_eq!(word.load(Ordering::SeqCst), 7);
    }
}
