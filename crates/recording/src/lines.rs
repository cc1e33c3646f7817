//! The lines of a recording for pages, frames and contents.
//!
//! - A page line is `ADDRESS PAGES FRAME FLAGS CONTENT`: hexadecimal address, decimal count, first page's frame or `-`,
//!   flag letters, content. Flags: `f` file or shared page, `x` exclusively mapped, `h` mapped by a huge page, `m` KSM
//!   page, `z` the kernel's zero page; `-` for none. Content: `zero`, `volatile`, a hexadecimal fingerprint, or `-` if
//!   it was not read. In a line of several pages the frames are consecutive and the contents equal.
//! - A frame line is `FRAME FRAMES FLAGS MAPPINGS`: number, count, hexadecimal kpageflags, mappings of each. Frames are
//!   renumbered in order, on a host with several NUMA nodes within each memory block.
//! - A content line is `FINGERPRINT KIND`, for a pattern with its word.

use pagefold_base::content::ContentKind;
use pagefold_base::{AddressRange, Fingerprint, Pfn};
use pagefold_host::{FrameFlags, PagemapEntry};
use std::fmt;

/// The content of recorded pages, if known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedContent {
    /// It was not read.
    Unknown,
    /// It changed while it was recorded.
    Volatile,
    /// It had this fingerprint.
    Known(Fingerprint),
}

/// The maximum number of pages in a line or a run, so that they are counted in 32 bits.
pub const MAX_PAGES_PER_LINE: u64 = (u32::MAX / 2) as u64;

/// Adjacent pages with the same properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageLine {
    /// The address of the first page.
    pub address: u64,
    /// The number of pages.
    pub pages: u64,
    /// The frame of the first page; those of the others follow it.
    pub first_frame: Option<Pfn>,
    /// Whether they belong to a file or to shared memory.
    pub file: bool,
    /// Whether no other process maps them.
    pub exclusive: bool,
    /// Whether a huge page maps them.
    pub huge: bool,
    /// Whether they are KSM pages.
    pub merged: bool,
    /// Whether they map the kernel's zero page.
    pub zero_page: bool,
    /// Their content.
    pub content: RecordedContent,
}

impl PageLine {
    /// The first address after the pages.
    pub fn end_address(&self, page_len: u64) -> u64 {
        self.address + self.pages * page_len
    }

    /// Whether KSM could merge the pages, if the region permits.
    pub fn is_resident_anonymous(&self) -> bool {
        !self.file && !self.zero_page
    }

    /// The part within a range.
    pub fn clip_to(&self, range: AddressRange, page_len: u64) -> Self {
        let start = self.address.max(range.start);
        let end = self.end_address(page_len).min(range.end);
        let skipped = (start - self.address) / page_len;
        Self {
            address: start,
            pages: end.saturating_sub(start) / page_len,
            first_frame: self.first_frame.map(|frame| Pfn(frame.0 + skipped)),
            ..*self
        }
    }

    /// The pagemap entry of one of the pages.
    pub fn pagemap_entry(&self, page_index: u64) -> PagemapEntry {
        PagemapEntry {
            present: true,
            swapped: false,
            file: self.file,
            exclusive: self.exclusive,
            frame: self.first_frame.map(|frame| Pfn(frame.0 + page_index)),
        }
    }

    /// Append the next page, if one line can describe both. `next` is a line of one page.
    pub fn try_append(&mut self, next: &Self, page_len: u64) -> bool {
        let follows = next.address == self.end_address(page_len)
            && next.first_frame == self.first_frame.map(|frame| Pfn(frame.0 + self.pages))
            && (next.file, next.exclusive, next.huge, next.merged, next.zero_page, next.content)
                == (self.file, self.exclusive, self.huge, self.merged, self.zero_page, self.content);
        self.pages += u64::from(follows);
        follows
    }
}

impl fmt::Display for PageLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x} {} ", self.address, self.pages)?;
        match self.first_frame {
            Some(frame) => write!(f, "{} ", frame.0)?,
            None => f.write_str("- ")?,
        }
        let letters =
            [(self.file, 'f'), (self.exclusive, 'x'), (self.huge, 'h'), (self.merged, 'm'), (self.zero_page, 'z')];
        let flags: String = letters.iter().filter(|(set, _)| *set).map(|(_, letter)| letter).collect();
        f.write_str(if flags.is_empty() { "-" } else { &flags })?;
        match self.content {
            RecordedContent::Unknown => f.write_str(" -"),
            RecordedContent::Volatile => f.write_str(" volatile"),
            RecordedContent::Known(Fingerprint::ZERO_PAGE) => f.write_str(" zero"),
            RecordedContent::Known(fingerprint) => write!(f, " {:016x}", fingerprint.0),
        }
    }
}

/// Parse a page line.
pub fn parse_page_line(line: &str) -> Option<PageLine> {
    let mut words = line.split(' ');
    let address = u64::from_str_radix(words.next()?, 16).ok()?;
    let pages = words.next()?.parse().ok().filter(|&pages| (1..=MAX_PAGES_PER_LINE).contains(&pages))?;
    let frame = match words.next()? {
        "-" => None,
        frame => Some(Pfn(frame.parse().ok().filter(|&frame| frame < 1 << 55)?)),
    };
    let flags = words.next()?;
    let content = match words.next()? {
        "-" => RecordedContent::Unknown,
        "volatile" => RecordedContent::Volatile,
        "zero" => RecordedContent::Known(Fingerprint::ZERO_PAGE),
        fingerprint => RecordedContent::Known(Fingerprint(u64::from_str_radix(fingerprint, 16).ok()?)),
    };
    // Each address of the run is valid, so nothing overflows later, for any page size.
    address.checked_add(pages.checked_mul(1 << 30)?)?;
    let has_flag = |letter| flags.contains(letter);
    words.next().is_none().then_some(PageLine {
        address,
        pages,
        first_frame: frame,
        file: has_flag('f'),
        exclusive: has_flag('x'),
        huge: has_flag('h'),
        merged: has_flag('m'),
        zero_page: has_flag('z'),
        content,
    })
}

/// The first of some lines, sorted by address, that does not begin at a page boundary or overlaps the next line.
pub fn first_misplaced_line(lines: &[PageLine], page_len: u64) -> Option<String> {
    let next_addresses = lines.iter().skip(1).map(|next| next.address).chain([u64::MAX]);
    let is_misplaced =
        |line: &PageLine, next| !line.address.is_multiple_of(page_len) || line.end_address(page_len) > next;
    lines.iter().zip(next_addresses).find(|&(line, next)| is_misplaced(line, next)).map(|(line, _)| line.to_string())
}

/// Adjacent frames with the same properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameLine {
    /// The first frame.
    pub first_frame: Pfn,
    /// The number of frames.
    pub frame_count: u64,
    /// The flags of each frame.
    pub flags: FrameFlags,
    /// The number of mappings of each frame.
    pub mappings: u64,
}

impl FrameLine {
    /// Append the next frame, if one line can describe both. `next` is a line of one frame.
    pub fn try_append(&mut self, next: &Self) -> bool {
        let follows = next.first_frame.0 == self.first_frame.0 + self.frame_count
            && (next.flags, next.mappings) == (self.flags, self.mappings);
        self.frame_count += u64::from(follows);
        follows
    }
}

impl fmt::Display for FrameLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:x} {}", self.first_frame.0, self.frame_count, self.flags.0, self.mappings)
    }
}

/// Parse a frame line.
pub fn parse_frame_line(line: &str) -> Option<FrameLine> {
    let mut words = line.split(' ');
    let frame = Pfn(words.next()?.parse().ok()?);
    let frames = words.next()?.parse().ok()?;
    frame.0.checked_add(frames)?;
    let flags = FrameFlags(u64::from_str_radix(words.next()?, 16).ok()?);
    let mappings = words.next()?.parse().ok()?;
    words.next().is_none().then_some(FrameLine { first_frame: frame, frame_count: frames, flags, mappings })
}

/// Format a content line.
pub fn format_content_line(fingerprint: Fingerprint, kind: ContentKind) -> String {
    let kind = match kind {
        ContentKind::Zero => "zero".to_owned(),
        ContentKind::Pattern(word) => format!("pattern {word:016x}"),
        ContentKind::Elf => "elf".to_owned(),
        ContentKind::Text => "text".to_owned(),
        ContentKind::Other => "other".to_owned(),
    };
    format!("{:016x} {kind}", fingerprint.0)
}

/// Parse a content line.
pub fn parse_content_line(line: &str) -> Option<(Fingerprint, ContentKind)> {
    let (fingerprint, kind) = line.split_once(' ')?;
    let kind = match kind.split_once(' ') {
        Some(("pattern", word)) => ContentKind::Pattern(u64::from_str_radix(word, 16).ok()?),
        Some(_) => return None,
        None => match kind {
            "zero" => ContentKind::Zero,
            "elf" => ContentKind::Elf,
            "text" => ContentKind::Text,
            "other" => ContentKind::Other,
            _ => return None,
        },
    };
    Some((Fingerprint(u64::from_str_radix(fingerprint, 16).ok()?), kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_page_line() -> impl Strategy<Value = PageLine> {
        let content = prop_oneof![
            Just(RecordedContent::Unknown),
            Just(RecordedContent::Volatile),
            any::<u64>().prop_map(|value| RecordedContent::Known(Fingerprint(value))),
        ];
        (0u64..1 << 47, 1u64..1 << 20, proptest::option::of(0u64..1 << 40), any::<[bool; 5]>(), content).prop_map(
            |(page, pages, frame, [file, exclusive, huge, merged, zero_page], content)| PageLine {
                address: page << 12,
                pages,
                first_frame: frame.map(Pfn),
                file,
                exclusive,
                huge,
                merged,
                zero_page,
                content,
            },
        )
    }

    proptest! {
        #[test]
        fn page_lines_round_trip(line in any_page_line()) {
            prop_assert_eq!(parse_page_line(&line.to_string()), Some(line));
        }

        #[test]
        fn frame_lines_round_trip(frame in 0u64..1 << 40, frames in 1u64..1 << 20, flags: u64, mappings: u64) {
            let line = FrameLine { first_frame: Pfn(frame), frame_count: frames, flags: FrameFlags(flags), mappings };
            prop_assert_eq!(parse_frame_line(&line.to_string()), Some(line));
        }

        #[test]
        fn damaged_lines_do_not_panic(line in "\\PC{0,60}") {
            let _ = (parse_page_line(&line), parse_frame_line(&line), parse_content_line(&line));
        }

        #[test]
        fn appended_lines_keep_each_page(start in 1u64..1 << 30, frame in proptest::option::of(0u64..1 << 30)) {
            let page = |i: u64| PageLine {
                address: (start + i) << 12, pages: 1, first_frame: frame.map(|frame| Pfn(frame + i)),
                file: false, exclusive: true, huge: false, merged: false, zero_page: false, content: RecordedContent::Unknown,
            };
            let mut run = page(0);
            let joined = run.try_append(&page(1), 4096);
            prop_assert_eq!(joined, frame.is_some() || run.first_frame.is_none() && joined);
            prop_assert!(!run.try_append(&page(5), 4096));
            for i in 0..run.pages {
                prop_assert_eq!(run.pagemap_entry(i), page(i).pagemap_entry(0));
            }
        }
    }

    #[test]
    fn overlapping_or_unaligned_lines_are_found() {
        let check = |lines: &[&str], wrong: Option<&str>| {
            let lines: Vec<_> = lines.iter().map(|line| parse_page_line(line).unwrap()).collect();
            assert_eq!(first_misplaced_line(&lines, 4096).as_deref(), wrong);
        };
        check(&["1000 2 - - zero", "3000 1 - - zero"], None);
        check(&["1000 2 - - zero", "2000 1 - - zero"], Some("1000 2 - - zero"));
        check(&["1000 1 - - zero", "1000 1 - - zero"], Some("1000 1 - - zero"));
        check(&["1000 1 - - zero", "2800 1 - - zero"], Some("2800 1 - - zero"));
    }

    #[test]
    fn content_lines_round_trip() {
        for kind in
            [ContentKind::Zero, ContentKind::Pattern(0xcc), ContentKind::Elf, ContentKind::Text, ContentKind::Other]
        {
            assert_eq!(parse_content_line(&format_content_line(Fingerprint(7), kind)), Some((Fingerprint(7), kind)));
        }
    }
}
