//! Connections to Unix sockets of other programs, without ever waiting for long.

use pagefold_base::ProcessId;
use pagefold_host::{ProcessHandle, parse};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The pause between two attempts while the listener's queue is full.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// The queue of the listener stayed full.
    Busy,
    /// No process listens, or access is denied.
    Failed(io::Error),
}

/// Connects with a timeout. A blocking connect would wait forever if the listener's queue is full.
pub(crate) fn connect_with_timeout(path: &Path, timeout: Duration) -> Result<UnixStream, ConnectError> {
    let failed = |errno: rustix::io::Errno| ConnectError::Failed(errno.into());
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
    let deadline = Instant::now() + timeout;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(rustix::io::Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(RETRY_DELAY),
            Err(rustix::io::Errno::AGAIN) => return Err(ConnectError::Busy),
            Err(errno) => return Err(failed(errno)),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false).map_err(ConnectError::Failed)?;
    Ok(stream)
}

/// Whether the process that listens is the expected one; the error is its PID (SO_PEERCRED: the process that called
/// listen).
pub(crate) fn check_peer(stream: &UnixStream, expected: ProcessId) -> io::Result<Result<(), i32>> {
    let peer_pid = sockopt::socket_peercred(stream)?.pid.as_raw_nonzero().get();
    // Read after connecting: the process that has the socket now cannot have passed on its PID.
    let stat = std::fs::read(format!("/proc/{peer_pid}/stat")).ok().and_then(|stat| parse::stat(&stat).ok());
    let is_expected =
        peer_pid.cast_unsigned() == expected.pid.0 && stat.map(|stat| stat.start_time) == Some(expected.start_time);
    Ok(if is_expected { Ok(()) } else { Err(peer_pid) })
}

/// The path at which this process reaches a socket of another process, which may have another working directory or
/// root.
pub(crate) fn reachable_path(process: &dyn ProcessHandle, path: &str) -> PathBuf {
    let within = |link: &str, path: &str| Path::new("/proc").join(process.id().pid.to_string()).join(link).join(path);
    match path.strip_prefix('/') {
        None => within("cwd", path),
        Some(_) if Path::new(path).exists() => path.into(),
        Some(rest) => within("root", rest),
    }
}
