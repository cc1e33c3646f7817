//! Reads numbers: from files, from the output of commands, from a Prometheus server.

use pagefold_host::Host;
use regex::Regex;
use std::time::Duration;
use thiserror::Error;

/// How long a query may take.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a number could not be read.
#[derive(Debug, Error)]
pub enum MetricError {
    /// A file.
    #[error("cannot read the number in {path}: {why}")]
    File {
        /// The file, with the name of the number if there are several.
        path: String,
        /// The reason.
        why: String,
    },
    /// The output of a command.
    #[error("the output of the workload does not match {pattern:?}, or the match is no number: {output:?}")]
    NoMatch {
        /// The regular expression.
        pattern: String,
        /// The end of the output.
        output: String,
    },
    /// A regular expression.
    #[error(transparent)]
    Pattern(#[from] regex::Error),
    /// A sample of which no ratio can be formed.
    #[error("metric {name} is {value}; its samples must be finite and above 0: check how it is read")]
    SampleNotPositive {
        /// The metric.
        name: String,
        /// The sample.
        value: f64,
    },
    /// A counter that is no finite number.
    #[error("the proof counter {counter} is {value}; it must be finite: check how it is read")]
    CounterNotFinite {
        /// The counter.
        counter: String,
        /// Its value.
        value: f64,
    },
    /// A query.
    #[error("the query {query:?} to {url} failed: {why}")]
    Query {
        /// The server.
        url: String,
        /// The query.
        query: String,
        /// The reason.
        why: String,
    },
}

/// Checks the samples of a metric.
///
/// # Errors
/// If one is not finite, or not above 0.
pub fn check_samples(name: &str, samples: &[f64]) -> Result<(), MetricError> {
    match samples.iter().find(|&&value| !(value.is_finite() && value > 0.0)) {
        Some(&value) => Err(MetricError::SampleNotPositive { name: name.to_owned(), value }),
        None => Ok(()),
    }
}

/// Reads the proof counter.
///
/// # Errors
/// If there is no finite number.
pub fn read_counter(host: &dyn Host, counter: &str) -> Result<f64, MetricError> {
    let value = read_file_number(host, counter)?;
    if value.is_finite() {
        Ok(value)
    } else {
        Err(MetricError::CounterNotFinite { counter: counter.to_owned(), value })
    }
}

/// Reads a number from a file, or from `FILE:NAME` the number after `NAME` on a line.
///
/// # Errors
/// If there is no number.
pub fn read_file_number(host: &dyn Host, source: &str) -> Result<f64, MetricError> {
    let error = |why: String| MetricError::File { path: source.to_owned(), why };
    let (path, name) = source.rsplit_once(':').map_or((source, None), |(path, name)| (path, Some(name)));
    let text = host.read(path.trim_start_matches('/')).map_err(|why| error(why.to_string()))?;
    let text = String::from_utf8_lossy(&text);
    let number = match name {
        None => text.split_whitespace().next(),
        Some(name) => text.lines().find_map(|line| {
            let rest = line.trim_start().strip_prefix(name)?;
            let rest = rest.strip_prefix(|c: char| c == ':' || c == '=' || c.is_whitespace())?;
            rest.split_whitespace().next()
        }),
    };
    let number = number.ok_or_else(|| error("there is no such line, or the file is empty".to_owned()))?;
    number.parse().map_err(|_| error(format!("{number:?} is no number")))
}

/// The number that a pattern finds last in a text.
///
/// # Errors
/// If there is none.
pub fn match_number(pattern: &str, text: &str) -> Result<f64, MetricError> {
    let regex = Regex::new(pattern)?;
    let found = regex.captures_iter(text).last();
    let number = found.and_then(|found| found.get(1).or_else(|| found.get(0)).map(|m| m.as_str().replace(',', "")));
    number.and_then(|number| number.trim().parse().ok()).ok_or_else(|| {
        let end = text.char_indices().rev().nth(199).map_or(0, |(position, _)| position);
        MetricError::NoMatch { pattern: pattern.to_owned(), output: text[end..].to_owned() }
    })
}

/// The value of an instant query of a Prometheus server, which must have one result.
///
/// # Errors
/// If the server does not answer, or not with one number.
pub fn query_prometheus(url: &str, query: &str) -> Result<f64, MetricError> {
    let error = |why: String| MetricError::Query { url: url.to_owned(), query: query.to_owned(), why };
    let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(QUERY_TIMEOUT)).build().into();
    let endpoint = format!("{}/api/v1/query", url.trim_end_matches('/'));
    let response = agent.get(&endpoint).query("query", query).call().map_err(|why| error(why.to_string()))?;
    let text = response.into_body().read_to_string().map_err(|why| error(why.to_string()))?;
    parse_query_answer(&text).map_err(error)
}

/// The number in the answer to an instant query (Prometheus, HTTP API, "Instant queries").
fn parse_query_answer(text: &str) -> Result<f64, String> {
    let answer: serde_json::Value =
        serde_json::from_str(text).map_err(|error| format!("the answer is no JSON: {error}"))?;
    if answer["status"] != "success" {
        return Err(answer["error"].as_str().unwrap_or("the server reports no success").to_owned());
    }
    let result = &answer["data"]["result"];
    let value = match answer["data"]["resultType"].as_str() {
        Some("scalar") => &result[1],
        Some("vector") => match result.as_array().map(Vec::as_slice) {
            Some([only]) => &only["value"][1],
            Some(several) => return Err(format!("it has {} results instead of one; aggregate them", several.len())),
            None => return Err("the answer has no result".to_owned()),
        },
        _ => return Err("the result is neither a scalar nor a vector".to_owned()),
    };
    value.as_str().and_then(|value| value.parse().ok()).ok_or_else(|| format!("{value} is no number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn numbers_are_read_from_files_by_name() {
        let host = FakeHost::booted();
        host.put_file("proc/vmstat", "thp_fault_alloc_more 5\nthp_fault_alloc 17\n");
        host.put_file("tmp/n", "2.5\n");
        assert_eq!(read_file_number(&host, "/proc/vmstat:thp_fault_alloc").unwrap(), 17.0);
        assert_eq!(read_file_number(&host, "/tmp/n").unwrap(), 2.5);
        assert!(read_file_number(&host, "/proc/vmstat:absent").is_err());
        assert!(read_file_number(&host, "/tmp/absent").unwrap_err().to_string().contains("/tmp/absent"));
    }

    #[test]
    fn samples_are_finite_and_above_zero_and_counters_finite() {
        check_samples("rate", &[0.5, 2.0]).unwrap();
        for value in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            let error = check_samples("rate", &[1.0, value]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("metric rate is {value};")), "{error}");
        }
        let host = FakeHost::booted();
        host.put_file("tmp/n", "0");
        assert_eq!(read_counter(&host, "/tmp/n").unwrap(), 0.0);
        host.put_file("tmp/n", "inf");
        assert!(read_counter(&host, "/tmp/n").unwrap_err().to_string().contains("/tmp/n is inf"));
    }

    #[test]
    fn last_match_counts() {
        assert_eq!(match_number(r"(\d+) MB/s", "10 MB/s\n12 MB/s\n").unwrap(), 12.0);
        assert_eq!(match_number(r"[\d.,]+", "1,234.5").unwrap(), 1234.5);
        assert!(match_number("x(.)", "xy").is_err());
    }

    #[test]
    fn query_is_sent_over_http_and_its_answer_is_parsed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut request, mut buffer) = (Vec::new(), [0; 1024]);
            while !request.windows(4).any(|window| window == b"\r\n\r\n") {
                let count = stream.read(&mut buffer).unwrap();
                request.extend_from_slice(&buffer[..count]);
            }
            // In chunks, as servers written in Go answer.
            let body =
                r#"{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"0.25"]}]}}"#;
            let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
            write!(stream, "{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).unwrap();
            String::from_utf8(request).unwrap()
        });
        assert_eq!(query_prometheus(&url, "rate(x[1m])").unwrap(), 0.25);
        let request = server.join().unwrap();
        assert!(request.starts_with("GET /api/v1/query?query=rate"), "{request}");
    }

    #[test]
    fn query_without_one_number_is_an_error() {
        let several = r#"{"status":"success","data":{"resultType":"vector","result":[{},{}]}}"#;
        assert!(parse_query_answer(several).unwrap_err().contains("2 results"));
        let refused = r#"{"status":"error","error":"bad query"}"#;
        assert_eq!(parse_query_answer(refused).unwrap_err(), "bad query");
        let scalar = r#"{"status":"success","data":{"resultType":"scalar","result":[1,"3"]}}"#;
        assert_eq!(parse_query_answer(scalar), Ok(3.0));
    }
}
