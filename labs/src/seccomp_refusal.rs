//! Simulates a kernel that refuses calls: a seccomp filter on this process and its children. System calls fail as they
//! do on kernels and in containers that do not offer them.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// Let `prctl(PR_SET_MEMORY_MERGE)` and close_range(2) fail with an error from now on.
pub fn refuse_merge_any(errno: u32) -> Result<(), seccompiler::Error> {
    let option = libc::PR_SET_MEMORY_MERGE as u64;
    let condition = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, option)?;
    let rules = [(libc::SYS_prctl, vec![SeccompRule::new(vec![condition])?]), (libc::SYS_close_range, Vec::new())];
    let (allow, refuse) = (SeccompAction::Allow, SeccompAction::Errno(errno));
    let filter = SeccompFilter::new(rules.into(), allow, refuse, std::env::consts::ARCH.try_into()?)?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)
}
