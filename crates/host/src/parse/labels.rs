//! Container labels in the JSON files of container runtimes.

use serde_json::{Map, Value};

/// Maximum bytes of a label with its key. Runtimes also store lists and whole specifications as annotations, which are
/// no use for grouping.
const MAX_LABEL_BYTES: usize = 256;

/// Maximum bytes of such a file. Any user with container rights can make it large, and it is read often.
const MAX_LABEL_FILE_BYTES: usize = 1 << 20;

/// The labels in a runtime's file about a container, as `KEY=VALUE` of at most 256 bytes: `Config.Labels` of Docker's
/// `config.v2.json`, or the `annotations` of the `config.json` of an OCI runtime. Empty if the file is neither or is
/// larger than 1 MiB.
pub fn labels(bytes: &[u8]) -> Vec<String> {
    let document = parse_document(bytes);
    short_labels(&document).map(|(key, value)| format!("{key}={value}")).collect()
}

/// The part of such a file that a recording may store; [`labels`] returns the same for it. The rest contains the
/// container's environment.
pub fn strip_to_labels(bytes: &[u8]) -> Vec<u8> {
    let document = parse_document(bytes);
    let labels: Map<String, Value> =
        short_labels(&document).map(|(key, value)| (key.to_owned(), value.into())).collect();
    serde_json::json!({ "annotations": labels }).to_string().into_bytes()
}

fn parse_document(bytes: &[u8]) -> Value {
    let bytes = Some(bytes).filter(|bytes| bytes.len() <= MAX_LABEL_FILE_BYTES);
    bytes.and_then(|bytes| serde_json::from_slice(bytes).ok()).unwrap_or_default()
}

fn short_labels(document: &Value) -> impl Iterator<Item = (&str, &str)> {
    let labels = document.pointer("/Config/Labels").or_else(|| document.get("annotations"));
    let labels = labels.and_then(Value::as_object).into_iter().flatten();
    let labels = labels.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)));
    labels.filter(|(key, value)| key.len() + 1 + value.len() <= MAX_LABEL_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn labels_of_docker_and_podman_are_parsed() {
        // Files of dockerd 20.10 and Podman 4.3, shortened.
        let docker = include_bytes!("samples/docker-config.v2.json");
        assert_eq!(labels(docker), ["com.docker.compose.project=shop", "tenant=acme"]);
        let podman = include_bytes!("samples/podman-config.json");
        let found = labels(podman);
        assert!(found.contains(&"tenant=acme".to_owned()), "{found:?}");
        assert!(found.iter().all(|label| !label.contains("secret")), "{found:?}");
    }

    #[test]
    fn stripped_file_keeps_only_labels() {
        for file in [&include_bytes!("samples/docker-config.v2.json")[..], include_bytes!("samples/podman-config.json")]
        {
            assert!(String::from_utf8_lossy(file).contains("PASSWORD=secret"));
            let kept = strip_to_labels(file);
            assert!(!String::from_utf8_lossy(&kept).contains("secret"));
            assert_eq!(labels(&kept), labels(file));
        }
    }

    #[test]
    fn non_string_and_long_labels_are_dropped() {
        let long = "x".repeat(MAX_LABEL_BYTES - 2);
        let text = format!(r#"{{"annotations": {{"a": "{long}", "bb": "{long}", "c": 7, "d": null, "e": ""}}}}"#);
        assert_eq!(labels(text.as_bytes()), [format!("a={long}"), "e=".to_owned()]);
        for text in ["", "{", "[]", "null", "{}", r#"{"Config": {"Labels": null}}"#, r#"{"annotations": ["a"]}"#] {
            assert_eq!(labels(text.as_bytes()), [""; 0], "{text}");
            assert_eq!(strip_to_labels(text.as_bytes()), br#"{"annotations":{}}"#);
        }
        let text = r#"{"annotations": {"a": "b"}}"#;
        let padded = |bytes: usize| [text.as_bytes(), &vec![b' '; bytes - text.len()]].concat();
        assert_eq!(
            (labels(&padded(MAX_LABEL_FILE_BYTES)).len(), labels(&padded(MAX_LABEL_FILE_BYTES + 1)).len()),
            (1, 0)
        );
    }

    proptest! {
        #[test]
        fn stripped_file_has_the_same_labels(labelled in prop::collection::btree_map(".{0,200}", ".{0,100}", 0..4)) {
            let annotations = serde_json::json!({ "annotations": labelled, "process": { "env": ["A=b"] } }).to_string();
            let docker = serde_json::json!({ "Config": { "Labels": labelled, "Env": ["A=b"] } }).to_string();
            let short = labelled.iter().filter(|(key, value)| key.len() + value.len() < MAX_LABEL_BYTES);
            let expected: Vec<String> = short.map(|(key, value)| format!("{key}={value}")).collect();
            for text in [annotations, docker] {
                prop_assert_eq!(&labels(text.as_bytes()), &expected);
                prop_assert_eq!(&labels(&strip_to_labels(text.as_bytes())), &expected);
            }
        }

        #[test]
        fn arbitrary_input_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(labels(&strip_to_labels(&bytes)), labels(&bytes));
        }
    }
}
