//! Whether the guests of machines have started all of their vCPUs.
//!
//! A guest that does not bring a vCPU up never runs it, as in the reports of guests that saw one CPU after EPT was turned
//! off. The host sees that without the guest: the thread of the vCPU has no guest time. Limits: a vCPU that ran for less
//! than a clock tick has none, and a guest that uses fewer CPUs on purpose cannot be told from one that fails to start
//! them.

use pagefold_base::Reading;

/// Guests have started their vCPUs after this time: the kernel does so within its first seconds, after the firmware.
pub const SETTLING_SECONDS: u64 = 30;

/// What is known about the vCPUs of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuReadings {
    /// The number of vCPUs with which the machine starts, by its command line.
    pub declared: Option<u32>,
    /// The guest time of the thread of each vCPU, in clock ticks.
    pub guest_ticks: Reading<Vec<u64>>,
    /// Seconds since the machine started.
    pub age_seconds: Reading<u64>,
}

impl VcpuReadings {
    /// The number of vCPUs that have run guest code for at least one clock tick.
    pub fn ran(&self) -> usize {
        self.guest_ticks.iter().flatten().filter(|ticks| **ticks > 0).count()
    }
}

/// The verdict on the vCPUs of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VcpuVerdict {
    /// All have run guest code.
    AllRan,
    /// Some have not, though the guest had the time; what was seen, and what to do.
    NotAllRan(String),
    /// It cannot be told, with the reason.
    Unknown(String),
}

/// Judges whether a guest has started all vCPUs of its machine. Those that were plugged later are the guest's choice.
pub fn judge_vcpus(readings: &VcpuReadings) -> VcpuVerdict {
    let threads = match &readings.guest_ticks {
        Ok(ticks) => ticks.len(),
        Err(why) => {
            return VcpuVerdict::Unknown(format!(
                "which threads run its virtual CPUs is not known ({why}); -name debug-threads=on names them"
            ));
        }
    };
    let ran = readings.ran();
    let declared = readings.declared.map_or(threads, |count| count as usize);
    let age = match &readings.age_seconds {
        _ if ran >= declared && ran > 0 => return VcpuVerdict::AllRan,
        _ if threads < declared => {
            return VcpuVerdict::Unknown(format!("it has {threads} threads for {declared} virtual CPUs"));
        }
        Ok(age) if *age < SETTLING_SECONDS => {
            return VcpuVerdict::Unknown(format!("it started {age} s ago, and guests have {SETTLING_SECONDS} s"));
        }
        Ok(age) => age,
        Err(why) => return VcpuVerdict::Unknown(format!("when it started is not known ({why})")),
    };
    if ran == 0 {
        return VcpuVerdict::Unknown("no virtual CPU has run: it is paused, or waits for a migration".to_owned());
    }
    VcpuVerdict::NotAllRan(format!(
        "{ran} of {declared} virtual CPUs have run guest code {age} s after its start: see dmesg and nproc in the guest; \
         after a change of EPT or NPT, `pagefold tune undo` restores it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Absent;

    fn judge(declared: Option<u32>, guest_ticks: &[u64], age_seconds: u64) -> VcpuVerdict {
        judge_vcpus(&VcpuReadings { declared, guest_ticks: Ok(guest_ticks.to_vec()), age_seconds: Ok(age_seconds) })
    }

    fn assert_unknown(verdict: &VcpuVerdict, part: &str) {
        assert!(matches!(verdict, VcpuVerdict::Unknown(why) if why.contains(part)), "{verdict:?}");
    }

    #[test]
    fn vcpus_that_all_ran_are_ok_at_any_age() {
        for age in [0, SETTLING_SECONDS, 100_000] {
            assert_eq!(judge(Some(2), &[1, 9], age), VcpuVerdict::AllRan);
        }
        assert_eq!(judge(None, &[1, 9], 0), VcpuVerdict::AllRan);
        assert_eq!(judge(Some(2), &[1, 9, 0], 100), VcpuVerdict::AllRan, "the third was plugged later");
    }

    #[test]
    fn vcpu_that_has_not_run_is_a_failure_after_the_start() {
        let failed = |verdict: &VcpuVerdict| match verdict {
            VcpuVerdict::NotAllRan(why) => why.starts_with("1 of 4 virtual CPUs have run guest code"),
            _ => false,
        };
        assert!(failed(&judge(Some(4), &[7, 0, 0, 0], SETTLING_SECONDS)));
        assert!(failed(&judge(None, &[7, 0, 0, 0], SETTLING_SECONDS)));
        assert_unknown(&judge(Some(4), &[7, 0, 0, 0], SETTLING_SECONDS - 1), "it started 29 s ago");
        assert_unknown(&judge(Some(4), &[0, 0, 0, 0], SETTLING_SECONDS), "no virtual CPU has run");
    }

    #[test]
    fn missing_readings_make_the_verdict_unknown() {
        assert_unknown(&judge(Some(4), &[7, 7], 100), "2 threads for 4 virtual CPUs");

        let threads = VcpuReadings { declared: Some(2), guest_ticks: Err(Absent::Denied), age_seconds: Ok(100) };
        assert_unknown(&judge_vcpus(&threads), "(permission denied)");
        assert_eq!(threads.ran(), 0);
        let age = VcpuReadings { declared: Some(2), guest_ticks: Ok(vec![1, 0]), age_seconds: Err(Absent::Denied) };
        assert_unknown(&judge_vcpus(&age), "when it started");
    }
}
