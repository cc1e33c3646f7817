//! Answers of the agent within a guest and of QEMU's monitor, and the channels to them on a command line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let _ = (parse::guest_system(bytes), parse::guest_vcpus(bytes));
    assert!((0.0..=100.0).contains(&parse::steal_percent(bytes).unwrap_or(0.0)));
    let text = String::from_utf8_lossy(bytes);
    assert!(parse::base64(&text).is_none_or(|content| content.len() <= text.len()));
    let _ = (parse::monitor_vcpus(bytes), parse::monitor_backends(bytes), parse::vcpu_slots(bytes));
    let _ = pagefold_base::identity::qemu_monitor::monitor_channels(&parse::arguments(bytes));
    let _ = pagefold_base::identity::guest_agent::agent_channel(&parse::arguments(bytes));
});
