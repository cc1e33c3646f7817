//! The end of a daemon's run on a simulated host: it stops when the scenario is over, and says what it reached.

use pagefold_base::Pages;
use pagefold_daemon::decide::Event;
use pagefold_daemon::run::Message;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::{Host, observe};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// When a scenario is over, and the daemon that is to stop then.
pub struct ScenarioEnd {
    at: Instant,
    sender: Sender<Message>,
    unmerge: bool,
    has_stopped: bool,
}

impl ScenarioEnd {
    /// The end of a scenario that begins now.
    pub fn new(host: &dyn Host, duration: Duration, sender: Sender<Message>, unmerge: bool) -> Self {
        Self { at: host.now() + duration, sender, unmerge, has_stopped: false }
    }

    /// Stops the daemon if the scenario is over. Returns whether it did so now.
    pub fn stop_if_over(&mut self, host: &dyn Host) -> bool {
        let stops = !self.has_stopped && host.now() >= self.at;
        if stops {
            self.has_stopped = true;
            // The main loop may be ending already.
            let _ = self.sender.send(Message::Event(Event::Stop { unmerge: self.unmerge }));
        }
        stops
    }
}

/// What is saved, and what that cost so far.
pub fn describe_savings(host: &dyn Host) -> String {
    let saved_pages = observe::ksm(host).ok().and_then(|ksm| {
        let zero_pages = ksm.ksm_zero_pages.unwrap_or_default().max(0).cast_unsigned();
        Some(Pages(ksm.pages_sharing.ok()? + zero_pages))
    });
    let saved = saved_pages.map_or_else(|| "?".to_owned(), |pages| host.page_size().bytes_of(pages).to_string());
    let ksmd = KsmdThread::find(host).and_then(|ksmd| ksmd.cpu_time()).unwrap_or_default();
    format!(
        "the scenario is over: {saved} saved; CPU time: {:.1} s of ksmd, {:.1} s of pagefold",
        ksmd.as_secs_f64(),
        host.own_cpu_time().as_secs_f64()
    )
}
