//! The active profiles of tuned, which apply settings of the host when tuned starts (tuned 2.20: `tuned/consts.py`,
//! `tuned/profiles/loader.py`, `merger.py`).
//!
//! `/etc/tuned/active_profile` names the profiles. A profile is a file `tuned.conf` with units in brackets, whose plugin is
//! `type=` or the name of the unit. It may include other profiles: their options come first, and later ones override them.
//!
//! Limits: other directories of profiles (`profile_dirs=` of tuned-main.conf) and names with variables are not followed.
//! Units for some CPUs or kernels (`cpuinfo_regex=`, `uname_regex=`) and units that are off do not count.

use super::facts::SettingFacts;
use crate::decide::MissingReading;
use std::collections::BTreeMap;

/// The file that names the active profiles.
const ACTIVE_PROFILE: &str = "etc/tuned/active_profile";

/// The directories of profiles, the first one with a profile of a name wins. Newer versions have the folders `profiles`.
const DIRECTORIES: [&str; 4] = ["etc/tuned/profiles", "etc/tuned", "usr/lib/tuned/profiles", "usr/lib/tuned"];

/// The maximum number of profiles that are read: a chain of includes is at most four long in tuned itself.
const MAX_PROFILES: usize = 32;

/// The file of KSM that a profile may write.
const KSM_RUN: &str = "/sys/kernel/mm/ksm/run";

/// A file of a profile.
struct ProfileFile {
    path: String,
    text: String,
    /// Its scripts, by path and text.
    scripts: Vec<(String, String)>,
}

/// The active profiles and those that they include, in the order in which tuned applies them; `None` if tuned has no active
/// profile. `read` returns the text of a file, or `None` if it does not exist.
fn load<E>(mut read: impl FnMut(&str) -> Result<Option<String>, E>) -> Result<Option<(String, Vec<ProfileFile>)>, E> {
    let Some(active) = read(ACTIVE_PROFILE)? else { return Ok(None) };
    let names = active.split_whitespace().collect::<Vec<_>>().join(" ");
    let (mut seen, mut loaded) = (Vec::new(), Vec::new());
    for name in names.split(' ') {
        load_profile(name, &mut read, &mut seen, &mut loaded)?;
    }
    Ok((!names.is_empty()).then_some((names, loaded)))
}

fn load_profile<E>(
    name: &str,
    read: &mut impl FnMut(&str) -> Result<Option<String>, E>,
    seen: &mut Vec<String>,
    loaded: &mut Vec<ProfileFile>,
) -> Result<(), E> {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    if name.is_empty() || name.starts_with('.') || !name.bytes().all(is_safe) {
        return Ok(());
    }
    for directory in DIRECTORIES {
        let path = format!("{directory}/{name}/tuned.conf");
        // A profile may include the one of its name in another directory.
        if seen.contains(&path) {
            continue;
        }
        if seen.len() >= MAX_PROFILES {
            return Ok(());
        }
        let Some(text) = read(&path)? else { continue };
        seen.push(path.clone());
        let options = options(&text);
        let included = options.iter().filter(|option| option.unit == "main" && option.name == "include");
        for included in included.flat_map(|option| option.value.split([',', ';'])).map(str::trim) {
            load_profile(included.strip_prefix('-').unwrap_or(included), read, seen, loaded)?;
        }
        let mut scripts = Vec::new();
        for script in options.iter().filter(|option| option.name == "script") {
            let file = script.value.trim_start_matches("${i:PROFILE_DIR}/");
            // Only those of the profile itself.
            let is_own = !file.split('/').any(|part| part.is_empty() || part == ".." || part.starts_with('$'));
            let path = format!("{directory}/{name}/{file}");
            if let Some(text) = if is_own { read(&path)? } else { None } {
                scripts.push((path, text));
            }
        }
        loaded.push(ProfileFile { path, text, scripts });
        return Ok(());
    }
    Ok(())
}

/// An option of a unit.
struct ProfileOption<'a> {
    unit: &'a str,
    name: &'a str,
    value: &'a str,
}

/// The options of a file of the format of Python's `configparser`, with comments after a blank and `#`.
fn options(text: &str) -> Vec<ProfileOption<'_>> {
    let (mut unit, mut options) = ("", Vec::new());
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            unit = name.0;
            continue;
        }
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = value.split_once(" #").map_or(value, |(value, _)| value);
        options.push(ProfileOption { unit, name: name.trim(), value: value.trim() });
    }
    options
}

/// Reads the files of the active profiles.
pub(crate) fn read_profiles(mut read: impl FnMut(&str) -> Option<String>) {
    _ = load(|path| Ok::<_, std::convert::Infallible>(read(path)));
}

/// The active profiles.
pub(in crate::decide) struct ActiveProfiles {
    /// Their names, as `tuned-adm active` prints them.
    pub names: String,
    files: Vec<ProfileFile>,
}

/// The active profiles; `None` if tuned has none.
pub(in crate::decide) fn active_profiles(settings: &SettingFacts) -> Result<Option<ActiveProfiles>, MissingReading> {
    let loaded = load(|path| settings.find_text(path).map(|text| text.map(str::to_owned)))?;
    Ok(loaded.map(|(names, files)| ActiveProfiles { names, files }))
}

/// An option that is in force, and the file that sets it.
pub(in crate::decide) struct EffectiveOption {
    pub plugin: String,
    pub name: String,
    pub value: String,
    pub path: String,
}

impl ActiveProfiles {
    /// The options of all profiles together.
    pub(in crate::decide) fn options(&self) -> Vec<EffectiveOption> {
        let mut units = BTreeMap::<&str, BTreeMap<&str, (&str, &str)>>::new();
        for file in &self.files {
            let options = options(&file.text);
            // `replace=1` drops what earlier profiles set.
            for option in options.iter().filter(|option| option.name == "replace" && is_true(option.value)) {
                units.remove(option.unit);
            }
            for option in options {
                units.entry(option.unit).or_default().insert(option.name, (option.value, &file.path));
            }
        }
        let is_off = |unit: &BTreeMap<&str, (&str, &str)>| {
            let is_conditional = ["uname_regex", "cpuinfo_regex"].iter().any(|name| unit.contains_key(name));
            is_conditional || unit.get("enabled").is_some_and(|(value, _)| !is_true(value))
        };
        units.retain(|_, unit| !is_off(unit));
        let mut effective = Vec::new();
        for (unit, options) in units {
            let plugin = options.get("type").map_or(unit, |(plugin, _)| plugin);
            effective.extend(options.iter().map(|(name, (value, path))| EffectiveOption {
                plugin: plugin.to_owned(),
                name: (*name).to_owned(),
                value: (*value).to_owned(),
                path: (*path).to_owned(),
            }));
        }
        effective
    }

    /// The file that stops ksmd and unmerges all pages: an option of the plugin sysfs, or a script with `disable_ksm` of
    /// `/usr/lib/tuned/functions`.
    pub(in crate::decide) fn find_unmerging_file(&self) -> Option<String> {
        let options = self.options();
        let is_unmerge =
            |option: &&EffectiveOption| option.plugin == "sysfs" && option.name == KSM_RUN && option.value == "2";
        let by_option = options.iter().find(is_unmerge).map(|option| option.path.clone());
        let scripts = || self.files.iter().flat_map(|file| &file.scripts);
        by_option.or_else(|| scripts().find(|(_, text)| unmerges(text)).map(|(path, _)| path.clone()))
    }
}

fn is_true(value: &str) -> bool {
    ["1", "true", "yes", "y", "t", "on"].contains(&value.to_ascii_lowercase().as_str())
}

/// Whether a shell script stops ksmd and unmerges all pages, as far as its text shows.
fn unmerges(script: &str) -> bool {
    let lines = script.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let mut commands = lines.filter(|line| !line.starts_with("disable_ksm()"));
    commands.any(|line| {
        line.split(|separator: char| !separator.is_alphanumeric() && separator != '_').any(|word| word == "disable_ksm")
            || (line.contains(KSM_RUN) && line.contains("echo 2"))
    })
}
