//! What is recognised and not read: named as blkid(8) names it, with what opens it, and attached as it is.

use std::path::Path;
use std::process::Command;

use becket_image::layer::{About, recognise};
use becket_image::{Error, Format};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, file, look, open};

fn about(path: &Path) -> About {
    let image = look(path, Format::Auto, &[]).unwrap().last().unwrap().image.clone();
    recognise(&image, Format::Auto).unwrap().about()
}

#[test]
fn it_is_named_as_blkid_names_it() {
    let makers: [(&str, &[&str]); 8] = [
        ("mkfs.f2fs", &["-q"]),
        ("mkudffs", &[]),
        ("mkfs.jfs", &["-q"]),
        ("mkfs.reiserfs", &["-q", "-ff"]),
        ("make-bcache", &["-B"]),
        ("mkswap", &["-q", "-L", "space"]),
        ("cryptsetup", &["-q", "luksFormat", "--type", "luks1", "--pbkdf-force-iterations", "1000"]),
        ("cryptsetup", &["-q", "luksFormat", "--label", "secret", "--pbkdf", "pbkdf2"]),
    ];
    let tools: Vec<&str> = makers.iter().map(|(tool, _)| *tool).chain(["blkid"]).collect();
    if !require_plain_machine("known::it_is_named_as_blkid_names_it", &tools) {
        return;
    }
    let place = dir();
    let key = place.path().join("key");
    std::fs::write(&key, "secret").unwrap();
    for (number, (maker, options)) in makers.into_iter().enumerate() {
        let path = file(place.path(), &format!("{maker}-{number}"), 64 << 20);
        let mut command = Command::new(maker);
        command.args(options).arg(&path);
        if maker == "cryptsetup" {
            command.arg(&key);
        }
        tool(&mut command);
        let blkid = |tag| {
            let said = tool(Command::new("blkid").args(["-p", "-o", "value", "-s", tag]).arg(&path));
            Some(said.trim().to_owned()).filter(|said| !said.is_empty())
        };
        let about = about(&path);
        assert_eq!(Some(about.format), blkid("TYPE").as_deref(), "{maker}");
        assert!(about.notes.iter().any(|note| note.starts_with("attach it, then: ")), "{about:?}");
        if ["mkswap", "cryptsetup"].contains(&maker) {
            assert_eq!((about.uuid, about.label), (blkid("UUID"), blkid("LABEL")), "{maker}");
        }
    }
}

#[test]
fn nothing_is_looked_up_in_it_and_the_error_says_what_opens_it() {
    let name = "known::nothing_is_looked_up_in_it_and_the_error_says_what_opens_it";
    if !require_plain_machine(name, &["mkswap"]) {
        return;
    }
    let place = dir();
    let path = file(place.path(), "swap", 1 << 20);
    tool(Command::new("mkswap").arg("-q").arg(&path));
    let error = open(&path.join("file")).unwrap_err();
    assert!(matches!(&error, Error::NoContainer { .. }), "{error:?}");
    assert!(error.to_string().ends_with("it is swap space, which becket does not read"), "{error}");
    assert_eq!(error.hint().as_deref(), Some("attach it with becket, then: swapon DEVICE"));
    // It is a raw disk.
    assert!(!open(&path).unwrap().read_only);
}
