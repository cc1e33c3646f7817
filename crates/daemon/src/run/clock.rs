//! Time of day on the host's clocks, for quiet hours.
//!
//! The host's time zone is that of `TZ` or `/etc/localtime`, reread every few minutes; UTC where there is none.

use crate::decide::TimeOfDay;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use std::time::SystemTime;

/// Time of day at an instant in a time zone. Midnight for instants without a date.
pub(super) fn time_of_day(at: SystemTime, zone: &TimeZone) -> TimeOfDay {
    let Ok(instant) = Timestamp::try_from(at) else { return TimeOfDay::default() };
    let second = |zone: &TimeZone| {
        let time = zone.to_datetime(instant).time();
        let part = |part: i8| u32::try_from(part).unwrap_or_default();
        part(time.hour()) * 3600 + part(time.minute()) * 60 + part(time.second())
    };
    TimeOfDay { local: second(zone), utc: second(&TimeZone::UTC) }
}

/// Seconds by which the host's local time is ahead of UTC at an instant; 0 for instants without a date.
pub fn utc_offset(at: SystemTime) -> i64 {
    let offset = |instant| TimeZone::system().to_offset(instant).seconds();
    Timestamp::try_from(at).map_or(0, |instant| offset(instant).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::DailyHours;

    const NIGHT_HOURS: DailyHours = DailyHours { start_second: 22 * 3600, end_second: 6 * 3600 + 1800, in_utc: false };

    /// Central European Time: one hour later in summer, from the last Sunday of March to that of October, at 1:00 UTC.
    fn berlin() -> TimeZone {
        TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()
    }

    fn time_of_day_at(instant: &str, zone: &TimeZone) -> TimeOfDay {
        time_of_day(instant.parse::<Timestamp>().unwrap().into(), zone)
    }

    fn seconds_since_midnight(hour: u32, minute: u32) -> u32 {
        hour * 3600 + minute * 60
    }

    #[test]
    fn time_of_day_depends_on_the_time_zone() {
        assert_eq!(
            time_of_day_at("2026-01-15T23:30:05Z", &berlin()),
            TimeOfDay { local: seconds_since_midnight(0, 30) + 5, utc: seconds_since_midnight(23, 30) + 5 }
        );
        assert_eq!(
            time_of_day_at("2026-07-15T23:30:00Z", &berlin()),
            TimeOfDay { local: seconds_since_midnight(1, 30), utc: seconds_since_midnight(23, 30) }
        );
        let kathmandu = TimeZone::posix("<+0545>-5:45").unwrap();
        assert_eq!(time_of_day_at("2026-07-15T20:00:00Z", &kathmandu).local, seconds_since_midnight(1, 45));
        assert_eq!(time_of_day_at("1969-12-31T23:59:59Z", &TimeZone::UTC).local, seconds_since_midnight(23, 59) + 59);
    }

    #[test]
    fn quiet_hours_follow_daylight_saving_start() {
        // On 2026-03-29, 2:00 becomes 3:00.
        assert_eq!(time_of_day_at("2026-03-29T00:59:59Z", &berlin()).local, seconds_since_midnight(1, 59) + 59);
        assert_eq!(time_of_day_at("2026-03-29T01:00:00Z", &berlin()).local, seconds_since_midnight(3, 0));
        let quiet = |instant| NIGHT_HOURS.contains(time_of_day_at(instant, &berlin()));
        assert!(!quiet("2026-03-28T20:59:59Z") && quiet("2026-03-28T21:00:00Z"));
        assert!(quiet("2026-03-29T04:29:59Z") && !quiet("2026-03-29T04:30:00Z"), "an hour shorter");
        let missing = DailyHours {
            start_second: seconds_since_midnight(2, 0),
            end_second: seconds_since_midnight(3, 0),
            in_utc: false,
        };
        assert!(
            (0..24).all(|hour| !missing.contains(time_of_day_at(&format!("2026-03-29T{hour:02}:30:00Z"), &berlin())))
        );
    }

    #[test]
    fn quiet_hours_follow_daylight_saving_end() {
        // On 2026-10-25, 2:30 occurs twice.
        let twice = DailyHours {
            start_second: seconds_since_midnight(2, 0),
            end_second: seconds_since_midnight(3, 0),
            in_utc: false,
        };
        let within = |instant| twice.contains(time_of_day_at(instant, &berlin()));
        assert!(within("2026-10-25T00:30:00Z") && within("2026-10-25T01:30:00Z") && !within("2026-10-25T02:00:00Z"));
        let quiet = |instant| NIGHT_HOURS.contains(time_of_day_at(instant, &berlin()));
        assert!(quiet("2026-10-24T20:00:00Z") && quiet("2026-10-25T05:29:59Z") && !quiet("2026-10-25T05:30:00Z"));
    }

    #[test]
    fn utc_hours_ignore_daylight_saving() {
        let utc = DailyHours { in_utc: true, ..NIGHT_HOURS };
        for day in ["2026-01-15", "2026-03-29", "2026-07-15", "2026-10-25"] {
            let quiet = |time: &str| utc.contains(time_of_day_at(&format!("{day}T{time}Z"), &berlin()));
            assert!(quiet("22:00:00") && quiet("06:29:59") && !quiet("06:30:00") && !quiet("21:59:59"), "{day}");
        }
    }
}
