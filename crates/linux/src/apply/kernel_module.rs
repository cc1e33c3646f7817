//! Loads a module of KVM again with other parameters.
//!
//! A virtual machine, each of its vCPUs and each open `/dev/kvm` hold a reference to the module (virt/kvm/kvm_main.c,
//! `kvm_create_vm` and `kvm_chardev_ops.owner`, 6.18). delete_module(2) with O_NONBLOCK refuses a module with
//! references at the moment of the call (kernel/module/main.c, `try_stop_module`), so no machine can be lost. The check
//! before it only names the processes. Loading is left to modprobe(8), which knows the dependencies and the operator's
//! parameters in modprobe.d; parameters on its command line come last and win.
//!
//! Limit: parameters that were given to modprobe by hand, and are in no file of modprobe.d, are not kept, except for
//! those that can be written while the module is loaded.

use crate::LiveHost;
use pagefold_host::Host;
use pagefold_host::action::{ActionError, ActionOutcome, Exchange};
use pagefold_host::kernel_module::{KernelModule, ModuleParameters, normal_parameter_value};
use pagefold_sys::fault;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

/// The most users of a module that a message names.
const MAX_NAMED_USERS: usize = 4;

/// Load a module again.
pub fn reload(
    host: &LiveHost,
    module: KernelModule,
    parameters: &Exchange<ModuleParameters>,
) -> Result<ActionOutcome, ActionError> {
    if !parameters.from.are_plain() || !parameters.to.are_plain() {
        return Err(ActionError::Unsupported(format!(
            "parameters of {module} have characters that modprobe splits at"
        )));
    }
    if !module.is_loaded(host) {
        if fs::exists(directory(module)).unwrap_or(true) {
            return Err(ActionError::Unsupported(format!(
                "{module} is built into the kernel: it cannot be loaded again"
            )));
        }
        load(module, &parameters.to)?;
        return Ok(ActionOutcome::default());
    }
    let current = parameters.to.read_current(host, module)?;
    if !parameters.must_write(&current, format_args!("module {module} is loaded with {current}"))? {
        return Ok(ActionOutcome { unchanged: true, ..ActionOutcome::default() });
    }
    check_unused(host, module)?;
    let live_values = read_writable(module);
    unload(module)?;
    match load_and_check(host, module, &parameters.to) {
        Ok(()) => {
            restore_writable(module, &live_values, &parameters.to);
            Ok(ActionOutcome::default())
        }
        Err(why) => Err(load_previous(host, module, parameters, &live_values, &why)),
    }
}

fn directory(module: KernelModule) -> String {
    format!("/sys/module/{module}")
}

/// Check that nothing uses the module, and name what does.
fn check_unused(host: &LiveHost, module: KernelModule) -> Result<(), ActionError> {
    let references = module.references(host)?;
    let users = find_users(host);
    if references == 0 && users.is_empty() {
        return Ok(());
    }
    let names = if users.is_empty() {
        format!("{references} references are held by programs that this process cannot see")
    } else {
        let more = users.len().saturating_sub(MAX_NAMED_USERS);
        let named = users[..users.len() - more].join(", ");
        if more > 0 { format!("{named} and {more} more") } else { named }
    };
    Err(ActionError::Busy(format!(
        "module {module} is in use ({names}): shut these virtual machines down or migrate them first"
    )))
}

/// The processes that have `/dev/kvm`, a virtual machine or a vCPU open.
fn find_users(host: &LiveHost) -> Vec<String> {
    let mut users = Vec::new();
    for pid in host.pids().unwrap_or_default() {
        let Ok(process) = host.open(pid) else { continue };
        let links = process.links("fd").unwrap_or_default();
        if links.iter().any(|link| link == "/dev/kvm" || link.starts_with("anon_inode:kvm-")) {
            let name = process.read("comm").map(|name| String::from_utf8_lossy(&name).trim().to_owned());
            users.push(format!("process {pid} {}", name.unwrap_or_default()));
        }
    }
    users
}

/// The values of the parameters that can be written while the module is loaded.
fn read_writable(module: KernelModule) -> BTreeMap<String, String> {
    let Ok(entries) = fs::read_dir(format!("{}/parameters", directory(module))) else { return BTreeMap::new() };
    let writable = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.metadata().is_ok_and(|metadata| metadata.permissions().mode() & 0o200 != 0));
    let read = |entry: fs::DirEntry| {
        Some((entry.file_name().into_string().ok()?, fs::read_to_string(entry.path()).ok()?.trim().to_owned()))
    };
    writable.filter_map(read).collect()
}

/// Write the live values again where loading has reset them. A refusal leaves the module's default, which is no loss
/// of a machine and not worth another reload.
fn restore_writable(module: KernelModule, values: &BTreeMap<String, String>, requested: &ModuleParameters) {
    for (name, value) in values.iter().filter(|(name, _)| !requested.0.contains_key(*name)) {
        let path = format!("{}/parameters/{name}", directory(module));
        if fs::read_to_string(&path).is_ok_and(|current| current.trim() != value) {
            let _ = fs::write(&path, value);
        }
    }
}

fn unload(module: KernelModule) -> Result<(), ActionError> {
    fault::point("before unloading a module");
    let name = std::ffi::CString::new(module.name()).map_err(|_| ActionError::Failed("a NUL in a name".to_owned()))?;
    // O_NONBLOCK, so that a module that has just come into use is refused instead of waited for.
    let unloaded = rustix::system::delete_module(&name, rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    fault::point("after unloading a module");
    unloaded.map_err(|errno| match errno {
        rustix::io::Errno::AGAIN | rustix::io::Errno::BUSY => {
            ActionError::Busy(format!("module {module} has come into use: a virtual machine may be starting"))
        }
        rustix::io::Errno::PERM => ActionError::Denied(format!("unloading {module} needs CAP_SYS_MODULE")),
        errno => ActionError::Failed(format!("unloading {module}: {errno}")),
    })
}

/// Load the module by modprobe(8), with the parameters.
fn load(module: KernelModule, parameters: &ModuleParameters) -> Result<(), ActionError> {
    let mut modprobe = Command::new("modprobe");
    // The path of the kernel's own calls may not be in PATH of a user's shell.
    modprobe.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    modprobe.arg(module.name()).args(parameters.0.iter().map(|(name, value)| format!("{name}={value}")));
    let output = modprobe
        .stdin(Stdio::null())
        .output()
        .map_err(|error| ActionError::Unsupported(format!("cannot run modprobe: {error}; install the package kmod")))?;
    fault::point("after loading a module");
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
    Err(ActionError::Failed(format!("modprobe {module} {parameters}: {message} ({})", output.status)))
}

/// Load the module, and check that the kernel took the parameters: it ignores unknown ones, and turns some off that the
/// processor lacks.
fn load_and_check(host: &LiveHost, module: KernelModule, wanted: &ModuleParameters) -> Result<(), String> {
    load(module, wanted).map_err(|why| why.to_string())?;
    let loaded = wanted.read_current(host, module).map_err(|why| format!("its parameters: {why}"))?;
    let is_same = |(name, value): (&String, &String)| loaded.0.get(name) == Some(&normal_parameter_value(value));
    if wanted.0.iter().all(is_same) { Ok(()) } else { Err(format!("the kernel loaded it with {loaded}")) }
}

/// Load the module with its previous parameters after it could not be loaded with the new ones. Returns the error.
fn load_previous(
    host: &LiveHost,
    module: KernelModule,
    parameters: &Exchange<ModuleParameters>,
    live_values: &BTreeMap<String, String>,
    why: &str,
) -> ActionError {
    let failed = format!("{module} cannot be loaded with {}: {why}", parameters.to);
    if module.is_loaded(host)
        && let Err(why) = unload(module)
    {
        return ActionError::Failed(format!("{failed}; it stays so: {why}"));
    }
    match load_and_check(host, module, &parameters.from) {
        Ok(()) => {
            restore_writable(module, live_values, &parameters.from);
            ActionError::Failed(format!("{failed}; it is loaded with {} again", parameters.from))
        }
        Err(why) => ActionError::Failed(format!("{failed}; and not with {} again: {why}", parameters.from)),
    }
}
