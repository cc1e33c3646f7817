//! x86-64: registers, the signal frame, and the code at which a thread is parked.
//!
//! Mirrors arch/x86/kernel/signal_64.c, arch/x86/kernel/fpu/signal.c, arch/x86/include/uapi/asm/sigcontext.h and the
//! restart of system calls in arch/x86/kernel/signal.c (6.18). Limits: the CPU must have XSAVE. Threads in 32-bit or
//! x32 code, or with a shadow stack, are refused.

use std::arch::x86_64::__cpuid_count;
use std::io;
use std::time::Duration;

use memchr::memmem;

use super::ptrace::TracedThread;
use super::target::BlockedCall;
use super::{InjectError, InjectionSites, operation_failed};

const NT_PRSTATUS: usize = 1;
const NT_X86_XSTATE: usize = 0x202;
const NT_X86_SHSTK: usize = 0x204;

/// Number of `rt_sigreturn`.
pub const SYS_RT_SIGRETURN: i64 = 15;
/// Bytes below the stack pointer that belong to the running function (System V ABI, 3.2.2).
pub const RED_ZONE_BYTES: u64 = 128;
/// Whether the stub may lie in the kernel's own code, `[vdso]`.
pub const STUB_IN_VDSO: bool = false;
/// Whether an interrupted call still has its first argument.
pub const KEEPS_FIRST_ARGUMENT: bool = true;

/// `mov $15,%rax; syscall`: the code of each C library's `restore_rt` and of Go's `sigreturn`.
const STUB_CODE: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00, 0x0f, 0x05];
/// `ret` behind `syscall`, and behind `xor %eax,%eax`.
const RETURN_CODES: [[u8; 3]; 2] = [[0x0f, 0x05, 0xc3], [0x31, 0xc0, 0xc3]];

const USER_CS: u64 = 0x33;
/// X86_EFLAGS_TF: a debug exception after each instruction.
const X86_EFLAGS_TF: u64 = 1 << 8;
const X32_SYSCALL_BIT: u64 = 1 << 30;

/// `struct rt_sigframe`: the return address, `struct ucontext`, `siginfo`.
const UCONTEXT_OFFSET: usize = 8;
const SIGCONTEXT_OFFSET: usize = UCONTEXT_OFFSET + 40;
const SIGMASK_OFFSET: usize = SIGCONTEXT_OFFSET + 256;
const FRAME_BYTES: usize = SIGMASK_OFFSET + 8 + 128;
/// UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS.
const UC_FLAGS: u64 = 7;
/// Not a valid mode of an alternate stack, so `sigreturn` does not change the alternate stack.
const SS_FLAGS_INVALID: u64 = 3;

const SW_RESERVED_OFFSET: usize = 464;
const XSTATE_HEADER_OFFSET: usize = 512;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// x87 and SSE, which the kernel always marks as present.
const XFEATURE_MASK_FPSSE: u64 = 3;
/// XFEATURE_XTILE_DATA. A thread has space for it only after its first use.
const XFEATURE_MASK_XTILE_DATA: u64 = 1 << 18;

const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;

/// System calls that return EINTR to a thread that was only stopped, while other calls are restarted (signal(7),
/// "Interruption of system calls and library functions by stop signals"): semop, rt_sigtimedwait, io_getevents,
/// semtimedop, epoll_wait, epoll_pwait, io_pgetevents, epoll_pwait2. A call that returns so has done nothing.
pub const INTERRUPTED_BY_STOP: [u64; 8] = [65, 128, 208, 220, 232, 281, 333, 441];

/// System calls that do so if they wait for a socket with a timeout, or for another operation that cannot restart:
/// read, write, readv, writev, connect, accept, sendto, recvfrom, sendmsg, recvmsg, accept4, recvmmsg, sendmmsg,
/// io_uring_enter. A call that returns so has done nothing: partial work returns a count.
const SOMETIMES_INTERRUPTED_BY_STOP: [u64; 14] = [0, 1, 19, 20, 42, 43, 44, 45, 46, 47, 288, 299, 307, 426];

/// Milliseconds of the clock that fit beside a call's number, which stays positive.
const START_MILLIS_MASK: u64 = (1 << 31) - 1;
/// If a call was first interrupted longer ago than its timeout plus this many milliseconds, this module did not mark
/// it.
const STALE_START_MILLIS: u64 = 60_000;

/// General registers, in the layout of NT_PRSTATUS.
pub type Registers = libc::user_regs_struct;

const REGISTER_BYTES: usize = size_of::<Registers>();

/// The complete register state of a thread.
#[derive(Clone)]
pub struct ThreadState {
    pub registers: Registers,
    xsave_area: Vec<u8>,
}

/// Positions of the stub and of the return site in code, each if present.
pub fn find_sites(code: &[u8]) -> (Option<usize>, Option<usize>) {
    let stub = memmem::find(code, &STUB_CODE);
    let return_code = RETURN_CODES.iter().filter_map(|return_code| memmem::find(code, return_code)).min();
    // The return site is the `ret`. A restarted call returns to the two bytes before it.
    (stub, return_code.map(|position| position + 2))
}

/// Whether the code at both sites is unchanged.
pub fn are_sites_intact(stub: &[u8; 16], return_code: &[u8; 16]) -> bool {
    stub.starts_with(&STUB_CODE) && RETURN_CODES.iter().any(|code| return_code.starts_with(code))
}

/// The address of the code that [`are_sites_intact`] compares.
pub fn return_code_address(return_site: u64) -> u64 {
    return_site - 2
}

pub fn read_registers(thread: TracedThread) -> io::Result<Registers> {
    let mut bytes = [0; REGISTER_BYTES];
    let filled = thread.read_register_set(NT_PRSTATUS, &mut bytes)?;
    if filled != REGISTER_BYTES {
        return Err(io::Error::from_raw_os_error(libc::ENOEXEC));
    }
    // SAFETY: both are 27 plain 64-bit numbers, for which every bit pattern is valid.
    Ok(unsafe { std::mem::transmute::<[u8; REGISTER_BYTES], Registers>(bytes) })
}

pub fn write_registers(thread: TracedThread, registers: &Registers) -> io::Result<()> {
    // SAFETY: 27 64-bit numbers have no padding.
    let bytes = unsafe { std::mem::transmute::<Registers, [u8; REGISTER_BYTES]>(*registers) };
    thread.write_register_set(NT_PRSTATUS, &bytes)
}

impl ThreadState {
    pub fn capture(thread: TracedThread) -> Result<Self, InjectError> {
        let registers = read_registers(thread).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOEXEC) => InjectError::Unsupported("it is a 32-bit program".to_owned()),
            _ => operation_failed("reading its registers")(error),
        })?;
        let syscall_number = (registers.orig_rax as i64 >= 0).then_some(registers.orig_rax);
        if registers.cs != USER_CS || syscall_number.is_some_and(|number| number & X32_SYSCALL_BIT != 0) {
            return Err(InjectError::Unsupported("it runs 32-bit code".to_owned()));
        }
        // `ssp_get` (arch/x86/kernel/fpu/regset.c, 6.6) succeeds only for a thread with a shadow stack. `sigreturn`
        // would expect a frame on that stack that only the kernel can write. `InjectTarget::new` has checked the main
        // thread's.
        if thread.read_register_set(NT_X86_SHSTK, &mut [0; 8]).is_ok() {
            return Err(InjectError::Unsupported("it runs with a shadow stack".to_owned()));
        }
        let mut vectors = vec![0; 64 << 10];
        let filled = thread
            .read_register_set(NT_X86_XSTATE, &mut vectors)
            .map_err(operation_failed("reading its vector registers"))?;
        vectors.truncate(filled);
        if filled < XSTATE_HEADER_OFFSET + 64 {
            return Err(InjectError::Unsupported("this CPU has no XSAVE".to_owned()));
        }
        Ok(Self { registers, xsave_area: vectors })
    }

    /// Restore the registers that a call may have changed.
    pub fn restore(&self, thread: TracedThread) -> io::Result<()> {
        write_registers(thread, &self.registers)
    }

    pub fn stack_pointer(&self) -> u64 {
        self.registers.rsp
    }

    /// The address of its next instruction, unless it is in a system call.
    pub fn user_ip(&self) -> Option<u64> {
        ((self.registers.orig_rax as i64) < 0).then_some(self.registers.rip)
    }

    pub fn set_ip(&mut self, ip: u64) {
        self.registers.rip = ip;
    }

    /// Restart a call that returns EINTR because of the stop, or let it return its timeout result if its time is over.
    /// A call restarted at each of many stops would otherwise never reach its timeout. `now` is the monotonic clock;
    /// `read` reads the target's memory. Returns whether it changed the call.
    ///
    /// The time of the first interruption is stored in the upper half of the call's number. The kernel ignores that
    /// half, keeps it when it restarts the call, and drops it when the call is over (`syscall_get_nr`,
    /// `arch_do_signal_or_restart`). So a new call of the same kind is recognized as new, and the program never sees a
    /// changed register.
    pub fn restart_interrupted_call(
        &mut self,
        now: Duration,
        read: impl Fn(u64) -> Option<[u8; 16]>,
        _blocked_call: Option<&BlockedCall>,
    ) -> bool {
        let syscall_number = self.registers.orig_rax & u64::from(u32::MAX);
        let is_interrupted = self.registers.rax as i64 == -i64::from(libc::EINTR);
        let stop_sensitive_calls = [&INTERRUPTED_BY_STOP[..], &SOMETIMES_INTERRUPTED_BY_STOP].concat();
        if !is_interrupted || !stop_sensitive_calls.contains(&syscall_number) {
            return false;
        }
        self.registers.rax = ERESTARTNOHAND as u64;
        let Some((timeout_millis, timeout_result)) = self.call_timeout(syscall_number, read) else { return true };
        let now = now.as_millis() as u64 & START_MILLIS_MASK;
        let start_millis = self.registers.orig_rax >> 32;
        let elapsed_millis = now.wrapping_sub(start_millis) & START_MILLIS_MASK;
        if start_millis == 0 || elapsed_millis > timeout_millis.saturating_add(STALE_START_MILLIS) {
            self.registers.orig_rax = syscall_number | now.max(1) << 32;
        } else if elapsed_millis > timeout_millis {
            self.registers.rax = timeout_result as u64;
        }
        true
    }

    /// The timeout of a call of [`INTERRUPTED_BY_STOP`] in milliseconds, if it has one, and the result that it then
    /// returns.
    fn call_timeout(&self, syscall_number: u64, read: impl Fn(u64) -> Option<[u8; 16]>) -> Option<(u64, i64)> {
        let r = &self.registers;
        let eagain = -i64::from(libc::EAGAIN);
        let (timespec, result) = match syscall_number {
            232 | 281 => return u64::try_from(r.r10 as i32).ok().map(|timeout_millis| (timeout_millis, 0)),
            128 => (r.rdx, eagain),
            208 | 333 => (r.r8, 0),
            220 => (r.r10, eagain),
            441 => (r.r10, 0),
            _ => return None,
        };
        let time = read(timespec).filter(|_| timespec != 0)?;
        let word = |offset: usize| u64::from_le_bytes(time[offset..offset + 8].try_into().expect("eight bytes"));
        Some((word(0).saturating_mul(1000).saturating_add(word(8).div_ceil(1_000_000)), result))
    }

    /// The registers with which the thread continues in user mode. A call that the kernel would restart begins again.
    fn resumed_registers(&self) -> Registers {
        let mut registers = self.registers;
        let is_in_call = registers.orig_rax as i64 >= 0;
        if is_in_call && is_restart_code(registers.rax as i64) {
            registers.rax = registers.orig_rax;
            registers.rip -= 2;
        }
        registers
    }

    /// The maximum size of a frame of [`ThreadState::build_frame`], in bytes.
    pub fn max_frame_bytes(&self) -> usize {
        8 + FRAME_BYTES + 64 + self.xsave_area.len() + 8
    }

    /// The frame to write at `frame_address`, 64-byte aligned. A thread that [`parked_registers`] puts at the stub then
    /// restores this state and this signal mask by itself.
    pub fn build_frame(&self, frame_address: u64, signal_mask: u64, sites: InjectionSites) -> Vec<u8> {
        let mut bytes = vec![0; self.max_frame_bytes()];
        let vectors = (8 + FRAME_BYTES).next_multiple_of(64);
        let registers = self.resumed_registers();
        let frame = 8;
        let mut put =
            |offset: usize, value: u64| bytes[frame + offset..frame + offset + 8].copy_from_slice(&value.to_le_bytes());
        put(0, sites.sigreturn_stub);
        put(UCONTEXT_OFFSET, UC_FLAGS);
        put(UCONTEXT_OFFSET + 24, SS_FLAGS_INVALID);
        let r = &registers;
        let general = [
            r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx,
            r.rsp, r.rip, r.eflags,
        ];
        for (position, value) in general.into_iter().enumerate() {
            put(SIGCONTEXT_OFFSET + position * 8, value);
        }
        put(SIGCONTEXT_OFFSET + 144, r.cs | r.ss << 48);
        put(SIGCONTEXT_OFFSET + 168, signal_mask);
        put(SIGCONTEXT_OFFSET + 184, frame_address + vectors as u64);
        put(SIGMASK_OFFSET, signal_mask);
        self.write_xsave_area(&mut bytes[vectors..]);
        bytes
    }

    /// Whether the bytes are exactly one complete frame of [`ThreadState::build_frame`] with these sites. Its head
    /// differs from a frame of the kernel, which has another alternate stack. Its end is checked because a growing
    /// stack would overwrite it first.
    pub fn is_own_frame(&self, bytes: &[u8], sites: InjectionSites) -> bool {
        let end = (8 + FRAME_BYTES).next_multiple_of(64) + self.xsave_area.len();
        let word = |offset: usize| {
            bytes.get(offset..offset + 8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
        };
        let expected_words = [
            (0, 0),
            (8, sites.sigreturn_stub),
            (8 + UCONTEXT_OFFSET, UC_FLAGS),
            (8 + UCONTEXT_OFFSET + 24, SS_FLAGS_INVALID),
            (end, u64::from(FP_XSTATE_MAGIC2)),
        ];
        expected_words.iter().all(|&(offset, value)| word(offset) == Some(value))
            && bytes[end + 8..].iter().all(|&byte| byte == 0)
    }

    /// Write the XSAVE area in the format that `sigreturn` expects.
    fn write_xsave_area(&self, area: &mut [u8]) {
        area[..self.xsave_area.len()].copy_from_slice(&self.xsave_area);
        let number =
            |offset: usize| u64::from_le_bytes(self.xsave_area[offset..offset + 8].try_into().expect("eight bytes"));
        let (all_features, used_features) =
            (number(SW_RESERVED_OFFSET), number(XSTATE_HEADER_OFFSET) | XFEATURE_MASK_FPSSE);
        // ptrace returns the largest state that any thread may have. A thread that never used tiles has no space for
        // them, and `sigreturn` accepts only what fits the thread's space.
        let restored_features = if used_features & XFEATURE_MASK_XTILE_DATA == 0 {
            all_features & !XFEATURE_MASK_XTILE_DATA
        } else {
            all_features
        };
        let size = xstate_bytes(restored_features).min(self.xsave_area.len());
        area[XSTATE_HEADER_OFFSET..XSTATE_HEADER_OFFSET + 8].copy_from_slice(&used_features.to_le_bytes());
        let software = [
            FP_XSTATE_MAGIC1,
            size as u32 + 4,
            restored_features as u32,
            (restored_features >> 32) as u32,
            size as u32,
            0,
        ];
        area[SW_RESERVED_OFFSET..SW_RESERVED_OFFSET + 48].fill(0);
        for (position, word) in software.into_iter().enumerate() {
            area[SW_RESERVED_OFFSET + position * 4..][..4].copy_from_slice(&word.to_le_bytes());
        }
        // Most kernels read the second mark behind the stated size. Those of 6.14 to 6.18 read it behind the thread's
        // space, which may be the full one although the thread now uses less.
        for offset in [size, self.xsave_area.len()] {
            area[offset..offset + 4].copy_from_slice(&FP_XSTATE_MAGIC2.to_le_bytes());
        }
    }
}

/// The size of the standard format for these features (Intel SDM vol. 1, 13.4.3).
fn xstate_bytes(features: u64) -> usize {
    let extended = (2..63).filter(|feature| features >> feature & 1 == 1).map(|feature| {
        let leaf = __cpuid_count(0xd, feature);
        (leaf.eax + leaf.ebx) as usize
    });
    extended.max().unwrap_or(0).max(XSTATE_HEADER_OFFSET + 64)
}

/// Whether this result means that the kernel will restart the call.
pub fn is_restart_code(result: i64) -> bool {
    matches!(result, ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK)
}

/// Registers of a thread at the stub: the next instructions are `rt_sigreturn` of the frame at `frame_address`.
pub fn parked_registers(state: &ThreadState, frame_address: u64, sites: InjectionSites) -> Registers {
    let mut registers = state.registers;
    registers.rip = sites.sigreturn_stub;
    registers.rsp = frame_address + 16;
    registers.orig_rax = u64::MAX;
    registers.rax = 0;
    // SIGTRAP, which is blocked here, would kill a program that single-steps itself. The frame keeps the flag.
    registers.eflags &= !X86_EFLAGS_TF;
    registers
}

/// Whether a thread whose tracer died may be executing `sigreturn` with its frame.
pub fn may_be_in_sigreturn(registers: &Registers, sites: InjectionSites) -> bool {
    let code = sites.sigreturn_stub..=sites.sigreturn_stub + STUB_CODE.len() as u64;
    code.contains(&registers.rip)
        || (return_code_address(sites.return_site)..=sites.return_site).contains(&registers.rip)
}

/// Whether a stopped thread is at the entry of the stub's own call.
pub fn is_at_sigreturn_entry(registers: &Registers, sites: InjectionSites) -> bool {
    registers.orig_rax as i64 == SYS_RT_SIGRETURN && registers.rip == sites.sigreturn_stub + STUB_CODE.len() as u64
}

/// Replace the call at whose entry the thread stopped by another one, which returns to the return site. Its `ret` goes
/// to the stub, whose address is the first word of the frame. If the kernel restarts the call, it starts two bytes
/// before.
pub fn replace_call(
    thread: TracedThread,
    parked: &Registers,
    frame_address: u64,
    sites: InjectionSites,
    number: i64,
    arguments: [u64; 6],
) -> io::Result<()> {
    let mut registers = *parked;
    registers.orig_rax = number as u64;
    [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = arguments;
    registers.rip = sites.return_site;
    registers.rsp = frame_address + 8;
    // The kernel sets this at the entry of a call.
    registers.rax = -i64::from(libc::ENOSYS) as u64;
    write_registers(thread, &registers)
}

pub fn call_result(registers: &Registers) -> i64 {
    registers.rax as i64
}

#[cfg(test)]
mod tests {
    use super::super::distinguishing_offset;
    use super::*;

    fn interrupted_state(call: u64, limit: u64) -> ThreadState {
        // SAFETY: all zeros are valid for plain numbers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        registers.orig_rax = call;
        registers.rax = -i64::from(libc::EINTR) as u64;
        registers.r10 = limit;
        ThreadState { registers, xsave_area: Vec::new() }
    }

    fn stop_at(state: &mut ThreadState, millis: u64) -> i64 {
        state.registers.rax = -i64::from(libc::EINTR) as u64;
        state.restart_interrupted_call(Duration::from_millis(millis), |_| None, None);
        state.registers.rax as i64
    }

    #[test]
    fn repeatedly_stopped_wait_times_out_on_time() {
        let mut state = interrupted_state(232, 50);
        for millis in (1000..=1050).step_by(10) {
            assert_eq!(stop_at(&mut state, millis), ERESTARTNOHAND, "at {millis}");
            assert_eq!((state.registers.orig_rax as u32, state.registers.r10), (232, 50));
        }
        assert_eq!(stop_at(&mut state, 1051), 0);
        // The next call has a plain number.
        state.registers.orig_rax = 232;
        assert_eq!(stop_at(&mut state, 1052), ERESTARTNOHAND);
        assert_eq!(stop_at(&mut state, 1100), ERESTARTNOHAND);
        // Other values in the upper half are ignored.
        state.registers.orig_rax = 232 | 7 << 32;
        assert_eq!(stop_at(&mut state, 1_000_000), ERESTARTNOHAND);
        assert_eq!(stop_at(&mut state, 1_000_010), ERESTARTNOHAND);
    }

    #[test]
    fn endless_waits_restart_other_calls_are_kept() {
        let mut state = interrupted_state(281, u64::from(u32::MAX));
        assert_eq!(stop_at(&mut state, 1000), ERESTARTNOHAND);
        assert_eq!(stop_at(&mut state, 900_000), ERESTARTNOHAND);
        assert_eq!(state.registers.orig_rax, 281);
        // read: a socket's timeout is not among its arguments.
        let mut state = interrupted_state(0, 0);
        assert_eq!(stop_at(&mut state, 1000), ERESTARTNOHAND);
        assert_eq!(state.registers.orig_rax, 0);
        // open
        assert_eq!(stop_at(&mut interrupted_state(2, 0), 1000), -i64::from(libc::EINTR));
    }

    #[test]
    fn own_frame_and_sigreturn_are_recognized() {
        let sites = InjectionSites { sigreturn_stub: 0x1000, return_site: 0x2002 };
        let mut state = interrupted_state(u64::MAX, 0);
        state.xsave_area = vec![0; 1024];
        let frame = state.build_frame(0x7000, 0, sites);
        assert!(state.is_own_frame(&frame, sites));
        assert!(
            !state.is_own_frame(&frame, InjectionSites { sigreturn_stub: 0x1001, ..sites })
                && !state.is_own_frame(&frame[64..], sites)
        );
        assert!(state.is_own_frame(&[frame.as_slice(), &[0; 9]].concat(), sites));
        assert!(!state.is_own_frame(&[frame.as_slice(), &[0, 1]].concat(), sites));
        assert!(!state.is_own_frame(&frame[..frame.len() / 2], sites) && !state.is_own_frame(&[0; 4], sites));
        let offset = distinguishing_offset(&vec![0; frame.len()], &frame);
        assert_eq!(frame[offset..offset + 8], sites.sigreturn_stub.to_ne_bytes());
        for (ip, expected) in [(0xfff, false), (0x1000, true), (0x1009, true), (0x2002, true), (0x3000, false)] {
            state.registers.rip = ip;
            assert_eq!(may_be_in_sigreturn(&state.registers, sites), expected, "{ip:x}");
        }
    }

    #[test]
    fn parked_thread_clears_trap_flag_frame_keeps_it() {
        let sites = InjectionSites { sigreturn_stub: 0x1000, return_site: 0x2002 };
        let mut state = interrupted_state(u64::MAX, 0);
        state.xsave_area = vec![0; 1024];
        state.registers.eflags = 0x346;
        assert_eq!(parked_registers(&state, 0x7000, sites).eflags, 0x246);
        let flags = 8 + SIGCONTEXT_OFFSET + 17 * 8;
        assert_eq!(state.build_frame(0x7000, 0, sites)[flags..flags + 8], 0x346_u64.to_le_bytes());
    }

    #[test]
    fn timeout_is_read_from_timespec_in_memory() {
        let mut time = [0; 16];
        time[0] = 2;
        time[8..].copy_from_slice(&1_500_000_u64.to_le_bytes());
        let mut state = interrupted_state(128, 0);
        state.registers.rdx = 0x1000;
        let read = |address: u64| (address == 0x1000).then_some(time);
        assert_eq!(state.call_timeout(128, read), Some((2002, -i64::from(libc::EAGAIN))));
        assert_eq!(state.call_timeout(441, read), None);
    }
}
