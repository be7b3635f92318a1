//! Options of an origin, in the query of its URL: `s3://bucket/key?region=eu-west-1`.

use percent_encoding::percent_decode_str;

/// A URL that has options: what is before its query, and the values of `names` in their order.
///
/// # Errors
/// An option that is not known or is there twice: a sentence.
pub(super) fn options<'a, const N: usize>(
    url: &'a str,
    names: [&str; N],
) -> Result<(&'a str, [Option<String>; N]), String> {
    let (start, query) = url.split_once('?').unwrap_or((url, ""));
    let mut values = [const { None }; N];
    for option in query.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let place = names.iter().zip(values.iter_mut()).find(|(known, _)| **known == name);
        let Some((_, place)) = place else {
            return Err(format!("{name:?} is not an option here; there are: {}", names.join(", ")));
        };
        if place.replace(decoded(value)?).is_some() {
            return Err(format!("the option {name} is there twice"));
        }
    }
    Ok((start, values))
}

/// What `%20` and the like stand for.
pub(super) fn decoded(text: &str) -> Result<String, String> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(Into::into).map_err(|_| "what its %XX stand for is not UTF-8".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_known_and_there_once() {
        let all = |url| options(url, ["a", "b"]);
        assert_eq!(all("s3://x/y"), Ok(("s3://x/y", [None, None])));
        let (start, [a, b]) = all("s3://x/y?b=http%3A//h&a").unwrap();
        assert_eq!((start, a.as_deref(), b.as_deref()), ("s3://x/y", Some(""), Some("http://h")));
        assert!(all("s3://x/y?c=1").is_err() && all("s3://x/y?a=1&a=2").is_err() && all("x?a=%ff").is_err());
    }
}
