//! What is there to be asked for.

use super::request::HttpRequest;
use super::response::HttpResponse;
use crate::board::{PublishedStatus, StatusBoard};
use crate::metrics::{self, MetricsFormat};
use pagefold_output::wire;
use std::time::Duration;

/// How old a status may be that is told as the present one: whoever scrapes or probes a daemon that hangs is to know.
const MAX_STATUS_AGE: Duration = Duration::from_secs(120);

/// What becomes of a request.
#[derive(Debug)]
pub enum RouteReply {
    /// It is answered at once.
    Response(HttpResponse),
    /// It is answered by a stream of events.
    EventStream,
}

impl From<HttpResponse> for RouteReply {
    fn from(answer: HttpResponse) -> Self {
        Self::Response(answer)
    }
}

/// Answer a request from what the board shows.
pub fn route(request: &HttpRequest, board: &StatusBoard) -> RouteReply {
    route_with_max_age(request, board, MAX_STATUS_AGE)
}

fn route_with_max_age(request: &HttpRequest, board: &StatusBoard, fresh: Duration) -> RouteReply {
    let latest = |answer: &dyn Fn(PublishedStatus) -> HttpResponse| {
        let answer = match board.latest() {
            None => HttpResponse::refusal(503, "the daemon has not looked at the host yet"),
            Some(sheet) if sheet.published_at.elapsed() > fresh => {
                HttpResponse::refusal(503, "the daemon hangs: it tells nothing new")
            }
            Some(sheet) => answer(sheet),
        };
        answer.into()
    };
    match (request.path.as_str(), request.query.as_deref()) {
        ("/", _) => HttpResponse::page().into(),
        ("/metrics", _) => {
            let format =
                if request.accepts_openmetrics { MetricsFormat::OpenMetrics } else { MetricsFormat::Prometheus };
            latest(&|sheet| HttpResponse::text(format.media_type(), metrics::render_metrics(&sheet.status, format)))
        }
        ("/api/status", None) => latest(&|sheet| HttpResponse::json(sheet.json)),
        ("/api/history", query) => match parse_since(query) {
            Some(since) => HttpResponse::json(wire::to_json_line(&board.history(since)).into()).into(),
            None => HttpResponse::refusal(400, "since is a time in seconds since 1970: /api/history?since=1790000000")
                .into(),
        },
        ("/api/events", None) => RouteReply::EventStream,
        ("/api/status" | "/api/events", Some(_)) => {
            HttpResponse::refusal(400, "there is nothing to be said after ?").into()
        }
        _ => HttpResponse::refusal(404, "there is /, /metrics, /api/status, /api/history and /api/events").into(),
    }
}

/// The moment that a query asks for: that of the first point if it asks for none.
fn parse_since(query: Option<&str>) -> Option<f64> {
    let Some(query) = query else { return Some(0.0) };
    query.strip_prefix("since=")?.parse().ok().filter(|since: &f64| since.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who has published once and never again hangs, for Kubernetes' probe as for whoever scrapes it.
    #[test]
    fn stale_status_is_refused() {
        let board = StatusBoard::default();
        board.publish(serde_json::from_str(include_str!("../../../../fixtures/status.json")).unwrap());
        let request = |path: &str| HttpRequest { path: path.to_owned(), query: None, accepts_openmetrics: false };
        for (path, old) in [("/metrics", 503), ("/api/status", 503), ("/", 200), ("/api/history", 200)] {
            for (fresh, expect) in [(Duration::from_secs(3600), 200), (Duration::ZERO, old)] {
                let RouteReply::Response(answer) = route_with_max_age(&request(path), &board, fresh) else {
                    panic!("no stream")
                };
                assert_eq!(answer.status, expect, "{path}");
            }
        }
    }
}
