//! Space for a frame on the main stack that no other code uses.
//!
//! Programs that run on other stacks (Go, coroutines) have a main stack, too. Their own small stacks are never touched.
//! While one thread is stopped, the others run. So the space must be out of reach for these threads, and for the kernel
//! on behalf of a thread that waits in a call. The stack pointer does not tell which memory a program will use again: a
//! suspended coroutine may have an array of zeros there, or an array that is not written yet. So the space lies below
//! all pages that were ever touched: code that leaves its frame on the stack has touched the page below it. The bytes
//! left in the space identify it at the next visit.
//!
//! The main stack is one mapping or several. The kernel splits it where advice applies to a part of it. Unenrolling a
//! fully enrolled stack range by range splits it, too, for a while. There is no cheap way to find out which of the
//! mappings right below it are parts of the stack and which the program mapped. So all pages of a split stack count as
//! touched, and none of them is used below a stack pointer. Instead the stack is made to grow, which only a stack can
//! do.
//!
//! Mirrors `do_procmap_query` and `task_current_syscall` (fs/proc/task_mmu.c, lib/syscall.c, 6.18). Limits: if a main
//! thread returns from its call during the stop and goes down by more than [`MAIN_THREAD_MARGIN_BYTES`], it meets the
//! frame. If a stack cannot grow any more, the space is right below the stack pointer of the thread that runs there. If
//! a killed tracer left its frame, a process with one thread uses that space again. In other processes, or with
//! arguments left beside the frame, that space stays blocked and the next one is used.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::target::{InjectTarget, parse_maps_line, read_text, status_number};
use super::{InjectError, arch, operation_failed};
use crate::mapping::page_size;
use crate::pagemap;

/// Distance below a main thread that is not stopped.
const MAIN_THREAD_MARGIN_BYTES: u64 = 64 << 10;
/// How far up from the end of the stack to search.
const SEARCHED_STACK_BYTES: u64 = 64 << 10;

/// Content written to untouched pages, so that they are recognized later.
const UNUSED_PAGE_MARK: &[u8; 64] = b"Pagefold made system calls on this page, which was never used.\n\0";

/// `struct procmap_query` (include/uapi/linux/fs.h).
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    permissions: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

/// `PROCMAP_QUERY_VMA_READABLE` with `PROCMAP_QUERY_VMA_WRITABLE`.
const PROCMAP_QUERY_VMA_READ_WRITE: u64 = 3;
/// `PROCMAP_QUERY_VMA_SHARED`.
const PROCMAP_QUERY_VMA_SHARED: u64 = 8;
/// `PROCMAP_QUERY_COVERING_OR_NEXT_VMA`.
const PROCMAP_QUERY_COVERING_OR_NEXT_VMA: u64 = 16;

/// The maximum number of mappings of a stack.
const MAX_STACK_MAPPINGS: usize = 64;

nix::ioctl_readwrite!(
    /// `PROCMAP_QUERY`: the mapping that covers an address, or the next above it.
    procmap_query,
    b'f',
    17,
    ProcmapQuery
);

/// A mapping that may belong to a stack.
struct StackMapping {
    start: u64,
    end: u64,
    is_writable: bool,
    /// Private and not backed by a file.
    is_private_anonymous: bool,
}

/// The mapping that covers an address, or the next above it. It does not read all mappings while a thread is stopped.
/// `maps` is an open `/proc/PID/maps`. Errors are the ioctl's: `ENOTTY` before 6.11.
fn query_mapping(maps: &File, address: u64) -> Result<Option<StackMapping>, Errno> {
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        flags: PROCMAP_QUERY_COVERING_OR_NEXT_VMA,
        address,
        ..ProcmapQuery::default()
    };
    // SAFETY: the descriptor is open. `query` is the structure that the kernel reads and fills, has its size set, and
    // requests no buffers.
    match unsafe { procmap_query(maps.as_raw_fd(), &raw mut query) } {
        Ok(_) => Ok(Some(StackMapping {
            start: query.start,
            end: query.end,
            is_writable: query.permissions & PROCMAP_QUERY_VMA_READ_WRITE == PROCMAP_QUERY_VMA_READ_WRITE,
            is_private_anonymous: query.inode == 0 && query.permissions & PROCMAP_QUERY_VMA_SHARED == 0,
        })),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The mapping that covers an address, or the next above it, in the text of `maps`.
fn find_listed_mapping(maps: &str, address: u64) -> Option<StackMapping> {
    let mapping = maps.lines().filter_map(parse_maps_line).find(|mapping| mapping.end > address)?;
    Some(StackMapping {
        start: mapping.start,
        end: mapping.end,
        is_writable: mapping.permissions.starts_with("rw"),
        is_private_anonymous: mapping.inode == 0 && mapping.permissions.ends_with('p'),
    })
}

/// The end of the main stack, or of a part of it, in the text of `maps`.
pub(super) fn main_stack_end(maps: &str) -> Option<u64> {
    maps.lines().rev().filter_map(parse_maps_line).find(|mapping| mapping.name == "[stack]").map(|stack| stack.end)
}

/// The address range of the main stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MainStack {
    start: u64,
    end: u64,
    /// It consists of several mappings; the lower ones may not belong to the stack.
    is_split: bool,
}

impl MainStack {
    /// The stack that ends at this address, from the mappings at given addresses and above. None if a part of it is not
    /// readable and writable, if it has too many mappings, or if a file is mapped in its place.
    fn ending_at(
        end: u64,
        mapping_at: impl Fn(u64) -> Result<Option<StackMapping>, Errno>,
    ) -> Result<Option<Self>, Errno> {
        let mapping_covering = |address: u64| Ok(mapping_at(address)?.filter(|mapping| mapping.start <= address));
        // Memory of a file may have to be read from disk while a thread is stopped (`InjectTarget::read_if_present`).
        let is_usable = |mapping: &StackMapping| mapping.is_writable && mapping.is_private_anonymous;
        let Some(mapping) = mapping_covering(end - 1)?.filter(is_usable) else { return Ok(None) };
        let mut stack = Self { start: mapping.start, end: mapping.end, is_split: false };
        for _ in 0..MAX_STACK_MAPPINGS {
            match mapping_covering(stack.start - 1)? {
                None | Some(StackMapping { is_private_anonymous: false, .. }) => return Ok(Some(stack)),
                Some(StackMapping { is_writable: false, .. }) => return Ok(None),
                Some(StackMapping { start, .. }) => (stack.start, stack.is_split) = (start, true),
            }
        }
        Ok(None)
    }

    fn contains(self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// Run `grow` with a stack limit of this process of `limit_bytes`, or as much of it as is allowed. The kernel uses this
/// limit, not the target's, when it decides how far another process's stack may grow (mm/vma.c, `acct_stack_growth`).
fn with_stack_limit<T>(limit_bytes: u64, grow: impl FnOnce() -> T) -> T {
    static STACK_LIMIT_LOCK: Mutex<()> = Mutex::new(());
    let _guard = STACK_LIMIT_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_STACK) else { return grow() };
    let is_raised = limit_bytes > soft && setrlimit(Resource::RLIMIT_STACK, limit_bytes.min(hard), hard).is_ok();
    let result = grow();
    if is_raised {
        // The soft limit is not above the hard limit, which has not changed.
        let _ = setrlimit(Resource::RLIMIT_STACK, soft, hard);
    }
    result
}

/// Space on a stack.
pub(super) struct StackSpace {
    /// The first address, 64-byte aligned.
    pub address: u64,
    /// The bytes there now.
    pub previous_bytes: Vec<u8>,
    /// The bytes that must be there afterwards.
    pub restored_bytes: Vec<u8>,
}

fn repeat_page_mark(bytes: usize) -> Vec<u8> {
    UNUSED_PAGE_MARK.iter().copied().cycle().take(bytes).collect()
}

impl InjectTarget {
    fn find_main_stack(&self) -> Result<MainStack, InjectError> {
        let no_stack_error =
            || InjectError::Unsupported("it has no main stack that is readable and writable throughout".to_owned());
        let end = self.stack_end.ok_or_else(no_stack_error)?;
        let stack = match MainStack::ending_at(end, |address| query_mapping(&self.maps, address)) {
            Ok(stack) => stack,
            Err(Errno::ESRCH) => return Err(InjectError::Vanished),
            Err(_) => {
                let listing = read_text(&self.directory, "maps")?;
                MainStack::ending_at(end, |address| Ok(find_listed_mapping(&listing, address))).ok().flatten()
            }
        };
        stack.ok_or_else(no_stack_error)
    }

    /// Whether nothing is mapped from an address up to the stack.
    fn is_unmapped_up_to_stack(&self, stack: MainStack, address: u64) -> Result<bool, InjectError> {
        let next = match query_mapping(&self.maps, address) {
            Ok(next) => next,
            Err(Errno::ESRCH) => return Err(InjectError::Vanished),
            Err(_) => find_listed_mapping(&read_text(&self.directory, "maps")?, address),
        };
        Ok(next.is_some_and(|next| next.start == stack.start))
    }

    /// Where on the main stack this many bytes can be written while `tid` is stopped, without any effect on the
    /// program.
    ///
    /// That is below all pages that were ever touched. Pages there are neither resident nor swapped out, or have our
    /// mark. If there are none, the stack grows. If it cannot grow, the space is below the stack pointer of a thread
    /// that runs there, where the kernel would write a signal frame.
    pub(super) fn find_stack_space(
        &self,
        tid: i32,
        state: &arch::ThreadState,
        bytes: usize,
    ) -> Result<StackSpace, InjectError> {
        let stack_pointer = state.stack_pointer();
        let stack = self.find_main_stack()?;
        let on_stack = stack.contains(stack_pointer);
        let upper_limit = match on_stack {
            true => stack_pointer - arch::RED_ZONE_BYTES,
            false if tid == self.pid => stack.end,
            false => self.limit_below_main_thread(stack)?,
        };
        if let Some(space) =
            self.find_untouched_space(stack, upper_limit, state, bytes.next_multiple_of(page_size()))?
        {
            return Ok(space);
        }
        if !on_stack || stack.is_split {
            return Err(InjectError::Unsupported("its main stack is full".to_owned()));
        }
        let base = upper_limit.saturating_sub(bytes as u64) & !63;
        let content =
            self.read_memory(base, bytes).map_err(|_| InjectError::Unsupported("its main stack is full".to_owned()))?;
        Ok(StackSpace { address: base, previous_bytes: content.clone(), restored_bytes: content })
    }

    /// Space of this many bytes, in whole pages, below all touched pages and below `upper_limit`.
    fn find_untouched_space(
        &self,
        stack: MainStack,
        upper_limit: u64,
        state: &arch::ThreadState,
        bytes: usize,
    ) -> Result<Option<StackSpace>, InjectError> {
        let len = bytes as u64;
        let space_at = |base, previous_bytes| {
            Ok(Some(StackSpace { address: base, previous_bytes, restored_bytes: repeat_page_mark(bytes) }))
        };
        let searched = stack.start..stack.end.min(stack.start + SEARCHED_STACK_BYTES);
        let mut touched = Vec::new();
        pagemap::scan_mapped(&self.pagemap, searched.clone(), pagemap::RangeContents::Anything, |range| {
            touched.extend((range.start..range.end).step_by(page_size()))
        })
        .map_err(operation_failed("reading which pages of its stack are in use"))?;
        let is_marked = |page: u64| {
            self.read_memory(page, page_size()).is_ok_and(|content| content == repeat_page_mark(page_size()))
        };
        let is_touched = |page: u64| touched.contains(&page);
        let is_free =
            |page_address: u64| if is_touched(page_address) { is_marked(page_address) } else { !stack.is_split };
        let first_used = searched.clone().step_by(page_size()).find(|&page| !is_free(page)).unwrap_or(searched.end);
        // If possible with the same size again below it. There the kernel writes the frame of a signal that arrives
        // after the tracer has ended, and the stack need not grow for it.
        for base in [stack.start + len, stack.start] {
            if base + len <= first_used.min(upper_limit) {
                let is_new = !(base..base + len).step_by(page_size()).any(is_touched);
                let previous_bytes = if is_new { Ok(vec![0; bytes]) } else { self.read_memory(base, bytes) };
                return space_at(base, previous_bytes.map_err(operation_failed("reading its stack"))?);
            }
            if base + len <= upper_limit && (base..base + len).step_by(page_size()).all(is_touched) {
                let content = self.read_memory(base, bytes).map_err(operation_failed("reading its stack"))?;
                if self.is_abandoned_frame(&content, state) {
                    return space_at(base, content);
                }
            }
        }
        // Reading below a stack makes it grow (mm/memory.c, `__access_remote_vm`), up to its limit or to an
        // inaccessible mapping. The space must be outside the red zone of the lowest thread. Otherwise that thread
        // would overwrite it later, and the next visit would need other space.
        let page = page_size() as u64;
        let base = ((stack.start - arch::RED_ZONE_BYTES).min(upper_limit) / page * page).saturating_sub(len);
        if !self.is_unmapped_up_to_stack(stack, base)? {
            return Ok(None);
        }
        let limit = stack.end - base + page;
        let zeros =
            self.read_memory(base, bytes).or_else(|_| with_stack_limit(limit, || self.read_memory(base, bytes)));
        zeros.map_or(Ok(None), |zeros| space_at(base, zeros))
    }

    fn read_memory(&self, base: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let mut content = vec![0; bytes];
        self.memory.read_exact_at(&mut content, base).map(|()| content)
    }

    /// Whether these bytes are the unused frame of a killed tracer: the only thread is here and not executing
    /// `sigreturn` with it.
    fn is_abandoned_frame(&self, content: &[u8], state: &arch::ThreadState) -> bool {
        state.is_own_frame(content, self.sites)
            && !arch::may_be_in_sigreturn(&state.registers, self.sites)
            && read_text(&self.directory, "status").is_ok_and(|status| status_number(&status, "Threads") == Some(1))
    }

    /// Whether another thread than the main one can currently be stopped and leave this many bytes.
    pub(super) fn leaves_main_thread_space(&self, bytes: u64) -> bool {
        self.find_main_stack()
            .is_ok_and(|stack| self.limit_below_main_thread(stack).is_ok_and(|limit| stack.start + bytes <= limit))
    }

    /// The highest address that the main thread, which is not stopped, does not reach.
    fn limit_below_main_thread(&self, stack: MainStack) -> Result<u64, InjectError> {
        let main_thread = format!("task/{}", self.pid);
        let stat = read_text(&self.directory, &format!("{main_thread}/stat"))?;
        if stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])) {
            return Ok(stack.end);
        }
        let syscall_line = read_text(&self.directory, &format!("{main_thread}/syscall"))?;
        let pointer =
            blocked_stack_pointer(&syscall_line).ok_or_else(|| InjectError::Busy("its main thread runs".to_owned()))?;
        if !stack.contains(pointer) {
            return Err(InjectError::Busy("its main thread is elsewhere than on its main stack".to_owned()));
        }
        Ok(pointer.saturating_sub(MAIN_THREAD_MARGIN_BYTES))
    }
}

/// The stack pointer of a waiting thread, from its `/proc/PID/task/TID/syscall`.
fn blocked_stack_pointer(syscall_line: &str) -> Option<u64> {
    let pointer = syscall_line.split_ascii_whitespace().rev().nth(1)?;
    u64::from_str_radix(pointer.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stack_pointer_of_blocked_thread_is_parsed() {
        let call = "232 0x4 0x7ffe0 0x10 0xffffffffffffffff 0x0 0x0 0x7fff12345678 0x7f0012345678\n";
        assert_eq!(blocked_stack_pointer(call), Some(0x7fff_1234_5678));
        assert_eq!(blocked_stack_pointer("-1 0x7fff12345678 0x7f0012345678\n"), Some(0x7fff_1234_5678));
        assert_eq!(blocked_stack_pointer("running\n"), None);
        assert_eq!(blocked_stack_pointer(""), None);
    }

    #[test]
    fn procmap_query_and_maps_agree_on_main_stack() {
        let listing = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let end = main_stack_end(&listing).expect("an end");
        let stack = MainStack::ending_at(end, |address| Ok(find_listed_mapping(&listing, address)));
        assert!(stack.is_ok_and(|stack| stack.is_some_and(|stack| stack.end == end && !stack.is_split)));
        let maps = File::open("/proc/self/maps").expect("maps");
        match MainStack::ending_at(end, |address| query_mapping(&maps, address)) {
            Ok(found) => assert_eq!(Ok(found), stack),
            Err(errno) => assert_eq!(errno, Errno::ENOTTY),
        }
    }

    #[test]
    fn main_stack_spans_adjacent_mappings() {
        let stack = |maps: &str| {
            MainStack::ending_at(main_stack_end(maps)?, |address| Ok(find_listed_mapping(maps, address)))
                .expect("a listing")
        };
        let whole = MainStack { start: 0x4000, end: 0x9000, is_split: false };
        let gap = "1000-3000 rw-p 00000000 00:00 0\n4000-9000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(gap), Some(whole));
        let split = "1000-2000 rw-p 00000000 00:00 0\n3000-5000 rw-p 00000000 00:00 0\n\
                      5000-8000 rw-p 00000000 00:00 0    [stack]\n8000-9000 rw-p 00000000 00:00 0\n";
        assert_eq!(stack(split), Some(MainStack { start: 0x3000, end: 0x8000, is_split: true }));
        let file = "2000-4000 rw-p 00000000 08:01 77    /a/file\n4000-9000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(file), Some(whole));
        let replaced = "4000-9000 rw-p 00000000 08:01 77    [stack]\n";
        assert_eq!(stack(replaced), None);
        let guard = "3000-4000 ---p 00000000 00:00 0\n4000-9000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(guard), None);
        let mapping_line = |number: u64| format!("{:x}-{:x} rw-p 00000000 00:00 0\n", number << 12, (number + 1) << 12);
        let many = (1..=MAX_STACK_MAPPINGS as u64 + 1).map(mapping_line).collect::<String>()
            + "42000-43000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(&many), None);
        assert!(stack(&many[many.find('\n').expect("lines") + 1..].replacen("2000-3000", "2800-3000", 1)).is_none());
        assert_eq!(stack("1000-3000 rw-p 00000000 00:00 0\n"), None);
    }
}
