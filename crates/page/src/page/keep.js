// What a reader keeps: a picture as PNG or SVG, a table as CSV, the answer as JSON, and the address of the
// view.

/// Takes the place of one canvas, while it is set.
let recorder = null;

/// The pictures: their title, their canvas and the function that draws it, or a function that paints.
const PICTURES = {
  timeline: { title: "Memory over time", canvas: "timeline-canvas", legend: "timeline-legend", isPixels: true, draw: () => drawTimeline() },
  segments: { title: "Segments", canvas: "segments-canvas", legend: "segments-legend", draw: () => drawSegments() },
  steps: { title: "Live bytes by step", canvas: "steps-canvas", legend: "steps-legend", draw: () => drawSteps() },
  holders: { title: "Holders", text: "flames-text", box: "flames", draw: (pen) => paintFlames(pen) },
  needs: { title: "Reserved bytes under each setting", canvas: "needs-canvas", legend: "needs-legend", draw: () => drawNeeds() },
  compare: { title: "Two recordings", canvas: "compare-canvas", legend: "compare-legend", draw: () => drawComparison() },
};

/// The tables, each as rows of texts and numbers; the first row has the headings.
const TABLES = {
  segments: () => blocksCsv(state.recording),
  steps: ({ steps }) => [["step", "first_event", "last_event", "live_at_end_bytes", "peak_bytes"], ...steps.list.map(({ from, to, live, peak }, at) => [at + 1, from, to, live, peak])],
  holders: () => holdersCsv(state.recording),
  temporary: ({ temporary }) => [["requested_bytes", "blocks", "largest_bytes", "most_live_bytes", "requested_by"],
    ...temporaryRows(temporary).map((row) => [row.requested_bytes, row.blocks, row.largest_bytes, row.most_live_bytes, row.asked_for_by])],
  needs: ({ needs }) => [["configuration", "needs_bytes", "retries", "device_calls", "device_ms", "reserved_unlimited_bytes"],
    ...needs.rows.map((row) => [settingName(row), row.needs_bytes, row.retries, row.device_calls, row.device_ms, row.reserved_unlimited_bytes])],
  compare: () => [["first_bytes", "second_bytes", "difference_bytes", "first_blocks", "second_blocks", "requested_by"],
    ...comparedRows(comparedSides()).map(({ name, bytes: [one, other], blocks }) => [one, other, other - one, ...blocks, name])],
};

function holdersCsv(recording) {
  const { by_stack: byStack, list, range, rest_bytes: restBytes, rest_blocks: restBlocks } = holdersNow(recording);
  const ages = range ? ["shortest_life_events", "longest_life_events"] : ["newest_requests_ago", "oldest_requests_ago"];
  const age = (number) => number < 0 ? "" : number;
  const rows = list.filter((row) => isRowFound(recording, { by_stack: byStack }, row)).map((row) => [row.bytes, row.blocks, age(row.newest), age(row.oldest),
    byStack ? callerOf(recording, row.stack) : whatOf(recording, row), framesOf(recording, row.stack).map(lineOf).join(" < ")]);
  const rest = restBlocks ? [[restBytes, restBlocks, "", "", "(smaller holders)", ""]] : [];
  return [["bytes", "blocks", ...ages, "requested_by", "frames"], ...rows, ...rest];
}

function blocksCsv(recording) {
  const { blocks, heaps, streams, pools } = recording;
  const ended = (moment) => moment === NEVER ? "" : moment;
  const row = (at) => {
    const [stream, pool] = heaps[blocks.heap[at]];
    return [addressOf(recording, blocks.address[at]), blocks.size[at], blocks.requested[at], state.moment < blocks.freed[at] ? "live" : "waiting", blocks.count[at], streams[stream],
      pools[pool].name, blocks.born[at], ended(blocks.freed[at]), callerOf(recording, blocks.stack[at])];
  };
  return [["address", "size_bytes", "requested_bytes", "state", "blocks", "stream", "pool", "allocated_at_event", "freed_at_event", "requested_by"],
    ...aliveAt(blocks, state.moment).map(row)];
}

/// Writes rows as CSV. A text that a spreadsheet would compute begins with an apostrophe.
function csvText(rows) {
  const cell = (value) => {
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value ?? "") ? `'${value}` : String(value ?? "");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
}

/// Lets the browser save a file. The content never leaves the page by another way.
function saveFile(what, ending, blob) {
  const name = `${state.recording.name.replace(/[^\w.-]+/g, "_").slice(0, 80) || "recording"}-${what}.${ending}`;
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/// Draws a mark of a legend with its hatch, which its style has as gradients.
function paintMark(pen, { colour: plain, hatch }, x, y) {
  pen.fillStyle = plain;
  pen.fillRect(x, y, 12, 12);
  pen.strokeStyle = pen.fillStyle = "rgba(0, 0, 0, 0.5)";
  const lines = { "135deg": [[0, 6, 6, 0], [0, 12, 12, 0], [6, 12, 12, 6]], "45deg": [[6, 0, 12, 6], [0, 0, 12, 12], [0, 6, 6, 12]],
    "0deg": [[0, 4, 12, 4], [0, 8, 12, 8]], "90deg": [[4, 0, 4, 12], [8, 0, 8, 12]] };
  pen.beginPath();
  for (const [angle] of hatch.matchAll(/\d+deg/g)) for (const [x0, y0, x1, y1] of lines[angle] || []) { pen.moveTo(x + x0, y + y0); pen.lineTo(x + x1, y + y1); }
  pen.stroke();
  if (hatch.includes("radial")) for (const dx of [2, 6, 10]) for (const dy of [2, 6, 10]) pen.fillRect(x + dx - 1, y + dy - 1, 1.5, 1.5);
}

/// Returns the items of a legend as texts and colours.
function legendItems(id) {
  if (!id) return [];
  const textOf = (mark) => [...mark.parentElement.childNodes].filter((node) => node !== mark).map((node) => node.textContent).join(" ");
  return [...byId(id).querySelectorAll("i")].map((mark) => ({ text: textOf(mark), colour: getComputedStyle(mark).backgroundColor, hatch: getComputedStyle(mark).backgroundImage }));
}

const PICTURE = { side: 14, title: 46, row: 18 };

/// Draws a picture with its title and its legend. `inner` draws the part between them.
function paintPicture(pen, { title, text, legend: id }, width, height, inner) {
  pen.fillStyle = colour("panel");
  pen.fillRect(0, 0, width + 2 * PICTURE.side, pictureHeight(id, width, height));
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  pen.fillStyle = colour("text");
  pen.font = "600 15px system-ui, sans-serif";
  pen.fillText(`${title}: ${state.recording.name}`, PICTURE.side, 20);
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = colour("quiet");
  pen.fillText(text ? byId(text).textContent : when(state.recording, state.moment), PICTURE.side, 38);
  inner(PICTURE.side, PICTURE.title);
  let [x, y] = [PICTURE.side, PICTURE.title + height + PICTURE.row];
  for (const item of legendItems(id)) {
    const wide = 26 + item.text.length * 6.6;
    if (x > PICTURE.side && x + wide > width) { x = PICTURE.side; y += PICTURE.row; }
    paintMark(pen, item, x, y - 10);
    pen.fillStyle = colour("quiet");
    pen.fillText(item.text, x + 17, y);
    x += wide;
  }
}

function pictureHeight(id, width, height) {
  let [x, lines] = [0, 1];
  for (const { text } of legendItems(id)) {
    const wide = 26 + text.length * 6.6;
    if (x > 0 && x + wide > width - PICTURE.side) { x = 0; lines++; }
    x += wide;
  }
  return PICTURE.title + height + (id ? (lines + 1) * PICTURE.row : PICTURE.row);
}

const sizeOf = ({ canvas, box }) => { const shown = byId(canvas || box); return [shown.clientWidth, box ? shown.scrollHeight : shown.clientHeight]; };

/// Draws a picture with another pen than that of its canvas.
function drawnWith(pen, picture) {
  if (picture.box) return picture.draw(pen);
  pen.font = "12px system-ui, sans-serif";
  recorder = { canvas: byId(picture.canvas), begin: () => pen };
  try { picture.draw(); } finally { recorder = null; }
}

/// Returns a picture as the text of an SVG file. What the pen for an SVG lacks, such as a pattern, is put in
/// as pixels.
function pictureSvg(which) {
  const picture = PICTURES[which];
  const [width, height] = sizeOf(picture);
  const pen = svgPen();
  paintPicture(pen, picture, width, height, (x, y) => {
    const part = svgPen();
    drawnWith(part, picture);
    pen.moved(x, y, () => {
      if (!part.isLacking) pen.parts.push(...part.parts);
      else pen.parts.push(`<image width="${rounded(width)}" height="${rounded(height)}" href="${byId(picture.canvas).toDataURL()}"/>`);
    });
  });
  return svgText(pen, width + 2 * PICTURE.side, pictureHeight(picture.legend, width, height));
}

/// Returns a canvas with a picture, at twice the resolution of the page.
function pictureCanvas(which) {
  const picture = PICTURES[which];
  const [width, height] = sizeOf(picture);
  const scale = Math.min(2, 16000 / Math.max(width, height));
  const canvas = element("canvas", { width: String(Math.ceil((width + 2 * PICTURE.side) * scale)), height: String(Math.ceil(pictureHeight(picture.legend, width, height) * scale)) });
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  paintPicture(pen, picture, width, height, (x, y) => {
    if (picture.isPixels) return pen.drawImage(byId(picture.canvas), x, y, width, height);
    pen.save();
    pen.translate(x, y);
    drawnWith(pen, picture);
    pen.restore();
  });
  return canvas;
}

/// Adds the buttons that save the picture and the table of a panel.
function showKeep() {
  for (const box of document.querySelectorAll("[data-keep]")) {
    const which = box.dataset.keep;
    const picture = PICTURES[which] ? [
      press("PNG", `PNG: save the picture of ${which}`, () => pictureCanvas(which).toBlob((blob) => saveFile(which, "png", blob), "image/png")),
      press("SVG", `SVG: save the picture of ${which}`, () => saveFile(which, "svg", new Blob([pictureSvg(which)], { type: "image/svg+xml" }))),
    ] : [];
    const csv = TABLES[which] ? [press("CSV", `CSV: save the table of ${which}`, () => saveFile(which, "csv", new Blob([csvText(TABLES[which](state.recording))], { type: "text/csv" })))] : [];
    box.replaceChildren(element("span", {}, "save"), ...picture, ...csv);
  }
  const answer = answerText(state.recording);
  byId("keep-answer").hidden = answer === "null";
  byId("keep-answer").replaceChildren(press("answer as JSON", "answer as JSON: save it", () => saveFile("answer", "json", new Blob([answer], { type: "application/json" }))));
}

/// Returns the answer about a recording as text; `null` if the page had no space for it.
const answerText = (recording) => document.querySelectorAll("script.answer")[recordings.indexOf(recording)]?.textContent ?? "null";

const rounded6 = (number) => Math.round(number * 1e6) / 1e6;

function oneOf(name, field, values) {
  return [name, () => state[field] === values[0] ? "" : state[field], (text) => { state[field] = values.includes(text) ? text : values[0]; }];
}

/// The parts of the view that the address keeps besides the recording and the moment: a name, its text if it
/// is not as at first, and a function that restores it from a text. An empty or unknown text restores the
/// first view.
const VIEW = [
  oneOf("over", "axis", ["events", "time"]), oneOf("height", "scale", ["reserved", "live"]), oneOf("colours", "by", ["state", "stream", "pool", "age"]),
  oneOf("curves", "curve", ["at_need", "unlimited"]), oneOf("floor", "floor", ["all", "auto"]), oneOf("blocks", "rangeWay", ["allocated", "freed", "lived"]),
  oneOf("order", "temporaryOrder", TEMPORARY_ORDERS.map(([order]) => order)),
  ["layers", () => state.way === firstWay(state.recording) ? "" : state.way, (text) => { state.way = waysOf(state.recording).some(([way]) => way === text) ? text : firstWay(state.recording); }],
  ["zoom", () => state.from > 0 || state.to < 1 ? `${rounded6(state.from)}-${rounded6(state.to)}` : "", (text) => {
    const [from, to] = text.split("-").map(Number);
    Object.assign(state, 0 <= from && from < to && to <= 1 ? { from, to } : { from: 0, to: 1 });
  }],
  ["range", () => state.range ? state.range.join("-") : "", (text) => {
    const [from, to] = text.split("-").map(Number);
    if (0 <= from && from < to && to <= state.recording.events) setRange(from, to); else if (state.range) setRange(null);
  }],
  ["holders", () => state.holders === "0" ? "" : state.holders, (text) => {
    const isKnown = /^\d+$/.test(text) ? Number(text) < state.recording.holders.length : !state.recording.no_history && (text === "now" || text === "range" && state.range);
    state.holders = isKnown ? text : "0";
  }],
  ["frames", () => state.allFrames ? "all" : "", (text) => { state.allFrames = text === "all"; }],
  ["search", () => state.search, (text) => { state.search = text.slice(0, 200).toLowerCase(); }],
  ["with", () => state.second === firstSecond() ? "" : String(state.second), (text) => { state.second = /^\d+$/.test(text) && Number(text) < recordings.length ? Number(text) : firstSecond(); }],
  ["left", () => state.left === "0" ? "" : state.left, (text) => { state.left = text || "0"; }],
  ["right", () => state.right === firstRight() ? "" : state.right, (text) => { state.right = text || firstRight(); }],
];

/// Returns the view as a part of the address.
function viewText() {
  const parts = VIEW.map(([name, text]) => [name, text()]).filter(([, text]) => text !== "");
  return parts.map(([name, text]) => `&${name}=${encodeURIComponent(text)}`).join("");
}

/// Restores the view of an address, after its recording and moment are shown.
function restoreView(hash) {
  const named = new URLSearchParams(hash.slice(1));
  const isFirst = viewText() === "" && !VIEW.some(([name]) => named.has(name));
  if (state.recording.totals.length > 0 || isFirst) return;
  VIEW.forEach(([name, , restore]) => restore(named.get(name) ?? ""));
  if (!state.recording.has_times) state.axis = "events";
  showHoldersBar();
  drawHolders();
  showTemporary();
  showComparison();
  document.querySelectorAll('[role="group"]').forEach((group) => group.refresh?.());
  showLegend();
  redraw();
}
