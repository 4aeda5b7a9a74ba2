//! Generated blocks of texts, between markers.
use std::collections::HashMap;

/// Generated blocks by name, as long as they have no place in a text.
pub struct Blocks(HashMap<String, String>);

impl Blocks {
    /// From names and texts.
    pub fn new(blocks: impl IntoIterator<Item = (String, String)>) -> Self {
        Self(blocks.into_iter().collect())
    }

    /// Fills `<!-- begin NAME -->` ... `<!-- end NAME -->` in a text with the block of that name. A block has only one place.
    ///
    /// # Errors
    ///
    /// If a marker is not closed, or if it names no block or one that already had a place.
    pub fn fill(&mut self, text: &str) -> Result<String, String> {
        let (mut filled, mut rest) = (String::new(), text);
        while let Some(begin) = rest.find("<!-- begin ") {
            let marker = &rest[begin..];
            let line = marker.find(" -->").ok_or("a marker without its end, -->")?;
            let name = &marker["<!-- begin ".len()..line];
            let block = self.0.remove(name).ok_or(format!("{name}: no such block, or a second one"))?;
            let end = format!("<!-- end {name} -->");
            let at = marker.find(&end).ok_or(format!("{name}: no line {end}"))?;
            filled.push_str(&rest[..begin]);
            filled.push_str(&format!("<!-- begin {name} -->\n{}\n{end}", block.trim_end()));
            rest = &marker[at + end.len()..];
        }
        filled.push_str(rest);
        Ok(filled)
    }

    /// Checks that every block had a place.
    ///
    /// # Errors
    ///
    /// If a block had none.
    pub fn all_have_places(self) -> Result<(), String> {
        let mut left: Vec<String> = self.0.into_keys().collect();
        left.sort_unstable();
        if left.is_empty() { Ok(()) } else { Err(format!("no place for {}", left.join(", "))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(blocks: &[(&str, &str)]) -> Blocks {
        Blocks::new(blocks.iter().map(|&(name, text)| (name.into(), text.into())))
    }

    #[test]
    fn fills_what_is_between_markers_and_leaves_the_rest() {
        let text = "one\n<!-- begin a -->\nold\n<!-- end a -->\ntwo\n<!-- begin b --><!-- end b -->\n";
        let blocks = || blocks(&[("b", "| 2 |\n"), ("a", "1")]);
        let filled = blocks().fill(text).unwrap();
        assert_eq!(
            filled,
            "one\n<!-- begin a -->\n1\n<!-- end a -->\ntwo\n<!-- begin b -->\n| 2 |\n<!-- end b -->\n"
        );
        assert_eq!(blocks().fill(&filled).unwrap(), filled); // again changes nothing
    }

    #[test]
    fn every_block_has_a_place_in_one_of_the_texts() {
        let mut two = blocks(&[("a", "1"), ("b", "2")]);
        two.fill("<!-- begin a --><!-- end a -->").unwrap();
        two.fill("<!-- begin b --><!-- end b -->").unwrap();
        assert_eq!(two.all_have_places(), Ok(()));
        assert_eq!(blocks(&[("b", ""), ("a", "")]).all_have_places(), Err("no place for a, b".into()));
    }

    #[test]
    fn says_what_does_not_fit() {
        for (text, error) in [
            ("<!-- begin a -->", "a: no line <!-- end a -->"),
            ("<!-- begin a", "a marker without its end, -->"),
            ("<!-- begin b --><!-- end b -->", "b: no such block, or a second one"),
            (
                "<!-- begin a --><!-- end a --><!-- begin a --><!-- end a -->",
                "a: no such block, or a second one",
            ),
        ] {
            assert_eq!(blocks(&[("a", "1")]).fill(text), Err(error.into()));
        }
    }
}
