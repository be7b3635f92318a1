//! The commands that make a device anew: for what no live device can become.

use std::fmt::Display;
use std::path::Path;

use becket_image::quoted;

use crate::contract::shape::{self, Making};
use crate::contract::{DeviceInfo, Export};

impl DeviceInfo {
    /// The commands that end it and make such a one of an image. `options` end with a blank.
    pub(crate) fn anew(&self, options: &str, image: impl AsRef<Path>) -> String {
        format!("becket detach {}; {}", self.name, self.made(options, image))
    }

    /// The command that makes such a one of an image. A file that it needs is called as in the help, where no
    /// record has its name.
    pub(crate) fn made(&self, options: &str, image: impl AsRef<Path>) -> String {
        let image = quoted(image.as_ref());
        match (self.making(), &self.spec.export) {
            (Making { command, place: Some(place), by_name }, Some(export)) => {
                let mut words =
                    format!("becket {command} {options}{image} {place} {}", plain(&export.address));
                if by_name || export.name == self.name {
                    words += &format!(" --name {}", plain(&export.name));
                }
                if self.spec.read_only {
                    words += " --read-only";
                }
                words + &secured(export)
            }
            (Making { command, .. }, _) => {
                format!("becket {command} {options}--name {} {image}", self.name)
            }
        }
    }

    /// How a person makes it again with the same words as before, or others.
    pub(crate) fn again(&self, how: impl Display) -> String {
        format!("becket detach {}, and {} it again{how}", self.name, self.making().command)
    }

    pub(crate) fn making(&self) -> Making {
        shape::of(self.transport).making
    }
}

/// The options that say who may connect.
fn secured(export: &Export) -> String {
    let mut words = String::new();
    if export.tls {
        words += " --tls DIR";
    } else if export.is_open() {
        words += " --insecure";
    }
    if export.verify {
        words += " --tls-verify";
    }
    export.allow.iter().for_each(|name| words += &format!(" --tls-allow {}", plain(name)));
    words
}

fn plain(text: &str) -> String {
    quoted(Path::new(text))
}

#[cfg(test)]
mod tests {
    use becket_transport::Kind;

    use super::*;
    use crate::contract::Spec;

    fn device(kind: Kind, export: Option<Export>) -> DeviceInfo {
        let spec = Spec { export, ..Spec::default() };
        DeviceInfo { spec, ..DeviceInfo::bare("one".into(), "/x".into(), kind, 1) }
    }

    #[test]
    fn what_makes_a_device_anew_is_what_has_made_it() {
        for kind in [Kind::Loop, Kind::Dm, Kind::Ublk, Kind::Fuse] {
            let disk = device(kind, None);
            assert_eq!(disk.anew("", "/i"), "becket detach one; becket attach --name one /i");
            assert_eq!(
                disk.anew("--block-size 4096 ", "/a b"),
                "becket detach one; becket attach --block-size 4096 --name one '/a b'"
            );
            assert_eq!(disk.again(" without --via"), "becket detach one, and attach it again without --via");
        }
        let export = |name: &str, address: &str| {
            let (name, address) = (name.to_owned(), address.to_owned());
            Export { name, address, ..Export::default() }
        };
        let nbd = |export| device(Kind::Nbd, Some(export));
        assert_eq!(
            nbd(export("my disk", "unix:/s")).anew("--cow FILE ", "/i"),
            "becket detach one; becket export --cow FILE /i --nbd unix:/s --name 'my disk'"
        );
        assert_eq!(nbd(export("x", "unix:/s")).again(""), "becket detach one, and export it again");
        let mut secure = nbd(Export {
            tls: true,
            verify: true,
            allow: vec!["a.org".into()],
            ..export("x", "tcp:0.0.0.0:1")
        });
        secure.spec.read_only = true;
        assert_eq!(
            secure.made("", "/i"),
            "becket export /i --nbd tcp:0.0.0.0:1 --name x --read-only --tls DIR --tls-verify --tls-allow a.org"
        );
        for (address, open) in
            [("tcp:[::1]:7", ""), ("tcp:127.0.0.1:7", ""), ("tcp:10.0.0.1:7", " --insecure")]
        {
            let made = nbd(export("x", address)).made("", "/i");
            assert_eq!(made, format!("becket export /i --nbd {} --name x{open}", plain(address)));
        }
        // A virtual machine asks for no name.
        let vm = |name| device(Kind::VhostUser, Some(export(name, "unix:/s"))).made("", "/i");
        assert_eq!(vm("disk.img"), "becket export /i --vhost-user unix:/s");
        assert_eq!(vm("one"), "becket export /i --vhost-user unix:/s --name one");
    }
}
