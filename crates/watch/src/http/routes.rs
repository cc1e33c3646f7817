//! The paths of the server.

use super::request::HttpRequest;
use super::response::HttpResponse;
use crate::board::{PublishedStatus, StatusBoard};
use crate::metrics::{self, MetricsFormat};
use pagefold_output::wire;
use std::time::Duration;

/// The maximum age of a status that is served as current. Clients must notice a daemon that hangs.
const MAX_STATUS_AGE: Duration = Duration::from_secs(120);

/// The reply to a request.
#[derive(Debug)]
pub enum RouteReply {
    /// A single answer.
    Response(HttpResponse),
    /// An event stream.
    EventStream,
}

impl From<HttpResponse> for RouteReply {
    fn from(answer: HttpResponse) -> Self {
        Self::Response(answer)
    }
}

/// Answer a request from the board.
pub fn route(request: &HttpRequest, board: &StatusBoard) -> RouteReply {
    route_with_max_age(request, board, MAX_STATUS_AGE)
}

fn route_with_max_age(request: &HttpRequest, board: &StatusBoard, max_age: Duration) -> RouteReply {
    let answer_latest = |answer: &dyn Fn(PublishedStatus) -> HttpResponse| {
        let answer = match board.latest() {
            None => HttpResponse::refusal(503, "the daemon has no status yet"),
            Some(published) if published.published_at.elapsed() > max_age => {
                HttpResponse::refusal(503, "the daemon hangs: its status is too old")
            }
            Some(published) => answer(published),
        };
        answer.into()
    };
    match (request.path.as_str(), request.query.as_deref()) {
        ("/", _) => HttpResponse::page().into(),
        ("/metrics", _) => {
            let format =
                if request.accepts_openmetrics { MetricsFormat::OpenMetrics } else { MetricsFormat::Prometheus };
            answer_latest(&|published| {
                HttpResponse::text(format.media_type(), metrics::render_metrics(&published.status, format))
            })
        }
        ("/api/status", None) => answer_latest(&|published| HttpResponse::json(published.json)),
        ("/api/history", query) => match parse_since(query) {
            Some(since) => HttpResponse::json(wire::to_json_line(&board.history(since)).into()).into(),
            None => HttpResponse::refusal(400, "since is a time in seconds since 1970: /api/history?since=1790000000")
                .into(),
        },
        ("/api/events", None) => RouteReply::EventStream,
        ("/api/status" | "/api/events", Some(_)) => HttpResponse::refusal(400, "this path takes no query").into(),
        _ => HttpResponse::refusal(404, "unknown path: use /, /metrics, /api/status, /api/history, /api/events").into(),
    }
}

/// The requested start time; without a query the time of the first point.
fn parse_since(query: Option<&str>) -> Option<f64> {
    let Some(query) = query else { return Some(0.0) };
    query.strip_prefix("since=")?.parse().ok().filter(|since: &f64| since.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon that published once and then no more hangs, for liveness probes and for scrapes.
    #[test]
    fn stale_status_is_refused() {
        let board = StatusBoard::default();
        board.publish(serde_json::from_str(include_str!("../../../../fixtures/status.json")).unwrap());
        let request = |path: &str| HttpRequest { path: path.to_owned(), query: None, accepts_openmetrics: false };
        for (path, stale_status) in [("/metrics", 503), ("/api/status", 503), ("/", 200), ("/api/history", 200)] {
            for (max_age, expect) in [(Duration::from_secs(3600), 200), (Duration::ZERO, stale_status)] {
                let RouteReply::Response(answer) = route_with_max_age(&request(path), &board, max_age) else {
                    panic!("expected a response, not a stream")
                };
                assert_eq!(answer.status, expect, "{path}");
            }
        }
    }
}
