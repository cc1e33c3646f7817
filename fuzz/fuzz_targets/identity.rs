//! Virtual machines, containers and jobs. The input has three lines: a command line and an environment in the format of
//! `/proc`, and the path of a cgroup.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_base::identity::Identity;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let mut lines = bytes.splitn(3, |&byte| byte == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    let (arguments, environment, cgroup) = (line(), line(), line());
    let identity = Identity::new(
        &parse::arguments(arguments),
        &parse::job_environment(environment),
        Some(&String::from_utf8_lossy(cgroup)),
    );
    if let Some(container) = identity.container {
        assert!(container.contains(':'));
    }
});
