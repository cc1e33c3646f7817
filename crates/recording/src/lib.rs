//! Reads a recorded host from a folder, and creates such folders.
//!
//! A recording is for bug reports: a folder of readable files. Fingerprints under a key that is discarded replace page
//! contents. So a recording shows which pages are equal, but none of their content.
//!
//! ```text
//! recording.toml        about the recording: schema, page size, omissions
//! files/                /proc and /sys files, byte for byte, below their own paths
//!   proc/PID/cmdline    of recognized monitors and tuners; of other programs only the first word
//!   proc/PID/environ    only the variables that name a job
//!   proc/PID/guest_agent/   answers of the agent in a guest, if it was asked
//!   proc/PID/qemu_monitor/  answers of QEMU's control monitor
//!   proc/PID/fd.links   the link targets of a directory; of open files only devices and anonymous ones
//!   etc/libvirt/qemu, run/libvirt/qemu   libvirt's domains without passwords and other secrets
//!   DIRECTORY/.names    the names in a listed directory
//!   FILE.mode           the permission bits of a file in octal, where they were read
//! absent.txt            files that could not be read, with the reason
//! pages/PID.txt         the pages of a process: see `lines`
//! frames.txt            the frames, renumbered: see `lines`
//! contents.txt          kinds of the most frequent contents, by fingerprint
//! ```
//!
//! A trace has one folder with such a recording for each point in time: see [`trace`].
//!
//! [`HostRecorder`] creates a recording. It is a host that forwards each request to another host and stores the
//! answers. So a recording contains exactly the data that the recorded commands read.

#![forbid(unsafe_code)]

pub mod lines;
mod recorder;
pub mod trace;

pub use recorder::HostRecorder;

use lines::{FrameLine, PageLine};
use pagefold_base::content::ContentKind;
use pagefold_base::{Absent, AddressRange, Fingerprint, PageSize, Pfn, Pid, ProcessId, Reading};
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::guest_agent::{self, AgentAccess, GuestQuestion};
use pagefold_host::observe::NumaNodes;
use pagefold_host::qemu_monitor::{self, MonitorAccess, MonitorQuestion};
use pagefold_host::{FrameFlags, Host, PageContent, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// The schema, in the first line of `recording.toml`.
pub const RECORDING_SCHEMA: &str = "pagefold.recording/1";

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// A file cannot be read.
    #[error("{path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file has an unexpected content.
    #[error("{path}: {what}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

/// A recorded host, read from a folder.
#[derive(Debug)]
pub struct Recording {
    root: PathBuf,
    page_size: PageSize,
    pass_interval: Option<Duration>,
    absent: BTreeMap<String, Absent>,
    /// Frames by the first frame of each line, and kinds by content. Read at the first request, like
    /// [`Recording::process_pages`], because most recordings of a trace need neither.
    frames_by_first: OnceLock<Reading<BTreeMap<u64, FrameLine>>>,
    content_kinds: OnceLock<Reading<BTreeMap<Fingerprint, ContentKind>>>,
    /// Pages of the processes requested so far, because a census opens each process many times.
    pages_by_pid: Mutex<BTreeMap<Pid, Arc<Vec<PageLine>>>>,
}

impl Recording {
    /// Open the recording in a folder; for a trace the last recording.
    pub fn open(root: &Path) -> Result<Self, RecordingError> {
        let last = trace::recording_folders(root)?.and_then(|mut folders| folders.pop());
        let recording = Self::open_lazily(last.as_deref().unwrap_or(root))?;
        let (frames, kinds) = (recording.read_frames()?, recording.read_kinds()?);
        Ok(Self { frames_by_first: Ok(frames).into(), content_kinds: Ok(kinds).into(), ..recording })
    }

    /// Open the recording before the last one of a trace, for figures that are increases of counters. `None` if there is
    /// only one.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn open_previous(root: &Path) -> Result<Option<Self>, RecordingError> {
        let folders = trace::recording_folders(root)?.unwrap_or_default();
        folders.iter().rev().nth(1).map(|folder| Self::open_lazily(folder)).transpose()
    }

    /// Open it without reading frames and contents; errors in them are reported at the first request.
    fn open_lazily(root: &Path) -> Result<Self, RecordingError> {
        let header = read_text(&root.join("recording.toml"))?;
        let malformed = |what: String| RecordingError::Malformed { path: root.join("recording.toml"), what };
        if toml_value(&header, "schema") != Some(&format!("\"{RECORDING_SCHEMA}\"")) {
            return Err(malformed(format!("expected schema = \"{RECORDING_SCHEMA}\"")));
        }
        let page_size = toml_value(&header, "page_size")
            .and_then(|bytes| PageSize::new(bytes.parse().ok()?))
            .ok_or_else(|| malformed("page_size is no power of two".to_owned()))?;
        let pass_seconds = toml_value(&header, "settle_seconds").and_then(|seconds| seconds.parse().ok());
        let lines = |name: &str| read_optional_text(&root.join(name));
        let mut absent = BTreeMap::new();
        for line in lines("absent.txt")?.lines() {
            if let Some((path, reason)) = line.split_once('\t') {
                absent.insert(path.to_owned(), reason_from_text(reason));
            }
        }
        Ok(Self {
            root: root.to_owned(),
            page_size,
            pass_interval: pass_seconds
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .filter(|interval| !interval.is_zero()),
            absent,
            frames_by_first: OnceLock::new(),
            content_kinds: OnceLock::new(),
            pages_by_pid: Mutex::default(),
        })
    }

    /// The pause between the two passes that found the recorded volatile pages; `None` if there was one pass.
    pub fn pass_interval(&self) -> Option<Duration> {
        self.pass_interval
    }

    fn read_frames(&self) -> Result<BTreeMap<u64, FrameLine>, RecordingError> {
        let lines = parse_lines(&self.root.join("frames.txt"), lines::parse_frame_line)?;
        Ok(lines.into_iter().map(|line| (line.first_frame.0, line)).collect())
    }

    fn read_kinds(&self) -> Result<BTreeMap<Fingerprint, ContentKind>, RecordingError> {
        Ok(parse_lines(&self.root.join("contents.txt"), lines::parse_content_line)?.into_iter().collect())
    }

    fn frames(&self) -> Reading<&BTreeMap<u64, FrameLine>> {
        self.frames_by_first.get_or_init(|| self.read_frames().map_err(error_to_absent)).as_ref().map_err(Clone::clone)
    }

    fn content_kinds(&self) -> Reading<&BTreeMap<Fingerprint, ContentKind>> {
        self.content_kinds.get_or_init(|| self.read_kinds().map_err(error_to_absent)).as_ref().map_err(Clone::clone)
    }

    /// The pages of a process, in address order.
    fn process_pages(&self, pid: Pid) -> Reading<Arc<Vec<PageLine>>> {
        let mut cached = self.pages_by_pid.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pages) = cached.get(&pid) {
            return Ok(Arc::clone(pages));
        }
        let path = self.root.join("pages").join(format!("{pid}.txt"));
        let mut pages = parse_lines(&path, lines::parse_page_line).map_err(error_to_absent)?;
        pages.sort_by_key(|line| line.address);
        if let Some(line) = lines::first_misplaced_line(&pages, self.page_size.bytes()) {
            let problem = format!("{}: {line:?} overlaps another line or is no whole page", path.display());
            return Err(Absent::Malformed(problem));
        }
        let pages = Arc::new(pages);
        cached.insert(pid, Arc::clone(&pages));
        Ok(pages)
    }

    fn read_recorded_file(&self, path: &str) -> Reading<Vec<u8>> {
        fs::read(self.root.join("files").join(path)).map_err(|_| self.absence_reason(path))
    }

    /// Why something is not in the recording: its own reason, or that of its parent directory.
    fn absence_reason(&self, path: &str) -> Absent {
        let mut path = path;
        loop {
            if let Some(why) = self.absent.get(path) {
                return why.clone();
            }
            match path.rsplit_once('/') {
                Some((parent, _)) => path = parent,
                None => return Absent::NotOnThisKernel,
            }
        }
    }

    fn list_recorded_names(&self, path: &str) -> Reading<Vec<String>> {
        let names = self.read_recorded_file(&format!("{path}/.names")).map_err(|_| self.absence_reason(path))?;
        Ok(String::from_utf8_lossy(&names).lines().map(str::to_owned).collect())
    }

    fn lookup_frames<T>(&self, frames: &[Pfn], value: impl Fn(&FrameLine) -> T) -> Reading<Vec<T>> {
        let lines = self.frames()?;
        if lines.is_empty() {
            return Err(self.absence_reason("proc/kpageflags"));
        }
        let line_of = |frame: &Pfn| {
            let (_, line) = lines.range(..=frame.0).next_back()?;
            (frame.0 < line.first_frame.0 + line.frame_count).then_some(line)
        };
        frames.iter().map(|frame| line_of(frame).map(&value).ok_or(Absent::Vanished)).collect()
    }
}

impl Host for Recording {
    fn describe(&self) -> String {
        format!("recording {}", self.root.display())
    }

    fn page_size(&self) -> PageSize {
        self.page_size
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        self.read_recorded_file(path)
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        self.list_recorded_names(path)
    }

    fn file_mode(&self, path: &str) -> Reading<u32> {
        pagefold_host::parse::file_mode(&self.read_recorded_file(&format!("{path}.mode"))?)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        let mut pids: Vec<_> =
            self.list_recorded_names("proc")?.iter().filter_map(|name| name.parse().ok().map(Pid)).collect();
        pids.sort();
        Ok(pids)
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let directory = format!("proc/{pid}");
        let start_time =
            pagefold_host::parse::stat(&self.read_recorded_file(&format!("{directory}/stat"))?)?.start_time;
        Ok(Box::new(RecordedProcess { recording: self, id: ProcessId { pid, start_time }, directory }))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.lookup_frames(frames, |line| line.flags)
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.lookup_frames(frames, |line| line.mappings)
    }

    fn apply(&self, _: &Action) -> Result<ActionOutcome, ActionError> {
        Err(ActionError::ReadOnly)
    }
}

/// A process of a recording.
struct RecordedProcess<'a> {
    recording: &'a Recording,
    id: ProcessId,
    directory: String,
}

/// The lines that overlap a range, each clipped to it.
fn lines_in_range(pages: &[PageLine], range: AddressRange, page_len: u64) -> impl Iterator<Item = PageLine> + '_ {
    let first = pages.partition_point(|line| line.end_address(page_len) <= range.start);
    pages[first..]
        .iter()
        .take_while(move |line| line.address < range.end)
        .map(move |line| line.clip_to(range, page_len))
}

impl RecordedProcess<'_> {
    /// Answers at these paths. They are absent as a whole only if the recording has none of them.
    fn read_answers(&self, folder: &str, paths: impl Iterator<Item = String>) -> Reading<Vec<Reading<Vec<u8>>>> {
        let paths: Vec<String> = paths.collect();
        let answers: Vec<_> = paths.iter().map(|path| self.read(path)).collect();
        let is_refused = |path: &String| self.recording.absent.contains_key(&format!("{}/{path}", self.directory));
        let is_reached = answers.iter().any(Result::is_ok) || paths.iter().any(is_refused);
        let whole = || self.recording.absence_reason(&format!("{}/{folder}", self.directory));
        if is_reached { Ok(answers) } else { Err(whole()) }
    }
}

impl ProcessHandle for RecordedProcess<'_> {
    fn id(&self) -> ProcessId {
        self.id
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        self.recording.read_recorded_file(&format!("{}/{file}", self.directory))
    }

    fn links(&self, directory: &str) -> Reading<Vec<String>> {
        let path = format!("{}/{directory}", self.directory);
        let links = self
            .recording
            .read_recorded_file(&format!("{path}.links"))
            .map_err(|_| self.recording.absence_reason(&path))?;
        Ok(String::from_utf8_lossy(&links).lines().map(str::to_owned).collect())
    }

    fn ask_guest_agent(&self, questions: &[GuestQuestion], _: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        self.read_answers(guest_agent::RECORD_FOLDER, questions.iter().map(GuestQuestion::record_path))
    }

    fn ask_monitor(&self, questions: &[MonitorQuestion], _: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        self.read_answers(qemu_monitor::RECORD_FOLDER, questions.iter().map(|question| question.record_path()))
    }

    /// The nodes of the frames. The zero page has none, as for move_pages(2).
    fn page_nodes(&self, range: AddressRange) -> Reading<Vec<Option<u32>>> {
        let nodes = NumaNodes::read(self.recording)?;
        let entries = self.mappings(range)?;
        if entries.iter().any(|entry| entry.present && entry.frame.is_none()) {
            return Err(Absent::Denied);
        }
        let frames: Vec<Pfn> = entries.iter().filter_map(|entry| entry.frame).collect();
        let mut flags = self.recording.frame_flags(&frames)?.into_iter();
        let mut node = |frame| flags.next().filter(|flags| !flags.is_zero_page()).map(|_| nodes.node_of_frame(frame));
        Ok(entries.iter().map(|entry| entry.frame).map(|frame| frame.and_then(&mut node)).collect())
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        let page_len = self.recording.page_size.bytes();
        let pages = self.recording.process_pages(self.id.pid)?;
        let mut runs: Vec<PageRun> = Vec::new();
        for &range in ranges {
            let first = runs.len();
            for line in lines_in_range(&pages, range, page_len).filter(|line| line.is_resident_anonymous()) {
                match runs[first..].last_mut() {
                    Some(run)
                        if run.huge == line.huge
                            && run.address + u64::from(run.pages) * page_len == line.address
                            && u64::from(run.pages) + line.pages <= lines::MAX_PAGES_PER_LINE =>
                    {
                        run.pages += line.pages as u32;
                    }
                    _ => runs.push(PageRun { address: line.address, pages: line.pages as u32, huge: line.huge }),
                }
            }
        }
        Ok(runs)
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        let page_len = self.recording.page_size.bytes();
        let count = self.recording.page_size.pages_in(range.bytes()).0 as usize;
        let mut mappings = vec![PagemapEntry::default(); count];
        for line in lines_in_range(&self.recording.process_pages(self.id.pid)?, range, page_len) {
            let first = ((line.address - range.start) / page_len) as usize;
            for (i, mapping) in mappings[first..].iter_mut().take(line.pages as usize).enumerate() {
                *mapping = line.pagemap_entry(i as u64);
            }
        }
        Ok(mappings)
    }

    fn contents(&self, method: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        let page_len = self.recording.page_size.bytes();
        let (pages, kinds) = (self.recording.process_pages(self.id.pid)?, self.recording.content_kinds()?);
        let wants_merged = method == ReadMethod::ProcMem { detect_merged: true };
        let not_resident = PageView { content: PageContent::NotResident, merged: false, exclusive: true, frame: None };
        let mut position = 0;
        for run in runs {
            let end = run.address + u64::from(run.pages) * page_len;
            let mut address = run.address;
            let range = AddressRange { start: address, end };
            for line in lines_in_range(&pages, range, page_len).filter(PageLine::is_resident_anonymous) {
                while address < line.address {
                    sink(position, not_resident);
                    address += page_len;
                    position += 1;
                }
                for page in 0..line.pages {
                    let content = match line.content {
                        lines::RecordedContent::Unknown => PageContent::NotResident,
                        lines::RecordedContent::Volatile => PageContent::Volatile,
                        lines::RecordedContent::Known(fingerprint) => {
                            PageContent::Fingerprint(fingerprint, kinds.get(&fingerprint).copied())
                        }
                    };
                    let merged = wants_merged && line.merged;
                    let frame = line.pagemap_entry(page).frame;
                    sink(position, PageView { content, merged, exclusive: line.exclusive, frame });
                    address += page_len;
                    position += 1;
                }
            }
            while address < end {
                sink(position, not_resident);
                address += page_len;
                position += 1;
            }
        }
        Ok(())
    }
}

/// The value of a key in `recording.toml`.
fn toml_value<'a>(header: &'a str, name: &str) -> Option<&'a str> {
    header.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().strip_prefix('=')?.trim()))
}

fn read_text(path: &Path) -> Result<String, RecordingError> {
    fs::read_to_string(path).map_err(|source| RecordingError::Io { path: path.to_owned(), source })
}

/// Read an optional file of a recording.
fn read_optional_text(path: &Path) -> Result<String, RecordingError> {
    match read_text(path) {
        Err(RecordingError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        text => text,
    }
}

fn parse_lines<T>(path: &Path, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, RecordingError> {
    let text = read_optional_text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|(i, line)| {
            parse(line).ok_or_else(|| RecordingError::Malformed {
                path: path.to_owned(),
                what: format!("line {}: {line:?}", i + 1),
            })
        })
        .collect()
}

/// The reading error for requests of data from a file with this error.
fn error_to_absent(error: RecordingError) -> Absent {
    Absent::Malformed(error.to_string())
}

fn reason_to_text(why: &Absent) -> String {
    match why {
        Absent::NotOnThisKernel => "not_on_this_kernel".to_owned(),
        Absent::Denied => "denied".to_owned(),
        Absent::Vanished => "vanished".to_owned(),
        Absent::Malformed(what) => format!("malformed {}", what.replace('\n', " ")),
        Absent::NoAnswer(what) => format!("no_answer {}", what.replace('\n', " ")),
        Absent::NotAsked(what) => format!("not_asked {}", what.replace('\n', " ")),
    }
}

fn reason_from_text(text: &str) -> Absent {
    match text {
        "not_on_this_kernel" => Absent::NotOnThisKernel,
        "denied" => Absent::Denied,
        "vanished" => Absent::Vanished,
        other => match other.split_once(' ') {
            Some(("no_answer", what)) => Absent::NoAnswer(what.to_owned()),
            Some(("not_asked", what)) => Absent::NotAsked(what.to_owned()),
            Some(("malformed", what)) => Absent::Malformed(what.to_owned()),
            _ => Absent::Malformed(other.to_owned()),
        },
    }
}
