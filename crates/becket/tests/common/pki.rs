//! Keys and certificates for tests of TLS, made by certtool in the test's own directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use becket_testkit::{Scratch, tool};

/// Keys and certificates as gnutls makes them: of one authority for server and clients, and of another one.
pub(crate) fn certificates(place: &Scratch) -> PathBuf {
    let dir = place.dir("pki");
    let make = |name: &str, template: &str, authority: Option<&str>| {
        let path = |kind: &str| dir.join(format!("{name}-{kind}")).to_str().unwrap().to_owned();
        let template_file = dir.join(format!("{name}.template"));
        fs::write(&template_file, template).unwrap();
        let key = tool(Command::new("certtool").args(["--generate-privkey", "--no-text"]));
        fs::write(path("key.pem"), key).unwrap();
        let mut certtool = Command::new("certtool");
        certtool.args(["--no-text", "--template", template_file.to_str().unwrap()]);
        certtool.args(["--load-privkey", &path("key.pem")]);
        match authority {
            None => certtool.arg("--generate-self-signed"),
            Some(authority) => {
                let of = |kind: &str| dir.join(format!("{authority}-{kind}")).to_str().unwrap().to_owned();
                certtool.arg("--generate-certificate");
                certtool.args(["--load-ca-certificate", &of("cert.pem"), "--load-ca-privkey", &of("key.pem")])
            }
        };
        fs::write(path("cert.pem"), tool(&mut certtool)).unwrap();
    };
    let authority = |name: &str| format!("cn = \"{name}\"\nca\ncert_signing_key\nexpiration_days = 30\n");
    let client = "tls_www_client\nsigning_key\nencryption_key\n";
    let server = "cn = \"localhost\"\ndns_name = \"localhost\"\nip_address = \"127.0.0.1\"\ntls_www_server\n\
        signing_key\nencryption_key\n";
    make("ca", &authority("Test"), None);
    make("other", &authority("Other"), None);
    make("server", &format!("{server}expiration_days = 30\n"), Some("ca"));
    make("client", &format!("cn = \"backup\"\n{client}expiration_days = 30\n"), Some("ca"));
    let past = "activation_date = \"2020-01-01 00:00:00\"\nexpiration_date = \"2020-02-01 00:00:00\"\n";
    make("expired", &format!("cn = \"backup\"\n{client}{past}"), Some("ca"));
    make("stranger", &format!("cn = \"backup\"\n{client}expiration_days = 30\n"), Some("other"));
    dir
}

/// A directory as a client of libnbd has it.
pub(crate) fn as_client(place: &Scratch, pki: &Path, who: &str, authority: &str) -> PathBuf {
    let dir = place.dir(&format!("as-{who}-{authority}"));
    fs::copy(pki.join(format!("{authority}-cert.pem")), dir.join("ca-cert.pem")).unwrap();
    if who != "nobody" {
        fs::copy(pki.join(format!("{who}-cert.pem")), dir.join("client-cert.pem")).unwrap();
        fs::copy(pki.join(format!("{who}-key.pem")), dir.join("client-key.pem")).unwrap();
    }
    dir
}
