//! Changes of a scenario: `ram=2x; vms+=50 template=web; writes=0.5x`.

use super::counters::PAGE_BYTES;
use super::scenario::{Arrival, MachineClass, Scenario, SharedSet};
use crate::scenario::{MAX_MACHINES, MAX_PAGES};
use thiserror::Error;

/// The grammar, for messages.
pub const GRAMMAR: &str =
    "ram=FACTORx, ram=SIZE, vms+=N template=NAME, vms-=N template=NAME or writes=FACTORx, separated by `;`";

/// A change of a scenario.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The host's memory times a factor.
    MemoryFactor(f64),
    /// The host's memory, in pages.
    Memory(u64),
    /// More machines of a template.
    MoreMachines {
        /// How many.
        count: u32,
        /// The template; it may be missing if there is one only.
        template: Option<String>,
    },
    /// Fewer machines of a template.
    FewerMachines {
        /// How many.
        count: u32,
        /// The template; it may be missing if there is one only.
        template: Option<String>,
    },
    /// All rates of writes times a factor.
    WriteFactor(f64),
}

/// Why a change is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum WhatIfError {
    /// A part is none of the changes.
    #[error("\"{0}\" is no change: give {GRAMMAR}")]
    Syntax(String),
    /// There is no such template.
    #[error("there is no template \"{name}\": give template= and one of {known}")]
    Template {
        /// The given name.
        name: String,
        /// The names of the templates.
        known: String,
    },
    /// The template is missing.
    #[error("the host has several templates: add template= and one of {0}")]
    TemplateMissing(String),
    /// There are not so many machines.
    #[error("template {template} has {present} machines, and {wanted} cannot be taken away: give fewer")]
    TooFew {
        /// The template.
        template: String,
        /// Its machines.
        present: u32,
        /// Machines to take away.
        wanted: u32,
    },
    /// The host would have no machine.
    #[error("no machine would be left: take fewer away")]
    NoneLeft,
    /// The number is out of range.
    #[error("the host would have more than {MAX_MACHINES} machines: give fewer")]
    TooMany,
    /// The memory is more than a scenario may have.
    #[error("the host would have more than 1 PiB of memory: give less ram")]
    TooMuchMemory,
    /// The host does not fit into its memory.
    #[error("the host itself uses {used_mib} MiB, and would have {memory_mib} MiB: give more ram")]
    Memory {
        /// Memory in use without the machines.
        used_mib: u64,
        /// Memory of the host.
        memory_mib: u64,
    },
}

/// Reads changes.
///
/// # Errors
/// The part that is none.
pub fn parse_changes(text: &str) -> Result<Vec<Change>, WhatIfError> {
    let parts = text.split(';').map(str::trim).filter(|part| !part.is_empty());
    let changes: Vec<Change> = parts.map(parse_change).collect::<Result<_, _>>()?;
    if changes.is_empty() { Err(WhatIfError::Syntax(text.to_owned())) } else { Ok(changes) }
}

fn parse_change(part: &str) -> Result<Change, WhatIfError> {
    let syntax = || WhatIfError::Syntax(part.to_owned());
    let factor = |value: &str| {
        let factor = value.strip_suffix('x')?.trim().parse::<f64>().ok()?;
        (factor > 0.0 && factor.is_finite()).then_some(factor)
    };
    let change = if let Some(value) = part.strip_prefix("ram=") {
        factor(value).map(Change::MemoryFactor).or_else(|| {
            let size = value.trim().parse::<bytesize::ByteSize>().ok()?;
            Some(Change::Memory(size.as_u64() / PAGE_BYTES.cast_unsigned()))
        })
    } else if let Some(value) = part.strip_prefix("writes=") {
        factor(value).map(Change::WriteFactor)
    } else if let Some(rest) = part.strip_prefix("vms+=") {
        parse_machines(rest).map(|(count, template)| Change::MoreMachines { count, template })
    } else if let Some(rest) = part.strip_prefix("vms-=") {
        parse_machines(rest).map(|(count, template)| Change::FewerMachines { count, template })
    } else {
        None
    };
    change.ok_or_else(syntax)
}

/// A number of machines, and the name of their template, which may have blanks.
fn parse_machines(text: &str) -> Option<(u32, Option<String>)> {
    let (count, template) = match text.split_once(char::is_whitespace) {
        Some((count, rest)) => (count, Some(rest.trim().strip_prefix("template=")?.trim().to_owned())),
        None => (text, None),
    };
    let count = count.parse().ok().filter(|&count| (1..=MAX_MACHINES).contains(&count))?;
    (template.as_deref() != Some("")).then_some((count, template))
}

/// Changes a scenario. Machines that are added have what the others of their template have on average, also of shared
/// contents: each of these has more copies. All machines are then drawn from their templates, without known layouts.
/// Machines that are taken away are the last ones of the last classes of their template.
///
/// # Errors
/// If the change does not fit the scenario.
pub fn apply(scenario: &mut Scenario, change: &Change) -> Result<(), WhatIfError> {
    match change {
        Change::MemoryFactor(factor) => {
            let pages = (scenario.host.memory_pages as f64 * factor) as u64;
            set_memory(scenario, pages)
        }
        Change::Memory(pages) => set_memory(scenario, *pages),
        Change::WriteFactor(factor) => {
            let writes = scenario.templates.iter_mut().flat_map(|template| &mut template.writes);
            writes.for_each(|class| class.pages_per_second *= factor);
            Ok(())
        }
        Change::MoreMachines { count, template } => {
            let template = find_template(scenario, template.as_deref())?;
            let all: u64 = scenario.classes.iter().map(|class| u64::from(class.count)).sum();
            if all + u64::from(*count) > u64::from(MAX_MACHINES) {
                return Err(WhatIfError::TooMany);
            }
            let before = scenario.clone();
            add_machines(scenario, template, *count);
            // Drawn machines have nothing in common with known layouts.
            scenario.classes.iter_mut().for_each(|class| class.layouts.clear());
            scale_shared_sets(scenario, &before);
            Ok(())
        }
        Change::FewerMachines { count, template } => {
            let template = find_template(scenario, template.as_deref())?;
            let before = scenario.clone();
            remove_machines(scenario, template, *count)?;
            scale_shared_sets(scenario, &before);
            Ok(())
        }
    }
}

fn set_memory(scenario: &mut Scenario, pages: u64) -> Result<(), WhatIfError> {
    let used = scenario.host.used_pages;
    if pages <= used {
        let mib = |pages: u64| (pages * PAGE_BYTES.cast_unsigned()) >> 20;
        return Err(WhatIfError::Memory { used_mib: mib(used), memory_mib: mib(pages) });
    }
    if pages > MAX_PAGES {
        return Err(WhatIfError::TooMuchMemory);
    }
    scenario.host.memory_pages = pages;
    Ok(())
}

fn find_template(scenario: &Scenario, name: Option<&str>) -> Result<usize, WhatIfError> {
    let names: Vec<&str> = scenario.templates.iter().map(|template| &*template.name).collect();
    let Some(name) = name else {
        return if names.len() == 1 { Ok(0) } else { Err(WhatIfError::TemplateMissing(names.join(", "))) };
    };
    let position = names.iter().position(|known| *known == name);
    position.ok_or_else(|| WhatIfError::Template { name: name.to_owned(), known: names.join(", ") })
}

fn add_machines(scenario: &mut Scenario, template: usize, count: u32) {
    let mut name = format!("{}, added", scenario.templates[template].name);
    while scenario.classes.iter().any(|class| class.name == name) {
        name.push_str(" again");
    }
    scenario.classes.push(MachineClass {
        name,
        template,
        count,
        tenant: String::new(),
        node: None,
        vcpu_node: None,
        start_ms: 0,
        arrival: Arrival::AtOnce,
        lifetime_ms: None,
        layouts: Vec::new(),
    });
}

fn remove_machines(scenario: &mut Scenario, template: usize, count: u32) -> Result<(), WhatIfError> {
    let present = count_machines(scenario, &[template]) as u32;
    if count > present {
        let template = scenario.templates[template].name.clone();
        return Err(WhatIfError::TooFew { template, present, wanted: count });
    }
    let mut left = count;
    for class in scenario.classes.iter_mut().rev().filter(|class| class.template == template) {
        let taken = left.min(class.count);
        class.count -= taken;
        left -= taken;
    }
    scenario.classes.retain(|class| class.count > 0);
    if scenario.classes.is_empty() { Err(WhatIfError::NoneLeft) } else { Ok(()) }
}

fn count_machines(scenario: &Scenario, templates: &[usize]) -> u64 {
    let of_templates = scenario.classes.iter().filter(|class| templates.contains(&class.template));
    of_templates.map(|class| u64::from(class.count)).sum()
}

/// Gives each machine the pages of shared contents that it had on average before the number of machines changed.
fn scale_shared_sets(scenario: &mut Scenario, before: &Scenario) {
    let mut sets = Vec::new();
    for set in &before.shared {
        let (machines, earlier) = (count_machines(scenario, &set.templates), count_machines(before, &set.templates));
        if machines == earlier {
            sets.push(set.clone());
            continue;
        }
        let pages = set.pages * u64::from(set.copies);
        let pages = (pages as f64 * machines as f64 / earlier.max(1) as f64).round() as u64;
        if set.is_zero {
            sets.push(SharedSet { pages, copies: 1, ..set.clone() });
        } else {
            sets.extend(SharedSet::with_pages(set.pages.min(pages), pages, &set.templates, set.run_pages));
        }
    }
    sets.retain(|set| set.pages > 0);
    scenario.shared = sets;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::parse_scenario;

    const TEXT: &str = "description = 't'\nduration = '1h'\n[host]\nmemory = '8 GiB'\nused = '1 GiB'\ncpus = 4\n\
        kernel = '6.18'\n[[template]]\nname = 'web'\nsize = '64 MiB'\nunique = 0.5\n\
        writes = [{ content = 'unique', share = 0.1, pages_per_second = 8.0 }]\n\
        [[template]]\nname = 'big db'\nsize = '1 GiB'\n\
        [[shared]]\ntemplates = ['web']\nsize = '40 KiB'\ncopies = 3\n\
        [[shared]]\ntemplates = ['web', 'big db']\nsize = '4 KiB'\ncopies = 5\n\
        [[shared]]\ntemplates = ['web']\nsize = '12 KiB'\nzero = true\n\
        [[machines]]\nname = 'web'\ntemplate = 'web'\ncount = 4\n\
        [[machines]]\nname = 'db'\ntemplate = 'big db'\n";

    fn changed(text: &str) -> Result<Scenario, WhatIfError> {
        let mut scenario = parse_scenario(TEXT).unwrap();
        for change in parse_changes(text)? {
            apply(&mut scenario, &change)?;
        }
        Ok(scenario)
    }

    #[test]
    fn memory_and_writes_change_by_factors_or_sizes() {
        let scenario = changed("ram=2x; writes=0.5x").unwrap();
        assert_eq!((scenario.host.memory_pages, scenario.host.used_pages), (4 << 20, 1 << 18));
        assert_eq!(scenario.templates[0].writes[0].pages_per_second, 4.0);
        assert_eq!(changed(" ram=12GiB ;").unwrap().host.memory_pages, 3 << 20);
    }

    #[test]
    fn added_machines_have_as_many_pages_as_the_others() {
        let scenario = changed("vms+=2 template=web").unwrap();
        let added = scenario.classes.last().unwrap();
        assert_eq!((&*added.name, added.count, added.template), ("web, added", 2, 0));
        // 30 pages become 45, 5 become 7, and 3 zeros become 5.
        let sets: Vec<_> = scenario.shared.iter().map(|set| (set.pages, set.copies, set.is_zero)).collect();
        assert_eq!(sets, [(5, 4, false), (5, 5, false), (1, 7, false), (5, 1, true)]);
        assert_eq!(changed("vms+=3 template=big db; vms+=1 template=big db").unwrap().classes.len(), 4);
    }

    #[test]
    fn removed_machines_take_their_copies_along() {
        let scenario = changed("vms-=2 template=web").unwrap();
        assert_eq!(scenario.classes[0].count, 2);
        let sets: Vec<_> = scenario.shared.iter().map(|set| (set.pages, set.copies, set.is_zero)).collect();
        assert_eq!(sets, [(5, 1, false), (5, 2, false), (1, 3, false), (2, 1, true)]);
        let without = changed("vms-=4 template=web").unwrap();
        assert_eq!((without.classes.len(), without.shared.len()), (1, 1));
    }

    #[test]
    fn refusals_say_what_to_write_instead() {
        let check = |text, expected: &str| assert_eq!(changed(text).unwrap_err().to_string(), expected);
        for text in ["ram=much", "ram=0x", "vms=3", "vms+=0 template=web", "vms+=2 web", "vms+=2 template=", "cpus=2x"]
        {
            check(text, &format!("\"{text}\" is no change: give {GRAMMAR}"));
        }
        check("", &format!("\"\" is no change: give {GRAMMAR}"));
        check("vms+=2", "the host has several templates: add template= and one of web, big db");
        check("vms+=2 template=x", "there is no template \"x\": give template= and one of web, big db");
        check("vms-=5 template=web", "template web has 4 machines, and 5 cannot be taken away: give fewer");
        check("vms-=4 template=web; vms-=1 template=big db", "no machine would be left: take fewer away");
        check("vms+=999999 template=web", "the host would have more than 1000000 machines: give fewer");
        check("ram=512MiB", "the host itself uses 1024 MiB, and would have 512 MiB: give more ram");
    }
}
