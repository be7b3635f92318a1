//! Runs: which clusters the value of an attribute lies in, and what that makes of them.
//! It never takes a run for longer than the value.

use crate::codec::Codec;
use crate::encoded::{BLOCK_MAX, Block};
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

/// The same where `unit` clusters are compressed together: one that has all of its clusters is stored as it
/// is, one that has none is zeroes.
pub(super) fn lay_out_units(
    layout: &mut Layout,
    runs: &[Run],
    (cluster, unit): (u64, u64),
    len: u64,
) -> Result<(), LayerError> {
    let whole = u32::try_from(unit.saturating_mul(cluster)).ok().filter(|whole| *whole <= BLOCK_MAX);
    let Some(yields) = whole else { return corrupt("clusters that are compressed together are too many") };
    let mut runs = runs.iter().copied();
    let mut rest = None;
    while layout.len() < len {
        // Whole units in one run, of which there may be very many.
        if let Some(Run { len: clusters, cluster: first }) = rest.take().or_else(|| runs.next()) {
            let units = clusters / unit * unit;
            let bytes = units.saturating_mul(cluster).min(len - layout.len());
            match first {
                Some(first) => layout.data(first.saturating_mul(cluster), bytes)?,
                None => layout.zero(bytes)?,
            }
            let cluster = first.map(|first| first.saturating_add(units));
            rest = (clusters > units).then_some(Run { len: clusters - units, cluster });
            if units > 0 {
                continue;
            }
        }
        let wanted = (len - layout.len()).min(yields.into());
        let (mut missing, mut stored, mut sparse) = (unit, Vec::new(), false);
        while missing > 0 {
            let Some(Run { len, cluster }) = rest.take().or_else(|| runs.next()) else { break };
            let taken = len.min(missing);
            match cluster {
                Some(_) if sparse => return corrupt("clusters that are compressed together have a gap"),
                Some(first) => stored.push((first, taken)),
                None => sparse = true,
            }
            missing -= taken;
            if taken < len {
                rest =
                    Some(Run { len: len - taken, cluster: cluster.map(|first| first.saturating_add(taken)) });
            }
        }
        let clusters: u64 = stored.iter().map(|(_, len)| len).sum();
        let pieces = stored.into_iter().map(|(first, len)| (first.saturating_mul(cluster), len * cluster));
        if !sparse {
            let before = layout.len();
            for (at, bytes) in pieces {
                layout.data(at, bytes.min(wanted - (layout.len() - before)))?;
            }
            if layout.len() - before < wanted {
                return corrupt("a file ends before its length");
            }
        } else if clusters == 0 {
            layout.zero(wanted)?;
        } else {
            let mut input = None;
            for (at, bytes) in pieces {
                let gathered = layout.gather(at, bytes)?;
                input.get_or_insert(gathered);
            }
            layout.encoded(
                Codec::Lznt1,
                Block {
                    start: 0,
                    len: u32::try_from(wanted).unwrap_or(yields),
                    input: input.unwrap_or(0),
                    input_len: u32::try_from(clusters * cluster).unwrap_or(yields),
                    skip: 0,
                    yields,
                },
            )?;
        }
    }
    Ok(())
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
