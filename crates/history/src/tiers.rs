//! For how long what is kept, and at which distances.

/// Milliseconds of a day.
pub const DAY: i64 = 86_400_000;

/// A tier: what is older than `age` is thinned to one for each `step`. Milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tier {
    /// From which age on.
    pub age: i64,
    /// The distance; none: it is dropped.
    pub step: Option<i64>,
}

/// Of samples: one a minute after a day, one an hour after a month, none after a year.
pub const SAMPLES: [Tier; 3] = [
    Tier { age: DAY, step: Some(60_000) },
    Tier { age: 31 * DAY, step: Some(3_600_000) },
    Tier { age: 366 * DAY, step: None },
];

/// Of members: one an hour after a day, none after a month.
pub const MEMBERS: [Tier; 2] = [Tier { age: DAY, step: Some(3_600_000) }, Tier { age: 31 * DAY, step: None }];

/// Passes, decisions and lives of the daemon are kept for a month.
pub const EVENTS: i64 = 31 * DAY;

/// Passes that merged nothing are kept for a day.
pub const IDLE: i64 = DAY;
