//! Writes scenarios as TOML. [`crate::scenario::parse_scenario`] reads the same scenario back.

use crate::decide::cost::{CostModel, Operation};
use crate::decide::counters::PAGE_BYTES;
use crate::decide::ksmd::KsmSettings;
use crate::decide::scenario::{
    Arrival, ContentKind, DEFAULT_VCPUS, HostSpec, MachineClass, Scenario, SharedSet, Template,
};
use crate::scenario::DEFAULT_RUN_PAGES;
use std::fmt::{Display, Write};
use std::time::Duration;

/// Units of memory, the largest first.
const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// The TOML text of a scenario. Each of `comments` is a paragraph at its head.
#[must_use]
pub fn write_scenario(scenario: &Scenario, comments: &[String]) -> String {
    let mut text = Text(String::new());
    comments.iter().for_each(|comment| text.comment(comment));
    text.key("description", quote(&scenario.description));
    text.key("duration", time(scenario.duration_ms));
    text.key("seed", scenario.seed);
    text.key("tick", time(scenario.tick_ms));
    text.key("sample", time(scenario.sample_ms));
    text.host(&scenario.host);
    text.costs(&scenario.costs);
    scenario.templates.iter().for_each(|template| text.template(template));
    scenario.shared.iter().for_each(|set| text.shared_set(set, &scenario.templates));
    scenario.classes.iter().for_each(|class| text.class(class, &scenario.templates));
    text.0
}

/// Characters of a line of a comment at most.
const COMMENT_WIDTH: usize = 110;

/// Text that is written line by line.
struct Text(String);

impl Text {
    fn line(&mut self, line: impl Display) {
        writeln!(self.0, "{line}").expect("a string can be written");
    }

    /// A comment, as lines of [`COMMENT_WIDTH`] characters at most.
    fn comment(&mut self, comment: &str) {
        let mut line = "#".to_owned();
        for word in comment.split_whitespace() {
            if line.len() + 1 + word.len() > COMMENT_WIDTH && line.len() > 1 {
                self.line(&line);
                line.truncate(1);
            }
            line.push(' ');
            line.push_str(word);
        }
        self.line(line);
    }

    fn heading(&mut self, name: &str) {
        self.line(format_args!("\n{name}"));
    }

    fn key(&mut self, key: &str, value: impl Display) {
        self.line(format_args!("{key} = {value}"));
    }

    /// A share, unless it is the default.
    fn share(&mut self, key: &str, share: f64) {
        if share > 0.0 {
            self.key(key, format_args!("{share:?}"));
        }
    }

    fn host(&mut self, host: &HostSpec) {
        self.heading("[host]");
        self.key("memory", memory(host.memory_pages));
        self.key("used", memory(host.used_pages));
        self.key("cpus", host.cpus);
        self.key("nodes", host.nodes);
        if !host.distances.is_empty() {
            self.key("distances", format_args!("{:?}", host.distances));
        }
        let kernel = host.kernel;
        self.key("kernel", format_args!("\"{}.{}.{}\"", kernel.major, kernel.minor, kernel.stable));
        self.key("hz", host.hz);
        if host.ksmd_cpu_ms > 0 {
            self.key("ksmd_cpu", time(host.ksmd_cpu_ms));
        }
        let KsmSettings {
            pages_to_scan,
            sleep_millisecs,
            max_page_sharing,
            stable_node_chains_prune_millisecs,
            use_zero_pages,
            smart_scan,
            merge_across_nodes,
            advisor: _,
        } = host.ksm;
        self.heading("[host.ksm]");
        self.key("pages_to_scan", pages_to_scan);
        self.key("sleep_millisecs", sleep_millisecs);
        self.key("max_page_sharing", max_page_sharing);
        self.key("stable_node_chains_prune_millisecs", stable_node_chains_prune_millisecs);
        self.key("use_zero_pages", use_zero_pages);
        self.key("smart_scan", smart_scan);
        self.key("merge_across_nodes", merge_across_nodes);
    }

    fn costs(&mut self, costs: &CostModel) {
        self.heading("[costs]");
        let keys = [
            ("visit_ns", Operation::Visit),
            ("skip_ns", Operation::Skip),
            ("checksum_ns", Operation::Checksum),
            ("stable_comparison_ns", Operation::StableComparison),
            ("unstable_comparison_ns", Operation::UnstableComparison),
            ("merge_ns", Operation::Merge),
            ("split_ns", Operation::Split),
            ("allocation_ns", Operation::Allocation),
            ("batch_ns", Operation::Batch),
            ("first_comparison_ns", Operation::FirstComparison),
        ];
        for (key, operation) in keys {
            self.key(key, format_args!("{:?}", costs.nanoseconds(operation)));
        }
    }

    fn template(&mut self, template: &Template) {
        self.heading("[[template]]");
        self.key("name", quote(&template.name));
        self.key("size", memory(template.pages));
        if template.vcpus != DEFAULT_VCPUS {
            self.key("vcpus", template.vcpus);
        }
        if template.cpu_use > 0.0 {
            self.key("cpu_use", template.cpu_use);
        }
        for kind in ContentKind::ALL {
            self.share(kind_name(kind), template.share(kind));
        }
        self.run_pages(template.run_pages);
        self.share("huge_pages", template.huge_pages);
        if let Some(growth) = template.growth {
            let bytes = growth.pages_per_minute * PAGE_BYTES as f64;
            self.key("growth", format_args!("{{ per_minute = \"{bytes} B\", common = {:?} }}", growth.common));
        }
        if !template.writes.is_empty() {
            self.line("writes = [");
            for writes in &template.writes {
                let (name, share, pages) = (kind_name(writes.content), writes.share, writes.pages_per_second);
                self.line(format_args!(
                    "  {{ content = \"{name}\", share = {share:?}, pages_per_second = {pages:?} }},"
                ));
            }
            self.line("]");
        }
    }

    fn run_pages(&mut self, (least, most): (u64, u64)) {
        if (least, most) != DEFAULT_RUN_PAGES {
            self.key("run_pages", format_args!("[{least}, {most}]"));
        }
    }

    fn shared_set(&mut self, set: &SharedSet, templates: &[Template]) {
        self.heading("[[shared]]");
        let names: Vec<String> = set.templates.iter().map(|&template| quote(&templates[template].name)).collect();
        self.key("templates", format_args!("[{}]", names.join(", ")));
        self.key("size", memory(set.pages));
        if set.copies != 1 {
            self.key("copies", set.copies);
        }
        if set.is_zero {
            self.key("zero", true);
        }
        self.run_pages(set.run_pages);
    }

    fn class(&mut self, class: &MachineClass, templates: &[Template]) {
        self.heading("[[machines]]");
        self.key("name", quote(&class.name));
        self.key("template", quote(&templates[class.template].name));
        self.key("count", class.count);
        if !class.tenant.is_empty() {
            self.key("tenant", quote(&class.tenant));
        }
        if let Some(node) = class.node {
            self.key("node", node);
        }
        if let Some(node) = class.vcpu_node {
            self.key("vcpu_node", node);
        }
        if class.start_ms > 0 {
            self.key("start", time(class.start_ms));
        }
        match class.arrival {
            Arrival::AtOnce => {}
            Arrival::Waves { machines, interval_ms } => {
                self.key("wave", machines);
                self.key("every", time(interval_ms));
            }
            Arrival::Poisson { machines_per_hour } => self.key("per_hour", format_args!("{machines_per_hour:?}")),
        }
        if let Some(lifetime) = class.lifetime_ms {
            self.key("lifetime", time(lifetime));
        }
    }
}

fn kind_name(kind: ContentKind) -> &'static str {
    match kind {
        ContentKind::Zero => "zero",
        ContentKind::Common => "common",
        ContentKind::Tenant => "tenant",
        ContentKind::Unique => "unique",
    }
}

/// A string of TOML.
fn quote(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// Pages as bytes, in the largest unit of which they are a multiple.
fn memory(pages: u64) -> String {
    let bytes = pages * PAGE_BYTES.cast_unsigned();
    let (unit, size) = UNITS.into_iter().find(|(_, size)| bytes.is_multiple_of(*size)).unwrap_or(("B", 1));
    format!("\"{} {unit}\"", bytes / size)
}

fn time(milliseconds: u64) -> String {
    format!("\"{}\"", humantime::format_duration(Duration::from_millis(milliseconds)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{SHIPPED, parse_scenario};

    fn check_round_trip(text: &str) {
        let scenario = parse_scenario(text).unwrap();
        let written = write_scenario(&scenario, &["a comment".to_owned(), "long ".repeat(40)]);
        assert!(written.starts_with("# a comment\n# long") && written.lines().all(|line| !line.starts_with("long")));
        assert_eq!(parse_scenario(&written).unwrap(), scenario, "{written}");
    }

    #[test]
    fn shipped_scenarios_are_read_back() {
        SHIPPED.iter().for_each(|(_, text)| check_round_trip(text));
        check_round_trip(include_str!("../../../fixtures/sim/small-host.toml"));
    }

    #[test]
    fn every_key_is_read_back() {
        let document = include_str!("../../../docs/simulator.md");
        let text = document.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        assert!(text.contains("[[shared]]"), "the document shows all keys");
        check_round_trip(text);
        check_round_trip(&text.replace("\"web\"", "\"a \\\"quoted\\\"\\nname\""));
    }
}
