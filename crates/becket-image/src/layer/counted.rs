//! A file system whose answers are counted: one step for each question and for each entry of a directory.
//! It never answers anything itself.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::{About, Attributes, Entry, FileSystem, LayerError, Stat, Xattrs};
use crate::budget::Budget;
use crate::image::Layout;

const ENTRIES: &str = "entries of directories";
const FILES: &str = "looking at files";

/// The same file system, within a budget.
pub(super) fn counted(fs: Arc<dyn FileSystem>, budget: &Budget) -> Arc<dyn FileSystem> {
    Arc::new(Counted { fs, budget: budget.clone() })
}

#[derive(Debug)]
struct Counted {
    fs: Arc<dyn FileSystem>,
    budget: Budget,
}

impl FileSystem for Counted {
    fn about(&self) -> &About {
        self.fs.about()
    }

    fn root(&self) -> u64 {
        self.fs.root()
    }

    fn stat(&self, node: u64) -> Result<Stat, LayerError> {
        self.budget.steps(1, FILES)?;
        self.fs.stat(node)
    }

    fn attributes(&self, node: u64) -> Result<Attributes, LayerError> {
        self.budget.steps(1, FILES)?;
        self.fs.attributes(node)
    }

    fn xattrs(&self, node: u64) -> Result<Xattrs, LayerError> {
        self.budget.steps(1, FILES)?;
        self.fs.xattrs(node)
    }

    fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
        let mut spent = self.budget.steps(1, FILES);
        self.fs.list(dir, &mut |name, node| {
            spent = self.budget.steps(1, ENTRIES);
            if spent.is_err() { ControlFlow::Break(()) } else { entry(name, node) }
        })?;
        Ok(spent?)
    }

    fn same_name(&self, one: &[u8], other: &[u8]) -> bool {
        self.fs.same_name(one, other)
    }

    fn read_link(&self, node: u64) -> Result<Vec<u8>, LayerError> {
        self.budget.steps(1, FILES)?;
        self.fs.read_link(node)
    }

    fn lay_out(&self, node: u64) -> Result<Layout, LayerError> {
        self.budget.steps(1, FILES)?;
        self.fs.lay_out(node)
    }

    fn writable(&self, node: u64) -> Result<(), String> {
        self.fs.writable(node)
    }
}
