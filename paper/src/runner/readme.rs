//! Generated parts of a text, between markers.
use std::collections::HashMap;

/// The text with `<!-- begin NAME -->` ... `<!-- end NAME -->` filled with the block of each name.
///
/// # Errors
///
/// If a marker is not closed, names no block or one that was there, or if a block has no marker.
pub fn fill(text: &str, blocks: &[(String, String)]) -> Result<String, String> {
    let mut left: HashMap<&str, &str> =
        blocks.iter().map(|(name, block)| (name.as_str(), block.as_str())).collect();
    let (mut filled, mut rest) = (String::new(), text);
    while let Some(begin) = rest.find("<!-- begin ") {
        let marker = &rest[begin..];
        let line = marker.find(" -->").ok_or("a marker without its end, -->")?;
        let name = &marker["<!-- begin ".len()..line];
        let block = left.remove(name).ok_or(format!("{name}: no such table or figure, or a second one"))?;
        let end = format!("<!-- end {name} -->");
        let at = marker.find(&end).ok_or(format!("{name}: no line {end}"))?;
        filled.push_str(&rest[..begin]);
        filled.push_str(&format!("<!-- begin {name} -->\n{}\n{end}", block.trim_end()));
        rest = &marker[at + end.len()..];
    }
    filled.push_str(rest);
    let mut without: Vec<&str> = left.into_keys().collect();
    without.sort_unstable();
    if without.is_empty() { Ok(filled) } else { Err(format!("no place for {}", without.join(", "))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, text: &str) -> (String, String) {
        (name.into(), text.into())
    }

    #[test]
    fn fills_what_is_between_markers_and_leaves_the_rest() {
        let text = "one\n<!-- begin a -->\nold\n<!-- end a -->\ntwo\n<!-- begin b --><!-- end b -->\n";
        let blocks = [block("b", "| 2 |\n"), block("a", "1")];
        let filled = fill(text, &blocks).unwrap();
        assert_eq!(
            filled,
            "one\n<!-- begin a -->\n1\n<!-- end a -->\ntwo\n<!-- begin b -->\n| 2 |\n<!-- end b -->\n"
        );
        assert_eq!(fill(&filled, &blocks).unwrap(), filled); // again changes nothing
    }

    #[test]
    fn says_what_does_not_fit() {
        let a = || vec![block("a", "1")];
        for (text, blocks, error) in [
            ("<!-- begin a -->", a(), "a: no line <!-- end a -->"),
            ("<!-- begin a", a(), "a marker without its end, -->"),
            ("<!-- begin b --><!-- end b -->", a(), "b: no such table or figure, or a second one"),
            ("no marker", a(), "no place for a"),
            (
                "<!-- begin a --><!-- end a --><!-- begin a --><!-- end a -->",
                a(),
                "a: no such table or figure, or a second one",
            ),
        ] {
            assert_eq!(fill(text, &blocks), Err(error.into()));
        }
    }
}
