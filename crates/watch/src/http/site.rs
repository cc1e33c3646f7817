//! What is there to be asked for.

use super::answer::Answer;
use super::request::Request;
use crate::board::{Board, Sheet};
use crate::metrics::{self, Format};
use pagefold_output::wire;
use std::time::Duration;

/// How old a status may be that is told as the present one: whoever scrapes or probes a daemon that hangs is to know.
const FRESH: Duration = Duration::from_secs(120);

/// What becomes of a request.
#[derive(Debug)]
pub enum Reply {
    /// It is answered at once.
    Whole(Answer),
    /// It is answered by a stream of events.
    Events,
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Self::Whole(answer)
    }
}

/// Answer a request from what the board shows.
pub fn reply(request: &Request, board: &Board) -> Reply {
    reply_of(request, board, FRESH)
}

fn reply_of(request: &Request, board: &Board, fresh: Duration) -> Reply {
    let latest = |answer: &dyn Fn(Sheet) -> Answer| {
        let answer = match board.latest() {
            None => Answer::refusal(503, "the daemon has not looked at the host yet"),
            Some(sheet) if sheet.at.elapsed() > fresh => Answer::refusal(503, "the daemon hangs: it tells nothing new"),
            Some(sheet) => answer(sheet),
        };
        answer.into()
    };
    match (request.path.as_str(), request.query.as_deref()) {
        ("/", _) => Answer::page().into(),
        ("/metrics", _) => {
            let format = if request.openmetrics { Format::OpenMetrics } else { Format::Prometheus };
            latest(&|sheet| Answer::text(format.media_type(), metrics::text(&sheet.status, format)))
        }
        ("/api/status", None) => latest(&|sheet| Answer::json(sheet.json)),
        ("/api/history", query) => match since(query) {
            Some(since) => Answer::json(wire::line(&board.history(since)).into()).into(),
            None => Answer::refusal(400, "since is a time in seconds since 1970: /api/history?since=1790000000").into(),
        },
        ("/api/events", None) => Reply::Events,
        ("/api/status" | "/api/events", Some(_)) => Answer::refusal(400, "there is nothing to be said after ?").into(),
        _ => Answer::refusal(404, "there is /, /metrics, /api/status, /api/history and /api/events").into(),
    }
}

/// The moment that a query asks for: that of the first point if it asks for none.
fn since(query: Option<&str>) -> Option<f64> {
    let Some(query) = query else { return Some(0.0) };
    query.strip_prefix("since=")?.parse().ok().filter(|since: &f64| since.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who has published once and never again hangs, for Kubernetes' probe as for whoever scrapes it.
    #[test]
    fn nothing_old_is_told_as_the_present() {
        let board = Board::default();
        board.publish(serde_json::from_str(include_str!("../../../../fixtures/status.json")).unwrap());
        let request = |path: &str| Request { path: path.to_owned(), query: None, openmetrics: false };
        for (path, old) in [("/metrics", 503), ("/api/status", 503), ("/", 200), ("/api/history", 200)] {
            for (fresh, expect) in [(Duration::from_secs(3600), 200), (Duration::ZERO, old)] {
                let Reply::Whole(answer) = reply_of(&request(path), &board, fresh) else { panic!("no stream") };
                assert_eq!(answer.status, expect, "{path}");
            }
        }
    }
}
