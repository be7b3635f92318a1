//! Images on web servers: asks a server for ranges of an object and keeps them in a store on this host.
//! It never opens a URL that the user has not named, and never mixes bytes of two versions of an object.
//!
//! Arrows go down this list only:
//!
//! | file | what it has |
//! | --- | --- |
//! | `fetcher` | brings what readers in other processes ask for |
//! | `decoded` | files compressed as one piece, decoded into the store |
//! | `length` | how long what such a file yields becomes |
//! | `in_order` | such a file, while it is fetched |
//! | `remote` | what a URL has now, opened |
//! | `reading` | how a process reads an object that it fills itself |
//! | `object` | an object of the store that is filled while it is read |
//! | `chunks` | what this process knows of each chunk, and which thread looks at it |
//! | `steps` | a file compressed as one piece, decoded chunk by chunk |
//! | `stream` | the same from its start to its end |
//! | `memory` | chunks for which the store has no room |
//! | `order` | what is said to a fetcher |
//! | `unpacked` | what compressed files yield, in the store |
//! | `verify` | what the store has of an object, compared |
//! | `digest` | whether an object is what its digest says |
//! | `limit` | how much of an object the store may take up |
//! | `store` | the directory of objects; list, drop and bound it |
//! | `temporary` | a directory for one command |
//! | `latest` | which version of a URL was used last |
//! | `unpack` | what a compressed file yields, with bounded memory |
//! | `writing` | a file of the store that is written in order |
//! | `trace` | which bytes a start needed, in their order |
//! | `table` | which chunks of an object are there, with their checksums |
//! | `client` | one range of an object, by as many requests as that takes |
//! | `waits` | how long it is tried again |
//! | `pace` | how long answers usually take |
//! | `agents` | what sends requests, to a server or to a proxy |
//! | `forward` | plain http through a proxy |
//! | `access` | the user's rights and ways, for a process that cannot look them up |
//! | `origin` | kinds of origins: web servers, S3, registries |
//! | `version`, `answer` | which version bytes are of; what the head of an answer must say |
//! | `proxies` | which proxy is the way to a server |
//! | `home` | where a user's files are |
//! | `signature` | URLs without the signature in them |
//! | `netrc`, `place` | passwords; URLs |
//! | `error` | what can go wrong, in sentences |
#![forbid(unsafe_code)]

mod access;
mod agents;
mod answer;
mod chunks;
mod client;
mod decoded;
mod digest;
mod error;
mod fetcher;
mod forward;
mod home;
mod in_order;
mod inward;
mod latest;
mod length;
mod limit;
mod memory;
mod netrc;
mod object;
mod order;
mod origin;
mod pace;
mod place;
mod proxies;
mod reading;
mod remote;
mod signature;
mod steady;
mod steps;
mod store;
mod stream;
mod table;
mod temporary;
pub mod trace;
mod unpack;
mod unpacked;
mod verify;
mod version;
mod waits;
mod writing;

pub use decoded::{Decoded, decoded, decodes};
pub use error::Error;
pub use fetcher::fetch;
pub use origin::{is_remote, named};
pub use place::Place;
pub use remote::{Note, Options, Remote, open};
pub use store::{Complete, Dropped, Entry, Store, complete};
pub use verify::Verified;
pub use version::Version;
pub use waits::Waiting;
