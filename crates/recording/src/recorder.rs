//! A host that forwards each request to another host and stores the answers in a folder.

use super::{RECORDING_SCHEMA, reason_to_text};
use delegate::delegate;
use pagefold_base::identity;
use pagefold_base::{Absent, AddressRange, PageSize, Pfn, Pid, ProcessId, Reading};
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::guest_agent::{self, AgentAccess, GuestQuestion};
use pagefold_host::observe::LIBVIRT_STATE_DIRECTORY;
use pagefold_host::parse;
use pagefold_host::qemu_monitor::{self, MonitorAccess, MonitorQuestion};
use pagefold_host::{FrameFlags, Hasher, Host, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

/// Whether a file is libvirt's state or definition of a domain, which may have passwords.
fn is_libvirt_file(path: &str) -> bool {
    path.strip_prefix("etc/libvirt/").is_some()
        || path.strip_prefix(LIBVIRT_STATE_DIRECTORY).is_some_and(|rest| rest.starts_with('/'))
}

/// Stores the files that are read through it. Files are written when they are read; [`HostRecorder::finish`] writes the
/// rest. Pages and frames are forwarded and not stored: the caller writes them.
pub struct HostRecorder<'a> {
    host: &'a dyn Host,
    root: PathBuf,
    keeps_arguments: fn(comm: &str, arguments: &[String]) -> bool,
    visible_pids: Mutex<Option<BTreeSet<Pid>>>,
    absence_reasons: Mutex<BTreeMap<String, Absent>>,
    /// Redacted files of container runtimes. Only at the end it is known which of these to keep.
    label_files: Mutex<BTreeMap<String, Vec<u8>>>,
    first_error: Mutex<Option<io::Error>>,
    finished: bool,
}

impl Drop for HostRecorder<'_> {
    /// Removes an unfinished recording: the folder is empty again.
    fn drop(&mut self) {
        if !self.finished {
            let _ = fs::remove_dir_all(self.root.join("files"));
            let _ = fs::remove_dir_all(self.root.join("pages"));
            for file in ["absent.txt", "contents.txt", "frames.txt"] {
                let _ = fs::remove_file(self.root.join(file));
            }
        }
    }
}

impl<'a> HostRecorder<'a> {
    /// Record `host` into a new or empty folder. Only its owner may enter it, because it contains data of these
    /// processes that other users may not read. Command lines are kept in full where `keeps_arguments` allows it, and
    /// cut to their first word elsewhere.
    pub fn new(
        host: &'a dyn Host,
        root: &Path,
        keeps_arguments: fn(comm: &str, arguments: &[String]) -> bool,
    ) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root)?;
        if fs::read_dir(root)?.next().is_some() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the folder is not empty"));
        }
        fs::create_dir(root.join("files"))?;
        // The owner of the folder could create links in place of the files to be written.
        if fs::metadata(root)?.uid() != fs::metadata(root.join("files"))?.uid() {
            fs::remove_dir(root.join("files"))?;
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the folder belongs to another user"));
        }
        fs::set_permissions(root, fs::Permissions::from_mode(0o700))?;
        fs::create_dir(root.join("pages"))?;
        Ok(Self {
            host,
            root: root.to_owned(),
            keeps_arguments,
            visible_pids: Mutex::default(),
            absence_reasons: Mutex::default(),
            label_files: Mutex::default(),
            first_error: Mutex::default(),
            finished: false,
        })
    }

    /// From now on only these processes are visible, also in the recording. Data of other processes, read to choose
    /// these, is not kept.
    ///
    /// # Panics
    /// If a thread panicked while recording.
    pub fn restrict_to_pids(&self, pids: BTreeSet<Pid>) {
        *self.visible_pids.lock().expect("no thread panicked") = Some(pids);
    }

    /// Write the remaining files. `extra_lines` are added to `recording.toml`.
    ///
    /// The error is the first one since recording began.
    ///
    /// # Panics
    /// If a thread panicked while recording.
    pub fn finish(mut self, extra_lines: &str) -> io::Result<()> {
        if let Some(visible) = self.visible_pids.get_mut().expect("no thread panicked").take() {
            self.remove_other_processes(&visible)?;
        }
        for (path, bytes) in std::mem::take(self.label_files.get_mut().expect("no thread panicked")) {
            self.save_answer(&path, Ok(&bytes));
        }
        if let Some(error) = self.first_error.get_mut().expect("no thread panicked").take() {
            return Err(error);
        }
        let mut absent = String::new();
        for (path, why) in self.absence_reasons.get_mut().expect("no thread panicked") {
            absent.push_str(&format!("{path}\t{}\n", reason_to_text(why)));
        }
        fs::write(self.root.join("absent.txt"), absent)?;
        let page_size = self.host.page_size().bytes();
        fs::write(
            self.root.join("recording.toml"),
            format!("schema = \"{RECORDING_SCHEMA}\"\npage_size = {page_size}\n{extra_lines}"),
        )?;
        self.finished = true;
        Ok(())
    }

    /// Remove the data of processes that are not visible.
    fn remove_other_processes(&mut self, visible_pids: &BTreeSet<Pid>) -> io::Result<()> {
        let is_other = |name: &str| name.parse().is_ok_and(|pid| !visible_pids.contains(&Pid(pid)));
        for entry in fs::read_dir(self.root.join("files/proc"))? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(is_other) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        let cgroup = |pid: &Pid| fs::read(self.root.join(format!("files/proc/{pid}/cgroup"))).ok();
        let cgroups = visible_pids.iter().filter_map(|pid| parse::cgroup(&cgroup(pid)?).ok());
        let visible_label_files: BTreeSet<String> = cgroups.flat_map(|cgroup| identity::label_files(&cgroup)).collect();
        let is_other_label_file = |path: &str| identity::is_label_file(path) && !visible_label_files.contains(path);
        self.label_files.get_mut().expect("no thread panicked").retain(|path, _| !is_other_label_file(path));
        self.remove_other_domains(visible_pids)?;
        let absent = self.absence_reasons.get_mut().expect("no thread panicked");
        // Whose domain an unreadable state belongs to is not known.
        let is_domain_state = |path: &str| path.starts_with(LIBVIRT_STATE_DIRECTORY) && path.ends_with(".xml");
        absent.retain(|path, _| {
            !path.split('/').nth(1).is_some_and(is_other) && !is_other_label_file(path) && !is_domain_state(path)
        });
        Ok(())
    }

    /// Remove the states of libvirt's domains whose processes are not visible, and all names without a recorded state.
    fn remove_other_domains(&self, visible_pids: &BTreeSet<Pid>) -> io::Result<()> {
        let folder = self.root.join("files").join(LIBVIRT_STATE_DIRECTORY);
        if !folder.exists() {
            return Ok(());
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.ends_with(".xml") {
                continue;
            }
            let domain = parse::libvirt_domain_state(&fs::read(entry.path())?);
            if domain.is_ok_and(|domain| visible_pids.contains(&domain.pid)) {
                names.push(name + "\n");
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        names.sort();
        fs::write(folder.join(".names"), names.concat())
    }

    /// Store an answer below its path.
    fn save_answer(&self, path: &str, answer: Reading<&[u8]>) {
        match answer {
            Ok(bytes) => {
                let file = self.root.join("files").join(path);
                let result = file.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&file, bytes));
                if let (Err(error), Ok(mut first_error)) = (result, self.first_error.lock()) {
                    first_error.get_or_insert(error);
                }
            }
            Err(why) => {
                if let Ok(mut absent) = self.absence_reasons.lock() {
                    absent.insert(path.to_owned(), why);
                }
            }
        }
    }

    fn save_lines(&self, path: &str, directory: &str, answer: &Reading<Vec<String>>) {
        match answer {
            Ok(names) => {
                self.save_answer(path, Ok(names.iter().flat_map(|name| [name, "\n"]).collect::<String>().as_bytes()))
            }
            Err(why) => self.save_answer(directory, Err(why.clone())),
        }
    }
}

impl Host for HostRecorder<'_> {
    delegate! {
        to self.host {
            fn describe(&self) -> String;
            fn page_size(&self) -> PageSize;
            fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>>;
            fn now(&self) -> Instant;
            fn sleep(&self, duration: Duration);
            fn join_clock(&self);
            fn page_hasher(&self) -> io::Result<Hasher>;
            fn simulation_failure(&self) -> Option<String>;
            fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool);
            fn unix_time(&self) -> SystemTime;
            fn own_cpu_time(&self) -> Duration;
            fn thread_cpu_time(&self) -> Duration;
        }
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        let answer = self.host.read(path);
        match &answer {
            Ok(bytes) if identity::is_label_file(path) => {
                if let Ok(mut labels) = self.label_files.lock() {
                    labels.insert(path.to_owned(), parse::strip_to_labels(bytes));
                }
            }
            Ok(bytes) if is_libvirt_file(path) => {
                let stripped = parse::strip_libvirt_secrets(bytes);
                self.save_answer(path, stripped.as_deref().map_err(Absent::clone));
            }
            answer => self.save_answer(path, answer.as_deref().map_err(Absent::clone)),
        }
        answer
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        let answer = self.host.list(path);
        self.save_lines(&format!("{path}/.names"), path, &answer);
        answer
    }

    fn file_mode(&self, path: &str) -> Reading<u32> {
        let answer = self.host.file_mode(path);
        let text = answer.as_ref().map(|mode| format!("{mode:o}\n")).map_err(Absent::clone);
        self.save_answer(&format!("{path}.mode"), text.as_deref().map(str::as_bytes).map_err(Absent::clone));
        answer
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        let mut answer = self.host.pids();
        if let (Ok(pids), Ok(visible)) = (&mut answer, self.visible_pids.lock()) {
            pids.retain(|pid| visible.as_ref().is_none_or(|visible| visible.contains(pid)));
        }
        let names = answer.clone().map(|pids| pids.iter().map(Pid::to_string).collect());
        self.save_lines("proc/.names", "proc", &names);
        answer
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let directory = format!("proc/{pid}");
        match self.host.open(pid) {
            Ok(process) => {
                let process = ProcessRecorder { recorder: self, process, directory };
                // Without `stat` a recorded process cannot be opened.
                process.read("stat")?;
                Ok(Box::new(process))
            }
            Err(why) => {
                self.save_answer(&directory, Err(why.clone()));
                Err(why)
            }
        }
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        let answer = self.host.frame_flags(frames);
        if let Err(why) = &answer {
            self.save_answer("proc/kpageflags", Err(why.clone()));
        }
        answer
    }

    fn apply(&self, _: &Action) -> Result<ActionOutcome, ActionError> {
        Err(ActionError::ReadOnly)
    }
}

struct ProcessRecorder<'a> {
    recorder: &'a HostRecorder<'a>,
    process: Box<dyn ProcessHandle + 'a>,
    directory: String,
}

impl ProcessRecorder<'_> {
    /// The part of a file that may be kept.
    fn redact(&self, file: &str, bytes: &[u8]) -> Vec<u8> {
        match file {
            "environ" => parse::job_environment(bytes)
                .into_iter()
                .flat_map(|(name, value)| format!("{name}={value}\0").into_bytes())
                .collect(),
            "cmdline" => {
                let comm = self
                    .process
                    .read("stat")
                    .and_then(|stat| parse::stat(&stat))
                    .map(|stat| stat.comm)
                    .unwrap_or_default();
                let arguments = parse::arguments(bytes);
                if (self.recorder.keeps_arguments)(&comm, &arguments) {
                    bytes.to_vec()
                } else {
                    // A program may have replaced its arguments by one title: `postgres: user database host`.
                    let word = arguments.first().and_then(|first| first.split(' ').next());
                    word.map(|word| format!("{word}\0").into_bytes()).unwrap_or_default()
                }
            }
            _ => bytes.to_vec(),
        }
    }
}

impl ProcessRecorder<'_> {
    /// Stores answers at these paths, or the reason why there are none at the folder.
    fn save_answers(
        &self,
        folder: &str,
        paths: impl Iterator<Item = String>,
        answers: &Reading<Vec<Reading<Vec<u8>>>>,
    ) {
        match answers {
            Ok(answers) => {
                for (path, answer) in paths.zip(answers) {
                    let answer = answer.as_deref().map_err(Absent::clone);
                    self.recorder.save_answer(&format!("{}/{path}", self.directory), answer);
                }
            }
            Err(why) => self.recorder.save_answer(&format!("{}/{folder}", self.directory), Err(why.clone())),
        }
    }
}

impl ProcessHandle for ProcessRecorder<'_> {
    delegate! {
        to self.process {
            fn id(&self) -> ProcessId;
            fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>>;
            fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>>;
            fn contents(&self, method: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()>;
        }
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        let answer = self.process.read(file);
        let path = format!("{}/{file}", self.directory);
        match &answer {
            Ok(bytes) => self.recorder.save_answer(&path, Ok(&self.redact(file, bytes))),
            Err(why) => self.recorder.save_answer(&path, Err(why.clone())),
        }
        answer
    }

    fn ask_guest_agent(&self, questions: &[GuestQuestion], access: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        let answers = self.process.ask_guest_agent(questions, access);
        self.save_answers(guest_agent::RECORD_FOLDER, questions.iter().map(GuestQuestion::record_path), &answers);
        answers
    }

    fn ask_monitor(&self, questions: &[MonitorQuestion], access: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        let answers = self.process.ask_monitor(questions, access);
        let paths = questions.iter().map(|question| question.record_path());
        self.save_answers(qemu_monitor::RECORD_FOLDER, paths, &answers);
        answers
    }

    fn links(&self, directory: &str) -> Reading<Vec<String>> {
        let answer = self.process.links(directory);
        let path = format!("{}/{directory}", self.directory);
        // Paths of open files may be private.
        let is_kept = |link: &String| directory != "fd" || is_device(link) || link.starts_with("anon_inode:");
        let kept = answer.clone().map(|links| links.into_iter().filter(is_kept).collect());
        self.recorder.save_lines(&format!("{path}.links"), &path, &kept);
        answer
    }
}

/// Whether a path is that of a device, and not of a file of a program in a file system below `/dev`.
fn is_device(path: &str) -> bool {
    const FILE_SYSTEMS: [&str; 3] = ["shm/", "mqueue/", "hugepages/"];
    path.strip_prefix("/dev/").is_some_and(|name| !FILE_SYSTEMS.iter().any(|folder| name.starts_with(folder)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recording;
    use pagefold_host::observe;

    /// Two processes in Docker containers, with Docker's files about these. The second container's files are at the
    /// path that a process in another container sees.
    fn host_with_two_containers(root: &Path) -> Recording {
        let file = |path: &str, text: &str| {
            let file = root.join("files").join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        file("proc/.names", "7\n8\n");
        for (pid, id, host) in [(7, "ab".repeat(32), ""), (8, "cd".repeat(32), "proc/1/root/")] {
            let stat = format!("{pid} (web) S 1 1 1 0 -1 4194304{} 30965760 4249\n", " 1".repeat(13));
            file(&format!("proc/{pid}/stat"), &stat);
            file(&format!("proc/{pid}/cgroup"), &format!("0::/system.slice/docker-{id}.scope\n"));
            let config = include_str!("../../host/src/parse/samples/docker-config.v2.json")
                .replace("acme", &format!("tenant{pid}"));
            file(&format!("{host}var/lib/docker/containers/{id}/config.v2.json"), &config);
        }
        fs::write(root.join("recording.toml"), format!("schema = \"{RECORDING_SCHEMA}\"\npage_size = 4096\n")).unwrap();
        Recording::open(root).unwrap()
    }

    fn read_labels(host: &dyn Host, pid: u32) -> Vec<String> {
        let handle = host.open(Pid(pid)).unwrap();
        observe::process(host, &*handle).unwrap().identity.labels
    }

    /// Paths and contents of all files below a folder.
    fn folder_dump(folder: &Path) -> String {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let one = |path: PathBuf| {
            let inside = if path.is_dir() { folder_dump(&path) } else { fs::read_to_string(&path).unwrap() };
            format!("{}\n{inside}\n", path.display())
        };
        entries.map(one).collect()
    }

    #[test]
    fn labels_of_selected_containers_are_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let live = host_with_two_containers(&folder.path().join("live"));
        let kept = folder.path().join("kept");
        let tap = HostRecorder::new(&live, &kept, |_, _| true).unwrap();
        for pid in [7, 8] {
            assert_eq!(read_labels(&tap, pid), ["com.docker.compose.project=shop", &format!("tenant=tenant{pid}")]);
        }
        tap.restrict_to_pids(BTreeSet::from([Pid(8)]));
        assert_eq!(tap.pids().unwrap(), [Pid(8)]);
        tap.finish("").unwrap();
        let everything = folder_dump(&kept);
        assert!(!everything.contains("PASSWORD") && !everything.contains("tenant7"), "{everything}");
        assert!(!everything.contains(&"ab".repeat(32)), "{everything}");
        let replayed = Recording::open(&kept).unwrap();
        assert_eq!(read_labels(&replayed, 8), ["com.docker.compose.project=shop", "tenant=tenant8"]);
    }

    #[test]
    fn answers_of_guests_are_recorded_with_their_reasons() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("live");
        host_with_two_containers(&root);
        fs::create_dir_all(root.join("files/proc/7/guest_agent/proc")).unwrap();
        fs::write(root.join("files/proc/7/guest_agent/proc/stat"), "cpu  1\n").unwrap();
        let refusals = "proc/7/guest_agent/vcpus.json\tno_answer refused\nproc/8/guest_agent\tno_answer it hangs\n";
        fs::write(root.join("absent.txt"), refusals).unwrap();
        let questions = [
            GuestQuestion::Vcpus,
            GuestQuestion::File { path: "/proc/stat", max_bytes: 10 },
            GuestQuestion::TimerConfiguration,
        ];
        let ask = |host: &dyn Host, pid| host.open(Pid(pid)).unwrap().ask_guest_agent(&questions, AgentAccess::Socket);
        let live = Recording::open(&root).unwrap();
        let kept = folder.path().join("kept");
        let recorder = HostRecorder::new(&live, &kept, |_, _| true).unwrap();
        let answers = [7, 8].map(|pid| ask(&recorder, pid));
        let refused = Err(Absent::NoAnswer("refused".to_owned()));
        assert_eq!(answers[0], Ok(vec![refused, Ok(b"cpu  1\n".to_vec()), Err(Absent::NotOnThisKernel)]));
        assert_eq!(answers[1], Err(Absent::NoAnswer("it hangs".to_owned())));
        recorder.finish("").unwrap();
        let replayed = Recording::open(&kept).unwrap();
        assert_eq!([7, 8].map(|pid| ask(&replayed, pid)), answers);
    }

    #[test]
    fn domains_are_recorded_without_secrets_and_without_other_domains() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("live");
        host_with_two_containers(&root);
        let file = |path: String, text: &str| {
            let file = root.join("files").join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        file(format!("{LIBVIRT_STATE_DIRECTORY}/.names"), "db.pid\ndb.xml\nother.xml\nunreadable.xml\n");
        for (name, pid) in [("db", 7), ("other", 8)] {
            let definition = format!(
                "<domain><name>{name}</name><uuid>u-{name}</uuid><devices><graphics passwd='hidden'/></devices></domain>"
            );
            let state = format!("<domstatus pid='{pid}'><vcpus/>{definition}</domstatus>");
            file(format!("{LIBVIRT_STATE_DIRECTORY}/{name}.xml"), &state);
            file(format!("etc/libvirt/qemu/{name}.xml"), &definition);
        }
        file("proc/7/fd.links".to_owned(), "/dev/kvm\n/home/private\n/dev/shm/customer\nanon_inode:kvm-vm\n");
        let live = Recording::open(&root).unwrap();
        let kept = folder.path().join("kept");
        let tap = HostRecorder::new(&live, &kept, |_, _| true).unwrap();
        tap.restrict_to_pids(BTreeSet::from([Pid(7)]));
        assert_eq!(observe::libvirt_domains(&tap).unwrap().len(), 2);
        assert!(tap.read("etc/libvirt/qemu/db.xml").is_ok());
        tap.open(Pid(7)).unwrap().links("fd").unwrap();
        tap.finish("").unwrap();
        let everything = folder_dump(&kept);
        for private in ["hidden", "passwd", "other", "unreadable", "/home", "customer"] {
            assert!(!everything.contains(private), "{private}: {everything}");
        }
        let replayed = Recording::open(&kept).unwrap();
        let domains = observe::libvirt_domains(&replayed).unwrap();
        assert_eq!(domains.iter().map(|domain| (&*domain.name, domain.pid)).collect::<Vec<_>>(), [("db", Pid(7))]);
        assert!(replayed.read("etc/libvirt/qemu/db.xml").unwrap().starts_with(b"<domain>"));
        assert_eq!(replayed.open(Pid(7)).unwrap().links("fd").unwrap(), ["/dev/kvm", "anon_inode:kvm-vm"]);
    }
}
