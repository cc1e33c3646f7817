//! The form of the documents: what a change of line breaks can destroy without a trace in the text.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

/// The documents in a folder and below it.
fn documents_below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("cannot list the documents").map(|entry| entry.unwrap().path());
    let below = |path: PathBuf| if path.is_dir() { documents_below(&path) } else { vec![path] };
    entries.flat_map(below).filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

/// All documents of the repository: those in `docs`, and those beside it.
fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let beside = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = beside.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
    found.extend(documents_below(&root.join("docs")));
    found
}

/// Whether a numbered item begins in a line after the end of a sentence: `... is named. 2. Memory moves`.
fn has_item_in_paragraph(line: &str) -> bool {
    let words: Vec<&str> = line.split(' ').collect();
    words.windows(3).any(|words| {
        let [before, number, after] = words else { return false };
        let digits = number.strip_suffix('.').unwrap_or_default();
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number && before.ends_with(['.', ':', ';', ')']) && after.starts_with(char::is_uppercase)
    })
}

/// The lines outside of code blocks in which a numbered item begins in a paragraph.
fn items_in_paragraphs(text: &str) -> Vec<&str> {
    let mut is_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        if !is_code && has_item_in_paragraph(line) {
            found.push(line);
        }
    }
    found
}

#[test]
fn numbered_items_have_lines_of_their_own() {
    let documents = documents();
    assert!(documents.len() > 20, "{documents:?}");
    for path in documents {
        let text = fs::read_to_string(&path).unwrap();
        let found = items_in_paragraphs(&text);
        assert!(found.is_empty(), "{}: numbered items within a paragraph: {found:?}", path.display());
    }
}

#[test]
fn items_within_a_paragraph_are_found() {
    let merged = "keeps its CPUs, and is named. 2. Memory moves by move_pages(2), in batches,";
    let text = format!(
        "1. It runs.\n2. It moves (see 3. below).\n   The exit status is 3. Where\n```\na. 2. B\n```\n{merged}\n"
    );
    assert_eq!(items_in_paragraphs(&text), [merged]);
}
