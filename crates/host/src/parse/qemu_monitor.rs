//! Answers of QEMU's control monitor. The program that gives them may only claim to be QEMU, or be in the hands of its
//! guest, so any bytes are possible.

use pagefold_base::identity::qemu_monitor::{MonitorBackend, MonitorVcpu, VcpuSlots};
use pagefold_base::{Absent, Reading};
use serde_json::Value;
use std::collections::BTreeSet;

/// The maximum number of vCPUs in an answer. QEMU's machine types have at most 4096 (hw/i386/pc_q35.c).
const MAX_VCPUS: usize = 4096;

/// The maximum number of memory backends in an answer. QEMU has at most 256 memory devices and 128 virtual nodes.
const MAX_BACKENDS: usize = 512;

/// The maximum length of the id of an object.
const MAX_ID_BYTES: usize = 256;

/// Parses the answer to `query-cpus-fast`, ascending by number.
///
/// # Errors
/// `Malformed` if it is no such answer, has too many vCPUs, or lists one twice.
pub fn monitor_vcpus(bytes: &[u8]) -> Reading<Vec<MonitorVcpu>> {
    let vcpu = |vcpu: &Value| {
        let property = |key: &str| number(vcpu.get("props")?.get(key)?);
        Some(MonitorVcpu {
            number: number(vcpu.get("cpu-index")?)?,
            thread: number(vcpu.get("thread-id")?)?,
            node: property("node-id"),
            socket: property("socket-id"),
            core: property("core-id"),
        })
    };
    let parse = || {
        let mut vcpus: Vec<MonitorVcpu> = list(bytes, MAX_VCPUS)?.iter().map(vcpu).collect::<Option<_>>()?;
        vcpus.sort_by_key(|vcpu| vcpu.number);
        let is_unique = vcpus.windows(2).all(|pair| pair[0].number != pair[1].number);
        is_unique.then_some(vcpus)
    };
    parse().ok_or_else(|| malformed("query-cpus-fast", bytes))
}

/// Parses the answer to `query-memdev`, in its order.
///
/// # Errors
/// `Malformed` if it is no such answer, has too many backends, or has an id twice.
pub fn monitor_backends(bytes: &[u8]) -> Reading<Vec<MonitorBackend>> {
    let backend = |backend: &Value| {
        let flag = |key: &str| backend.get(key)?.as_bool();
        let policy = backend.get("policy")?.as_str()?;
        let id = match backend.get("id") {
            Some(id) => Some(id.as_str().filter(|id| id.len() <= MAX_ID_BYTES)?.to_owned()),
            None => None,
        };
        Some(MonitorBackend {
            id,
            bytes: backend.get("size")?.as_u64()?,
            policy: Some(policy)
                .filter(|policy| ["default", "preferred", "bind", "interleave"].contains(policy))?
                .to_owned(),
            host_nodes: backend.get("host-nodes")?.as_array()?.iter().map(number).collect::<Option<_>>()?,
            is_preallocated: flag("prealloc")?,
            is_mergeable: flag("merge")?,
            is_shared: flag("share"),
        })
    };
    let parse = || {
        let backends: Vec<MonitorBackend> = list(bytes, MAX_BACKENDS)?.iter().map(backend).collect::<Option<_>>()?;
        let ids: Vec<&String> = backends.iter().filter_map(|backend| backend.id.as_ref()).collect();
        (ids.iter().collect::<BTreeSet<_>>().len() == ids.len()).then_some(backends)
    };
    parse().ok_or_else(|| malformed("query-memdev", bytes))
}

/// Parses the answer to `query-hotpluggable-cpus`: an entry with a path is plugged, and each stands for `vcpus-count`
/// vCPUs.
///
/// # Errors
/// `Malformed` if it is no such answer or has too many vCPUs.
pub fn vcpu_slots(bytes: &[u8]) -> Reading<VcpuSlots> {
    let parse = || {
        let mut slots = VcpuSlots::default();
        for slot in list(bytes, MAX_VCPUS)? {
            let count = slot.get("vcpus-count")?.as_u64().filter(|&count| count <= MAX_VCPUS as u64)?;
            *if slot.get("qom-path").is_some() { &mut slots.plugged } else { &mut slots.free } += count;
        }
        Some(slots)
    };
    parse().ok_or_else(|| malformed("query-hotpluggable-cpus", bytes))
}

fn list(bytes: &[u8], max_len: usize) -> Option<Vec<Value>> {
    match serde_json::from_slice(bytes).ok()? {
        Value::Array(values) if values.len() <= max_len => Some(values),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn malformed(command: &str, bytes: &[u8]) -> Absent {
    let excerpt: String = String::from_utf8_lossy(bytes).chars().take(60).collect();
    Absent::Malformed(format!("{command}: {excerpt:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn answers_of_qemu_are_parsed() {
        // QEMU 7.2, shortened.
        let vcpus = br#"[{"thread-id": 29461, "props": {"core-id": 1, "thread-id": 0, "node-id": 0, "socket-id": 0},
            "qom-path": "/machine/unattached/device[2]", "cpu-index": 1, "target": "x86_64"},
            {"thread-id": 29460, "qom-path": "/machine/unattached/device[0]", "cpu-index": 0, "target": "x86_64"}]"#;
        let second = MonitorVcpu { number: 1, thread: 29461, node: Some(0), socket: Some(0), core: Some(1) };
        let first = MonitorVcpu { thread: 29460, ..MonitorVcpu::default() };
        assert_eq!(monitor_vcpus(vcpus), Ok(vec![first, second]));

        let backends = br#"[{"share": false, "reserve": true, "prealloc": false, "host-nodes": [], "size": 33554432,
            "merge": true, "dump": true, "policy": "default", "id": "a"},
            {"prealloc": true, "host-nodes": [0, 2], "size": 1024, "merge": false, "dump": true, "policy": "bind"}]"#;
        let named = MonitorBackend {
            id: Some("a".to_owned()),
            bytes: 32 << 20,
            policy: "default".to_owned(),
            is_mergeable: true,
            is_shared: Some(false),
            ..MonitorBackend::default()
        };
        let bound = MonitorBackend {
            bytes: 1024,
            policy: "bind".to_owned(),
            host_nodes: [0, 2].into_iter().collect(),
            is_preallocated: true,
            ..MonitorBackend::default()
        };
        assert_eq!(monitor_backends(backends), Ok(vec![named, bound]));

        let slots = br#"[{"props": {"socket-id": 1}, "vcpus-count": 2, "type": "a"},
            {"props": {"socket-id": 0}, "vcpus-count": 1, "qom-path": "/machine/x", "type": "a"}]"#;
        assert_eq!(vcpu_slots(slots), Ok(VcpuSlots { plugged: 1, free: 2 }));
    }

    #[test]
    fn false_answers_are_malformed() {
        let vcpu = r#"{"thread-id": 1, "cpu-index": 0}"#;
        let many = format!("[{}]", vec![vcpu; MAX_VCPUS + 1].join(","));
        let twice = format!("[{vcpu},{vcpu}]");
        let texts = [
            "",
            "{}",
            "[1]",
            r#"[{"thread-id": -1, "cpu-index": 0}]"#,
            r#"[{"thread-id": 5000000000, "cpu-index": 0}]"#,
        ];
        for text in texts.into_iter().chain([&*many, &*twice]) {
            assert!(matches!(monitor_vcpus(text.as_bytes()), Err(Absent::Malformed(_))), "{text:.60}");
        }
        let backend =
            r#"{"id": "a", "prealloc": false, "host-nodes": [], "size": 1, "merge": true, "policy": "default"}"#;
        assert!(monitor_backends(format!("[{backend}]").as_bytes()).is_ok());
        for (from, to) in [("\"default\"", "\"evil\""), ("[]", "[-1]"), ("1,", "-1,"), ("\"a\"", "7")] {
            let text = format!("[{}]", backend.replacen(from, to, 1));
            assert!(matches!(monitor_backends(text.as_bytes()), Err(Absent::Malformed(_))), "{text}");
        }
        assert!(monitor_backends(format!("[{backend},{backend}]").as_bytes()).is_err());
        for text in ["null", "[{}]", r#"[{"vcpus-count": 99999999999}]"#] {
            assert!(matches!(vcpu_slots(text.as_bytes()), Err(Absent::Malformed(_))), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = (monitor_vcpus(&bytes), monitor_backends(&bytes), vcpu_slots(&bytes));
        }
    }
}
