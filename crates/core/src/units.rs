//! Quantities as people write them: `1 GiB`, `64 kB`, `100 Mbit/s`, `5 ms`.
//!
//! kB is 1,000 bytes and KiB 1,024; a unit is always written (a bare number of bytes is refused), so that no reader has
//! to guess which of the two was meant.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// A moment, as the time since the start that the caller chose; core never reads a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time(pub u64);

impl Time {
    pub fn from_secs_f64(seconds: f64) -> Time {
        Time((seconds.max(0.0) * 1e9) as u64)
    }

    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// The time from `earlier` to this; zero where `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl std::ops::Add<Duration> for Time {
    type Output = Time;

    fn add(self, duration: Duration) -> Time {
        Time(self.0.saturating_add(duration.as_nanos().min(u64::MAX as u128) as u64))
    }
}

/// Why a text is not a quantity: one line with a hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadQuantity(pub String);

impl fmt::Display for BadQuantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadQuantity {}

const BYTES: &[(&str, f64)] = &[
    ("B", 1.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
];
const RATES: &[(&str, f64)] = &[
    ("bit/s", 1.0),
    ("kbit/s", 1e3),
    ("Mbit/s", 1e6),
    ("Gbit/s", 1e9),
    ("bit", 1.0),
    ("kbit", 1e3),
    ("Mbit", 1e6),
    ("mbit", 1e6),
    ("Gbit", 1e9),
    ("gbit", 1e9),
];
const DURATIONS: &[(&str, f64)] = &[("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)];

fn parse(text: &str, units: &[(&str, f64)], most: f64, what: &str, example: &str) -> Result<f64, BadQuantity> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| c.is_alphabetic()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let number: f64 =
        number.trim().replace('_', "").parse().map_err(|_| {
            BadQuantity(format!("{text:?} is not {what}: write a number and a unit, as in {example:?}"))
        })?;
    if unit.is_empty() {
        return Err(BadQuantity(format!("{text:?} has no unit: write {what} as in {example:?}")));
    }
    if number < 0.0 {
        return Err(BadQuantity(format!("{text:?} is negative: write {what} of 0 or more, as in {example:?}")));
    }
    let names = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let scale = units
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(|| BadQuantity(format!("{unit:?} in {text:?} is no unit of {what}: use one of {}", names())))?;
    let value = number * scale.1;
    if value > most {
        return Err(BadQuantity(format!("{text:?} is too large: write {what} as in {example:?}")));
    }
    Ok(value)
}

/// The largest size and rate, 1 EiB and 2^60 bit/s: sums of a few still fit in 64 bits.
const MOST: f64 = (1u64 << 60) as f64;
/// The longest duration: 100 years, which all clocks and timers can add to now.
const LONGEST_S: f64 = 100.0 * 365.25 * 86_400.0;

/// Bytes from a text such as `64 KiB`.
pub fn parse_bytes(text: &str) -> Result<u64, BadQuantity> {
    parse(text, BYTES, MOST, "a size", "64 MiB").map(|bytes| bytes.round() as u64)
}

/// Bits per second from a text such as `100 Mbit/s`.
pub fn parse_rate_bits_per_sec(text: &str) -> Result<u64, BadQuantity> {
    parse(text, RATES, MOST, "a rate", "100 Mbit/s").map(|rate| rate.round() as u64)
}

/// A span of time from a text such as `5 ms`.
pub fn parse_duration(text: &str) -> Result<Duration, BadQuantity> {
    parse(text, DURATIONS, LONGEST_S, "a duration", "200 ms").map(Duration::from_secs_f64)
}

/// Bytes for a person: `64.0 MiB`.
pub fn format_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kb_is_a_thousand_and_kib_is_1024() {
        assert_eq!(parse_bytes("16 kB"), Ok(16_000));
        assert_eq!(parse_bytes("16KiB"), Ok(16_384));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(1_610_612_736));
        assert_eq!(parse_rate_bits_per_sec("100 Mbit/s"), Ok(100_000_000));
        assert_eq!(parse_duration("5 ms"), Ok(Duration::from_millis(5)));
    }

    #[test]
    fn what_is_refused_says_how_to_write_it() {
        for (text, mend) in
            [("64", "no unit"), ("-1GiB", "negative"), ("3 XB", "no unit of"), ("many MiB", "not a size")]
        {
            let error = parse_bytes(text).unwrap_err().to_string();
            assert!(error.contains(mend), "{text}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in ".*", number in "[0-9_.]{0,400}", unit in "[a-zA-Z/]{0,6}") {
            for text in [text, format!("{number} {unit}"), format!("{number}h"), format!("-{number} TiB")] {
                let _ = (parse_bytes(&text), parse_rate_bits_per_sec(&text));
                let span = parse_duration(&text).unwrap_or_default();
                proptest::prop_assert!(span.as_secs_f64() <= LONGEST_S);
            }
        }
    }

    #[test]
    fn what_is_too_large_is_refused() {
        let digits = "9".repeat(400);
        for text in ["99999999999999999999 h", &format!("{digits} ns"), "877000 h"] {
            assert!(parse_duration(text).unwrap_err().to_string().contains("too large"), "{text}");
        }
        assert!(parse_bytes("9999999999 TiB").unwrap_err().to_string().contains("too large"));
        assert!(parse_rate_bits_per_sec("9999999999999 Gbit/s").unwrap_err().to_string().contains("too large"));
        assert_eq!(parse_bytes("1048576 TiB"), Ok(1 << 60));
    }

    #[test]
    fn sizes_are_shown_as_they_are_read() {
        assert_eq!(format_bytes(999), "999 B");
        assert_eq!(format_bytes(64 << 20), "64.0 MiB");
    }
}
