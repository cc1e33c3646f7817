//! `/proc/PID/smaps`, `maps` and `smaps_rollup`: regions are not empty, and a truncated last line does not change the
//! result.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse::rollup(bytes);
    let (regions, mapped) = (parse::smaps(bytes), parse::maps(bytes));
    let ranges = regions.iter().flatten().map(|region| region.range);
    assert!(ranges.chain(mapped.iter().flatten().map(|mapped| mapped.range)).all(|range| range.start < range.end));
    if bytes.ends_with(b"\n") {
        let more = [bytes, b"7f00-"].concat();
        assert_eq!((parse::smaps(&more), parse::maps(&more)), (regions, mapped));
    }
});
