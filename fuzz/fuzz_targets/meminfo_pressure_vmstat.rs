//! `/proc/meminfo`, `/proc/pressure/memory`, `/proc/vmstat`: percentages are numbers, and counters are parsed back to
//! the same value.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse::meminfo(bytes);
    if let Ok(pressure) = parse::pressure(bytes) {
        for line in [pressure.some, pressure.full] {
            assert!([line.avg10, line.avg60, line.avg300].iter().all(|percent| *percent >= 0.0));
        }
    }
    let counters = parse::vmstat(bytes);
    let text: String = counters.iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    assert_eq!(parse::vmstat(text.as_bytes()), counters);
});
