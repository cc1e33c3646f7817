//! Determines whether the loader of a program honors `LD_PRELOAD`.
//!
//! Mirrors fs/binfmt_elf.c (PT_INTERP names the loader), fs/binfmt_script.c (`#!`), security/commoncap.c
//! (`cap_bprm_creds_from_file` decides on secure execution, in which ld.so ignores most of `LD_PRELOAD`), and execvp(3)
//! of glibc for the search. Limits: it does not check for `nosuid` mounts and `no_new_privs`, which both disable
//! setuid. It does not know which programs the program starts.

use elf::ElfStream;
use elf::abi::{EM_AARCH64, EM_X86_64, PT_INTERP, PT_NOTE};
use elf::endian::AnyEndian;
use elf::file::Class;
use elf::note::Note;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The machine that the preload library is built for.
const ELF_MACHINE: u16 = if cfg!(target_arch = "x86_64") { EM_X86_64 } else { EM_AARCH64 };
/// How often a script may name another as its interpreter (fs/exec.c, `exec_binprm`).
const MAX_INTERPRETER_DEPTH: usize = 5;
/// The longest first line of a script that the kernel reads (include/uapi/linux/binfmts.h, `BINPRM_BUF_SIZE`).
const MAX_SCRIPT_LINE_BYTES: u64 = 256;
/// The longest note segment or loader name that is accepted.
const MAX_SEGMENT_BYTES: u64 = 1 << 16;
/// The path that execvp(3) searches if PATH is unset (confstr(3), `_CS_PATH`).
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Whether the loader of a program honors `LD_PRELOAD`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PreloadSupport {
    /// Its loader is glibc's, which honors `LD_PRELOAD`.
    Honored,
    /// It has no loader that would load the library, with the reason.
    Ignored(String),
}

/// The file that execvp(3) would start. `None` if there is no executable file.
pub fn find_program(name: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    let is_executable =
        |file: &PathBuf| file.is_file() && rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok();
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(is_executable);
    }
    std::env::split_paths(path.unwrap_or(OsStr::new(DEFAULT_PATH)))
        // An empty entry means the working directory.
        .map(|folder| if folder.as_os_str().is_empty() { Path::new(".").join(name) } else { folder.join(name) })
        .find(is_executable)
}

/// Whether a file would be loaded with `LD_PRELOAD`. A script has the support of its interpreter.
pub fn preload_support(file: &Path) -> io::Result<PreloadSupport> {
    let mut file = file.to_owned();
    for _ in 0..MAX_INTERPRETER_DEPTH {
        match script_interpreter(&file)? {
            Some(next) => file = next,
            None => return program_preload_support(&file),
        }
    }
    Ok(PreloadSupport::Ignored("is a script whose interpreter is a script, and so on".to_owned()))
}

/// The interpreter of a script. execvp(3) runs files that are neither scripts nor ELF with the shell.
fn script_interpreter(file: &Path) -> io::Result<Option<PathBuf>> {
    let mut start = Vec::new();
    File::open(file)?.take(MAX_SCRIPT_LINE_BYTES).read_to_end(&mut start)?;
    if let Some(line) = start.strip_prefix(b"#!") {
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let word = line.split(|byte| b" \t".contains(byte)).find(|word| !word.is_empty()).unwrap_or_default();
        return Ok(Some(OsStr::from_bytes(word).into()));
    }
    Ok((!start.starts_with(&elf::abi::ELFMAGIC)).then(|| "/bin/sh".into()))
}

fn program_preload_support(path: &Path) -> io::Result<PreloadSupport> {
    if let Some(why) = secure_execution_reason(path)? {
        return Ok(PreloadSupport::Ignored(why.to_owned()));
    }
    let not_a_program = |error| io::Error::new(io::ErrorKind::InvalidData, format!("not a program: {error}"));
    elf_preload_support(File::open(path)?).map_err(not_a_program)
}

fn elf_preload_support<S: Read + Seek>(stream: S) -> Result<PreloadSupport, elf::ParseError> {
    let ignored = |why: &str| Ok(PreloadSupport::Ignored(why.to_owned()));
    let mut elf = ElfStream::<AnyEndian, S>::open_stream(stream)?;
    if elf.ehdr.class != Class::ELF64 || elf.ehdr.e_machine != ELF_MACHINE {
        return ignored("is built for another processor architecture than the library");
    }
    let segments = elf.segments().clone();
    let segments_of_kind = |kind| segments.iter().filter(move |s| s.p_type == kind && s.p_filesz <= MAX_SEGMENT_BYTES);
    if let Some(segment) = segments_of_kind(PT_INTERP).next() {
        let loader = elf.segment_data(segment)?;
        let musl = loader.windows(7).any(|part| part == b"ld-musl");
        return if musl {
            ignored("uses musl, and the library is made for glibc")
        } else {
            Ok(PreloadSupport::Honored)
        };
    }
    for segment in segments_of_kind(PT_NOTE) {
        // cmd/internal/buildid: the note of the Go linker.
        let is_go =
            |note: Note<'_>| matches!(note, Note::Unknown(note) if note.name_str().is_ok_and(|name| name == "Go"));
        if elf.segment_data_as_notes(segment)?.any(is_go) {
            return ignored("is a Go program, which is linked statically: it has no loader for LD_PRELOAD");
        }
    }
    ignored("is linked statically: it has no loader for LD_PRELOAD")
}

/// Why the loader would run in secure-execution mode, if it would.
fn secure_execution_reason(path: &Path) -> io::Result<Option<&'static str>> {
    const SETUID_MODE: u32 = 0o4000;
    // Without group execute permission the bit means mandatory locking (fs/exec.c, `bprm_fill_uid`).
    const SETGID_EXEC_MODE: u32 = 0o2010;
    let file = fs::metadata(path)?;
    let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
    if file.mode() & SETUID_MODE != 0 && file.uid() != user.as_raw() {
        return Ok(Some("is setuid, and the loader of such programs ignores LD_PRELOAD"));
    }
    if file.mode() & SETGID_EXEC_MODE == SETGID_EXEC_MODE && file.gid() != group.as_raw() {
        return Ok(Some("is setgid, and the loader of such programs ignores LD_PRELOAD"));
    }
    let capabilities =
        rustix::fs::getxattr(path, "security.capability", &mut [0_u8; 0][..]).is_ok_and(|bytes| bytes > 0);
    let why = "has file capabilities, and the loader of such programs ignores LD_PRELOAD";
    Ok((capabilities && !user.is_root()).then_some(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;
    use std::os::unix::fs::PermissionsExt;

    /// An ELF file with only headers and segments, each (type, content).
    fn elf_headers(machine: u16, segments: &[(u32, &[u8])]) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.extend([0; 9]);
        for half in [2, machine] {
            bytes.extend(half.to_le_bytes());
        }
        bytes.extend(1_u32.to_le_bytes());
        for word in [0_u64, 64, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(0_u32.to_le_bytes());
        for half in [64, 56, segments.len() as u16, 64, 0, 0] {
            bytes.extend(half.to_le_bytes());
        }
        let mut offset = 64 + 56 * segments.len() as u64;
        for (kind, content) in segments {
            bytes.extend(kind.to_le_bytes());
            bytes.extend(4_u32.to_le_bytes());
            let length = content.len() as u64;
            for word in [offset, 0, 0, length, length, 4] {
                bytes.extend(word.to_le_bytes());
            }
            offset += length;
        }
        segments.iter().for_each(|(_, content)| bytes.extend(*content));
        bytes
    }

    #[test]
    fn loader_decides_preload_support() {
        let go = b"\x04\0\0\0\x04\0\0\0\x04\0\0\0Go\0\0abcd".as_slice();
        let gnu = b"\x04\0\0\0\x04\0\0\0\x03\0\0\0GNU\0abcd".as_slice();
        let glibc = b"/lib64/ld-linux-x86-64.so.2\0".as_slice();
        for (machine, segments, expected) in [
            (ELF_MACHINE, vec![(PT_INTERP, glibc)], None),
            (ELF_MACHINE, vec![(PT_NOTE, go), (PT_INTERP, glibc)], None),
            (ELF_MACHINE, vec![(PT_INTERP, b"/lib/ld-musl-x86_64.so.1\0".as_slice())], Some("musl")),
            (ELF_MACHINE, vec![(PT_NOTE, gnu), (PT_NOTE, go)], Some("Go program")),
            (ELF_MACHINE, vec![(PT_NOTE, gnu)], Some("linked statically")),
            (40, vec![(PT_INTERP, glibc)], Some("processor")),
        ] {
            let found = elf_preload_support(Cursor::new(elf_headers(machine, &segments))).unwrap();
            match expected {
                None => assert_eq!(found, PreloadSupport::Honored, "{segments:?}"),
                Some(word) => {
                    assert!(matches!(&found, PreloadSupport::Ignored(why) if why.contains(word)), "{found:?}")
                }
            }
        }
    }

    #[test]
    fn truncated_elf_is_rejected_without_panic() {
        let elf = elf_headers(ELF_MACHINE, &[(PT_INTERP, b"/lib64/ld-linux-x86-64.so.2\0")]);
        for length in 0..elf.len() {
            assert!(elf_preload_support(Cursor::new(&elf[..length])).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn script_has_the_support_of_its_interpreter() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let program = put("program", &elf_headers(ELF_MACHINE, &[(PT_NOTE, b"")]));
        let script = put("script", format!("#! \t{} -x\nrest", program.display()).as_bytes());
        let second = put("second", format!("#!{}\n", script.display()).as_bytes());
        assert_eq!(script_interpreter(&second).unwrap(), Some(script));
        assert_eq!(preload_support(&second).unwrap(), preload_support(&program).unwrap());
        assert_eq!(script_interpreter(&put("plain", b"echo\n")).unwrap(), Some("/bin/sh".into()));
        let itself = put("itself", format!("#!{}\n", folder.path().join("itself").display()).as_bytes());
        assert!(matches!(preload_support(&itself).unwrap(), PreloadSupport::Ignored(_)));
    }

    #[test]
    fn program_is_found_like_execvp() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let put = |folder: &Path, mode| {
            let path = folder.join("program");
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let (not_executable, executable) = (put(first.path(), 0o644), put(second.path(), 0o755));
        let path = std::env::join_paths([first.path(), second.path()]).unwrap();
        let program = OsStr::new("program");
        assert_eq!(find_program(program, Some(&path)), Some(executable.clone()));
        assert_eq!(find_program(not_executable.as_os_str(), Some(&path)), None);
        assert_eq!(find_program(executable.as_os_str(), None), Some(executable));
        assert_eq!(find_program(OsStr::new("sh"), None), Some("/bin/sh".into()));
        assert_eq!(find_program(OsStr::new("no-such-program"), Some(&path)), None);
    }
}
