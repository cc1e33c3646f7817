//! What the user has asked for, which `pagefold run` puts into the environment.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Names of the environment.
const DOMAIN_VARIABLE: &str = "PAGEFOLD_DOMAIN";
const MAX_SLOWDOWN_VARIABLE: &str = "PAGEFOLD_MAX_SLOWDOWN";
const LIFETIME_VARIABLE: &str = "PAGEFOLD_LIFETIME";
const THRESHOLD_VARIABLE: &str = "PAGEFOLD_THRESHOLD";
const PER_NODE_VARIABLE: &str = "PAGEFOLD_PER_NODE";
const REPORT_VARIABLE: &str = "PAGEFOLD_REPORT";

/// What the user has asked for.
#[derive(Debug)]
pub struct PreloadSettings {
    /// With whom to merge.
    pub domain: String,
    /// By which share the program may become slower.
    pub max_slowdown: f64,
    /// For how long it runs at least.
    pub min_runtime: Duration,
    /// Whether each NUMA node has a store of its own.
    pub per_node: bool,
    /// Whether to say at the end what was done.
    pub prints_report: bool,
}

static SETTINGS: OnceLock<PreloadSettings> = OnceLock::new();
/// Bytes of the smallest block. Nothing is one before the settings were read.
static MIN_BLOCK_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The smallest that may be asked for: of less, a mapping of its own costs more than it can bring.
const MIN_THRESHOLD_BYTES: usize = 1 << 16;

/// Read them. Without a domain nothing is merged.
pub fn load() {
    let text = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
    let Some(domain) = text(DOMAIN_VARIABLE) else { return };
    let max_slowdown = text(MAX_SLOWDOWN_VARIABLE).and_then(|text| text.parse().ok()).unwrap_or(0.02);
    let lifetime = text(LIFETIME_VARIABLE).and_then(|text| Duration::try_from_secs_f64(text.parse().ok()?).ok());
    let lifetime = lifetime.unwrap_or_default();
    let threshold = text(THRESHOLD_VARIABLE).and_then(|text| text.parse().ok()).unwrap_or(1 << 20_usize);
    let (per_node, report) = (text(PER_NODE_VARIABLE).is_some(), text(REPORT_VARIABLE).is_some());
    let settings = PreloadSettings { domain, max_slowdown, min_runtime: lifetime, per_node, prints_report: report };
    if SETTINGS.set(settings).is_ok() {
        MIN_BLOCK_BYTES.store(threshold.max(MIN_THRESHOLD_BYTES), Ordering::Relaxed);
    }
}

/// Those that were read.
pub fn settings() -> Option<&'static PreloadSettings> {
    SETTINGS.get()
}

/// Whether an allocation is large enough to be a block.
pub fn is_block_size(bytes: usize) -> bool {
    bytes >= MIN_BLOCK_BYTES.load(Ordering::Relaxed)
}

/// Nothing is a block from now on.
pub fn disable_adoption() {
    MIN_BLOCK_BYTES.store(usize::MAX, Ordering::Relaxed);
}
