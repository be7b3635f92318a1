//! Objects on web servers: the URL is the address, and a password may be in the user's netrc.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::contract::{Header, Origin};
use crate::netrc;
use crate::place::Parts;

/// See the module.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Web {
    url: String,
    authorization: Option<String>,
}

impl Web {
    pub(super) fn of_user(url: &str) -> Web {
        let authorization = netrc::login(Parts::of(url).host()).map(|login| login.basic());
        Web { url: url.to_owned(), authorization }
    }
}

impl Origin for Web {
    fn address(&self) -> String {
        self.url.clone()
    }

    fn headers(&self, _address: &str, _range: &Range<u64>) -> Vec<Header> {
        self.authorization.iter().map(|value| ("Authorization", value.clone())).collect()
    }

    fn hint(&self) -> &'static str {
        "put name and password for the host into ~/.netrc"
    }
}
