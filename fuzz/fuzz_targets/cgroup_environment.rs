//! `/proc/PID/cgroup`, `cmdline` and `environ`: only the variables of jobs are kept.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_base::identity::JOB_VARIABLES;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(path) = parse::cgroup(bytes) {
        assert!(!path.contains('\n'));
    }
    assert!(parse::job_environment(bytes).keys().all(|name| JOB_VARIABLES.contains(&name.as_str())));
    assert!(parse::arguments(bytes).last().is_none_or(|argument| !argument.is_empty()));
});
