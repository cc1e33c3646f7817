//! The JSON schema of the configuration, for editors and generators of configurations: `pagefold schema config`.
//!
//! It is generated from the types that deserialize the file, with regular expressions for strings that are parsed
//! later. TOML has the same values as JSON, except dates, which the configuration does not use. Limits: only
//! `pagefold config check` finds unknown users, invalid patterns and duplicate names. The schema accepts only the
//! plain forms of numbers.

use super::ConfigDocument;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use std::borrow::Cow;

/// The schema as JSON.
pub fn config_schema() -> String {
    pagefold_output::wire::json_schema::<ConfigDocument>()
}

/// Require at least one condition in a group.
pub(super) fn require_condition(schema: &mut Schema) {
    let kinds = ["users", "cgroups", "vms", "names", "containers", "labels", "jobs"];
    schema.insert("anyOf".to_owned(), kinds.map(|kind| serde_json::json!({ "required": [kind] })).into());
}

/// Require a name for each group of an array.
pub(super) fn require_unique_names(schema: &mut Schema) {
    if let Some(items) = schema.get_mut("items").and_then(|items| items.as_object_mut()) {
        items.insert("required".to_owned(), serde_json::json!(["name"]));
        items.insert("properties".to_owned(), serde_json::json!({ "name": { "minLength": 1 } }));
    }
}

/// Define a string type: its name in the schema, description, example and regular expression.
macro_rules! word {
    ($name:ident, $describes:literal, $example:literal, $pattern:literal) => {
        #[doc = $describes]
        pub(super) struct $name;

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": "string", "description": $describes, "examples": [$example], "pattern": $pattern,
                })
            }
        }
    };
}

word!(Amount, "Memory; without a unit, in bytes.", "8GiB", r"^[0-9]+(\.[0-9]+)? ?([kKmMgGtTpPeE][iI]?)?[bB]?$");
word!(Percent, "A percentage above 0 and at most 100.", "10%", r"^(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?) ?%?$");
word!(
    CpuRate,
    "A percentage of one CPU above 0, which may exceed 100, or of all online CPUs of the host.",
    "1% of host",
    r"^ *([0-9]{1,6}(\.[0-9]+)? ?%? *|(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?) ?(%| ) *of host *)$"
);
word!(Time, "A duration with its unit.", "30s", r"^(0|([0-9]+ ?[A-Za-z]+ ?)+)$");
word!(
    HoursOfDay,
    "Daily hours in local time, or in UTC with Z at the end. If they end before they begin, they include midnight.",
    "22:00-06:30",
    r"^ *([01]?[0-9]|2[0-4]):[0-5]?[0-9] *- *([01]?[0-9]|2[0-4]):[0-5]?[0-9] *Z? *$"
);
word!(
    Address,
    "An address and a port.",
    "127.0.0.1:9750",
    r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}$"
);
word!(HistoryPath, "An absolute path, or `off`.", "/var/lib/pagefold/history.db", "^(/.*|off)$");
word!(HostName, "A host name without a port.", "node17", r"^[A-Za-z0-9._-]+$");
word!(Glob, "A pattern with * and ?.", "web-*", "^.+$");

#[cfg(test)]
mod tests {
    use super::super::{Config, DEFAULT_CONFIG_TEXT};
    use super::*;
    use serde_json::Value;
    use std::fs;
    use std::path::Path;

    fn schema_validator() -> jsonschema::Validator {
        jsonschema::validator_for(&serde_json::from_str(&config_schema()).unwrap()).unwrap()
    }

    fn toml_to_json(text: &str) -> Option<Value> {
        toml::from_str(text).ok()
    }

    fn config_fixtures(folder: &str) -> impl Iterator<Item = (String, String)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/config").join(folder);
        fs::read_dir(folder).expect("the fixtures").map(|entry| {
            let path = entry.unwrap().path();
            (path.file_stem().unwrap().to_string_lossy().into_owned(), fs::read_to_string(path).unwrap())
        })
    }

    #[test]
    fn accepted_fixtures_match_the_schema() {
        let (validator, uncommented) = (schema_validator(), super::super::tests::default_config_uncommented());
        let mut texts: Vec<_> = config_fixtures("valid").collect();
        texts.extend([
            ("the default".to_owned(), DEFAULT_CONFIG_TEXT.to_owned()),
            ("all of it".to_owned(), uncommented),
        ]);
        for (name, text) in texts {
            let document = toml_to_json(&text).expect(&name);
            let errors: Vec<_> = validator.iter_errors(&document).map(|error| error.to_string()).collect();
            assert!(errors.is_empty(), "{name}: {errors:?}");
        }
    }

    #[test]
    fn refused_fixtures_violate_the_schema_where_expressible() {
        let validator = schema_validator();
        // serde_json turns an infinite number into null, which the schema accepts.
        let inexpressible = ["pattern", "twice", "unknown-user", "daemon-max-cpu-seconds-per-mib"];
        for (name, text) in config_fixtures("invalid") {
            let Some(document) = toml_to_json(&text) else { continue };
            assert_eq!(validator.is_valid(&document), inexpressible.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn schema_defaults_are_the_real_defaults() {
        let schema: Value = serde_json::from_str(&config_schema()).unwrap();
        let mut defaults = toml::Table::new();
        for section in ["DaemonConfigSection", "ExcludeConfig"] {
            let fields = schema["$defs"][section]["properties"].as_object().expect("fields");
            let with_default = fields.iter().filter_map(|(name, field)| Some((name, field.get("default")?)));
            let values = with_default.filter(|(_, value)| !value.is_null());
            let table: toml::Table =
                values.map(|(name, value)| (name.clone(), toml::Value::try_from(value).unwrap())).collect();
            assert!(!table.is_empty(), "{section}");
            let key = if section == "DaemonConfigSection" { "daemon" } else { "exclude" };
            defaults.insert(key.to_owned(), table.into());
        }
        let text = toml::to_string(&defaults).unwrap();
        assert_eq!(format!("{:?}", Config::parse(&text).expect(&text)), format!("{:?}", Config::default()), "{text}");
    }

    #[test]
    fn every_key_has_a_description() {
        let schema: Value = serde_json::from_str(&config_schema()).unwrap();
        let has_description = |field: &Value| field.get("description").is_some();
        for (name, definition) in schema["$defs"].as_object().unwrap() {
            for (key, field) in definition["properties"].as_object().into_iter().flatten() {
                assert!(has_description(field), "{name}.{key}");
            }
        }
    }
}
