//! `/proc/PID/stat` and `status`: additional fields at the end of a line do not change the result.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let _ = (parse::status(bytes), parse::is_at_secure(bytes), parse::bound_nodes(bytes, bytes, &[0, 1]));
    if let Ok(stat) = parse::stat(bytes) {
        assert_eq!(parse::stat(&[bytes, b" 17 0 0\n"].concat()), Ok(stat));
    }
});
