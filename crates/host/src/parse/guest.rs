//! Answers of the agent within a guest. The guest writes them, so any bytes are possible.

use pagefold_base::guest::{GuestSystem, GuestVcpus};
use pagefold_base::{Absent, Reading};
use serde_json::Value;

/// The maximum length of an id of os-release(5), which has lower-case letters, digits and few signs.
const MAX_ID_BYTES: usize = 64;

/// Parses the answer to `guest-get-osinfo`.
///
/// # Errors
/// `Malformed` if it is no such answer.
pub fn guest_system(bytes: &[u8]) -> Reading<GuestSystem> {
    let answer: Option<Value> = serde_json::from_slice(bytes).ok();
    let id = answer.as_ref().and_then(|answer| answer.get("id")?.as_str());
    let is_name = |id: &&str| (1..=MAX_ID_BYTES).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    id.filter(is_name).map(|id| GuestSystem { id: id.to_owned() }).ok_or_else(|| malformed("guest-get-osinfo", bytes))
}

/// Parses the answer to `guest-get-vcpus`. A CPU that is listed twice counts once.
///
/// # Errors
/// `Malformed` if it is no such answer or lists no CPU.
pub fn guest_vcpus(bytes: &[u8]) -> Reading<GuestVcpus> {
    let parse = || {
        let answer: Value = serde_json::from_slice(bytes).ok()?;
        let mut cpus = std::collections::BTreeMap::new();
        for cpu in answer.as_array()? {
            cpus.insert(cpu.get("logical-id")?.as_i64()?, cpu.get("online")?.as_bool()?);
        }
        let online = cpus.values().filter(|&&online| online).count();
        let offline = cpus.len() - online;
        (!cpus.is_empty()).then_some(GuestVcpus { online: online as u32, offline: offline as u32 })
    };
    parse().ok_or_else(|| malformed("guest-get-vcpus", bytes))
}

/// The share of steal time in the CPU time of all CPUs since boot, in percent, from the first line of `/proc/stat`
/// (fs/proc/stat.c, `show_stat`). Guest time is part of user time, so it does not count.
///
/// # Errors
/// `Malformed` without such a line.
pub fn steal_percent(bytes: &[u8]) -> Reading<f64> {
    let text = String::from_utf8_lossy(bytes);
    let parse = || {
        let (line, _) = text.split_once('\n')?;
        let ticks: Option<Vec<u64>> =
            line.strip_prefix("cpu ")?.split_whitespace().map(|tick| tick.parse().ok()).collect();
        let ticks = ticks?;
        let (steal, total) = (*ticks.get(7)?, ticks.iter().take(8).fold(0u64, |sum, &tick| sum.saturating_add(tick)));
        (total > 0).then(|| steal as f64 * 100.0 / total as f64)
    };
    parse().ok_or_else(|| malformed("/proc/stat", bytes))
}

/// Decodes base64 with padding (RFC 4648), as the agent sends files. `None` for any other bytes.
pub fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').as_bytes();
    let padding = text.len() - digits.len();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in digits.chunks(4) {
        let mut bits = 0u32;
        for &digit in group {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

fn malformed(what: &str, bytes: &[u8]) -> Absent {
    let excerpt: String = String::from_utf8_lossy(bytes).chars().take(60).collect();
    Absent::Malformed(format!("{what}: {excerpt:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(bytes: &[u8]) -> String {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let group = |chunk: &[u8]| {
            let bits = chunk.iter().chain(&[0, 0]).take(3).fold(0u32, |bits, &byte| bits << 8 | u32::from(byte));
            let digit = |position: usize| match position <= chunk.len() {
                true => char::from(DIGITS[(bits >> (18 - 6 * position) & 63) as usize]),
                false => '=',
            };
            (0..4).map(digit).collect::<String>()
        };
        bytes.chunks(3).map(group).collect()
    }

    #[test]
    fn operating_system_is_read() {
        let debian = guest_system(br#"{"id": "debian", "kernel-release": "6.12.1"}"#).unwrap();
        assert!(debian.id == "debian" && debian.is_linux());
        assert!(!guest_system(br#"{"id": "mswindows"}"#).unwrap().is_linux());
        let long = format!("{{\"id\": \"{}\"}}", "a".repeat(MAX_ID_BYTES + 1));
        let others = [&b"{}"[..], b"", b"[]", b"{\"id\": 1}", b"\xff", b"{\"id\": \"\"}", b"{\"id\": \"a\\n\"}"];
        for bytes in others.into_iter().chain([long.as_bytes()]) {
            assert!(matches!(guest_system(bytes), Err(Absent::Malformed(_))), "{bytes:?}");
        }
    }

    #[test]
    fn vcpus_are_counted_once() {
        let answer = br#"[{"logical-id": 0, "online": true, "can-offline": false},
            {"logical-id": 1, "online": true}, {"logical-id": 1, "online": true}, {"logical-id": 2, "online": false}]"#;
        assert_eq!(guest_vcpus(answer), Ok(GuestVcpus { online: 2, offline: 1 }));
        for bytes in [&b"[]"[..], b"{}", b"[1]", b"[{\"logical-id\": 0}]", b"[{\"online\": true}]", b""] {
            assert!(matches!(guest_vcpus(bytes), Err(Absent::Malformed(_))), "{bytes:?}");
        }
    }

    #[test]
    fn steal_is_a_share_of_all_time_without_guest_time() {
        assert_eq!(steal_percent(b"cpu  40 10 20 20 0 0 0 10 30 0\ncpu0 1\n"), Ok(10.0));
        assert_eq!(steal_percent(b"cpu  0 0 0 90 0 0 0 0\n"), Ok(0.0));
        for text in
            ["", "cpu  40 10 20 20 0 0 0 10", "cpu  1 2 3\n", "cpu  0 0 0 0 0 0 0 0\n", "cpu  1 2 3 4 5 6 7 x\n", "x\n"]
        {
            assert!(matches!(steal_percent(text.as_bytes()), Err(Absent::Malformed(_))), "{text:?}");
        }
    }

    #[test]
    fn base64_of_the_rfc_is_decoded() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYmFy", "foobar")] {
            assert_eq!(base64(text).unwrap(), bytes.as_bytes());
        }
        for text in ["Zg", "Zg=", "Z===", "====", "Zm9v=", "Zm 9", "Zm9\n", "=g=="] {
            assert_eq!(base64(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn base64_is_decoded_to_what_was_encoded(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            prop_assert_eq!(base64(&encode(&bytes)).unwrap(), bytes);
        }

        #[test]
        fn any_answers_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..60), text in "cpu [0-9 \n]{0,60}") {
            let _ = (guest_system(&bytes), guest_vcpus(&bytes), base64(&String::from_utf8_lossy(&bytes)));
            let share = steal_percent(text.as_bytes()).unwrap_or(0.0);
            prop_assert!((0.0..=100.0).contains(&share), "{share}");
        }
    }
}
