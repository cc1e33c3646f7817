//! NUMA nodes: the node of this thread, the node from which memory is allocated, and the nodes of a process's pages.

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
    let null = ptr::null_mut::<c_void>();
    // SAFETY: `node` is writable, and the kernel accepts null for values that are not requested.
    match unsafe { libc::syscall(libc::SYS_getcpu, null, &raw mut node, null) } {
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

/// `MPOL_MF_MOVE` (include/uapi/linux/mempolicy.h): move only pages that are mapped once.
const MPOL_MF_MOVE: libc::c_int = 1 << 1;

/// A status that move_pages(2) never stores: the page was not reached.
pub const NOT_REACHED: libc::c_int = libc::c_int::MIN;

/// The node of each page of a process, or the negative error number of move_pages(2): `ENOENT` for a page that is not
/// in memory, `EFAULT` for the shared zero page and for addresses without a mapping.
///
/// # Errors
/// Those of move_pages(2), for the whole process: `ESRCH`, `EPERM`, `ENOSYS`. A process without memory, which is ending,
/// does not exist either (`ESRCH`).
pub fn page_nodes(pid: u32, addresses: &[u64]) -> io::Result<Vec<libc::c_int>> {
    let mut status = vec![NOT_REACHED; addresses.len()];
    move_or_query(pid, addresses, None, &mut status)?;
    Ok(status)
}

/// Move pages of a process to a node: only those that no other process maps. Returns for each page its new node, the
/// negative error number, or [`NOT_REACHED`], since the kernel stops at the first part of which a page could not be
/// moved (`do_pages_move` in mm/migrate.c, 6.18).
///
/// # Errors
/// Those of move_pages(2): also `ENODEV` and `EACCES` for a node that does not exist or that the process may not use.
pub fn move_pages(pid: u32, addresses: &[u64], node: u32) -> io::Result<Vec<libc::c_int>> {
    let node = node.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut status = vec![NOT_REACHED; addresses.len()];
    move_or_query(pid, addresses, Some(&vec![node; addresses.len()]), &mut status)?;
    Ok(status)
}

fn move_or_query(
    pid: u32,
    addresses: &[u64],
    nodes: Option<&[libc::c_int]>,
    status: &mut [libc::c_int],
) -> io::Result<()> {
    assert!(status.len() == addresses.len() && nodes.is_none_or(|nodes| nodes.len() == addresses.len()));
    let pid: libc::pid_t = pid.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    let nodes = nodes.map_or(ptr::null(), <[libc::c_int]>::as_ptr);
    // The kernel's array has pointers; these are 64 bits wide on all supported architectures.
    let (pages, count) = (addresses.as_ptr().cast::<*const c_void>(), addresses.len());
    // SAFETY: the three arrays have `count` elements, `status` is writable, and the kernel does not keep them. The
    // content of the moved pages stays the same.
    match unsafe { libc::syscall(libc::SYS_move_pages, pid, count, pages, nodes, status.as_mut_ptr(), MPOL_MF_MOVE) } {
        ..0 => Err(match io::Error::last_os_error() {
            // The flags are valid: the process has no memory, because it is ending or is a kernel thread (mm/migrate.c,
            // `find_mm_struct`).
            error if error.raw_os_error() == Some(libc::EINVAL) => io::Error::from_raw_os_error(libc::ESRCH),
            error => error,
        }),
        _ => Ok(()),
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
    fn own_pages_have_a_node_and_stay_in_place() {
        let page = crate::mapping::page_size();
        let block = vec![1_u8; 4 * page];
        let first = block.as_ptr().addr().next_multiple_of(page) as u64;
        let addresses = [first, first + page as u64, 0];
        let nodes = page_nodes(std::process::id(), &addresses).unwrap();
        assert!(nodes[0] >= 0 && nodes[1] >= 0, "{nodes:?}");
        assert_eq!(nodes[2], -libc::EFAULT, "nothing is mapped there");
        let node = nodes[0].cast_unsigned();
        assert_eq!(move_pages(std::process::id(), &addresses[..1], node).unwrap(), [nodes[0]]);
        assert!(block.iter().all(|&byte| byte == 1));
        let missing = move_pages(std::process::id(), &addresses[..1], MAX_NUMNODES as u32 - 1).unwrap_err();
        assert_eq!(missing.raw_os_error(), Some(libc::ENODEV));
    }

    #[test]
    fn ending_process_has_no_pages() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        // Until its parent waits for it, the process still has its number.
        let is_zombie = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !is_zombie() {
            assert!(std::time::Instant::now() < deadline, "it does not end");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(page_nodes(pid, &[4096]).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(move_pages(pid, &[4096], 0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        child.wait().unwrap();
    }

    #[test]
    fn missing_memory_or_node_is_rejected() {
        let page = crate::mapping::page_size();
        assert!(prefer_node(page, page, 0).is_err());
        assert_eq!(prefer_node(page, page, MAX_NUMNODES as u32).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
