//! Sizes as util-linux reads them, to the byte: `512`, `0x200`, `1KiB`, `1kB`, `0.5G`, up to Y.
//! Never fixed: images were made with the offset that this arithmetic gives, odd as it is.

use rustix::io::Errno;

/// The size in bytes that a text means.
///
/// # Errors
/// `INVAL`: no size; `RANGE`: more than 64 bits hold.
pub(super) fn parse(text: &str) -> Result<u64, Errno> {
    let (whole, rest) =
        number(text.trim_start_matches(|letter: char| letter.is_ascii_whitespace() || letter == '\x0b'))?;
    if rest.is_empty() {
        return Ok(whole);
    }
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) if rest.len() > 1 => fraction(rest)?,
        Some(_) => return Err(Errno::INVAL),
        None => (None, rest),
    };
    let unit = unit(rest).ok_or(Errno::INVAL)?;
    let whole = u128::from(whole).checked_mul(unit).and_then(|bytes| u64::try_from(bytes).ok());
    let whole = whole.ok_or(Errno::RANGE)?;
    Ok(fraction.map_or(whole, |fraction| whole.wrapping_add(fraction.of(unit))))
}

/// A whole number as C writes it: decimal, `0x` hexadecimal or `0` octal; and what follows.
fn number(text: &str) -> Result<(u64, &str), Errno> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let (digits, base) = match hexadecimal {
        Some(digits) if digits.starts_with(|letter: char| letter.is_ascii_hexdigit()) => (digits, 16),
        _ if text.starts_with('0') => (text, 8),
        _ => (text, 10),
    };
    let end = digits.find(|letter: char| !letter.is_digit(base)).unwrap_or(digits.len());
    if end == 0 {
        return Err(Errno::INVAL);
    }
    let value = u64::from_str_radix(&digits[..end], base).map_err(|_| Errno::RANGE)?;
    Ok((value, &digits[end..]))
}

/// Digits behind the point.
struct Fraction {
    /// As a number, without the zeros in front.
    digits: u64,
    zeros: u32,
}

/// Reads them, and what follows; no digits but zeros are no fraction.
fn fraction(text: &str) -> Result<(Option<Fraction>, &str), Errno> {
    let digits = text.trim_start_matches('0');
    let zeros = u32::try_from(text.len() - digits.len()).map_err(|_| Errno::INVAL)?;
    if !digits.starts_with(|letter: char| letter.is_ascii_digit()) {
        return Ok((None, digits));
    }
    let (value, rest) = number(digits)?;
    Ok((Some(Fraction { digits: value, zeros }), rest))
}

impl Fraction {
    /// So many bytes of a unit. Each digit is turned into a divisor of the unit by itself, rounded down: 0.3K
    /// is 1024 / (10 / 3) = 341.
    fn of(&self, unit: u128) -> u64 {
        // Units beyond 64 bits have no fraction either.
        let Ok(unit) = u64::try_from(unit) else { return 0 };
        let mut digits = self.digits;
        let mut last: u64 = 10;
        while last < digits {
            match last.checked_mul(10) {
                Some(more) => last = more,
                None => digits /= 10,
            }
        }
        for _ in 0..self.zeros.min(64) {
            match last.checked_mul(10) {
                Some(more) => last = more,
                None => digits /= 10,
            }
        }
        let (mut bytes, mut place) = (0u64, 1u64);
        while digits > 0 {
            let (digit, worth) = (digits % 10, last / place);
            if let Some(divisor) = worth.checked_div(digit).filter(|&divisor| divisor > 0) {
                bytes = bytes.wrapping_add(unit / divisor);
            }
            digits /= 10;
            place = place.saturating_mul(10);
        }
        bytes
    }
}

/// The bytes of a unit: `K` and `KiB` are 1024, `KB` is 1000.
fn unit(text: &str) -> Option<u128> {
    let mut letters = text.chars();
    let letter = letters.next()?.to_ascii_uppercase();
    let power = u32::try_from("KMGTPEZY".find(letter)?).ok()? + 1;
    match letters.as_str() {
        "" | "iB" | "ib" => 1024_u128.checked_pow(power),
        "B" | "b" => 1000_u128.checked_pow(power),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_scripts_write() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("  512", 512),
            ("+512", 512),
            ("0x200", 512),
            ("0X1B", 27),
            ("010", 8),
            ("1K", 1024),
            ("1k", 1024),
            ("1KiB", 1024),
            ("1Kib", 1024),
            ("1KB", 1000),
            ("1kb", 1000),
            ("0x10K", 16384),
            ("3M", 3 << 20),
            ("2GB", 2_000_000_000),
            ("15E", 15 << 60),
            ("0Y", 0),
            ("0.5G", 1 << 29),
            ("1.25K", 1279),
            ("1.05M", (1 << 20) + (1 << 20) / 20),
            ("1.3K", 1024 + 341),
            ("1.0K", 1024),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size() {
        for text in [
            "", " ", "x", "-1", " -1", "1Ki", "1B", "1KBB", "1 K", "1.", "1.5", "1.K5", "1.5X", "..5G", "K",
            "09x", "1é", "0x", "+", "+-1", "1.5é",
        ] {
            assert_eq!(parse(text), Err(Errno::INVAL), "{text}");
        }
        for text in ["18446744073709551616", "16E", "1Z", "1Y", "99999999999999999999K"] {
            assert_eq!(parse(text), Err(Errno::RANGE), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*|[0-9x.]{0,40}[KMGTPEZYkib]{0,3}") {
            let _ = parse(&text);
        }
    }
}
