// Functions for elements, numbers and colours that all panels use. Data is inserted as text only.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(made.style, value);
    else if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);
const grouped = (number) => Math.round(number).toLocaleString("en-US");

/// Formats bytes. Large numbers are rounded to whole MiB, as in `advise`.
function bytes(number) {
  const size = Math.abs(number);
  if (size >= 1048576) {
    const mib = number / 1048576;
    return `${size >= 1048576 * 100 ? grouped(mib) : mib.toFixed(1)} MiB`;
  }
  return size >= 1024 ? `${(number / 1024).toFixed(size % 1024 ? 1 : 0)} KiB` : `${number} B`;
}

/// Formats bytes for a picture that shows at most `most` bytes: in GiB if that is several GiB.
const inPicture = (number, most) => most >= 4 * 2 ** 30 && number >= 2 ** 30 ? `${(number / 2 ** 30).toFixed(2)} GiB` : bytes(number);

/// Formats the size of a device that suffices, in whole MiB rounded up.
const needed = (number) => `${grouped(Math.ceil(number / 1048576))} MiB`;
const exactly = (number) => number >= 1024 ? `${bytes(number)} (${grouped(number)} bytes)` : bytes(number);
const percent = (part, all) => all > 0 ? `${(100 * part / all).toFixed(part * 10 < all ? 1 : 0)} %` : "-";

function duration(us) {
  if (us >= 1e6) return `${(us / 1e6).toFixed(us >= 1e7 ? 1 : 2)} s`;
  return us >= 1e3 ? `${(us / 1e3).toFixed(1)} ms` : `${Math.round(us)} µs`;
}

const plural = (number, one, more) => `${grouped(number)} ${number === 1 ? one : more}`;

/// The colours from the style sheet. They are cached until the colour scheme changes.
const scheme = matchMedia("(prefers-color-scheme: dark)");
const palette = new Map();
scheme.addEventListener("change", () => palette.clear());

function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}

const isDark = () => scheme.matches;

/// Returns a colour for the number of a stream, a pool or a stack. Consecutive numbers get clearly
/// different colours.
function hue(number, pale = false) {
  const angle = (212 + number * 137.5) % 360;
  if (pale) return isDark() ? `hsl(${angle} 22% 27%)` : `hsl(${angle} 45% 88%)`;
  return isDark() ? `hsl(${angle} 48% ${58 + number % 3 * 5}%)` : `hsl(${angle} 52% ${60 - number % 3 * 6}%)`;
}

/// Returns the drawing context of a canvas that was cleared and has the resolution of the screen.
function cleared(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  if (recorder?.canvas === canvas) return { pen: recorder.begin(), width: canvas.clientWidth, height: height || canvas.clientHeight };
  if (height) canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  const tall = height || canvas.clientHeight;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(tall * ratio));
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height: tall };
}

/// Returns about `count` round numbers from `from` to `to`.
function ticks(from, to, count, base = 10) {
  const raw = (to - from) / Math.max(1, count);
  if (!(raw > 0)) return [];
  const unit = base === 2 ? 2 ** Math.floor(Math.log2(raw)) : 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((part) => part * unit).find((part) => part >= raw);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

function legend(id, items) {
  byId(id).replaceChildren(...items.map(([name, background, border]) => element("span", {},
    element("i", { style: { background, border: border ? `2px ${border}` : "none" } }), name)));
}

/// Returns a group of buttons, of which exactly one is pressed.
function choice(name, options, chosen, choose) {
  const buttons = options.map(([value, text]) => element("button", { type: "button", "data-value": value, onclick: () => { choose(value); refresh(); } }, text));
  const refresh = () => buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(options[at][0] === chosen())));
  refresh();
  const group = element("span", { class: "group", role: "group", "aria-label": name }, element("span", {}, name), ...buttons);
  return Object.assign(group, { refresh });
}

const press = (text, label, act) => element("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);

/// Returns a table. Columns are [heading, is text]; cells are texts or elements. In a narrow window a row is
/// shown as lines, each figure with its heading. The roles keep it a table for screen readers then.
function table(columns, rows) {
  const cell = (kind, content, at, more) => element(kind, { class: columns[at][1] ? "text" : null, ...more }, content);
  const head = element("tr", { role: "row" }, ...columns.map(([name], at) => name === "" ? cell("td", name, at, { role: "cell" }) : cell("th", name, at, { scope: "col", role: "columnheader" })));
  const body = rows.map(({ cells, strong, act }) => element("tr", { role: "row",
    class: [strong ? "strong" : "", act ? "clickable" : ""].join(" ").trim() || null, tabindex: act ? "0" : null,
    onclick: act || (() => {}), onkeydown: (event) => { if (act && event.key === "Enter") act(); },
  }, ...cells.map((content, at) => cell("td", content, at, { role: "cell", "data-head": columns[at][0] || null }))));
  return element("div", { class: "table" }, element("table", { role: "table" }, element("thead", { role: "rowgroup" }, head), element("tbody", { role: "rowgroup" }, ...body)));
}

/// Returns a file's path without the folder that contains all files of the program. For a library's
/// file, returns the path below the folder of the libraries.
function shortFile({ file, own }) {
  const library = /(?:site|dist)-packages\/(.*)$/.exec(file);
  if (library) return library[1];
  const { folder } = state.recording;
  return own && file.startsWith(folder) ? file.slice(folder.length) : file;
}

const lineNumber = ({ line }) => line ? `:${line}` : "";

/// Returns the file name and line of a frame; for a library the path. Returns an empty text for compiled
/// code.
const fileOf = (frame) => frame.kind === 0 || frame.kind === 3 ? "" : `${frame.kind === 2 ? shortFile(frame) : frame.file.split("/").pop()}${lineNumber(frame)} `;
const lineOf = (frame) => `${shortFile(frame)}${lineNumber(frame)} ${frame.name}`;

/// Returns the frames for a tooltip: the program's own frames first, then the library frames that they
/// called.
function framesList(frames, most) {
  const ordered = state.allFrames ? frames : [...frames.filter(({ own }) => own), ...frames.filter(({ own }) => !own)];
  const line = (frame) => element("div", { class: frame.own ? "own" : null }, lineOf(frame));
  const rest = ordered.length - most;
  return element("div", { class: "frames" }, ...ordered.slice(0, most).map(line),
    ...(rest > 0 ? [element("div", {}, `and ${rest} more`)] : []));
}

/// Shows lines next to the pointer. Each line may be a text or an element.
function tip(event, lines) {
  const box = byId("tip");
  if (!lines) { box.hidden = true; return; }
  box.replaceChildren(...lines.map((line) => typeof line === "string" ? element("div", {}, line) : line));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  const top = Math.min(event.clientY + 14, innerHeight - height - 8);
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, top)}px`;
}

/// Returns a stream's number, with its handle.
const streamTip = (recording, stream) => `stream ${recording.streams[stream]} (handle ${recording.handles[stream]})`;

/// Returns the lines that describe a block at a moment.
function blockLines(recording, at, moment) {
  const { blocks } = recording;
  const several = blocks.count[at] > 1;
  const what = several ? `${grouped(blocks.count[at])} small blocks together` : "Block";
  const state = moment < blocks.freed[at] ? "live" : "waiting for other streams";
  const [stream, pool] = recording.heaps[blocks.heap[at]];
  const lines = several ? [] : [callerOf(recording, blocks.stack[at])];
  lines.push(`${what}: ${exactly(blocks.size[at])}, ${state}`,
    `requested ${exactly(blocks.requested[at])}`,
    `${streamTip(recording, stream)}, ${recording.pools[pool].name}`);
  if (!several) {
    const ago = moment - blocks.born[at];
    const time = recording.has_times ? ` (${duration(timeOf(recording, moment) - timeOf(recording, blocks.born[at]))})` : "";
    lines.push(recording.no_history ? "age: unknown" : blocks.born[at] === 0 ? "age: older than the recording" : `age: ${plural(ago, "event", "events")}${time}`);
    const allocated = blocks.born[at] === 0 ? "" : `allocated at event ${grouped(blocks.born[at])}, `;
    if (!recording.no_history) lines.push(allocated + (blocks.freed[at] === NEVER ? "not freed in the recording" : `freed at event ${grouped(blocks.freed[at])}`));
    lines.push(`address ${addressOf(recording, blocks.address[at])}`);
  }
  return lines;
}

function blockTip(recording, at, moment) {
  const frames = framesOf(recording, recording.blocks.stack[at]);
  const lines = blockLines(recording, at, moment);
  return frames.length ? [...lines, framesList(frames, 8)] : lines;
}

/// The state of the page: the recording, the moment, and how they are drawn.
const state = { recording: null, moment: 0, from: 0, to: 1, axis: "events", scale: "reserved", way: "block", by: "state", wide: 1,
  block: NOTHING, holders: "0", allFrames: false, search: "", curve: "at_need", floor: "all", strong: new Set(),
  // The chosen range: `null`, or its first and last moment.
  range: null,
  // The blocks of the range that are shown, and the order of the temporary ones.
  rangeWay: "allocated", temporaryOrder: "requested_bytes",
  // The other recording of a comparison, and the moments of both.
  second: 0, left: "0", right: "0" };
