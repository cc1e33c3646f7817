//! The text of a setting after a write.

/// The text of a file after a write, as the kernel shows it: a choice keeps its list and moves the brackets
/// (mm/huge_memory.c, `enabled_show`; block/elevator.c, `elv_iosched_show`) or the parentheses (kernel/sched/debug.c,
/// `sched_dynamic_show`), a truth value stays `Y` or `N`
/// (kernel/params.c, `param_get_bool`), and the end of the line stays. `None` for a value that is not in the list.
pub(super) fn text_after_write(current: &str, value: &str) -> Option<String> {
    let line = current.trim_end_matches('\n');
    let end = if value.ends_with('\n') { "" } else { &current[line.len()..] };
    for (open, close) in [('[', ']'), ('(', ')')] {
        let is_chosen = |word: &str| word.starts_with(open) && word.ends_with(close);
        if line.split(' ').any(is_chosen) {
            let bare = |word: &str| word.trim_start_matches(open).trim_end_matches(close).to_owned();
            let words: Vec<String> = line.split(' ').map(bare).collect();
            let position = words.iter().position(|word| word == value)?;
            let shown =
                |(index, word): (usize, String)| if index == position { format!("{open}{word}{close}") } else { word };
            return Some(words.into_iter().enumerate().map(shown).collect::<Vec<_>>().join(" ") + end);
        }
    }
    let shown = match (line, value) {
        ("Y" | "N", "1" | "y" | "Y") => "Y",
        ("Y" | "N", "0" | "n" | "N") => "N",
        _ => value,
    };
    Some(format!("{shown}{end}"))
}
