//! A headless Chromium, controlled with its DevTools protocol over two pipes (`--remote-debugging-pipe`). It reads from
//! descriptor 3 and writes to 4, JSON with a zero byte after each message. A shell moves a child's pipes to these
//! descriptors.

use super::common;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The timeout for any browser operation, far more than it needs.
const BROWSER_TIMEOUT: Duration = Duration::from_secs(120);

/// A browser with one page.
pub struct Chromium {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    profile: PathBuf,
    session: Option<String>,
    last_call_id: u64,
    /// Errors and exceptions on the page's console.
    pub errors: Vec<String>,
}

impl Chromium {
    /// Start a browser; `None` if it is not installed.
    pub fn start(name: &str) -> Option<Self> {
        let Some(program) = ["chromium-headless-shell", "chromium"].iter().find_map(|name| common::find_program(name))
        else {
            println!("skipped: Chromium is not installed (labs/setup-watch.sh)");
            return None;
        };
        let profile = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("chromium-{name}"));
        let _ = std::fs::remove_dir_all(&profile);
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 < /dev/null > /dev/null"])
            .arg(program)
            .args(["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-background-networking", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell starts");
        let (sender, messages) = channel();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                let read = serde_json::from_slice(&message).expect("the browser writes JSON");
                if sender.send(read).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let input = child.stdin.take().unwrap();
        let (session, errors) = (None, Vec::new());
        let mut browser = Self { child, input, messages, profile, session, last_call_id: 0, errors };
        let target = browser.call_method("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.call_method("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = attached["sessionId"].as_str().map(ToOwned::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call_method(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Call a method and wait for its result.
    pub fn call_method(&mut self, method: &str, parameters: Value) -> Value {
        self.last_call_id += 1;
        let mut message = json!({ "id": self.last_call_id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.input.write_all(format!("{message}\0").as_bytes()).expect("the browser reads");
        let until = Instant::now() + BROWSER_TIMEOUT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let message = self.messages.recv_timeout(left).unwrap_or_else(|error| panic!("{method}: {error}"));
            if message["id"] == self.last_call_id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.record_error(&message);
        }
    }

    /// Record errors in the page.
    fn record_error(&mut self, message: &Value) {
        let parameters = &message["params"];
        let error = match message["method"].as_str() {
            Some("Runtime.exceptionThrown") => &parameters["exceptionDetails"],
            Some("Runtime.consoleAPICalled") if parameters["type"] == "error" => &parameters["args"],
            Some("Log.entryAdded") if parameters["entry"]["level"] == "error" => &parameters["entry"],
            _ => return,
        };
        self.errors.push(error.to_string());
    }

    /// Open an address.
    pub fn open_address(&mut self, address: &str) {
        let result = self.call_method("Page.navigate", json!({ "url": address }));
        assert!(result["errorText"].is_null(), "{result}");
    }

    /// Evaluate an expression in the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let result = self.call_method("Runtime.evaluate", parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Wait until an expression is true.
    pub fn wait_until(&mut self, expression: &str) {
        let end = Instant::now() + BROWSER_TIMEOUT;
        while self.evaluate(expression) != true {
            assert!(Instant::now() < end, "never true: {expression}; errors: {:?}", self.errors);
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Press a key.
    pub fn press_key(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            self.call_method("Input.dispatchKeyEvent", json!({ "type": kind, "key": key, "code": key }));
        }
    }

    /// Set the window size and the color scheme.
    pub fn set_viewport(&mut self, width: u32, height: u32, scheme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call_method("Emulation.setDeviceMetricsOverride", size);
        let scheme = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call_method("Emulation.setEmulatedMedia", scheme);
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // The shell has become the browser, whose other processes end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}
