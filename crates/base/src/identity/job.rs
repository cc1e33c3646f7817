//! Recognizes jobs by the environment that a launcher gives its processes: Slurm, Open MPI and other PMIx launchers,
//! and launchers with PMI (MPICH's Hydra, Intel MPI).

use super::Job;
use std::collections::BTreeMap;

/// Variables with the rank, the most reliable first. `mpirun` in an allocation passes `SLURM_PROCID` on to its ranks.
/// There it is the number of the shell or daemon that started them, so MPI's own numbers come first.
const RANK_VARIABLES: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"];

/// The job in the environment. Slurm's name takes precedence over MPI's.
pub(super) fn identify_job(environment: &BTreeMap<String, String>) -> Option<Job> {
    let value = |name: &str| environment.get(name).map(String::as_str).filter(|value| !value.is_empty());
    let rank = RANK_VARIABLES.iter().find_map(|name| value(name)?.parse().ok());
    let name = if let Some(job) = value("SLURM_JOB_ID") {
        match value("SLURM_STEP_ID") {
            Some(id) => format!("slurm:{job}.{}", step(id)),
            None => format!("slurm:{job}"),
        }
    } else if let Some(job) = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"].into_iter().find_map(value) {
        format!("mpi:{job}")
    } else {
        RANK_VARIABLES[..3].iter().find_map(|name| value(name)).map(|_| "mpi".to_owned())?
    };
    Some(Job { name, rank })
}

/// The name of a step. Slurm numbers steps that `srun` did not start from the top of 32 bits (slurm/slurm.h,
/// `SLURM_BATCH_SCRIPT` and its neighbors), and prints them by name.
fn step(id: &str) -> &str {
    match id.parse() {
        Ok(0xffff_fffc_u32) => "extern",
        Ok(0xffff_fffb) => "batch",
        Ok(0xffff_fffa) => "interactive",
        _ => id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_recognized_by_environment() {
        let check = |variables: &[(&str, &str)], expected: Option<(&str, Option<u32>)>| {
            let environment = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
            let expected = expected.map(|(name, rank)| Job { name: name.to_owned(), rank });
            assert_eq!(identify_job(&environment), expected, "{variables:?}");
        };
        check(&[], None);
        check(&[("SLURM_JOB_ID", "1234")], Some(("slurm:1234", None)));
        check(
            &[("SLURM_JOB_ID", "1234"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "17")],
            Some(("slurm:1234.0", Some(17))),
        );
        check(
            &[("SLURM_JOB_ID", "1234"), ("SLURM_STEP_ID", "4294967291"), ("SLURM_PROCID", "0")],
            Some(("slurm:1234.batch", Some(0))),
        );
        check(&[("SLURM_JOB_ID", "1"), ("SLURM_STEP_ID", "4294967292")], Some(("slurm:1.extern", None)));
        check(&[("SLURM_JOB_ID", "1"), ("SLURM_STEP_ID", "4294967290")], Some(("slurm:1.interactive", None)));
        // srun --mpi=pmix
        check(
            &[
                ("SLURM_JOB_ID", "5816711"),
                ("SLURM_STEP_ID", "0"),
                ("SLURM_PROCID", "3"),
                ("PMIX_NAMESPACE", "slurm.pmix.5816711.0"),
                ("PMIX_RANK", "3"),
            ],
            Some(("slurm:5816711.0", Some(3))),
        );
        // mpirun in a batch script
        check(
            &[("SLURM_JOB_ID", "9"), ("SLURM_PROCID", "0"), ("OMPI_COMM_WORLD_RANK", "5"), ("PMIX_RANK", "5")],
            Some(("slurm:9", Some(5))),
        );
        // Open MPI 4
        check(
            &[
                ("OMPI_COMM_WORLD_RANK", "2"),
                ("PMIX_NAMESPACE", "2882928641"),
                ("OMPI_MCA_ess_base_jobid", "2882928641"),
                ("PMIX_RANK", "2"),
            ],
            Some(("mpi:2882928641", Some(2))),
        );
        // Open MPI 5
        check(
            &[("OMPI_COMM_WORLD_RANK", "1"), ("PMIX_NAMESPACE", "prterun-node1-4711@1")],
            Some(("mpi:prterun-node1-4711@1", Some(1))),
        );
        check(&[("OMPI_MCA_ess_base_jobid", "77"), ("OMPI_COMM_WORLD_RANK", "0")], Some(("mpi:77", Some(0))));
        check(&[("PMI_RANK", "4"), ("PMI_JOBID", "kvs_12_0")], Some(("mpi:kvs_12_0", Some(4))));
        check(&[("PMI_RANK", "4")], Some(("mpi", Some(4))));
        check(&[("PMI_RANK", "four")], Some(("mpi", None)));
        check(&[("PMI_RANK", "-1"), ("SLURM_PROCID", "2")], Some(("mpi", Some(2))));
        check(&[("PMI_RANK", ""), ("SLURM_JOB_ID", "")], None);
        check(&[("SLURM_PROCID", "2")], None);
    }
}
