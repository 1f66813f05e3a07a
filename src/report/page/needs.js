// What the recording needs under other settings, and how much each reserves.

const settingName = (row) => (row.recorded ? "as recorded: " : "") + (row.conf || "(default)") + (row.model ? " (a model)" : "");

const withLuck = (row) => row.with_luck == null ? "" : ` (${needed(row.with_luck)} with luck)`;

function showNeeds() {
  const { needs } = state.recording;
  const rows = needs.rows;
  byId("curves").hidden = rows.length === 0;
  if (!rows.length) {
    byId("needs-table").replaceChildren(element("p", {}, needs.missing || "Nothing was searched."));
    return;
  }
  const told = (number) => number == null ? "-" : grouped(number);
  const least = Math.min(...rows.filter((row) => !row.model).map((row) => row.needs ?? Infinity));
  const best = rows.findIndex((row) => !row.model && row.needs === least);
  state.strong = new Set(rows.map((row, at) => at).filter((at) => at === best || rows[at].recorded || rows[at].asked));
  const cells = rows.map((row, at) => ({
    strong: at === best, act: () => { if (!state.strong.delete(at)) state.strong.add(at); drawNeeds(); },
    cells: [element("span", { class: "key" }, element("i", { style: { background: hue(at) } }), settingName(row)),
      row.needs == null ? "no device suffices" : needed(row.needs) + withLuck(row), told(row.retries), told(row.device_calls),
      row.device_ms == null ? "-" : row.device_ms.toFixed(1), bytes(row.reserved_unlimited)],
  }));
  byId("needs-table").replaceChildren(table([["configuration", true], ["needs", false], ["retries", false], ["device calls", false],
    ["device ms", false], ["reserved without a limit", false]], cells));
  byId("needs-bar").replaceChildren(choice("each", [["at_need", "on the smallest device where it runs"], ["unlimited", "without a limit"]],
    () => state.curve, (curve) => { state.curve = curve; drawNeeds(); }));
  rows.forEach((row) => { row.curves ||= { at_need: summed(row.at_need), unlimited: summed(row.unlimited) }; });
  drawNeeds();
}

function drawNeeds() {
  const { needs } = state.recording;
  if (!needs.rows.length) return;
  const { pen, width, height } = cleared(byId("needs-canvas"));
  const [left, right, top, bottom] = [76, 12, 10, 24];
  const inner = width - left - right, tall = height - top - bottom;
  const curves = needs.rows.map((row) => row.curves[state.curve]);
  const most = 1.05 * curves.reduce((all, curve) => curve.reduce((peak, number) => Math.max(peak, number), all), 1);
  const yOf = (number) => top + tall - number / most * tall;
  pen.fillStyle = colour("quiet");
  pen.strokeStyle = colour("line");
  pen.textAlign = "right";
  for (const mib of ticks(0, most / 1048576, 4)) {
    const y = yOf(mib * 1048576);
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(left + inner, y); pen.stroke();
    pen.fillText(`${grouped(mib)} MiB`, left - 6, y + 4);
  }
  pen.textAlign = "center";
  const { events } = state.recording;
  for (const at of ticks(0, events, inner / 130)) pen.fillText(grouped(at), left + at / Math.max(1, events) * inner, height - 6);
  pen.textAlign = "left";
  pen.fillText("event", 4, height - 6);
  const order = curves.map((curve, at) => at).sort((a, b) => state.strong.has(a) - state.strong.has(b));
  for (const at of order) {
    const curve = curves[at];
    pen.strokeStyle = hue(at);
    pen.lineWidth = state.strong.has(at) ? 2.2 : 1.2;
    pen.globalAlpha = state.strong.has(at) ? 1 : 0.35;
    pen.beginPath();
    curve.forEach((number, point) => {
      pen.lineTo(left + point / needs.points * inner, yOf(number));
      pen.lineTo(left + (point + 1) / needs.points * inner, yOf(number));
    });
    pen.stroke();
  }
  pen.lineWidth = 1;
  pen.globalAlpha = 1;
  legend("needs-legend", needs.rows.map((row, at) => [settingName(row), hue(at)]));
}

function setUpNeeds() {
  const canvas = byId("needs-canvas");
  canvas.addEventListener("pointerleave", () => tip(null, null));
  canvas.addEventListener("pointermove", (event) => {
    const { needs, events } = state.recording;
    if (!needs.rows.length) return;
    const box = canvas.getBoundingClientRect();
    const share = Math.max(0, Math.min(0.9999, (event.clientX - box.left - 76) / (box.width - 88)));
    const point = Math.floor(share * needs.points);
    const line = (row) => { const curve = row.curves[state.curve]; return `${curve.length ? bytes(curve[Math.min(point, curve.length - 1)]) : "-"}  ${settingName(row)}`; };
    tip(event, [`event ${grouped(share * events)}`, ...needs.rows.map(line)]);
  });
}
