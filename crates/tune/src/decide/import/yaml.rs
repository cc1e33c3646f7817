//! A document of YAML as a tree whose nodes know their lines. Scalars stay texts: what a text means is up to the
//! program that reads the file. Aliases are no nodes of the tree, so that a short text cannot stand for a large one.

use saphyr_parser::{Event, Parser, ScanError, Span};

/// The deepest nesting that is read. Playbooks with blocks in blocks have some ten levels.
const MAX_DEPTH: usize = 64;

/// A node with the line on which it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The line, from 1.
    pub line: usize,
    /// The value.
    pub value: Value,
}

/// The value of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A text, a number or a truth value, as it is in the file.
    Scalar(String),
    /// A list.
    Sequence(Vec<Node>),
    /// Keys with values, in the order of the file.
    Mapping(Vec<(Node, Node)>),
    /// A reference to another node.
    Alias,
}

impl Node {
    /// The text of a scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(text) => Some(text),
            _ => None,
        }
    }

    /// The nodes of a sequence.
    pub fn items(&self) -> Option<&[Self]> {
        match &self.value {
            Value::Sequence(items) => Some(items),
            _ => None,
        }
    }

    /// The keys and values of a mapping whose keys are texts; others are left out.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Self)> {
        let pairs: &[(Self, Self)] = match &self.value {
            Value::Mapping(pairs) => pairs,
            _ => &[],
        };
        pairs.iter().filter_map(|(key, value)| Some((key.text()?, value)))
    }

    /// The value of a key.
    pub fn find(&self, key: &str) -> Option<&Self> {
        self.entries().find(|(known, _)| *known == key).map(|(_, value)| value)
    }
}

/// Why a text is no YAML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct YamlError {
    /// The line, from 1.
    pub line: usize,
    /// Why.
    pub why: String,
}

/// The documents of a text.
///
/// # Errors
/// Where the text is no YAML, or nests too deeply.
pub fn parse(text: &str) -> Result<Vec<Node>, YamlError> {
    let lines = LineIndex::new(text);
    let mut tree = TreeBuilder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error: ScanError| YamlError {
            line: lines.line_of(error.marker().index()),
            why: error.info().to_owned(),
        })?;
        tree.add(event, lines.line_of_span(&span))?;
    }
    Ok(tree.documents)
}

/// Finds lines by the positions of characters. A line ends where [`str::lines`] ends it: YAML has other line breaks, too.
struct LineIndex {
    /// The position of the first character of each line.
    starts: Vec<usize>,
    count: usize,
}

impl LineIndex {
    fn new(text: &str) -> Self {
        let breaks = text.chars().enumerate().filter(|(_, character)| *character == '\n');
        Self {
            starts: std::iter::once(0).chain(breaks.map(|(position, _)| position + 1)).collect(),
            count: text.lines().count(),
        }
    }

    fn line_of(&self, position: usize) -> usize {
        self.starts.partition_point(|start| *start <= position).min(self.count).max(1)
    }

    fn line_of_span(&self, span: &Span) -> usize {
        self.line_of(span.start.index())
    }
}

/// An open collection.
enum Open {
    Sequence(Vec<Node>),
    /// The pairs so far, and a key without its value.
    Mapping(Vec<(Node, Node)>, Option<Node>),
}

#[derive(Default)]
struct TreeBuilder {
    documents: Vec<Node>,
    open: Vec<(usize, Open)>,
}

impl TreeBuilder {
    fn add(&mut self, event: Event<'_>, line: usize) -> Result<(), YamlError> {
        let value = match event {
            Event::Scalar(text, ..) => Value::Scalar(text.into_owned()),
            Event::Alias(_) => Value::Alias,
            Event::SequenceStart(..) => return self.begin(line, Open::Sequence(Vec::new())),
            Event::MappingStart(..) => return self.begin(line, Open::Mapping(Vec::new(), None)),
            Event::SequenceEnd | Event::MappingEnd => {
                self.end();
                return Ok(());
            }
            _ => return Ok(()),
        };
        self.push(Node { line, value });
        Ok(())
    }

    fn begin(&mut self, line: usize, open: Open) -> Result<(), YamlError> {
        if self.open.len() >= MAX_DEPTH {
            return Err(YamlError { line, why: format!("it nests deeper than {MAX_DEPTH} levels") });
        }
        self.open.push((line, open));
        Ok(())
    }

    fn end(&mut self) {
        let Some((line, open)) = self.open.pop() else { return };
        let value = match open {
            Open::Sequence(items) => Value::Sequence(items),
            Open::Mapping(pairs, _) => Value::Mapping(pairs),
        };
        self.push(Node { line, value });
    }

    fn push(&mut self, node: Node) {
        match self.open.last_mut() {
            None => self.documents.push(node),
            Some((_, Open::Sequence(items))) => items.push(node),
            Some((_, Open::Mapping(pairs, key))) => match key.take() {
                None => *key = Some(node),
                Some(key) => pairs.push((key, node)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nodes_know_their_lines() {
        let text = "---\n# a comment\n- name: a\n  content: |\n    one\n    two\n- [x, {y: 1}]\n---\nb: *c\n";
        assert!(parse(text).is_err(), "an alias without its anchor");
        let documents = parse(&text.replace("*c", "c")).unwrap();
        let [tasks, other] = &documents[..] else { panic!("{documents:?}") };
        let items = tasks.items().unwrap();
        assert_eq!((items[0].line, items[0].find("name").unwrap().text()), (3, Some("a")));
        assert_eq!(items[0].find("content").unwrap().text(), Some("one\ntwo\n"));
        let flow = items[1].items().unwrap();
        assert_eq!((flow[0].text(), flow[1].find("y").unwrap().text(), flow[1].line), (Some("x"), Some("1"), 7));
        assert_eq!((other.line, other.find("b").unwrap().text()), (9, Some("c")));
        assert_eq!(parse("a: &x 1\nb: *x\n").unwrap()[0].find("b").unwrap().value, Value::Alias);
    }

    #[test]
    fn errors_name_their_line() {
        let error = parse("- a: 1\n- b: [1, 2\n- c\n").unwrap_err();
        assert!(error.line >= 2 && !error.why.is_empty(), "{error:?}");
        let deep = format!("a: 1\nb: {}\n", "[".repeat(MAX_DEPTH + 1));
        assert_eq!(parse(&deep).unwrap_err().line, 2);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused_with_a_line(text in "[-:\\[\\]{}a-c&*|>!\"'#%, \r\n\t]{0,120}") {
            let lines = text.lines().count().max(1);
            match parse(&text) {
                Err(error) => prop_assert!((1..=lines).contains(&error.line), "{error:?}"),
                Ok(documents) => prop_assert!(documents.iter().all(|node| (1..=lines).contains(&node.line))),
            }
        }
    }
}
