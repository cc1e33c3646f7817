//! Connections whose request has not arrived in full: one thread polls all of them, so that slow ones cost a descriptor
//! each and no thread. Where there are too many, the one that has waited longest is dropped.

use super::answer::Answer;
use super::request::{Head, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a request may take to arrive.
pub const READING: Duration = Duration::from_secs(5);

/// Connections whose request has not arrived in full, at most.
pub const ARRIVING: usize = 512;

/// Connections that are accepted before others are looked at.
const BATCH: usize = 64;

/// A request, or the refusal of what is none, and the connection to answer on.
pub type Arrived = (TcpStream, Result<Request, Answer>);

/// A connection.
#[derive(Debug)]
struct Arriving {
    stream: TcpStream,
    head: Head,
    until: Instant,
}

/// All of them, the oldest first.
#[derive(Debug)]
pub struct Queue {
    arriving: VecDeque<Arriving>,
    most: usize,
}

impl Queue {
    /// None yet. A quarter of the descriptors that this process may have are used at most.
    pub fn new() -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let most = limit.map_or(ARRIVING, |limit| usize::try_from(limit / 4).unwrap_or(ARRIVING).clamp(1, ARRIVING));
        Self { arriving: VecDeque::new(), most }
    }

    /// Wait until something happens, for so long at most; then take in new connections and what has arrived. Requests
    /// that are whole, and refusals of others, go to `arrived`.
    pub fn wait(&mut self, listener: &TcpListener, names: &[String], longest: Duration, arrived: &mut Vec<Arrived>) {
        let now = Instant::now();
        let first = self.arriving.front().map_or(longest, |oldest| oldest.until.saturating_duration_since(now));
        let timeout = Timespec::try_from(first.min(longest)).unwrap_or_default();
        let streams = self.arriving.iter().map(|arriving| PollFd::new(&arriving.stream, PollFlags::IN));
        let mut polled: Vec<PollFd<'_>> = [PollFd::new(listener, PollFlags::IN)].into_iter().chain(streams).collect();
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            // Out of memory, most likely: nothing that haste would mend.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        drop(polled);
        let now = Instant::now();
        let all = std::mem::take(&mut self.arriving);
        for (arriving, ready) in all.into_iter().zip(&ready[1..]) {
            self.look(arriving, *ready, now, names, arrived);
        }
        if ready[0] {
            self.accept(listener, names, arrived);
        }
    }

    /// Take in what has arrived of a request.
    fn look(&mut self, mut one: Arriving, ready: bool, now: Instant, names: &[String], arrived: &mut Vec<Arrived>) {
        match if ready { one.head.read(&one.stream, names) } else { Ok(None) } {
            Ok(Some(Some(request))) => arrived.push((one.stream, Ok(request))),
            // The peer went without a word.
            Ok(Some(None)) => {}
            Ok(None) if now >= one.until => {
                arrived.push((one.stream, Err(Answer::refusal(408, "the request took too long"))));
            }
            Ok(None) => self.arriving.push_back(one),
            Err(refusal) => arrived.push((one.stream, Err(refusal))),
        }
    }

    fn accept(&mut self, listener: &TcpListener, names: &[String], arrived: &mut Vec<Arrived>) {
        for _ in 0..BATCH {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The peer went at once.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => continue,
                // Out of descriptors or memory, or the server ends.
                Err(_) => {
                    if self.arriving.pop_front().is_none() {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.arriving.len() >= self.most {
                self.arriving.pop_front();
            }
            let now = Instant::now();
            let arriving = Arriving { stream, head: Head::default(), until: now + READING };
            // Most requests are there as soon as their connection is.
            self.look(arriving, true, now, names, arrived);
        }
    }
}
