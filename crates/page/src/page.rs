//! Assembles the page from its text, style and scripts, which are separate files. The data is in script
//! elements that no browser executes. The scripts insert data as text only, and the page's policy
//! forbids all network requests. The scripts draw the flame graph themselves, so that it has the same
//! colours and keyboard control as the rest of the page.

use super::Sheet;

const PAGE: &str = include_str!("page/page.html");
pub(super) const STYLE: &str = include_str!("page/style.css");
/// The scripts, each after those that it depends on.
const SCRIPTS: [&str; 23] = [
    include_str!("page/data.js"),
    include_str!("page/tools.js"),
    include_str!("page/layers.js"),
    include_str!("page/history.js"),
    include_str!("page/paint.js"),
    include_str!("page/timeline.js"),
    include_str!("page/pointer.js"),
    include_str!("page/layout.js"),
    include_str!("page/segments.js"),
    include_str!("page/blocks.js"),
    include_str!("page/holders.js"),
    include_str!("page/range.js"),
    include_str!("page/flames.js"),
    include_str!("page/steps.js"),
    include_str!("page/temporary.js"),
    include_str!("page/needs.js"),
    include_str!("page/devices.js"),
    include_str!("page/compare.js"),
    include_str!("page/svg.js"),
    include_str!("page/keep.js"),
    include_str!("page/advice.js"),
    include_str!("page/account.js"),
    include_str!("page/main.js"),
];

/// The version of the data format.
const VERSION: u32 = 4;

/// Returns the size of the page without its data, in bytes.
pub(crate) fn frame_bytes() -> usize {
    PAGE.len() + STYLE.len() + SCRIPTS.iter().map(|script| script.len()).sum::<usize>()
}

/// Returns the scripts that read the data and draw the time line, for tests.
#[cfg(test)]
pub(crate) fn drawing_scripts() -> String {
    SCRIPTS[..7].concat()
}

/// Returns all scripts but the one that shows the page, for tests.
#[cfg(test)]
pub(crate) fn scripts_but_last() -> String {
    SCRIPTS[..SCRIPTS.len() - 1].concat()
}

/// Returns a page with these recordings.
pub(crate) fn page(sheets: &[Sheet]) -> String {
    let mut data = String::new();
    for sheet in sheets {
        data.push_str("<script type=\"application/json\" class=\"recording\">");
        data.push_str(&sheet.drawn);
        data.push_str("</script>\n<script type=\"application/json\" class=\"answer\">");
        data.push_str(sheet.answer.as_deref().unwrap_or("null"));
        data.push_str("</script>\n");
    }
    let version = env!("CARGO_PKG_VERSION");
    let about = format!(
        "<script type=\"application/json\" id=\"about\">{{\"format\":\"stratalloc report\",\"version\":{VERSION},\
         \"program\":\"{version}\"}}</script>\n"
    );
    let script = SCRIPTS.concat();
    let mut rest = PAGE;
    let mut page = String::with_capacity(frame_bytes() + data.len() + 1024);
    for (mark, text) in
        [("{{style}}", STYLE), ("{{about}}", &about), ("{{data}}", &data), ("{{script}}", &script)]
    {
        let (before, after) = rest.split_once(mark).unwrap_or((rest, ""));
        page.push_str(before);
        page.push_str(text);
        rest = after;
    }
    page.push_str(rest);
    page
}
