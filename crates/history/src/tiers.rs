//! How long rows are kept, and at which intervals.

/// Milliseconds of a day.
pub const MILLIS_PER_DAY: i64 = 86_400_000;

/// A tier: rows older than `min_age_millis` are thinned to one for each `interval_millis`. Milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionTier {
    /// The minimum age.
    pub min_age_millis: i64,
    /// The interval; none: older rows are deleted.
    pub interval_millis: Option<i64>,
}

/// For samples: one a minute after a day, one an hour after a month, none after a year.
pub const SAMPLE_TIERS: [RetentionTier; 3] = [
    RetentionTier { min_age_millis: MILLIS_PER_DAY, interval_millis: Some(60_000) },
    RetentionTier { min_age_millis: 31 * MILLIS_PER_DAY, interval_millis: Some(3_600_000) },
    RetentionTier { min_age_millis: 366 * MILLIS_PER_DAY, interval_millis: None },
];

/// For footprints: one an hour after a day, none after a month.
pub const FOOTPRINT_TIERS: [RetentionTier; 2] = [
    RetentionTier { min_age_millis: MILLIS_PER_DAY, interval_millis: Some(3_600_000) },
    RetentionTier { min_age_millis: 31 * MILLIS_PER_DAY, interval_millis: None },
];

/// Passes, decisions and runs of the daemon are kept for a month.
pub const MAX_EVENT_AGE_MILLIS: i64 = 31 * MILLIS_PER_DAY;

/// Passes that merged nothing are kept for a day.
pub const MAX_IDLE_PASS_AGE_MILLIS: i64 = MILLIS_PER_DAY;
