//! NUMA nodes: the node of this thread, and the node from which memory is allocated.

use std::ffi::c_void;
use std::io;
use std::ptr;

/// `MPOL_PREFERRED` (include/uapi/linux/mempolicy.h): allocate from this node while it has free memory, else from
/// another one.
const MPOL_PREFERRED: libc::c_int = 1;

/// The maximum number of nodes (`MAX_NUMNODES` with `CONFIG_NODES_SHIFT` 10, the highest of any architecture).
const MAX_NUMNODES: usize = 1024;

/// The node of the CPU on which this thread runs now.
///
/// # Errors
/// Those of getcpu(2): a seccomp filter may forbid it.
pub fn current_node() -> io::Result<u32> {
    let mut node: libc::c_uint = 0;
    let nothing = ptr::null_mut::<c_void>();
    // SAFETY: `node` is writable, and the kernel accepts null for values that are not requested.
    match unsafe { libc::syscall(libc::SYS_getcpu, nothing, &raw mut node, nothing) } {
        0 => Ok(node),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Allocate memory of a range from a node while the node has free memory. For a shared mapping of a file in memory this
/// applies to all users of the file, however they access it, as long as the file exists (`shmem_set_policy` in
/// mm/shmem.c, 6.18).
///
/// # Errors
/// Those of mbind(2): `ENOSYS` on kernels without NUMA, `EINVAL` if the node does not exist or the range is not mapped.
pub fn prefer_node(start: usize, bytes: usize, node: u32) -> io::Result<()> {
    let mut nodes = [0_u64; MAX_NUMNODES / 64];
    let word = nodes.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node % 64);
    // The kernel reads one bit fewer than this number (`get_nodes` in mm/mempolicy.c, 6.18).
    let bits = MAX_NUMNODES + 1;
    // SAFETY: the mask has as many bits as the kernel reads; the policy changes no content.
    match unsafe { libc::syscall(libc::SYS_mbind, start, bytes, MPOL_PREFERRED, nodes.as_ptr(), bits, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn current_node_exists() {
        let node = current_node().unwrap();
        assert!(std::path::Path::new(&format!("/sys/devices/system/node/node{node}")).exists() || node == 0);
    }

    #[test]
    fn missing_memory_or_node_is_rejected() {
        let page = crate::mapping::page_size();
        assert!(prefer_node(page, page, 0).is_err());
        assert_eq!(prefer_node(page, page, MAX_NUMNODES as u32).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
