//! aarch64: registers, the signal frame, and the code that a thread is parked at.
//!
//! Mirrors arch/arm64/kernel/signal.c, arch/arm64/include/uapi/asm/sigcontext.h, ptrace.h and
//! arch/arm64/kernel/vdso/sigreturn.S (6.18). The kernel winds an interrupted call back before a tracer sees the thread,
//! so it begins anew when the thread goes on: a relative sleep that is interrupted here sleeps its full time again, so
//! that one longer than the time between two of many stops ends after the last of them only, and calls that end with
//! EINTR when stopped (epoll_wait(2)) do so. Limits: threads with live SVE or SME state or with a guarded control stack
//! are refused.

use std::io;
use std::time::Duration;

use super::ptrace::Thread;
use super::{Error, Home, failed};

const NT_PRSTATUS: usize = 1;
const NT_PRFPREG: usize = 2;
const NT_ARM_SYSTEM_CALL: usize = 0x404;
const NT_ARM_SVE: usize = 0x405;
const NT_ARM_SSVE: usize = 0x40b;
const NT_ARM_ZA: usize = 0x40c;
const NT_ARM_GCS: usize = 0x410;
/// PR_SHADOW_STACK_ENABLE (include/uapi/linux/prctl.h).
const SHADOW_STACK_ENABLE: u8 = 1;

/// Number of `rt_sigreturn`.
pub const SIGRETURN: i64 = 139;
/// The procedure call standard has none.
pub const RED_ZONE: u64 = 0;
/// Whether the kernel's own code, `[vdso]`, may hold the stub.
pub const STUB_IN_VDSO: bool = true;

/// io_getevents, epoll_pwait, rt_sigtimedwait, semtimedop, semop, io_pgetevents, epoll_pwait2: see the head.
pub const INTERRUPTED_BY_STOP: [u64; 7] = [4, 22, 137, 192, 193, 292, 441];

/// `nop; mov x8, #139; svc #0`: the `nop` is there so that unwinders may look one instruction back. A call that the
/// kernel restarts comes back to it.
const NOP_STUB: [u8; 12] = [0x1f, 0x20, 0x03, 0xd5, 0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4];

/// `struct rt_sigframe`: siginfo, then `struct ucontext`.
const UCONTEXT: usize = 128;
const SIGMASK: usize = UCONTEXT + 40;
const SIGCONTEXT: usize = SIGMASK + 128 + 8;
const RESERVED: usize = SIGCONTEXT + 8 + 34 * 8;
const RESERVED_ALIGNED: usize = RESERVED.next_multiple_of(16);
const FRAME: usize = RESERVED_ALIGNED + 4096;
const FPSIMD_MAGIC: u32 = 0x4650_8001;
const FPSIMD_BYTES: u32 = 528;
/// No mode of an alternate stack, which `sigreturn` therefore leaves alone.
const SS_FLAGS_NONE: u64 = 3;

const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;

/// `struct user_pt_regs`, and the number of the call that the thread is in, or -1.
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    words: [u64; 34],
    call: i32,
}

const SP: usize = 31;
const PC: usize = 32;

/// All that a thread has in its processor.
#[derive(Clone)]
pub struct State {
    pub registers: Registers,
    /// `struct user_fpsimd_state`: 32 vectors, fpsr, fpcr.
    vectors: [u8; 528],
}

/// Positions of the stub and of the landing in code: they are one here.
pub fn find(code: &[u8]) -> (Option<usize>, Option<usize>) {
    let stub = code.windows(NOP_STUB.len()).position(|window| window == NOP_STUB).map(|position| position + 4);
    (stub, stub)
}

/// Whether the code is still what was found.
pub fn is_home(stub: &[u8; 16], landing: &[u8; 16]) -> bool {
    stub.starts_with(&NOP_STUB[4..]) && landing.starts_with(&NOP_STUB)
}

/// Where to read the code that [`is_home`] looks at.
pub fn landing_code(landing: u64) -> u64 {
    landing - 4
}

pub fn registers(thread: Thread) -> io::Result<Registers> {
    let mut bytes = [0; 34 * 8];
    let filled = thread.register_set(NT_PRSTATUS, &mut bytes)?;
    if filled != bytes.len() {
        return Err(io::Error::from_raw_os_error(libc::ENOEXEC));
    }
    let mut call = [0; 4];
    thread.register_set(NT_ARM_SYSTEM_CALL, &mut call)?;
    let mut words = [0; 34];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    Ok(Registers { words, call: i32::from_ne_bytes(call) })
}

pub fn set_registers(thread: Thread, registers: &Registers) -> io::Result<()> {
    let bytes: Vec<u8> = registers.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    thread.set_register_set(NT_PRSTATUS, &bytes)?;
    thread.set_register_set(NT_ARM_SYSTEM_CALL, &registers.call.to_ne_bytes())
}

impl State {
    pub fn save(thread: Thread) -> Result<Self, Error> {
        let registers = registers(thread).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOEXEC) => Error::Unsupported("it is a 32-bit program".to_owned()),
            _ => failed("reading its registers")(error),
        })?;
        // `struct user_gcs` (6.13): features_enabled at 0. `sigreturn` would look for a token on that stack that only the
        // kernel can put there.
        let mut control = [0; 24];
        if thread.register_set(NT_ARM_GCS, &mut control).is_ok() && control[0] & SHADOW_STACK_ENABLE != 0 {
            return Err(Error::Unsupported("it runs with a guarded control stack".to_owned()));
        }
        let mut vectors = [0; 528];
        thread.register_set(NT_PRFPREG, &mut vectors).map_err(failed("reading its vector registers"))?;
        // `struct user_sve_header`: flags at 12, bit 0 says that the state is not merely that of the old vectors. A
        // processor without the extension has no such set.
        for set in [NT_ARM_SVE, NT_ARM_SSVE] {
            let mut header = [0; 16];
            if thread.register_set(set, &mut header).is_ok() && header[12] & 1 != 0 {
                return Err(Error::Busy("it is in the midst of scalable vectors".to_owned()));
            }
        }
        // `struct user_za_header`: size at 0; more than the header when ZA is on.
        let mut header = [0; 16];
        if thread.register_set(NT_ARM_ZA, &mut header).is_ok()
            && u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) > 16
        {
            return Err(Error::Busy("it is in the midst of matrix arithmetic".to_owned()));
        }
        Ok(Self { registers, vectors })
    }

    pub fn stack_pointer(&self) -> u64 {
        self.registers.words[SP]
    }

    /// The instruction it is at, unless it is in a system call.
    pub fn user_ip(&self) -> Option<u64> {
        (self.registers.call < 0).then_some(self.registers.words[PC])
    }

    pub fn set_ip(&mut self, ip: u64) {
        self.registers.words[PC] = ip;
    }

    /// The first argument of a call that was interrupted, which its answer has replaced, is not to be had here.
    pub fn forgive_interruption(&mut self, _now: Duration, _read: impl Fn(u64) -> Option<[u8; 16]>) -> bool {
        false
    }

    /// Whether bytes are a whole frame of [`State::frame`] and nothing else. One of the kernel's has another alternate
    /// stack, and says of what signal it is.
    pub fn is_frame(&self, bytes: &[u8], _home: Home) -> bool {
        let end = RESERVED_ALIGNED + FPSIMD_BYTES as usize;
        let word = |at: usize| bytes.get(at..at + 8).map(|at| u64::from_ne_bytes(at.try_into().expect("eight bytes")));
        let vectors = u64::from(FPSIMD_MAGIC) | u64::from(FPSIMD_BYTES) << 32;
        let parts = [(0, 0), (UCONTEXT + 24, SS_FLAGS_NONE), (RESERVED_ALIGNED, vectors)];
        parts.iter().all(|&(at, value)| word(at) == Some(value))
            && bytes.get(end..).is_some_and(|rest| rest.iter().all(|&byte| byte == 0))
    }

    /// How many bytes [`State::frame`] has at most.
    pub fn frame_bytes(&self) -> usize {
        FRAME
    }

    /// What is to be written at `base`, 64-byte aligned, so that a thread that [`parked`] stands at the stub comes back
    /// to this state by itself, with that signal mask.
    pub fn frame(&self, _base: u64, mask: u64, _home: Home) -> Vec<u8> {
        let mut bytes = vec![0; FRAME];
        let mut put = |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        put(UCONTEXT + 24, SS_FLAGS_NONE);
        put(SIGMASK, mask);
        for (position, &word) in self.registers.words.iter().enumerate() {
            put(SIGCONTEXT + 8 + position * 8, word);
        }
        put(RESERVED_ALIGNED, u64::from(FPSIMD_MAGIC) | u64::from(FPSIMD_BYTES) << 32);
        // fpsr and fpcr come first in the frame, last in the register set.
        bytes[RESERVED_ALIGNED + 8..RESERVED_ALIGNED + 16].copy_from_slice(&self.vectors[512..520]);
        bytes[RESERVED_ALIGNED + 16..RESERVED_ALIGNED + 528].copy_from_slice(&self.vectors[..512]);
        bytes
    }
}

/// Whether the kernel means to restart the call that came to this.
pub fn is_restart(result: i64) -> bool {
    matches!(result, ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK)
}

/// At the stub: the next instructions are `rt_sigreturn` of the frame at `base`.
pub fn parked(state: &State, base: u64, home: Home) -> Registers {
    let mut registers = state.registers;
    registers.words[PC] = home.stub;
    registers.words[SP] = base;
    registers.call = -1;
    registers
}

/// Whether a thread whose tracer died may be on its way through its frame.
pub fn heals(registers: &Registers, home: Home) -> bool {
    (home.stub - 4..=home.stub + 8).contains(&registers.words[PC])
}

/// Whether a thread that stopped is at the entry of the stub's own call.
pub fn is_at_entry(registers: &Registers, home: Home) -> bool {
    i64::from(registers.call) == SIGRETURN && registers.words[PC] == home.stub + 8
}

/// Turn the call that a thread is at the entry of into another, that comes back to the stub. If the kernel restarts the
/// call it is from the `nop` before.
pub fn set_call(
    thread: Thread,
    parked: &Registers,
    _base: u64,
    home: Home,
    number: i64,
    arguments: [u64; 6],
) -> io::Result<()> {
    let mut registers = *parked;
    registers.words[..6].copy_from_slice(&arguments);
    registers.words[8] = number.cast_unsigned();
    registers.words[PC] = home.landing;
    registers.call = i32::try_from(number).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    set_registers(thread, &registers)
}

pub fn result(registers: &Registers) -> i64 {
    registers.words[0].cast_signed()
}
