//! What `--fault` takes: faults as people type them, and why what they typed is none.
//! Knows nothing of how they are carried out; only what is clearly a fault is one.

use becket_device::fault::{Affected, Faults, Rule, Struck};
use rustix::io::Errno;

use crate::units::{parse_duration, parse_size};

/// Ends every refusal.
const EXAMPLES: &str =
    "faults look like error=write:EIO:0.01,delay=read:10ms,torn=0.01,short=0.1,enospc-after=1G,seed=7";
/// The errors that a disk or a file system is likely to give.
const ERRORS: [(&str, Errno); 14] = [
    ("EIO", Errno::IO),
    ("ENOSPC", Errno::NOSPC),
    ("EDQUOT", Errno::DQUOT),
    ("EAGAIN", Errno::AGAIN),
    ("EINTR", Errno::INTR),
    ("EINVAL", Errno::INVAL),
    ("ENOMEM", Errno::NOMEM),
    ("EROFS", Errno::ROFS),
    ("EFBIG", Errno::FBIG),
    ("ENODATA", Errno::NODATA),
    ("ETIMEDOUT", Errno::TIMEDOUT),
    ("EILSEQ", Errno::ILSEQ),
    ("EREMOTEIO", Errno::REMOTEIO),
    ("EOPNOTSUPP", Errno::OPNOTSUPP),
];

/// Reads a list of faults, divided by commas.
pub(crate) fn parse_faults(text: &str) -> Result<Faults, String> {
    let mut faults = Faults::default();
    for word in text.split(',') {
        let (name, value) =
            word.split_once('=').ok_or_else(|| format!("`{word}` is not a fault; {EXAMPLES}"))?;
        match name {
            "error" => faults.rules.push(rule(value, error)?),
            "delay" => faults.rules.push(rule(value, delay)?),
            "torn" => faults.torn = chance(value)?,
            "short" => faults.short = chance(value)?,
            "enospc-after" => faults.enospc_after = Some(parse_size(value)?),
            "seed" => {
                faults.seed = value.parse().map_err(|_| format!("`{value}` is not a number for seed="))?
            }
            _ => return Err(format!("`{name}` is not a fault; {EXAMPLES}")),
        }
    }
    faults.check().map_err(|why| format!("`{text}`: {why}; {EXAMPLES}"))?;
    Ok(faults)
}

/// `OPERATION:WHAT[:CHANCE][@START+LENGTH]`
fn rule(text: &str, what: impl Fn(&str) -> Result<Struck, String>) -> Result<Rule, String> {
    let (text, range) = match text.split_once('@') {
        Some((text, range)) => (text, Some(self::range(range)?)),
        None => (text, None),
    };
    let mut words = text.splitn(3, ':');
    let kind = words.next().map_or(Err(String::new()), kind)?;
    let struck =
        words.next().ok_or_else(|| format!("`{text}` lacks what happens to the operations; {EXAMPLES}"))?;
    let struck = what(struck)?;
    let chance = words.next().map_or(Ok(CERTAIN), chance)?;
    Ok(Rule { kind, struck, chance, range })
}

fn kind(word: &str) -> Result<Affected, String> {
    Ok(match word {
        "read" => Affected::Read,
        "write" => Affected::Write,
        "flush" => Affected::Flush,
        "discard" => Affected::Discard,
        "all" => Affected::All,
        _ => return Err(format!("`{word}` is not one of read, write, flush, discard, all")),
    })
}

fn error(word: &str) -> Result<Struck, String> {
    let number = ERRORS
        .iter()
        .find(|(name, _)| *name == word)
        .and_then(|(_, number)| u16::try_from(number.raw_os_error()).ok());
    number.map(Struck::Error).ok_or_else(|| {
        let names: Vec<&str> = ERRORS.iter().map(|(name, _)| *name).collect();
        format!("`{word}` is not one of {}", names.join(", "))
    })
}

fn delay(word: &str) -> Result<Struck, String> {
    let millis = parse_duration(word)?.as_millis();
    u32::try_from(millis)
        .map(Struck::Delay)
        .map_err(|_| format!("`{word}` is too long: a delay has at most 49 days"))
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let (start, len) = text
        .split_once('+')
        .ok_or_else(|| format!("`@{text}` is not a range; a range looks like @1M+4K: offset and length"))?;
    Ok((parse_size(start)?, parse_size(len)?))
}

const CERTAIN: u32 = 1_000_000;

/// A chance from 0 to 1, in millionths: a decimal number without sign or exponent.
fn chance(text: &str) -> Result<u32, String> {
    let refuse = || {
        format!(
            "`{text}` is not a chance; a chance is a number from 0 to 1 with at most six decimals, like 0.01"
        )
    };
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let digits =
        |text: &str| !text.is_empty() && text.len() <= 6 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(decimals) {
        return Err(refuse());
    }
    let whole: u32 = whole.parse().map_err(|_| refuse())?;
    let decimals: u32 = format!("{decimals:0<6}").parse().map_err(|_| refuse())?;
    let millionths = whole.checked_mul(CERTAIN).and_then(|whole| whole.checked_add(decimals));
    millionths.filter(|millionths| *millionths <= CERTAIN).ok_or_else(refuse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_that_people_type() {
        let text = "error=write:EIO:0.01,delay=read:10ms,error=all:ENODATA@1M+512,torn=1,short=0.1,enospc-after=1G,seed=7";
        let rule = |kind, struck, chance, range| Rule { kind, struck, chance, range };
        let faults = Faults {
            rules: vec![
                rule(Affected::Write, Struck::Error(5), 10_000, None),
                rule(Affected::Read, Struck::Delay(10), CERTAIN, None),
                rule(Affected::All, Struck::Error(61), CERTAIN, Some((1 << 20, 512))),
            ],
            torn: CERTAIN,
            short: 100_000,
            enospc_after: Some(1 << 30),
            seed: 7,
        };
        assert_eq!(parse_faults(text), Ok(faults));
        assert_eq!(parse_faults("short=0.000001").map(|faults| faults.short), Ok(1));
        assert_eq!(parse_faults("short=0").map(|faults| faults.short), Ok(0));
    }

    #[test]
    fn nonsense_is_refused_in_words() {
        for (text, word) in [
            ("", "not a fault"),
            ("eror=write:EIO", "`eror`"),
            ("error=write", "what happens"),
            ("error=rite:EIO", "`rite`"),
            ("error=write:EOI", "`EOI`"),
            ("error=write:EIO:1.1", "`1.1`"),
            ("error=write:EIO:0.0000001", "`0.0000001`"),
            ("error=write:EIO:1e-3", "`1e-3`"),
            ("error=write:EIO:.5", "`.5`"),
            ("error=write:EIO@1M", "@1M"),
            ("delay=read:10", ""),
            ("delay=read:ms", "not a duration"),
            ("delay=read:99999min", "too long"),
            ("torn=2", "`2`"),
            ("torn=-1", "`-1`"),
            ("enospc-after=x", "not a size"),
            ("seed=x", "seed="),
            ("short=0.1,", "not a fault"),
        ] {
            match parse_faults(text) {
                Err(why) => assert!(why.contains(word), "{text}: {why}"),
                Ok(_) => assert!(word.is_empty(), "{text} is taken"),
            }
        }
        let many = vec!["error=read:EIO"; 65].join(",");
        assert!(parse_faults(&many).is_err_and(|why| why.contains("65 rules")));
    }
}
