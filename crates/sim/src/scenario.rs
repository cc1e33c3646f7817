//! Scenarios as TOML. Unknown keys are errors, and an error names the line and what to write instead.

use crate::decide::cost::{CostModel, Operation};
use crate::decide::ksmd::KsmSettings;
use crate::decide::rules::KernelVersion;
use crate::decide::scenario::{
    Arrival, ContentKind, DEFAULT_HZ, DEFAULT_VCPUS, HostSpec, LOCAL_DISTANCE, MAX_DISTANCE, MachineClass,
    PageCacheGrowth, Scenario, SharedSet, Template, WriteClass, default_costs, invalid_distance,
};
use serde::Deserialize;
use std::fmt::Display;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use thiserror::Error;
use toml::Spanned;

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;
/// Machines of a scenario at most.
pub const MAX_MACHINES: u32 = 1_000_000;
/// vCPUs of a machine at most.
pub const MAX_VCPUS: u32 = 512;
/// Pages of a run at most.
pub const MAX_RUN_PAGES: u64 = 65_536;
/// Pages of a run where a scenario does not say.
pub const DEFAULT_RUN_PAGES: (u64, u64) = (1, 512);
/// Pages with a content of a shared set at most.
pub const MAX_COPIES: u32 = u32::MAX;

/// The most pages of a host, a template or a shared set: 1 PiB. Machines begin far above page 0, and their addresses end at
/// 4 PiB.
pub const MAX_PAGES: u64 = 1 << 38;

/// The most pages of a shared set, with all copies: 64 TiB.
const MAX_SHARED_PAGES: u64 = 1 << 34;
/// Rounding of shares that are added.
const SHARE_TOLERANCE: f64 = 1e-9;

/// The scenarios that ship with the program: name and text.
pub const SHIPPED: [(&str, &str); 8] = [
    ("lab-48-slow", include_str!("../scenarios/lab-48-slow.toml")),
    ("lab-48", include_str!("../scenarios/lab-48.toml")),
    ("htc-4x8", include_str!("../scenarios/htc-4x8.toml")),
    ("oltp-144", include_str!("../scenarios/oltp-144.toml")),
    ("lab-cloud", include_str!("../scenarios/lab-cloud.toml")),
    ("htc-64", include_str!("../scenarios/htc-64.toml")),
    ("giant-700", include_str!("../scenarios/giant-700.toml")),
    ("containers-2000", include_str!("../scenarios/containers-2000.toml")),
];

/// The text of the shipped scenario of this name.
#[must_use]
pub fn shipped_text(name: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(shipped, _)| *shipped == name).map(|(_, text)| *text)
}

/// Why there is no scenario.
#[derive(Debug, Error)]
pub enum ScenarioError {
    /// The text is not a scenario.
    #[error("not a scenario: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A value is refused.
    #[error("line {line}: {problem}: {remedy}")]
    Value {
        /// Its line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
        /// What to write instead.
        remedy: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScenarioText {
    description: String,
    duration: Spanned<String>,
    #[serde(default = "one")]
    seed: u64,
    #[serde(default = "default_tick")]
    tick: Spanned<String>,
    #[serde(default = "default_sample")]
    sample: Spanned<String>,
    host: HostText,
    #[serde(default)]
    costs: CostsText,
    template: Vec<TemplateText>,
    #[serde(default)]
    shared: Vec<SharedText>,
    machines: Vec<ClassText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostText {
    memory: Spanned<String>,
    used: Option<Spanned<String>>,
    cpus: Spanned<u32>,
    nodes: Option<Spanned<u32>>,
    distances: Option<Spanned<Vec<Vec<u32>>>>,
    kernel: Spanned<String>,
    hz: Option<Spanned<u32>>,
    ksmd_cpu: Option<Spanned<String>>,
    #[serde(default)]
    ksm: KsmText,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct KsmText {
    pages_to_scan: Option<Spanned<u64>>,
    sleep_millisecs: Option<Spanned<u64>>,
    max_page_sharing: Option<Spanned<u64>>,
    stable_node_chains_prune_millisecs: Option<Spanned<u64>>,
    use_zero_pages: Option<bool>,
    smart_scan: Option<bool>,
    merge_across_nodes: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CostsText {
    visit_ns: Option<Spanned<f64>>,
    skip_ns: Option<Spanned<f64>>,
    checksum_ns: Option<Spanned<f64>>,
    stable_comparison_ns: Option<Spanned<f64>>,
    unstable_comparison_ns: Option<Spanned<f64>>,
    merge_ns: Option<Spanned<f64>>,
    split_ns: Option<Spanned<f64>>,
    allocation_ns: Option<Spanned<f64>>,
    batch_ns: Option<Spanned<f64>>,
    first_comparison_ns: Option<Spanned<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TemplateText {
    name: Spanned<String>,
    size: Spanned<String>,
    vcpus: Option<Spanned<u32>>,
    cpu_use: Option<Spanned<f64>>,
    zero: Option<Spanned<f64>>,
    common: Option<Spanned<f64>>,
    tenant: Option<Spanned<f64>>,
    unique: Option<Spanned<f64>>,
    run_pages: Option<Spanned<(u64, u64)>>,
    huge_pages: Option<Spanned<f64>>,
    growth: Option<GrowthText>,
    #[serde(default)]
    writes: Vec<WritesText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GrowthText {
    per_minute: Spanned<String>,
    common: Spanned<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WritesText {
    content: ContentText,
    share: Spanned<f64>,
    pages_per_second: Spanned<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SharedText {
    templates: Vec<Spanned<String>>,
    size: Spanned<String>,
    copies: Option<Spanned<u32>>,
    #[serde(default)]
    zero: bool,
    run_pages: Option<Spanned<(u64, u64)>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ContentText {
    Zero,
    Common,
    Tenant,
    Unique,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassText {
    name: Spanned<String>,
    template: Spanned<String>,
    #[serde(default = "one_spanned")]
    count: Spanned<u32>,
    tenant: Option<String>,
    node: Option<Spanned<u32>>,
    vcpu_node: Option<Spanned<u32>>,
    start: Option<Spanned<String>>,
    wave: Option<Spanned<u32>>,
    every: Option<Spanned<String>>,
    per_hour: Option<Spanned<f64>>,
    lifetime: Option<Spanned<String>>,
}

fn one() -> u64 {
    1
}

fn one_spanned() -> Spanned<u32> {
    Spanned::new(0..0, 1)
}

fn default_tick() -> Spanned<String> {
    Spanned::new(0..0, "1s".to_owned())
}

fn default_sample() -> Spanned<String> {
    Spanned::new(0..0, "1min".to_owned())
}

/// Reads a scenario.
///
/// # Errors
/// Unknown or missing keys, and values out of range.
pub fn parse_scenario(text: &str) -> Result<Scenario, ScenarioError> {
    let written: ScenarioText = toml::from_str(text)?;
    let checker = Checker { text };
    let host = checker.host(&written.host)?;
    let mut templates = Vec::new();
    for template in &written.template {
        let name = checker.new_name(&template.name, templates.iter().map(|known: &Template| &known.name))?;
        templates.push(checker.template(name, template)?);
    }
    let shared = written.shared.iter().map(|set| checker.shared_set(set, &templates)).collect::<Result<_, _>>()?;
    let mut classes = Vec::new();
    for class in &written.machines {
        let name = checker.new_name(&class.name, classes.iter().map(|known: &MachineClass| &known.name))?;
        classes.push(checker.class(name, class, &templates, host.nodes)?);
    }
    Ok(Scenario {
        description: written.description,
        duration_ms: checker.milliseconds("duration", &written.duration, 1_000)?,
        seed: written.seed,
        tick_ms: checker.milliseconds("tick", &written.tick, 10)?,
        sample_ms: checker.milliseconds("sample", &written.sample, 100)?,
        host,
        costs: checker.costs(&written.costs)?,
        templates,
        shared,
        classes,
        divisor: NonZeroU32::MIN,
        knows_content_order: false,
    })
}

/// Checks values, and knows their lines.
struct Checker<'a> {
    text: &'a str,
}

impl Checker<'_> {
    fn refuse<T>(&self, value: &Spanned<T>, problem: impl Into<String>, remedy: impl Into<String>) -> ScenarioError {
        let before = self.text.get(..value.span().start).unwrap_or(self.text);
        let line = 1 + before.matches('\n').count();
        ScenarioError::Value { line, problem: problem.into(), remedy: remedy.into() }
    }

    fn range<T: Copy + PartialOrd + Display>(
        &self,
        key: &str,
        value: &Spanned<T>,
        permitted: RangeInclusive<T>,
    ) -> Result<T, ScenarioError> {
        let found = *value.get_ref();
        if permitted.contains(&found) {
            return Ok(found);
        }
        let remedy = format!("give {} to {}", permitted.start(), permitted.end());
        Err(self.refuse(value, format!("{key} is {found}"), remedy))
    }

    /// A value that may be missing.
    fn optional<T: Copy + PartialOrd + Display>(
        &self,
        key: &str,
        value: Option<&Spanned<T>>,
        otherwise: T,
        permitted: RangeInclusive<T>,
    ) -> Result<T, ScenarioError> {
        value.map_or(Ok(otherwise), |value| self.range(key, value, permitted))
    }

    fn share(&self, key: &str, value: Option<&Spanned<f64>>) -> Result<f64, ScenarioError> {
        self.optional(key, value, 0.0, 0.0..=1.0)
    }

    fn bytes(&self, key: &str, value: &Spanned<String>) -> Result<u64, ScenarioError> {
        let text = value.get_ref();
        match text.parse::<bytesize::ByteSize>() {
            Ok(size) => Ok(size.as_u64()),
            Err(_) => Err(self.refuse(value, format!("{key} is \"{text}\""), "give an amount such as \"4 GiB\"")),
        }
    }

    /// An amount of memory as pages, at least `least`.
    fn pages(&self, key: &str, value: &Spanned<String>, least: u64) -> Result<u64, ScenarioError> {
        let pages = self.bytes(key, value)? / PAGE_BYTES;
        if (least..=MAX_PAGES).contains(&pages) {
            return Ok(pages);
        }
        let remedy = format!("give {} KiB at least, and 1 PiB at most", least * PAGE_BYTES / 1024);
        Err(self.refuse(value, format!("{key} is \"{}\"", value.get_ref()), remedy))
    }

    fn milliseconds(&self, key: &str, value: &Spanned<String>, least: u64) -> Result<u64, ScenarioError> {
        let text = value.get_ref();
        let found = humantime::parse_duration(text).ok().and_then(|time| u64::try_from(time.as_millis()).ok());
        match found {
            Some(found) if (least..=MAX_MILLISECONDS).contains(&found) => Ok(found),
            _ => {
                let remedy = format!("give a time such as \"2h 30min\", {least} ms at least and a year at most");
                Err(self.refuse(value, format!("{key} is \"{text}\""), remedy))
            }
        }
    }

    fn new_name<'n>(
        &self,
        name: &Spanned<String>,
        mut known: impl Iterator<Item = &'n String>,
    ) -> Result<String, ScenarioError> {
        let text = name.get_ref();
        if text.is_empty() || known.any(|known| known == text) {
            return Err(self.refuse(name, format!("the name \"{text}\" is empty or used before"), "give another name"));
        }
        Ok(text.clone())
    }

    fn host(&self, host: &HostText) -> Result<HostSpec, ScenarioError> {
        let memory_pages = self.pages("memory", &host.memory, 16_384)?;
        let used_pages = host.used.as_ref().map_or(Ok(0), |used| self.pages("used", used, 0))?;
        if let Some(used) = host.used.as_ref().filter(|_| used_pages >= memory_pages) {
            return Err(self.refuse(used, "the host uses all of its memory", "give less than memory"));
        }
        let text = host.kernel.get_ref();
        let kernel = KernelVersion::parse(text).ok_or_else(|| {
            self.refuse(&host.kernel, format!("kernel is \"{text}\""), "give a version such as \"6.12.54\"")
        })?;
        let nodes = u8::try_from(self.optional("nodes", host.nodes.as_ref(), 1, 1..=64)?).unwrap_or(u8::MAX);
        Ok(HostSpec {
            memory_pages,
            used_pages,
            cpus: self.range("cpus", &host.cpus, 1..=8192)?,
            nodes,
            distances: host.distances.as_ref().map_or(Ok(Vec::new()), |written| self.distances(written, nodes))?,
            kernel,
            hz: self.optional("hz", host.hz.as_ref(), DEFAULT_HZ, 24..=10_000)?,
            ksmd_cpu_ms: host.ksmd_cpu.as_ref().map_or(Ok(0), |time| self.milliseconds("ksmd_cpu", time, 0))?,
            ksm: self.ksm(&host.ksm)?,
        })
    }

    /// The distances of all nodes to all nodes.
    fn distances(&self, written: &Spanned<Vec<Vec<u32>>>, nodes: u8) -> Result<Vec<Vec<u8>>, ScenarioError> {
        const MATRIX_REMEDY: &str =
            "give a row for each node with its distance to each node, such as [[10, 21], [21, 10]]";
        let rows = written.get_ref();
        if rows.len() != usize::from(nodes) {
            return Err(self.refuse(
                written,
                format!("distances has a length of {} for {nodes} nodes", rows.len()),
                MATRIX_REMEDY,
            ));
        }
        if let Some((node, row)) = rows.iter().enumerate().find(|(_, row)| row.len() != rows.len()) {
            let problem = format!("row {node} of distances has a length of {} for {nodes} nodes", row.len());
            return Err(self.refuse(written, problem, MATRIX_REMEDY));
        }
        let narrow = |&distance: &u32| u8::try_from(distance).unwrap_or(u8::MAX);
        let distances: Vec<Vec<u8>> = rows.iter().map(|row| row.iter().map(narrow).collect()).collect();
        let Some((from, to)) = invalid_distance(&distances) else { return Ok(distances) };
        let remedy = match from == to {
            true => format!("give {LOCAL_DISTANCE} for a node itself"),
            false => format!("give {LOCAL_DISTANCE} to {MAX_DISTANCE}"),
        };
        Err(self.refuse(written, format!("the distance of node {from} to node {to} is {}", rows[from][to]), remedy))
    }

    fn ksm(&self, ksm: &KsmText) -> Result<KsmSettings, ScenarioError> {
        let otherwise = KsmSettings::default();
        let unsigned_int = u64::from(u32::MAX);
        let number = |key: &str, value: &Option<Spanned<u64>>, otherwise: u64, least: u64| {
            self.optional(key, value.as_ref(), otherwise, least..=unsigned_int)
        };
        let sharing = number("max_page_sharing", &ksm.max_page_sharing, otherwise.max_page_sharing as u64, 2)?;
        Ok(KsmSettings {
            pages_to_scan: number("pages_to_scan", &ksm.pages_to_scan, otherwise.pages_to_scan, 1)?,
            sleep_millisecs: number("sleep_millisecs", &ksm.sleep_millisecs, otherwise.sleep_millisecs, 0)?,
            max_page_sharing: usize::try_from(sharing).unwrap_or(usize::MAX),
            stable_node_chains_prune_millisecs: number(
                "stable_node_chains_prune_millisecs",
                &ksm.stable_node_chains_prune_millisecs,
                otherwise.stable_node_chains_prune_millisecs,
                0,
            )?,
            use_zero_pages: ksm.use_zero_pages.unwrap_or(otherwise.use_zero_pages),
            smart_scan: ksm.smart_scan.unwrap_or(otherwise.smart_scan),
            merge_across_nodes: ksm.merge_across_nodes.unwrap_or(otherwise.merge_across_nodes),
            advisor: None,
        })
    }

    fn costs(&self, costs: &CostsText) -> Result<CostModel, ScenarioError> {
        let given = [
            ("visit_ns", Operation::Visit, &costs.visit_ns),
            ("skip_ns", Operation::Skip, &costs.skip_ns),
            ("checksum_ns", Operation::Checksum, &costs.checksum_ns),
            ("stable_comparison_ns", Operation::StableComparison, &costs.stable_comparison_ns),
            ("unstable_comparison_ns", Operation::UnstableComparison, &costs.unstable_comparison_ns),
            ("merge_ns", Operation::Merge, &costs.merge_ns),
            ("split_ns", Operation::Split, &costs.split_ns),
            ("allocation_ns", Operation::Allocation, &costs.allocation_ns),
            ("batch_ns", Operation::Batch, &costs.batch_ns),
            ("first_comparison_ns", Operation::FirstComparison, &costs.first_comparison_ns),
        ];
        let otherwise = default_costs();
        let mut found = Vec::new();
        for (key, operation, value) in given {
            found.push((
                operation,
                self.optional(key, value.as_ref(), otherwise.nanoseconds(operation), 0.0..=MAX_COST_NS)?,
            ));
        }
        Ok(CostModel::new(found))
    }

    fn run_pages(&self, text: Option<&Spanned<(u64, u64)>>) -> Result<(u64, u64), ScenarioError> {
        let Some(written) = text else { return Ok(DEFAULT_RUN_PAGES) };
        let (least, most) = *written.get_ref();
        if 1 <= least && least <= most && most <= MAX_RUN_PAGES {
            return Ok((least, most));
        }
        let remedy = format!("give [least, most], 1 to {MAX_RUN_PAGES}");
        Err(self.refuse(written, format!("run_pages is [{least}, {most}]"), remedy))
    }

    fn shared_set(&self, text: &SharedText, templates: &[Template]) -> Result<SharedSet, ScenarioError> {
        let mut numbers = Vec::new();
        for name in &text.templates {
            let number = self.template_number(name, templates)?;
            if numbers.contains(&number) {
                return Err(self.refuse(name, format!("\"{}\" is given twice", name.get_ref()), "give it once"));
            }
            numbers.push(number);
        }
        if numbers.is_empty() {
            return Err(self.refuse(&text.size, "the shared contents are in no template", "give templates"));
        }
        let pages = self.pages("size", &text.size, 1)?;
        let copies = self.optional("copies", text.copies.as_ref(), 1, 1..=MAX_COPIES)?;
        if pages.saturating_mul(u64::from(copies)) > MAX_SHARED_PAGES {
            let what = format!("{copies} copies of {} are more than 64 TiB", text.size.get_ref());
            return Err(self.refuse(&text.size, what, "give fewer, or a smaller size"));
        }
        Ok(SharedSet {
            templates: numbers,
            pages,
            copies,
            is_zero: text.zero,
            run_pages: self.run_pages(text.run_pages.as_ref())?,
        })
    }

    fn template_number(&self, wanted: &Spanned<String>, templates: &[Template]) -> Result<usize, ScenarioError> {
        templates.iter().position(|template| template.name == *wanted.get_ref()).ok_or_else(|| {
            let names: Vec<&str> = templates.iter().map(|template| template.name.as_str()).collect();
            let remedy = format!("give one of the templates: {}", names.join(", "));
            self.refuse(wanted, format!("there is no template \"{}\"", wanted.get_ref()), remedy)
        })
    }

    fn template(&self, name: String, text: &TemplateText) -> Result<Template, ScenarioError> {
        let run_pages = self.run_pages(text.run_pages.as_ref())?;
        let growth = text.growth.as_ref().map(|growth| self.growth(growth)).transpose()?;
        let vcpus = self.optional("vcpus", text.vcpus.as_ref(), DEFAULT_VCPUS, 1..=MAX_VCPUS)?;
        let mut template = Template {
            name,
            pages: self.pages("size", &text.size, 1)?,
            vcpus,
            cpu_use: self.optional("cpu_use", text.cpu_use.as_ref(), 0.0, 0.0..=f64::from(vcpus))?,
            zero: self.share("zero", text.zero.as_ref())?,
            common: self.share("common", text.common.as_ref())?,
            tenant: self.share("tenant", text.tenant.as_ref())?,
            unique: self.share("unique", text.unique.as_ref())?,
            run_pages,
            huge_pages: self.share("huge_pages", text.huge_pages.as_ref())?,
            growth,
            writes: Vec::new(),
        };
        let touched: f64 = ContentKind::ALL.iter().map(|&kind| template.share(kind)).sum();
        if touched > 1.0 + SHARE_TOLERANCE {
            let problem =
                format!("zero, common, tenant and unique of {} are {touched:.3} of its memory", template.name);
            return Err(self.refuse(&text.name, problem, "give shares of 1 together at most"));
        }
        for writes in &text.writes {
            template.writes.push(self.writes(writes, &template)?);
        }
        Ok(template)
    }

    fn growth(&self, growth: &GrowthText) -> Result<PageCacheGrowth, ScenarioError> {
        let bytes = self.bytes("per_minute", &growth.per_minute)?;
        let common = self.range("common", &growth.common, 0.0..=1.0)?;
        Ok(PageCacheGrowth { pages_per_minute: bytes as f64 / PAGE_BYTES as f64, common })
    }

    fn writes(&self, text: &WritesText, template: &Template) -> Result<WriteClass, ScenarioError> {
        let content = match text.content {
            ContentText::Zero => ContentKind::Zero,
            ContentText::Common => ContentKind::Common,
            ContentText::Tenant => ContentKind::Tenant,
            ContentText::Unique => ContentKind::Unique,
        };
        let share = self.range("share", &text.share, 0.0..=1.0)?;
        let earlier = template.writes.iter().filter(|writes| writes.content == content).map(|writes| writes.share);
        let (together, present) = (share + earlier.sum::<f64>(), template.share(content));
        if together > present + SHARE_TOLERANCE {
            let problem = format!("{together:.3} of the memory of {} are written", template.name);
            let remedy = format!("give {present:.3} at most, which has these contents");
            return Err(self.refuse(&text.share, problem, remedy));
        }
        let pages_per_second = self.range("pages_per_second", &text.pages_per_second, 0.0..=1e9)?;
        Ok(WriteClass { content, share, pages_per_second })
    }

    fn class(
        &self,
        name: String,
        text: &ClassText,
        templates: &[Template],
        nodes: u8,
    ) -> Result<MachineClass, ScenarioError> {
        let template = self.template_number(&text.template, templates)?;
        let start = text.start.as_ref().map_or(Ok(0), |start| self.milliseconds("start", start, 0))?;
        let lifetime = text.lifetime.as_ref().map(|time| self.milliseconds("lifetime", time, 1)).transpose()?;
        Ok(MachineClass {
            name,
            template,
            count: self.range("count", &text.count, 1..=MAX_MACHINES)?,
            tenant: text.tenant.clone().unwrap_or_default(),
            node: self.node_number("node", text.node.as_ref(), nodes)?,
            vcpu_node: self.node_number("vcpu_node", text.vcpu_node.as_ref(), nodes)?,
            start_ms: start,
            arrival: self.arrival(text)?,
            lifetime_ms: lifetime,
            layouts: Vec::new(),
        })
    }

    fn node_number(&self, key: &str, node: Option<&Spanned<u32>>, nodes: u8) -> Result<Option<u8>, ScenarioError> {
        let number = node.map(|node| self.range(key, node, 0..=u32::from(nodes) - 1)).transpose()?;
        Ok(number.and_then(|number| u8::try_from(number).ok()))
    }

    fn arrival(&self, text: &ClassText) -> Result<Arrival, ScenarioError> {
        let whole = "give wave and every for waves, only per_hour for single arrivals, or none of them";
        match (&text.wave, &text.every, &text.per_hour) {
            (None, None, None) => Ok(Arrival::AtOnce),
            (Some(wave), Some(every), None) => Ok(Arrival::Waves {
                machines: self.range("wave", wave, 1..=MAX_MACHINES)?,
                interval_ms: self.milliseconds("every", every, 1)?,
            }),
            (None, None, Some(rate)) => {
                Ok(Arrival::Poisson { machines_per_hour: self.range("per_hour", rate, 1e-3..=1e6)? })
            }
            (Some(_), None, None) => Err(self.refuse(&text.name, "wave needs every", whole)),
            (None, Some(_), None) => Err(self.refuse(&text.name, "every needs wave", whole)),
            (_, _, Some(rate)) => Err(self.refuse(rate, "per_hour excludes wave and every", whole)),
        }
    }
}

/// Times are a year at most, in milliseconds.
const MAX_MILLISECONDS: u64 = 366 * 24 * 3_600_000;
/// Cost of an operation at most, in nanoseconds.
pub(crate) const MAX_COST_NS: f64 = 1e9;

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_MACHINES_TEXT: &str = r#"description = "two machines"
duration = "1h"

[host]
memory = "1 GiB"
cpus = 2
kernel = "6.18"

[[template]]
name = "small"
size = "64 MiB"
common = 0.5
unique = 0.25
writes = [{ content = "unique", share = 0.1, pages_per_second = 10.0 }]

[[machines]]
name = "a"
template = "small"
count = 2
"#;

    #[test]
    fn missing_values_have_defaults() {
        let scenario = parse_scenario(TWO_MACHINES_TEXT).unwrap();
        assert_eq!((scenario.duration_ms, scenario.tick_ms, scenario.sample_ms), (3_600_000, 1000, 60_000));
        assert_eq!((scenario.host.memory_pages, scenario.host.nodes), (262_144, 1));
        assert_eq!((scenario.host.hz, scenario.host.ksmd_cpu_ms), (DEFAULT_HZ, 0));
        assert_eq!(scenario.host.ksm, KsmSettings::default());
        assert_eq!(scenario.costs, default_costs());
        let template = &scenario.templates[0];
        assert_eq!((template.pages, template.run_pages, template.zero), (16_384, (1, 512), 0.0));
        assert_eq!((template.vcpus, scenario.classes[0].vcpu_node), (1, None));
        assert_eq!(template.writes[0].content, ContentKind::Unique);
        assert_eq!((scenario.classes[0].count, scenario.classes[0].arrival), (2, Arrival::AtOnce));
    }

    #[test]
    fn shipped_scenarios_are_valid() {
        for (name, text) in SHIPPED {
            let scenario = parse_scenario(text).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(!scenario.description.is_empty() && shipped_text(name) == Some(text));
        }
    }

    #[test]
    fn scenario_of_the_documentation_is_valid() {
        let document = include_str!("../../../docs/simulator.md");
        let text = document.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let scenario = parse_scenario(text).unwrap();
        assert_eq!((scenario.classes.len(), scenario.templates[0].writes.len()), (2, 2));
        assert_eq!(scenario.costs, default_costs(), "the document shows the defaults");
        assert_eq!(scenario.host.ksm, KsmSettings::default());
    }

    #[test]
    fn arrivals_are_waves_or_random() {
        let arrival = |keys: &str| parse_scenario(&format!("{TWO_MACHINES_TEXT}{keys}")).unwrap().classes[0].arrival;
        let waves = Arrival::Waves { machines: 3, interval_ms: 600_000 };
        assert_eq!(arrival("wave = 3\nevery = '10min'"), waves);
        assert_eq!(arrival("per_hour = 2.5"), Arrival::Poisson { machines_per_hour: 2.5 });
    }

    /// Replaces a text in the small scenario, and returns the error.
    fn error(from: &str, to: &str) -> String {
        assert!(TWO_MACHINES_TEXT.contains(from), "{from}");
        parse_scenario(&TWO_MACHINES_TEXT.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn refused_values_name_their_line_and_a_remedy() {
        let check = |from, to, expected: &str| assert_eq!(error(from, to), expected);
        check(
            "\"1h\"",
            "\"long\"",
            "line 2: duration is \"long\": give a time such as \"2h 30min\", 1000 ms at least and a year at most",
        );
        check("\"1 GiB\"", "\"much\"", "line 5: memory is \"much\": give an amount such as \"4 GiB\"");
        check("cpus = 2", "cpus = 0", "line 6: cpus is 0: give 1 to 8192");
        check("\"6.18\"", "\"new\"", "line 7: kernel is \"new\": give a version such as \"6.12.54\"");
        check(
            "unique = 0.25",
            "unique = 0.75",
            "line 10: zero, common, tenant and unique of small are 1.250 of its memory: give shares of 1 together at most",
        );
        check(
            "share = 0.1",
            "share = 0.3",
            "line 14: 0.300 of the memory of small are written: give 0.250 at most, which has these contents",
        );
        check("unique = 0.25", "unique = 0.25\nvcpus = 0", "line 14: vcpus is 0: give 1 to 512");
        check("unique = 0.25", "unique = 0.25\nvcpus = 2\ncpu_use = 2.5", "line 15: cpu_use is 2.5: give 0 to 2");
        check("count = 2", "count = 2\nvcpu_node = 1", "line 20: vcpu_node is 1: give 0 to 0");
        check(
            "template = \"small\"",
            "template = \"big\"",
            "line 18: there is no template \"big\": give one of the templates: small",
        );
        check(
            "count = 2",
            "count = 2\nwave = 1",
            "line 17: wave needs every: give wave and every for waves, only per_hour for single arrivals, or none of them",
        );
    }

    #[test]
    fn distances_are_a_square_of_the_nodes() {
        let host = |keys: &str| {
            let text = TWO_MACHINES_TEXT.replace("cpus = 2", &format!("cpus = 2\n{keys}"));
            parse_scenario(&text).map(|scenario| scenario.host).map_err(|error| error.to_string())
        };
        let given = host("nodes = 3\ndistances = [[10, 12, 32], [12, 10, 254], [32, 11, 10]]").unwrap();
        assert_eq!([given.distance(0, 2), given.distance(2, 1), given.distance(1, 1)], [32, 11, 10]);
        let default = host("nodes = 3").unwrap();
        assert_eq!([default.distance(0, 2), default.distance(2, 1), default.distance(1, 1)], [21, 21, 10]);
        let whole = "give a row for each node with its distance to each node, such as [[10, 21], [21, 10]]";
        let check = |distances: &str, expected: &str| {
            let error = host(&format!("nodes = 2\ndistances = {distances}")).unwrap_err();
            assert_eq!(error, format!("line 8: {expected}"));
        };
        check("[[10, 21]]", &format!("distances has a length of 1 for 2 nodes: {whole}"));
        check("[[10, 21], [21]]", &format!("row 1 of distances has a length of 1 for 2 nodes: {whole}"));
        check("[[10, 21], [21, 11]]", "the distance of node 1 to node 1 is 11: give 10 for a node itself");
        check("[[10, 9], [21, 10]]", "the distance of node 0 to node 1 is 9: give 10 to 254");
        check("[[10, 21], [255, 10]]", "the distance of node 1 to node 0 is 255: give 10 to 254");
        check("[[10, 21], [2000, 10]]", "the distance of node 1 to node 0 is 2000: give 10 to 254");
    }

    #[test]
    fn shared_contents_name_their_templates() {
        let set = |keys: &str| {
            let text = format!("{TWO_MACHINES_TEXT}[[shared]]\nsize = \"1 MiB\"\n{keys}");
            parse_scenario(&text).map(|scenario| scenario.shared[0].clone()).map_err(|error| error.to_string())
        };
        let expected =
            SharedSet { templates: vec![0], pages: 256, copies: 3, is_zero: false, run_pages: DEFAULT_RUN_PAGES };
        assert_eq!(set("templates = [\"small\"]\ncopies = 3").unwrap(), expected);
        let zeros = SharedSet { copies: 1, is_zero: true, run_pages: (1, 2), ..expected };
        assert_eq!(set("templates = [\"small\"]\nzero = true\nrun_pages = [1, 2]").unwrap(), zeros);
        let refused = |keys, expected: &str| assert_eq!(set(keys).unwrap_err(), expected);
        refused("templates = [\"big\"]", "line 22: there is no template \"big\": give one of the templates: small");
        refused("templates = []", "line 21: the shared contents are in no template: give templates");
        refused("templates = [\"small\", \"small\"]", "line 22: \"small\" is given twice: give it once");
        refused("templates = [\"small\"]\ncopies = 0", "line 23: copies is 0: give 1 to 4294967295");
        refused(
            "templates = [\"small\"]\ncopies = 67108865",
            "line 21: 67108865 copies of 1 MiB are more than 64 TiB: give fewer, or a smaller size",
        );
    }

    #[test]
    fn unknown_keys_are_refused_with_their_line() {
        let error = error("cpus = 2", "cpus = 2\nsocket = 1");
        assert!(error.contains("line 7") && error.contains("unknown field `socket`"), "{error}");
    }
}
