//! What a scenario knows of the host from which it was estimated, and what it does not.

use crate::decide::estimate::{ScenarioEstimate, TemplateFacts};
use crate::decide::scenario::default_costs;
use crate::observation::Observation;
use pagefold_census::results::Census;
use pagefold_output::text::{escape_unprintable, format_bytes, format_number};

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;
/// Templates that are described one by one.
const MAX_DESCRIBED_TEMPLATES: usize = 12;

/// What the scenario has of the host.
#[must_use]
pub fn known(estimate: &ScenarioEstimate) -> Vec<String> {
    let machines: u64 = estimate.templates.iter().map(|template| template.machines).sum();
    let mut lines = vec![format!(
        "{} in {} template{}. {} pages are zeros or have contents of other pages; merging them all would free {} pages, \
         {}. The scenario has as many.",
        count_processes(machines),
        estimate.templates.len(),
        if estimate.templates.len() == 1 { "" } else { "s" },
        format_number(estimate.mergeable_pages),
        format_number(estimate.redundant_pages),
        format_bytes(estimate.redundant_pages * PAGE_BYTES),
    )];
    let templates = estimate.scenario.templates.iter().zip(&estimate.templates);
    lines.extend(templates.take(MAX_DESCRIBED_TEMPLATES).map(|(template, facts)| {
        let (least, most) = facts.machine_pages;
        let sizes = match (format_bytes(least * PAGE_BYTES), format_bytes(most * PAGE_BYTES)) {
            (least, most) if least == most => least,
            (least, most) => format!("{least} to {most}"),
        };
        let name = escape_unprintable(&template.name);
        let mean = if facts.machines == 1 { "" } else { ", each with the mean" };
        format!("Template {name}: {} of {sizes}{mean}.", count_processes(facts.machines))
    }));
    lines
}

/// A number of processes as text.
#[must_use]
pub fn count_processes(processes: u64) -> String {
    if processes == 1 { "1 process".to_owned() } else { format!("{} processes", format_number(processes)) }
}

/// What the scenario does not have of the host, or assumes.
#[must_use]
pub fn unknown(observation: &Observation, estimate: &ScenarioEstimate, census: &Census) -> Vec<String> {
    let has_layouts = estimate.scenario.classes.iter().any(|class| !class.layouts.is_empty());
    let mut lines = vec![
        enrollment(observation),
        "Trust domains are not kept apart.".to_owned(),
        writes(observation.host.pass_seconds, &estimate.templates),
        "Contents that only some machines of a template have, or machines of several templates, are never written."
            .to_owned(),
        "Arrivals, exits and growth are not known: all processes stay as they are.".to_owned(),
    ];
    lines.push(match (has_layouts, estimate.scenario.knows_content_order) {
        (false, _) => runs(estimate),
        (true, true) => "Each process has its pages in their order, and contents sort by their bytes.".to_owned(),
        (true, false) => {
            "Each process has its pages in their order. How contents sort by their bytes is not known, and drawn."
                .to_owned()
        }
    });
    if estimate.scenario.costs == default_costs() {
        lines.push(
            "The costs of ksmd are those of docs/simulator.md: `pagefold sim calibrate` measures yours (see --costs)."
                .to_owned(),
        );
    }
    if !observation.has_cpu_count {
        lines.push("The number of CPUs is not known: reports show one.".to_owned());
    }
    if observation.host.spec.nodes > 1 && observation.host.machines.iter().any(|machine| machine.node.is_none()) {
        lines.push("Processes that are not bound to one NUMA node are put on the nodes in turn.".to_owned());
    }
    let figures = [
        (observation.merged_pages, "pages are merged on the host; the scenario begins with none merged"),
        (observation.repeated_frames, "pages share a frame with another process since a fork and are left out"),
        (census.unknown_shared_frames.0, "pages may share frames since a fork, and each counts as a copy"),
        (observation.unread_pages, "pages were not read and are left out"),
        (census.swapped.0 / PAGE_BYTES, "pages are swapped out and are left out"),
        (census.unscanned.len() as u64, "processes could not be scanned and are left out"),
    ];
    let figures = figures.into_iter().filter(|&(count, _)| count > 0);
    lines.extend(figures.map(|(count, what)| format!("{} {what}.", format_number(count))));
    lines
}

fn runs(estimate: &ScenarioEstimate) -> String {
    let templates = estimate.scenario.templates.iter().zip(&estimate.templates);
    let unknown: Vec<&str> =
        templates.filter(|(_, facts)| facts.mean_run_pages.is_none()).map(|(template, _)| &*template.name).collect();
    match unknown.len() {
        0 => "Of the order of pages only the mean lengths of runs are known.".to_owned(),
        _ => format!(
            "Of the order of pages only the mean lengths of runs are known, and for these templates none, whose pages \
             hardly change their kind: {}.",
            escape_unprintable(&unknown.join(", "))
        ),
    }
}

fn enrollment(observation: &Observation) -> String {
    let Observation { enrolled_processes, unenrolled_pages, .. } = *observation;
    let others = observation.host.machines.len() as u64 - enrolled_processes;
    if enrolled_processes == 0 {
        return "All memory of the processes that KSM can take counts as enrolled.".to_owned();
    }
    let mut text = format!("Only the enrolled memory of {} counts.", count_processes(enrolled_processes));
    if unenrolled_pages > 0 {
        text += &format!(" This leaves out {} pages; --all-memory includes them.", format_number(unenrolled_pages));
    }
    if others > 0 {
        text += &format!(" All memory of {} that KSM can take counts as enrolled.", count_processes(others));
    }
    text
}

fn writes(pass_seconds: Option<f64>, templates: &[TemplateFacts]) -> String {
    let pages: u64 = templates.iter().map(|template| template.volatile_pages).sum();
    let Some(seconds) = pass_seconds.filter(|&seconds| seconds > 0.0) else {
        return "There was one pass only, so writes are not known: no page is written.".to_owned();
    };
    match pages {
        0 => format!("No page changed within {seconds} s between two passes. Slower writes are not known."),
        _ => format!(
            "{} pages changed within {seconds} s between two passes. The scenario writes these once in that time, at \
             most once in each of its ticks, and no others. Slower writes are not known: a longer --pass-interval shows more.",
            format_number(pages)
        ),
    }
}
