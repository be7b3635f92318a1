//! Keys, region and endpoint of a user, from the environment and the files of the AWS tools.
//! It never runs a program that a file names, and asks no server for keys.

use serde::{Deserialize, Serialize};

/// What signs requests.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Keys {
    pub(super) id: String,
    pub(super) secret: String,
    /// Of keys that are valid for a short time.
    pub(super) token: Option<String>,
}

/// What is known of a user.
#[derive(Default)]
pub(super) struct Profile {
    pub(super) keys: Option<Keys>,
    pub(super) region: Option<String>,
    pub(super) endpoint: Option<String>,
}

/// Looks a profile up: the one that the URL names, or else the keys of the environment, or else the profile
/// that the environment names, or `default`.
///
/// # Errors
/// The profile that was named does not exist.
pub(super) fn look(
    named: Option<&str>,
    env: &dyn Fn(&str) -> Option<String>,
    read: &dyn Fn(&str) -> Option<String>,
) -> Result<Profile, String> {
    let file = |variable: &str, usual: &str| {
        let path = env(variable).or_else(|| Some(format!("{}/.aws/{usual}", env("HOME")?)));
        path.and_then(|path| read(&path)).unwrap_or_default()
    };
    let asked = named.map(str::to_owned).or_else(|| env("AWS_PROFILE"));
    let name = asked.clone().unwrap_or_else(|| "default".to_owned());
    let credentials = file("AWS_SHARED_CREDENTIALS_FILE", "credentials");
    let config = file("AWS_CONFIG_FILE", "config");
    let (secrets, settings) = (section(&credentials, &name), section(&config, &name));
    if asked.is_some() && secrets.is_empty() && settings.is_empty() {
        let places = ["HOME", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"];
        if places.iter().all(|place| env(place).is_none()) {
            return Err(format!(
                "$HOME is not set, so the files of the AWS tools with the profile {name:?} cannot be found; set it"
            ));
        }
        return Err(format!("the files of the AWS tools have no profile {name:?}"));
    }
    let of = |key: &str| {
        let both = secrets.iter().chain(&settings);
        both.clone().find(|(known, _)| *known == key).map(|(_, value)| (*value).to_owned())
    };
    let keys =
        |id: Option<String>, secret: Option<String>, token| Some(Keys { id: id?, secret: secret?, token });
    let from_env = || {
        keys(env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY"), env("AWS_SESSION_TOKEN"))
            .filter(|_| named.is_none())
    };
    let from_files = || keys(of("aws_access_key_id"), of("aws_secret_access_key"), of("aws_session_token"));
    let keys = from_env().or_else(from_files);
    let line = |text: &str| !text.is_empty() && text.bytes().all(|byte| (0x21..0x7f).contains(&byte));
    let sound = |keys: &Keys| line(&keys.id) && line(&keys.secret) && keys.token.as_deref().is_none_or(line);
    if !keys.as_ref().is_none_or(sound) {
        return Err("the keys for it have characters that no key has".to_owned());
    }
    Ok(Profile { keys, region: of("region"), endpoint: of("endpoint_url") })
}

/// The pairs of a section: `[NAME]`, or `[profile NAME]` as the config file has it.
fn section<'a>(text: &'a str, name: &str) -> Vec<(&'a str, &'a str)> {
    let (mut ours, mut pairs) = (false, Vec::new());
    for line in text.lines() {
        let plain = line.trim();
        if let Some(title) = plain.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            let title = title.0.trim();
            ours = title == name || title.strip_prefix("profile ").is_some_and(|title| title.trim() == name);
        } else if ours
            && !plain.starts_with(['#', ';'])
            // What is indented belongs to the line before it.
            && !line.starts_with([' ', '\t'])
            && let Some((key, value)) = plain.split_once('=')
        {
            pairs.push((key.trim(), value.trim()));
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "[default]\naws_access_key_id = ONE\naws_secret_access_key=first\n\n[work]\n\
        # a comment = x\naws_access_key_id=TWO\naws_secret_access_key=second\naws_session_token=t\n[half]\n\
        aws_access_key_id=x\n";
    const CONFIG: &str = "[default]\nregion = eu-west-1\n[profile work]\nregion=us-west-2\n\
        s3 =\n  region = nested\nendpoint_url = http://127.0.0.1:1\n";

    #[test]
    fn a_profile_without_a_home_directory_says_what_is_missing() {
        let why = look(Some("work"), &|_| None, &|_| None).err().unwrap();
        assert!(why.contains("$HOME is not set"), "{why}");
        let env = |name: &str| (name == "HOME").then(|| "/h".to_owned());
        let why = look(Some("work"), &env, &|_| None).err().unwrap();
        assert!(why.contains("have no profile"), "{why}");
    }

    fn of(named: Option<&str>, env: &[(&str, &str)]) -> Result<(Option<String>, Option<String>), String> {
        let env = |name: &str| {
            let home = [("HOME", "/h")];
            let found = env.iter().chain(&home).find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let read = |path: &str| match path {
            "/h/.aws/credentials" => Some(CREDENTIALS.to_owned()),
            "/h/.aws/config" => Some(CONFIG.to_owned()),
            _ => None,
        };
        let found = look(named, &env, &read)?;
        Ok((found.keys.map(|keys| keys.id + &keys.token.unwrap_or_default()), found.region))
    }

    #[test]
    fn keys_are_those_of_the_profile_that_was_asked_for() {
        let found = |keys: Option<&str>, region: Option<&str>| {
            Ok((keys.map(str::to_owned), region.map(str::to_owned)))
        };
        let keys = [("AWS_ACCESS_KEY_ID", "ENV"), ("AWS_SECRET_ACCESS_KEY", "s"), ("AWS_SESSION_TOKEN", "+")];
        assert_eq!(of(None, &[]), found(Some("ONE"), Some("eu-west-1")));
        assert_eq!(of(Some("work"), &[]), found(Some("TWOt"), Some("us-west-2")));
        assert_eq!(of(None, &[("AWS_PROFILE", "work")]), found(Some("TWOt"), Some("us-west-2")));
        assert_eq!(of(None, &keys), found(Some("ENV+"), Some("eu-west-1")));
        assert_eq!(of(Some("work"), &keys), found(Some("TWOt"), Some("us-west-2")), "it was named");
        assert_eq!(of(Some("half"), &[]), found(None, None));
        assert_eq!(of(None, &[("HOME", "/other")]), found(None, None));
        assert!(of(Some("none"), &[]).is_err());
        let bad = [("AWS_ACCESS_KEY_ID", "a\r\nX: y"), ("AWS_SECRET_ACCESS_KEY", "s")];
        assert!(of(None, &bad).is_err());
    }
}
