//! A host in memory for the tests of this crate: the files of `/sys/kernel/mm/ksm`, behaving as the kernel's do, and
//! what else a policy reads. It has no process but those that are put into its files, and none can be changed.

use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_host::{FrameFlags, Host, Mapping, PageView, Process, Run, Way};
use pagefold_model::ksm::Setting;
use pagefold_model::{Absent, AddressRange, PageSize, Pfn, Pid, ProcessId, Reading};
use std::collections::BTreeMap;
use std::sync::Mutex;

pub struct Fake {
    files: Mutex<BTreeMap<String, String>>,
    written: Mutex<Vec<String>>,
}

impl Fake {
    /// A kernel as it was booted, with 10,000,000 kB of memory.
    pub fn new() -> Self {
        let fake = Self { files: Mutex::default(), written: Mutex::default() };
        let settings = [
            ("advisor_mode", "none"),
            ("advisor_target_scan_time", "200"),
            ("advisor_max_cpu", "70"),
            ("advisor_min_pages_to_scan", "500"),
            ("advisor_max_pages_to_scan", "30000"),
            ("pages_to_scan", "100"),
            ("sleep_millisecs", "20"),
            ("use_zero_pages", "0"),
            ("smart_scan", "1"),
            ("max_page_sharing", "256"),
            ("merge_across_nodes", "1"),
            ("run", "0"),
        ];
        for (file, value) in settings {
            fake.put(file, value);
        }
        fake.file("proc/sys/kernel/random/boot_id", "this-boot\n");
        fake.free(5_000_000);
        fake
    }

    /// The value of a setting; of `advisor_mode` without the brackets.
    pub fn value(&self, setting: &str) -> String {
        let files = self.files.lock().unwrap();
        files[&format!("sys/kernel/mm/ksm/{setting}")].trim().to_owned()
    }

    /// All settings.
    pub fn values(&self) -> Vec<String> {
        Setting::ALL.iter().map(|setting| format!("{}={}", setting.file(), self.value(setting.file()))).collect()
    }

    /// Write a setting as somebody else, without asking the kernel.
    pub fn put(&self, setting: &str, value: &str) {
        self.file(&format!("sys/kernel/mm/ksm/{setting}"), &format!("{value}\n"));
    }

    /// Make or replace a file.
    pub fn file(&self, path: &str, text: &str) {
        self.files.lock().unwrap().insert(path.to_owned(), text.to_owned());
    }

    /// So much free memory, in kB, of 10,000,000.
    pub fn free(&self, kib: u64) {
        let text = format!("MemTotal: 10000000 kB\nMemFree: {kib} kB\nBuffers: 0 kB\nCached: 0 kB\n");
        self.file("proc/meminfo", &text);
    }

    /// The settings that were written through the port, in order.
    pub fn written(&self) -> Vec<String> {
        self.written.lock().unwrap().clone()
    }

    fn set(&self, setting: Setting, value: &str) -> Result<(), Refusal> {
        let invalid = || Err(Refusal::Failed(format!("writing {value} to {}: Invalid argument", setting.file())));
        if pagefold_model::policy::check(setting, value).is_err() {
            return invalid();
        }
        // mm/ksm.c, `pages_to_scan_store`, `advisor_mode_store`.
        match setting {
            Setting::PagesToScan if self.value("advisor_mode") == "scan-time" => return invalid(),
            Setting::AdvisorMode if self.value("advisor_mode") != value => {
                let start = if value == "none" { "100".to_owned() } else { self.value("advisor_min_pages_to_scan") };
                self.put("pages_to_scan", &start);
            }
            _ => {}
        }
        self.put(setting.file(), value);
        Ok(())
    }
}

impl Host for Fake {
    fn describe(&self) -> String {
        "a host in memory".to_owned()
    }

    fn page_size(&self) -> PageSize {
        PageSize::new(4096).unwrap()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        self.files.lock().unwrap().get(path).map(|text| text.clone().into_bytes()).ok_or(Absent::NotOnThisKernel)
    }

    fn list(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        let files = self.files.lock().unwrap();
        let number = |path: &String| path.strip_prefix("proc/")?.strip_suffix("/stat")?.parse().ok().map(Pid);
        Ok(files.keys().filter_map(number).collect())
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn Process + '_>> {
        self.read(&format!("proc/{pid}/stat")).map_err(|_| Absent::Vanished)?;
        Ok(Box::new(FakeProcess { host: self, pid }))
    }

    fn frame_flags(&self, _: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        Err(Absent::Denied)
    }

    fn frame_mappings(&self, _: &[Pfn]) -> Reading<Vec<u64>> {
        Err(Absent::Denied)
    }

    fn apply(&self, action: &Action) -> Result<Effect, Refusal> {
        let Action::Set { setting, value } = action else { return Err(Refusal::Vanished) };
        self.set(*setting, value)?;
        self.written.lock().unwrap().push(format!("{}={value}", setting.file()));
        Ok(Effect::default())
    }
}

struct FakeProcess<'a> {
    host: &'a Fake,
    pid: Pid,
}

impl Process for FakeProcess<'_> {
    fn id(&self) -> ProcessId {
        ProcessId { pid: self.pid, start_time: 1 }
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        self.host.read(&format!("proc/{}/{file}", self.pid))
    }

    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }

    fn resident(&self, _: &[AddressRange]) -> Reading<Vec<Run>> {
        Err(Absent::NotOnThisKernel)
    }

    fn mappings(&self, _: AddressRange) -> Reading<Vec<Mapping>> {
        Err(Absent::NotOnThisKernel)
    }

    fn contents(&self, _: Way, _: &[Run], _: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        Err(Absent::NotOnThisKernel)
    }
}
