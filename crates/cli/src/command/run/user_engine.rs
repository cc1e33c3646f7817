//! The user-space engine: the environment with which a preloaded library merges a program.

use super::RunArguments;
use super::enroll_method::{EnrollProbe, PreloadLibrary};
use anyhow::{Context, bail};
use pagefold_linux::launch::UserfaultFd;
use std::ffi::{CString, OsStr};
use std::path::Path;

/// The library that adopts the allocations of its program.
const ADOPT_LIBRARY: PreloadLibrary = PreloadLibrary { file: "libpagefold_adopt.so", variable: "PAGEFOLD_ADOPT" };

/// Environment variables of a rank of an MPI job (Open MPI, PMIx, MPICH and derivatives).
const RANK_VARIABLES: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID"];

/// Programs that start MPI ranks. Ranks need no userfaultfd.
const MPI_LAUNCHERS: [&str; 5] = ["mpirun", "mpiexec", "orterun", "prterun", "srun"];

/// The environment variables that make the library merge a program.
pub fn prepare_variables(options: &RunArguments, name: &OsStr) -> anyhow::Result<Vec<(CString, CString)>> {
    let preload = ADOPT_LIBRARY.ld_preload_for(name)?;
    if !EnrollProbe::start(Some(&preload))?.has_loaded(ADOPT_LIBRARY)? {
        bail!("{} does not take effect here", preload.to_string_lossy());
    }
    let is_set = |name: &&str| std::env::var_os(name).is_some();
    let is_launcher =
        Path::new(name).file_name().is_some_and(|name| MPI_LAUNCHERS.iter().any(|launcher| name == *launcher));
    if !RANK_VARIABLES.iter().any(is_set) && !is_launcher {
        UserfaultFd::new().context(
            "merging a running program needs Linux 6.4 and userfaultfd (CAP_SYS_PTRACE, \
             vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd); MPI programs under mpirun do not need it",
        )?;
    }
    let domain = options.domain.clone().or_else(pagefold_engine::job_domain_name);
    let domain = domain.unwrap_or_else(|| format!("run-{}", std::process::id()));
    // With --per-node, the name of a node is appended.
    let max_length = if options.per_node { 54 } else { 64 };
    if !pagefold_engine::is_valid_domain_name(&domain) || domain.len() > max_length {
        bail!(
            "--domain {domain}: a name has at most {max_length} letters, digits, '.', '_' and '-', and no leading '.'"
        );
    }
    let mut variables = vec![("LD_PRELOAD", preload), ("PAGEFOLD_DOMAIN", CString::new(domain)?)];
    let mut push = |name, value: Option<String>| -> anyhow::Result<()> {
        variables.extend(value.map(CString::new).transpose()?.map(|value| (name, value)));
        Ok(())
    };
    push("PAGEFOLD_MAX_SLOWDOWN", options.max_slowdown.map(|share| share.to_string()))?;
    push("PAGEFOLD_MIN_RUNTIME", options.min_runtime.map(|time| time.as_secs_f64().to_string()))?;
    push("PAGEFOLD_MIN_BLOCK", options.min_block.map(|bytes| bytes.0.to_string()))?;
    push("PAGEFOLD_PER_NODE", options.per_node.then(|| "1".to_owned()))?;
    push("PAGEFOLD_REPORT", options.report.then(|| "1".to_owned()))?;
    variables.into_iter().map(|(name, value)| Ok((CString::new(name)?, value))).collect()
}

/// A description of the merge for messages.
pub fn describe(variables: &[(CString, CString)]) -> String {
    let domain = variables.iter().find(|(name, _)| name.as_bytes() == b"PAGEFOLD_DOMAIN");
    let domain = domain.map_or_else(String::new, |(_, value)| value.to_string_lossy().into_owned());
    format!("in the domain {domain}, by a preloaded library")
}
