use super::super::{ImportFormat, identify_format};
use super::*;
use crate::decide::export::{self, ExportFormat, Settings};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn write(path: &str, value: &str) -> SettingChange {
    SettingChange::Write { path: path.to_owned(), value: value.to_owned() }
}

fn parameter(module: &str, parameter: &str, value: &str) -> SettingChange {
    SettingChange::ModuleParameter {
        module: module.to_owned(),
        parameter: parameter.to_owned(),
        value: value.to_owned(),
    }
}

const PLAYBOOK: &str = r#"---
- name: Tune hypervisors
  hosts: hypervisors
  become: true
  vars:
    swappiness: 10
    sysctls:
      - { name: vm.zone_reclaim_mode, value: 0 }
      - name: kernel.numa_balancing
        value: off
  roles:
    - base
  tasks:
    - name: Swap late
      ansible.posix.sysctl:
        name: vm.swappiness
        value: "{{ swappiness }}"
        sysctl_set: true
    - ansible.posix.sysctl:
        name: "{{ item.name }}"
        value: "{{ item['value'] }}"
      loop: "{{ sysctls }}"
    - name: Nested virtualization
      community.general.modprobe:
        name: kvm-intel
        params: 'nested=0 ept=1'
    - name: Options
      ansible.builtin.lineinfile:
        path: /etc/modprobe.d/kvm.conf
        line: options kvm halt_poll_ns=50000
    - name: Reserve
      ansible.builtin.copy:
        dest: /etc/sysctl.d/90-kvm.conf
        content: |
          # memory
          vm.min_free_kbytes = 1048576
          net.*.x = 1
    - name: Huge pages
      ansible.builtin.shell: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled
    - block:
        - sysctl: name=vm.stat_interval value=10 state=present
        - name: Install
          ansible.builtin.package:
            name: tuned
      when: true
    - block:
        - sysctl: name=vm.stat_interval value=10 state=present
    - ansible.posix.sysctl:
        name: vm.dirty_ratio
        value: "{{ ratio | int }}"
    - ansible.posix.sysctl:
        name: kernel.sched_autogroup_enabled
        value: 0
      when: ansible_facts.os_family == "Debian"
    - ansible.builtin.command: systemctl restart tuned
"#;

#[test]
fn playbook_is_read_and_what_is_not_carried_out_is_named() {
    assert_eq!(identify_format(PLAYBOOK), ImportFormat::Ansible);
    let imported = parse(PLAYBOOK);
    let expected = [
        write("proc/sys/vm/swappiness", "10"),
        write("proc/sys/vm/zone_reclaim_mode", "0"),
        write("proc/sys/kernel/numa_balancing", "0"),
        parameter("kvm_intel", "nested", "0"),
        parameter("kvm_intel", "ept", "1"),
        parameter("kvm", "halt_poll_ns", "50000"),
        write("proc/sys/vm/min_free_kbytes", "1048576"),
        write("sys/kernel/mm/transparent_hugepage/enabled", "madvise"),
        write("proc/sys/vm/stat_interval", "10"),
    ];
    assert_eq!(imported.changes, expected, "{:#?}", imported.ignored);
    let lines: Vec<&str> = PLAYBOOK.lines().collect();
    let ignored: Vec<(&str, bool)> = imported
        .ignored
        .iter()
        .map(|line| (lines[line.number - 1].trim(), !line.why.is_empty() && line.text == lines[line.number - 1]))
        .collect();
    let named = ["- base", "dest: /etc/sysctl.d/90-kvm.conf", "when: true", "name: vm.dirty_ratio"];
    assert!(named.iter().all(|text| ignored.contains(&(text, true))), "{ignored:?}");
    assert!(ignored.contains(&("when: ansible_facts.os_family == \"Debian\"", true)), "{ignored:?}");
    assert!(ignored.contains(&("- ansible.builtin.command: systemctl restart tuned", true)), "{ignored:?}");
    assert_eq!(ignored.len(), 6, "{ignored:#?}");
}

#[test]
fn loops_and_dictionaries_are_followed() {
    let text = "- ansible.posix.sysctl:\n    name: '{{ item.key }}'\n    value: '{{ item.value }}'\n  with_dict:\n    \
                vm.swappiness: 1\n    vm.page-cluster: 0\n- modprobe: {name: kvm_amd, params: '{{ item }}'}\n  \
                with_items: [npt=1, avic=1]\n";
    let imported = parse(text);
    let expected = [
        write("proc/sys/vm/swappiness", "1"),
        write("proc/sys/vm/page-cluster", "0"),
        parameter("kvm_amd", "npt", "1"),
        parameter("kvm_amd", "avic", "1"),
    ];
    assert_eq!((&imported.changes[..], &imported.ignored[..]), (&expected[..], &[][..]));
}

#[test]
fn bad_input_is_named_with_its_line_and_sets_nothing() {
    let cases = [
        ("- sysctl: {name: vm.swappiness, value: 1}\n- sysctl: {name: a\n", "it is no YAML"),
        ("- sysctl: {name: vm.swappiness, value: 1}\nx", "it is no YAML"),
        ("name: vm.swappiness\nvalue: 1\n", "no list of plays or tasks"),
        ("- vm.swappiness\n", "no task"),
        ("- name: nothing\n", "one module"),
        ("- copy: {dest: /etc/sysctl.d/a, content: x}\n  sysctl: {name: a, value: 1}\n", "one module"),
        ("- sysctl: {value: 1}\n", "no name"),
        ("- sysctl: {name: vm.swappiness}\n", "no value"),
        ("- sysctl: {name: vm.swappiness, value: 1, state: absent}\n", "removes"),
        ("- sysctl: {name: 'a b', value: 1}\n", "not a name"),
        ("- sysctl: {name: vm.swappiness, value: [1]}\n", "not a text"),
        ("- sysctl: {name: vm.swappiness, value: '{{ x }}'}\n", "not known here"),
        ("- sysctl: {name: vm.swappiness, value: '{{ x'}\n", "does not end"),
        ("- sysctl: {name: '{{ item }}', value: 1}\n  loop: '{{ x }}'\n", "list of the loop"),
        ("- sysctl: {name: '{{ item }}', value: 1}\n  with_fileglob: [a]\n", "does not follow"),
        ("- modprobe: {name: kvm_amd}\n", "sets no parameter"),
        ("- modprobe: {name: kvm_amd, params: npt=0, state: absent}\n", "unloads"),
        ("- copy: {dest: /etc/motd, content: vm.swappiness=1}\n", "no file of sysctl.d"),
        ("- copy: {dest: /etc/sysctl.d/a, src: files/a}\n", "is not in this file"),
        ("- lineinfile: {path: /etc/sysctl.d/a, line: vm.swappiness}\n", "not NAME = VALUE"),
        ("- copy: {dest: /etc/tmpfiles.d/a, content: 'd /run/x 0755 root root - -'}\n", "type w"),
        ("- copy: {dest: /etc/tmpfiles.d/a, content: 'w /sys/x - - - - %H'}\n", "specifier"),
        ("- shell: echo 1 > /sys/x; reboot\n", "shell scripts"),
        ("- command: reboot\n", "`echo VALUE > FILE`"),
        ("- include_tasks: other.yml\n", "include_tasks"),
        ("- hosts: all\n  tasks: x\n", "no list of tasks"),
    ];
    for (text, why) in cases {
        let imported = parse(text);
        assert_eq!(imported.changes, [], "{text}");
        let [line] = &imported.ignored[..] else { panic!("{text}: {:?}", imported.ignored) };
        assert!(line.why.contains(why) && line.text == text.lines().nth(line.number - 1).unwrap(), "{text}: {line:?}");
    }
}

fn settings() -> impl Strategy<Value = Settings> {
    let names = ["proc/sys/vm/swappiness", "proc/sys/net/ipv4/conf/eth0.1/x", "sys/block/sda/queue/scheduler"];
    // Values of settings have no white space at their ends, and no control characters.
    let value = "[!-~]([ -~]{0,12}[!-~])?";
    let writes = prop::collection::btree_map(prop::sample::select(names.map(str::to_owned).to_vec()), value, 0..3);
    let word = "[a-z0-9_,.]{1,8}";
    let parameters = prop::collection::btree_map("[a-z_]{1,8}", word, 1..3);
    let modules = prop::collection::btree_map(
        prop::sample::select(vec!["kvm".to_owned(), "kvm_amd".to_owned()]),
        parameters,
        0..3,
    );
    let boot = (prop::collection::vec("[a-z.]{1,8}", 0..2), prop::collection::vec("[a-z=.]{1,8}", 0..2));
    (writes, modules, boot).prop_map(|(writes, modules, boot)| Settings { writes, modules, boot, omitted: Vec::new() })
}

proptest! {
    #[test]
    fn exported_tasks_are_imported_as_the_same_settings(settings in settings()) {
        let text = export::render(&settings, ExportFormat::Ansible);
        prop_assert_eq!(identify_format(&text), ImportFormat::Ansible);
        let imported = parse(&text);
        prop_assert_eq!(&imported.ignored, &[], "{}", text);
        let mut read = Settings::default();
        for change in imported.changes {
            match change {
                SettingChange::Write { path, value } => _ = read.writes.insert(path, value),
                SettingChange::ModuleParameter { module, parameter, value } => {
                    _ = read.modules.entry(module).or_default().insert(parameter, value);
                }
                SettingChange::BootParameter { remove, add } => {
                    read.boot.0.extend(remove);
                    read.boot.1.extend(add);
                }
                SettingChange::VmDefinition { .. } => prop_assert!(false),
            }
        }
        // The others are in comments.
        let is_plain = |(path, value): &(String, String)| export::is_plain_for_ansible(path, value);
        let expected: BTreeMap<String, String> = settings.writes.clone().into_iter().filter(is_plain).collect();
        prop_assert_eq!(read, Settings { writes: expected, ..settings });
    }

    #[test]
    fn any_text_is_read_without_panic(text in "(- |  |sysctl: |name: |loop: |\\{\\{ item|\\}\\}|copy: |dest: /etc/sysctl.d/x|content: |[a-z=:.>'\"|\\[\\]{},\n]){0,40}") {
        let imported = parse(&text);
        let lines: Vec<&str> = text.lines().collect();
        prop_assert!(imported.ignored.iter().all(|line| lines[line.number - 1] == line.text));
    }
}
