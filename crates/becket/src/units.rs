//! Sizes and durations as people type them, and as tables show them.
//! Never guesses: what is not clearly a size or a duration is refused, with examples.

use std::time::Duration;

/// What a size may look like; ends every refusal.
const SIZE_EXAMPLES: &str = "a size looks like 512, 4K, 1MiB or 2GB (K and KiB are 1024 bytes, KB is 1000)";
const DURATION_EXAMPLES: &str = "a duration looks like 5, 5s, 500ms or 2min (a bare number is in seconds)";

/// Reads a size in bytes: a whole number and an optional unit, in any case.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text).ok_or_else(|| format!("`{text}` is not a size; {SIZE_EXAMPLES}"))?;
    let factor =
        factor(unit).ok_or_else(|| format!("`{unit}` is not a unit of size in `{text}`; {SIZE_EXAMPLES}"))?;
    number
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(factor))
        .filter(|bytes| i64::try_from(*bytes).is_ok())
        .ok_or_else(|| format!("`{text}` is more than a device can hold (8 EiB); {SIZE_EXAMPLES}"))
}

/// A block size: a size that fits 32 bits; whether it suits the device is for the device to say.
pub(crate) fn parse_block_size(text: &str) -> Result<u32, String> {
    u32::try_from(parse_size(text)?).map_err(|_| {
        format!("`{text}` is far too large for a block; block sizes are powers of two like 512 or 4096")
    })
}

/// Reads a duration: a whole number with an optional unit of `ms`, `s` or `min`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let refuse = || format!("`{text}` is not a duration; {DURATION_EXAMPLES}");
    let (number, unit) = split(text).ok_or_else(refuse)?;
    let number: u32 = number.parse().map_err(|_| refuse())?;
    match unit {
        "ms" => Ok(Duration::from_millis(number.into())),
        "" | "s" => Ok(Duration::from_secs(number.into())),
        "min" => Ok(Duration::from_secs(u64::from(number) * 60)),
        _ => Err(refuse()),
    }
}

/// A size for a table: the largest unit of 1024 that leaves at most one exact decimal, else bytes.
pub(crate) fn format_size(bytes: u64) -> String {
    for (shift, letter) in [(60, 'E'), (50, 'P'), (40, 'T'), (30, 'G'), (20, 'M'), (10, 'K')] {
        let unit = 1_u64 << shift;
        if bytes < unit {
            continue;
        }
        let (whole, rest) = (bytes / unit, bytes % unit);
        if rest == 0 {
            return format!("{whole}{letter}");
        }
        // Only an exact tenth is shown with a decimal: a table that rounds a size misleads.
        if let Some(ten) = rest.checked_mul(10).filter(|ten| ten % unit == 0) {
            return format!("{whole}.{}{letter}", ten / unit);
        }
    }
    bytes.to_string()
}

/// A time for a table: the largest unit that leaves a whole number in front, with at most one decimal.
pub(crate) fn format_time(nanos: u64) -> String {
    for (unit, word) in [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")] {
        if nanos >= unit {
            return format!("{}.{}{word}", nanos / unit, nanos % unit * 10 / unit);
        }
    }
    format!("{nanos}ns")
}

/// Digits and what follows them; nothing when there are no digits first.
fn split(text: &str) -> Option<(&str, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0).then(|| text.split_at(digits))
}

fn factor(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    if unit.is_empty() || unit == "b" {
        return Some(1);
    }
    let power = u32::try_from("kmgtpe".find(unit.chars().next()?)?).ok()? + 1;
    match unit.get(1..)? {
        "" | "ib" => Some(1024_u64.pow(power)),
        "b" => Some(1000_u64.pow(power)),
        _ => None,
    }
}

/// A time in seconds from the start of 1970, as a date and time in UTC.
pub(crate) fn format_date(seconds: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Years begin in March, so that the day of a leap year is their last.
    let from_march = days + 719_468;
    let (era, of_era) = (from_march.div_euclid(146_097), from_march.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_people_type() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("4KB", 4000),
            ("1MiB", 1 << 20),
            ("1M", 1 << 20),
            ("2GB", 2_000_000_000),
            ("3TiB", 3 << 40),
            ("1P", 1 << 50),
            ("7E", 7 << 60),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_examples() {
        for text in [
            "", " ", "K", "-1", "+1", " 4K", "4K ", "4 K", "0x10", "1.5G", "4KK", "4Kb1", "1e3", "4iB", "４",
            "1é",
        ] {
            let error = parse_size(text).unwrap_err();
            assert!(error.contains("1MiB") && error.contains(text), "{text}: {error}");
        }
        for text in ["8E", "16E", "9223372036854775808", "18446744073709551616", "99999999999999999999K"] {
            assert!(parse_size(text).unwrap_err().contains("8 EiB"), "{text}");
        }
        assert!(parse_block_size("8G").unwrap_err().contains("4096"));
        assert_eq!(parse_block_size("4K"), Ok(4096));
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("5"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("2min"), Ok(Duration::from_secs(120)));
        for text in ["", "s", "-1", "1h", "1.5", "5 s", "99999999999"] {
            assert!(parse_duration(text).unwrap_err().contains("500ms"), "{text}");
        }
    }

    #[test]
    fn times_in_tables() {
        for (nanos, text) in [
            (0, "0ns"),
            (999, "999ns"),
            (1_000, "1.0us"),
            (81_399, "81.3us"),
            (999_999, "999.9us"),
            (12_345_678, "12.3ms"),
            (2_050_000_000, "2.0s"),
            (u64::MAX, "18446744073.7s"),
        ] {
            assert_eq!(format_time(nanos), text);
        }
    }

    #[test]
    fn sizes_in_tables_are_exact() {
        for (bytes, text) in [
            (0, "0"),
            (512, "512"),
            (1024, "1K"),
            (1536, "1.5K"),
            (64 << 20, "64M"),
            ((64 << 20) + 512, "65536.5K"),
            (1025, "1025"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(format_size(bytes), text);
        }
    }

    #[test]
    fn times_are_dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_827_405, "2000-02-29 12:30:05"),
            (-1, "1969-12-31 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(format_date(seconds), text);
        }
    }
}
