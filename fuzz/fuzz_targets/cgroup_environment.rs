//! `/proc/PID/cgroup`, `cmdline` and `environ`: only the variables of jobs are kept. Also the command line of a virtual
//! machine, and the CPU limit of a cgroup.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_base::identity::JOB_VARIABLES;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(path) = parse::cgroup(bytes) {
        assert!(!path.contains('\n'));
    }
    assert!(parse::job_environment(bytes).keys().all(|name| JOB_VARIABLES.contains(&name.as_str())));
    let _ = (parse::cpu_max(bytes), parse::throttled_periods(bytes), parse::file_mode(bytes));
    let _ = pagefold_base::identity::vm_definition::parse_vm_definition(&parse::arguments(bytes));
    assert!(parse::arguments(bytes).last().is_none_or(|argument| !argument.is_empty()));
});
