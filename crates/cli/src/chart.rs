//! A small chart of live and reserved bytes over the events of a recording, in characters.

use stratalloc_analysis::{OverTime, grouped, size_text};

use super::view::{Tone, View};

/// The rows of the chart without its key.
const ROWS: usize = 3;
/// The parts of a row that a block character can fill.
const PARTS: u128 = 8;
const BLOCKS: [&str; 9] = [" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
const RESERVED: &str = "░";
const LIMIT: &str = "┄";
const FAILED: &str = "×";

/// Returns the lines of the chart, its key first. `limit_bytes` is drawn if it is near the bytes.
pub(crate) fn lines(over: &OverTime, limit_bytes: Option<u64>, view: View) -> Vec<String> {
    let peak =
        over.reserved_max_bytes.iter().chain(&over.live_max_bytes).copied().max().unwrap_or(0);
    let limit = limit_bytes.filter(|limit| *limit / 2 <= peak);
    let top = peak.max(limit.unwrap_or(0)).max(1);
    let label = size_text(top);
    let width = view.columns.map_or(usize::MAX, |columns| columns.saturating_sub(label.len() + 1));
    let each = over.live_max_bytes.len().div_ceil(width.max(1)).max(1);
    let joined = |bytes: &[u64]| -> Vec<u64> {
        bytes.chunks(each).map(|part| part.iter().copied().max().unwrap_or(0)).collect()
    };
    let (live, reserved) = (joined(&over.live_max_bytes), joined(&over.reserved_max_bytes));
    let has_failed =
        |column: usize| over.failed_columns.iter().any(|failed| failed / each == column);
    let filled = |bytes: u64, row: usize| {
        let parts = (u128::from(bytes) * PARTS * ROWS as u128).div_ceil(u128::from(top));
        let below = PARTS * (ROWS - 1 - row) as u128;
        usize::try_from(parts.saturating_sub(below).min(PARTS)).unwrap_or(0)
    };
    // The row that contains the limit.
    let limit_row = limit.and_then(|limit| (0..ROWS).find(|row| filled(limit, *row) > 0));
    let cell = |column: usize, row: usize| match (
        filled(live[column], row),
        filled(reserved[column], row),
    ) {
        _ if row == 0 && has_failed(column) => view.paint(Tone::Limit, FAILED),
        (0, 0) if limit_row == Some(row) => view.paint(Tone::Limit, LIMIT),
        (0, 0) => " ".to_owned(),
        (0, _) => view.paint(Tone::Reserved, RESERVED),
        (live, _) => view.paint(Tone::Live, BLOCKS[live]),
    };
    let mut key = vec![
        format!("{} live", view.paint(Tone::Live, BLOCKS[8])),
        format!("{} reserved", view.paint(Tone::Reserved, RESERVED)),
    ];
    key.extend(
        limit
            .map(|limit| format!("{} limit, {}", view.paint(Tone::Limit, LIMIT), size_text(limit))),
    );
    if !over.failed_columns.is_empty() {
        key.push(format!("{} failed", view.paint(Tone::Limit, FAILED)));
    }
    let mut lines =
        vec![format!("Memory over {} events: {}", grouped(over.events.into()), key.join("  "))];
    for row in 0..ROWS {
        let name = match row {
            0 => label.as_str(),
            _ if row == ROWS - 1 => "0",
            _ => "",
        };
        let cells: String = (0..live.len()).map(|column| cell(column, row)).collect();
        lines.push(format!("{name:>width$} {cells}", width = label.len()).trim_end().to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn over() -> OverTime {
        OverTime {
            events: 1234,
            live_max_bytes: vec![0, 8, 16, 24],
            reserved_max_bytes: vec![0, 24, 24, 24],
            failed_columns: vec![3],
        }
    }

    fn drawn(over: &OverTime, limit_bytes: Option<u64>, columns: usize) -> Vec<String> {
        lines(over, limit_bytes, View { columns: Some(columns), ..View::default() })
    }

    #[test]
    fn columns_show_live_and_reserved_bytes_the_limit_and_failures() {
        let mib = |bytes: &u64| bytes << 20;
        let over = OverTime {
            live_max_bytes: over().live_max_bytes.iter().map(mib).collect(),
            reserved_max_bytes: over().reserved_max_bytes.iter().map(mib).collect(),
            ..over()
        };
        let lines = drawn(&over, Some(24 << 20), 80);
        assert_eq!(
            lines,
            [
                "Memory over 1,234 events: █ live  ░ reserved  ┄ limit, 24.0 MiB  × failed",
                "24.0 MiB ┄░░×",
                "          ░██",
                "       0  ███"
            ]
        );
        // A limit far above the bytes would flatten the chart.
        let lines = drawn(&over, Some(80 << 20), 80);
        assert!(!lines[0].contains("limit") && lines[1] == "24.0 MiB  ░░×", "{lines:?}");
    }

    #[test]
    fn a_narrow_chart_joins_columns_and_keeps_peaks() {
        let lines = drawn(&over(), None, 10);
        let widest = lines[1..].iter().map(|line| line.chars().count()).max();
        assert!(widest <= Some(10), "{lines:?}");
        assert!(lines[1].ends_with('×') && lines[3].ends_with('█'), "{lines:?}");
    }
}
