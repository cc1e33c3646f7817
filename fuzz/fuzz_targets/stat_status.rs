//! `/proc/PID/stat` and `status`: a line that was parsed is parsed alike with more fields behind it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let _ = (parse::status(bytes), parse::is_secure(bytes), parse::bound_nodes(bytes, bytes, &[0, 1]));
    if let Ok(stat) = parse::stat(bytes) {
        assert_eq!(parse::stat(&[bytes, b" 17 0 0\n"].concat()), Ok(stat));
    }
});
