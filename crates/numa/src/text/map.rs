//! The map as text for the terminal.

use crate::wire::map::{
    AccessReport, MachineReport, MemoryBackendReport, MemoryReport, NodePagesReport, NumaMapReport,
    ProcessPlacementReport, ThreadGroupReport,
};
use comfy_table::{Cell, CellAlignment};
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, format_bytes, format_number};
use std::fmt::Write;

/// Columns of the name of a process.
pub(super) const NAME_COLUMNS: usize = 24;

/// Nodes of the host that have a column each; more are named in one column.
const MAX_NODE_COLUMNS: usize = 8;

/// Renders the whole map, with at most `max_rows` processes. `remedy` says what to do about processes that could not be
/// read.
pub fn render(report: &NumaMapReport, max_rows: usize, remedy: &str, style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_title(report), 0);
    text.push_str(&render_nodes(report, style));
    let shown = &report.processes[..report.processes.len().min(max_rows)];
    if !shown.is_empty() {
        text.push_str(&style.format_heading("Memory by node"));
        text.push_str(&render_memory(report, shown, style));
        if report.processes.len() > shown.len() {
            let all = report.processes.len();
            let _ = writeln!(text, "… and {} more (--top {all} shows all)", all - shown.len());
        }
        text.push_str(&style.format_heading("Threads"));
        text.push_str(&render_threads(shown, style));
    }
    text.push_str(&render_machines(shown, style));
    text.push_str(&render_merged(report, shown, style));
    text.push_str(&render_unscanned(report.unscanned_processes.len(), remedy, style));
    text
}

fn render_title(report: &NumaMapReport) -> String {
    let nodes = report.nodes.len();
    format!(
        "NUMA map of {}: {nodes} node{}, {}.",
        report.host,
        if nodes == 1 { "" } else { "s" },
        format_process_count(report.processes.len())
    )
}

/// What to do about processes that could not be read; empty if all were read.
pub(super) fn render_unscanned(count: usize, remedy: &str, style: TextStyle) -> String {
    if count == 0 {
        return String::new();
    }
    let text = format!("{} could not be read. {remedy}", format_process_count(count));
    format!("\n{}", style.format_paragraph(&text, 0))
}

/// `1 process`, `1,200 processes`.
fn format_process_count(count: usize) -> String {
    format!("{} process{}", format_number(count as u64), if count == 1 { "" } else { "es" })
}

fn render_nodes(report: &NumaMapReport, style: TextStyle) -> String {
    let distances: Vec<String> = report.nodes.iter().map(|node| format!(">to {}", node.node)).collect();
    let mut headings = vec![">node", "CPUs", ">memory", ">free"];
    headings.extend(distances.iter().map(String::as_str));
    let mut table = style.new_table(&headings);
    for node in &report.nodes {
        let mut row = vec![
            node.node.to_string(),
            if node.cpus.is_empty() { "none".to_owned() } else { node.cpus.clone() },
            format_optional_bytes(node.total_bytes),
            format_optional_bytes(node.free_bytes),
        ];
        row.extend(node.distances.iter().map(u32::to_string));
        table.add_row(row);
    }
    format!("\n{}", style.render_table(&table))
}

fn format_optional_bytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "?".to_owned(), format_bytes)
}

fn render_memory(report: &NumaMapReport, shown: &[ProcessPlacementReport], style: TextStyle) -> String {
    let has_columns = report.nodes.len() <= MAX_NODE_COLUMNS;
    let node_headings: Vec<String> = if has_columns {
        report.nodes.iter().map(|node| format!(">node {}", node.node)).collect()
    } else {
        vec!["nodes".to_owned()]
    };
    let kinds: Vec<&MemoryKind> =
        MEMORY_KINDS.iter().filter(|kind| shown.iter().any(|process| (kind.pages)(&process.memory) > 0)).collect();
    let shows_pinned = shown.iter().any(|process| process.pinned_pages.is_some_and(|pages| pages > 0));
    let mut kind_headings: Vec<String> = kinds.iter().map(|kind| format!(">{}", kind.heading)).collect();
    kind_headings.extend(shows_pinned.then(|| ">pinned".to_owned()));
    let mut headings = vec![">pid", "name", ">resident"];
    headings.extend(node_headings.iter().map(String::as_str));
    headings.extend([">remote", ">distance"]);
    headings.extend(kind_headings.iter().map(String::as_str));
    let mut table = style.new_table(&headings);
    let bytes = |pages: u64| format_bytes(pages * report.page_size);
    for process in shown {
        let name = cut_end(&escape_unprintable(&process.process.label()), NAME_COLUMNS);
        let mut row = vec![right(process.process.pid), Cell::new(name), right(bytes(process.memory.resident_pages))];
        row.extend(node_cells(report, &process.memory, has_columns));
        row.extend(access_cells(process.accesses));
        row.extend(kinds.iter().map(|kind| right(bytes((kind.pages)(&process.memory)))));
        row.extend(shows_pinned.then(|| right(bytes(process.pinned_pages.unwrap_or(0)))));
        table.add_row(row);
        for node in &process.virtual_nodes {
            let name = format!("  virtual node {}", node.virtual_node);
            let mut row = vec![Cell::new(""), Cell::new(name)];
            match &node.memory {
                Some(memory) => {
                    row.push(right(bytes(memory.resident_pages)));
                    row.extend(node_cells(report, memory, has_columns));
                }
                None => row.extend((0..=node_headings.len()).map(|_| right("?"))),
            }
            row.extend(access_cells(node.accesses));
            // The pinned pages of a process are not known by virtual node.
            let kind_cell = |kind: &&MemoryKind| match &node.memory {
                Some(memory) => right(bytes((kind.pages)(memory))),
                None => right("?"),
            };
            row.extend(kinds.iter().map(kind_cell));
            table.add_row(row);
        }
    }
    style.render_table(&table)
}

/// A kind of memory with a column of its own, if any process has some.
struct MemoryKind {
    heading: &'static str,
    pages: fn(&MemoryReport) -> u64,
}

/// The sum over the nodes.
fn sum_nodes(memory: &MemoryReport, pages: fn(&NodePagesReport) -> u64) -> u64 {
    memory.memory.iter().map(pages).sum()
}

const MEMORY_KINDS: [MemoryKind; 7] = [
    MemoryKind { heading: "base", pages: |memory| sum_nodes(memory, |node| node.small_pages) },
    MemoryKind { heading: "huge", pages: |memory| sum_nodes(memory, |node| node.huge_pages) },
    MemoryKind { heading: "hugetlb", pages: |memory| sum_nodes(memory, |node| node.hugetlb_pages) },
    MemoryKind { heading: "merged", pages: |memory| sum_nodes(memory, |node| node.merged_pages) },
    MemoryKind { heading: "shared", pages: |memory| sum_nodes(memory, |node| node.shared_pages) },
    MemoryKind { heading: "file", pages: |memory| sum_nodes(memory, |node| node.file_pages) },
    MemoryKind { heading: "swapped", pages: |memory| memory.swapped_pages },
];

fn node_cells(report: &NumaMapReport, memory: &MemoryReport, has_columns: bool) -> Vec<Cell> {
    let bytes = |pages: u64| format_bytes(pages * report.page_size);
    if !has_columns {
        let nodes: Vec<String> =
            memory.memory.iter().map(|node| format!("{}: {}", node.node, bytes(node.pages))).collect();
        return vec![Cell::new(nodes.join(", "))];
    }
    let pages = |id: u32| memory.memory.iter().find(|node| node.node == id).map_or(0, |node| node.pages);
    report.nodes.iter().map(|node| right(bytes(pages(node.node)))).collect()
}

fn access_cells(accesses: Option<AccessReport>) -> [Cell; 2] {
    match accesses {
        Some(accesses) => [
            right(format!("{:.0} %", 100.0 * accesses.remote_share)),
            right(format!("{:.2}", accesses.relative_distance)),
        ],
        None => [right("?"), right("?")],
    }
}

/// A cell with right-aligned text.
pub(super) fn right(text: impl ToString) -> Cell {
    Cell::new(text.to_string()).set_alignment(CellAlignment::Right)
}

fn render_threads(shown: &[ProcessPlacementReport], style: TextStyle) -> String {
    let mut table = style.new_table(&[">pid", "name", "threads", ">node", "ran last on CPUs", "may run on CPUs"]);
    for process in shown {
        let name = cut_end(&escape_unprintable(&process.process.label()), NAME_COLUMNS);
        let Some(groups) = &process.threads else {
            table.add_row(vec![right(process.process.pid), Cell::new(name), Cell::new("?")]);
            continue;
        };
        for (position, group) in groups.iter().enumerate() {
            let first = position == 0;
            table.add_row(vec![
                right(if first { process.process.pid.to_string() } else { String::new() }),
                Cell::new(if first { name.clone() } else { String::new() }),
                Cell::new(describe_threads(group)),
                right(group.node.map_or_else(|| "?".to_owned(), |node| node.to_string())),
                Cell::new(&group.last_cpus),
                Cell::new(&group.allowed_cpus),
            ]);
        }
        for device in &process.devices {
            table.add_row(vec![
                right(""),
                Cell::new(""),
                Cell::new(format!("device {}", device.address)),
                right(device.node.map_or_else(|| "?".to_owned(), |node| node.to_string())),
            ]);
        }
    }
    style.render_table(&table)
}

fn describe_threads(group: &ThreadGroupReport) -> String {
    let name = group.name.as_deref().map(|name| escape_unprintable(name).into_owned()).unwrap_or_default();
    match (group.role, group.threads) {
        ("vcpu", 1) => format!("vCPU {name}"),
        ("vcpu", _) => format!("vCPUs {name}"),
        ("iothread", _) => format!("iothread {name}"),
        ("vhost", 1) => "vhost worker".to_owned(),
        ("vhost", count) => format!("{count} vhost workers"),
        ("emulator", _) => "emulator".to_owned(),
        (_, 1) => "1 thread".to_owned(),
        (_, count) => format!("{count} threads"),
    }
}

/// Disagreements between the sources of a machine that are shown.
const MAX_CONFLICTS: usize = 4;

/// Virtual machines that QEMU's monitor or libvirt describes, and what is wrong with these sources.
fn render_machines(shown: &[ProcessPlacementReport], style: TextStyle) -> String {
    let machines = shown.iter().filter_map(|process| Some((process, process.machine.as_ref()?)));
    let (mut table, mut notes) = (None, Vec::new());
    for (process, machine) in machines {
        let (pid, name) = (process.process.pid, escape_unprintable(&process.process.label()).into_owned());
        if machine.vcpu_source != "thread-names" || !machine.memory_backends.is_empty() {
            table
                .get_or_insert_with(|| {
                    let headings = [">pid", "name", "vCPUs by", ">vCPUs", ">sockets", ">pluggable", "memory backends"];
                    style.new_table(&headings)
                })
                .add_row(machine_row(pid, &name, machine));
        }
        let mut about = |what: &str| notes.push(format!("{} (pid {pid}): {what}.", cut_end(&name, NAME_COLUMNS)));
        // libvirt's state has what its monitor would say.
        if machine.vcpu_source != "libvirt" {
            machine.monitor_failures.iter().for_each(|why| {
                about(&format!("QEMU's monitor: {}", cut_end(&escape_unprintable(why), MAX_REASON_COLUMNS)));
            });
        }
        machine.conflicts.iter().take(MAX_CONFLICTS).for_each(|conflict| about(&escape_unprintable(conflict)));
        if let Some(more @ 1..) = machine.conflicts.len().checked_sub(MAX_CONFLICTS) {
            about(&format!("{more} more disagreements are in --json"));
        }
    }
    if table.is_none() && notes.is_empty() {
        return String::new();
    }
    let mut text = style.format_heading("Virtual machines by QEMU's monitor and libvirt");
    text.push_str(&table.map(|table| style.render_table(&table)).unwrap_or_default());
    notes.iter().for_each(|note| text.push_str(&style.format_paragraph(note, 0)));
    text
}

/// The longest reason of a monitor that is shown, which may have the program's own words.
const MAX_REASON_COLUMNS: usize = 200;

fn machine_row(pid: u32, name: &str, machine: &MachineReport) -> Vec<Cell> {
    let sockets: std::collections::BTreeSet<u32> = machine.vcpus.iter().filter_map(|vcpu| vcpu.socket).collect();
    let backends: Vec<String> = machine.memory_backends.iter().map(describe_backend).collect();
    let optional = |count: Option<u64>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
    vec![
        right(pid),
        Cell::new(cut_end(name, NAME_COLUMNS)),
        Cell::new(match machine.vcpu_source {
            "monitor" => "monitor",
            "libvirt" => "libvirt's state",
            _ => "thread names",
        }),
        right(optional((machine.vcpu_source != "thread-names").then_some(machine.vcpus.len() as u64))),
        right(optional((!sockets.is_empty()).then_some(sockets.len() as u64))),
        right(optional(machine.pluggable_vcpus)),
        Cell::new(if backends.is_empty() { "?".to_owned() } else { backends.join(", ") }),
    ]
}

/// `ram0 4.0 GiB bind 0, preallocated, merge off`.
fn describe_backend(backend: &MemoryBackendReport) -> String {
    let id = backend.id.as_deref().map_or_else(|| "?".into(), escape_unprintable);
    let mut text = format!("{} {}", cut_end(&id, NAME_COLUMNS), format_bytes(backend.bytes));
    let policy = Some(backend.policy.as_str()).filter(|policy| *policy != "default");
    let properties = [
        policy,
        backend.preallocated.then_some("preallocated"),
        (!backend.mergeable).then_some("merge off"),
        (backend.shared == Some(true)).then_some("shared"),
    ];
    let properties: Vec<&str> = properties.into_iter().flatten().collect();
    if !properties.is_empty() {
        let _ = write!(text, " ({})", properties.join(", "));
    }
    text
}

fn render_merged(report: &NumaMapReport, shown: &[ProcessPlacementReport], style: TextStyle) -> String {
    if report.merged_frames.is_empty() {
        return String::new();
    }
    let mut text = style.format_heading("Frames merged by KSM");
    let headings: Vec<String> = report.nodes.iter().map(|node| format!(">pages of node {}", node.node)).collect();
    let mut all = vec![">node", ">frames", ">shared", ">read from others"];
    let has_columns = report.nodes.len() <= MAX_NODE_COLUMNS;
    all.extend(headings.iter().filter(|_| has_columns).map(String::as_str));
    let mut table = style.new_table(&all);
    for merged in &report.merged_frames {
        let mut row = vec![
            merged.node.to_string(),
            format_number(merged.frames),
            format_number(merged.shared_frames),
            format_number(merged.remote_frames),
        ];
        if has_columns {
            let pages =
                |id: u32| merged.readers.iter().find(|reader| reader.node == id).map_or(0, |reader| reader.pages);
            row.extend(report.nodes.iter().map(|node| format_number(pages(node.node))));
        }
        table.add_row(row);
    }
    text.push_str(&style.render_table(&table));
    text.push_str(&style.format_paragraph(
        "Shared frames are mapped by several of these processes: moving one of them moves the frame for all.",
        0,
    ));
    text.push_str(&render_frame_owners(report, shown, style));
    text
}

/// Processes that are named as sharing frames with one process.
const MAX_SHARING_PROCESSES: usize = 3;

/// Which of the shown processes read merged frames, and with which they share them.
fn render_frame_owners(report: &NumaMapReport, shown: &[ProcessPlacementReport], style: TextStyle) -> String {
    let sharing = &report.frame_sharing;
    let name = |pid: u32| {
        let process = report.processes.iter().find(|process| process.process.pid == pid);
        let label =
            process.map_or_else(String::new, |process| escape_unprintable(&process.process.label()).into_owned());
        cut_end(&label, NAME_COLUMNS)
    };
    let has_columns = report.nodes.len() <= MAX_NODE_COLUMNS;
    let node_headings: Vec<String> = report.nodes.iter().map(|node| format!(">on node {}", node.node)).collect();
    let mut headings = vec![">pid", "name", ">frames"];
    headings.extend(node_headings.iter().filter(|_| has_columns).map(String::as_str));
    headings.extend([">shared", "shared with (frames)"]);
    let mut table = style.new_table(&headings);
    for owner in sharing.owners.iter().filter(|owner| shown.iter().any(|process| process.process.pid == owner.pid)) {
        let mut row = vec![right(owner.pid), Cell::new(name(owner.pid)), right(format_number(owner.frames))];
        if has_columns {
            let frames = |id: u32| owner.nodes.iter().find(|node| node.node == id).map_or(0, |node| node.frames);
            row.extend(report.nodes.iter().map(|node| right(format_number(frames(node.node)))));
        }
        row.push(right(format_number(owner.shared_frames)));
        let named = owner.shared_with.iter().take(MAX_SHARING_PROCESSES);
        let mut partners: Vec<String> =
            named.map(|other| format!("{} {} ({})", other.pid, name(other.pid), format_number(other.frames))).collect();
        let more = owner.shared_with.len().saturating_sub(MAX_SHARING_PROCESSES) as u64 + owner.further_processes;
        if more > 0 {
            partners.push(format!("{more} more"));
        }
        row.push(Cell::new(if partners.is_empty() { "none".to_owned() } else { partners.join(", ") }));
        table.add_row(row);
    }
    let mut text = style.format_heading("Processes that read merged frames");
    text.push_str(&style.render_table(&table));
    if sharing.sampled_frames < sharing.shared_frames {
        let (sampled, all) = (format_number(sharing.sampled_frames), format_number(sharing.shared_frames));
        let note = format!("Frames shared with each process are estimated from {sampled} of {all} shared frames.");
        text.push_str(&style.format_paragraph(&note, 0));
    }
    text
}
