//! What the host's clocks show, for hours of the day.
//!
//! The host's time zone is that of `TZ` or `/etc/localtime`, which is looked at again every few minutes; UTC where
//! there is none.

use crate::decide::TimeOfDay;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use std::time::SystemTime;

/// What clocks show at an instant in a time zone. Midnight for instants that have no date.
pub(super) fn time_of_day(at: SystemTime, zone: &TimeZone) -> TimeOfDay {
    let Ok(instant) = Timestamp::try_from(at) else { return TimeOfDay::default() };
    let second = |zone: &TimeZone| {
        let time = zone.to_datetime(instant).time();
        let part = |part: i8| u32::try_from(part).unwrap_or_default();
        part(time.hour()) * 3600 + part(time.minute()) * 60 + part(time.second())
    };
    TimeOfDay { local: second(zone), utc: second(&TimeZone::UTC) }
}

/// By how many seconds the host's own clock is ahead of UTC at an instant; 0 for instants that have no date.
pub fn utc_offset(at: SystemTime) -> i64 {
    let offset = |instant| TimeZone::system().to_offset(instant).seconds();
    Timestamp::try_from(at).map_or(0, |instant| offset(instant).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::Hours;

    const NIGHT: Hours = Hours { from: 22 * 3600, to: 6 * 3600 + 1800, utc: false };

    /// Central European time: an hour later in summer, from the last Sunday of March to that of October, at 1:00 UTC.
    fn berlin() -> TimeZone {
        TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()
    }

    fn at(instant: &str, zone: &TimeZone) -> TimeOfDay {
        time_of_day(instant.parse::<Timestamp>().unwrap().into(), zone)
    }

    fn hour(hour: u32, minute: u32) -> u32 {
        hour * 3600 + minute * 60
    }

    #[test]
    fn clocks_differ_by_the_zone() {
        assert_eq!(at("2026-01-15T23:30:05Z", &berlin()), TimeOfDay { local: hour(0, 30) + 5, utc: hour(23, 30) + 5 });
        assert_eq!(at("2026-07-15T23:30:00Z", &berlin()), TimeOfDay { local: hour(1, 30), utc: hour(23, 30) });
        let kathmandu = TimeZone::posix("<+0545>-5:45").unwrap();
        assert_eq!(at("2026-07-15T20:00:00Z", &kathmandu).local, hour(1, 45));
        assert_eq!(at("1969-12-31T23:59:59Z", &TimeZone::UTC).local, hour(23, 59) + 59);
    }

    #[test]
    fn quiet_hours_follow_the_clock_when_it_is_put_forward() {
        // On 2026-03-29 two o'clock is three.
        assert_eq!(at("2026-03-29T00:59:59Z", &berlin()).local, hour(1, 59) + 59);
        assert_eq!(at("2026-03-29T01:00:00Z", &berlin()).local, hour(3, 0));
        let quiet = |instant| NIGHT.contain(at(instant, &berlin()));
        assert!(!quiet("2026-03-28T20:59:59Z") && quiet("2026-03-28T21:00:00Z"));
        assert!(quiet("2026-03-29T04:29:59Z") && !quiet("2026-03-29T04:30:00Z"), "an hour shorter");
        let missing = Hours { from: hour(2, 0), to: hour(3, 0), utc: false };
        assert!((0..24).all(|hour| !missing.contain(at(&format!("2026-03-29T{hour:02}:30:00Z"), &berlin()))));
    }

    #[test]
    fn quiet_hours_follow_the_clock_when_it_is_put_back() {
        // On 2026-10-25 it is half past two twice.
        let twice = Hours { from: hour(2, 0), to: hour(3, 0), utc: false };
        let within = |instant| twice.contain(at(instant, &berlin()));
        assert!(within("2026-10-25T00:30:00Z") && within("2026-10-25T01:30:00Z") && !within("2026-10-25T02:00:00Z"));
        let quiet = |instant| NIGHT.contain(at(instant, &berlin()));
        assert!(quiet("2026-10-24T20:00:00Z") && quiet("2026-10-25T05:29:59Z") && !quiet("2026-10-25T05:30:00Z"));
    }

    #[test]
    fn hours_by_utc_stay_where_they_are() {
        let utc = Hours { utc: true, ..NIGHT };
        for day in ["2026-01-15", "2026-03-29", "2026-07-15", "2026-10-25"] {
            let quiet = |time: &str| utc.contain(at(&format!("{day}T{time}Z"), &berlin()));
            assert!(quiet("22:00:00") && quiet("06:29:59") && !quiet("06:30:00") && !quiet("21:59:59"), "{day}");
        }
    }
}
