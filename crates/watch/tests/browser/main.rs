//! The page in headless Chromium: what it shows, that it lives, and that it is of use without a mouse, colours or
//! width. `PAGEFOLD_PICTURES=FOLDER` has pictures of it written.

#[path = "../common/mod.rs"]
mod common;

mod chromium;
mod report;

use chromium::Chromium;
use common::{bare, board, serve, status};
use pagefold_daemon::wire::Decision;
use pagefold_watch::Board;
use pagefold_watch::http::Server;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// A page that shows the fixture.
fn open(name: &str) -> Option<(Chromium, Server, Arc<Board>)> {
    open_board(name, board())
}

fn open_board(name: &str, board: Arc<Board>) -> Option<(Chromium, Server, Arc<Board>)> {
    let mut browser = Chromium::start(name)?;
    let server = serve(&board);
    browser.open(&format!("http://{}/", server.address()));
    browser.until("document.querySelector('#link')?.dataset.link === 'live' && !!document.querySelector('#tiles dd')");
    Some((browser, server, board))
}

/// The fixture after hours of a made-up host, so that there is something to draw.
fn filled() -> Arc<Board> {
    let board = Board::default();
    let last = status();
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
fn the_page_shows_the_status() {
    let Some((mut browser, _server, _board)) = open("content") else { return };
    let status = status();
    let text = browser.value("document.body.innerText");
    let text = text.as_str().expect("text");
    for shown in [
        "7.78 GiB",
        "web-7",
        "act",
        status.why.as_str(),
        status.members[0].label.as_str(),
        status.decisions[0].why.as_str(),
        status.findings[0].title.as_str(),
        status.domains[0].name.as_str(),
        "pages_sharing",
    ] {
        assert!(text.contains(shown), "{shown:?} is not in {text}");
    }
    let count =
        |browser: &mut Chromium, what: &str| browser.value(&format!("document.querySelectorAll('{what}').length"));
    assert_eq!(count(&mut browser, "#member-table tbody tr"), status.workloads.len());
    browser.value(EACH_PROCESS);
    assert_eq!(count(&mut browser, "#member-table tbody tr"), status.members.len());
    let sharing = status.sharing.expect("a matrix");
    assert_eq!(count(&mut browser, "#sharing tbody td"), sharing.parties.len().pow(2));
    assert_eq!(count(&mut browser, "#decisions tbody tr"), status.decisions.len());
    assert_eq!(count(&mut browser, "#findings details"), status.findings.len());
    assert_eq!(count(&mut browser, "#charts svg"), 3);
    assert_eq!(browser.value("document.title"), "7.78 GiB saved · Pagefold");
    // It fetches nothing from anywhere else.
    let elsewhere =
        "performance.getEntriesByType('resource').filter(e => new URL(e.name).origin !== location.origin).length";
    assert_eq!(browser.value(elsewhere), 0);
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn the_page_follows_the_daemon() {
    let Some((mut browser, server, board)) = open("live") else { return };
    let mut status = status();
    status.time += 5.0;
    status.saved.net = Some(-3 << 20);
    status.ksm = None;
    status.memory.available = None;
    status.decisions.insert(0, Decision { why: "because <b>we</b> say so".to_owned(), ..status.decisions[0].clone() });
    board.publish(status.clone());
    browser.until("document.querySelector('#tiles .big').textContent === '-3.00 MiB'");
    let text = browser.value("document.body.innerText");
    let text = text.as_str().expect("text");
    assert!(text.contains("because <b>we</b> say so"), "markup is taken for markup");
    assert!(text.contains("This kernel has no KSM."));
    assert_eq!(browser.value("document.querySelectorAll('#tiles .big')[2].textContent"), "–", "absent is not zero");

    // The daemon ends, and another begins at the same address.
    let address = server.address();
    board.close();
    drop(server);
    browser.until("document.querySelector('#link').dataset.link === 'lost'");
    assert_eq!(browser.errors.iter().filter(|error| !error.contains("net::ERR_")).count(), 0, "{:?}", browser.errors);
    let board = Arc::new(Board::default());
    let _server = Server::start(address, Vec::new(), Arc::clone(&board)).expect("the address is free");
    status.time += 60.0;
    status.uptime_seconds = 1.0;
    status.saved.net = Some(5 << 30);
    board.publish(status);
    browser.until("document.querySelector('#tiles .big').textContent === '5.00 GiB'");
    assert_eq!(browser.value("document.querySelector('#link').dataset.link"), "live");
    // What came before the restart is still drawn.
    assert_eq!(browser.value("points.length"), 3);
}

#[test]
fn what_is_not_known_is_said() {
    let board = Board::default();
    board.publish(bare());
    let Some((mut browser, _server, _board)) = open_board("bare", Arc::new(board)) else { return };
    let text = browser.value("document.body.innerText");
    let text = text.as_str().expect("text");
    assert_eq!(text.matches("No census yet.").count(), 2, "{text}");
    assert_eq!(text.matches("Not known.").count(), 3, "{text}");
    for said in ["None yet.", "Nothing.", "This kernel has no KSM.", "goal: all that pays", "no pass yet"] {
        assert!(text.contains(said), "{said:?} is not in {text}");
    }
    for never in ["NaN", "undefined", "null", "[object"] {
        assert!(!text.contains(never), "{never} is in {text}");
    }
    assert_eq!(browser.value("document.title"), "– saved · Pagefold");
    assert_eq!(browser.errors, [""; 0]);
}

/// The charts have lines for what must not be exceeded and what is to be kept: here their heights, by the axis beside
/// them.
const LIMIT: &str = "(chart) => {
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
fn the_bound_and_the_goal_are_drawn() {
    let Some((mut browser, _server, board)) = open_board("limits", filled()) else { return };
    browser.until("points.length > 500");
    let limit = |browser: &mut Chromium, chart: &str| -> Vec<f64> {
        let found = browser.value(&format!("({LIMIT})('{chart}')"));
        found.as_array().expect("a list").iter().map(|value| value.as_f64().expect("a number")).collect()
    };
    let status = status();
    let goal = status.goal.keep_available.expect("a goal") as f64;
    let points = browser.value("points.length").as_u64().expect("a number") as usize;
    for (chart, expected) in [("cpu", status.bounds.cpu_percent), ("available", goal)] {
        let drawn = limit(&mut browser, chart);
        assert_eq!(drawn.len(), points, "{chart}: all the time");
        // A tenth of a pixel of some hundred.
        assert!(drawn.iter().all(|value| (value / expected - 1.0).abs() < 0.01), "{chart}: {:?}", &drawn[..2]);
        let stroke = format!("getComputedStyle(document.querySelector('[data-chart={chart}] path.limit')).stroke");
        assert_ne!(browser.value(&stroke), "none");
    }
    assert_eq!(limit(&mut browser, "saved"), [0.0; 0]);
    let said = "[...document.querySelectorAll('#charts svg')].map(chart => chart.getAttribute('aria-label')).join()";
    let said = browser.value(said);
    assert!(said.as_str().is_some_and(|said| said.contains("bound 10 %") && said.contains("goal 16.0 GiB")), "{said}");

    // Where there is no goal any more, the line ends and the bound's goes on.
    let mut later = status;
    later.time += 15.0;
    later.goal.keep_available = None;
    board.publish(later);
    browser.until(&format!("points.length > {points}"));
    assert_eq!(limit(&mut browser, "available").len(), points);
    assert_eq!(limit(&mut browser, "cpu").len(), points + 1);
    assert_eq!(browser.errors, [""; 0]);
}

/// Has the table show each process, and not what they belong to.
const EACH_PROCESS: &str = "document.querySelector('[data-rows=members]').click()";

#[test]
fn what_belongs_together_is_shown_together() {
    let Some((mut browser, _server, _board)) = open("workloads") else { return };
    let cells = "[...document.querySelectorAll('#member-table tbody tr')]
        .map(row => [...row.cells].map(cell => cell.textContent))";
    let rows = browser.value(cells);
    let rows = rows.as_array().expect("rows");
    let row = |name: &str| rows.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("no {name} in {rows:?}"));
    // Four ranks, whose shared memory counts once.
    assert_eq!(row("slurm:1234.0").as_array().expect("cells")[1..5], ["~2.15 GiB", "560 MiB", "", "4"]);
    let mut workloads = status().workloads;
    workloads.sort_by_key(|workload| std::cmp::Reverse(workload.sum.footprint));
    let names: Vec<&str> = workloads.iter().map(|workload| workload.name.as_str()).collect();
    assert_eq!(rows.iter().map(|row| row[0].as_str().expect("a name")).collect::<Vec<_>>(), names);
    let note = "document.querySelector('#member-note').textContent";
    assert!(
        browser.value(note).as_str().is_some_and(|note| note.contains("188 smaller") && note.contains("fair shares"))
    );
    browser.value(EACH_PROCESS);
    assert!(
        browser.value(note).as_str().is_some_and(|note| note.contains("212 smaller") && note.contains("fair shares"))
    );
    let pressed = "document.querySelector('[data-rows][aria-pressed=true]').dataset.rows";
    assert_eq!(browser.value(pressed), "members");
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn members_are_sorted_and_filtered() {
    let Some((mut browser, _server, board)) = open("members") else { return };
    browser.value(EACH_PROCESS);
    let first = "document.querySelector('#member-table tbody th').textContent";
    let mut members = status().members;
    members.sort_by_key(|member| std::cmp::Reverse(member.footprint));
    assert_eq!(browser.value(first), members[0].label);
    browser.value(
        "[...document.querySelectorAll('#member-table thead button')].find(b => b.textContent === 'Saved').click()",
    );
    members.sort_by_key(|member| std::cmp::Reverse(member.saved));
    assert_eq!(browser.value(first), members[0].label);
    assert_eq!(browser.value("document.querySelectorAll('th[aria-sort]').length"), 1);
    browser.value(
        "[...document.querySelectorAll('#member-table thead button')].find(b => b.textContent === 'Member').click()",
    );
    members.sort_by(|a, b| a.label.cmp(&b.label));
    assert_eq!(browser.value(first), members[0].label);

    browser.value("document.querySelector('#filter').focus()");
    browser.call("Input.insertText", json!({ "text": "GROUP build" }));
    let shown = "[...document.querySelectorAll('#member-table tbody th')].map(cell => cell.textContent)";
    assert_eq!(browser.value(shown), json!(["build-1", "build-2", "build-3"]));
    // A new status keeps what was chosen, and where the focus is.
    let mut later = status();
    later.time += 1.0;
    later.members.retain(|member| member.label != "build-2");
    board.publish(later);
    browser.until("document.querySelectorAll('#member-table tbody th').length === 2");
    assert_eq!(browser.value("document.activeElement.id"), "filter");
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn it_is_of_use_without_a_mouse_and_without_eyes() {
    let Some((mut browser, _server, _board)) = open_board("keyboard", filled()) else { return };
    browser.until("points.length > 500");
    // Each of these is announced with a name.
    let tree = browser.call("Accessibility.getFullAXTree", json!({}));
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
        "Who shares with whom",
        "Decisions",
        "What the doctor finds",
    ] {
        assert!(nodes.iter().any(|(role, name)| role == "heading" && name == heading), "{heading}");
    }
    // Everything that can be clicked can be reached by Tab; the arrow keys read out points of the charts.
    let mut reached = std::collections::BTreeSet::new();
    for _ in 0..60 {
        browser.call(
            "Input.dispatchKeyEvent",
            json!({ "type": "rawKeyDown", "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9 }),
        );
        let focus = browser
            .value("document.activeElement.id || document.activeElement.tagName + document.activeElement.className");
        reached.insert(focus.as_str().unwrap_or_default().to_owned());
    }
    for part in ["charts", "filter", "Askip", "BUTTON", "SUMMARY"] {
        assert!(reached.contains(part), "{part} is not among {reached:?}");
    }
    browser.value("document.querySelector('#charts').focus()");
    browser.press("ArrowLeft");
    let first = browser.value("document.querySelector('#point').textContent");
    browser.press("ArrowLeft");
    let second = browser.value("document.querySelector('#point').textContent");
    assert!(first.as_str().is_some_and(|text| text.contains("saved")), "{first}");
    assert_ne!(first, second);
    assert_eq!(browser.value("document.querySelectorAll('#points tbody tr').length > 10"), true);
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn it_fits_a_phone_and_both_schemes_of_colours() {
    let Some((mut browser, _server, _board)) = open_board("look", filled()) else { return };
    browser.until("points.length > 500");
    let mut grounds = Vec::new();
    for (name, width, height, scheme) in [
        ("light", 1280, 900, "light"),
        ("dark", 1280, 900, "dark"),
        ("phone", 390, 844, "light"),
        ("phone-dark", 390, 844, "dark"),
    ] {
        browser.look(width, height, scheme);
        browser.until(&format!(
            "innerWidth === {width} && document.querySelector('#charts svg').viewBox.baseVal.width < {width}"
        ));
        // What is wider scrolls in itself, not the page.
        assert_eq!(browser.value("document.documentElement.scrollWidth <= innerWidth"), true, "{name}");
        grounds.push(browser.value("getComputedStyle(document.body).backgroundColor"));
        for (what, behind) in [
            ("#tiles dd.small", "#tiles > div"),
            ("#tiles .big", "#tiles > div"),
            ("#who", "header"),
            ("#findings .verdict.warn", "section"),
            ("#sharing tr:nth-child(3) td:nth-child(5)", "td"),
        ] {
            let contrast = browser.value(&format!("({CONTRAST})('{what}', '{behind}')"));
            // WCAG 2.1, 1.4.3.
            assert!(contrast.as_f64().is_some_and(|ratio| ratio >= 4.5), "{name}: {what} has a contrast of {contrast}");
        }
        if let Some(folder) = std::env::var_os("PAGEFOLD_PICTURES") {
            let all = browser.value("document.documentElement.scrollHeight");
            for (part, height) in [("", json!(1180)), ("-all", all)] {
                let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
                let picture =
                    browser.call("Page.captureScreenshot", json!({ "captureBeyondViewport": true, "clip": clip }));
                let png = base64(picture["data"].as_str().expect("a picture"));
                std::fs::write(Path::new(&folder).join(format!("{name}{part}.png")), png)
                    .expect("the folder is writable");
            }
        }
    }
    assert_ne!(grounds[0], grounds[1]);
    assert_eq!(browser.errors, [""; 0]);
}

/// The contrast of a text with what is behind it, by WCAG's definition.
const CONTRAST: &str = "(what, behind) => {
    const light = (colour) => {
        const scale = colour.startsWith('rgb') ? 255 : 1;
        const [r, g, b] = colour.match(/[0-9.]+/g).map(n => n / scale).map(n => n <= .04045 ? n / 12.92 : ((n + .055) / 1.055) ** 2.4);
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
