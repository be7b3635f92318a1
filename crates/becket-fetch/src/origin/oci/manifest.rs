//! Manifests of images: which layers there are, and which of them is meant.

use serde::Deserialize;

use super::blob::{Blob, is_digest};

/// The forms of manifests that are read.
pub(super) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
    application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json";
/// Where a layer's title is.
const TITLE: &str = "org.opencontainers.image.title";
/// How many layers a refusal names.
const NAMED: usize = 8;
/// What layers of a container's file system end with: they are archives.
const ARCHIVES: [&str; 4] = [".tar", ".tar+gzip", ".tar+zstd", ".tar.gzip"];

/// What a registry has under a name.
#[derive(Debug)]
pub(super) enum Manifest {
    /// Another manifest, by its digest.
    Index(String),
    Layers(Vec<Layer>),
}

/// What a manifest says of a layer.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Layer {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: std::collections::HashMap<String, String>,
}

#[derive(Deserialize)]
struct Any {
    layers: Option<Vec<Layer>>,
    manifests: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    digest: String,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
}

/// Reads a manifest. Of a list, the only one is meant, or that of this machine.
///
/// # Errors
/// It is none that becket reads: a sentence.
pub(super) fn read(body: &[u8]) -> Result<Manifest, String> {
    let any: Any =
        serde_json::from_slice(body).map_err(|_| "the registry's manifest is none that becket reads")?;
    if let Some(layers) = any.layers {
        return Ok(Manifest::Layers(layers));
    }
    let entries = any.manifests.ok_or("the registry's manifest has no layers")?;
    let machine = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let fits = |entry: &&Entry| {
        entry.platform.as_ref().is_some_and(|found| found.os == "linux" && found.architecture == machine)
    };
    let chosen = match entries.as_slice() {
        [one] => Some(one),
        all => all.iter().find(fits),
    };
    let digest = chosen.map(|entry| entry.digest.clone()).filter(|digest| is_digest(digest));
    digest
        .map(Manifest::Index)
        .ok_or_else(|| format!("it has no image for linux/{machine}; name one by its digest"))
}

impl Layer {
    fn title(&self) -> Option<&str> {
        self.annotations.get(TITLE).map(String::as_str)
    }

    fn is_called(&self, name: &str) -> bool {
        self.title() == Some(name) || self.media_type == name || self.digest == name
    }

    /// For people.
    fn name(&self) -> String {
        becket_image::shown(self.title().unwrap_or(&self.media_type).as_bytes())
    }
}

/// The layer that is meant: the one of that name, or the only one.
///
/// # Errors
/// There is none, or more than one: a sentence.
pub(super) fn choose(layers: &[Layer], named: Option<&str>) -> Result<Blob, String> {
    let fits = |layer: &&Layer| named.is_none_or(|name| layer.is_called(name));
    let found: Vec<&Layer> = layers.iter().filter(fits).collect();
    let names = || {
        let names: Vec<String> = layers.iter().take(NAMED).map(Layer::name).collect();
        let more = if layers.len() > NAMED { ", ..." } else { "" };
        format!("{}{more}", names.join(", "))
    };
    let layer = match found.as_slice() {
        [] if layers.is_empty() => return Err("it has no layers".to_owned()),
        [] => return Err(format!("it has no such layer, but {}", names())),
        [one] => one,
        _ => return Err(format!("it has several layers; add ?layer= and one of: {}", names())),
    };
    if !is_digest(&layer.digest) {
        return Err("its layer has a digest that becket cannot compare".to_owned());
    }
    if ARCHIVES.iter().any(|end| layer.media_type.ends_with(end)) && layer.title().is_none() {
        return Err("it is the file system of a container, which is an archive and no disk image".to_owned());
    }
    Ok(Blob { digest: layer.digest.clone(), size: layer.size })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    fn layer(digit: char, kind: &str, title: &str) -> String {
        let title = if title.is_empty() {
            String::new()
        } else {
            format!(r#", "annotations": {{"{TITLE}": "{title}"}}"#)
        };
        format!(r#"{{"mediaType": "{kind}", "digest": "{}", "size": 7{title}}}"#, digest(digit))
    }

    fn chosen(layers: &[String], named: Option<&str>) -> Result<String, String> {
        match read(format!(r#"{{"layers": [{}]}}"#, layers.join(",")).as_bytes())? {
            Manifest::Layers(layers) => choose(&layers, named).map(|blob| blob.digest),
            Manifest::Index(_) => panic!("it has layers"),
        }
    }

    #[test]
    fn a_layer_is_the_only_one_or_the_one_that_is_named() {
        let (one, two) = (layer('1', "x/raw", "disk.img"), layer('2', "x/readme", ""));
        assert_eq!(chosen(std::slice::from_ref(&one), None), Ok(digest('1')));
        let both = [one.clone(), two];
        let why = chosen(&both, None).unwrap_err();
        assert!(why.contains("disk.img") && why.contains("x/readme"), "{why}");
        for name in ["disk.img", "x/raw", &digest('1')] {
            assert_eq!(chosen(&both, Some(name)), Ok(digest('1')), "{name}");
        }
        assert!(chosen(&both, Some("other")).is_err() && chosen(&[], None).is_err());
        assert!(chosen(&[one.clone(), one], Some("disk.img")).is_err(), "two have that name");
        let container = layer('3', "application/vnd.oci.image.layer.v1.tar+gzip", "");
        assert!(chosen(&[container], None).unwrap_err().contains("archive"));
        let unknown = layer('1', "x", "").replace("sha256", "md5");
        assert!(chosen(&[unknown], None).is_err());
    }

    #[test]
    fn of_a_list_the_one_of_this_machine_is_meant() {
        let list = |entries: &str| match read(format!(r#"{{"manifests": [{entries}]}}"#).as_bytes()) {
            Ok(Manifest::Index(digest)) => Some(digest),
            _ => None,
        };
        let entry = |digit, arch: &str| {
            let digest = digest(digit);
            format!(r#"{{"digest": "{digest}", "platform": {{"os": "linux", "architecture": "{arch}"}}}}"#)
        };
        let all = [entry('1', "s390x"), entry('2', "amd64"), entry('3', "arm64")].join(",");
        let ours = if cfg!(target_arch = "x86_64") { '2' } else { '3' };
        assert_eq!(list(&all), Some(digest(ours)));
        assert_eq!(list(&entry('1', "s390x")), Some(digest('1')));
        assert_eq!(list(&[entry('1', "s390x"), entry('1', "mips")].join(",")), None);
        for bad in ["", "[]", "{}", "{\"layers\": 1}", "\u{1}"] {
            assert!(read(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
