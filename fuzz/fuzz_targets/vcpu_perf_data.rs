//! Files of perf with events of the scheduler, and the measures and the trace of what they contain.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_vcpu::decide::measures::measure;
use pagefold_vcpu::perfetto;
use pagefold_vcpu::sources::perf_data::read_perf_data;
use pagefold_vcpu::sources::threads::Grouping;
use std::io::Cursor;

fuzz_target!(|bytes: &[u8]| {
    let Ok(recorded) = read_perf_data(Cursor::new(bytes), Grouping::Machines) else { return };
    let schedule = recorded.schedule;
    assert!(schedule.runs.iter().all(|run| run.from < run.to && schedule.start <= run.from && run.to <= schedule.end));
    let measures = measure(&schedule);
    let cpu_time = u128::from(schedule.duration()) * schedule.cpus.len() as u128;
    assert!(u128::from(measures.busy_ns) + u128::from(measures.idle_ns) <= cpu_time);
    assert!(measures.vms.iter().all(|vm| vm.co_run_ns <= vm.runnable_ns && vm.runnable_ns <= schedule.duration()));
    perfetto::encode(&schedule);
});
