//! The control socket: one request in one line, one answer in one line.
//!
//! Only root and the user that the daemon runs as may use it. The directory is closed to other users, and the kernel
//! reports the UID of the client. Clients that are slow, send too much or exceed the connection limit are disconnected.

use anyhow::{Context, bail};
use pagefold_daemon::wire::ControlReply;
use pagefold_host::transaction::journal::StateDirectory;
use rustix::fs::OFlags;
use rustix::net::sockopt::socket_peercred;
use std::fs::{File, TryLockError};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The name of the socket in the state directory.
const SOCKET_FILE: &str = "control";

/// The file that is locked while a daemon runs.
const LOCK_FILE: &str = "daemon.lock";

/// The time limit for a client to send its request, and to read the answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum length of a request.
const MAX_REQUEST_BYTES: u64 = 256;

/// The maximum number of connections at once.
const MAX_CONCURRENT_REQUESTS: usize = 16;

/// A request to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// Return the status of the daemon.
    Status,
    /// Pause until resumed.
    Pause,
    /// Resume.
    Resume,
    /// Scan a process now.
    Enroll(u32),
    /// Unenroll a process and leave it alone.
    Unenroll(u32),
}

impl ControlRequest {
    fn to_line(self) -> String {
        match self {
            Self::Status => "status\n".to_owned(),
            Self::Pause => "pause\n".to_owned(),
            Self::Resume => "resume\n".to_owned(),
            Self::Enroll(pid) => format!("enroll {pid}\n"),
            Self::Unenroll(pid) => format!("unenroll {pid}\n"),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        Some(match words[..] {
            ["status"] => Self::Status,
            ["pause"] => Self::Pause,
            ["resume"] => Self::Resume,
            ["enroll", pid] => Self::Enroll(pid.parse().ok()?),
            ["unenroll", pid] => Self::Unenroll(pid.parse().ok()?),
            _ => return None,
        })
    }
}

/// The path of the socket in a state directory.
pub fn socket_path(directory: &Path) -> PathBuf {
    directory.join(SOCKET_FILE)
}

/// Whether a daemon listens at the socket of a state directory.
pub fn is_daemon_listening(directory: &Path) -> bool {
    UnixStream::connect(socket_path(directory)).is_ok()
}

/// Send a request to the daemon. Fails if no daemon runs.
pub fn send_request(directory: &Path, request: ControlRequest) -> anyhow::Result<ControlReply> {
    let path = socket_path(directory);
    let mut stream = UnixStream::connect(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            anyhow::anyhow!("no pagefold daemon runs here ({}): start one with `pagefold daemon`", path.display())
        }
        io::ErrorKind::PermissionDenied => anyhow::anyhow!("{}: {error}: run as root", path.display()),
        _ => anyhow::anyhow!("{}: {error}", path.display()),
    })?;
    let timeout = Some(REQUEST_TIMEOUT * 4);
    stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout))?;
    // The daemon refuses a user without permission before it reads the request, so the write may fail with an answer.
    let send_result = stream.write_all(request.to_line().as_bytes()).context("cannot send the request to the daemon");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("the daemon does not answer")?;
    if answer.is_empty() {
        send_result?;
    }
    serde_json::from_str(&answer).context("cannot parse the daemon's answer: does it have another version?")
}

/// Open the state directory, if only this user can write in it.
fn open_private_directory(path: &Path) -> anyhow::Result<StateDirectory> {
    let error_context = || format!("cannot open the state directory {}", path.display());
    let directory = StateDirectory::open(path).with_context(error_context)?;
    if !directory.is_private().with_context(error_context)? {
        bail!(
            "cannot use the state directory {}: another user owns it or can write in it; pass --state DIR with a \
             directory of your own, or run `chown` and `chmod go-w` on this one",
            path.display()
        );
    }
    Ok(directory)
}

/// The socket of a running daemon. It is removed when dropped.
pub struct ControlSocket {
    path: PathBuf,
    listener: UnixListener,
    /// Locked for as long as the daemon runs, even if it is too busy to answer.
    _lock: File,
}

impl ControlSocket {
    /// Create the socket, unless another daemon runs. A directory in which another user can write is refused: that user
    /// could replace the lock with a symbolic link, or the socket with another one.
    pub fn bind(directory: &Path) -> anyhow::Result<Self> {
        let path = socket_path(directory);
        let lock = directory.join(LOCK_FILE);
        let error_context = || format!("cannot use {}", lock.display());
        let file = open_private_directory(directory)?
            .open_file(LOCK_FILE, OFlags::WRONLY | OFlags::CREATE)
            .with_context(error_context)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let pid_note = match send_request(directory, ControlRequest::Status) {
                    Ok(ControlReply::Status(status)) => format!(" (process {})", status.pid),
                    _ => String::new(),
                };
                bail!("a pagefold daemon runs already{pid_note}: see `pagefold status`");
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(error_context),
        }
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot use {}", path.display()));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path).with_context(|| format!("cannot create {}", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { path, listener, _lock: file })
    }

    /// Answer requests on a separate thread until the process ends.
    pub fn serve_requests(&self, answer: Arc<dyn Fn(ControlRequest) -> ControlReply + Send + Sync>) -> io::Result<()> {
        let listener = self.listener.try_clone()?;
        let active_requests = Arc::new(AtomicUsize::new(0));
        std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    // Most likely out of file descriptors: trying again at once would not help.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                };
                if active_requests.fetch_add(1, Ordering::Relaxed) >= MAX_CONCURRENT_REQUESTS {
                    active_requests.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (answer, request_counter) = (Arc::clone(&answer), Arc::clone(&active_requests));
                let spawned = std::thread::Builder::new().name("control".to_owned()).spawn(move || {
                    // If the client disconnects before the answer, the error does not matter.
                    let _ = serve_connection(&stream, &*answer);
                    request_counter.fetch_sub(1, Ordering::Relaxed);
                });
                if spawned.is_err() {
                    active_requests.fetch_sub(1, Ordering::Relaxed);
                }
            }
        })?;
        Ok(())
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // The socket may have been removed with its directory.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn serve_connection(stream: &UnixStream, answer: &dyn Fn(ControlRequest) -> ControlReply) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let uid = socket_peercred(stream)?.uid;
    if !uid.is_root() && uid != rustix::process::geteuid() {
        return write_reply(
            stream,
            &ControlReply::Refused("only root and the daemon's user may send requests".to_owned()),
        );
    }
    let mut line = String::new();
    BufReader::new(stream.take(MAX_REQUEST_BYTES)).read_line(&mut line)?;
    let reply = match ControlRequest::parse(&line) {
        Some(request) => answer(request),
        None => {
            ControlReply::Refused("unknown request: use status, pause, resume, enroll PID, unenroll PID".to_owned())
        }
    };
    write_reply(stream, &reply)
}

fn write_reply(mut stream: &UnixStream, reply: &ControlReply) -> anyhow::Result<()> {
    Ok(stream.write_all((serde_json::to_string(reply)? + "\n").as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_round_trip() {
        let all = [
            ControlRequest::Status,
            ControlRequest::Pause,
            ControlRequest::Resume,
            ControlRequest::Enroll(7),
            ControlRequest::Unenroll(u32::MAX),
        ];
        for request in all {
            assert_eq!(ControlRequest::parse(&request.to_line()), Some(request));
        }
        for wrong in ["", "statuss", "enroll", "enroll x", "enroll 1 2", "unenroll -1", "pause 1"] {
            assert_eq!(ControlRequest::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn valid_request_is_answered_and_garbage_is_not() {
        let directory = tempfile::tempdir().unwrap();
        assert!(send_request(directory.path(), ControlRequest::Pause).is_err(), "no daemon listens");
        let control = ControlSocket::bind(directory.path()).unwrap();
        control.serve_requests(Arc::new(|request| ControlReply::Done(format!("{request:?}")))).unwrap();
        assert_eq!(
            send_request(directory.path(), ControlRequest::Enroll(3)).unwrap(),
            ControlReply::Done("Enroll(3)".to_owned())
        );
        let mut stream = UnixStream::connect(socket_path(directory.path())).unwrap();
        // The daemon may disconnect before all is written.
        let _ = stream.write_all(&[b'x'; 1 << 20]);
        let mut reply = String::new();
        let _ = stream.read_to_string(&mut reply);
        assert!(reply.is_empty() || reply.contains("refused"), "{reply}");
        assert!(send_request(directory.path(), ControlRequest::Pause).is_ok(), "other clients are still answered");
        drop(control);
        assert!(!socket_path(directory.path()).exists());
    }

    fn bind_error(directory: &Path) -> String {
        match ControlSocket::bind(directory) {
            Ok(_) => panic!("{} was used", directory.display()),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn bind_refuses_a_directory_that_another_user_can_write_in() {
        let directory = tempfile::tempdir().unwrap();
        for mode in [0o770, 0o702, 0o1777] {
            std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            assert!(bind_error(directory.path()).contains("another user owns it or can write in it"), "{mode:o}");
        }
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(ControlSocket::bind(directory.path()).is_ok());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(directory.path(), Some(65534), None).unwrap();
            assert!(bind_error(directory.path()).contains("another user owns it or can write in it"));
        }
        assert!(!socket_path(directory.path()).exists());
    }

    #[test]
    fn bind_follows_no_symbolic_link() {
        let (directory, victim) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(victim.path().join("victim"), directory.path().join(LOCK_FILE)).unwrap();
        assert!(bind_error(directory.path()).contains(LOCK_FILE));
        assert!(!victim.path().join("victim").exists(), "no lock is created behind a symbolic link");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(victim.path(), &link).unwrap();
        assert!(bind_error(&link).contains("state directory"));
        assert_eq!(victim.path().read_dir().unwrap().count(), 0);
    }
}
