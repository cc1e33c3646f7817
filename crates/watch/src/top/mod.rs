//! `pagefold top`: the status in a terminal, as it comes.
//!
//! [`App`] holds what is chosen and shown, and knows nothing of a terminal: keys and statuses go in, a frame comes out.
//! The loop around it waits for either. The status is read on a thread of its own, so that keys are answered while a
//! daemon takes its time; the terminal is put back at the end, on an error, a panic and the signals that ask for an
//! end.

mod app;
mod draw;
mod table;

pub use app::App;

use pagefold_daemon::wire::StatusReport;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// How long a key may wait for a status that has come, and a signal for being heard.
const EVENT_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long the loop may take to end once a signal asks for it.
const SIGNAL_GRACE_TIME: Duration = Duration::from_secs(2);

/// Show the status in the terminal, read anew every so often, until somebody quits.
///
/// A signal ends this and, two seconds later, the process, if it is still there.
///
/// # Errors
/// There is no terminal, or it fails.
pub fn run<E: Display>(
    mut read_status: impl FnMut() -> Result<StatusReport, E> + Send + 'static,
    interval: Duration,
    color: bool,
) -> io::Result<()> {
    let (sender, statuses) = channel();
    thread::Builder::new().name("status".to_owned()).spawn(move || {
        // Ends with the receiver.
        while sender.send(read_status().map_err(|error| error.to_string())).is_ok() {
            thread::sleep(interval);
        }
    })?;
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(Arc::clone(&stop))?;
    let mut terminal = ratatui::try_init()?;
    let end = run_event_loop(&mut terminal, App::new(color), &statuses, &stop);
    let restored = ratatui::try_restore();
    end.and(restored)
}

/// Have signals set a flag, and end the process where that does not.
fn stop_on_signals(stop: Arc<AtomicBool>) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            stop.store(true, Ordering::Relaxed);
            thread::sleep(SIGNAL_GRACE_TIME);
            // The terminal has gone: crossterm 0.29 reads its end of file over and over, and comes back no more.
            std::process::exit(1);
        }
    })?;
    Ok(())
}

fn run_event_loop(
    terminal: &mut ratatui::DefaultTerminal,
    mut app: App,
    statuses: &Receiver<Result<StatusReport, String>>,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut changed = true;
    while !stop.load(Ordering::Relaxed) {
        while let Ok(read) = statuses.try_recv() {
            app.update(read);
            changed = true;
        }
        if changed {
            terminal.draw(|frame| app.draw(frame))?;
        }
        changed = event::poll(EVENT_POLL_INTERVAL)?;
        if changed
            && let Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
            && app.handle_key(key)
        {
            break;
        }
    }
    Ok(())
}
