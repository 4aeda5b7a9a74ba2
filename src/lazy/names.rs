//! What is done with the names of tensors: replacements, the prefixes of wrappers, and names that are similar.
use super::LazyError;
use regex::{Captures, Regex};
use std::collections::BTreeMap;

/// Names that a regular expression matches, and what they become.
pub(super) struct Replacement {
    pattern: Regex,
    to: String,
}

impl Replacement {
    /// `to` may refer to the groups of the pattern as `$1` or `${1}`.
    pub fn new(from: &str, to: &str) -> Result<Self, LazyError> {
        let replacement = Self { pattern: pattern(from)?, to: to.into() };
        replacement.check_groups().map(|()| replacement)
    }

    pub fn matches(&self, name: &str) -> bool {
        self.pattern.is_match(name)
    }

    /// The new name; `None` if the pattern matches nothing in it.
    pub fn apply(&self, name: &str) -> Option<String> {
        self.matches(name).then(|| self.pattern.replace_all(name, &self.to[..]).into_owned())
    }

    pub fn error(&self, reason: impl Into<String>) -> LazyError {
        LazyError::Pattern { pattern: self.pattern.as_str().into(), reason: reason.into() }
    }

    /// The error that it matches none of these names.
    pub fn matches_none<'a>(&self, names: impl Iterator<Item = &'a String> + Clone) -> LazyError {
        let count = names.clone().count();
        let some: Vec<_> = names.take(3).map(String::as_str).collect();
        self.error(format!("it matches none of the {count} names, such as {}", some.join(", ")))
    }

    /// Without this check, a group that the pattern does not have would be replaced by nothing.
    fn check_groups(&self) -> Result<(), LazyError> {
        let is_group = |name: &str| match name.parse::<usize>() {
            Ok(number) => number < self.pattern.captures_len(),
            Err(_) => self.pattern.capture_names().flatten().any(|group| group == name),
        };
        let references = pattern(r"\$(?:\$|\{(?<braced>[^}]*)\}|(?<plain>[0-9A-Za-z_]+))")?;
        let name = |found: Captures<'_>| {
            found.name("braced").or_else(|| found.name("plain")).map(|name| name.as_str().to_owned())
        };
        match references.captures_iter(&self.to).filter_map(name).find(|name| !is_group(name)) {
            Some(name) => Err(self.error(format!(
                "{:?} refers to its group {name:?}, which it does not have; the group before a letter, a digit or a _ is written as ${{1}}",
                self.to
            ))),
            None => Ok(()),
        }
    }
}

fn pattern(text: &str) -> Result<Regex, LazyError> {
    Regex::new(text).map_err(|error| LazyError::Pattern { pattern: text.into(), reason: error.to_string() })
}

/// What `torch.nn.DataParallel` and Python's `peft` put before all names of the module in them.
const BEFORE_ALL: [&str; 2] = ["module.", "base_model.model."];

/// What `torch.compile` puts before the names of the module in it, which may be part of another one.
const COMPILED: &str = "_orig_mod";

/// The names that tensors would have without some of the wrappers around their module, to their names; those only that differ, and are of one
/// tensor. Each of [`BEFORE_ALL`] is taken off once: a module may have a field of that name.
pub(super) fn without_wrappers<'a>(names: impl Iterator<Item = &'a String>) -> BTreeMap<String, String> {
    let plain = |name: &str| name.split('.').filter(|part| *part != COMPILED).collect::<Vec<_>>().join(".");
    let names: Vec<(String, &String)> = names.map(|name| (plain(name), name)).collect();
    let mut found: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    let (mut begin, mut wrappers) = (0, BEFORE_ALL.to_vec());
    while !names.is_empty() {
        for (plain, name) in &names {
            found.entry(&plain[begin..]).or_default().push(name);
        }
        let is_wrapper = |wrapper: &&str| names.iter().all(|(plain, _)| plain[begin..].starts_with(wrapper));
        let Some(at) = wrappers.iter().position(is_wrapper) else { break };
        begin += wrappers.remove(at).len();
    }
    let only = found.into_iter().filter_map(|(plain, names)| match names[..] {
        [name] if name != plain => Some((plain.to_owned(), name.clone())),
        _ => None,
    });
    only.collect()
}

/// The names that have the most parts in common with `path`, in the same order; the last part counts twice. At most three.
pub(super) fn similar<'a>(path: &str, names: impl Iterator<Item = &'a String>) -> Vec<String> {
    let parts: Vec<_> = path.split('.').collect();
    let mut ranked: Vec<_> = names
        .filter_map(|name| {
            let others: Vec<_> = name.split('.').collect();
            let common = in_common(&parts, &others) + usize::from(parts.last() == others.last());
            (common > 1).then_some((std::cmp::Reverse(common), others.len(), name))
        })
        .collect();
    ranked.sort();
    ranked.into_iter().take(3).map(|(_, _, name)| name.clone()).collect()
}

/// The length of the longest common subsequence.
fn in_common(a: &[&str], b: &[&str]) -> usize {
    let mut row = vec![0; b.len() + 1];
    for part in a {
        let mut diagonal = 0;
        for (at, other) in b.iter().enumerate() {
            let above = row[at + 1];
            row[at + 1] = if part == other { diagonal + 1 } else { above.max(row[at]) };
            diagonal = above;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn references_are_to_groups_of_the_pattern() {
        for (from, to) in [("a", "b"), ("(a)", "$1"), ("(a)", "${1}_x"), ("(?<of>a)", "$of.$1"), ("a", "$$1")]
        {
            assert!(Replacement::new(from, to).is_ok(), "{from} {to}");
        }
        for (from, to) in [("a", "$1"), ("(a)", "$1_x"), ("(a)", "$2"), ("(?<of>a)", "${on}"), ("(", "")] {
            assert!(matches!(Replacement::new(from, to), Err(LazyError::Pattern { .. })), "{from} {to}");
        }
        let name = Replacement::new(r"^l(\d)\.", "${1}_x.").map(|replacement| replacement.apply("l0.weight"));
        assert_eq!(name.ok().flatten().as_deref(), Some("0_x.weight"));
    }

    #[test]
    fn wrappers_are_known_by_all_names() {
        let without = |of: &[&str]| without_wrappers(names(of).iter()).into_keys().collect::<Vec<_>>();
        assert_eq!(without(&["module.a.weight", "module.b"]), ["a.weight", "b"]);
        assert_eq!(
            without(&["module._orig_mod.a", "module._orig_mod.b"]),
            ["a", "b", "module.a", "module.b"]
        );
        assert_eq!(without(&["module.module.a"]), ["module.a"], "a field that is called so");
        assert_eq!(without(&["_orig_mod.module.a"]), ["a", "module.a"]);
        assert_eq!(without(&["base_model.model.a.0._orig_mod.w"]), ["a.0.w", "base_model.model.a.0.w"]);
        assert_eq!(without(&["a.0._orig_mod.w", "b"]), ["a.0.w"]);
        assert!(without(&["module.a", "b"]).is_empty(), "a part that is called so");
        assert!(without(&["_orig_mod.a", "a"]).is_empty(), "two of the same name");
        assert!(without(&[]).is_empty());
    }

    #[test]
    fn similar_names_have_parts_in_common() {
        let file = names(&[
            "bert.layer.0.dense.weight",
            "bert.layer.1.dense.weight",
            "bert.layer.0.dense.bias",
            "head.weight",
        ]);
        let found = similar("layers.0.dense.weight", file.iter());
        assert_eq!(found, ["bert.layer.0.dense.weight", "bert.layer.1.dense.weight", "head.weight"]);
        assert!(similar("norm.gamma", file.iter()).is_empty());
    }
}
