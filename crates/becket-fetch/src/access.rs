//! What it takes besides a URL to ask its server: the user's rights and ways, looked up once, so that a
//! process which can read none of the user's files can be given them.
//! It has secrets: nothing prints it.

use serde::{Deserialize, Serialize};
use ureq::Proxy;
use ureq::http::Uri;

use crate::Error;
use crate::origin::Rights;
use crate::place::Parts;

/// See the module.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Access {
    pub(crate) rights: Rights,
    /// The URL of the proxy.
    pub(crate) proxy: Option<String>,
    /// The certificates that are trusted, in PEM, where TLS is spoken.
    pub(crate) authorities: Option<String>,
}

impl Access {
    /// What this process's user has for a URL.
    pub(crate) fn of_user(url: &str) -> Result<Access, Error> {
        let rights = Rights::of_user(url)?;
        let address = rights.origin().address();
        let uri = address.parse::<Uri>().ok();
        let proxy =
            Proxy::try_from_env().filter(|proxy| uri.as_ref().is_none_or(|uri| !proxy.is_no_proxy(uri)));
        let authorities = Parts::of(&address).is_secure().then(trusted).transpose()?;
        Ok(Access { rights, proxy: proxy.map(|proxy| proxy.uri().to_string()), authorities })
    }
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").finish_non_exhaustive()
    }
}

fn trusted() -> Result<String, Error> {
    becket_image::link::trusted()
        .map_err(|(path, error)| Error::store(&path, "the certificates of this system cannot be read")(error))
}
