//! Waits for a child process and reads the CPU time that it used.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// Waits until a child has ended, reaps it, and returns its exit status with its user and system CPU time. The time
/// includes the descendants that it waited for (wait4(2)).
///
/// # Errors
/// If the process is not a child of this one, or was reaped already.
pub fn wait_with_cpu_time(pid: u32) -> io::Result<(ExitStatus, Duration)> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are valid for writes during the call.
        let reaped = unsafe { libc::wait4(pid, &mut status, 0, usage.as_mut_ptr()) };
        if reaped == pid {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: zeroed bytes are a valid `rusage`, and the kernel has filled them in.
    let usage = unsafe { usage.assume_init() };
    let duration = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    Ok((ExitStatus::from_raw(status), duration(usage.ru_utime) + duration(usage.ru_stime)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    #[expect(clippy::zombie_processes, reason = "the tested function reaps it")]
    fn cpu_time_includes_descendants_that_were_waited_for() {
        let loops = "sh -c 'i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done'; exit 3";
        let child = Command::new("sh").args(["-c", loops]).spawn().unwrap();
        let (status, cpu_time) = wait_with_cpu_time(child.id()).unwrap();
        assert_eq!(status.code(), Some(3));
        assert!(cpu_time > Duration::ZERO);
        assert!(wait_with_cpu_time(child.id()).is_err(), "it is reaped already");
    }
}
