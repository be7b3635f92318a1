//! Runs: which clusters the value of an attribute lies in, and what that makes of them.
//! It never takes a run for longer than the value.

use crate::codec::Codec;
use crate::encoded::{Block, STORED_MAX};
use crate::image::Layout;
use crate::layer::{LayerError, corrupt};

/// Clusters that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// How many.
    pub(super) len: u64,
    /// The first one on disk; none where they read as zeroes.
    pub(super) cluster: Option<u64>,
}

/// Decodes the list of runs at the start of `bytes`, each behind a byte with the lengths of its two numbers.
pub(super) fn decode(mut bytes: &[u8], runs: &mut Vec<Run>) -> Result<(), LayerError> {
    let mut cluster = 0_u64;
    while let Some((head, rest)) = bytes.split_first().filter(|(head, _)| **head != 0) {
        let (short, long) = (usize::from(head & 0xf), usize::from(head >> 4));
        let (Some(len), Some(step)) = (rest.get(..short), rest.get(short..short + long)) else {
            return corrupt("a list of clusters is cut short");
        };
        let (Some(len), Some(step)) = (signed(len), signed(step)) else {
            return corrupt("a run of clusters with impossible numbers");
        };
        let len = u64::try_from(len).ok().filter(|len| *len > 0);
        let next = cluster.checked_add_signed(step);
        let (Some(len), Some(next)) = (len, next) else { return corrupt("an impossible run of clusters") };
        let place = (long > 0).then_some(next);
        cluster = next;
        runs.push(Run { len, cluster: place });
        bytes = rest.get(short + long..).unwrap_or_default();
    }
    Ok(())
}

/// A little-endian number with a sign; 0 where there are no bytes.
fn signed(bytes: &[u8]) -> Option<i64> {
    let mut wide = match bytes.last() {
        Some(last) if last & 0x80 != 0 => [0xff; 8],
        _ => [0; 8],
    };
    wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(i64::from_le_bytes(wide))
}

/// Adds what the runs hold, up to `len` bytes in all.
pub(super) fn lay_out(layout: &mut Layout, runs: &[Run], cluster: u64, len: u64) -> Result<(), LayerError> {
    for run in runs {
        let bytes = run.len.saturating_mul(cluster).min(len.saturating_sub(layout.len()));
        match run.cluster {
            Some(first) => layout.data(first.saturating_mul(cluster), bytes)?,
            None => layout.zero(bytes)?,
        }
    }
    if layout.len() < len { corrupt("a file ends before its length") } else { Ok(()) }
}

/// Runs that are taken piece by piece.
struct Rest<'a> {
    runs: std::slice::Iter<'a, Run>,
    /// What is left of the run that was taken last.
    left: Option<Run>,
}

impl Rest<'_> {
    /// The next clusters that follow each other, at most so many.
    fn take(&mut self, most: u64) -> Option<Run> {
        let run = self.left.take().or_else(|| self.runs.next().copied())?;
        let len = run.len.min(most);
        let cluster = run.cluster.map(|first| first.saturating_add(len));
        self.left = (len < run.len).then_some(Run { len: run.len - len, cluster });
        Some(Run { len, ..run })
    }

    /// The next clusters that follow each other, if they are whole units, of which there may be very many.
    fn take_units(&mut self, unit: u64) -> Option<Run> {
        let run = self.take(u64::MAX)?;
        self.left = Some(run);
        let units = run.len / unit * unit;
        if units > 0 { self.take(units) } else { None }
    }
}

/// The same where `unit` clusters are compressed together: one that has all of its clusters is stored as it
/// is, one that has none is zeroes.
pub(super) fn lay_out_units(
    layout: &mut Layout,
    runs: &[Run],
    (cluster, unit): (u64, u64),
    len: u64,
) -> Result<(), LayerError> {
    let whole = u32::try_from(unit.saturating_mul(cluster)).ok().filter(|whole| *whole <= STORED_MAX);
    let Some(yields) = whole else { return corrupt("clusters that are compressed together are too many") };
    let mut rest = Rest { runs: runs.iter(), left: None };
    while layout.len() < len {
        if let Some(run) = rest.take_units(unit) {
            let end = layout.len().saturating_add(run.len.saturating_mul(cluster)).min(len);
            lay_out(layout, &[run], cluster, end)?;
            continue;
        }
        let wanted = (len - layout.len()).min(yields.into());
        let (mut missing, mut stored, mut sparse) = (unit, Vec::new(), false);
        while missing > 0 {
            let Some(run) = rest.take(missing) else { break };
            missing -= run.len;
            match run.cluster {
                Some(_) if sparse => return corrupt("clusters that are compressed together have a gap"),
                Some(_) => stored.push(run),
                None => sparse = true,
            }
        }
        match sparse {
            false => lay_out(layout, &stored, cluster, layout.len() + wanted)?,
            true if stored.is_empty() => layout.zero(wanted)?,
            true => packed(layout, &stored, cluster, (wanted, yields))?,
        }
    }
    Ok(())
}

/// Adds a unit that is compressed in these runs: of what it yields as much as is wanted.
fn packed(
    layout: &mut Layout,
    stored: &[Run],
    cluster: u64,
    (wanted, yields): (u64, u32),
) -> Result<(), LayerError> {
    let (mut input, mut input_len) = (None, 0);
    for Run { len, cluster: first } in stored {
        let place = first.unwrap_or(0).saturating_mul(cluster);
        let gathered = layout.gather(place, len * cluster)?;
        input.get_or_insert(gathered);
        input_len += len * cluster;
    }
    // Both are at most what the unit has.
    let short = |bytes: u64| u32::try_from(bytes).unwrap_or(yields);
    let (len, input_len) = (short(wanted), short(input_len));
    let block = Block { start: 0, len, input: input.unwrap_or(0), input_len, skip: 0, yields };
    layout.encoded(Codec::Lznt1, block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_go_on_and_back() {
        let mut runs = Vec::new();
        decode(&[0x21, 0x18, 0x34, 0x56, 0x11, 0x05, 0xf0, 0x01, 0x07, 0x31, 1, 0, 0, 1, 0, 0xff], &mut runs)
            .unwrap();
        let run = |len, cluster| Run { len, cluster };
        assert_eq!(
            runs,
            [run(0x18, Some(0x5634)), run(5, Some(0x5624)), run(7, None), run(1, Some(0x1_5624)),]
        );
    }

    #[test]
    fn impossible_runs_are_errors() {
        for bytes in
            [&[0x21, 0x18][..], &[0x11, 0, 1], &[0x11, 0x80, 1], &[0x11, 1, 0xff], &[0xf1; 20], &[0x1f; 20]]
        {
            assert!(decode(bytes, &mut Vec::new()).is_err(), "{bytes:?}");
        }
    }
}
