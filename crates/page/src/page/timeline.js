// The time line: reserved and live bytes, large blocks as separate areas, failures, and the limit.

const timeline = { left: 76, right: 12, top: 22, bottom: 26, shown: [], most: 1, offsets: null };
/// The maximum number of blocks that are drawn as separate areas.
const AREAS_MOST = 1500;

/// Returns the position of a moment on the chosen axis, as a share from 0 to 1.
function part(recording, moment) {
  if (state.axis === "time" && recording.has_times) return timeOf(recording, moment) / recording.duration_us;
  return moment / Math.max(1, recording.events);
}

function momentOf(recording, place) {
  if (state.axis === "time" && recording.has_times) return momentAt(recording, place * recording.duration_us);
  return place * recording.events;
}

function xOf(moment, width) {
  const { left, right } = timeline;
  return left + (part(state.recording, moment) - state.from) / (state.to - state.from) * (width - left - right);
}

function momentAtX(x, width) {
  const { left, right } = timeline;
  const place = state.from + (x - left) / (width - left - right) * (state.to - state.from);
  return momentOf(state.recording, Math.max(0, Math.min(1, place)));
}

/// Returns the indices of the rows that may be drawn as areas, largest area (bytes times lifetime)
/// first.
function areasOf(recording) {
  if (recording.areas) return recording.areas;
  const { blocks, events } = recording;
  const fills = (at) => blocks.requested[at] * (Math.min(blocks.freed[at], events + 1) - blocks.born[at]);
  const places = [];
  for (let at = 0; at < blocks.length; at++) if (blocks.count[at] === 1) places.push(at);
  const weights = Float64Array.from({ length: blocks.length }, (_, at) => fills(at));
  places.sort((a, b) => weights[b] - weights[a]);
  recording.areas = places.slice(0, 20000);
  return recording.areas;
}

/// Returns the minimum and maximum of live bytes and the maxima of reserved bytes, without and with the bytes of
/// paused tags, for each pixel. Also
/// returns the moment whose blocks are drawn at the pixel: the one with the most live bytes.
function pixels(recording, inner) {
  const { column } = recording;
  const found = { live: new Float64Array(inner), low: new Float64Array(inner), reserved: new Float64Array(inner), total: new Float64Array(inner), at: new Float64Array(inner) };
  const width = inner + timeline.left + timeline.right;
  let from = placeOf(column.start, Math.floor(momentAtX(timeline.left, width)));
  for (let x = 0; x < inner; x++) {
    const to = placeOf(column.start, Math.floor(momentAtX(timeline.left + x + 1, width)));
    let live = -1, low = Infinity, reserved = 0, total = 0, peak = from;
    for (let at = from; at <= Math.max(from, to - 1); at++) {
      if (column.live_max[at] > live) { live = column.live_max[at]; peak = at; }
      low = Math.min(low, column.live_min[at]);
      reserved = Math.max(reserved, column.reserved_max[at]);
      total = Math.max(total, column.total_max[at]);
    }
    found.live[x] = live; found.low[x] = low; found.reserved[x] = reserved; found.total[x] = total;
    found.at[x] = to > from ? column.live_peak[peak] : Math.floor(momentAtX(timeline.left + x, width));
    from = Math.max(from, to);
  }
  return found;
}

function drawTimeline() {
  const { recording } = state;
  const { pen, width, height } = cleared(byId("timeline-canvas"));
  const { left, right, top, bottom } = timeline;
  const inner = Math.max(10, Math.floor(width - left - right));
  const tall = height - top - bottom;
  const found = pixels(recording, inner);
  const highest = (list) => list.reduce((most, number) => Math.max(most, number), 1);
  let most = state.scale === "live" ? highest(found.live) : highest(found.total);
  const { limit } = recording;
  if (state.scale !== "live" && limit && limit.bytes < most * 2) most = Math.max(most, limit.bytes);
  most *= 1.04;
  timeline.most = most;
  const yOf = (number) => top + tall - Math.min(1, number / most) * tall;

  const area = (list, fill) => {
    pen.fillStyle = fill;
    pen.beginPath();
    pen.moveTo(left, top + tall);
    for (let x = 0; x < inner; x++) { const y = yOf(list[x]); pen.lineTo(left + x, y); pen.lineTo(left + x + 1, y); }
    pen.lineTo(left + inner, top + tall);
    pen.fill();
  };
  area(found.total, colour("paused"));
  area(found.reserved, colour("cached"));
  area(found.live, colour("rounding"));
  area(found.low, colour("live"));
  drawAreas(pen, inner, tall, yOf, found.at);
  pen.strokeStyle = colour("frame");
  pen.lineWidth = 1.2;
  pen.beginPath();
  for (let x = 0; x < inner; x++) pen.lineTo(left + x + 0.5, yOf(found.reserved[x]));
  pen.stroke();
  drawAxes(pen, width, height, inner, tall, most, yOf);
  drawMarks(pen, width, height, yOf);
}

/// Returns the first pixel whose moment is at or after this one.
function pixelOf(moments, moment) {
  let low = 0, high = moments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (moments[middle] < moment) low = middle + 1; else high = middle;
  }
  return low;
}

/// Draws blocks as areas on top of each other. Those that live longest are at the bottom.
function drawAreas(pen, inner, tall, yOf, moments) {
  const { recording } = state;
  const { blocks } = recording;
  const [begin, end] = [moments[0], moments[inner - 1]];
  const perPixel = timeline.most / tall;
  const shown = [];
  for (const at of areasOf(recording)) {
    if (blocks.requested[at] < perPixel || blocks.born[at] > end || blocks.freed[at] <= begin) continue;
    const from = pixelOf(moments, blocks.born[at]);
    const to = pixelOf(moments, blocks.freed[at]);
    const freed = Math.min(blocks.freed[at], recording.events + 1);
    if (to > from) shown.push({ at, from, to, life: freed - blocks.born[at] });
    if (shown.length >= AREAS_MOST) break;
  }
  shown.sort((a, b) => b.life - a.life);
  const offsets = new Float64Array(inner);
  for (const area of shown) {
    const stack = blocks.stack[area.at];
    const number = stack >= 0 ? recording.stacks.caller[stack] : blocks.requested[area.at] % 9973;
    const size = blocks.requested[area.at];
    pen.fillStyle = hue(number);
    let x = area.from;
    while (x < area.to) {
      const offset = offsets[x];
      const start = x;
      while (x < area.to && offsets[x] === offset) { offsets[x] += size; x++; }
      const y = yOf(offset + size);
      const high = yOf(offset) - y;
      pen.fillRect(timeline.left + start, y, x - start, Math.max(0.7, high - (high > 3 ? 0.6 : 0)));
    }
  }
  timeline.shown = shown;
}

function drawAxes(pen, width, height, inner, tall, most, yOf) {
  const { recording } = state;
  const { left, top } = timeline;
  pen.fillStyle = colour("quiet");
  pen.strokeStyle = colour("line");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  for (const mib of ticks(0, most / 1048576, 5)) {
    const y = yOf(mib * 1048576);
    pen.globalAlpha = 0.6;
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(left + inner, y); pen.stroke();
    pen.globalAlpha = 1;
    pen.fillText(`${mib < 1 ? mib : grouped(mib)} MiB`, left - 6, y + 4);
  }
  pen.textAlign = "center";
  const isTime = state.axis === "time" && recording.has_times;
  const all = isTime ? recording.duration_us : recording.events;
  for (const at of ticks(state.from * all, state.to * all, Math.max(2, inner / 130))) {
    const x = left + (at / Math.max(1, all) - state.from) / (state.to - state.from) * inner;
    pen.fillText(isTime ? duration(at) : grouped(at), x, height - 8);
  }
  pen.textAlign = "left";
  pen.fillText(isTime ? "time" : "event", 4, height - 8);
  pen.fillText("bytes", 4, top - 8);
}

function drawMarks(pen, width, height, yOf) {
  const { recording } = state;
  const { left, right, top, bottom } = timeline;
  const inside = (x) => x >= left - 1 && x <= width - right + 1;
  const line = (x, from, to) => { pen.beginPath(); pen.moveTo(x, from); pen.lineTo(x, to); pen.stroke(); };
  const { limit } = recording;
  if (limit && limit.bytes <= timeline.most) {
    pen.strokeStyle = pen.fillStyle = colour("limit");
    pen.setLineDash([6, 4]);
    const y = yOf(limit.bytes);
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - right, y); pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.fillText(`limit ${limitText(limit)}`, left + 4, y - 4);
  }
  pen.textAlign = "center";
  pen.strokeStyle = pen.fillStyle = colour("limit");
  for (const [moment] of recording.failures.list) {
    const x = xOf(moment, width);
    if (!inside(x)) continue;
    pen.globalAlpha = 0.35; line(x, top, height - bottom); pen.globalAlpha = 1;
    pen.beginPath(); pen.moveTo(x - 5, top - 9); pen.lineTo(x + 5, top - 9); pen.lineTo(x, top); pen.fill();
  }
  pen.strokeStyle = colour("text");
  for (const [moment] of recording.annotations) {
    const x = xOf(moment, width);
    if (inside(x)) line(x, top - 6, top);
  }
  pen.fillStyle = colour("text");
  for (const { moment, bytes: number } of recording.no_history ? [] : [recording.peak_reserved, recording.peak_live]) {
    const x = xOf(moment, width);
    if (!inside(x) || number > timeline.most) continue;
    pen.beginPath(); pen.arc(x, yOf(number), 3.5, 0, 7); pen.fill();
  }
  const x = xOf(state.moment, width);
  if (inside(x)) {
    pen.strokeStyle = colour("accent");
    pen.lineWidth = 2;
    line(x, top - 10, height - bottom);
    pen.lineWidth = 1;
  }
}

/// Returns the block whose area contains a point.
function areaAt(x, y, width, height) {
  const tall = height - timeline.top - timeline.bottom;
  const number = (timeline.top + tall - y) / tall * timeline.most;
  const column = Math.floor(x - timeline.left);
  let below = 0;
  for (const { at, from, to } of timeline.shown) {
    if (column < from || column >= to) continue;
    const size = state.recording.blocks.requested[at];
    if (number >= below && number < below + size) return at;
    below += size;
  }
  return NOTHING;
}

/// Returns the live and reserved bytes at a moment: exact values if the page has the moment's rows,
/// otherwise those of its column. The bytes of paused tags are always those of the column.
function bytesAt(recording, moment) {
  const { column, blocks, segments, moments } = recording;
  const known = !moments || moments[placeOf(moments, moment)] === moment;
  if (!known || recording.is_short) {
    const at = placeOf(column.start, moment);
    const peak = (mark, name) => mark.moment === moment && !recording.no_history ? mark.bytes : column[`${name}_last`][at];
    return { live: peak(recording.peak_live, "live"), reserved: peak(recording.peak_reserved, "reserved"), paused: column.paused_last[at] };
  }
  const sums = { live: 0, reserved: 0, paused: column.paused_last[placeOf(column.start, moment)] };
  for (let at = 0; at < blocks.length && blocks.born[at] <= moment; at++) if (moment < blocks.freed[at]) sums.live += blocks.requested[at];
  for (let at = 0; at < segments.length && segments.born[at] <= moment; at++) if (moment < segments.gone[at]) sums.reserved += segments.size[at];
  return sums;
}

/// Returns the bytes at a moment as text.
function bytesText({ live, reserved, paused }) {
  const text = `${bytes(live)} live, ${bytes(reserved - live)} cached, ${bytes(reserved)} reserved`;
  return paused ? `${text}, ${bytes(paused)} paused` : text;
}

function when(recording, moment) {
  const time = recording.has_times ? `, ${duration(timeOf(recording, moment))}` : "";
  if (recording.no_history) return "the moment of the dump";
  return `event ${grouped(moment)} of ${grouped(recording.events)}${time}`;
}

function zoom(factor, around = part(state.recording, state.moment)) {
  const least = 4 / Math.max(4, state.recording.events);
  const span = Math.min(1, Math.max(least, (state.to - state.from) * factor));
  const middle = Math.min(Math.max(around, state.from), state.to);
  const share = (middle - state.from) / (state.to - state.from);
  showRange(middle - share * span, span);
}

function showRange(from, span = state.to - state.from) {
  state.from = Math.max(0, Math.min(1 - span, from));
  state.to = state.from + span;
  drawTimeline();
}

/// Scrolls the time line so that the chosen moment is visible.
function follow() {
  const at = part(state.recording, state.moment);
  const span = state.to - state.from;
  if (at < state.from || at > state.to) { state.from = Math.max(0, Math.min(1 - span, at - span / 2)); state.to = state.from + span; }
}

function stepMoment(steps) {
  const { recording } = state;
  const { moments } = recording;
  if (!moments) return choose(state.moment + steps);
  const at = placeOf(moments, state.moment);
  choose(moments[Math.max(0, Math.min(moments.length - 1, at + steps))]);
}

function nextFailure() {
  const { list } = state.recording.failures;
  const next = list.find(([moment]) => moment > state.moment) || list[0];
  if (next) choose(next[0]);
}

function setUpTimeline() {
  const canvas = byId("timeline-canvas");
  const bar = byId("timeline-bar");
  bar.append(
    choice("over", [["events", "events"], ["time", "time"]], () => state.axis, (axis) => { state.axis = axis; drawTimeline(); }),
    choice("height", [["reserved", "reserved bytes"], ["live", "live bytes"]], () => state.scale, (scale) => { state.scale = scale; drawTimeline(); }),
    element("span", { class: "group" }, press("+", "zoom in", () => zoom(0.5)), press("−", "zoom out", () => zoom(2)),
      press("◀", "earlier", () => showRange(state.from - (state.to - state.from) / 3)),
      press("▶", "later", () => showRange(state.from + (state.to - state.from) / 3)), press("all", "show all", () => showRange(0, 1))),
    element("span", { class: "group", id: "jumps" }),
  );
  let drag = null;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return { x: event.clientX - box.left, y: event.clientY - box.top, width: box.width, height: box.height }; };
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: state.from, moved: false }; canvas.setPointerCapture?.(event.pointerId); });
  canvas.addEventListener("pointerup", (event) => {
    const { x, width } = place(event);
    if (drag && !drag.moved) choose(momentAtX(x, width));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => tip(null, null));
  canvas.addEventListener("pointermove", (event) => {
    const { x, y, width, height } = place(event);
    if (drag && Math.abs(event.clientX - drag.x) > 4) drag.moved = true;
    if (drag?.moved) {
      const share = (drag.x - event.clientX) / (width - timeline.left - timeline.right);
      showRange(drag.from + share * (state.to - state.from));
      return tip(null, null);
    }
    hoverTimeline(event, x, y, width, height);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const { x, width } = place(event);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, part(state.recording, momentAtX(x, width)));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(state.recording.events * (state.to - state.from) / 50));
    const several = state.recording.moments ? 10 : far;
    const acts = {
      ArrowLeft: () => stepMoment(event.shiftKey ? -several : -1), ArrowRight: () => stepMoment(event.shiftKey ? several : 1),
      Home: () => choose(0), End: () => choose(state.recording.events), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
      "0": () => showRange(0, 1), p: () => choose(state.recording.peak_reserved.moment), l: () => choose(state.recording.peak_live.moment), f: nextFailure,
      PageUp: () => showRange(state.from - (state.to - state.from) / 3), PageDown: () => showRange(state.from + (state.to - state.from) / 3),
    };
    const act = event.ctrlKey || event.altKey || event.metaKey ? null : acts[event.key] || acts[event.key.toLowerCase()];
    if (act) { event.preventDefault(); act(); }
  });
}

function hoverTimeline(event, x, y, width, height) {
  const { recording } = state;
  const moment = Math.round(momentAtX(x, width));
  const failure = recording.failures.list.find(([at]) => Math.abs(xOf(at, width) - x) < 5);
  const annotation = recording.annotations.find(([at]) => Math.abs(xOf(at, width) - x) < 5);
  const at = areaAt(x, y, width, height);
  const lines = [`${when(recording, moment)}: ${bytesText(bytesAt(recording, moment))}`];
  if (failure && y < height / 2) {
    const [, size, stream, stack] = failure;
    lines.unshift(`A request of ${exactly(size)} failed on stream ${recording.streams[stream]}`, ...(stack >= 0 ? [`requested by ${callerOf(recording, stack)}`] : []));
  } else if (annotation && y < height / 4) {
    lines.unshift(`${annotation[1]}: annotation of a block of ${exactly(annotation[2])}`);
  } else if (at !== NOTHING) {
    lines.unshift(...blockTip(recording, at, moment));
  }
  tip(event, lines);
}

/// Adds buttons for the important moments of this recording.
function showJumps() {
  const { recording } = state;
  const jumps = recording.no_history ? [] : [["peak of live bytes", recording.peak_live.moment], ["peak of reserved bytes", recording.peak_reserved.moment]];
  const failures = recording.failures.list;
  if (failures.length) jumps.push(["first failure", failures[0][0]]);
  jumps.push(["end", recording.events]);
  byId("jumps").replaceChildren(element("span", {}, "go to"), ...jumps.map(([name, moment]) => press(name, `go to: ${name}`, () => choose(moment))));
  legend("timeline-legend", [
    ["live: allocated and not freed; large blocks have colours of their own", colour("live")], ["cached: reserved and not live", colour("cached")],
    ...(recording.column.total_max.some((total, at) => total > recording.column.reserved_max[at]) ? [["paused: released, the addresses are kept", colour("paused")]] : []),
    ...(failures.length ? [[`request failed (${grouped(recording.failures.total)})`, colour("limit")]] : []),
    ...(recording.annotations.length ? [["annotation", colour("text")]] : []),
    ["the chosen moment", colour("accent")],
  ]);
}
