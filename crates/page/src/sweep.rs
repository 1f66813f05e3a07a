//! The page of a sweep: a table of its groups, without scripts.

use super::page::STYLE;
use stratalloc::config::TorchVersion;
use stratalloc_analysis::{Advised, Found, Group, Paste, grouped, near, ranks_sentence};

/// The maximum number of recordings that are named for each group and of those that could not be read.
const NAMED: usize = 100;

/// Returns a page with the groups of a sweep. `names` are those of all recordings.
pub fn sweep_page(found: &Found, names: &[String], torch: Option<TorchVersion>) -> String {
    let largest = found.largest(names);
    let worst = found.worst().map(|group| group.analysed);
    let row = |group| row(group, largest, worst, names, torch);
    let rows: String = found.groups.iter().map(row).collect();
    let compared = ranks_sentence(&found.ranks, names).unwrap_or_default();
    let compared = escaped(&compared);
    let of = found.partial().unwrap_or_else(|| "All recordings".to_owned());
    let advice = match found.advice() {
        Some((conf, bytes)) => {
            let paste = Paste::of(conf, torch).to_string();
            format!("{of} run in {} MiB with <b>{}</b>.", near(bytes), escaped(&paste))
        }
        None => "No setting that was tried suits all recordings with a result.".to_owned(),
    };
    let unread =
        found.unread.iter().take(NAMED).map(|(_, error)| format!("<li>{}</li>", escaped(error)));
    let unread: String = unread.collect();
    let unread = match found.unread.len() {
        0 => String::new(),
        count => {
            format!("<section><h2>{count} could not be read</h2><ul>{unread}</ul></section>\n")
        }
    };
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>stratalloc sweep</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<header><h1>{} recordings in {} groups</h1></header>\n<main>\n\
         <section><h2>What to set</h2><p>{compared}</p><p>{advice}</p></section>\n\
         <section><h2>Groups of recordings with equal requests</h2><div class=\"table\"><table>\n\
         <tr><th>recordings</th><th>needs MiB</th><th>at best MiB</th><th class=\"text\">best setting</th>\
         <th class=\"text\">recordings, and how they differ</th></tr>\n{rows}</table></div></section>\n\
         {unread}</main>\n</body>\n</html>\n",
        grouped(names.len() as u64),
        grouped(found.groups.len() as u64)
    )
}

fn row(
    group: &Group,
    largest: &str,
    worst: Option<usize>,
    names: &[String],
    torch: Option<TorchVersion>,
) -> String {
    let need = |bytes: Option<u64>| bytes.map_or_else(|| "none fits".to_owned(), near);
    let (needs, best, text) = match &group.advised {
        Ok(Advised { needs_bytes, best_needs_bytes, best_conf, sentence, .. }) => {
            let best = Paste::of(best_conf, torch).to_string();
            let text =
                format!("<td class=\"text\">{}<br>{}</td>", escaped(&best), escaped(sentence));
            (need(*needs_bytes), need(*best_needs_bytes), text)
        }
        Err(error) => {
            let text = format!("<td class=\"text\">{}</td>", escaped(error));
            ("-".to_owned(), "-".to_owned(), text)
        }
    };
    let named = group.members.iter().take(NAMED).map(|index| escaped(&names[*index]));
    let named = named.collect::<Vec<_>>().join(", ");
    let more = match group.members.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {} more", grouped(more as u64)),
    };
    let difference = group.difference.as_ref();
    let difference = difference.map(|difference| escaped(&difference.sentence(largest)));
    let difference = difference.map_or_else(String::new, |text| format!("<p>{text}</p>"));
    let class = if worst == Some(group.analysed) { " class=\"strong\"" } else { "" };
    let count = grouped(group.members.len() as u64);
    format!(
        "<tr{class}><td data-head=\"recordings\">{count}</td><td data-head=\"needs MiB\">{needs}</td>\
         <td data-head=\"at best MiB\">{best}</td>{text}<td class=\"text\">\
         {difference}<details><summary>{}</summary>{named}{more}</details></td></tr>\n",
        escaped(&names[group.analysed])
    )
}

/// Returns a text for HTML, without control characters.
fn escaped(text: &str) -> String {
    let clean = stratalloc::config::shown(text);
    let escape = |sign| match sign {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        other => other.to_string(),
    };
    clean.chars().map(escape).collect()
}
