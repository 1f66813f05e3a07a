// Uses the page as a reader would, and reports the results. The test appends this script to a copy of
// the page.
"use strict";

function answerOf(act) {
  // The best of up to five rounds counts, because other programs run on the machine. Stops at the first
  // round of at most 50 ms.
  let best = Infinity;
  for (let round = 0; round < 5 && best > 50; round++) {
    const begin = performance.now();
    act();
    // Reading a pixel forces the browser to draw the canvas now.
    for (const canvas of document.querySelectorAll("canvas")) canvas.getContext("2d").getImageData(0, 0, 1, 1);
    best = Math.min(best, performance.now() - begin);
  }
  return best;
}

function coloursOf(id) {
  const canvas = byId(id);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 0) colours.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
  return colours.size;
}

const picture = (id) => byId(id).toDataURL();

function point(canvas, type, x, y) {
  const box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, bubbles: true, pointerId: 1 }));
}

const key = (canvas, name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
const tipText = () => byId("tip").hidden ? "" : byId("tip").textContent;

/// Moves the pointer to a block of the map; to one with a stack, if there is one.
function hoverBlock(recording) {
  const found = [];
  for (const piece of map.pieces) {
    for (const part of piece.segment.parts) {
      if (part.block === NOTHING || part.from < piece.from || part.from >= piece.from + piece.size) continue;
      const x = piece.x + (part.from + Math.min(part.size, piece.from + piece.size - part.from) / 2 - piece.from) * piece.w / piece.size;
      const wide = part.size * piece.w / piece.size;
      found.push({ x, y: piece.y + 7, block: part.block, wide, rank: (recording.blocks.stack[part.block] >= 0 ? 1e12 : 0) + wide });
    }
  }
  found.sort((a, b) => b.rank - a.rank);
  if (!found.length) return null;
  point(byId("segments-canvas"), "pointermove", found[0].x, found[0].y);
  const stack = recording.blocks.stack[found[0].block];
  const frames = framesOf(recording, stack);
  const text = tipText();
  point(byId("segments-canvas"), "pointerleave", 0, 0);
  return { text, hasSize: text.includes(exactly(recording.blocks.size[found[0].block])), hasStack: text.startsWith(callerOf(recording, stack)), frames: frames.length };
}

/// Moves the pointer to the largest block of the time line. Returns true if the tooltip describes it.
function hoverArea(recording) {
  const way = state.way;
  setWay("block");
  const { frame: { stacked: { owners }, inner, height }, left, top, bottom } = timeline;
  const canvas = byId("timeline-canvas");
  let largest = -1;
  owners.forEach((owner, at) => { if (owner > 0 && (largest < 0 || recording.blocks.requested[owner - 1] > recording.blocks.requested[owners[largest] - 1])) largest = at; });
  let isNamed = null;
  if (largest >= 0) {
    const tall = canvas.clientHeight - top - bottom;
    point(canvas, "pointermove", left + largest % inner + 0.5, top + (Math.floor(largest / inner) + 0.5) * tall / height);
    const text = tipText();
    point(canvas, "pointerleave", 0, 0);
    isNamed = [exactly(recording.blocks.requested[owners[largest] - 1]), "stream ", "age: ", "pool"].every((part) => text.includes(part));
  }
  setWay(way);
  return isNamed;
}

/// Divides the time line in each way, and hovers over the bottom layer at the peak. Returns the ways that do not
/// change the picture, the legend, or name no layer.
function useWays(recording) {
  const canvas = byId("timeline-canvas");
  const failed = [];
  const seen = new Set();
  const first = state.way;
  waysOf(recording).forEach(([way], at) => {
    key(canvas, String(at + 1));
    const column = timeline.frame.live.indexOf(Math.max(...timeline.frame.live));
    point(canvas, "pointermove", timeline.left + column + 0.5, canvas.clientHeight - timeline.bottom - 1.5);
    const { stacks, inner } = timeline.frame;
    const low = 1.5 * timeline.most / (canvas.clientHeight - timeline.top - timeline.bottom);
    const layer = way === "block" ? NOTHING : layerAtBytes(stacks, layerOrder(recording, way), inner, column, low);
    const isNamed = layer === NOTHING || tipText().includes(layerStyle(recording, way, layer).name);
    point(canvas, "pointerleave", 0, 0);
    const isPressed = byId("ways").querySelector("[aria-pressed=true]")?.dataset.value === way;
    if (state.way !== way || !isNamed || !isPressed || byId("timeline-legend").querySelectorAll("li").length < 2) failed.push(`${way}: ${isNamed} ${isPressed}`);
    seen.add(picture("timeline-canvas"));
  });
  if (seen.size < waysOf(recording).length && recording.events > 16) failed.push("ways look alike");
  setWay(first);
  showWays();
  return failed;
}

/// Selects ranges by the brush, the keys and the buttons. Returns those that did not do so.
function useRange(recording) {
  if (recording.events < 16) return [];
  const canvas = byId("timeline-canvas");
  const failed = [];
  const holds = (name, is) => { if (!is) failed.push(`${name}: ${JSON.stringify(state.range)}`); };
  const moved = (type, x) => canvas.dispatchEvent(new PointerEvent(type, { clientX: canvas.getBoundingClientRect().left + x, clientY: canvas.getBoundingClientRect().top + 60, shiftKey: true, bubbles: true, pointerId: 1 }));
  const middle = timeline.left + timeline.frame.inner / 2;
  moved("pointerdown", middle); moved("pointermove", middle + 60); moved("pointerup", middle + 60);
  holds("brush", state.range && Math.abs(xOf(state.range[0], canvas.clientWidth) - middle) < 30 && state.from === 0);
  key(canvas, "Escape");
  holds("Escape", state.range === null);
  key(canvas, "v");
  holds("view", state.range?.join() === `0,${recording.events}`);
  const at = state.moment;
  choose(Math.floor(recording.events / 2));
  key(canvas, "[");
  holds("from", state.range?.[0] === state.moment && byId("timeline-range").textContent.includes(grouped(state.moment)));
  [...byId("range-bar").querySelectorAll("button")].pop().click();
  holds("none", state.range === null && byId("timeline-range").textContent === "");
  choose(at);
  return failed;
}

/// Returns true if an address that contains a moment makes the page show that moment.
function followsAddress(recording, moment) {
  const which = recordings.length > 1 ? `recording=${recordings.indexOf(recording)}&` : "";
  history.replaceState(null, "", `#${which}moment=${moment}`);
  dispatchEvent(new Event("hashchange"));
  return state.moment === moment;
}

/// Searches the flame graph for its largest frame, and switches to all frames and back.
function useFlames(recording) {
  const search = document.querySelector("#holders-bar input");
  const find = (text) => { search.value = text; search.dispatchEvent(new Event("input")); };
  const [largest] = [...flames.root.children.values()].sort((a, b) => b.bytes - a.bytes);
  find(largest ? largest.name : "");
  const found = byId("flames").querySelectorAll(".found").length;
  const sum = byId("flames-found").textContent;
  const rows = () => byId("holders-table").querySelectorAll("tbody tr").length;
  find("");
  const everyRow = rows();
  find(holdersNow(recording).by_stack ? callerOf(recording, holdersNow(recording).list[0].stack) : "stream");
  const rowsFound = rows();
  find("no code has this name");
  const isEmpty = rows() === 0 && byId("holders-table").textContent.includes("No holder has this text.");
  find("");
  const names = () => byId("holders").textContent + [...byId("flames").children].map((button) => button.getAttribute("aria-label")).join(" ");
  const own = names();
  const all = document.querySelector('#holders-bar button[data-value="all"]');
  all?.click();
  const shown = names();
  document.querySelector('#holders-bar button[data-value="own"]')?.click();
  return { found, sum, own, tip: flameTip(), rowsFound: rowsFound > 0 && rowsFound <= everyRow, isEmpty, all: all ? shown : null, high: byId("flames").clientHeight <= innerHeight,
    first: byId("holders-table").querySelector("tbody tr")?.textContent ?? "", same: names() === own };
}

/// Moves the pointer to a library frame below a frame of the program. Returns true if the first line of
/// the tooltip shows the program's frame.
function flameTip() {
  const callerOf = (node) => node && (node.own ? node : callerOf(node.parent));
  const button = [...byId("flames").children].find(({ node }) => !node.own && callerOf(node));
  if (!button) return null;
  point(button, "pointermove", 1, 1);
  const first = byId("tip").firstChild.textContent;
  point(button, "pointerleave", 1, 1);
  return first.endsWith(callerOf(button.node).name);
}

/// Presses the button that copies the line to paste.
function copyLine() {
  const button = document.querySelector("#set .copy");
  if (!button) return null;
  let copied = "";
  document.execCommand = (name) => { copied = name === "copy" ? String(getSelection()) : ""; return true; };
  button.click();
  delete document.execCommand;
  getSelection().removeAllRanges();
  return copied === document.querySelector("#set code").textContent && button.textContent === "copied";
}

/// Shows the curves where they differ, with one of them dimmed.
function useNeeds(recording) {
  if (!recording.needs.rows.length) return null;
  const curves = recording.needs.rows.map((row) => row.curves.at_need);
  const before = picture("needs-canvas");
  const press = (value) => document.querySelector(`#needs-bar button[data-value="${value}"]`).click();
  press("auto");
  const isMarked = byId("needs-text").textContent.startsWith("The picture begins at ");
  const differ = lowestOf(curves) === 0 ? !isMarked : isMarked && picture("needs-canvas") !== before;
  press("all");
  const row = byId("needs-table").querySelector("tbody tr");
  row.click();
  const dimmed = picture("needs-canvas") !== before;
  row.click();
  const heights = besides([10, 10, 250], 15, 250);
  return differ && dimmed && picture("needs-canvas") === before && heights.join() === "10,25,250";
}

/// Returns the elements that extend beyond the window. Tables and flame graphs are excluded, because
/// they scroll.
function tooWide() {
  const isInside = (node) => node.closest(".table, #flames, #tip");
  const wide = [...document.querySelectorAll("body *")].filter((node) => !isInside(node) && node.getBoundingClientRect().right > innerWidth + 0.5);
  const names = wide.map((node) => `${node.tagName} ${node.id} ${node.className}: ${node.textContent.slice(0, 40)}`);
  return document.documentElement.scrollWidth > innerWidth ? [...names, "the page"] : names;
}

function exercise(recording) {
  const result = { name: recording.name, events: recording.events, moments: recording.moments?.length ?? recording.events + 1 };
  // Read first: later the page writes the address a moment after the view changes.
  result.address = location.hash;
  result.panels = ["timeline", "why", "segments", "holders", "needs", "advice"].filter((id) => byId(id)?.getBoundingClientRect().height > 40);
  result.sentence = byId("sentence").textContent;
  result.causes = byId("causes").textContent;
  result.unknown = byId("unknown").textContent;
  result.timelineColours = coloursOf("timeline-canvas");
  result.segmentsColours = coloursOf("segments-canvas");
  result.flames = byId("flames").children.length;
  result.holders = byId("holders-table").querySelectorAll("tbody tr").length;
  result.needs = byId("needs-table").textContent;
  result.curves = recording.needs.rows.length ? coloursOf("needs-canvas") : null;
  result.block = hoverBlock(recording);
  result.area = hoverArea(recording);
  result.ways = useWays(recording);
  result.ranges = useRange(recording);
  // The headline, the line to paste and the time line are on the first screen of a usual window.
  result.firstScreen = innerWidth < 1200 || byId("timeline-canvas").getBoundingClientRect().bottom + scrollY <= 900;
  result.start = state.moment;
  result.opensAt = state.moment === (recording.failures.list[0]?.[0] ?? recording.peak_live.moment);
  result.flamesUsed = useFlames(recording);
  result.copied = copyLine();
  result.needsUsed = useNeeds(recording);
  result.tooWide = tooWide();
  result.followsAddress = followsAddress(recording, recording.events) && followsAddress(recording, result.start);
  const before = picture("segments-canvas");
  const third = Math.floor(recording.events / 3);
  choose(shownMoment(recording, third) === result.start ? recording.events : third);
  result.otherMoment = state.moment;
  result.otherMap = picture("segments-canvas") !== before;
  const timelineCanvas = byId("timeline-canvas");
  key(timelineCanvas, "Home");
  key(timelineCanvas, "ArrowRight");
  result.keyMoment = state.moment;
  key(timelineCanvas, "+");
  result.zoomed = state.to - state.from < 1;
  key(timelineCanvas, "0");
  key(timelineCanvas, "p");
  result.peakShown = state.moment === recording.peak_reserved.moment;
  result.sums = byId("segments-sums").textContent;
  result.account = byId("account").hidden ? null : byId("account-table").innerText;
  key(byId("segments-canvas"), "ArrowRight");
  result.keyBlock = state.block !== NOTHING && byId("segments-text").textContent.length > 10;
  const { moments, events } = recording;
  const some = [0.1, 0.35, 0.6, 0.85, 1].map((share) => moments ? moments[Math.floor(share * (moments.length - 1))] : Math.floor(share * events));
  result.answers = {
    moment: Math.max(...some.map((moment) => answerOf(() => choose(moment)))),
    zoom: answerOf(() => { zoom(0.3); }), pan: answerOf(() => showRange(state.from + 0.05)), all: answerOf(() => showRange(0, 1)),
    colours: Math.max(...["stream", "pool", "age", "state"].map((by) => answerOf(() => { state.by = by; drawSegments(); }))),
    hover: answerOf(() => point(timelineCanvas, "pointermove", 300, 200)),
    hoverMap: answerOf(() => point(byId("segments-canvas"), "pointermove", 100, 30)),
    holders: answerOf(() => drawHolders()),
  };
  point(timelineCanvas, "pointerleave", 0, 0);
  state.holders = "now";
  choose(recording.peak_live.moment);
  result.holdersNow = byId("flames").children.length;
  return result;
}

const result = { load: performance.now(), width: innerWidth, dark: isDark(), recordings: [] };
try {
  const select = byId("recording");
  recordings.forEach((recording, at) => {
    select.value = String(at);
    const begin = performance.now();
    if (at > 0) select.dispatchEvent(new Event("change"));
    const shown = performance.now() - begin;
    result.recordings.push({ ...exercise(recording), shown });
  });
} catch (error) {
  problems.push(`the test: ${error.stack}`);
}
result.problems = problems;
result.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
result.images = document.querySelectorAll("img, iframe, object, embed, link").length;
result.chooser = !byId("chooser").hidden;
parent.postMessage("RESULT" + JSON.stringify(result).replace(/[&<>]/g, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0")) + "TLUSER", "*");
