//! `pagefold top`: shows the current status in a terminal.
//!
//! [`App`] has the display state and is independent of a terminal: it takes keys and statuses, and draws a frame. The
//! loop around it waits for both. A separate thread reads the status, so that keys work while the daemon takes time to
//! answer. The terminal is restored at the end, on an error, on a panic and on termination signals.

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

/// The maximum delay of a status after it arrived while no key is pressed, and of a signal.
const EVENT_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long the loop may take to end after a signal.
const SIGNAL_GRACE_TIME: Duration = Duration::from_secs(2);

/// Show the status in the terminal, read again at each interval, until the user quits.
///
/// A signal ends this function. If the process still exists two seconds later, it is ended, too.
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
        // This loop ends when the receiver is dropped.
        while sender.send(read_status().map_err(|error| error.to_string())).is_ok() {
            thread::sleep(interval);
        }
    })?;
    let stop = Arc::new(AtomicBool::new(false));
    stop_on_signals(Arc::clone(&stop))?;
    let mut terminal = ratatui::try_init()?;
    let result = run_event_loop(&mut terminal, App::new(color), &statuses, &stop);
    let restored = ratatui::try_restore();
    result.and(restored)
}

/// On a signal set a flag, and end the process if that has no effect.
fn stop_on_signals(stop: Arc<AtomicBool>) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            stop.store(true, Ordering::Relaxed);
            thread::sleep(SIGNAL_GRACE_TIME);
            // The terminal has gone: crossterm 0.29 then reads end of file in an endless loop.
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
        while let Ok(result) = statuses.try_recv() {
            app.update(result);
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
