//! The printed boot commands change copies of a boot loader's files as intended, and their undo restores them.

#![forbid(unsafe_code)]

use pagefold_tune::decide::boot::{BootLoader, BootState, commands};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Runs commands with `/etc` in another directory, and without those of the boot loader.
fn run_below(root: &Path, commands: &[String]) {
    for command in
        commands.iter().filter(|command| !["update-grub", "proxmox-boot-tool refresh"].contains(&&***command))
    {
        let command = command.replace("/etc/", &format!("{}/etc/", root.display()));
        let status = Command::new("sh").args(["-ec", &command]).status().unwrap();
        assert!(status.success(), "{command}");
    }
}

fn read_below(root: &Path, directory: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root.join(directory)).unwrap().map(Result::unwrap) {
        let path = format!("{directory}/{}", entry.file_name().into_string().unwrap());
        if entry.file_type().unwrap().is_dir() {
            found.extend(read_below(root, &path));
        } else {
            found.insert(path, fs::read_to_string(entry.path()).unwrap());
        }
    }
    found
}

/// Changes files, and undoes the change. Returns the changed text of the files in their order, without copies.
fn change_and_undo(
    files: &[(&str, &str)],
    loader: impl Fn(BTreeMap<String, String>) -> BootLoader,
    remove: Option<&str>,
    add: Option<&str>,
) -> Vec<String> {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let before = read_below(root.path(), "etc");
    let state = BootState { loader: loader(before.clone()), command_line: String::new() };
    let commands = commands(&state, remove, add).unwrap();
    run_below(root.path(), &commands.change);
    let changed = read_below(root.path(), "etc");
    run_below(root.path(), &commands.undo);
    let mut after = read_below(root.path(), "etc");
    // An added fragment stays, without a line.
    after.retain(|path, text| before.contains_key(path) || !text.is_empty());
    assert_eq!(after, before);
    changed.into_iter().filter(|(path, _)| !path.contains(".before-")).map(|(_, text)| text).collect()
}

fn grub(files: BTreeMap<String, String>) -> BootLoader {
    BootLoader::Grub { files, refresh: "update-grub" }
}

#[test]
fn grub_parameter_is_removed_from_each_file_that_holds_it() {
    let changed = change_and_undo(
        &[
            ("etc/default/grub", "GRUB_TIMEOUT=5\nGRUB_CMDLINE_LINUX_DEFAULT='quiet nosmt'\n# nosmt\n"),
            ("etc/default/grub.d/a.cfg", "GRUB_CMDLINE_LINUX=\"nosmt nosmt x=nosmt nosmt=force $Y\"\n"),
            ("etc/default/grub.d/b.cfg", "GRUB_CMDLINE_LINUX=\"splash\"\n"),
            ("etc/default/grub.d/c.cfg", "GRUB_CMDLINE_LINUX=nosmt\n"),
        ],
        grub,
        Some("nosmt"),
        None,
    );
    let expected = [
        "GRUB_TIMEOUT=5\nGRUB_CMDLINE_LINUX_DEFAULT='quiet '\n# nosmt\n",
        "GRUB_CMDLINE_LINUX=\"  x=nosmt nosmt=force $Y\"\n",
        "GRUB_CMDLINE_LINUX=\"splash\"\n",
        "GRUB_CMDLINE_LINUX=\n",
    ];
    assert_eq!(changed, expected);
}

#[test]
fn grub_parameter_is_added_in_a_fragment_and_replaced_there() {
    let main = ("etc/default/grub", "GRUB_CMDLINE_LINUX=\"\"\n");
    let added = change_and_undo(&[main], grub, None, Some("kvm.halt_poll_ns=0"));
    assert_eq!(added, [main.1, "GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX kvm.halt_poll_ns=0\"\n"]);
    let own = ("etc/default/grub.d/pagefold.cfg", "GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX a.b=1\"\n");
    let replaced = change_and_undo(&[main, own], grub, Some("a.b=1"), Some("a.b=2"));
    let expected = "GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX \"\nGRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX a.b=2\"\n";
    assert_eq!(replaced, [main.1, expected]);
}

#[test]
fn command_line_of_systemd_boot_is_edited_in_its_file() {
    let loader =
        |files: BTreeMap<String, String>| BootLoader::ProxmoxSystemdBoot { file: files["etc/kernel/cmdline"].clone() };
    let file = ("etc/kernel/cmdline", "root=ZFS=rpool/ROOT/pve-1 nosmt boot=zfs nosmt\n");
    let changed = change_and_undo(&[file], loader, Some("nosmt"), Some("resume=/dev/sda.1"));
    assert_eq!(changed, ["root=ZFS=rpool/ROOT/pve-1 boot=zfs resume=/dev/sda.1\n"]);
}
