//! Checks that no files of a crate use each other in a circle (docs/decisions/0082, 0216). Tests are not
//! looked at.
//!
//! A file uses another if its code names what that file defines, whichever module hands the name on: a name
//! is followed to its definition. `pub use` by itself is no use: it only opens a door.
//!
//! A file also uses another if it calls a method that is defined there: `self.step()` is that of the type
//! whose `impl` it stands in; any other `.step(one)` is that of the only file of the crate that defines a
//! `step` with one argument which may be called there. Where several files define it, or a trait or another
//! crate does, nothing is known.
//!
//! What this check does not see: such methods, functions that are handed on as values, what stands in the
//! arguments of macros, names made by macros, and the text of `include!`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::Visit;
use syn::{Attribute, Item, ItemMod, UseTree};

/// The path of a module in its crate, or of a name in a module.
type Names = Vec<String>;

/// Methods that the standard library has as well: a call of one is most likely not that of the crate.
const COMMON: &[&str] = &["drain", "load"];

/// A method that is called or defined: its type, where that is known, its name, and the number of its
/// arguments.
type Method = (Option<String>, String, usize);

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
    /// Methods that it defines, and whether only this module and those below may call each; those of traits
    /// are of no type.
    methods: BTreeMap<Method, bool>,
    /// Methods that it calls.
    calls: BTreeSet<Method>,
    /// The module that is being looked at.
    here: Names,
    /// The type whose `impl` is being looked at, and whether that is one of a trait.
    of: Option<String>,
    of_trait: bool,
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

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let of = match &*item.self_ty {
            syn::Type::Path(ty) => ty.path.segments.last().map(|segment| segment.ident.to_string()),
            _ => None,
        };
        let before = (self.of.take(), self.of_trait);
        (self.of, self.of_trait) = (of, item.trait_.is_some());
        syn::visit::visit_item_impl(self, item);
        (self.of, self.of_trait) = before;
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if is_test(&item.attrs) {
            return;
        }
        if item.sig.receiver().is_some() {
            let of = self.of.clone().filter(|_| !self.of_trait);
            let method = (of, item.sig.ident.to_string(), item.sig.inputs.len() - 1);
            self.methods.insert(method, matches!(item.vis, syn::Visibility::Inherited) && !self.of_trait);
        }
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        let args = item.sig.inputs.len().saturating_sub(1);
        self.methods.insert((None, item.sig.ident.to_string(), args), false);
        syn::visit::visit_trait_item_fn(self, item);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let by_self = matches!(&*call.receiver, syn::Expr::Path(path) if path.path.is_ident("self"));
        let of = self.of.clone().filter(|_| by_self);
        self.calls.insert((of, call.method.to_string(), call.args.len()));
        syn::visit::visit_expr_method_call(self, call);
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

/// The files that each file uses, and which of their methods it calls.
type Arrows<'a> = BTreeMap<&'a Path, BTreeMap<&'a Path, BTreeSet<&'a str>>>;

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

/// The files that define a method.
#[derive(Default)]
struct Definers<'a> {
    files: BTreeSet<&'a Path>,
    /// One of them does so for a trait, or is of another crate.
    vague: bool,
    /// The module that it is private to, where it is that.
    within: Option<&'a Names>,
}

/// All methods of a crate: by type and name, and by name and number of arguments.
#[derive(Default)]
struct Methods<'a> {
    of_types: BTreeMap<(&'a str, &'a str), BTreeSet<&'a Path>>,
    all: BTreeMap<(&'a str, usize), Definers<'a>>,
}

impl<'a> Methods<'a> {
    fn of(modules: &'a Crate, others: impl Iterator<Item = &'a Crate>) -> Methods<'a> {
        let mut found = Methods::default();
        let others = others.flat_map(Crate::values).map(|file| (file, true));
        for (file, other) in modules.values().map(|file| (file, false)).chain(others) {
            for ((of, name, args), private) in &file.methods {
                if let Some(of) = of.as_ref().filter(|_| !other) {
                    found.of_types.entry((of, name)).or_default().insert(&file.path);
                }
                let definers = found.all.entry((name, *args)).or_default();
                definers.files.insert(&file.path);
                definers.vague |= other || of.is_none();
                definers.within = private.then_some(&file.here);
            }
        }
        found
    }

    /// The file that defines the method of a call in a module; `None` where that is not known.
    fn definer(&self, here: &Names, (of, name, args): &'a Method) -> Option<&'a Path> {
        let of_type = of.as_ref().and_then(|of| self.of_types.get(&(of.as_str(), name.as_str())));
        let only = |files: &BTreeSet<&'a Path>| files.first().copied().filter(|_| files.len() == 1);
        of_type.and_then(only).or_else(|| {
            let Definers { files, vague, within } = self.all.get(&(name.as_str(), *args))?;
            let may = within.is_none_or(|module| here.starts_with(module));
            only(files).filter(|_| may && !vague && !COMMON.contains(&name.as_str()))
        })
    }
}

/// The arrows of the files of a crate.
fn arrows<'a>(modules: &'a Crate, others: impl Iterator<Item = &'a Crate>) -> Arrows<'a> {
    let methods = Methods::of(modules, others);
    let mut found = Arrows::new();
    for file in modules.values() {
        let targets = found.entry(&file.path).or_default();
        for home in file.uses.iter().filter_map(|path| home(modules, path, 5)) {
            targets.entry(&modules[&home].path).or_default();
        }
        for call in &file.calls {
            if let Some(path) = methods.definer(&file.here, call) {
                targets.entry(path).or_default().insert(&call.1);
            }
        }
        targets.remove(file.path.as_path());
    }
    found
}

/// The files that one file reaches, by how many steps.
fn reached<'a>(arrows: &Arrows<'a>, from: &Path) -> BTreeSet<&'a Path> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&Path> = arrows[from].keys().copied().collect();
    while let Some(path) = next.pop() {
        if found.insert(path) {
            next.extend(arrows[path].keys());
        }
    }
    found
}

/// Each arrow of a circle.
fn circles<'a>(arrows: &Arrows<'a>) -> Vec<(&'a Path, &'a Path)> {
    let reach: BTreeMap<&Path, _> = arrows.keys().map(|from| (*from, reached(arrows, from))).collect();
    let all = arrows.iter().flat_map(|(from, targets)| targets.keys().map(|to| (*from, *to)));
    all.filter(|(from, to)| reach[to].contains(from)).collect()
}

#[test]
fn no_files_of_a_crate_use_each_other_in_a_circle() {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates = fs::read_dir(xtask.join("../crates")).unwrap().map(|entry| entry.unwrap().path());
    let read_all = |folder: PathBuf| {
        let folder = folder.join("src");
        let mut modules = Crate::new();
        let path = ["lib.rs", "main.rs"].map(|name| folder.join(name)).into_iter().find(|path| path.exists());
        read(&folder, &Vec::new(), path.unwrap(), &mut modules);
        modules
    };
    let crates: Vec<Crate> = crates.chain([xtask.to_owned()]).map(read_all).collect();
    let mut found = Vec::new();
    for (index, modules) in crates.iter().enumerate() {
        let others = crates.iter().enumerate().filter(|(other, _)| *other != index);
        let arrows = arrows(modules, others.map(|(_, other)| other));
        let words = |(from, to): (&Path, &Path)| {
            let calls: Vec<&str> = arrows[from][to].iter().copied().collect();
            format!("{} -> {} {}", from.display(), to.display(), calls.join(", "))
        };
        found.extend(circles(&arrows).into_iter().map(words));
    }
    let files: usize = crates.iter().map(Crate::len).sum();
    assert!(files > 200, "only {files} files were found");
    assert!(found.is_empty(), "arrows of circles, with the methods that are called:\n{}", found.join("\n"));
}

/// The arrows of circles in a crate of these files.
fn circles_of(files: &[(&str, &str)]) -> usize {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let mut modules = Crate::new();
    read(folder.path(), &Vec::new(), folder.path().join("lib.rs"), &mut modules);
    circles(&arrows(&modules, [].iter())).len()
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

#[test]
fn a_circle_is_seen_through_calls_of_methods() {
    let lib = ("lib.rs", "mod a; mod b; mod c;");
    let a = ("a.rs", "pub struct Core; impl Core { fn begins(&self) { self.ends(1); } fn len(&self) {} }");
    for (b, arrows) in [
        ("use super::a::Core; impl Core { pub fn ends(&self, _: u8) {} }", 2),
        // As many arguments make no difference where the type is known.
        ("use super::a::Core; impl Core { fn ends(&self) {} }", 2),
        ("use super::a::Core; impl Core { #[cfg(test)] fn ends(&self, _: u8) {} }", 0),
        (
            "use super::a::Core; trait Ends { fn ends(&self, _: u8); } \
             impl Ends for Core { fn ends(&self, _: u8) {} }",
            0,
        ),
        ("pub struct Other; impl Other { fn ends(&self, _: u8, core: &super::a::Core) {} }", 0),
    ] {
        assert_eq!(circles_of(&[lib, a, ("b.rs", b), ("c.rs", "")]), arrows, "{b}");
    }
    // By another name than `self`: only where one file alone defines it.
    let caller = ("a.rs", "pub struct Core; fn f(other: &str) { other.ends(1); }");
    let other =
        |vis| format!("pub struct Other; impl Other {{ {vis} fn ends(&self, _: &super::a::Core) {{}} }}");
    assert_eq!(
        circles_of(&[lib, caller, ("b.rs", &other("")), ("c.rs", "")]),
        0,
        "it may not be called there"
    );
    let b = ("b.rs", &*other("pub(super)"));
    for (c, arrows) in [
        ("", 2),
        ("struct Third; impl Third { fn ends(&self) {} }", 2),
        ("struct Third; impl Third { fn ends(&self, _: u8) {} }", 0),
        ("trait Third { fn ends(&self, _: u8); }", 0),
    ] {
        assert_eq!(circles_of(&[lib, caller, b, ("c.rs", c)]), arrows, "{c}");
    }
}
