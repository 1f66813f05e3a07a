// The map of all segments at the chosen moment.

const map = { pieces: [], heaps: [], order: [] };
const ROW = 15, GAP = 3, TITLE = 20;

function paint(recording, heap, segment, part) {
  if (part.state === "unmapped") return colour("page");
  if (state.by === "state") {
    if (part.state === "free") return colour(segment.used ? "rest" : "idle");
    if (part.state === "waiting") return colour("waiting");
    return colour(part.apart ? "apart" : "live");
  }
  const [stream, pool] = recording.heaps[heap.heap];
  const number = state.by === "stream" ? stream : pool * 2 + (segment.large ? 1 : 0);
  if (part.state === "free") return state.by === "age" ? colour("cached") : hue(number, true);
  return state.by === "age" ? ageColour(recording, part.block) : hue(number);
}

/// Returns a colour for the age of a block in events, on a scale from young to old.
function ageColour(recording, block) {
  const age = Math.max(0, state.moment - recording.blocks.born[block]);
  const share = recording.blocks.born[block] === 0 ? 1 : Math.log2(age + 1) / Math.log2(recording.events + 2);
  return `hsl(${50 - 50 * share + (share > 0.5 ? 310 * (share - 0.5) : 0)} 75% ${isDark() ? 68 - 26 * share : 66 - 34 * share}%)`;
}

function drawSegments() {
  const { recording, moment } = state;
  const canvas = byId("segments-canvas");
  map.heaps = layoutAt(recording, moment);
  map.order = [];
  place(canvas.parentElement.clientWidth - 14);
  const last = map.pieces[map.pieces.length - 1];
  const { pen } = cleared(canvas, Math.max(60, Math.min(16000, last ? last.y + ROW + 6 : 60)));
  const colours = new Map();
  const chosen = [], idle = [];
  pen.textBaseline = "alphabetic";
  for (const heap of map.heaps) drawTitle(pen, recording, heap);
  for (const piece of map.pieces) {
    const { segment, heap } = piece;
    const scale = piece.w / piece.size;
    for (const part of segment.parts) {
      const from = Math.max(part.from, piece.from), to = Math.min(part.from + part.size, piece.from + piece.size);
      if (to <= from) continue;
      const key = `${part.state}${part.apart}${segment.used}${segment.large}${heap.heap}` + (state.by === "age" ? part.block : "");
      if (!colours.has(key)) colours.set(key, paint(recording, heap, segment, part));
      pen.fillStyle = colours.get(key);
      const x = piece.x + (from - piece.from) * scale;
      const w = (to - from) * scale;
      if (part.block === NOTHING) pen.fillRect(x, piece.y, w, ROW);
      else pen.fillRect(x, piece.y, Math.max(w > 3 ? w - 0.6 : w, 1), ROW);
      if (part.state === "free" && !segment.used && state.by === "state") idle.push([x, piece.y, w]);
      if (part.block !== NOTHING && part.block === state.block) chosen.push([x, piece.y, Math.max(w, 2)]);
    }
  }
  drawHatch(pen, idle);
  drawFrames(pen, recording);
  chosen.forEach(([x, y, w]) => outline(pen, x, y, w));
  saySegments();
}

function outline(pen, x, y, w) {
  pen.strokeStyle = colour("text");
  pen.lineWidth = 2;
  pen.strokeRect(x - 1, y - 1, w + 2, ROW + 2);
  pen.lineWidth = 1;
}

/// Draws the frames of the segments: private pools in their own colour, expandable segments dashed. All
/// frames of the same style are one path, because that is faster.
function drawFrames(pen, recording) {
  const kinds = new Map();
  for (const piece of map.pieces) {
    const { w, segment, heap } = piece;
    if (w <= 3) continue;
    const isPrivate = recording.pools[recording.heaps[heap.heap][1]].private;
    const kind = `${isPrivate}${segment.expandable}`;
    if (!kinds.has(kind)) kinds.set(kind, { pieces: [], isPrivate, expandable: segment.expandable });
    kinds.get(kind).pieces.push(piece);
  }
  for (const { pieces, isPrivate, expandable } of kinds.values()) {
    pen.strokeStyle = colour(isPrivate ? "private" : "frame");
    pen.lineWidth = isPrivate ? 2 : 1;
    pen.setLineDash(expandable ? [5, 3] : []);
    pen.beginPath();
    for (const { x, y, w } of pieces) pen.rect(x + 0.5, y + 0.5, w - 1, ROW - 1);
    pen.stroke();
  }
  pen.setLineDash([]);
  pen.lineWidth = 1;
}

/// Draws the hatch of completely free segments, so that they differ from free parts not by their colour alone.
function drawHatch(pen, boxes) {
  pen.strokeStyle = colour("hatch");
  pen.beginPath();
  for (const [x, y, w] of boxes) {
    for (let at = x + 3 - ROW; at < x + w; at += 8) {
      const [from, to] = [Math.max(at, x), Math.min(at + ROW, x + w)];
      if (to > from) { pen.moveTo(from, y + ROW - (from - at)); pen.lineTo(to, y + ROW - (to - at)); }
    }
  }
  pen.stroke();
}

function drawTitle(pen, recording, heap) {
  const isPrivate = recording.pools[recording.heaps[heap.heap][1]].private;
  const text = `${heapName(recording, heap.heap)}: ${bytes(heap.size)} reserved, ${bytes(heap.requested)} live`
    + (heap.idle ? `, ${bytes(heap.idle)} in completely free segments` : "") + (heap.rest ? `, ${bytes(heap.rest)} in free parts of split segments` : "")
    + (heap.waiting ? `, ${bytes(heap.waiting)} waiting` : "");
  pen.fillStyle = colour(isPrivate ? "private" : "text");
  pen.fillText(text, 0, heap.y - 5);
}

/// Assigns positions to the segments, side by side in lines. A segment that does not fit continues on
/// the next line.
function place(width) {
  map.pieces = [];
  const total = map.heaps.reduce((sum, heap) => heap.bars.reduce((all, { size }) => all + size, sum), 0);
  const perPixel = Math.max(1, total / (width * 22 * state.wide));
  let y = TITLE;
  for (const heap of map.heaps) {
    heap.y = y;
    let x = 0;
    for (const segment of heap.bars) {
      let from = segment.address;
      let left = segment.size;
      if (x > 0 && x + left / perPixel > width && left / perPixel < width / 2) { x = 0; y += ROW + GAP; }
      while (left > 0) {
        if (width - x < 4) { x = 0; y += ROW + GAP; }
        const size = Math.min(left, (width - x) * perPixel);
        const w = Math.min(width - x, Math.max(3, size / perPixel));
        map.pieces.push({ x, y, w, from, size, segment, heap });
        from += size;
        left -= size;
        if (left < perPixel) left = 0;
        x += w + 2;
        if (map.pieces.length > 40000) return;
      }
    }
    y += ROW + GAP + TITLE;
  }
}

function saySegments() {
  const sum = (name) => map.heaps.reduce((all, heap) => all + heap[name], 0);
  const count = map.heaps.reduce((all, heap) => all + heap.segments.length, 0);
  const failure = state.recording.failures.list.find(([moment]) => moment === state.moment);
  const largest = map.heaps.reduce((most, heap) => heap.segments.reduce((all, segment) => Math.max(all, segment.largest), most), 0);
  const failed = byId("segments-failed");
  failed.hidden = !failure;
  if (failure) {
    const caller = failure[3] >= 0 ? `, requested by ${callerOf(state.recording, failure[3])}` : "";
    failed.textContent = `A request of ${bytes(failure[1])} on stream ${state.recording.streams[failure[2]]} fails here${caller}. The largest free range has ${bytes(largest)}.`;
  }
  byId("segments-sums").textContent = `${when(state.recording, state.moment)}: ${state.recording.is_short ? "drawn are " : ""}${plural(count, "segment", "segments")}, `
    + `${bytes(sum("size"))} reserved, ${bytes(sum("requested"))} live, ${bytes(sum("idle"))} in completely free segments, `
    + `${bytes(sum("rest"))} in free parts of split segments` + (sum("waiting") ? `, ${bytes(sum("waiting"))} waiting for other streams` : "");
  byId("segments-missing").textContent = missingAt(state.recording, state.moment);
  showSlider();
  showBlocks();
  showApart();
  segmentsLegend();
}

/// Returns a text about the moments and blocks that the page cannot show.
function missingAt(recording, moment) {
  const { blocks, moments, events } = recording;
  const merged = aliveAt(blocks, moment).filter((at) => blocks.count[at] > 1);
  const texts = [];
  if (moments) texts.push(`The recording is large: ${grouped(moments.length)} of ${grouped(events + 1)} moments can be chosen.`);
  if (merged.length) texts.push(`${grouped(merged.reduce((sum, at) => sum + blocks.count[at], 0))} small blocks and the free memory between them are drawn as ${plural(merged.length, "block", "blocks")}.`);
  if (recording.is_short) texts.push("Some small segments or blocks are not drawn.");
  return texts.join(" ");
}

/// Sets the slider to the chosen moment. Its values are the moments that can be chosen.
function showSlider() {
  const { recording, moment } = state;
  const { moments, events } = recording;
  const slider = byId("moment");
  slider.max = String(moments ? moments.length - 1 : events);
  slider.value = String(moments ? placeOf(moments, moment) : moment);
  slider.setAttribute("aria-valuetext", when(recording, moment));
}

/// Lists the segments whose free memory is fragmented, or that one small live block keeps reserved.
function showApart() {
  const { recording } = state;
  const { blocks } = recording;
  const rows = [];
  for (const heap of map.heaps) {
    for (const segment of heap.segments) {
      if (!segment.used || segment.free < 1048576 / 2) continue;
      rows.push({ heap, segment });
    }
  }
  rows.sort((a, b) => b.segment.free - a.segment.free);
  const cells = rows.slice(0, 8).map(({ heap, segment }) => {
    const held = segment.parts.filter((part) => part.block !== NOTHING);
    const keepers = segment.keepers.flatMap((keeper) => keeper.run);
    const shown = (keepers.length ? keepers : held).reduce((least, part) => !least || part.size < least.size ? part : least, null);
    const kind = segment.expandable ? "expandable" : segment.large ? "large" : "small";
    return {
      cells: [bytes(segment.free), String(segment.ranges), bytes(segment.largest), `${bytes(segment.size)} ${kind}, ${heapName(recording, heap.heap)}`,
        `${plural(held.length, "block", "blocks")} of ${bytes(segment.live + segment.waiting)}`,
        `${bytes(blocks.size[shown.block])}, ${callerOf(recording, blocks.stack[shown.block])}`],
      act: () => chooseBlock(shown.block, true),
    };
  });
  const all = rows.reduce((sum, { segment }) => sum + segment.free, 0);
  const back = rows.some(({ segment }) => segment.expandable) ? "only whole pages of expandable ranges can be released" : "cannot be released";
  const note = element("p", { class: "quiet" }, rows.length
    ? `${plural(rows.length, "segment is", "segments are")} partly used: ${bytes(all)} of free memory in them can only serve requests of their own stream and pool, and ${back}.`
    : "No partly used segment has more than half a MiB free.");
  byId("apart").replaceChildren(note, ...(cells.length ? [table([["free", false], ["ranges", false], ["largest range", false],
    ["segment", true], ["kept by", true], ["the smallest of them, requested by", true]], cells)] : []));
}

function segmentsLegend() {
  const { recording } = state;
  const pairs = map.heaps.map((heap) => recording.heaps[heap.heap]);
  const each = (place, name, number) => [...new Set(pairs.map((pair) => pair[place]))].slice(0, 24).map((at) => [name(at), hue(number(at))]);
  const items = {
    state: [["live", colour("live")], ["live, between larger free ranges", colour("apart")], ["waiting for other streams", colour("waiting")],
      ["free part of a split segment", colour("rest")], ["completely free segment", painted("idle")]],
    stream: [...each(0, (at) => `stream ${recording.streams[at]}`, (at) => at), ["free: the same, pale", colour("cached")]],
    pool: [...each(1, (at) => `${recording.pools[at].name}, large`, (at) => at * 2 + 1), ...each(1, (at) => `${recording.pools[at].name}, small`, (at) => at * 2)],
    age: [["young", ageColourAt(0)], ["older", ageColourAt(0.5)], ["oldest", ageColourAt(1)], ["free", colour("cached")]],
  }[state.by];
  const frames = [];
  if (map.heaps.some((heap) => heap.segments.some((segment) => segment.expandable))) frames.push(["expandable range", "transparent", `dashed ${colour("frame")}`]);
  if (map.heaps.some((heap) => heap.bars.length > heap.segments.length)) frames.push(["unmapped part of an expandable range", colour("page"), `dashed ${colour("frame")}`]);
  if (pairs.some(([, pool]) => recording.pools[pool].private)) frames.push(["private pool", "transparent", `solid ${colour("private")}`]);
  legend("segments-legend", [...items, ...frames]);
}

const ageColourAt = (share) => `hsl(${50 - 50 * share + (share > 0.5 ? 310 * (share - 0.5) : 0)} 75% ${isDark() ? 68 - 26 * share : 66 - 34 * share}%)`;

/// Returns the segment, and the part of the segment, at a point of the map.
function partAt(x, y) {
  const piece = map.pieces.find((piece) => x >= piece.x && x < piece.x + piece.w + 1 && y >= piece.y && y < piece.y + ROW);
  if (!piece) return null;
  const scale = piece.size / piece.w;
  const from = piece.from + (x - 1 - piece.x) * scale, to = piece.from + (x + 1 - piece.x) * scale;
  const near = piece.segment.parts.filter((part) => part.from < to && part.from + part.size > from);
  return { ...piece, part: near.find((part) => part.block !== NOTHING && part.size < scale * 2) || near[near.length >> 1] || piece.segment.parts[0] };
}

function partLines({ segment, heap, part }) {
  const { recording, moment } = state;
  if (part.state === "unmapped") return [`Unmapped: ${exactly(part.size)} of an expandable range of ${bytes(segment.whole.size)}, mapped at other moments`, heapName(recording, heap.heap)];
  const kind = (segment.expandable ? "expandable " : "") + (segment.large ? "large" : "small");
  const own = `in a ${kind} segment of ${bytes(segment.size)}, ${heapName(recording, heap.heap)}: `
    + (segment.free ? `${bytes(segment.free)} free in ${plural(segment.ranges, "range", "ranges")}` : "nothing free");
  if (part.block === NOTHING) return [`Free: ${exactly(part.size)}, ${segment.used ? "a part of a split segment" : "the whole segment"}`, ...besideLines(heap, segment, part), own];
  const keeper = segment.keepers.find((keeper) => keeper.run.includes(part));
  const apart = keeper ? [`separates free ranges of ${bytes(keeper.before)} and ${bytes(keeper.behind)}`] : [];
  return [...blockTip(recording, part.block, moment), ...besideLines(heap, segment, part), ...apart, own];
}

function chooseBlock(block, show) {
  state.block = block;
  drawSegments();
  sayBlock();
  const piece = map.pieces.find(({ from, size }) => from <= state.recording.blocks.address[block] && state.recording.blocks.address[block] < from + size);
  const scroll = byId("segments-scroll");
  if (show && piece && (piece.y < scroll.scrollTop || piece.y > scroll.scrollTop + scroll.clientHeight - ROW)) scroll.scrollTop = piece.y - 60;
}

function stepBlock(steps) {
  if (!map.order.length) map.order = map.heaps.flatMap((heap) => heap.bars.flatMap((segment) => segment.parts.filter((part) => part.block !== NOTHING).map((part) => part.block)));
  const { order } = map;
  if (!order.length) return;
  const at = order.indexOf(state.block);
  const next = at < 0 ? 0 : Math.max(0, Math.min(order.length - 1, at + steps));
  const kept = order;
  chooseBlock(order[next], true);
  map.order = kept;
}

function setUpSegments() {
  const canvas = byId("segments-canvas");
  byId("moment").addEventListener("input", ({ target: { valueAsNumber: value } }) => choose(state.recording.moments ? state.recording.moments[value] : value));
  byId("segments-bar").append(
    choice("colour by", [["state", "state"], ["stream", "stream"], ["pool", "pool"], ["age", "age"]], () => state.by, (by) => { state.by = by; drawSegments(); }),
    element("span", { class: "group" }, press("+", "larger", () => { state.wide = Math.min(64, state.wide * 2); drawSegments(); }),
      press("−", "smaller", () => { state.wide = Math.max(0.5, state.wide / 2); drawSegments(); })),
    element("span", { class: "group" }, press("◀ moment", "the moment before", () => stepMoment(-1)), press("moment ▶", "the next moment", () => stepMoment(1))),
  );
  const under = (event) => { const box = canvas.getBoundingClientRect(); return partAt(event.clientX - box.left, event.clientY - box.top); };
  canvas.addEventListener("pointermove", (event) => { const found = under(event); tip(event, found && partLines(found)); });
  canvas.addEventListener("pointerleave", () => tip(null, null));
  canvas.addEventListener("click", (event) => { const found = under(event); chooseBlock(found ? found.part.block : NOTHING, false); });
  canvas.addEventListener("keydown", (event) => {
    const acts = { ArrowRight: () => stepBlock(1), ArrowLeft: () => stepBlock(-1), ArrowDown: () => stepBlock(20), ArrowUp: () => stepBlock(-20),
      Escape: () => chooseBlock(NOTHING, false), "+": () => { state.wide = Math.min(64, state.wide * 2); drawSegments(); }, "-": () => { state.wide = Math.max(0.5, state.wide / 2); drawSegments(); } };
    if (acts[event.key] && !event.ctrlKey && !event.altKey && !event.metaKey) { event.preventDefault(); acts[event.key](); }
  });
}
