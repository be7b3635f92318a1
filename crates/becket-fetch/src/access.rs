//! What it takes besides a URL to ask its server: the user's rights and ways, looked up once, so that a
//! process which can read none of the user's files can be given them.
//! It has secrets: nothing prints it.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::origin::Rights;
use crate::place::{Parts, short_digest};
use crate::proxies::Proxies;

/// See the module.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Access {
    pub(crate) rights: Rights,
    pub(crate) proxies: Proxies,
    /// The certificates that are trusted, in PEM, where TLS is spoken.
    pub(crate) authorities: Option<String>,
}

impl Access {
    /// What this process's user has for a URL.
    pub(crate) fn of_user(url: &str) -> Result<Access, Error> {
        let rights = Rights::of_user(url)?;
        let address = rights.origin().address();
        let authorities = Parts::of(&address).is_secure().then(trusted).transpose()?;
        Ok(Access { rights, proxies: Proxies::of_user(), authorities })
    }

    /// Stands for all of it, and shows nothing of it.
    pub(crate) fn digest(&self) -> String {
        // It is as it is when it is passed on.
        short_digest(&serde_json::to_string(self).unwrap_or_default())
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
