//! The settings of a playbook or of a list of tasks for Ansible.
//!
//! Read are tasks of `ansible.posix.sysctl`, `community.general.modprobe`, and of `copy`, `lineinfile` and `blockinfile`
//! for files of sysctl.d, modprobe.d and tmpfiles.d, and commands of the form `echo VALUE > FILE`. Variables of a play, a
//! block or a task are put in, and loops over lists are followed. Everything else that could set a value is named: a
//! condition, a filter or a role depends on what only Ansible knows.

use super::yaml::{self, Node, Value};
use super::{IgnoredLine, Imported, parse_modprobe, parse_sysctl};
use crate::decide::export::BOOT_MESSAGE;
use pagefold_doctor::decide::change::SettingChange;

/// Keywords of tasks, blocks and plays that are no modules (playbook keywords of ansible-core 2.19).
const KEYWORDS: &[&str] = &[
    "any_errors_fatal",
    "args",
    "async",
    "become",
    "become_exe",
    "become_flags",
    "become_method",
    "become_user",
    "changed_when",
    "check_mode",
    "collections",
    "connection",
    "debugger",
    "delay",
    "delegate_facts",
    "delegate_to",
    "diff",
    "environment",
    "failed_when",
    "ignore_errors",
    "ignore_unreachable",
    "listen",
    "loop",
    "loop_control",
    "module_defaults",
    "name",
    "no_log",
    "notify",
    "poll",
    "port",
    "register",
    "remote_user",
    "retries",
    "run_once",
    "tags",
    "throttle",
    "timeout",
    "until",
    "vars",
    "when",
];

/// Modules that set nothing.
const HARMLESS_MODULES: &[&str] =
    &["assert", "debug", "fail", "meta", "pause", "ping", "service_facts", "set_stats", "setup", "stat", "wait_for"];

/// The changes of a text.
pub(super) fn parse(text: &str) -> Imported {
    let mut reader = Reader { lines: text.lines().collect(), imported: Imported::default() };
    match yaml::parse(text) {
        // Ansible carries out nothing of such a file.
        Err(error) => reader.ignore(error.line, format!("it is no YAML: {}", error.why)),
        Ok(documents) => {
            for document in &documents {
                match document.items() {
                    Some(entries) => entries.iter().for_each(|entry| reader.read_entry(entry)),
                    None if document.text() == Some("") => {}
                    None => reader.ignore(document.line, "it is no list of plays or tasks".to_owned()),
                }
            }
        }
    }
    reader.imported
}

/// Variables: each mapping of a play, a block and a task, and the item of a loop.
#[derive(Clone, Default)]
struct Scope<'a> {
    variables: Vec<&'a Node>,
    item: Option<LoopItem<'a>>,
}

/// An item of a loop.
#[derive(Clone, Copy)]
enum LoopItem<'a> {
    Node(&'a Node),
    /// Of `with_dict`.
    Pair(&'a str, &'a Node),
}

struct Reader<'t> {
    lines: Vec<&'t str>,
    imported: Imported,
}

/// The arguments of a module: names with their values, whose templates are not put in yet.
struct Arguments<'a> {
    line: usize,
    pairs: Vec<(String, &'a Node)>,
    /// A command, or words `NAME=VALUE`.
    free_form: Option<String>,
}

impl Reader<'_> {
    fn ignore(&mut self, line: usize, why: String) {
        let Some(text) = self.lines.get(line - 1) else { return };
        self.imported.ignored.push(IgnoredLine { number: line, text: (*text).to_owned(), why });
    }

    /// A play or a task.
    fn read_entry(&mut self, entry: &Node) {
        let mut scope = Scope::default();
        if entry.find("hosts").is_none() {
            return self.read_task(entry, &scope);
        }
        scope.variables.extend(entry.find("vars"));
        for (key, value) in entry.entries() {
            match key {
                "pre_tasks" | "tasks" | "post_tasks" => self.read_tasks(value, &scope),
                "roles" | "vars_files" => self.ignore(value.line, format!("the files of {key} are not read")),
                "handlers" => self.ignore(value.line, "handlers are carried out only when a task notifies them".into()),
                _ => {}
            }
        }
    }

    fn read_tasks<'a>(&mut self, tasks: &'a Node, scope: &Scope<'a>) {
        match tasks.items() {
            Some(tasks) => tasks.iter().for_each(|task| self.read_task(task, scope)),
            None if tasks.text() == Some("") => {}
            None => self.ignore(tasks.line, "it is no list of tasks".to_owned()),
        }
    }

    fn read_task<'a>(&mut self, task: &'a Node, scope: &Scope<'a>) {
        if !matches!(task.value, Value::Mapping(_)) {
            return self.ignore(task.line, "it is no task".to_owned());
        }
        let mut scope = scope.clone();
        scope.variables.extend(task.find("vars"));
        if let Some(condition) = task.find("when") {
            return self.ignore(condition.line, "the task has a condition, which only Ansible evaluates".to_owned());
        }
        if let Some(block) = task.find("block") {
            self.read_tasks(block, &scope);
            task.find("always").iter().for_each(|tasks| self.read_tasks(tasks, &scope));
            return;
        }
        let is_module = |key: &str| !KEYWORDS.contains(&key) && !key.starts_with("with_");
        let mut modules = task.entries().filter(|(key, _)| is_module(key));
        let (Some((module, arguments)), None) = (modules.next(), modules.next()) else {
            return self.ignore(task.line, "it does not have one module".to_owned());
        };
        let module = module.strip_prefix("ansible.legacy.").unwrap_or(module);
        let looped = task.entries().find(|(key, _)| *key == "loop" || key.starts_with("with_"));
        let Some((keyword, list)) = looped else { return self.read_module(module, arguments, task, &scope) };
        match loop_items(keyword, list, &scope) {
            Err(why) => self.ignore(list.line, why),
            Ok(items) => {
                for item in items {
                    scope.item = Some(item);
                    self.read_module(module, arguments, task, &scope);
                }
            }
        }
    }

    fn read_module<'a>(&mut self, module: &str, arguments: &'a Node, task: &'a Node, scope: &Scope<'a>) {
        let arguments = Arguments::read(arguments, task);
        let line = arguments.line;
        if let Err(why) = self.carry_out(module, &arguments, scope) {
            self.ignore(line, why);
        }
    }

    fn carry_out(&mut self, module: &str, arguments: &Arguments<'_>, scope: &Scope<'_>) -> Result<(), String> {
        let short = module.strip_prefix("ansible.builtin.").unwrap_or(module);
        match short {
            "ansible.posix.sysctl" | "sysctl" => {
                let name = arguments.require(&["name", "key"], scope)?;
                if arguments.find(&["state"], scope)?.is_some_and(|state| state != "present") {
                    return Err(format!("it removes {name} from a file, which sets no value"));
                }
                let value = sysctl_value(&arguments.require(&["value", "val"], scope)?);
                parse_sysctl(&format!("{}={value}", one_word(&name)?), &mut self.imported)
            }
            "community.general.modprobe" | "modprobe" => {
                let name = arguments.require(&["name"], scope)?;
                match arguments.find(&["params"], scope)?.filter(|params| !params.trim().is_empty()) {
                    Some(_) if arguments.find(&["state"], scope)?.is_some_and(|state| state != "present") => {
                        Err(format!("it unloads {name}"))
                    }
                    Some(params) => {
                        parse_modprobe(&format!("options {} {params}", one_word(&name)?), &mut self.imported)
                    }
                    None => Err(format!("it loads or unloads {name} and sets no parameter")),
                }
            }
            "copy" | "lineinfile" | "blockinfile" => {
                let path = arguments.require(&["path", "dest", "destfile", "name"], scope)?;
                if arguments.find(&["state"], scope)?.is_some_and(|state| state != "present") {
                    return Err(format!("it removes lines of {path}"));
                }
                let key = match short {
                    "copy" => "content",
                    "lineinfile" => "line",
                    _ => "block",
                };
                let content = arguments
                    .find(&[key], scope)?
                    .ok_or_else(|| format!("the content of {path} is not in this file"))?;
                self.read_content(&path, &content, arguments.line)
            }
            "command" | "shell" | "raw" => self.read_command(&arguments.command(scope)?),
            "debug" => {
                let message = arguments.find(&["msg"], scope).ok().flatten().unwrap_or_default();
                let Some(parameter) = message.strip_prefix(BOOT_MESSAGE) else { return Ok(()) };
                let (remove, add) = match parameter.strip_prefix("without ") {
                    Some(removed) => (Some(removed.to_owned()), None),
                    None => (None, Some(parameter.to_owned())),
                };
                self.imported.changes.push(SettingChange::BootParameter { remove, add });
                Ok(())
            }
            _ if HARMLESS_MODULES.contains(&short) => Ok(()),
            _ => Err(format!("Pagefold does not carry out the module {module}")),
        }
    }

    /// The lines of a file that a task writes. Lines that set nothing are named by the task.
    fn read_content(&mut self, path: &str, content: &str, line: usize) -> Result<(), String> {
        let parse: fn(&str, &mut Imported) -> Result<(), String> = match path {
            "/etc/sysctl.conf" => parse_sysctl,
            _ if is_in(path, "sysctl.d") => parse_sysctl,
            _ if is_in(path, "modprobe.d") => parse_modprobe,
            _ if is_in(path, "tmpfiles.d") => parse_tmpfiles,
            _ => return Err(format!("{path} is no file of sysctl.d, modprobe.d or tmpfiles.d")),
        };
        for text in content.lines().map(str::trim).filter(|text| !text.is_empty() && !text.starts_with(['#', ';'])) {
            if let Err(why) = parse(text, &mut self.imported) {
                self.ignore(line, format!("{text:?} in {path}: {why}"));
            }
        }
        Ok(())
    }

    /// `echo VALUE > FILE`. Commands that carry out what files say set nothing new.
    fn read_command(&mut self, words: &[String]) -> Result<(), String> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["echo", value, ">", path] => self.write_file(path, value),
            ["echo", value, target] if target.starts_with('>') && !target.starts_with(">>") => {
                self.write_file(&target[1..], value)
            }
            ["sysctl", "-w", assignment] => parse_sysctl(assignment, &mut self.imported),
            ["sysctl", "--system" | "-p", ..] | ["systemd-tmpfiles", "--create", ..] => Ok(()),
            ["modprobe", module, ref options @ ..] if !module.starts_with('-') && !options.is_empty() => {
                parse_modprobe(&format!("options {module} {}", options.join(" ")), &mut self.imported)
            }
            _ => Err("Pagefold reads only `echo VALUE > FILE` and `sysctl -w` of commands".to_owned()),
        }
    }

    fn write_file(&mut self, path: &str, value: &str) -> Result<(), String> {
        let path = path.strip_prefix('/').ok_or("the path is not absolute")?;
        if value.trim().is_empty() {
            return Err("it has no value".to_owned());
        }
        self.imported.changes.push(SettingChange::Write { path: path.to_owned(), value: value.to_owned() });
        Ok(())
    }
}

/// Whether a file is one of `/etc`, `/run` or `/usr/lib` that a directory of this name has.
fn is_in(path: &str, directory: &str) -> bool {
    ["/etc/", "/run/", "/usr/lib/", "/usr/local/lib/"].iter().any(|parent| {
        path.strip_prefix(parent)
            .and_then(|rest| rest.strip_prefix(directory))
            .is_some_and(|rest| rest.starts_with('/'))
    })
}

/// A line of tmpfiles.d(5) that writes a file: `w /PATH - - - - VALUE`.
fn parse_tmpfiles(line: &str, imported: &mut Imported) -> Result<(), String> {
    let mut rest = line;
    let mut fields = Vec::new();
    for _ in 0..6 {
        let (field, after) = rest.split_once(|c: char| c.is_ascii_whitespace()).ok_or("it has no argument")?;
        fields.push(field);
        rest = after.trim_start();
    }
    if !matches!(fields[0].trim_end_matches(['+', '!', '-', '=']), "w") {
        return Err("only lines of the type w write a value".to_owned());
    }
    let path = fields[1].strip_prefix('/').ok_or("the path is not absolute")?.to_owned();
    let value = tmpfiles_argument(rest)?;
    if path.contains('*') {
        imported.patterns.push((path, value));
    } else {
        imported.changes.push(SettingChange::Write { path, value });
    }
    Ok(())
}

/// The argument of a line without escapes: `%%` is a percent sign, `\\` a backslash.
fn tmpfiles_argument(text: &str) -> Result<String, String> {
    let mut argument = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '%' | '\\' if characters.next() != Some(character) => {
                return Err(format!("it has a specifier or an escape: {text}"));
            }
            _ => argument.push(character),
        }
    }
    Ok(argument)
}

/// The value that the module writes: it takes the words of truth values for 1 and 0 (ansible.posix 2.1,
/// `plugins/modules/sysctl.py`, `_parse_value`).
pub fn sysctl_value(value: &str) -> String {
    match value.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" | "on" | "1" | "true" | "t" | "1.0" => "1".to_owned(),
        "n" | "no" | "off" | "0" | "false" | "f" | "0.0" => "0".to_owned(),
        _ => value.trim().to_owned(),
    }
}

/// A name, which must be one word.
fn one_word(name: &str) -> Result<&str, String> {
    let name = name.trim();
    let is_word = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || matches!(c, '=' | '#'));
    if is_word { Ok(name) } else { Err(format!("{name:?} is not a name")) }
}

impl<'a> Arguments<'a> {
    fn read(node: &'a Node, task: &'a Node) -> Self {
        let more = task.find("args").into_iter().flat_map(Node::entries);
        let pairs = node.entries().chain(more).map(|(name, value)| (name.to_owned(), value)).collect();
        Self { line: node.line, pairs, free_form: node.text().map(str::to_owned) }
    }

    /// The value of the first of these names.
    fn find(&self, names: &[&str], scope: &Scope<'_>) -> Result<Option<String>, String> {
        for name in names {
            if let Some((_, node)) = self.pairs.iter().find(|(known, _)| known == name) {
                let text = node.text().ok_or_else(|| format!("{name} is not a text"))?;
                return scope.expand(text).map(Some);
            }
            let words = self.free_form.as_deref().map(split_words).unwrap_or_default();
            let prefix = format!("{name}=");
            if let Some(value) = words.iter().find_map(|word| word.strip_prefix(&prefix)) {
                return scope.expand(value).map(Some);
            }
        }
        Ok(None)
    }

    fn require(&self, names: &[&str], scope: &Scope<'_>) -> Result<String, String> {
        self.find(names, scope)?.ok_or_else(|| format!("it has no {}", names[0]))
    }

    /// The words of a command.
    fn command(&self, scope: &Scope<'_>) -> Result<Vec<String>, String> {
        let argv = self.pairs.iter().find(|(name, _)| name == "argv").and_then(|(_, node)| node.items());
        if let Some(argv) = argv {
            return argv.iter().map(|word| scope.expand(word.text().ok_or("a word is not a text")?)).collect();
        }
        let text = match &self.free_form {
            Some(text) => scope.expand(text)?,
            None => self.require(&["cmd", "_raw_params"], scope)?,
        };
        if text.contains(['|', ';', '&', '$', '`', '<', '\n', '*', '?']) {
            return Err("Pagefold does not run shell scripts".to_owned());
        }
        Ok(split_words(&text))
    }
}

/// The words of a command line, without the quotes around parts of them.
fn split_words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for character in text.chars() {
        match quote {
            Some(open) if character == open => quote = None,
            Some(_) => word.get_or_insert_default().push(character),
            None if matches!(character, '"' | '\'') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            None if character.is_whitespace() => words.extend(word.take()),
            None => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    words
}

impl<'a> Scope<'a> {
    /// A text with the values of its variables.
    fn expand(&self, text: &str) -> Result<String, String> {
        if text.contains("{%") || text.contains("{#") {
            return Err("it has a template, which only Ansible evaluates".to_owned());
        }
        let mut expanded = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("{{") {
            let (expression, after) = after.split_once("}}").ok_or("a template does not end")?;
            let unknown = || format!("the template {{{{ {} }}}} is not known here", expression.trim());
            let value = self.find(expression.trim()).ok_or_else(unknown)?;
            let value = match value {
                Found::Text(text) => text,
                Found::Node(node) => node.text().ok_or_else(unknown)?,
            };
            if value.contains("{{") || value.contains("{%") {
                return Err(unknown());
            }
            expanded.push_str(before);
            expanded.push_str(value);
            rest = after;
        }
        Ok(expanded + rest)
    }

    /// The value of an expression: a variable, or a key of it as `item.key` or `item['key']`.
    fn find(&self, expression: &str) -> Option<Found<'a>> {
        let end = expression.find(['.', '[']).unwrap_or(expression.len());
        let (name, rest) = expression.split_at(end);
        let key = match rest {
            "" => None,
            _ if rest.starts_with('.') => Some(&rest[1..]),
            _ => Some(rest.strip_prefix('[')?.strip_suffix(']')?.trim_matches(['\'', '"'])),
        };
        let variable = match (name, self.item) {
            ("item", Some(LoopItem::Pair(pair_key, value))) => {
                return match key {
                    Some("key") => Some(Found::Text(pair_key)),
                    Some("value") => Some(Found::Node(value)),
                    _ => None,
                };
            }
            ("item", Some(LoopItem::Node(node))) => node,
            // The innermost declaration wins.
            _ => self.variables.iter().rev().find_map(|variables| variables.find(name))?,
        };
        match key {
            None => Some(Found::Node(variable)),
            Some(key) => variable.find(key).map(Found::Node),
        }
    }
}

/// The value of an expression.
enum Found<'a> {
    Text(&'a str),
    Node(&'a Node),
}

/// The items of a loop.
fn loop_items<'a>(keyword: &str, list: &'a Node, scope: &Scope<'a>) -> Result<Vec<LoopItem<'a>>, String> {
    let list = match list.text().map(str::trim) {
        None => list,
        Some(text) => {
            let expression = text.strip_prefix("{{").and_then(|rest| rest.strip_suffix("}}"));
            match expression.and_then(|expression| scope.find(expression.trim())) {
                Some(Found::Node(node)) => node,
                _ => return Err("the list of the loop is not known here".to_owned()),
            }
        }
    };
    match (keyword, &list.value) {
        ("with_dict", Value::Mapping(_)) => Ok(list.entries().map(|(key, value)| LoopItem::Pair(key, value)).collect()),
        ("loop" | "with_items" | "with_list", Value::Sequence(items)) => Ok(items.iter().map(LoopItem::Node).collect()),
        _ => Err(format!("Pagefold does not follow this {keyword}")),
    }
}

#[cfg(test)]
mod tests;
