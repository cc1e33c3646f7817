//! The language that describes a layout, and the expected content of each region.
//!
//! A SPEC is a list of `kind=pages`, separated by commas: `zero=100,within=60,copies=3,shared-content=libc:40`. All
//! functions here are pure; the binary's `layout` command creates the memory.

use thiserror::Error;

/// The syntax of a SPEC, for `--help`.
pub const SPEC_HELP: &str = "\
Kinds of regions (N in pages; several may stand in one SPEC, separated by commas):
  zero=N                  written zeros, resident
  unique=N                content of its own, by --salt and page
  within=N,copies=K       N/K contents, each in K pages of this process (K is 2 when left out)
  shared-content=NAME:N   content by NAME and page: equal in all processes
  text=N                  one page of printable text, N times, equal in all processes
  pattern=N               one byte all over, equal in all processes
  elf=N                   the head of an ELF file, equal in all processes
  volatile=N              each page rewritten with new unique content every --interval
  rewritten-zero=N              zeros, each page written over with zeros every --interval
  rewritten-text=N              what text=N holds, each page written over with the same bytes every --interval
  huge=N                  unique content in huge pages; N fills whole ones
  huge-zero=N             written zeros in huge pages
  shared-memory=N         MAP_SHARED, unique content
  file=N                  a private file mapping, read
  file-written=N          a private file mapping, each page written: unique content
  untouched=N             mapped, never touched
  read-zero=N             read, never written: the kernel's shared zero page
  fork-shared=N           unique content, shared copy-on-write with a forked child";

/// The kind of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Written zeros.
    Zero,
    /// Unique content that depends on the salt and the page.
    Unique,
    /// Groups of equal pages in this process.
    Within {
        /// Pages in each group.
        copies: u64,
    },
    /// Content that depends on a name and the page: equal in all processes.
    SharedContent {
        /// The name.
        name: String,
    },
    /// Printable text.
    Text,
    /// One byte value in all bytes.
    Pattern,
    /// The head of an ELF file.
    Elf,
    /// Rewritten periodically with unique content.
    Volatile,
    /// Zeros, rewritten periodically with zeros.
    RewrittenZero,
    /// Printable text, rewritten periodically with the same text.
    RewrittenText,
    /// Unique content in huge pages.
    Huge,
    /// Zeros in huge pages.
    HugeZero,
    /// `MAP_SHARED`, unique content.
    SharedMemory,
    /// A private file mapping, read.
    File,
    /// A private file mapping, written.
    FileWritten,
    /// Never touched.
    Untouched,
    /// Read and never written.
    ReadZero,
    /// Unique content, shared copy-on-write with a child.
    ForkShared,
}

impl RegionKind {
    /// Its name in a SPEC.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Unique => "unique",
            Self::Within { .. } => "within",
            Self::SharedContent { .. } => "shared-content",
            Self::Text => "text",
            Self::Pattern => "pattern",
            Self::Elf => "elf",
            Self::Volatile => "volatile",
            Self::RewrittenZero => "rewritten-zero",
            Self::RewrittenText => "rewritten-text",
            Self::Huge => "huge",
            Self::HugeZero => "huge-zero",
            Self::SharedMemory => "shared-memory",
            Self::File => "file",
            Self::FileWritten => "file-written",
            Self::Untouched => "untouched",
            Self::ReadZero => "read-zero",
            Self::ForkShared => "fork-shared",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "zero" => Self::Zero,
            "unique" => Self::Unique,
            "within" => Self::Within { copies: 2 },
            "shared-content" => Self::SharedContent { name: String::new() },
            "text" => Self::Text,
            "pattern" => Self::Pattern,
            "elf" => Self::Elf,
            "volatile" => Self::Volatile,
            "rewritten-zero" => Self::RewrittenZero,
            "rewritten-text" => Self::RewrittenText,
            "huge" => Self::Huge,
            "huge-zero" => Self::HugeZero,
            "shared-memory" => Self::SharedMemory,
            "file" => Self::File,
            "file-written" => Self::FileWritten,
            "untouched" => Self::Untouched,
            "read-zero" => Self::ReadZero,
            "fork-shared" => Self::ForkShared,
            _ => return None,
        })
    }

    /// Whether it is rewritten periodically.
    #[must_use]
    pub fn is_rewritten(&self) -> bool {
        matches!(self, Self::Volatile | Self::RewrittenZero | Self::RewrittenText)
    }

    /// Whether it consists of huge pages.
    #[must_use]
    pub fn is_huge(&self) -> bool {
        matches!(self, Self::Huge | Self::HugeZero)
    }
}

/// A requested region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecItem {
    /// Its kind.
    pub kind: RegionKind,
    /// Its size in base pages, at least 1.
    pub pages: u64,
}

/// The expected pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedPages {
    /// Resident private anonymous pages, without the shared zero page.
    pub resident: u64,
    /// The resident pages that contain zeros.
    pub zero: u64,
    /// The number of different contents among the resident pages.
    pub distinct: u64,
}

impl SpecItem {
    /// The expected pages of the region once it is laid out.
    #[must_use]
    pub fn expected_pages(&self) -> ExpectedPages {
        let pages = self.pages;
        let (resident, zero, distinct) = match self.kind {
            RegionKind::Zero | RegionKind::RewrittenZero | RegionKind::HugeZero => (pages, pages, 1),
            RegionKind::Unique
            | RegionKind::SharedContent { .. }
            | RegionKind::Volatile
            | RegionKind::Huge
            | RegionKind::FileWritten
            | RegionKind::ForkShared => (pages, 0, pages),
            RegionKind::Within { copies } => (pages, 0, pages / copies),
            RegionKind::Text | RegionKind::RewrittenText | RegionKind::Pattern | RegionKind::Elf => (pages, 0, 1),
            RegionKind::SharedMemory | RegionKind::File | RegionKind::Untouched | RegionKind::ReadZero => (0, 0, 0),
        };
        ExpectedPages { resident, zero, distinct }
    }
}

/// Why a SPEC is invalid. Each error names the offending part.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SpecError {
    /// Unknown kind, or no `=`.
    #[error("`{0}` is not of the form kind=pages with a kind from the list (see --help)")]
    UnknownKind(String),
    /// Not a positive number.
    #[error("`{0}`: the number of pages must be a whole number of at least 1")]
    InvalidPages(String),
    /// `copies` does not divide the number of pages, or does not follow `within`.
    #[error("`{0}`: copies=K must follow within=N, be at least 2 and divide N")]
    InvalidCopies(String),
    /// `shared-content` without a name.
    #[error("`{0}`: shared content needs a name, as in shared-content=libc:40")]
    MissingName(String),
}

/// Parse a SPEC.
///
/// # Errors
/// [`SpecError`] for the first invalid part.
pub fn parse_spec(spec: &str) -> Result<Vec<SpecItem>, SpecError> {
    let mut items: Vec<SpecItem> = Vec::new();
    for part in spec.split(',') {
        let (name, value) = part.split_once('=').ok_or_else(|| SpecError::UnknownKind(part.to_owned()))?;
        if name == "copies" {
            let refused = || SpecError::InvalidCopies(part.to_owned());
            let number: u64 = value.parse().map_err(|_| refused())?;
            match items.last_mut() {
                Some(SpecItem { kind: RegionKind::Within { copies }, .. }) => *copies = number,
                _ => return Err(refused()),
            }
            continue;
        }
        let mut kind = RegionKind::from_name(name).ok_or_else(|| SpecError::UnknownKind(part.to_owned()))?;
        let mut count = value;
        if let RegionKind::SharedContent { name } = &mut kind {
            let (before, after) = value.rsplit_once(':').unwrap_or_default();
            if before.is_empty() {
                return Err(SpecError::MissingName(part.to_owned()));
            }
            before.clone_into(name);
            count = after;
        }
        let pages =
            count.parse().ok().filter(|&pages| pages > 0).ok_or_else(|| SpecError::InvalidPages(part.to_owned()))?;
        items.push(SpecItem { kind, pages });
    }
    for item in &items {
        if let RegionKind::Within { copies } = item.kind
            && (copies < 2 || !item.pages.is_multiple_of(copies))
        {
            return Err(SpecError::InvalidCopies(format!("within={},copies={copies}", item.pages)));
        }
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn valid_specs_are_parsed() {
        let item = |kind, pages| SpecItem { kind, pages };
        assert_eq!(
            parse_spec("zero=3,within=60,copies=3,within=4,shared-content=a:b:40,read-zero=1").unwrap(),
            [
                item(RegionKind::Zero, 3),
                item(RegionKind::Within { copies: 3 }, 60),
                item(RegionKind::Within { copies: 2 }, 4),
                item(RegionKind::SharedContent { name: "a:b".into() }, 40),
                item(RegionKind::ReadZero, 1),
            ]
        );
    }

    #[test]
    fn invalid_spec_error_names_the_wrong_part() {
        let part = |text: &str| text.to_owned();
        let cases = [
            ("", SpecError::UnknownKind(part(""))),
            ("zero=1,", SpecError::UnknownKind(part(""))),
            ("nought=1", SpecError::UnknownKind(part("nought=1"))),
            ("zero", SpecError::UnknownKind(part("zero"))),
            ("zero=0", SpecError::InvalidPages(part("zero=0"))),
            ("zero=-1", SpecError::InvalidPages(part("zero=-1"))),
            ("unique=1,copies=2", SpecError::InvalidCopies(part("copies=2"))),
            ("copies=2", SpecError::InvalidCopies(part("copies=2"))),
            ("within=3", SpecError::InvalidCopies(part("within=3,copies=2"))),
            ("within=3,copies=1", SpecError::InvalidCopies(part("within=3,copies=1"))),
            ("within=3,copies=0", SpecError::InvalidCopies(part("within=3,copies=0"))),
            ("shared-content=40", SpecError::MissingName(part("shared-content=40"))),
            ("shared-content=:40", SpecError::MissingName(part("shared-content=:40"))),
            ("shared-content=a:", SpecError::InvalidPages(part("shared-content=a:"))),
        ];
        for (spec, expected) in cases {
            assert_eq!(parse_spec(spec).unwrap_err(), expected, "{spec}");
        }
    }

    #[test]
    fn help_names_every_kind_and_no_other() {
        let listed: Vec<_> =
            SPEC_HELP.lines().skip(1).map(|line| line.trim_start().split('=').next().unwrap()).collect();
        assert_eq!(listed.len(), 18);
        for name in listed {
            assert_eq!(RegionKind::from_name(name).unwrap().name(), name);
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_page_counts_add_up(spec in "((zero|within|huge|copies|shared-content|file)=[a:0-9]{0,4},?){0,4}") {
            for item in parse_spec(&spec).unwrap_or_default() {
                let ExpectedPages { resident, zero, distinct } = item.expected_pages();
                prop_assert!(zero <= resident && distinct <= resident && resident <= item.pages);
            }
        }
    }
}
