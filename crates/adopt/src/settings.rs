//! What the user has asked for, which `pagefold run` puts into the environment.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Names of the environment.
const DOMAIN: &str = "PAGEFOLD_DOMAIN";
const MAX_SLOWDOWN: &str = "PAGEFOLD_MAX_SLOWDOWN";
const LIFETIME: &str = "PAGEFOLD_LIFETIME";
const SMALLEST: &str = "PAGEFOLD_THRESHOLD";
const PER_NODE: &str = "PAGEFOLD_PER_NODE";
const REPORT: &str = "PAGEFOLD_REPORT";

/// What the user has asked for.
#[derive(Debug)]
pub struct Settings {
    /// With whom to merge.
    pub domain: String,
    /// By which share the program may become slower.
    pub max_slowdown: f64,
    /// For how long it runs at least.
    pub lifetime: Duration,
    /// Whether each NUMA node has a store of its own.
    pub per_node: bool,
    /// Whether to say at the end what was done.
    pub report: bool,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();
/// Bytes of the smallest block. Nothing is one before the settings were read.
static THRESHOLD: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The smallest that may be asked for: of less, a mapping of its own costs more than it can bring.
const LEAST: usize = 1 << 16;

/// Read them. Without a domain nothing is merged.
pub fn read() {
    let text = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
    let Some(domain) = text(DOMAIN) else { return };
    let max_slowdown = text(MAX_SLOWDOWN).and_then(|text| text.parse().ok()).unwrap_or(0.02);
    let lifetime = text(LIFETIME).and_then(|text| Duration::try_from_secs_f64(text.parse().ok()?).ok());
    let lifetime = lifetime.unwrap_or_default();
    let threshold = text(SMALLEST).and_then(|text| text.parse().ok()).unwrap_or(1 << 20_usize);
    let (per_node, report) = (text(PER_NODE).is_some(), text(REPORT).is_some());
    let settings = Settings { domain, max_slowdown, lifetime, per_node, report };
    if SETTINGS.set(settings).is_ok() {
        THRESHOLD.store(threshold.max(LEAST), Ordering::Relaxed);
    }
}

/// Those that were read.
pub fn settings() -> Option<&'static Settings> {
    SETTINGS.get()
}

/// Whether an allocation is large enough to be a block.
pub fn is_large(bytes: usize) -> bool {
    bytes >= THRESHOLD.load(Ordering::Relaxed)
}

/// Nothing is a block from now on.
pub fn adopt_nothing() {
    THRESHOLD.store(usize::MAX, Ordering::Relaxed);
}
