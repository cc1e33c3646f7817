//! Decodes records of the scheduler's tracepoints, which files of perf and of trace-cmd contain in the same form.

use super::event_format::{ByteOrder, EventField, EventFormat, EventFormatError};
use super::threads::RecordedThreads;
use crate::schedule::{SchedulerEventKind, Tid};

/// The first bits of `prev_state` are the states in which a task waits for an event; zero is runnable
/// (`__trace_sched_switch_state`, include/trace/events/sched.h). Kernels set higher bits for a preempted task.
const SLEEP_STATES: u64 = 0xff;

/// Decodes records of the scheduler.
#[derive(Clone, Debug)]
pub struct EventDecoder {
    order: ByteOrder,
    switch: SwitchLayout,
    wakeups: Vec<PlacementLayout>,
    migrations: Vec<PlacementLayout>,
}

#[derive(Clone, Debug)]
struct SwitchLayout {
    format: EventFormat,
    previous_name: EventField,
    previous: EventField,
    previous_state: EventField,
    next_name: EventField,
    next: EventField,
}

/// An event that names a task and a CPU.
#[derive(Clone, Debug)]
struct PlacementLayout {
    format: EventFormat,
    name: EventField,
    task: EventField,
    cpu: EventField,
}

impl PlacementLayout {
    fn new(formats: &[EventFormat], event: &str, cpu: &'static str) -> Result<Option<Self>, EventFormatError> {
        let Some(format) = formats.iter().find(|format| format.name == event) else { return Ok(None) };
        let field = |name| format.field(name).cloned();
        Ok(Some(Self { name: field("comm")?, task: field("pid")?, cpu: field(cpu)?, format: format.clone() }))
    }
}

impl EventDecoder {
    /// A decoder for a recording with these layouts; none without `sched_switch`.
    ///
    /// # Errors
    ///
    /// If an event lacks a field.
    pub fn new(formats: &[EventFormat], order: ByteOrder) -> Result<Option<Self>, EventFormatError> {
        let Some(format) = formats.iter().find(|format| format.name == "sched_switch") else { return Ok(None) };
        let field = |name| format.field(name).cloned();
        let switch = SwitchLayout {
            previous_name: field("prev_comm")?,
            previous: field("prev_pid")?,
            previous_state: field("prev_state")?,
            next_name: field("next_comm")?,
            next: field("next_pid")?,
            format: format.clone(),
        };
        let wakeups =
            ["sched_wakeup", "sched_wakeup_new"].map(|event| PlacementLayout::new(formats, event, "target_cpu"));
        let migrations = [PlacementLayout::new(formats, "sched_migrate_task", "dest_cpu")?];
        let wakeups = wakeups.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(Some(Self {
            order,
            switch,
            wakeups: wakeups.into_iter().flatten().collect(),
            migrations: migrations.into_iter().flatten().collect(),
        }))
    }

    /// The numbers of the events by which tasks wake up.
    pub fn wakeup_ids(&self) -> impl Iterator<Item = u16> + '_ {
        self.wakeups.iter().map(|layout| layout.format.id)
    }

    /// Whether a record is of an event that can be decoded.
    pub fn is_scheduler_event(&self, record: &[u8]) -> bool {
        let placements = self.wakeups.iter().chain(&self.migrations).map(|layout| &layout.format);
        placements.chain([&self.switch.format]).any(|format| self.is_event(format, record))
    }

    /// Whether a record is of an event by which a task wakes up.
    pub fn is_wakeup(&self, record: &[u8]) -> bool {
        self.wakeups.iter().any(|layout| self.is_event(&layout.format, record))
    }

    /// Every record begins with the number of its event.
    fn is_event(&self, format: &EventFormat, record: &[u8]) -> bool {
        record.get(..2).is_some_and(|id| self.order.read(id) == u64::from(format.id))
    }

    /// The event of a record of a CPU; none if it is another one. Notes the names of its threads.
    ///
    /// # Errors
    ///
    /// If the record is too short.
    pub fn decode(
        &self,
        record: &[u8],
        cpu: u32,
        threads: &mut RecordedThreads,
    ) -> Result<Option<SchedulerEventKind>, EventFormatError> {
        let is = |layout: &&PlacementLayout| self.is_event(&layout.format, record);
        if self.is_event(&self.switch.format, record) {
            return Ok(Some(self.decode_switch(record, cpu, threads)?));
        }
        if let Some(layout) = self.wakeups.iter().find(is) {
            let (task, cpu) = self.decode_placement(layout, record, threads)?;
            return Ok(Some(SchedulerEventKind::Wakeup { task, cpu }));
        }
        let Some(layout) = self.migrations.iter().find(is) else { return Ok(None) };
        let (task, cpu) = self.decode_placement(layout, record, threads)?;
        Ok(Some(SchedulerEventKind::Migrate { task, cpu }))
    }

    fn decode_switch(
        &self,
        record: &[u8],
        cpu: u32,
        threads: &mut RecordedThreads,
    ) -> Result<SchedulerEventKind, EventFormatError> {
        let SwitchLayout { format, previous_name, previous, previous_state, next_name, next } = &self.switch;
        let number = |field: &EventField| Ok(self.order.read(format.field_bytes(field, record)?));
        let (previous, next) = (number(previous)? as Tid, number(next)? as Tid);
        for (tid, name) in [(previous, previous_name), (next, next_name)] {
            threads.add_event(tid);
            threads.set_name(tid, &text(format.field_bytes(name, record)?));
        }
        let previous_runnable = number(previous_state)? & SLEEP_STATES == 0;
        Ok(SchedulerEventKind::Switch { cpu, previous, previous_runnable, next })
    }

    fn decode_placement(
        &self,
        layout: &PlacementLayout,
        record: &[u8],
        threads: &mut RecordedThreads,
    ) -> Result<(Tid, u32), EventFormatError> {
        let bytes = |field: &EventField| layout.format.field_bytes(field, record);
        let task = self.order.read(bytes(&layout.task)?) as Tid;
        threads.add_event(task);
        threads.set_name(task, &text(bytes(&layout.name)?));
        Ok((task, self.order.read(bytes(&layout.cpu)?) as u32))
    }
}

/// A string that ends at its first zero byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}
