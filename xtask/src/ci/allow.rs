//! The tests that may be skipped, and where: the list xtask/allowed-skips.txt.
//! Never accepts a skip silently: a skip that is not on the list fails, one that is on it is printed with its
//! reason.

use anyhow::{Context, Result, bail};

use super::case::{Case, Outcome};
use crate::exec;

/// The list.
pub(crate) struct Allowed {
    entries: Vec<Entry>,
}

struct Entry {
    pattern: String,
    conditions: Vec<String>,
    /// What the test must have said, where the list has it in quotation marks.
    said: Option<String>,
}

impl Allowed {
    /// Reads the list of this checkout.
    pub(crate) fn read() -> Result<Allowed> {
        let path = exec::workspace().join("xtask/allowed-skips.txt");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Allowed::parse(&text).with_context(|| format!("{} is not well-formed", path.display()))
    }

    fn parse(text: &str) -> Result<Allowed> {
        let mut entries = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            let fields: Vec<&str> = line.splitn(3, '|').map(str::trim).collect();
            let [pattern, conditions, reason] = fields[..] else {
                bail!("line {}: `TEST | CONDITIONS | REASON` is the form", index + 1);
            };
            if pattern.is_empty() || conditions.is_empty() || reason.is_empty() {
                bail!("line {}: the test, the condition and the reason must all be given", index + 1);
            }
            let conditions = conditions.split_whitespace().map(str::to_owned).collect();
            let said = reason.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).map(str::to_owned);
            entries.push(Entry { pattern: pattern.to_owned(), conditions, said });
        }
        Ok(Allowed { entries })
    }

    /// Makes failures of the skips that are not on the list.
    pub(crate) fn judge(&self, cases: &mut [Case]) {
        for case in cases.iter_mut().filter(|case| case.outcome == Outcome::Skipped) {
            if !self.allows(case) {
                case.outcome = Outcome::Failed;
                let facts: Vec<&str> = case.facts.iter().map(String::as_str).collect();
                case.note = format!(
                    "skipped ({}), and xtask/allowed-skips.txt does not allow that on a machine that is: {}",
                    case.note,
                    facts.join(" ")
                );
            }
        }
    }

    fn allows(&self, case: &Case) -> bool {
        self.entries.iter().any(|entry| {
            entry.conditions.iter().all(|condition| case.facts.contains(condition))
                && matches(&entry.pattern, &case.test)
                && entry.said.as_ref().is_none_or(|said| *said == case.note)
        })
    }
}

/// Whether a name fits a pattern in which `*` stands for any number of characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    (0..=rest.len()).filter(|&at| rest.is_char_boundary(at)).any(|at| matches(after, &rest[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(test: &str, facts: &[&str]) -> Case {
        let mut case = Case::of_step(test, Outcome::Skipped, "why".to_owned());
        case.facts = facts.iter().map(|&fact| fact.to_owned()).collect();
        case
    }

    #[test]
    fn patterns_match_whole_names() {
        assert!(matches("ublk_*", "ublk_recovery"));
        assert!(matches("*::needs_root*", "a::b::needs_root_here"));
        assert!(matches("*", ""));
        assert!(!matches("ublk", "ublk_recovery"));
        assert!(!matches("*root", "rooted"));
    }

    #[test]
    fn a_skip_needs_its_name_and_every_condition() {
        let allowed = Allowed::parse("# list\n\nublk_* | host no-ublk | there is no ublk\n").unwrap();
        let mut cases = [
            skipped("ublk_a", &["host", "no-ublk"]),
            skipped("ublk_a", &["host"]),
            skipped("loop_a", &["host", "no-ublk"]),
        ];
        allowed.judge(&mut cases);
        assert_eq!(cases.map(|case| case.outcome), [Outcome::Skipped, Outcome::Failed, Outcome::Failed]);
    }

    #[test]
    fn a_quoted_reason_is_the_one_that_was_given() {
        let allowed = Allowed::parse("* | guest | \"why\"\n").unwrap();
        let mut other = skipped("b", &["guest"]);
        other.note = "why not".to_owned();
        let mut cases = [skipped("a", &["guest"]), other, skipped("c", &["host"])];
        allowed.judge(&mut cases);
        assert_eq!(cases.map(|case| case.outcome), [Outcome::Skipped, Outcome::Failed, Outcome::Failed]);
    }

    #[test]
    fn an_entry_without_a_reason_is_refused() {
        for bad in ["a | host", "a | host |", "a | | b", "| host | b"] {
            assert!(Allowed::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_checked_in_list_is_well_formed() {
        Allowed::read().unwrap();
    }
}
