// Shows the need of the recording under several settings, and how much memory each setting reserves.

/// Returns the value to set and the allocator that accepts it. The string that was replayed may have keys
/// that PyTorch lacks.
const settingName = (row) => (row.recorded ? "as recorded: " : "") + (row.paste.replace(/^\w+=/, "") || "(default)") +
  (row.paste_for.startsWith("PyTorch") ? " in PyTorch" : "") + (row.is_model ? " (a model)" : "");

const withLuck = (row) => row.needs_with_luck_bytes == null ? "" : ` (${needed(row.needs_with_luck_bytes)} with luck)`;

function showNeeds() {
  const { needs } = state.recording;
  const rows = needs.rows;
  byId("curves").hidden = rows.length === 0;
  if (!rows.length) {
    byId("needs-table").replaceChildren(element("p", {}, needs.missing || "Nothing was searched."));
    return;
  }
  const largest = Math.max(1, ...rows.map((row) => row.needs_bytes ?? 0));
  const needBar = (row) => element("div", { class: "share", "aria-hidden": "true" }, element("i", { style: { width: `${100 * (row.needs_bytes ?? 0) / largest}%`, background: `var(--${row.is_model ? "frame" : "live"})` } }));
  const valueOrDash = (number) => number == null ? "-" : grouped(number);
  const least = Math.min(...rows.filter((row) => !row.is_model).map((row) => row.needs_bytes ?? Infinity));
  const best = rows.findIndex((row) => !row.is_model && row.needs_bytes === least);
  state.strong = new Set(rows.map((row, at) => at).filter((at) => at === best || rows[at].recorded || rows[at].asked));
  const cells = rows.map((row, at) => ({
    strong: at === best, act: () => { if (!state.strong.delete(at)) state.strong.add(at); drawNeeds(); },
    cells: [element("span", { class: "key" }, element("i", { class: "swatch", "aria-hidden": "true", style: { background: hue(at) } }), element("b", {}, String(at + 1)), settingName(row)),
      row.needs_bytes == null ? "no device suffices" : needed(row.needs_bytes) + withLuck(row), needBar(row), valueOrDash(row.retries), valueOrDash(row.device_calls),
      row.device_ms == null ? "-" : row.device_ms.toFixed(1), bytes(row.reserved_unlimited_bytes)],
  }));
  byId("needs-table").replaceChildren(table([["configuration", true], ["needs", false], ["", true], ["retries", false], ["device calls", false],
    ["device ms", false], ["reserved without a limit", false]], cells));
  byId("needs-bar").replaceChildren(choice("each", [["at_need", "on the smallest device where it runs"], ["unlimited", "without a limit"]],
    () => state.curve, (curve) => { state.curve = curve; drawNeeds(); }),
    choice("height", [["all", "from 0"], ["auto", "where they differ"]], () => state.floor, (floor) => { state.floor = floor; drawNeeds(); }));
  rows.forEach((row) => { row.curves ||= { at_need: summed(row.at_need), unlimited: summed(row.unlimited) }; });
  drawNeeds();
}

/// Dash patterns, so that overlapping curves stay visible.
const DASHES = [[], [9, 5], [3, 3], [14, 4, 3, 4], [6, 10], [2, 7]];

/// Returns the bytes at the bottom of the chart. If the peaks are close together, cuts off the part that
/// all curves have in common.
function lowestOf(curves) {
  if (state.floor === "all") return 0;
  const peaks = curves.filter((curve) => curve.length).map((curve) => Math.max(...curve));
  const [least, most] = [Math.min(...peaks), Math.max(...peaks)];
  const below = least - 2 * Math.max(most - least, most / 200);
  return below > most / 2 ? below : 0;
}

/// Returns the heights of the labels at the ends of the curves, moved so that they are at least `apart`
/// from each other.
function besides(heights, apart, bottom) {
  const order = heights.map((y, at) => at).sort((a, b) => heights[a] - heights[b]);
  const placed = [...heights];
  order.forEach((at, place) => { if (place) placed[at] = Math.max(placed[at], placed[order[place - 1]] + apart); });
  order.reverse().forEach((at, place) => { placed[at] = Math.min(placed[at], place ? placed[order[place - 1]] - apart : bottom); });
  return placed;
}

/// Draws the lines and the numbers of an axis of bytes.
function drawByteAxis(pen, left, right, lowest, most, yOf) {
  const [unit, name] = most >= 4 * 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  pen.fillStyle = colour("quiet");
  pen.strokeStyle = colour("line");
  pen.textAlign = "right";
  for (const number of ticks(lowest / unit, most / unit, 4)) {
    const y = yOf(number * unit);
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(right, y); pen.stroke();
    pen.fillText(`${number < 10 ? Math.round(number * 100) / 100 : grouped(number)} ${name}`, left - 6, y + 4);
  }
}

/// Marks an axis that does not begin at zero.
function drawBreak(pen, x, y, lowest) {
  pen.strokeStyle = pen.fillStyle = colour("limit");
  pen.beginPath();
  [[0, 0], [-5, -4], [5, -8], [-5, -12], [5, -16], [0, -20]].forEach(([dx, dy]) => pen.lineTo(x + dx, y + dy));
  pen.stroke();
  pen.textAlign = "left";
  pen.fillText(`cut off below ${bytes(lowest)}`, x + 10, y - 6);
}

function drawNeeds() {
  const { needs } = state.recording;
  if (!needs.rows.length) return;
  const { pen, width, height } = cleared(byId("needs-canvas"));
  const [left, right, top, bottom] = [76, 40, 10, 24];
  const inner = width - left - right, tall = height - top - bottom;
  const curves = needs.rows.map((row) => row.curves[state.curve]);
  const peak = curves.reduce((all, curve) => curve.reduce((most, number) => Math.max(most, number), all), 1);
  const lowest = lowestOf(curves);
  const most = peak + (peak - lowest) / 20;
  const yOf = (number) => top + tall - Math.max(0, number - lowest) / (most - lowest) * tall;
  drawByteAxis(pen, left, left + inner, lowest, most, yOf);
  pen.textAlign = "center";
  const { events } = state.recording;
  for (const at of ticks(0, events, inner / 130)) pen.fillText(grouped(at), left + at / Math.max(1, events) * inner, height - 6);
  pen.textAlign = "left";
  pen.fillText("event", 4, height - 6);
  const last = curves.map((curve) => yOf(curve.length ? curve[curve.length - 1] : 0));
  const labels = besides(last, 15, top + tall);
  const order = curves.map((curve, at) => at).sort((a, b) => state.strong.has(a) - state.strong.has(b));
  for (const at of order) {
    const curve = curves[at];
    pen.strokeStyle = pen.fillStyle = hue(at);
    pen.lineWidth = state.strong.has(at) ? 2.6 : 1.4;
    pen.globalAlpha = state.strong.has(at) ? 1 : 0.6;
    pen.setLineDash(DASHES[at % DASHES.length]);
    pen.beginPath();
    curve.forEach((number, point) => {
      pen.lineTo(left + point / needs.points * inner, yOf(number));
      pen.lineTo(left + (point + 1) / needs.points * inner, yOf(number));
    });
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(left + inner, last[at]); pen.lineTo(left + inner + 16, labels[at]); pen.stroke();
    pen.fillText(String(at + 1), left + inner + 20, labels[at] + 4);
  }
  pen.globalAlpha = 1;
  if (lowest > 0) drawBreak(pen, left, top + tall, lowest);
  byId("needs-text").textContent = lowest > 0 ? `The picture begins at ${bytes(lowest)}, not at 0.` : "";
  legend("needs-legend", needs.rows.map((row, at) => [`${at + 1}: ${settingName(row)}`, hue(at)]));
}

function setUpNeeds() {
  const canvas = byId("needs-canvas");
  canvas.addEventListener("pointerleave", () => tip(null, null));
  canvas.addEventListener("pointermove", (event) => {
    const { needs, events } = state.recording;
    if (!needs.rows.length) return;
    const box = canvas.getBoundingClientRect();
    const share = Math.max(0, Math.min(0.9999, (event.clientX - box.left - 76) / (box.width - 116)));
    const point = Math.floor(share * needs.points);
    const line = (row, at) => { const curve = row.curves[state.curve]; return `${curve.length ? bytes(curve[Math.min(point, curve.length - 1)]) : "-"}  ${at + 1}: ${settingName(row)}`; };
    tip(event, [`event ${grouped(share * events)}`, ...needs.rows.map(line)]);
  });
}
