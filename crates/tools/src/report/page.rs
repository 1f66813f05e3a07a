//! Assembles the page from its text, style and scripts, which are separate files. Its data is in script
//! elements that no browser executes; the scripts insert it as text only, and the page forbids itself
//! every request. The scripts draw the flame graph themselves, so that it shares the page's colours and
//! keys.

const PAGE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/style.css");
/// In the order of their dependencies.
const SCRIPTS: [&str; 8] = [
    include_str!("page/data.js"),
    include_str!("page/tools.js"),
    include_str!("page/timeline.js"),
    include_str!("page/segments.js"),
    include_str!("page/holders.js"),
    include_str!("page/needs.js"),
    include_str!("page/advice.js"),
    include_str!("page/main.js"),
];

/// The version of the data format.
const VERSION: u32 = 2;

/// Returns the size of a page without its data, in bytes.
pub(crate) fn frame_bytes() -> usize {
    PAGE.len() + STYLE.len() + SCRIPTS.iter().map(|script| script.len()).sum::<usize>()
}

/// Returns a page with these recordings; each is JSON escaped for a script element.
pub(crate) fn page(sheets: &[String]) -> String {
    let mut data = String::new();
    for sheet in sheets {
        data.push_str("<script type=\"application/json\" class=\"recording\">");
        data.push_str(sheet);
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
