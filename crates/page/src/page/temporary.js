// Temporary blocks by code. The figures and the sentence are those of the answer.

/// The orders of the rows: the field, and the text of the switch.
const TEMPORARY_ORDERS = [["requested_bytes", "bytes in all"], ["most_live_bytes", "live at once"], ["largest_bytes", "largest block"], ["blocks", "blocks"]];
/// The number of rows that are shown at first.
const TEMPORARY_ROWS = 12;

function showTemporary() {
  const { temporary } = state.recording;
  byId("temporary").hidden = !temporary || temporary.rows.length === 0;
  if (byId("temporary").hidden) return;
  byId("temporary-text").textContent = temporary.sentence;
  byId("temporary-bar").replaceChildren(choice("order", TEMPORARY_ORDERS, () => state.temporaryOrder,
    (order) => { state.temporaryOrder = order; drawTemporary(TEMPORARY_ROWS); }));
  drawTemporary(TEMPORARY_ROWS);
}

function temporaryRows({ rows }) {
  const order = state.temporaryOrder;
  return [...rows].sort((a, b) => b[order] - a[order]);
}

function drawTemporary(most) {
  const { temporary } = state.recording;
  const { steps, blocks, requested_bytes: all, others_blocks: others } = temporary;
  const sorted = temporaryRows(temporary);
  const each = (number) => steps ? [(number / steps).toFixed(number / steps < 10 ? 1 : 0)] : [];
  const rows = sorted.slice(0, most).map((row) => ({ cells: [bytes(row.requested_bytes), percent(row.requested_bytes, all), grouped(row.blocks), ...each(row.blocks),
    bytes(row.largest_bytes), bytes(row.most_live_bytes), withSwatch(state.recording, "line", row.asked_for_by)] }));
  const heading = [["bytes in all", false], ["share", false], ["blocks", false], ...(steps ? [["blocks a step", false]] : []), ["largest", false],
    ["live at once", false], ["requested by", true]];
  const more = sorted.length > most ? [press(`show all ${grouped(sorted.length)} rows`, `show all ${grouped(sorted.length)} rows`, () => drawTemporary(sorted.length))] : [];
  const rest = others ? `${grouped(others)} of ${plural(blocks, "block", "blocks")} have smaller rows, which the page leaves out. ` : "";
  byId("temporary-table").replaceChildren(table(heading, rows), element("p", { class: "quiet" }, rest, ...more));
}
