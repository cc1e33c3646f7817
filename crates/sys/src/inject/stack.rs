//! Room for a frame on the main stack, where nobody notices it.
//!
//! Programs that run elsewhere (Go, coroutines) have a main stack, too, and their own small stacks are never touched.
//! While one thread is stopped the others run, so the room has to be where none of them can come, nor the kernel on
//! behalf of one that waits in a call. And nobody can tell from a stack pointer what a program will come back to: a
//! coroutine may have left an array of zeros there, or one that nobody has written yet. So the room is below all pages
//! that were ever touched, since whoever leaves a frame has touched the page below it, and what is left there says
//! whose it has become, for the next time.
//!
//! The main stack is one mapping or several: where advice holds for a part of it the kernel cuts it, and so does
//! withdrawing what was enrolled whole, range by range, for a while. Which of the mappings right below it are pieces of
//! it, and which a program put there, nobody tells cheaply. So the pages of a stack in pieces all count as touched, none
//! of them is taken below a stack pointer, and it is made to grow, which only a stack does.
//!
//! Mirrors `do_procmap_query` and `task_current_syscall` (fs/proc/task_mmu.c, lib/syscall.c, 6.18). Limits: a main
//! thread that returns from its call and within that stop goes down by more than [`MARGIN`] meets the frame; and where
//! a stack may not grow any more, the place is right below the stack pointer of whoever runs there. Where a killed
//! tracer left its frame, that place is used again in processes of one thread; in others, and with arguments left
//! beside it, it stays in the way, and the next is taken.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::target::{Target, mapping, number, text};
use super::{Error, arch, failed};
use crate::mapping::page_size;
use crate::pagemap;

/// How far below a main thread that is not stopped.
const MARGIN: u64 = 64 << 10;
/// How far up from the end of the stack to look.
const REACH: u64 = 64 << 10;

/// What pages are filled with that nobody had touched, so that they are known again.
const MARK: &[u8; 64] = b"Pagefold made system calls on this page, which was never used.\n\0";

/// `struct procmap_query` (include/uapi/linux/fs.h).
#[repr(C)]
#[derive(Default)]
struct Query {
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
const READABLE_AND_WRITABLE: u64 = 3;
/// `PROCMAP_QUERY_VMA_SHARED`.
const SHARED: u64 = 8;
/// `PROCMAP_QUERY_COVERING_OR_NEXT_VMA`.
const COVERING_OR_NEXT: u64 = 16;

/// Of how many mappings a stack may be.
const PIECES: usize = 64;

nix::ioctl_readwrite!(
    /// `PROCMAP_QUERY`: the mapping that covers an address, or the next above it.
    procmap_query,
    b'f',
    17,
    Query
);

/// A mapping that may be one of a stack.
struct Piece {
    start: u64,
    end: u64,
    is_writable: bool,
    /// Private and of no file.
    is_memory: bool,
}

/// The mapping that covers an address, or the next above it, without reading all of them while a thread is stopped.
/// `maps` is an open `/proc/PID/maps`. Errors are the ioctl's: `ENOTTY` before 6.11.
fn asked(maps: &File, address: u64) -> Result<Option<Piece>, Errno> {
    let mut query = Query { size: size_of::<Query>() as u64, flags: COVERING_OR_NEXT, address, ..Query::default() };
    // SAFETY: the descriptor is open, and `query` is the structure that the kernel reads and fills, with its size in it
    // and no buffers asked for.
    match unsafe { procmap_query(maps.as_raw_fd(), &raw mut query) } {
        Ok(_) => Ok(Some(Piece {
            start: query.start,
            end: query.end,
            is_writable: query.permissions & READABLE_AND_WRITABLE == READABLE_AND_WRITABLE,
            is_memory: query.inode == 0 && query.permissions & SHARED == 0,
        })),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The mapping that covers an address, or the next above it, in the text of `maps`.
fn listed(maps: &str, address: u64) -> Option<Piece> {
    let found = maps.lines().filter_map(mapping).find(|found| found.end > address)?;
    Some(Piece {
        start: found.start,
        end: found.end,
        is_writable: found.permissions.starts_with("rw"),
        is_memory: found.inode == 0 && found.permissions.ends_with('p'),
    })
}

/// The end of the main stack, or of a piece of it, in the text of `maps`.
pub(super) fn end(maps: &str) -> Option<u64> {
    maps.lines().rev().filter_map(mapping).find(|mapping| mapping.name == "[stack]").map(|stack| stack.end)
}

/// Where the main stack lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stack {
    start: u64,
    end: u64,
    /// Several mappings, of which the lower ones may not be the stack's.
    in_pieces: bool,
}

impl Stack {
    /// The stack that has its end there, of the mappings that are told for addresses and above. None where a part of it
    /// is not readable and writable, or there are too many, or a file has been mapped in its place.
    fn ending_at(end: u64, told: impl Fn(u64) -> Result<Option<Piece>, Errno>) -> Result<Option<Self>, Errno> {
        let covering = |address: u64| Ok(told(address)?.filter(|piece| piece.start <= address));
        // Memory of a file might have to be read from it while a thread is stopped (`Target::read_present`).
        let usable = |piece: &Piece| piece.is_writable && piece.is_memory;
        let Some(piece) = covering(end - 1)?.filter(usable) else { return Ok(None) };
        let mut stack = Self { start: piece.start, end: piece.end, in_pieces: false };
        for _ in 0..PIECES {
            match covering(stack.start - 1)? {
                None | Some(Piece { is_memory: false, .. }) => return Ok(Some(stack)),
                Some(Piece { is_writable: false, .. }) => return Ok(None),
                Some(Piece { start, .. }) => (stack.start, stack.in_pieces) = (start, true),
            }
        }
        Ok(None)
    }

    fn contains(self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// With a limit of this process's own stack of so many bytes, as far as it may be as high: the kernel judges by that,
/// and not by the target's, how far another's stack may grow (mm/vma.c, `acct_stack_growth`).
fn with_limit<T>(bytes: u64, grow: impl FnOnce() -> T) -> T {
    static ONE: Mutex<()> = Mutex::new(());
    let _alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_STACK) else { return grow() };
    let raised = bytes > soft && setrlimit(Resource::RLIMIT_STACK, bytes.min(hard), hard).is_ok();
    let grown = grow();
    if raised {
        // It is not above the hard one, which has not changed.
        let _ = setrlimit(Resource::RLIMIT_STACK, soft, hard);
    }
    grown
}

/// Room on a stack.
pub(super) struct Room {
    /// Where it begins, 64-byte aligned.
    pub base: u64,
    /// What is there.
    pub before: Vec<u8>,
    /// What is to be there afterwards.
    pub after: Vec<u8>,
}

fn mark(bytes: usize) -> Vec<u8> {
    MARK.iter().copied().cycle().take(bytes).collect()
}

impl Target {
    fn stack(&self) -> Result<Stack, Error> {
        let none = || Error::Unsupported("it has no main stack that is readable and writable throughout".to_owned());
        let end = self.stack_end.ok_or_else(none)?;
        let stack = match Stack::ending_at(end, |address| asked(&self.maps, address)) {
            Ok(stack) => stack,
            Err(Errno::ESRCH) => return Err(Error::Gone),
            Err(_) => {
                let listing = text(&self.directory, "maps")?;
                Stack::ending_at(end, |address| Ok(listed(&listing, address))).ok().flatten()
            }
        };
        stack.ok_or_else(none)
    }

    /// Whether nothing is mapped from an address up to the stack.
    fn is_free_below(&self, stack: Stack, address: u64) -> Result<bool, Error> {
        let next = match asked(&self.maps, address) {
            Ok(next) => next,
            Err(Errno::ESRCH) => return Err(Error::Gone),
            Err(_) => listed(&text(&self.directory, "maps")?, address),
        };
        Ok(next.is_some_and(|next| next.start == stack.start))
    }

    /// Where on the main stack so many bytes can be written without anybody noticing while `tid` is stopped.
    ///
    /// That is below all pages that were ever touched: the ones there are neither resident nor swapped out, or hold our
    /// mark. Where there are none the stack grows. Where it may not, it is below the stack pointer of a thread that
    /// runs there, where the kernel would put a signal's frame.
    pub(super) fn room_on_stack(&self, tid: i32, state: &arch::State, bytes: usize) -> Result<Room, Error> {
        let stack_pointer = state.stack_pointer();
        let stack = self.stack()?;
        let on_stack = stack.contains(stack_pointer);
        let top = match on_stack {
            true => stack_pointer - arch::RED_ZONE,
            false if tid == self.pid => stack.end,
            false => self.far_below_main(stack)?,
        };
        if let Some(room) = self.room_never_touched(stack, top, state, bytes.next_multiple_of(page_size()))? {
            return Ok(room);
        }
        if !on_stack || stack.in_pieces {
            return Err(Error::Unsupported("its main stack is full".to_owned()));
        }
        let base = top.saturating_sub(bytes as u64) & !63;
        let found = self.read(base, bytes).map_err(|_| Error::Unsupported("its main stack is full".to_owned()))?;
        Ok(Room { base, before: found.clone(), after: found })
    }

    /// So many bytes, which are whole pages, below all that was ever touched, and below `top`.
    fn room_never_touched(
        &self,
        stack: Stack,
        top: u64,
        state: &arch::State,
        bytes: usize,
    ) -> Result<Option<Room>, Error> {
        let len = bytes as u64;
        let room = |base, before| Ok(Some(Room { base, before, after: mark(bytes) }));
        let reach = stack.start..stack.end.min(stack.start + REACH);
        let mut touched = Vec::new();
        pagemap::mapped(&self.pagemap, reach.clone(), pagemap::Holds::Anything, |range| {
            touched.extend((range.start..range.end).step_by(page_size()))
        })
        .map_err(failed("reading which pages of its stack are in use"))?;
        let is_marked = |page: u64| self.read(page, page_size()).is_ok_and(|found| found == mark(page_size()));
        let is_touched = |page: u64| touched.contains(&page);
        let is_free = |page: u64| if is_touched(page) { is_marked(page) } else { !stack.in_pieces };
        let used = reach.clone().step_by(page_size()).find(|&page| !is_free(page)).unwrap_or(reach.end);
        // With as much again below it, if possible: there the kernel puts the frame of a signal that comes when the
        // tracer is gone, and the stack need not grow for it.
        for base in [stack.start + len, stack.start] {
            if base + len <= used.min(top) {
                let is_new = !(base..base + len).step_by(page_size()).any(is_touched);
                let before = if is_new { Ok(vec![0; bytes]) } else { self.read(base, bytes) };
                return room(base, before.map_err(failed("reading its stack"))?);
            }
            if base + len <= top && (base..base + len).step_by(page_size()).all(is_touched) {
                let found = self.read(base, bytes).map_err(failed("reading its stack"))?;
                if self.is_left_over(&found, state) {
                    return room(base, found);
                }
            }
        }
        // Reading below a stack makes it grow (mm/memory.c, `__access_remote_vm`), as far as a limit allows, up to what
        // is mapped there and may not be accessed. Out of reach of the red zone of whoever is at its lowest, or the room
        // would be in the way then, and the next visit would need another.
        let page = page_size() as u64;
        let base = ((stack.start - arch::RED_ZONE).min(top) / page * page).saturating_sub(len);
        if !self.is_free_below(stack, base)? {
            return Ok(None);
        }
        let limit = stack.end - base + page;
        let zeros = self.read(base, bytes).or_else(|_| with_limit(limit, || self.read(base, bytes)));
        zeros.map_or(Ok(None), |zeros| room(base, zeros))
    }

    fn read(&self, base: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let mut found = vec![0; bytes];
        self.memory.read_exact_at(&mut found, base).map(|()| found)
    }

    /// Whether that is the frame of a tracer that was killed, and nobody needs it any more: the only thread is here and
    /// not on its way through it.
    fn is_left_over(&self, found: &[u8], state: &arch::State) -> bool {
        state.is_frame(found, self.home)
            && !arch::heals(&state.registers, self.home)
            && text(&self.directory, "status").is_ok_and(|status| number(&status, "Threads") == Some(1))
    }

    /// Whether another thread than the main one may be stopped for so many bytes, as things are.
    pub(super) fn main_leaves_room(&self, bytes: u64) -> bool {
        self.stack().is_ok_and(|stack| self.far_below_main(stack).is_ok_and(|top| stack.start + bytes <= top))
    }

    /// Up to where the stack is out of reach of the main thread, which is not stopped.
    fn far_below_main(&self, stack: Stack) -> Result<u64, Error> {
        let main = format!("task/{}", self.pid);
        let stat = text(&self.directory, &format!("{main}/stat"))?;
        if stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])) {
            return Ok(stack.end);
        }
        let call = text(&self.directory, &format!("{main}/syscall"))?;
        let pointer = waiting_at(&call).ok_or_else(|| Error::Busy("its main thread runs".to_owned()))?;
        if !stack.contains(pointer) {
            return Err(Error::Busy("its main thread is elsewhere than on its main stack".to_owned()));
        }
        Ok(pointer.saturating_sub(MARGIN))
    }
}

/// The stack pointer of a thread that waits, from its `/proc/PID/task/TID/syscall`.
fn waiting_at(call: &str) -> Option<u64> {
    let pointer = call.split_ascii_whitespace().rev().nth(1)?;
    u64::from_str_radix(pointer.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_pointer_is_known_of_who_waits() {
        let call = "232 0x4 0x7ffe0 0x10 0xffffffffffffffff 0x0 0x0 0x7fff12345678 0x7f0012345678\n";
        assert_eq!(waiting_at(call), Some(0x7fff_1234_5678));
        assert_eq!(waiting_at("-1 0x7fff12345678 0x7f0012345678\n"), Some(0x7fff_1234_5678));
        assert_eq!(waiting_at("running\n"), None);
        assert_eq!(waiting_at(""), None);
    }

    #[test]
    fn the_kernel_and_its_listing_tell_the_same_of_this_stack() {
        let listing = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let end = end(&listing).expect("an end");
        let stack = Stack::ending_at(end, |address| Ok(listed(&listing, address)));
        assert!(stack.is_ok_and(|stack| stack.is_some_and(|stack| stack.end == end && !stack.in_pieces)));
        let maps = File::open("/proc/self/maps").expect("maps");
        match Stack::ending_at(end, |address| asked(&maps, address)) {
            Ok(found) => assert_eq!(Ok(found), stack),
            Err(errno) => assert_eq!(errno, Errno::ENOTTY),
        }
    }

    #[test]
    fn a_stack_is_all_that_lies_below_its_end_without_a_gap() {
        let stack = |maps: &str| Stack::ending_at(end(maps)?, |address| Ok(listed(maps, address))).expect("a listing");
        let whole = Stack { start: 0x4000, end: 0x9000, in_pieces: false };
        let gap = "1000-3000 rw-p 00000000 00:00 0\n4000-9000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(gap), Some(whole));
        let pieces = "1000-2000 rw-p 00000000 00:00 0\n3000-5000 rw-p 00000000 00:00 0\n\
                      5000-8000 rw-p 00000000 00:00 0    [stack]\n8000-9000 rw-p 00000000 00:00 0\n";
        assert_eq!(stack(pieces), Some(Stack { start: 0x3000, end: 0x8000, in_pieces: true }));
        let file = "2000-4000 rw-p 00000000 08:01 77    /a/file\n4000-9000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(file), Some(whole));
        let replaced = "4000-9000 rw-p 00000000 08:01 77    [stack]\n";
        assert_eq!(stack(replaced), None);
        let guard = "3000-4000 ---p 00000000 00:00 0\n4000-9000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(guard), None);
        let piece = |number: u64| format!("{:x}-{:x} rw-p 00000000 00:00 0\n", number << 12, (number + 1) << 12);
        let many =
            (1..=PIECES as u64 + 1).map(piece).collect::<String>() + "42000-43000 rw-p 00000000 00:00 0    [stack]\n";
        assert_eq!(stack(&many), None);
        assert!(stack(&many[many.find('\n').expect("lines") + 1..].replacen("2000-3000", "2800-3000", 1)).is_none());
        assert_eq!(stack("1000-3000 rw-p 00000000 00:00 0\n"), None);
    }
}
