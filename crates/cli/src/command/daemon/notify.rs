//! Notifications to systemd: sd_notify(3), a datagram to the socket in `NOTIFY_SOCKET`.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// Sends notifications to systemd, if it started the daemon.
pub struct SystemdNotifier {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// The interval of watchdog notifications.
    watchdog: Option<Duration>,
    last_notified: Instant,
    /// Whether READY was sent.
    is_ready_sent: bool,
    status_text: String,
}

impl SystemdNotifier {
    /// Read the socket and the interval from the environment.
    pub fn from_environment() -> Self {
        let address = std::env::var("NOTIFY_SOCKET").ok().and_then(|name| socket_address(&name));
        let socket = address.and_then(|address| Some((UnixDatagram::unbound().ok()?, address)));
        let microseconds = std::env::var("WATCHDOG_USEC").ok().and_then(|text| text.parse::<u64>().ok());
        // Half the timeout, as sd_watchdog_enabled(3) recommends.
        let watchdog = microseconds.map(|time| Duration::from_micros(time / 2));
        Self { socket, watchdog, last_notified: Instant::now(), is_ready_sent: false, status_text: String::new() }
    }

    /// Send a message.
    pub fn send(&self, message: &str) {
        if let Some((socket, address)) = &self.socket {
            // A failed notification does not matter to the daemon.
            let _ = socket.send_to_addr(message.as_bytes(), address);
        }
    }

    /// Notify that the daemon works. Sends READY the first time, a changed status text, and the watchdog message when
    /// due.
    pub fn notify_alive(&mut self, status_text: &str) {
        if !std::mem::replace(&mut self.is_ready_sent, true) {
            self.send("READY=1");
        }
        if self.status_text != status_text {
            status_text.clone_into(&mut self.status_text);
            self.send(&format!("STATUS={status_text}"));
        }
        if self.watchdog.is_some_and(|interval| self.last_notified.elapsed() >= interval / 2) {
            self.last_notified = Instant::now();
            self.send("WATCHDOG=1");
        }
    }
}

/// The address of a path, or with `@` of a name in the abstract namespace.
fn socket_address(name: &str) -> Option<SocketAddr> {
    match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name).ok(),
        None => SocketAddr::from_pathname(name).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_reach_path_and_abstract_sockets() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("pagefold-notify-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        let listeners = [UnixDatagram::bind(&path).unwrap(), UnixDatagram::bind_addr(&abstract_name).unwrap()];
        for (listener, name) in listeners.iter().zip([path.display().to_string(), format!("@{name}")]) {
            let socket = Some((UnixDatagram::unbound().unwrap(), socket_address(&name).unwrap()));
            let (now, status_text) = (Instant::now(), String::new());
            let mut notify = SystemdNotifier {
                socket,
                watchdog: Some(Duration::ZERO),
                last_notified: now,
                is_ready_sent: false,
                status_text,
            };
            notify.notify_alive("idle");
            notify.notify_alive("working");
            let mut buffer = [0; 32];
            for expected in ["READY=1", "STATUS=idle", "WATCHDOG=1", "STATUS=working", "WATCHDOG=1"] {
                let length = listener.recv(&mut buffer).unwrap();
                assert_eq!(&buffer[..length], expected.as_bytes());
            }
        }
    }
}
