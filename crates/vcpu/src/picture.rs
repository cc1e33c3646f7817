//! Pictures of schedules: a row for each CPU, a color for each machine, a brightness for each vCPU.
//!
//! Time is divided into columns, so that the size of a picture does not depend on the number of switches.
//! [`svg::draw`] writes them as SVG.

pub mod color;
pub mod svg;

use crate::schedule::{CpuSchedule, VmIndex};
use std::collections::HashMap;

/// What a column of a row shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ShownTask {
    /// A vCPU, by its position among the machine's vCPUs.
    Vcpu {
        /// The machine.
        vm: VmIndex,
        /// Its position in [`CpuSchedule::vcpus`].
        position: usize,
    },
    /// Another thread of a machine.
    OtherThread {
        /// The machine.
        vm: VmIndex,
    },
    /// A task of no machine.
    OtherTask,
}

/// Adjacent columns of a CPU that show the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnSpan {
    /// The row: the CPU's position in [`CpuSchedule::cpus`].
    pub row: usize,
    /// The first column.
    pub from: u64,
    /// The column after the last.
    pub to: u64,
    /// What it shows.
    pub shown: ShownTask,
}

/// What each task is shown as.
pub fn shown_tasks(schedule: &CpuSchedule) -> Vec<ShownTask> {
    let mut shown: Vec<ShownTask> = schedule
        .tasks
        .iter()
        .map(|task| task.vm.map_or(ShownTask::OtherTask, |vm| ShownTask::OtherThread { vm }))
        .collect();
    for vm in 0..schedule.vms.len() {
        for (position, task) in schedule.vcpus(vm).into_iter().enumerate() {
            shown[task] = ShownTask::Vcpu { vm, position };
        }
    }
    shown
}

/// The columns of the time from `from` to `to`, in nanoseconds, ordered by row and column. A column shows the task that
/// ran longest in it. It is empty if its CPU was idle for more than half of it.
pub fn column_spans(schedule: &CpuSchedule, (from, to): (u64, u64), columns: u64) -> Vec<ColumnSpan> {
    let shown = shown_tasks(schedule);
    let duration = to.saturating_sub(from);
    if duration == 0 || columns == 0 {
        return Vec::new();
    }
    // Times since the start are multiplied by the number of columns, so that each column is `width` wide.
    let width = u128::from(duration);
    let scaled = |time: u64| u128::from(time - from) * u128::from(columns);
    let mut rows = vec![Vec::new(); schedule.cpus.len()];
    for run in &schedule.runs {
        if let Ok(row) = schedule.cpus.binary_search(&run.cpu) {
            rows[row].push(run);
        }
    }
    let mut spans: Vec<ColumnSpan> = Vec::new();
    for (row, runs) in rows.into_iter().enumerate() {
        let mut column_times = ColumnTimes::default();
        let mut current = 0;
        let mut finish = |column: u64, times: &mut ColumnTimes| {
            let Some(shown) = times.take_longest(width) else { return };
            match spans.last_mut() {
                Some(last) if (last.row, last.to, last.shown) == (row, column, shown) => last.to = column + 1,
                _ => spans.push(ColumnSpan { row, from: column, to: column + 1, shown }),
            }
        };
        for run in runs {
            if run.to <= from || run.from >= to {
                continue;
            }
            let (mut start, end) = (scaled(run.from.max(from)), scaled(run.to.min(to)));
            while start < end {
                let column = (start / width) as u64;
                if column != current {
                    finish(current, &mut column_times);
                    current = column;
                }
                let until = end.min((u128::from(column) + 1) * width);
                column_times.add(shown[run.task], until - start);
                start = until;
            }
        }
        finish(current, &mut column_times);
    }
    spans
}

/// Times of the tasks in one column.
#[derive(Default)]
struct ColumnTimes {
    times: HashMap<ShownTask, u128>,
}

impl ColumnTimes {
    fn add(&mut self, shown: ShownTask, time: u128) {
        *self.times.entry(shown).or_default() += time;
    }

    /// The task with the longest time, the first of equal ones; none if tasks ran for less than half of `width`.
    fn take_longest(&mut self, width: u128) -> Option<ShownTask> {
        let busy: u128 = self.times.values().sum();
        let longest = self.times.drain().max_by_key(|&(shown, time)| (time, std::cmp::Reverse(shown)));
        longest.filter(|_| 2 * busy >= width).map(|(shown, _)| shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{RunEnd, RunInterval, ScheduledVm, Task};
    use proptest::prelude::*;

    /// Thread 0 is a vCPU of the first machine, 1 of the second, 2 another thread of it, 3 belongs to none.
    fn schedule(cpus: Vec<u32>, end: u64, runs: &[(usize, u32, u64, u64)]) -> CpuSchedule {
        let task = |tid, vm, vcpu| Task { tid, process: None, name: String::new(), vm, vcpu };
        let run = |&(task, cpu, from, to)| RunInterval { task, cpu, from, to, end: RunEnd::Unknown };
        CpuSchedule {
            end,
            cpus,
            vms: ["a", "b"].map(|name| ScheduledVm { name: name.to_owned() }).to_vec(),
            tasks: vec![
                task(1, Some(0), Some(0)),
                task(2, Some(1), Some(0)),
                task(3, Some(1), None),
                task(4, None, None),
            ],
            runs: runs.iter().map(run).collect(),
            ..CpuSchedule::default()
        }
    }

    fn vcpu(vm: usize) -> ShownTask {
        ShownTask::Vcpu { vm, position: 0 }
    }

    #[test]
    fn column_shows_the_task_that_ran_longest() {
        // Columns of 10 ns: 0 to 2 are the first machine's; the second runs 6 ns of column 3 and all of column 4.
        let schedule = schedule(vec![5], 100, &[(0, 5, 0, 34), (1, 5, 34, 50)]);
        assert_eq!(
            column_spans(&schedule, (0, 100), 10),
            [
                ColumnSpan { row: 0, from: 0, to: 3, shown: vcpu(0) },
                ColumnSpan { row: 0, from: 3, to: 5, shown: vcpu(1) },
            ]
        );
    }

    #[test]
    fn column_is_empty_if_its_cpu_was_mostly_idle() {
        // Column 0 is busy for 4 of 10 ns, column 1 for 5.
        let schedule = schedule(vec![0, 1], 20, &[(3, 1, 3, 7), (2, 1, 12, 15), (3, 1, 15, 17)]);
        let shown = ShownTask::OtherThread { vm: 1 };
        assert_eq!(column_spans(&schedule, (0, 20), 2), [ColumnSpan { row: 1, from: 1, to: 2, shown }]);
    }

    #[test]
    fn only_the_asked_time_is_shown() {
        let schedule = schedule(vec![0], 100, &[(0, 0, 0, 50), (1, 0, 50, 100)]);
        assert_eq!(
            column_spans(&schedule, (40, 60), 4),
            [
                ColumnSpan { row: 0, from: 0, to: 2, shown: vcpu(0) },
                ColumnSpan { row: 0, from: 2, to: 4, shown: vcpu(1) },
            ]
        );
        assert_eq!(column_spans(&schedule, (40, 40), 4), []);
    }

    #[test]
    fn columns_may_be_shorter_than_a_nanosecond() {
        let schedule = schedule(vec![0], 10, &[(0, 0, 0, 3), (1, 0, 3, 10)]);
        assert_eq!(
            column_spans(&schedule, (0, 10), 1000),
            [
                ColumnSpan { row: 0, from: 0, to: 300, shown: vcpu(0) },
                ColumnSpan { row: 0, from: 300, to: 1000, shown: vcpu(1) },
            ]
        );
    }

    proptest! {
        #[test]
        fn spans_are_ordered_and_bounded(lengths in prop::collection::vec((0..30u64, 1..30u64, 0..4usize), 0..40), has_gaps: bool, columns in 1..50u64) {
            let mut time = 0;
            let mut runs = Vec::new();
            for (gap, length, task) in lengths {
                time += if has_gaps { gap } else { 0 };
                runs.push((task, 0, time, time + length));
                time += length;
            }
            let spans = column_spans(&schedule(vec![0], time, &runs), (0, time), columns);
            prop_assert!(spans.iter().all(|span| span.from < span.to && span.to <= columns));
            prop_assert!(spans.windows(2).all(|pair| pair[0].to <= pair[1].from));
            // A CPU that is never idle has no empty column.
            if !has_gaps && time > 0 {
                prop_assert_eq!(spans.iter().map(|span| span.to - span.from).sum::<u64>(), columns);
            }
        }
    }
}
