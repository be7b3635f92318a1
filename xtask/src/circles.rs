//! Checks that no files of a crate use each other in a circle (docs/decisions/0082). Tests are not looked at.
//!
//! A file uses another if its code names what that file defines, whichever module hands the name on: a name
//! is followed to its definition. `pub use` by itself is no use: it only opens a door.
//!
//! What this check does not see: calls of methods (`self.step()` in a file, `fn step` in an `impl` in
//! another), functions that are handed on as values, names made by macros, and the text of `include!`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;
use syn::{Attribute, Item, ItemMod, UseTree};

/// The path of a module in its crate, or of a name in a module.
type Names = Vec<String>;

/// What is known of one file.
#[derive(Default)]
struct File {
    path: PathBuf,
    /// Paths that it uses, from the root of the crate.
    uses: BTreeSet<Names>,
    /// What its imports bring: a name of this module, and what that stands for.
    imports: BTreeMap<String, Names>,
    /// Modules all of whose names it imports.
    globs: Vec<Names>,
    /// Names that it defines.
    defines: BTreeSet<String>,
    /// The module that is being looked at.
    here: Names,
}

impl File {
    /// A path as the module writes it, from the root of the crate.
    fn absolute(&self, path: &[String]) -> Option<Names> {
        let rest = |count| path.iter().skip(count).cloned();
        match path.first()?.as_str() {
            "crate" => Some(rest(1).collect()),
            "self" => Some(self.here.iter().cloned().chain(rest(1)).collect()),
            "super" => {
                let up = path.iter().take_while(|name| *name == "super").count();
                let base = self.here.get(..self.here.len().checked_sub(up)?)?;
                Some(base.iter().cloned().chain(rest(up)).collect())
            }
            _ => None,
        }
    }

    fn import(&mut self, before: &Names, tree: &UseTree) {
        let (name, target) = match tree {
            UseTree::Path(path) => {
                let mut before = before.clone();
                before.push(path.ident.to_string());
                return self.import(&before, &path.tree);
            }
            UseTree::Group(group) => return group.items.iter().for_each(|tree| self.import(before, tree)),
            UseTree::Glob(_) => {
                // `use child::*` begins with a module of this one.
                let all = self.absolute(before).unwrap_or_else(|| [&self.here[..], before].concat());
                return self.globs.push(all);
            }
            UseTree::Name(name) => (name.ident.to_string(), name.ident.to_string()),
            UseTree::Rename(name) => (name.rename.to_string(), name.ident.to_string()),
        };
        let mut path = before.clone();
        path.extend((target != "self").then_some(target));
        // A path that begins with neither of these words is another crate's, or of a module of this one.
        let path = self.absolute(&path).unwrap_or_else(|| [&self.here[..], &path].concat());
        let name = if name == "self" { path.last().cloned().unwrap_or_default() } else { name };
        self.uses.insert(path.clone());
        self.imports.insert(name, path);
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

impl<'ast> Visit<'ast> for File {
    fn visit_item(&mut self, item: &'ast Item) {
        let (name, attributes) = match item {
            Item::Const(item) => (Some(&item.ident), &item.attrs),
            Item::Enum(item) => (Some(&item.ident), &item.attrs),
            Item::Fn(item) => (Some(&item.sig.ident), &item.attrs),
            Item::Static(item) => (Some(&item.ident), &item.attrs),
            Item::Struct(item) => (Some(&item.ident), &item.attrs),
            Item::Trait(item) => (Some(&item.ident), &item.attrs),
            Item::Type(item) => (Some(&item.ident), &item.attrs),
            Item::Use(item) => (None, &item.attrs),
            Item::Mod(item) => (None, &item.attrs),
            Item::Impl(item) => (None, &item.attrs),
            _ => return syn::visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            self.defines.extend(name.map(ToString::to_string));
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.here.push(module.ident.to_string());
        syn::visit::visit_item_mod(self, module);
        self.here.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let before = self.uses.clone();
        self.import(&Vec::new(), &item.tree);
        // What is only handed on is not used.
        if !matches!(item.vis, syn::Visibility::Inherited) {
            self.uses = before;
        }
    }

    /// `pub(crate)` uses nothing.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let first = names.first().and_then(|first| self.imports.get(first));
        // A module of this one, or a name that was imported.
        let of_import = first.map(|target| [target, &names[1..]].concat());
        let target = self.absolute(&names).or(of_import);
        self.uses.insert(target.unwrap_or_else(|| [&self.here[..], &names].concat()));
        syn::visit::visit_path(self, path);
    }
}

/// The modules of a crate, by their paths.
type Crate = BTreeMap<Names, File>;

/// Reads the file of a module and those below it.
fn read(folder: &Path, here: &Names, path: PathBuf, found: &mut Crate) {
    let text = fs::read_to_string(&path).unwrap();
    let parsed = syn::parse_file(&text).unwrap();
    let mut file = File { path, here: here.clone(), ..File::default() };
    file.visit_file(&parsed);
    let modules = parsed.items.iter().filter_map(|item| match item {
        Item::Mod(module) if module.content.is_none() && !is_test(&module.attrs) => Some(&module.ident),
        _ => None,
    });
    for name in modules.map(ToString::to_string) {
        let below = [here.as_slice(), std::slice::from_ref(&name)].concat();
        let paths = [folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs")];
        let path =
            paths.into_iter().find(|path| path.exists()).unwrap_or_else(|| panic!("no module {below:?}"));
        read(&folder.join(&name), &below, path, found);
    }
    found.insert(here.clone(), file);
}

/// The module that defines what a path names.
fn home(modules: &Crate, path: &[String], depth: usize) -> Option<Names> {
    let len = (0..=path.len()).rev().find(|&len| modules.contains_key(&path[..len]))?;
    let (here, rest) = path.split_at(len);
    let (name, file) = (rest.first()?, &modules[here]);
    if file.defines.contains(name) {
        return Some(here.to_vec());
    }
    if depth == 0 {
        return None;
    }
    let imported = file.imports.get(name).map(|target| [target, &rest[1..]].concat());
    let globs = file.globs.iter().map(|all| [&all[..], rest].concat());
    imported.into_iter().chain(globs).find_map(|path| home(modules, &path, depth - 1))
}

/// The files that each file uses.
fn arrows(modules: &Crate) -> BTreeMap<&Path, BTreeSet<&Path>> {
    let targets = |file: &File| -> BTreeSet<&Path> {
        let homes = file.uses.iter().filter_map(|path| home(modules, path, 5));
        homes.map(|home| modules[&home].path.as_path()).filter(|path| *path != file.path).collect()
    };
    modules.values().map(|file| (file.path.as_path(), targets(file))).collect()
}

/// The files that one file reaches, by how many steps.
fn reached<'a>(arrows: &BTreeMap<&'a Path, BTreeSet<&'a Path>>, from: &Path) -> BTreeSet<&'a Path> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&Path> = arrows[from].iter().copied().collect();
    while let Some(path) = next.pop() {
        if found.insert(path) {
            next.extend(&arrows[path]);
        }
    }
    found
}

/// Each arrow of a circle, in words.
fn circles(modules: &Crate) -> Vec<String> {
    let arrows = arrows(modules);
    let mut found = Vec::new();
    for (from, targets) in &arrows {
        let back = |to: &&&Path| reached(&arrows, to).contains(from);
        found.extend(targets.iter().filter(back).map(|to| format!("{} -> {}", from.display(), to.display())));
    }
    found
}

#[test]
fn no_files_of_a_crate_use_each_other_in_a_circle() {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = fs::read_dir(xtask.join("../crates")).unwrap().map(|entry| entry.unwrap().path());
    let (mut files, mut found) = (0, Vec::new());
    for folder in crates.chain([xtask.to_owned()]) {
        let folder = folder.join("src");
        let mut modules = Crate::new();
        let path = ["lib.rs", "main.rs"].map(|name| folder.join(name)).into_iter().find(|path| path.exists());
        read(&folder, &Vec::new(), path.unwrap(), &mut modules);
        files += modules.len();
        found.extend(circles(&modules));
    }
    assert!(files > 200, "only {files} files were found");
    assert!(found.is_empty(), "arrows of circles:\n{}", found.join("\n"));
}

/// The arrows of circles in a crate of these files.
fn circles_of(files: &[(&str, &str)]) -> usize {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let mut modules = Crate::new();
    read(folder.path(), &Vec::new(), folder.path().join("lib.rs"), &mut modules);
    circles(&modules).len()
}

#[test]
fn a_circle_is_seen_through_a_name_that_a_module_hands_on() {
    let lib = ("lib.rs", "mod a; mod b; pub use b::Deep;");
    let a = ("a.rs", "pub struct Plain; fn f(_: crate::Deep) {} #[cfg(test)] mod tests { use crate::b; }");
    assert_eq!(circles_of(&[lib, a, ("b.rs", "pub struct Deep;")]), 0);
    assert_eq!(circles_of(&[lib, a, ("b.rs", "pub struct Deep; fn g() { super::a::Plain; }")]), 2);
}

#[test]
fn a_door_and_a_variable_are_no_uses() {
    let b = ("b.rs", "pub struct Deep; fn g(_: super::Plain) {}");
    for (lib, arrows) in [
        ("mod b; pub use b::Deep; pub struct Plain;", 0),
        ("mod b; pub struct Plain; fn f(b: u32) -> u32 { b }", 0),
        ("mod b; pub use b::Deep; pub struct Plain; fn f(_: Deep) {}", 2),
        ("mod b; use b::*; pub struct Plain; fn f(_: Deep) {}", 2),
    ] {
        assert_eq!(circles_of(&[("lib.rs", lib), b]), arrows, "{lib}");
    }
}
