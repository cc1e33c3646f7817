//! The page in headless Chromium: its content, its updates, and its use without a mouse, colors or a wide screen.
//! `PAGEFOLD_PICTURES=FOLDER` saves screenshots.

#[path = "../common/mod.rs"]
mod common;

mod ab;
mod chromium;
mod report;

use chromium::Chromium;
use common::{fixture_board, fixture_status, start_server, status_without_optional_fields};
use pagefold_daemon::wire::DecisionReport;
use pagefold_watch::StatusBoard;
use pagefold_watch::http::Server;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// A page that shows the fixture.
fn open_page(name: &str) -> Option<(Chromium, Server, Arc<StatusBoard>)> {
    open_page_of_board(name, fixture_board())
}

fn open_page_of_board(name: &str, board: Arc<StatusBoard>) -> Option<(Chromium, Server, Arc<StatusBoard>)> {
    let mut browser = Chromium::start(name)?;
    let server = start_server(&board);
    browser.open_address(&format!("http://{}/", server.address()));
    browser.wait_until(
        "document.querySelector('#link')?.dataset.link === 'live' && !!document.querySelector('#tiles dd')",
    );
    Some((browser, server, board))
}

/// The fixture with hours of made-up history, so that there is something to draw.
fn board_with_history() -> Arc<StatusBoard> {
    let board = StatusBoard::default();
    let last = fixture_status();
    let steps = 600_u32;
    for step in 0..steps {
        let mut status = last.clone();
        status.time -= f64::from(steps - step) * 15.0;
        let grown = |full: u64| (full as f64 * (1.0 - (-f64::from(step) / 120.0).exp())) as u64;
        let busy = 6.0 * (-f64::from(step % 150) / 40.0).exp();
        status.saved.gross = last.saved.gross.map(grown);
        status.saved.net = status.saved.gross.map(|gross| gross.cast_signed() - 65_011_712);
        if let (Some(ksmd), Some(pagefold)) = (&mut status.cpu.ksmd, &mut status.cpu.pagefold) {
            (ksmd.percent, pagefold.percent) = (busy, 0.4 + busy / 3.0);
        }
        status.memory.available = Some(9_000_000_000 + grown(8_000_000_000));
        board.publish(status);
    }
    board.publish(last);
    Arc::new(board)
}

#[test]
fn page_shows_the_status() {
    let Some((mut browser, _server, _board)) = open_page("content") else { return };
    let status = fixture_status();
    let text = browser.evaluate("document.body.innerText");
    let text = text.as_str().expect("text");
    for shown in [
        "7.78 GiB",
        "web-7",
        "act",
        status.why.as_str(),
        status.tracked_processes[0].label.as_str(),
        status.decisions[0].explanation.as_str(),
        status.findings[0].title.as_str(),
        status.domains[0].name.as_str(),
        "pages_sharing",
        "placed 1 of 8 virtual machines: 4.00 GiB moved, for a gain of 285 CPU s/h",
        "12.0 GiB",
    ] {
        assert!(text.contains(shown), "{shown:?} is not in {text}");
    }
    let count =
        |browser: &mut Chromium, what: &str| browser.evaluate(&format!("document.querySelectorAll('{what}').length"));
    assert_eq!(count(&mut browser, "#process-table tbody tr"), status.workloads.len());
    browser.evaluate(SHOW_PROCESSES_SCRIPT);
    assert_eq!(count(&mut browser, "#process-table tbody tr"), status.tracked_processes.len());
    let sharing = status.sharing.expect("a matrix");
    assert_eq!(count(&mut browser, "#sharing tbody td"), sharing.parties.len().pow(2));
    assert_eq!(count(&mut browser, "#decisions tbody tr"), status.decisions.len());
    assert_eq!(count(&mut browser, "#findings details"), status.findings.len());
    assert_eq!(count(&mut browser, "#charts svg"), 3);
    assert_eq!(browser.evaluate("document.title"), "7.78 GiB saved · Pagefold");
    // It loads nothing from other servers.
    let elsewhere =
        "performance.getEntriesByType('resource').filter(e => new URL(e.name).origin !== location.origin).length";
    assert_eq!(browser.evaluate(elsewhere), 0);
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn page_follows_the_daemon() {
    let Some((mut browser, server, board)) = open_page("live") else { return };
    let mut status = fixture_status();
    status.time += 5.0;
    status.saved.net = Some(-3 << 20);
    status.ksm = None;
    status.memory.available = None;
    status.decisions.insert(
        0,
        DecisionReport { explanation: "because <b>we</b> say so".to_owned(), ..status.decisions[0].clone() },
    );
    board.publish(status.clone());
    browser.wait_until("document.querySelector('#tiles .big').textContent === '-3.00 MiB'");
    let text = browser.evaluate("document.body.innerText");
    let text = text.as_str().expect("text");
    assert!(text.contains("because <b>we</b> say so"), "text is inserted as markup");
    assert!(text.contains("This kernel has no KSM."));
    assert_eq!(browser.evaluate("document.querySelectorAll('#tiles .big')[2].textContent"), "–", "absent is not zero");

    // The daemon ends, and another one starts at the same address.
    let address = server.address();
    board.close();
    drop(server);
    browser.wait_until("document.querySelector('#link').dataset.link === 'lost'");
    assert_eq!(browser.errors.iter().filter(|error| !error.contains("net::ERR_")).count(), 0, "{:?}", browser.errors);
    let board = Arc::new(StatusBoard::default());
    let _server = Server::start(address, Vec::new(), Arc::clone(&board)).expect("the address is free");
    status.time += 60.0;
    status.uptime_seconds = 1.0;
    status.saved.net = Some(5 << 30);
    board.publish(status);
    browser.wait_until("document.querySelector('#tiles .big').textContent === '5.00 GiB'");
    assert_eq!(browser.evaluate("document.querySelector('#link').dataset.link"), "live");
    // Points from before the restart are still drawn.
    assert_eq!(browser.evaluate("points.length"), 3);
}

#[test]
fn page_says_what_is_unknown() {
    let board = StatusBoard::default();
    board.publish(status_without_optional_fields());
    let Some((mut browser, _server, _board)) = open_page_of_board("bare", Arc::new(board)) else { return };
    let text = browser.evaluate("document.body.innerText");
    let text = text.as_str().expect("text");
    assert_eq!(text.matches("No census yet.").count(), 2, "{text}");
    assert_eq!(text.matches("No data.").count(), 3, "{text}");
    for labels in ["None yet.", "No findings.", "This kernel has no KSM.", "goal: all profitable merges", "no pass yet"]
    {
        assert!(text.contains(labels), "{labels:?} is not in {text}");
    }
    assert_eq!(browser.evaluate("document.querySelector('#placement').hidden"), true, "placement is off");
    for never in ["NaN", "undefined", "null", "[object"] {
        assert!(!text.contains(never), "{never} is in {text}");
    }
    assert_eq!(browser.evaluate("document.title"), "– saved · Pagefold");
    assert_eq!(browser.errors, [""; 0]);
}

/// The heights of the limit and goal lines of a chart, read with the axis beside them.
const LIMIT_LINE_SCRIPT: &str = "(chart) => {
    const svg = document.querySelector(`[data-chart=${chart}] svg`);
    const units = { '%': 1, B: 1, MiB: 2 ** 20, GiB: 2 ** 30 };
    const value = (text) => text.split(' ')[0] * units[text.split(' ')[1]];
    const labels = [...svg.querySelectorAll('text[text-anchor=end]')].map(label => value(label.textContent));
    const heights = [...svg.querySelectorAll('line.grid')].map(line => +line.getAttribute('y1'));
    const scale = (labels.at(-1) - labels[0]) / (heights.at(-1) - heights[0]);
    const lines = [...svg.querySelectorAll('path.limit')].map(path => path.getAttribute('d'));
    const points = lines.flatMap(line => line.match(/[0-9.]+ [0-9.]+/g));
    return points.map(point => labels[0] + (point.split(' ')[1] - heights[0]) * scale);
}";

#[test]
fn bound_and_goal_lines_are_drawn() {
    let Some((mut browser, _server, board)) = open_page_of_board("limits", board_with_history()) else { return };
    browser.wait_until("points.length > 500");
    let limit = |browser: &mut Chromium, chart: &str| -> Vec<f64> {
        let found = browser.evaluate(&format!("({LIMIT_LINE_SCRIPT})('{chart}')"));
        found.as_array().expect("a list").iter().map(|value| value.as_f64().expect("a number")).collect()
    };
    let status = fixture_status();
    let goal = status.goal.keep_available.expect("a goal") as f64;
    let points = browser.evaluate("points.length").as_u64().expect("a number") as usize;
    for (chart, expected) in [("cpu", status.bounds.cpu_percent), ("available", goal)] {
        let drawn = limit(&mut browser, chart);
        assert_eq!(drawn.len(), points, "{chart}: all the time");
        // A tenth of a pixel of some hundred.
        assert!(drawn.iter().all(|value| (value / expected - 1.0).abs() < 0.01), "{chart}: {:?}", &drawn[..2]);
        let stroke = format!("getComputedStyle(document.querySelector('[data-chart={chart}] path.limit')).stroke");
        assert_ne!(browser.evaluate(&stroke), "none");
    }
    assert_eq!(limit(&mut browser, "saved"), [0.0; 0]);
    let labels = "[...document.querySelectorAll('#charts svg')].map(chart => chart.getAttribute('aria-label')).join()";
    let labels = browser.evaluate(labels);
    assert!(
        labels.as_str().is_some_and(|labels| labels.contains("bound 10 %") && labels.contains("goal 16.0 GiB")),
        "{labels}"
    );

    // Without a goal that line ends, and the limit's line continues.
    let mut later = status;
    later.time += 15.0;
    later.goal.keep_available = None;
    board.publish(later);
    browser.wait_until(&format!("points.length > {points}"));
    assert_eq!(limit(&mut browser, "available").len(), points);
    assert_eq!(limit(&mut browser, "cpu").len(), points + 1);
    assert_eq!(browser.errors, [""; 0]);
}

/// Selects the table of processes instead of workloads.
const SHOW_PROCESSES_SCRIPT: &str = "document.querySelector('[data-rows=processes]').click()";

#[test]
fn processes_of_a_workload_are_grouped() {
    let Some((mut browser, _server, _board)) = open_page("workloads") else { return };
    let cells = "[...document.querySelectorAll('#process-table tbody tr')]
        .map(row => [...row.cells].map(cell => cell.textContent))";
    let rows = browser.evaluate(cells);
    let rows = rows.as_array().expect("rows");
    let row = |name: &str| rows.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("no {name} in {rows:?}"));
    // Four ranks, whose shared memory counts once.
    assert_eq!(row("slurm:1234.0").as_array().expect("cells")[1..5], ["~2.15 GiB", "560 MiB", "", "4"]);
    let mut workloads = fixture_status().workloads;
    workloads.sort_by_key(|workload| std::cmp::Reverse(workload.sum.footprint));
    let names: Vec<&str> = workloads.iter().map(|workload| workload.name.as_str()).collect();
    assert_eq!(rows.iter().map(|row| row[0].as_str().expect("a name")).collect::<Vec<_>>(), names);
    let note = "document.querySelector('#process-note').textContent";
    assert!(
        browser
            .evaluate(note)
            .as_str()
            .is_some_and(|note| note.contains("188 smaller") && note.contains("fair shares"))
    );
    browser.evaluate(SHOW_PROCESSES_SCRIPT);
    assert!(
        browser
            .evaluate(note)
            .as_str()
            .is_some_and(|note| note.contains("212 smaller") && note.contains("fair shares"))
    );
    let pressed = "document.querySelector('[data-rows][aria-pressed=true]').dataset.rows";
    assert_eq!(browser.evaluate(pressed), "processes");
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn processes_are_sorted_and_filtered() {
    let Some((mut browser, _server, board)) = open_page("processes") else { return };
    browser.evaluate(SHOW_PROCESSES_SCRIPT);
    let first = "document.querySelector('#process-table tbody th').textContent";
    let mut processes = fixture_status().tracked_processes;
    processes.sort_by_key(|process| std::cmp::Reverse(process.footprint));
    assert_eq!(browser.evaluate(first), processes[0].label);
    browser.evaluate(
        "[...document.querySelectorAll('#process-table thead button')].find(b => b.textContent === 'Saved').click()",
    );
    processes.sort_by_key(|process| std::cmp::Reverse(process.saved));
    assert_eq!(browser.evaluate(first), processes[0].label);
    assert_eq!(browser.evaluate("document.querySelectorAll('th[aria-sort]').length"), 1);
    browser.evaluate(
        "[...document.querySelectorAll('#process-table thead button')].find(b => b.textContent === 'Process').click()",
    );
    processes.sort_by(|a, b| a.label.cmp(&b.label));
    assert_eq!(browser.evaluate(first), processes[0].label);

    browser.evaluate("document.querySelector('#filter').focus()");
    browser.call_method("Input.insertText", json!({ "text": "GROUP build" }));
    let shown = "[...document.querySelectorAll('#process-table tbody th')].map(cell => cell.textContent)";
    assert_eq!(browser.evaluate(shown), json!(["build-1", "build-2", "build-3"]));
    // A new status keeps the selection and the focus.
    let mut later = fixture_status();
    later.time += 1.0;
    later.tracked_processes.retain(|process| process.label != "build-2");
    board.publish(later);
    browser.wait_until("document.querySelectorAll('#process-table tbody th').length === 2");
    assert_eq!(browser.evaluate("document.activeElement.id"), "filter");
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn page_supports_keyboard_and_screen_reader() {
    let Some((mut browser, _server, _board)) = open_page_of_board("keyboard", board_with_history()) else { return };
    browser.wait_until("points.length > 500");
    // Each of these has an accessible name.
    let tree = browser.call_method("Accessibility.getFullAXTree", json!({}));
    let nodes: Vec<(String, String)> = tree["nodes"]
        .as_array()
        .expect("nodes")
        .iter()
        .filter(|node| node["ignored"] == false)
        .map(|node| {
            let text = |field: &str| node[field]["value"].as_str().unwrap_or_default().to_owned();
            (text("role"), text("name"))
        })
        .collect();
    for role in ["button", "link", "searchbox", "image", "region", "columnheader", "rowheader"] {
        let named: Vec<_> = nodes.iter().filter(|(of, _)| of == role).collect();
        assert!(!named.is_empty(), "there is no {role}");
        assert!(named.iter().all(|(_, name)| !name.is_empty()), "a {role} has no name: {named:?}");
    }
    for heading in [
        "Over time",
        "VMs, containers and jobs by footprint",
        "Duplicates between workloads",
        "Decisions",
        "Doctor findings",
    ] {
        assert!(nodes.iter().any(|(role, name)| role == "heading" && name == heading), "{heading}");
    }
    // Tab reaches all clickable elements; the arrow keys read out points of the charts.
    let mut reached = std::collections::BTreeSet::new();
    for _ in 0..60 {
        browser.call_method(
            "Input.dispatchKeyEvent",
            json!({ "type": "rawKeyDown", "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9 }),
        );
        let focus = browser
            .evaluate("document.activeElement.id || document.activeElement.tagName + document.activeElement.className");
        reached.insert(focus.as_str().unwrap_or_default().to_owned());
    }
    for part in ["charts", "filter", "Askip", "BUTTON", "SUMMARY"] {
        assert!(reached.contains(part), "{part} is not among {reached:?}");
    }
    browser.evaluate("document.querySelector('#charts').focus()");
    browser.press_key("ArrowLeft");
    let first = browser.evaluate("document.querySelector('#point').textContent");
    browser.press_key("ArrowLeft");
    let second = browser.evaluate("document.querySelector('#point').textContent");
    assert!(first.as_str().is_some_and(|text| text.contains("saved")), "{first}");
    assert_ne!(first, second);
    assert_eq!(browser.evaluate("document.querySelectorAll('#points tbody tr').length > 10"), true);
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn page_fits_phones_and_both_color_schemes() {
    let Some((mut browser, _server, _board)) = open_page_of_board("look", board_with_history()) else { return };
    browser.wait_until("points.length > 500");
    let mut grounds = Vec::new();
    for (name, width, height, scheme) in [
        ("light", 1280, 900, "light"),
        ("dark", 1280, 900, "dark"),
        ("phone", 390, 844, "light"),
        ("phone-dark", 390, 844, "dark"),
    ] {
        browser.set_viewport(width, height, scheme);
        browser.wait_until(&format!(
            "innerWidth === {width} && document.querySelector('#charts svg').viewBox.baseVal.width < {width}"
        ));
        // Wide content scrolls inside its own box, not the page.
        assert_eq!(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), true, "{name}");
        grounds.push(browser.evaluate("getComputedStyle(document.body).backgroundColor"));
        for (what, behind) in [
            ("#tiles dd.small", "#tiles > div"),
            ("#tiles .big", "#tiles > div"),
            ("#who", "header"),
            ("#findings .verdict.warn", "section"),
            ("#sharing tr:nth-child(3) td:nth-child(5)", "td"),
        ] {
            let contrast = browser.evaluate(&format!("({CONTRAST_SCRIPT})('{what}', '{behind}')"));
            // WCAG 2.1, 1.4.3.
            assert!(contrast.as_f64().is_some_and(|ratio| ratio >= 4.5), "{name}: {what} has a contrast of {contrast}");
        }
        if let Some(folder) = std::env::var_os("PAGEFOLD_PICTURES") {
            let all = browser.evaluate("document.documentElement.scrollHeight");
            for (part, height) in [("", json!(1180)), ("-all", all)] {
                let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
                let picture = browser
                    .call_method("Page.captureScreenshot", json!({ "captureBeyondViewport": true, "clip": clip }));
                let png = base64(picture["data"].as_str().expect("a picture"));
                std::fs::write(Path::new(&folder).join(format!("{name}{part}.png")), png)
                    .expect("the folder is writable");
            }
        }
    }
    assert_ne!(grounds[0], grounds[1]);
    assert_eq!(browser.errors, [""; 0]);
}

/// The contrast of a text with its background, by WCAG's definition.
const CONTRAST_SCRIPT: &str = "(what, behind) => {
    const light = (color) => {
        const scale = color.startsWith('rgb') ? 255 : 1;
        const [r, g, b] = color.match(/[0-9.]+/g).map(n => n / scale).map(n => n <= .04045 ? n / 12.92 : ((n + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const [a, b] = [light(getComputedStyle(document.querySelector(what)).color), light(getComputedStyle(document.querySelector(what).closest(behind)).backgroundColor)];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
}";

fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'=').map(digit).collect();
    let four =
        |four: &[u8]| four.iter().fold(0_u32, |bits, digit| bits << 6 | u32::from(*digit)) << (6 * (4 - four.len()));
    digits.chunks(4).flat_map(|chunk| four(chunk).to_be_bytes()[1..chunk.len()].to_vec()).collect()
}
