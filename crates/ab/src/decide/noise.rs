//! Flags noisy blocks by the readings of their environment.
//!
//! The rule sees no sample of the workload, so a flag cannot depend on the result. The limits and the baseline are fixed
//! before the campaign starts. An absent reading raises no flag; it is counted as unread, because absent is not quiet.

/// Readings of the environment during one block, or before the campaign as a baseline. A reading that the host does not
/// offer is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EnvironmentReadings {
    /// Share of CPU time that the hypervisor withheld, 0 to 1, from the `steal` column of `/proc/stat`.
    pub steal: Option<f64>,
    /// CPU time of processes outside of the workload, in CPUs: CPU seconds per second.
    pub neighbor_cpus: Option<f64>,
    /// Share of time in which a task waited for a CPU, 0 to 1, from `some` of `/proc/pressure/cpu`.
    pub cpu_pressure: Option<f64>,
    /// Share of time in which a task waited for memory, 0 to 1, from `some` of `/proc/pressure/memory`.
    pub memory_pressure: Option<f64>,
    /// Share of time in which a task waited for storage, 0 to 1, from `some` of `/proc/pressure/io`.
    pub io_pressure: Option<f64>,
    /// The highest temperature of a CPU, in degrees Celsius.
    pub temperature_celsius: Option<f64>,
    /// The mean frequency of the CPUs, in MHz.
    pub frequency_mhz: Option<f64>,
}

/// The kind of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReadingKind {
    /// Withheld CPU time.
    Steal,
    /// CPU time of other processes.
    NeighborCpus,
    /// Waiting for a CPU.
    CpuPressure,
    /// Waiting for memory.
    MemoryPressure,
    /// Waiting for storage.
    IoPressure,
    /// CPU temperature.
    Temperature,
    /// CPU frequency.
    Frequency,
}

/// Limits of a quiet block. Shares and CPUs may exceed the baseline by this much.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NoiseLimits {
    /// Steal above the baseline, as a share of CPU time.
    pub steal: f64,
    /// CPU time of other processes above the baseline, in CPUs.
    pub neighbor_cpus: f64,
    /// CPU pressure above the baseline, as a share of time.
    pub cpu_pressure: f64,
    /// Memory pressure above the baseline, as a share of time.
    pub memory_pressure: f64,
    /// Storage pressure above the baseline, as a share of time.
    pub io_pressure: f64,
    /// Temperature above the baseline, in degrees Celsius.
    pub temperature_celsius: f64,
    /// Lost frequency, as a share of the baseline's.
    pub frequency_loss: f64,
}

impl Default for NoiseLimits {
    /// One percent of the machine's CPU time for steal, and limits of the same order for the other readings: an effect of
    /// one percent is what a campaign is commonly asked for.
    fn default() -> Self {
        Self {
            steal: 0.01,
            neighbor_cpus: 0.05,
            cpu_pressure: 0.05,
            memory_pressure: 0.01,
            io_pressure: 0.05,
            temperature_celsius: 10.0,
            frequency_loss: 0.02,
        }
    }
}

/// A reading beyond its limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NoiseFlag {
    /// Which reading.
    pub reading: ReadingKind,
    /// Its value during the block, in the unit of [`EnvironmentReadings`].
    pub value: f64,
    /// The highest permitted value; for the frequency the lowest.
    pub limit: f64,
}

/// What the rule says about a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockNoise {
    /// Readings beyond their limits.
    pub flags: Vec<NoiseFlag>,
    /// Readings that are absent for the block or the baseline, where the rule could not judge.
    pub unread: Vec<ReadingKind>,
}

impl BlockNoise {
    /// Whether a reading is beyond its limit.
    #[must_use]
    pub fn is_noisy(&self) -> bool {
        !self.flags.is_empty()
    }
}

/// Judge the environment of one block against the baseline that was read before the campaign.
#[must_use]
pub fn judge_block(block: &EnvironmentReadings, baseline: &EnvironmentReadings, limits: &NoiseLimits) -> BlockNoise {
    let upper = |block: Option<f64>, baseline: Option<f64>, allowance: f64| {
        block.zip(baseline).map(|(value, baseline)| (value, baseline + allowance, value > baseline + allowance))
    };
    let frequency = block.frequency_mhz.zip(baseline.frequency_mhz).map(|(value, baseline)| {
        let limit = baseline * (1.0 - limits.frequency_loss);
        (value, limit, value < limit)
    });
    let judged = [
        (ReadingKind::Steal, upper(block.steal, baseline.steal, limits.steal)),
        (ReadingKind::NeighborCpus, upper(block.neighbor_cpus, baseline.neighbor_cpus, limits.neighbor_cpus)),
        (ReadingKind::CpuPressure, upper(block.cpu_pressure, baseline.cpu_pressure, limits.cpu_pressure)),
        (ReadingKind::MemoryPressure, upper(block.memory_pressure, baseline.memory_pressure, limits.memory_pressure)),
        (ReadingKind::IoPressure, upper(block.io_pressure, baseline.io_pressure, limits.io_pressure)),
        (
            ReadingKind::Temperature,
            upper(block.temperature_celsius, baseline.temperature_celsius, limits.temperature_celsius),
        ),
        (ReadingKind::Frequency, frequency),
    ];
    let mut noise = BlockNoise::default();
    for (reading, judgment) in judged {
        match judgment {
            None => noise.unread.push(reading),
            Some((value, limit, true)) => noise.flags.push(NoiseFlag { reading, value, limit }),
            Some((_, _, false)) => {}
        }
    }
    noise
}

/// The CPU time of processes beside the workload that makes a host busy, as a share of all CPUs.
const BUSY_CPU_SHARE: f64 = 0.1;

/// What makes a host busy before the campaign begins, without the workload: readings beyond the limits of
/// [`NoiseLimits::default`] from zero, and CPU time of processes above a tenth of all CPUs. [`judge_block`] does not flag a
/// load that is in its baseline already.
#[must_use]
pub fn judge_start(baseline: &EnvironmentReadings, cpus: usize) -> Vec<NoiseFlag> {
    let idle = EnvironmentReadings {
        steal: Some(0.0),
        neighbor_cpus: Some(0.0),
        cpu_pressure: Some(0.0),
        memory_pressure: Some(0.0),
        io_pressure: Some(0.0),
        temperature_celsius: None,
        frequency_mhz: None,
    };
    let limits = NoiseLimits { neighbor_cpus: BUSY_CPU_SHARE * cpus.max(1) as f64, ..NoiseLimits::default() };
    judge_block(baseline, &idle, &limits).flags
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: EnvironmentReadings = EnvironmentReadings {
        steal: Some(0.0),
        neighbor_cpus: Some(0.1),
        cpu_pressure: Some(0.02),
        memory_pressure: Some(0.0),
        io_pressure: Some(0.0),
        temperature_celsius: Some(60.0),
        frequency_mhz: Some(3000.0),
    };

    fn flagged(block: EnvironmentReadings) -> Vec<ReadingKind> {
        judge_block(&block, &QUIET, &NoiseLimits::default()).flags.iter().map(|flag| flag.reading).collect()
    }

    #[test]
    fn the_baseline_itself_is_quiet() {
        let noise = judge_block(&QUIET, &QUIET, &NoiseLimits::default());
        assert_eq!(noise, BlockNoise::default());
        assert!(!noise.is_noisy());
    }

    #[test]
    fn each_reading_beyond_its_limit_is_flagged_alone() {
        let cases = [
            (EnvironmentReadings { steal: Some(0.02), ..QUIET }, ReadingKind::Steal),
            (EnvironmentReadings { neighbor_cpus: Some(0.16), ..QUIET }, ReadingKind::NeighborCpus),
            (EnvironmentReadings { cpu_pressure: Some(0.08), ..QUIET }, ReadingKind::CpuPressure),
            (EnvironmentReadings { memory_pressure: Some(0.02), ..QUIET }, ReadingKind::MemoryPressure),
            (EnvironmentReadings { io_pressure: Some(0.06), ..QUIET }, ReadingKind::IoPressure),
            (EnvironmentReadings { temperature_celsius: Some(71.0), ..QUIET }, ReadingKind::Temperature),
            (EnvironmentReadings { frequency_mhz: Some(2900.0), ..QUIET }, ReadingKind::Frequency),
        ];
        for (block, reading) in cases {
            assert_eq!(flagged(block), [reading]);
        }
        let higher_frequency = EnvironmentReadings { frequency_mhz: Some(3500.0), ..QUIET };
        assert_eq!(flagged(higher_frequency), []);
    }

    #[test]
    fn an_absent_reading_is_unread_and_not_quiet() {
        let noise = judge_block(&EnvironmentReadings { steal: None, ..QUIET }, &QUIET, &NoiseLimits::default());
        assert_eq!(noise.unread, [ReadingKind::Steal]);
        assert!(!noise.is_noisy());
        let no_baseline = judge_block(&QUIET, &EnvironmentReadings::default(), &NoiseLimits::default());
        assert_eq!(no_baseline.unread.len(), 7);
    }

    /// The block is as busy as its baseline, which only the judgment of the start sees.
    #[test]
    fn load_before_the_start_is_told_though_no_block_is_flagged() {
        let busy = EnvironmentReadings { neighbor_cpus: Some(1.9), cpu_pressure: Some(1.0), ..QUIET };
        assert_eq!(judge_block(&busy, &busy, &NoiseLimits::default()).flags, []);
        let kinds = |cpus| judge_start(&busy, cpus).iter().map(|flag| (flag.reading, flag.limit)).collect::<Vec<_>>();
        assert_eq!(kinds(2), [(ReadingKind::NeighborCpus, 0.2), (ReadingKind::CpuPressure, 0.05)]);
        assert_eq!(kinds(64), [(ReadingKind::CpuPressure, 0.05)]);
        assert_eq!(judge_start(&QUIET, 2), []);
        assert_eq!(judge_start(&EnvironmentReadings::default(), 2), [], "an absent reading is not busy");
    }
}
