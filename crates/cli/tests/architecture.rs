//! Checks the code against the architecture.
//!
//! The tests check four rules of ARCHITECTURE.md, and take the permitted imports from its table. They read `cargo metadata` (what the manifests declare: normal and
//! build dependencies, including optional and platform-specific ones) and the tokens of every Rust file.
//!
//! 1. Each workspace crate imports exactly the workspace crates that the table lists, and `base` imports nothing that could do
//!    I/O.
//! 2. `unsafe` occurs only in `sys`, `engine`, `preload` and `adopt`; every other crate forbids it.
//! 3. `base`, and the module `decide` of each subject, name no I/O, clock, thread, environment or mutable global of the
//!    standard library, and no crate that accesses a host or starts threads.
//! 4. `census`, `merge` and `daemon` take time only from the host, so that they can run in virtual time.
//!
//! Development dependencies are not checked: a test may use any crate. Limits: the list of external dependencies of
//! `base` covers direct dependencies only; a reviewer who extends the list must check what a crate does inside. The
//! tests do not see a name that a macro builds from parts, or one that `use` renames.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// The crates outside the product: they may import the product and each other, and the product does not import them.
const NON_PRODUCT_CRATES: &[&str] = &["labs", "benchmarks"];

/// The crates that may contain `unsafe`.
const UNSAFE_CRATES: &[&str] = &["sys", "engine", "preload", "adopt"];

/// External crates that `base` may import: derive macros, glob patterns, and the parser of JSON command lines.
const BASE_MAY_USE: &[&str] = &["globset", "serde_json", "thiserror"];

/// Modules of `std` that pure code must not name.
const IMPURE_MODULES: &[&str] = &["env", "fs", "io", "net", "os", "process", "thread"];

/// Other names that give pure code access to a clock, a terminal or a mutable global.
const IMPURE_NAMES: &[&str] =
    &["Instant", "LazyLock", "OnceLock", "SystemTime", "dbg", "eprint", "eprintln", "print", "println", "thread_local"];

/// Crates that pure code must not name: they access a host or start threads.
const IMPURE_CRATES: &[&str] = &["pagefold_host", "pagefold_sys", "rayon"];

/// The crates whose product code takes all time from the host.
const HOST_TIME_CRATES: &[&str] = &["census", "merge", "daemon"];

/// Functions of the real clock, each with the type or module before it.
const REAL_CLOCK_FUNCTIONS: &[(&str, &str)] =
    &[("Instant", "now"), ("SystemTime", "now"), ("thread", "sleep"), ("time", "clock_gettime")];

/// Files of these crates that may use the real clock, by their path below the root. Each says why in a comment.
const REAL_CLOCK_FILES: &[&str] = &[];

/// One import: the importing crate, and the workspace crate or external crate that it imports.
#[derive(Clone, Debug)]
struct CrateImport {
    importer: String,
    imported: String,
    is_workspace_crate: bool,
}

/// The workspace crates that each product crate imports.
type AllowedImports = BTreeMap<String, BTreeSet<String>>;

/// The table of imports in ARCHITECTURE.md.
fn read_allowed_imports(root: &Path) -> AllowedImports {
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).expect("cannot read ARCHITECTURE.md");
    let allowed = parse_allowed_imports(&text);
    assert!(allowed.len() > 10, "ARCHITECTURE.md has no table of imports: {allowed:?}");
    allowed
}

/// The rows `| crates | imports |` after the heading row. A cell lists names in backquotes; other words stand for none.
/// The row of crates outside the product is left out.
fn parse_allowed_imports(text: &str) -> AllowedImports {
    let names = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<String>>();
    let rows = text.lines().skip_while(|line| *line != "| crate | imports |").skip(2);
    let cells = rows.map_while(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    let mut allowed = AllowedImports::new();
    for (importers, imports) in cells {
        for importer in names(importers).into_iter().filter(|name| !NON_PRODUCT_CRATES.contains(&name.as_str())) {
            allowed.insert(importer, names(imports).into_iter().collect());
        }
    }
    allowed
}

/// The violation of an import, if there is one.
fn import_violation(allowed: &AllowedImports, edge: &CrateImport) -> Option<String> {
    let CrateImport { importer: from, imported: to, is_workspace_crate } = edge;
    if !is_workspace_crate {
        let pure = from != "base" || BASE_MAY_USE.contains(&to.as_str());
        return (!pure).then(|| format!("base imports {to}, which is not in BASE_MAY_USE"));
    }
    if NON_PRODUCT_CRATES.contains(&to.as_str()) && !NON_PRODUCT_CRATES.contains(&from.as_str()) {
        return Some(format!("{from} imports {to}, which no product crate may import"));
    }
    if NON_PRODUCT_CRATES.contains(&from.as_str()) {
        return None;
    }
    match allowed.get(from) {
        None => Some(format!("{from} is not in the table of ARCHITECTURE.md: add the crate and its imports there")),
        Some(imports) if imports.contains(to) => None,
        Some(_) => Some(format!("{from} imports {to}, which the table of ARCHITECTURE.md does not list")),
    }
}

/// The name of a crate by the directory of its manifest: `crates/NAME`, or the first directory below the root.
fn crate_name_of_folder(root: &Path, folder: &Path) -> String {
    let below = folder.strip_prefix(root).expect("a workspace crate lies outside the workspace root");
    let mut parts = below.iter().map(|part| part.to_string_lossy().into_owned());
    let first = parts.next().unwrap_or_default();
    if first == "crates" { parts.next().unwrap_or_default() } else { first }
}

fn read_metadata() -> Metadata {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    MetadataCommand::new().manifest_path(manifest).no_deps().exec().expect("cargo metadata failed")
}

fn crate_name_of_package(metadata: &Metadata, package: &Package) -> String {
    let folder = package.manifest_path.parent().expect("the manifest path has no parent directory");
    crate_name_of_folder(metadata.workspace_root.as_std_path(), folder.as_std_path())
}

/// The imports that the manifests declare.
fn declared_imports(metadata: &Metadata) -> Vec<CrateImport> {
    let packages = metadata.workspace_packages();
    let mut edges = Vec::new();
    for package in &packages {
        let from = crate_name_of_package(metadata, package);
        for dependency in package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development) {
            let workspace_package = packages.iter().find(|p| p.name.as_str() == dependency.name);
            let to = workspace_package.map_or_else(|| dependency.name.clone(), |p| crate_name_of_package(metadata, p));
            edges.push(CrateImport {
                importer: from.clone(),
                imported: to,
                is_workspace_crate: workspace_package.is_some(),
            });
        }
    }
    edges
}

/// Every Rust file of the repository with the crate it belongs to.
fn rust_files_by_crate(root: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("cannot read a directory of the repository") {
            let entry = entry.expect("cannot read a directory entry of the repository");
            let (path, name) = (entry.path(), entry.file_name());
            let kind = entry.file_type().expect("cannot read the type of a directory entry");
            if kind.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
                folders.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|e| e == "rs") {
                found.push((crate_name_of_folder(root, &path), path));
            }
        }
    }
    found
}

fn parse_tokens(text: &str) -> TokenStream {
    text.parse().expect("a Rust file does not tokenize")
}

/// Whether a file forbids unsafe code in its inner attributes.
fn forbids_unsafe(text: &str) -> bool {
    let trees: Vec<TokenTree> = parse_tokens(text).into_iter().collect();
    trees.windows(3).any(|w| match w {
        [TokenTree::Punct(hash), TokenTree::Punct(bang), TokenTree::Group(attribute)] => {
            let words = flatten_tokens(attribute.stream());
            hash.as_char() == '#'
                && bang.as_char() == '!'
                && words.first().is_some_and(|w| w == "forbid")
                && words.iter().any(|w| w == "unsafe_code")
        }
        _ => false,
    })
}

/// The identifiers and punctuation of a token stream in order, with groups flattened. Comments and literals are left
/// out.
fn flatten_tokens(stream: TokenStream) -> Vec<String> {
    let mut words = Vec::new();
    for tree in stream {
        match tree {
            TokenTree::Group(group) => {
                words.push("(".to_owned());
                words.extend(self::flatten_tokens(group.stream()));
                words.push(")".to_owned());
            }
            TokenTree::Ident(word) => words.push(word.to_string()),
            TokenTree::Punct(mark) => words.push(mark.to_string()),
            TokenTree::Literal(_) => {}
        }
    }
    words
}

/// Whether a file contains the keyword `unsafe`.
fn has_unsafe(text: &str) -> bool {
    flatten_tokens(parse_tokens(text)).iter().any(|word| word == "unsafe")
}

/// The impure names that a file uses.
fn impure_names(text: &str) -> Vec<String> {
    let words = flatten_tokens(parse_tokens(text));
    let is_impure = |word: &&String| IMPURE_NAMES.iter().chain(IMPURE_CRATES).any(|name| name == word);
    let mut found: Vec<String> = words.iter().filter(is_impure).cloned().collect();
    for (i, word) in words.iter().enumerate() {
        let following = &words[i + 1..];
        if word == "static" && following.first().is_some_and(|w| w == "mut") {
            found.push("static mut".to_owned());
        }
        if word == "std" && following.len() > 2 && following[0] == ":" && following[1] == ":" {
            found.extend(
                first_path_names(&following[2..]).filter(|m| IMPURE_MODULES.contains(m)).map(|m| format!("std::{m}")),
            );
        }
    }
    found
}

/// The first names of a path's continuation: `fs` of `fs::read`, `fs` and `io` of `{fs, io::Read}`.
fn first_path_names(rest: &[String]) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    let mut group = Vec::new();
    let opens = rest[0] == "(";
    for (at, word) in rest.iter().enumerate() {
        match word.as_str() {
            "(" => depth += 1,
            ")" => depth = depth.saturating_sub(1),
            name if at == 0 || (depth == 1 && matches!(rest[at - 1].as_str(), "(" | ",")) => group.push(name),
            _ => {}
        }
        if !opens || depth == 0 {
            break;
        }
    }
    group.into_iter()
}

/// Whether a file belongs to a test: it is `tests.rs`, or lies in a directory `tests`.
fn is_test_file(path: &Path) -> bool {
    path.iter().any(|part| part == "tests" || part == "tests.rs")
}

/// The tokens without the items that `#[cfg(test)]` marks. Such an item ends with its body or its semicolon.
fn remove_test_items(stream: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = Vec::new();
    let mut in_test_item = false;
    for tree in stream {
        if in_test_item {
            in_test_item = match &tree {
                TokenTree::Group(group) => group.delimiter() != Delimiter::Brace,
                TokenTree::Punct(mark) => mark.as_char() != ';',
                _ => true,
            };
            continue;
        }
        let TokenTree::Group(group) = tree else {
            tokens.push(tree);
            continue;
        };
        let is_attribute = matches!(tokens.last(), Some(TokenTree::Punct(mark)) if mark.as_char() == '#');
        if is_attribute && flatten_tokens(group.stream()) == ["cfg", "(", "test", ")"] {
            tokens.pop();
            in_test_item = true;
        } else {
            tokens.push(Group::new(group.delimiter(), remove_test_items(group.stream())).into());
        }
    }
    tokens.into_iter().collect()
}

/// The uses of the real clock in the product code of a file.
fn real_clock_uses(text: &str) -> Vec<String> {
    let words = flatten_tokens(remove_test_items(parse_tokens(text)));
    let mut found = Vec::new();
    for (i, word) in words.iter().enumerate() {
        let following = &words[i + 1..];
        if word == "." && following.len() > 2 && following[..3] == ["elapsed", "(", ")"] {
            found.push(".elapsed()".to_owned());
        }
        if following.len() > 2 && following[..2] == [":", ":"] {
            let names: Vec<&str> = first_path_names(&following[2..]).collect();
            let used = REAL_CLOCK_FUNCTIONS.iter().filter(|(owner, name)| word == owner && names.contains(name));
            found.extend(used.map(|(owner, name)| format!("{owner}::{name}")));
        }
    }
    found
}

#[test]
fn crates_import_exactly_the_listed_crates() {
    let metadata = read_metadata();
    let (edges, allowed) = (declared_imports(&metadata), read_allowed_imports(metadata.workspace_root.as_std_path()));
    assert!(
        edges.iter().any(|e| e.importer == "host" && e.imported == "base" && e.is_workspace_crate),
        "the imports were not read: {edges:?}"
    );
    let faults: Vec<String> = edges.iter().filter_map(|edge| import_violation(&allowed, edge)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for (from, imports) in &allowed {
        for to in imports {
            let exists =
                edges.iter().any(|edge| edge.is_workspace_crate && edge.importer == *from && edge.imported == *to);
            assert!(exists, "ARCHITECTURE.md lists {from} -> {to}, which no manifest declares");
        }
    }
}

#[test]
fn every_crate_is_in_the_table_of_imports() {
    let metadata = read_metadata();
    let allowed = read_allowed_imports(metadata.workspace_root.as_std_path());
    let crates: BTreeSet<String> = metadata
        .workspace_packages()
        .into_iter()
        .map(|package| crate_name_of_package(&metadata, package))
        .filter(|name| !NON_PRODUCT_CRATES.contains(&name.as_str()))
        .collect();
    assert!(crates.iter().eq(allowed.keys()), "ARCHITECTURE.md lists {allowed:?}, and the crates are {crates:?}");
}

#[test]
fn unsafe_code_stays_in_its_crates() {
    let metadata = read_metadata();
    let root = metadata.workspace_root.as_std_path();
    for package in metadata.workspace_packages() {
        if UNSAFE_CRATES.contains(&crate_name_of_package(&metadata, package).as_str()) {
            continue;
        }
        for target in package.targets.iter().filter(|t| t.is_lib() || t.is_bin() || t.is_proc_macro()) {
            let text = fs::read_to_string(&target.src_path).expect("cannot read the source of a target");
            assert!(forbids_unsafe(&text), "{} lacks #![forbid(unsafe_code)]", target.src_path);
        }
    }
    let sources = rust_files_by_crate(root);
    assert!(
        sources.iter().any(|(crate_name, _)| crate_name == "base"),
        "no sources of base found below {}",
        root.display()
    );
    for (crate_name, path) in sources {
        let text = fs::read_to_string(&path).expect("cannot read a source file");
        assert!(UNSAFE_CRATES.contains(&crate_name.as_str()) || !has_unsafe(&text), "unsafe in {}", path.display());
    }
}

#[test]
fn decisions_are_pure() {
    let metadata = read_metadata();
    let root = metadata.workspace_root.as_std_path();
    let is_pure = |crate_name: &str, path: &Path| {
        let source = root.join("crates").join(crate_name).join("src");
        path.starts_with(if crate_name == "base" { source } else { source.join("decide") })
    };
    let mut subjects = BTreeSet::new();
    for (crate_name, path) in rust_files_by_crate(root).iter().filter(|(crate_name, path)| is_pure(crate_name, path)) {
        subjects.insert(crate_name.clone());
        let found = impure_names(&fs::read_to_string(path).expect("cannot read a source file"));
        assert!(found.is_empty(), "{} names {}", path.display(), found.join(", "));
    }
    let expected = [
        "ab", "account", "base", "census", "daemon", "doctor", "engine", "gang", "merge", "numa", "sim", "tune", "vcpu",
    ];
    assert!(subjects.iter().map(String::as_str).eq(expected), "{subjects:?}");
}

#[test]
fn time_comes_from_the_host() {
    let metadata = read_metadata();
    let root = metadata.workspace_root.as_std_path();
    let mut scanned = BTreeSet::new();
    for (crate_name, path) in rust_files_by_crate(root) {
        let below = path.strip_prefix(root).expect("a source file lies outside the workspace root");
        let source = Path::new("crates").join(&crate_name).join("src");
        if !HOST_TIME_CRATES.contains(&crate_name.as_str()) || !below.starts_with(source) || is_test_file(below) {
            continue;
        }
        let found = real_clock_uses(&fs::read_to_string(&path).expect("cannot read a source file"));
        if REAL_CLOCK_FILES.iter().any(|listed| below == Path::new(listed)) {
            assert!(!found.is_empty(), "REAL_CLOCK_FILES lists {}, which does not use the real clock", below.display());
        } else {
            assert!(found.is_empty(), "{} uses {}: call the host instead", below.display(), found.join(", "));
        }
        scanned.insert(crate_name);
    }
    assert_eq!(scanned.len(), HOST_TIME_CRATES.len(), "{scanned:?}");
}

#[test]
fn violating_imports_are_detected() {
    let allowed = read_allowed_imports(read_metadata().workspace_root.as_std_path());
    let violation = |from: &str, to: &str, is_workspace_crate| {
        import_violation(
            &allowed,
            &CrateImport { importer: from.to_owned(), imported: to.to_owned(), is_workspace_crate },
        )
    };
    let ours = |from, to| violation(from, to, true);
    let external = |from, to| violation(from, to, false);
    for (from, to) in [
        ("base", "host"),
        ("host", "linux"),
        ("census", "linux"),
        ("census", "merge"),
        ("merge", "daemon"),
        ("account", "doctor"),
        ("cli", "sys"),
        ("sys", "base"),
        ("linux", "cli"),
        ("cli", "labs"),
        ("linux", "benchmarks"),
        ("base", "labs"),
        ("watch", "linux"),
        ("output", "watch"),
        ("cellar", "base"),
    ] {
        assert!(ours(from, to).is_some(), "the forbidden import {from} -> {to} was accepted");
    }
    for (from, to) in [
        ("cli", "census"),
        ("census", "host"),
        ("merge", "census"),
        ("daemon", "merge"),
        ("linux", "sys"),
        ("labs", "sys"),
        ("benchmarks", "labs"),
        ("labs", "labs"),
    ] {
        assert_eq!(ours(from, to), None, "the allowed import {from} -> {to} was rejected");
    }
    assert!(external("base", "rustix").is_some());
    assert_eq!(external("base", "globset"), None);
    assert_eq!(external("linux", "rustix"), None);
}

#[test]
fn table_of_imports_is_parsed() {
    let table = "text\n| crate | imports |\n|---|---|\n| `a`, `b` | none |\n| `c` | `a`, `b` |\n\n| `d` | `a` |\n";
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<BTreeSet<String>>();
    let expected = [("a", names(&[])), ("b", names(&[])), ("c", names(&["a", "b"]))];
    assert!(parse_allowed_imports(table).into_iter().eq(expected.map(|(name, imports)| (name.to_owned(), imports))));
}

#[test]
fn violating_sources_are_detected() {
    assert!(has_unsafe("fn f() { m!{ unsafe { g() } } }"));
    assert!(!has_unsafe("//! unsafe\n/* unsafe */ #![forbid(unsafe_code)] const S: &str = \"unsafe\";"));
    assert!(forbids_unsafe("//! Doc.\n#![forbid(unsafe_code)]\nfn main() {}"));
    assert!(forbids_unsafe("#![forbid(missing_docs, unsafe_code)]"));
    assert!(!forbids_unsafe("#![deny(unsafe_code)]"));
    assert!(!forbids_unsafe("// #![forbid(unsafe_code)]\nfn main() {}"));
    assert!(!forbids_unsafe("#[forbid(unsafe_code)] fn f() {}"));

    assert_eq!(impure_names("use std::fs;"), ["std::fs"]);
    assert_eq!(impure_names("use std::{fmt, io::{self, Read}, thread};"), ["std::io", "std::thread"]);
    assert_eq!(impure_names("fn f() { let _ = ::std::env::var(\"A\"); }"), ["std::env"]);
    assert_eq!(impure_names("use std::time::Instant; static mut N: u8 = 0;"), ["Instant", "static mut"]);
    assert_eq!(impure_names("use rayon::prelude::*; fn f(h: &dyn pagefold_host::Host) {}"), ["rayon", "pagefold_host"]);
    assert_eq!(impure_names("use pagefold_sys::mapping;"), ["pagefold_sys"]);
    assert!(impure_names("//! [`pagefold_host`], rayon\nuse pagefold_base::Pages;").is_empty());
    assert!(impure_names("use std::{fmt::{self, io}, time::Duration}; fn f(s: &'static str) {}").is_empty());

    assert_eq!(real_clock_uses("fn f() { g(Instant::now(), || x.elapsed()) }"), ["Instant::now", ".elapsed()"]);
    assert_eq!(real_clock_uses("fn f() { a.map_or_else(std::time::SystemTime::now, b) }"), ["SystemTime::now"]);
    assert_eq!(real_clock_uses("use std::thread::{self, sleep};"), ["thread::sleep"]);
    assert_eq!(real_clock_uses("use rustix::time::{ClockId, clock_gettime};"), ["time::clock_gettime"]);
    assert_eq!(real_clock_uses("#[cfg(test)] mod tests; fn f() { thread::sleep(d) }"), ["thread::sleep"]);
    assert_eq!(real_clock_uses("#[cfg(test)] fn f() -> [u8; 2] {} const N: T = Instant::now();"), ["Instant::now"]);
    assert!(real_clock_uses("fn f() { host.sleep(host.now() - x); p.elapsed; /* Instant::now() */ }").is_empty());
    assert!(real_clock_uses("#[cfg(test)]\n#[allow(a)]\nmod tests { fn f() { thread::sleep(d) } }").is_empty());
    assert!(real_clock_uses("mod m { #[cfg(test)] pub fn f(self) -> Self { Instant::now() } }").is_empty());
    assert!(is_test_file(Path::new("src/run/tests.rs")) && is_test_file(Path::new("src/tests/a.rs")));
    assert!(!is_test_file(Path::new("src/testing.rs")));
}

#[test]
fn crate_names_are_read_from_folders() {
    let root = Path::new("/r");
    assert_eq!(crate_name_of_folder(root, Path::new("/r/crates/sys/src/lib.rs")), "sys");
    assert_eq!(crate_name_of_folder(root, Path::new("/r/labs/tenants")), "labs");
    assert_eq!(crate_name_of_folder(root, Path::new("/r/fuzz/fuzz_targets/smaps.rs")), "fuzz");
}
