//! The reports as text for the terminal.

pub mod apply;
pub mod map;
pub mod plan;
pub mod predict;

use pagefold_output::text::format_number;

/// A number of virtual machines with its noun.
fn format_machine_count(count: usize) -> String {
    format!("{} machine{}", format_number(count as u64), if count == 1 { "" } else { "s" })
}
