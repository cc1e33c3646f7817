//! Reads the counters that show the effect of changes: before them, for the record, and afterwards.

use crate::decide::counters::{CounterReading, Growth, ReadingBefore, Readings, bind_counters};
use pagefold_base::Reading;
use pagefold_host::Host;
use pagefold_host::action::Action;
use pagefold_host::transaction::journal::{CounterGrowth, CounterSample};
use std::collections::BTreeMap;
use std::time::Duration;

/// The time over which counters of machines are sampled before a change.
const SAMPLE_TIME: Duration = Duration::from_secs(1);

/// The present values of the counters of these settings, as far as this host has them.
pub fn read_counters<'a>(host: &dyn Host, settings: impl IntoIterator<Item = &'a str>) -> Readings {
    let mut texts: BTreeMap<String, Reading<String>> = BTreeMap::new();
    let mut counters = Vec::new();
    for counter in bind_counters(settings) {
        let read = || Ok(String::from_utf8_lossy(&host.read(&counter.file)?).into_owned());
        let text = texts.entry(counter.file.clone()).or_insert_with(read);
        let value = text.as_deref().ok().and_then(|text| counter.parse(text));
        counters.extend(value.map(|value| CounterReading { counter, value }));
    }
    Readings { counters, uptime_ms: read_uptime_ms(host) }
}

/// Milliseconds since boot (fs/proc/uptime.c).
fn read_uptime_ms(host: &dyn Host) -> Option<u64> {
    let bytes = host.read("proc/uptime").ok()?;
    let seconds: f64 = String::from_utf8_lossy(&bytes).split_whitespace().next()?.parse().ok()?;
    (seconds >= 0.0).then_some((seconds * 1000.0) as u64)
}

/// The counters of these settings before they are changed, by the id of the counter. Takes a second if machines run that
/// count, and no time otherwise.
pub fn sample_counters(host: &dyn Host, settings: &[String]) -> BTreeMap<String, CounterSample> {
    let read = || read_counters(host, settings.iter().map(String::as_str));
    let first = read();
    let before = if first.have_machines() {
        host.sleep(SAMPLE_TIME);
        read().samples(Some(&first))
    } else {
        first.samples(None)
    };
    let to_sample = |(source, before): (String, ReadingBefore)| {
        let ReadingBefore { value, uptime_ms, growth } = before;
        let growth = growth.map(|Growth { count, milliseconds }| CounterGrowth { count, milliseconds });
        (source.clone(), CounterSample { source, value, uptime_ms, growth })
    };
    before.into_iter().map(to_sample).collect()
}

/// What was stored of a counter.
pub fn stored_reading(sample: &CounterSample) -> ReadingBefore {
    let growth = sample.growth.map(|CounterGrowth { count, milliseconds }| Growth { count, milliseconds });
    ReadingBefore { value: sample.value, uptime_ms: sample.uptime_ms, growth }
}

/// The settings that a change writes, by its undo, as paths below the root; none for a change of a file.
pub fn changed_settings(undo: &Action) -> Vec<String> {
    match undo {
        Action::Write { knob, .. } => vec![knob.path().to_owned()],
        Action::ReloadModule { module, parameters } => {
            let is_changed = |name: &&String| parameters.from.0.get(*name) != parameters.to.0.get(*name);
            let names = parameters.from.0.keys().filter(is_changed);
            names.map(|name| format!("sys/module/{module}/parameters/{name}")).collect()
        }
        _ => Vec::new(),
    }
}
