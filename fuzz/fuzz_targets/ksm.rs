//! `/sys/kernel/mm/ksm/*`, `/proc/PID/ksm_stat`, and the one-line settings beside them: lists stay short.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_host::parse;

fuzz_target!(|bytes: &[u8]| {
    let _ = parse::ksm(|_| Ok(bytes.to_vec()));
    let _ = parse::process_ksm(Ok(bytes.to_vec()), Ok(bytes.to_vec()));
    if let Ok(word) = parse::bracketed_word(bytes) {
        assert!(!word.contains(']'));
    }
    if let Ok(list) = parse::number_list(bytes) {
        assert!(list.len() <= 1 << 16);
    }
    if let Ok(number) = parse::number::<i64>(bytes) {
        assert_eq!(parse::number(number.to_string().as_bytes()), Ok(number));
    }
});
