//! The user's settings, which `pagefold run` passes in the environment.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Names of environment variables.
const DOMAIN_VARIABLE: &str = "PAGEFOLD_DOMAIN";
const MAX_SLOWDOWN_VARIABLE: &str = "PAGEFOLD_MAX_SLOWDOWN";
const MIN_RUNTIME_VARIABLE: &str = "PAGEFOLD_MIN_RUNTIME";
const MIN_BLOCK_VARIABLE: &str = "PAGEFOLD_MIN_BLOCK";
const PER_NODE_VARIABLE: &str = "PAGEFOLD_PER_NODE";
const REPORT_VARIABLE: &str = "PAGEFOLD_REPORT";

/// The user's settings.
#[derive(Debug)]
pub struct PreloadSettings {
    /// The domain to join.
    pub domain: String,
    /// The maximum slowdown of the program, as a fraction.
    pub max_slowdown: f64,
    /// The minimum run time of the program.
    pub min_runtime: Duration,
    /// Whether each NUMA node has a store of its own.
    pub per_node: bool,
    /// Whether to print the results at exit.
    pub prints_report: bool,
}

static SETTINGS: OnceLock<PreloadSettings> = OnceLock::new();
/// Bytes of the smallest block. Before the settings are loaded, no memory becomes a block.
static MIN_BLOCK_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

/// The smallest allowed value of `PAGEFOLD_MIN_BLOCK`: below it, a mapping of its own costs more than merging can save.
const SMALLEST_MIN_BLOCK_BYTES: usize = 1 << 16;

/// Load the settings. Without a domain nothing is merged.
pub fn load() {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let Some(domain) = variable(DOMAIN_VARIABLE) else { return };
    let max_slowdown = variable(MAX_SLOWDOWN_VARIABLE).and_then(|value| value.parse().ok()).unwrap_or(0.02);
    let min_runtime =
        variable(MIN_RUNTIME_VARIABLE).and_then(|value| Duration::try_from_secs_f64(value.parse().ok()?).ok());
    let min_runtime = min_runtime.unwrap_or_default();
    let min_block = variable(MIN_BLOCK_VARIABLE).and_then(|value| value.parse().ok()).unwrap_or(1 << 20_usize);
    let (per_node, prints_report) = (variable(PER_NODE_VARIABLE).is_some(), variable(REPORT_VARIABLE).is_some());
    let settings = PreloadSettings { domain, max_slowdown, min_runtime, per_node, prints_report };
    if SETTINGS.set(settings).is_ok() {
        MIN_BLOCK_BYTES.store(min_block.max(SMALLEST_MIN_BLOCK_BYTES), Ordering::Relaxed);
    }
}

/// The loaded settings.
pub fn settings() -> Option<&'static PreloadSettings> {
    SETTINGS.get()
}

/// Whether an allocation is large enough to be a block.
pub fn is_block_size(bytes: usize) -> bool {
    bytes >= MIN_BLOCK_BYTES.load(Ordering::Relaxed)
}

/// From now on no memory becomes a block.
pub fn disable_adoption() {
    MIN_BLOCK_BYTES.store(usize::MAX, Ordering::Relaxed);
}
