//! The control socket: one request in one line, one answer in one line.
//!
//! Only root and the user that the daemon runs as may speak to it: the directory is closed to others, and the kernel is
//! asked who is at the other end. Who is slow, says too much or comes when too many are there is cut off.

use anyhow::{Context, bail};
use pagefold_daemon::wire::Answer;
use pagefold_host::transaction::journal::Directory;
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

/// The socket's name in the directory of state.
const SOCKET: &str = "control";

/// The file that is locked while a daemon runs.
const LOCK: &str = "daemon.lock";

/// For how long somebody may take to ask, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of a request at most.
const LONGEST: u64 = 256;

/// Who is served at once at most.
const AT_ONCE: usize = 16;

/// What can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// How the daemon stands.
    Status,
    /// Do nothing until resumed.
    Pause,
    /// Go on.
    Resume,
    /// Look at a process now.
    Enrol(u32),
    /// Leave a process alone, and withdraw what is merged of it.
    Withdraw(u32),
}

impl Request {
    fn line(self) -> String {
        match self {
            Self::Status => "status\n".to_owned(),
            Self::Pause => "pause\n".to_owned(),
            Self::Resume => "resume\n".to_owned(),
            Self::Enrol(pid) => format!("enrol {pid}\n"),
            Self::Withdraw(pid) => format!("withdraw {pid}\n"),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        Some(match words[..] {
            ["status"] => Self::Status,
            ["pause"] => Self::Pause,
            ["resume"] => Self::Resume,
            ["enrol", pid] => Self::Enrol(pid.parse().ok()?),
            ["withdraw", pid] => Self::Withdraw(pid.parse().ok()?),
            _ => return None,
        })
    }
}

/// The socket in a directory.
pub fn path(directory: &Path) -> PathBuf {
    directory.join(SOCKET)
}

/// Whether a daemon listens there.
pub fn is_there(directory: &Path) -> bool {
    UnixStream::connect(path(directory)).is_ok()
}

/// Ask the daemon. An error where none runs.
pub fn ask(directory: &Path, request: Request) -> anyhow::Result<Answer> {
    let path = path(directory);
    let mut stream = UnixStream::connect(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            anyhow::anyhow!("no pagefold daemon runs here ({}): start one with `pagefold daemon`", path.display())
        }
        io::ErrorKind::PermissionDenied => anyhow::anyhow!("{}: {error}: run as root", path.display()),
        _ => anyhow::anyhow!("{}: {error}", path.display()),
    })?;
    let patience = Some(PATIENCE * 4);
    stream.set_read_timeout(patience).and_then(|()| stream.set_write_timeout(patience))?;
    // Who may not ask is told so before anything is read.
    let sent = stream.write_all(request.line().as_bytes()).context("the daemon does not listen");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("the daemon does not answer")?;
    if answer.is_empty() {
        sent?;
    }
    serde_json::from_str(&answer).context("the daemon's answer cannot be read: is it of another version?")
}

/// Open the state directory, if only this user can write in it.
fn private(path: &Path) -> anyhow::Result<Directory> {
    let named = || format!("cannot open the state directory {}", path.display());
    let directory = Directory::open(path).with_context(named)?;
    if !directory.is_private().with_context(named)? {
        bail!(
            "cannot use the state directory {}: another user owns it or can write in it; pass --state DIR with a \
             directory of your own, or run `chown` and `chmod go-w` on this one",
            path.display()
        );
    }
    Ok(directory)
}

/// The socket of a daemon that runs. Gone when it is dropped.
pub struct Control {
    path: PathBuf,
    listener: UnixListener,
    /// Held for as long as it runs, however busy it is.
    _lock: File,
}

impl Control {
    /// Make the socket, unless another daemon runs. A directory in which another user can write is refused: that user
    /// could put a symbolic link in the place of the lock, or a socket in the place of the daemon's.
    pub fn bind(directory: &Path) -> anyhow::Result<Self> {
        let path = path(directory);
        let lock = directory.join(LOCK);
        let named = || format!("cannot use {}", lock.display());
        let file = private(directory)?.file(LOCK, OFlags::WRONLY | OFlags::CREATE).with_context(named)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let which = match ask(directory, Request::Status) {
                    Ok(Answer::Status(status)) => format!(" (process {})", status.pid),
                    _ => String::new(),
                };
                bail!("a pagefold daemon runs already{which}: see `pagefold status`");
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(named),
        }
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot use {}", path.display()));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path).with_context(|| format!("cannot make {}", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { path, listener, _lock: file })
    }

    /// Answer whoever asks, until the process ends: on a thread of its own.
    pub fn serve(&self, answer: Arc<dyn Fn(Request) -> Answer + Send + Sync>) -> io::Result<()> {
        let listener = self.listener.try_clone()?;
        let busy = Arc::new(AtomicUsize::new(0));
        std::thread::Builder::new().name("control".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    // Out of descriptors, most likely: nothing is gained by trying at once.
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                };
                if busy.fetch_add(1, Ordering::Relaxed) >= AT_ONCE {
                    busy.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (answer, served) = (Arc::clone(&answer), Arc::clone(&busy));
                let spawned = std::thread::Builder::new().name("control".to_owned()).spawn(move || {
                    // Whoever goes away before the answer does not want it.
                    let _ = serve(&stream, &*answer);
                    served.fetch_sub(1, Ordering::Relaxed);
                });
                if spawned.is_err() {
                    busy.fetch_sub(1, Ordering::Relaxed);
                }
            }
        })?;
        Ok(())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // It may be gone with its directory.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn serve(stream: &UnixStream, answer: &dyn Fn(Request) -> Answer) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let uid = socket_peercred(stream)?.uid;
    if !uid.is_root() && uid != rustix::process::geteuid() {
        return reply(stream, &Answer::Refused("only root and the daemon's user may ask".to_owned()));
    }
    let mut line = String::new();
    BufReader::new(stream.take(LONGEST)).read_line(&mut line)?;
    let told = match Request::parse(&line) {
        Some(request) => answer(request),
        None => Answer::Refused("no such request: status, pause, resume, enrol PID, withdraw PID".to_owned()),
    };
    reply(stream, &told)
}

fn reply(mut stream: &UnixStream, answer: &Answer) -> anyhow::Result<()> {
    Ok(stream.write_all((serde_json::to_string(answer)? + "\n").as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_are_written() {
        let all = [Request::Status, Request::Pause, Request::Resume, Request::Enrol(7), Request::Withdraw(u32::MAX)];
        for request in all {
            assert_eq!(Request::parse(&request.line()), Some(request));
        }
        for wrong in ["", "statuss", "enrol", "enrol x", "enrol 1 2", "withdraw -1", "pause 1"] {
            assert_eq!(Request::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn who_asks_is_answered_and_who_babbles_is_not() {
        let directory = tempfile::tempdir().unwrap();
        assert!(ask(directory.path(), Request::Pause).is_err(), "nobody is there");
        let control = Control::bind(directory.path()).unwrap();
        control.serve(Arc::new(|request| Answer::Done(format!("{request:?}")))).unwrap();
        assert_eq!(ask(directory.path(), Request::Enrol(3)).unwrap(), Answer::Done("Enrol(3)".to_owned()));
        let mut stream = UnixStream::connect(path(directory.path())).unwrap();
        // It may hang up before all is written.
        let _ = stream.write_all(&[b'x'; 1 << 20]);
        let mut told = String::new();
        let _ = stream.read_to_string(&mut told);
        assert!(told.is_empty() || told.contains("refused"), "{told}");
        assert!(ask(directory.path(), Request::Pause).is_ok(), "others are answered still");
        drop(control);
        assert!(!path(directory.path()).exists());
    }

    fn refusal(directory: &Path) -> String {
        match Control::bind(directory) {
            Ok(_) => panic!("{} was used", directory.display()),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn bind_refuses_a_directory_that_another_user_can_write_in() {
        let directory = tempfile::tempdir().unwrap();
        for mode in [0o770, 0o702, 0o1777] {
            std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            assert!(refusal(directory.path()).contains("another user owns it or can write in it"), "{mode:o}");
        }
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(Control::bind(directory.path()).is_ok());
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(directory.path(), Some(65534), None).unwrap();
            assert!(refusal(directory.path()).contains("another user owns it or can write in it"));
        }
        assert!(!path(directory.path()).exists());
    }

    #[test]
    fn bind_follows_no_symbolic_link() {
        let (directory, victim) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(victim.path().join("victim"), directory.path().join(LOCK)).unwrap();
        assert!(refusal(directory.path()).contains(LOCK));
        assert!(!victim.path().join("victim").exists(), "the lock is not made at the end of a link");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(victim.path(), &link).unwrap();
        assert!(refusal(&link).contains("state directory"));
        assert_eq!(victim.path().read_dir().unwrap().count(), 0);
    }
}
