//! What is there to be asked for.

use super::answer::Answer;
use super::request::Request;
use crate::board::{Board, Sheet};
use crate::metrics::{self, Format};
use pagefold_report::wire;

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
    let latest = |answer: &dyn Fn(Sheet) -> Answer| {
        board.latest().map_or_else(|| Answer::refusal(503, "the daemon has not looked at the host yet"), answer).into()
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
