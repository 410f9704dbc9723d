//! Stop strings, which may begin in one token and end in another.

/// Finds the first stop string in a text that arrives in pieces.
///
/// What could still become a stop string is held back: the longest suffix of the text that is a proper
/// prefix of one.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    include_in_output: bool,
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that may be shown now.
    pub text: String,
    /// The stop string that was found; nothing after it is to be shown.
    pub matched: Option<String>,
}

impl StopMatcher {
    /// A matcher for `stops`; empty ones are ignored. With `include_in_output` a stop string that was
    /// found is shown, without it the text ends before it.
    pub fn new(stops: Vec<String>, include_in_output: bool) -> Self {
        Self {
            stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(),
            include_in_output,
            held: String::new(),
        }
    }

    /// Adds a piece of text.
    pub fn push(&mut self, piece: &str) -> StopOutcome {
        if self.stops.is_empty() {
            return StopOutcome { text: piece.to_owned(), matched: None };
        }
        self.held.push_str(piece);
        // The match that ends first wins, as it would if the text came a character at a time; of two
        // that end together, the one that starts first.
        let earliest = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|start| (start, stop)))
            .min_by_key(|(start, stop)| (start + stop.len(), *start));
        if let Some((start, stop)) = earliest {
            let end = if self.include_in_output { start + stop.len() } else { start };
            let matched = Some(stop.clone());
            self.held.truncate(end);
            return StopOutcome { text: std::mem::take(&mut self.held), matched };
        }
        let keep_from = self.possible_start();
        let kept = self.held.split_off(keep_from);
        StopOutcome { text: std::mem::replace(&mut self.held, kept), matched: None }
    }

    /// Ends the text: what was held back turned out to be text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the longest suffix begins that a stop string could grow from.
    fn possible_start(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let first = self.held.len().saturating_sub(longest.saturating_sub(1));
        (first..self.held.len())
            .filter(|&at| self.held.is_char_boundary(at))
            .find(|&at| self.stops.iter().any(|stop| stop.as_bytes().starts_with(&self.held.as_bytes()[at..])))
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str], include: bool) -> (String, Option<String>) {
        let stops = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut matcher = StopMatcher::new(stops, include);
        let mut text = String::new();
        for piece in pieces {
            let outcome = matcher.push(piece);
            text.push_str(&outcome.text);
            if outcome.matched.is_some() {
                return (text, outcome.matched);
            }
        }
        text.push_str(&matcher.finish());
        (text, None)
    }

    #[test]
    fn c73_a_stop_over_byte_tokens_is_found_and_cut() {
        let pieces = ["b", "r", "o", "w", "n", " ", "f", "o", "x", " ", "j"];
        let expected = ("br".to_owned(), Some("own fox".to_owned()));
        assert_eq!(run(&["own fox"], &pieces, false), expected);
        assert_eq!(run(&["own fox"], &pieces, true).0, "brown fox");
    }

    #[test]
    fn c73_what_was_held_back_is_released() {
        assert_eq!(run(&["own fox"], &["br", "own f", "ish"], false).0, "brown fish");
        assert_eq!(run(&["own fox"], &["brown fo"], false).0, "brown fo");
        assert_eq!(run(&["aab"], &["a", "a", "a", "b", "c"], false).0, "a");
    }

    #[test]
    fn nothing_that_may_be_a_stop_is_shown() {
        let mut matcher = StopMatcher::new(vec!["abc".to_owned()], false);
        assert_eq!(matcher.push("xab").text, "x");
        assert_eq!(matcher.push("d").text, "abd");
        assert_eq!(matcher.push("\u{e9}a").text, "\u{e9}");
    }

    #[test]
    fn the_first_to_end_wins() {
        assert_eq!(run(&["bcd", "c"], &["abcd"], false).0, "ab");
        assert_eq!(run(&["", "x"], &["abxc"], false).0, "ab");
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            text in "[ab\u{e9}]{0,24}",
            stops in proptest::collection::vec("[ab\u{e9}]{1,4}", 1..3),
            cut in 1usize..5,
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let characters: Vec<String> = text.chars().map(String::from).collect();
            let singles: Vec<&str> = characters.iter().map(String::as_str).collect();
            let chunks: Vec<String> = characters.chunks(cut).map(|chunk| chunk.concat()).collect();
            let chunks: Vec<&str> = chunks.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, &singles, false), run(&stops, &chunks, false));
            let (shown, matched) = run(&stops, &singles, false);
            match matched {
                None => prop_assert_eq!(shown, text.clone()),
                Some(stop) => prop_assert!(text.starts_with(&(shown + &stop))),
            }
        }
    }
}
