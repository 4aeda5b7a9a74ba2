//! Which file uses which: arrows point one way, down to Burn, and no two files need each other.
//!
//! CONTRIBUTING.md draws the floors. What a file uses is read from its tokens: every path that begins with `crate`, `super` or a module
//! within the file's own, followed through re-exports to the file that has the item. Unit tests may use anything.
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The floors of `burn-memsave-layers`, from the ground up: the modules of a floor may use each other, and everything below.
const LAYERS: &[&[&str]] = &[
    &["backend", "burn_internals", "burn_next", "visit"],
    &["adapter", "node", "saved"],
    &["frozen"],
    &["graph"],
    &["ops"],
    &["functional"],
    &["lora"],
    &["nn"],
];
/// The floors of `burn-memsave`.
const TOOLBOX: &[&[&str]] = &[
    &[
        "burn_next",
        "gradient_steps",
        "lazy_paths",
        "lora",
        "parameters",
        "platform",
        "strategy",
        "tensor",
        "widened",
    ],
    &["measure"],
    &["checkpoint", "lazy", "mixed", "peft"],
    &["optim"],
    &["plan"],
    &["explain", "parallel"],
    &["bin", "guide"],
];

/// Re-exports upwards: the file that shows, and the module that it shows. Users find `explain` in `measure`, and it plans a step, which needs
/// measurements. Nothing in this crate uses the path.
const SHOWN_FROM_ABOVE: [[&str; 2]; 1] = [["measure", "explain"]];

/// A module by its path, such as `["ops", "gate"]`.
type Module = Vec<String>;

#[derive(Default)]
struct File {
    path: PathBuf,
    /// The names that it imports, and the paths that they mean.
    imports: BTreeMap<String, Module>,
    /// Every path that it uses, from the root of the crate. What it only shows to others, of a module within it, is not used.
    uses: BTreeSet<Module>,
}

struct Crate {
    files: BTreeMap<Module, File>,
}

impl Crate {
    fn read(root: &Path) -> Self {
        let mut this = Self { files: BTreeMap::new() };
        this.find(root, &mut vec![]);
        let tokens: Vec<(Module, TokenStream)> = this
            .files
            .iter()
            .map(|(module, file)| {
                let text = std::fs::read_to_string(&file.path).unwrap();
                (
                    module.clone(),
                    text.parse().unwrap_or_else(|error| panic!("{}: {error}", file.path.display())),
                )
            })
            .collect();
        for (module, tokens) in tokens {
            let (mut imports, mut uses) = (BTreeMap::new(), BTreeSet::new());
            this.scan(&module, &module, tokens, &mut imports, &mut uses);
            let file = this.files.get_mut(&module).expect("a file that was found");
            (file.imports, file.uses) = (imports, uses);
        }
        this
    }

    fn find(&mut self, folder: &Path, module: &mut Module) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                module.push(name);
                self.find(&path, module);
                module.pop();
            } else if path.extension().is_some_and(|extension| extension == "rs") && name != "main" {
                let mut module = module.clone();
                if name != "mod" && name != "lib" {
                    module.push(name);
                }
                self.files.insert(module, File { path, ..File::default() });
            }
        }
    }

    /// Reads the tokens of a file. `within`: the module that `super` and names are relative to, which is one in the file, perhaps.
    fn scan(
        &self,
        file: &Module,
        within: &Module,
        tokens: TokenStream,
        imports: &mut BTreeMap<String, Module>,
        uses: &mut BTreeSet<Module>,
    ) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Ident(word) if word == "use" => {
                    let end =
                        (at..tokens.len()).find(|&at| is_punct(&tokens, at, ';')).unwrap_or(tokens.len());
                    let mut found = vec![];
                    tree(&tokens[at + 1..end], &mut vec![], &mut found);
                    for (path, name) in found {
                        let Some(path) = self.absolute(within, &path) else { continue };
                        if within == file {
                            imports.insert(name, path.clone());
                        }
                        if !(is_shown(&tokens[..at]) && path.starts_with(file)) {
                            uses.insert(path);
                        }
                    }
                    at = end;
                }
                TokenTree::Ident(word) if word == "mod" => match (tokens.get(at + 1), tokens.get(at + 2)) {
                    (Some(name), Some(TokenTree::Group(body))) => {
                        if name.to_string() != "tests" {
                            let mut inner = within.clone();
                            inner.push(name.to_string());
                            self.scan(file, &inner, body.stream(), imports, uses);
                        }
                        at += 2;
                    }
                    _ => at += 1,
                },
                TokenTree::Ident(_) if !follows_path(&tokens, at) => {
                    let (path, end) = path(&tokens, at);
                    if path.len() > 1
                        && let Some(path) = self.absolute(within, &path)
                    {
                        uses.insert(path);
                    }
                    at = end - 1;
                }
                TokenTree::Group(group) => self.scan(file, within, group.stream(), imports, uses),
                _ => {}
            }
            at += 1;
        }
    }

    /// From the root of the crate; `None` of another crate's.
    fn absolute(&self, within: &Module, path: &[String]) -> Option<Module> {
        let mut module = within.clone();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                module.clear();
                rest = &path[1..];
            }
            "self" => rest = &path[1..],
            "super" => {}
            child => {
                module.push(child.into());
                if !self.files.contains_key(&module) {
                    return None;
                }
                module.pop();
            }
        }
        while rest.first().is_some_and(|part| part == "super") {
            module.pop();
            rest = &rest[1..];
        }
        module.extend(rest.iter().cloned());
        Some(module)
    }

    /// The file that has an item.
    fn home(&self, path: &Module) -> &Module {
        let mut path = path.clone();
        for _ in 0..16 {
            let length = (0..=path.len()).rev().find(|&length| self.files.contains_key(&path[..length]));
            let length = length.expect("the root is a file");
            let (module, file) = self.files.get_key_value(&path[..length]).expect("it was found");
            match path.get(length).and_then(|name| file.imports.get(name)) {
                Some(target) if !target.starts_with(&path[..length + 1]) => {
                    path = target.iter().chain(&path[length + 1..]).cloned().collect();
                }
                _ => return module,
            }
        }
        panic!("re-exports in a circle: {path:?}");
    }

    /// Which file uses which. That a file uses the modules that it is part of is no arrow: `super` is where it stands.
    fn arrows(&self) -> BTreeMap<&Module, BTreeSet<&Module>> {
        self.files
            .iter()
            .map(|(from, file)| {
                let to = file.uses.iter().map(|path| self.home(path)).filter(|to| !from.starts_with(to));
                (from, to.collect())
            })
            .collect()
    }
}

/// Whether the token before `use` makes it visible: `pub`, `pub(crate)`.
fn is_shown(before: &[TokenTree]) -> bool {
    match before.last() {
        Some(TokenTree::Ident(word)) => word == "pub",
        Some(TokenTree::Group(group)) => group.delimiter() == Delimiter::Parenthesis,
        _ => false,
    }
}

fn is_punct(tokens: &[TokenTree], at: usize, character: char) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == character)
}

fn is_colons(tokens: &[TokenTree], at: usize) -> bool {
    is_punct(tokens, at, ':') && is_punct(tokens, at + 1, ':')
}

/// Whether an identifier continues a path, or names a field, a method or a lifetime.
fn follows_path(tokens: &[TokenTree], at: usize) -> bool {
    at > 0
        && (is_punct(tokens, at - 1, '.')
            || is_punct(tokens, at - 1, '\'')
            || at > 1 && is_colons(tokens, at - 2))
}

/// The path that begins here, and where it ends.
fn path(tokens: &[TokenTree], mut at: usize) -> (Vec<String>, usize) {
    let mut path = vec![];
    while let Some(TokenTree::Ident(word)) = tokens.get(at) {
        path.push(word.to_string());
        at += 1;
        if !is_colons(tokens, at) || !matches!(tokens.get(at + 2), Some(TokenTree::Ident(_))) {
            break;
        }
        at += 2;
    }
    (path, at)
}

/// The paths of what comes after `use`, and the names that they get.
fn tree(tokens: &[TokenTree], before: &mut Vec<String>, found: &mut Vec<(Vec<String>, String)>) {
    let length = before.len();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(word) if word == "as" => {
                let name = tokens.get(at + 1).map(|name| name.to_string()).unwrap_or_default();
                found.push((before.clone(), name));
                return before.truncate(length);
            }
            TokenTree::Ident(word) => before.push(word.to_string()),
            TokenTree::Group(group) => {
                let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
                for part in
                    tokens.split(|token| matches!(token, TokenTree::Punct(comma) if comma.as_char() == ','))
                {
                    if !part.is_empty() {
                        tree(part, before, found);
                    }
                }
                return before.truncate(length);
            }
            TokenTree::Punct(star) if star.as_char() == '*' => {
                found.push((before.clone(), "*".into()));
                return before.truncate(length);
            }
            _ => {}
        }
        at += 1;
    }
    if before.last().is_some_and(|last| last == "self") && before.len() > 1 {
        before.pop();
    }
    if let Some(name) = before.last().cloned() {
        found.push((before.clone(), name));
    }
    before.truncate(length);
}

/// The groups of files that need each other, directly or by way of others.
fn circles<'a>(arrows: &BTreeMap<&'a Module, BTreeSet<&'a Module>>) -> BTreeSet<Vec<&'a Module>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = arrows
        .keys()
        .map(|&from| {
            let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(module) = next.pop() {
                next.extend(arrows[module].iter().filter(|&&to| reached.insert(to)).copied());
            }
            (from, reached)
        })
        .collect();
    arrows
        .keys()
        .filter(|&from| reached[from].contains(from))
        .map(|&from| reached[from].iter().filter(|&to| reached[to].contains(from)).copied().collect())
        .collect()
}

fn shown(module: &Module) -> String {
    if module.is_empty() { "lib".into() } else { module.join("/") }
}

/// Fails if a file is on no floor or uses one of a higher floor, or if files need each other.
fn check(root: &str, floors: &[&[&str]]) {
    let read = Crate::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(root));
    let arrows = read.arrows();
    let floor = |module: &Module| {
        floors.iter().position(|floor| floor.contains(&module.first().map_or("", |name| name)))
    };
    let mut wrong = vec![];
    for (from, to) in &arrows {
        // The root shows all modules, and is on none.
        if !from.is_empty() && floor(from).is_none() {
            wrong.push(format!("{} is on no floor: add it to the list", shown(from)));
        }
        for to in to {
            let is_shown =
                |[file, module]: [&str; 2]| *from == &[file] && to.first().is_some_and(|to| to == module);
            if let (Some(from_floor), Some(to_floor)) = (floor(from), floor(to))
                && to_floor > from_floor
                && !SHOWN_FROM_ABOVE.into_iter().any(is_shown)
            {
                wrong.push(format!("{} uses {}, which is above it", shown(from), shown(to)));
            }
        }
    }
    let circles = circles(&arrows);
    for circle in &circles {
        println!(
            "{root}: {} need each other",
            circle.iter().map(|module| shown(module)).collect::<Vec<_>>().join(", ")
        );
    }
    for wrong in &wrong {
        println!("{wrong}");
    }
    let count: usize = arrows.values().map(BTreeSet::len).sum();
    println!("{root}: {} files, {count} arrows, {} up, {} circles", arrows.len(), wrong.len(), circles.len());
    assert!(wrong.is_empty() && circles.is_empty());
}

#[test]
fn of_the_layers() {
    check("layers/src", LAYERS);
}

#[test]
fn of_the_toolbox() {
    check("src", TOOLBOX);
}
