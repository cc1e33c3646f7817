//! `/proc/PID/smaps`, `maps` and `smaps_rollup`: regions are not empty, and the beginning of another line changes nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse::rollup(bytes);
    for parse in [parse::smaps, parse::maps] {
        let regions = parse(bytes);
        if let Ok(regions) = &regions {
            assert!(regions.iter().all(|region| region.range.start < region.range.end));
        }
        if bytes.ends_with(b"\n") {
            assert_eq!(parse(&[bytes, b"7f00-"].concat()), regions);
        }
    }
});
