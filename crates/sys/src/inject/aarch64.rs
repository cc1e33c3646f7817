//! aarch64: registers, the signal frame, and the code at which a thread is parked.
//!
//! Mirrors arch/arm64/kernel/signal.c, arch/arm64/include/uapi/asm/sigcontext.h, ptrace.h and
//! arch/arm64/kernel/vdso/sigreturn.S (6.18).
//!
//! The kernel rewinds an interrupted call before a tracer sees the thread, so the call restarts when the thread
//! continues. A relative sleep then sleeps its full time again. A sleep longer than the interval between repeated stops
//! therefore ends only after the last stop. A signal that arrives during the stop acts as if it had arrived right
//! before the call.
//!
//! Limits: calls that end with EINTR when stopped (epoll_wait(2)) do so if they have a timeout, or if they began
//! immediately before the stop. A vector length that was set for the next exec only (PR_SVE_SET_VL_ONEXEC) is lost if
//! SVE registers are live. Threads with vectors too long for a frame, with live SME state or with a guarded control
//! stack are refused.

use std::io;
use std::time::Duration;

use memchr::memmem;

use super::ptrace::TracedThread;
use super::target::BlockedCall;
use super::{InjectError, InjectionSites, operation_failed};

const NT_PRSTATUS: usize = 1;
const NT_PRFPREG: usize = 2;
const NT_ARM_SYSTEM_CALL: usize = 0x404;
const NT_ARM_SVE: usize = 0x405;
const NT_ARM_SSVE: usize = 0x40b;
const NT_ARM_ZA: usize = 0x40c;
const NT_ARM_GCS: usize = 0x410;
/// PR_SHADOW_STACK_ENABLE (include/uapi/linux/prctl.h).
const PR_SHADOW_STACK_ENABLE: u8 = 1;

/// Number of `rt_sigreturn`.
pub const SYS_RT_SIGRETURN: i64 = 139;
/// The procedure call standard defines no red zone.
pub const RED_ZONE_BYTES: u64 = 0;
/// Whether the stub may lie in the kernel's own code, `[vdso]`.
pub const STUB_IN_VDSO: bool = true;
/// Whether an interrupted call still has its first argument.
pub const KEEPS_FIRST_ARGUMENT: bool = false;

/// io_getevents, epoll_pwait, rt_sigtimedwait, semtimedop, semop, io_pgetevents, epoll_pwait2: see the module
/// documentation.
pub const INTERRUPTED_BY_STOP: [u64; 7] = [4, 22, 137, 192, 193, 292, 441];

/// System calls that end with EINTR if they wait for a socket with a timeout, or for another operation that cannot
/// restart: read, write, readv, writev, accept, connect, sendto, recvfrom, sendmsg, recvmsg, accept4, recvmmsg,
/// sendmmsg, io_uring_enter. A call that ends so has done nothing.
const SOMETIMES_INTERRUPTED_BY_STOP: [u64; 14] = [63, 64, 65, 66, 202, 203, 206, 207, 211, 212, 242, 243, 269, 426];

/// `nop; mov x8, #139; svc #0`. The `nop` lets unwinders read one instruction back. A call that the kernel restarts
/// returns to it.
const NOP_STUB_CODE: [u8; 12] = [0x1f, 0x20, 0x03, 0xd5, 0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4];

/// `struct rt_sigframe`: siginfo, then `struct ucontext`.
const UCONTEXT_OFFSET: usize = 128;
const SIGMASK_OFFSET: usize = UCONTEXT_OFFSET + 40;
const SIGCONTEXT_OFFSET: usize = SIGMASK_OFFSET + 128 + 8;
const RESERVED_OFFSET: usize = SIGCONTEXT_OFFSET + 8 + 34 * 8;
const RECORDS_OFFSET: usize = RESERVED_OFFSET.next_multiple_of(16);
const FRAME_BYTES: usize = RECORDS_OFFSET + 4096;
const FPSIMD_MAGIC: u32 = 0x4650_8001;
const FPSIMD_BYTES: u32 = 528;
const SVE_MAGIC: u32 = 0x5356_4501;
/// `struct user_sve_header`, and `struct sve_context` before its registers: both have this length.
const SVE_HEADER_BYTES: usize = 16;
/// SVE_PT_REGS_SVE: the set has full SVE registers, not only the FPSIMD part.
const SVE_PT_REGS_SVE: u8 = 1;
/// The longest possible SVE register set (SVE_PT_SIZE for vectors of 256 bytes).
const MAX_SVE_SET_BYTES: usize = 9 << 10;
/// Not a valid mode of an alternate stack, so `sigreturn` does not change the alternate stack.
const SS_FLAGS_INVALID: u64 = 3;

/// PSR_BTYPE_MASK: an indirect branch was just taken, so the next instruction of a guarded page must be a landing
/// instruction. The stub has none: the kernel makes handlers return to it.
const PSR_BTYPE_MASK: u64 = 0xc00;

const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;

/// `struct user_pt_regs`, and the number of the system call that the thread is in, or -1.
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    words: [u64; 34],
    syscall_number: i32,
}

const SP_INDEX: usize = 31;
const PC_INDEX: usize = 32;
const PSTATE_INDEX: usize = 33;

/// The complete register state of a thread.
#[derive(Clone)]
pub struct ThreadState {
    pub registers: Registers,
    /// `struct user_fpsimd_state`: 32 vectors, fpsr, fpcr.
    fpsimd_registers: [u8; 528],
    /// The SVE register set; empty if no SVE registers are live.
    sve_registers: Vec<u8>,
}

/// Positions of the stub and of the return site in code. They are the same here.
pub fn find_sites(code: &[u8]) -> (Option<usize>, Option<usize>) {
    let stub = memmem::find(code, &NOP_STUB_CODE).map(|position| position + 4);
    (stub, stub)
}

/// Whether the code at both sites is unchanged.
pub fn are_sites_intact(stub: &[u8; 16], return_code: &[u8; 16]) -> bool {
    stub.starts_with(&NOP_STUB_CODE[4..]) && return_code.starts_with(&NOP_STUB_CODE)
}

/// The address of the code that [`are_sites_intact`] compares.
pub fn return_code_address(return_site: u64) -> u64 {
    return_site - 4
}

pub fn read_registers(thread: TracedThread) -> io::Result<Registers> {
    let mut bytes = [0; 34 * 8];
    let filled = thread.read_register_set(NT_PRSTATUS, &mut bytes)?;
    if filled != bytes.len() {
        return Err(io::Error::from_raw_os_error(libc::ENOEXEC));
    }
    let mut call = [0; 4];
    thread.read_register_set(NT_ARM_SYSTEM_CALL, &mut call)?;
    let mut words = [0; 34];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    Ok(Registers { words, syscall_number: i32::from_ne_bytes(call) })
}

pub fn write_registers(thread: TracedThread, registers: &Registers) -> io::Result<()> {
    let bytes: Vec<u8> = registers.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    thread.write_register_set(NT_PRSTATUS, &bytes)?;
    thread.write_register_set(NT_ARM_SYSTEM_CALL, &registers.syscall_number.to_ne_bytes())
}

impl ThreadState {
    pub fn capture(thread: TracedThread) -> Result<Self, InjectError> {
        let registers = read_registers(thread).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOEXEC) => InjectError::Unsupported("it is a 32-bit program".to_owned()),
            _ => operation_failed("reading its registers")(error),
        })?;
        // `struct user_gcs` (6.13): features_enabled at 0. `sigreturn` would expect a token on that stack that only the
        // kernel can write.
        let mut gcs_header = [0; 24];
        if thread.read_register_set(NT_ARM_GCS, &mut gcs_header).is_ok() && gcs_header[0] & PR_SHADOW_STACK_ENABLE != 0
        {
            return Err(InjectError::Unsupported("it runs with a guarded control stack".to_owned()));
        }
        let mut vectors = [0; 528];
        thread.read_register_set(NT_PRFPREG, &mut vectors).map_err(operation_failed("reading its vector registers"))?;
        // A processor without the extension has no such set.
        let mut header = [0; SVE_HEADER_BYTES];
        if thread.read_register_set(NT_ARM_SSVE, &mut header).is_ok() && has_sve_registers(&header) {
            return Err(InjectError::Busy("it is in streaming SVE mode".to_owned()));
        }
        let mut scalable = vec![0; MAX_SVE_SET_BYTES];
        let filled = thread.read_register_set(NT_ARM_SVE, &mut scalable).unwrap_or(0);
        scalable.truncate(if has_sve_registers(&scalable) { filled } else { 0 });
        if !scalable.is_empty() {
            let record = sve_record_bytes(&scalable);
            if scalable.len() < record || RECORDS_OFFSET + FPSIMD_BYTES as usize + record + 8 > FRAME_BYTES {
                return Err(InjectError::Busy("its SVE vectors are too long for a signal frame".to_owned()));
            }
        }
        // `struct user_za_header`: size at 0; more than the header when ZA is on.
        let mut header = [0; 16];
        if thread.read_register_set(NT_ARM_ZA, &mut header).is_ok()
            && u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) > 16
        {
            return Err(InjectError::Busy("its SME matrix state is live".to_owned()));
        }
        Ok(Self { registers, fpsimd_registers: vectors, sve_registers: scalable })
    }

    /// Restore the registers that a call may have changed.
    pub fn restore(&self, thread: TracedThread) -> io::Result<()> {
        // Each call clears SVE registers except their FPSIMD part (`fp_user_discard`).
        if !self.sve_registers.is_empty() {
            thread.write_register_set(NT_ARM_SVE, &self.sve_registers)?;
        }
        write_registers(thread, &self.registers)
    }

    pub fn stack_pointer(&self) -> u64 {
        self.registers.words[SP_INDEX]
    }

    /// The address of its next instruction, unless it is in a system call.
    pub fn user_ip(&self) -> Option<u64> {
        (self.registers.syscall_number < 0).then_some(self.registers.words[PC_INDEX])
    }

    pub fn set_ip(&mut self, ip: u64) {
        self.registers.words[PC_INDEX] = ip;
    }

    /// Restart a call that returns EINTR because of the stop, if none of its arguments limits its time. Returns whether
    /// it did.
    ///
    /// The result has replaced the call's first argument. `blocked_call` still has it: the call in which the thread
    /// waited when tracing began. No signal handler has run in the thread since then.
    pub fn restart_interrupted_call(
        &mut self,
        _now: Duration,
        _read: impl Fn(u64) -> Option<[u8; 16]>,
        blocked_call: Option<&BlockedCall>,
    ) -> bool {
        let words = &mut self.registers.words;
        let stop_sensitive_calls = [&INTERRUPTED_BY_STOP[..], &SOMETIMES_INTERRUPTED_BY_STOP].concat();
        let Some(call) = blocked_call.filter(|call| stop_sensitive_calls.contains(&call.number)) else { return false };
        let has_timeout = match call.number {
            22 => call.arguments[3] as i32 >= 0,
            137 => call.arguments[2] != 0,
            192 | 441 => call.arguments[3] != 0,
            4 | 292 => call.arguments[4] != 0,
            _ => false,
        };
        let is_interrupted = words[0].cast_signed() == -i64::from(libc::EINTR)
            && u64::from(words[8] as u32) == call.number
            && words[1..6] == call.arguments[1..]
            && words[SP_INDEX] == call.stack_pointer
            && words[PC_INDEX] == call.return_address;
        if !is_interrupted || has_timeout {
            return false;
        }
        words[0] = call.arguments[0];
        words[PC_INDEX] -= 4;
        true
    }

    /// Whether the bytes are exactly one complete frame of [`ThreadState::build_frame`]. A frame of the kernel has
    /// another alternate stack and a signal number.
    pub fn is_own_frame(&self, bytes: &[u8], _sites: InjectionSites) -> bool {
        let word = |offset: usize| {
            bytes.get(offset..offset + 8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")))
        };
        let end = RECORDS_OFFSET + FPSIMD_BYTES as usize;
        let end = match word(end) {
            Some(head) if head as u32 == SVE_MAGIC => end + (head >> 32) as usize,
            _ => end,
        };
        let vectors = u64::from(FPSIMD_MAGIC) | u64::from(FPSIMD_BYTES) << 32;
        let expected_words = [(0, 0), (UCONTEXT_OFFSET + 24, SS_FLAGS_INVALID), (RECORDS_OFFSET, vectors)];
        expected_words.iter().all(|&(offset, value)| word(offset) == Some(value))
            && bytes.get(end..).is_some_and(|rest| rest.iter().all(|&byte| byte == 0))
    }

    /// The maximum size of a frame of [`ThreadState::build_frame`], in bytes.
    pub fn max_frame_bytes(&self) -> usize {
        FRAME_BYTES
    }

    /// The frame to write at `frame_address`, 64-byte aligned. A thread that [`parked_registers`] puts at the stub then
    /// restores this state and this signal mask by itself.
    pub fn build_frame(&self, _frame_address: u64, signal_mask: u64, _sites: InjectionSites) -> Vec<u8> {
        let mut bytes = vec![0; FRAME_BYTES];
        let mut put = |offset: usize, value: u64| bytes[offset..offset + 8].copy_from_slice(&value.to_ne_bytes());
        put(UCONTEXT_OFFSET + 24, SS_FLAGS_INVALID);
        put(SIGMASK_OFFSET, signal_mask);
        for (position, &word) in self.registers.words.iter().enumerate() {
            put(SIGCONTEXT_OFFSET + 8 + position * 8, word);
        }
        put(RECORDS_OFFSET, u64::from(FPSIMD_MAGIC) | u64::from(FPSIMD_BYTES) << 32);
        // fpsr and fpcr come first in the frame, but last in the register set.
        bytes[RECORDS_OFFSET + 8..RECORDS_OFFSET + 16].copy_from_slice(&self.fpsimd_registers[512..520]);
        bytes[RECORDS_OFFSET + 16..RECORDS_OFFSET + 528].copy_from_slice(&self.fpsimd_registers[..512]);
        if !self.sve_registers.is_empty() {
            // The record has the registers in the same layout as the register set. Of its header, the record has only
            // the vector length.
            let record = sve_record_bytes(&self.sve_registers);
            let target = &mut bytes[RECORDS_OFFSET + FPSIMD_BYTES as usize..][..record];
            target.copy_from_slice(&self.sve_registers[..record]);
            target[..SVE_HEADER_BYTES].fill(0);
            target[..4].copy_from_slice(&SVE_MAGIC.to_ne_bytes());
            target[4..8].copy_from_slice(&(record as u32).to_ne_bytes());
            target[8..10].copy_from_slice(&self.sve_registers[8..10]);
        }
        bytes
    }
}

/// Whether a `struct user_sve_header`, with flags at 12, announces registers.
fn has_sve_registers(header: &[u8]) -> bool {
    header[12] & SVE_PT_REGS_SVE != 0
}

/// The length of the record of an SVE register set in a frame: 32 vectors and 17 predicates with one bit for each
/// vector byte (SVE_SIG_CONTEXT_SIZE). The vector length is at 8 of the header.
fn sve_record_bytes(scalable: &[u8]) -> usize {
    let vector = usize::from(u16::from_ne_bytes([scalable[8], scalable[9]]));
    SVE_HEADER_BYTES + (32 * vector + 17 * vector / 8).next_multiple_of(16)
}

/// Whether this result means that the kernel will restart the call.
pub fn is_restart_code(result: i64) -> bool {
    matches!(result, ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK)
}

/// Registers of a thread at the stub: the next instructions are `rt_sigreturn` of the frame at `frame_address`.
pub fn parked_registers(state: &ThreadState, frame_address: u64, sites: InjectionSites) -> Registers {
    let mut registers = state.registers;
    registers.words[PC_INDEX] = sites.sigreturn_stub;
    registers.words[SP_INDEX] = frame_address;
    registers.words[PSTATE_INDEX] &= !PSR_BTYPE_MASK;
    registers.syscall_number = -1;
    registers
}

/// Whether a thread whose tracer died may be executing `sigreturn` with its frame.
pub fn may_be_in_sigreturn(registers: &Registers, sites: InjectionSites) -> bool {
    (sites.sigreturn_stub - 4..=sites.sigreturn_stub + 8).contains(&registers.words[PC_INDEX])
}

/// Whether a stopped thread is at the entry of the stub's own call.
pub fn is_at_sigreturn_entry(registers: &Registers, sites: InjectionSites) -> bool {
    i64::from(registers.syscall_number) == SYS_RT_SIGRETURN && registers.words[PC_INDEX] == sites.sigreturn_stub + 8
}

/// Replace the call at whose entry the thread stopped by another one, which returns to the stub. If the kernel restarts
/// the call, it starts at the `nop` before it.
pub fn replace_call(
    thread: TracedThread,
    parked: &Registers,
    _frame_address: u64,
    sites: InjectionSites,
    number: i64,
    arguments: [u64; 6],
) -> io::Result<()> {
    let mut registers = *parked;
    registers.words[..6].copy_from_slice(&arguments);
    registers.words[8] = number.cast_unsigned();
    registers.words[PC_INDEX] = sites.return_site;
    registers.syscall_number = i32::try_from(number).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    write_registers(thread, &registers)
}

pub fn call_result(registers: &Registers) -> i64 {
    registers.words[0].cast_signed()
}

#[cfg(test)]
mod tests {
    use super::super::distinguishing_offset;
    use super::*;

    const TEST_SITES: InjectionSites = InjectionSites { sigreturn_stub: 0x1004, return_site: 0x1004 };

    fn state_with_registers(words: [u64; 34]) -> ThreadState {
        ThreadState {
            registers: Registers { words, syscall_number: -1 },
            fpsimd_registers: [7; 528],
            sve_registers: Vec::new(),
        }
    }

    /// A register set with vectors of this many bytes.
    fn sve_register_set(vector: u16) -> Vec<u8> {
        let registers = 32 * usize::from(vector) + 17 * usize::from(vector) / 8;
        let mut set = vec![0; SVE_HEADER_BYTES];
        set[8..10].copy_from_slice(&vector.to_ne_bytes());
        set[12] = SVE_PT_REGS_SVE;
        set.resize(SVE_HEADER_BYTES + registers, 9);
        // Padding, fpsr and fpcr.
        set.resize((SVE_HEADER_BYTES + registers).next_multiple_of(16) + 16, 0);
        set
    }

    #[test]
    fn own_frame_and_sigreturn_are_recognized() {
        for vector in [0, 16, 32, 64, 96] {
            let mut state = state_with_registers([0; 34]);
            if vector != 0 {
                state.sve_registers = sve_register_set(vector);
            }
            let frame = state.build_frame(0x7000, 1 << 9, TEST_SITES);
            assert_eq!(frame.len(), state.max_frame_bytes());
            assert!(state.is_own_frame(&frame, TEST_SITES) && !state.is_own_frame(&frame[64..], TEST_SITES));
            assert!(state.is_own_frame(&[frame.as_slice(), &[0; 9]].concat(), TEST_SITES));
            assert!(!state.is_own_frame(&[frame.as_slice(), &[0, 1]].concat(), TEST_SITES));
            assert!(
                !state.is_own_frame(&frame[..RECORDS_OFFSET], TEST_SITES) && !state.is_own_frame(&[0; 4], TEST_SITES)
            );
            let offset = distinguishing_offset(&vec![0; frame.len()], &frame);
            assert_eq!(frame[offset..offset + 8], SS_FLAGS_INVALID.to_ne_bytes());
        }
        for (ip, expected) in [(0xfff, false), (0x1000, true), (0x1004, true), (0x100c, true), (0x1010, false)] {
            let mut state = state_with_registers([0; 34]);
            state.set_ip(ip);
            assert_eq!(may_be_in_sigreturn(&state.registers, TEST_SITES), expected, "{ip:x}");
        }
    }

    #[test]
    fn sve_record_follows_fpsimd_record() {
        let mut state = state_with_registers([0; 34]);
        state.sve_registers = sve_register_set(32);
        let frame = state.build_frame(0x7000, 0, TEST_SITES);
        let record = &frame[RECORDS_OFFSET + 528..];
        // 32 vectors of 32 bytes, 17 predicates of 4, rounded up to 16.
        assert_eq!(record[..4], SVE_MAGIC.to_ne_bytes());
        assert_eq!(record[4..8], (16 + 1104_u32).to_ne_bytes());
        assert_eq!(record[8..16], [32, 0, 0, 0, 0, 0, 0, 0]);
        assert!(record[16..16 + 1092].iter().all(|&byte| byte == 9));
        assert!(record[16 + 1092..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn parked_thread_has_no_branch_type() {
        let mut words = [0; 34];
        words[PSTATE_INDEX] = 0x6000_0c00;
        let parked = parked_registers(&state_with_registers(words), 0x7000, TEST_SITES);
        assert_eq!(
            [parked.words[SP_INDEX], parked.words[PC_INDEX], parked.words[PSTATE_INDEX]],
            [0x7000, 0x1004, 0x6000_0000]
        );
    }

    #[test]
    fn only_waits_without_timeout_are_restarted() {
        let eintr = (-i64::from(libc::EINTR)).cast_unsigned();
        let no_timeout = u64::from(u32::MAX);
        let call = BlockedCall {
            number: 22,
            arguments: [3, 4, 5, no_timeout, 6, 8],
            stack_pointer: 0x7f00,
            return_address: 0x4004,
        };
        let mut words = [0; 34];
        words[..9].copy_from_slice(&[eintr, 4, 5, no_timeout, 6, 8, 0, 0, 22]);
        [words[SP_INDEX], words[PC_INDEX]] = [0x7f00, 0x4004];
        let restarted = |words: [u64; 34], call: Option<&BlockedCall>| {
            let mut state = state_with_registers(words);
            let restarted = state.restart_interrupted_call(Duration::ZERO, |_| None, call);
            assert_eq!(state.registers.words == words, !restarted);
            restarted.then_some([state.registers.words[0], state.registers.words[PC_INDEX]])
        };
        assert_eq!(restarted(words, Some(&call)), Some([3, 0x4000]));
        assert_eq!(restarted(words, None), None);
        // A different call, address or result is not restarted.
        for (register, value) in [(0, 1), (1, 9), (5, 9), (8, 21), (SP_INDEX, 0x7f10), (PC_INDEX, 0x4000)] {
            let mut words = words;
            words[register] = value;
            assert_eq!(restarted(words, Some(&call)), None, "{register}");
        }
        let mut with_timeout = words;
        with_timeout[3] = 50;
        assert_eq!(restarted(with_timeout, Some(&BlockedCall { arguments: [3, 4, 5, 50, 6, 8], ..call })), None);
        // read: a socket's timeout is not among its arguments.
        words[8] = 63;
        assert_eq!(restarted(words, Some(&BlockedCall { number: 63, ..call })), Some([3, 0x4000]));
        // openat: other calls keep their result.
        words[8] = 56;
        assert_eq!(restarted(words, Some(&BlockedCall { number: 56, ..call })), None);
    }
}
