// How readers use the time line: buttons, keys, pointer, the legend and the tooltip.

/// Returns true if each pixel covers several moments. Then a click chooses the one that is drawn.
const isWide = () => (state.to - state.from) * state.recording.events > 4 * timeline.frame.inner;

function setWay(way) {
  state.way = way;
  drawTimeline();
  showLegend();
}

function setUpTimeline() {
  const bar = byId("timeline-bar");
  const part = () => (state.to - state.from) / 3;
  bar.append(
    element("span", { id: "ways" }),
    choice("over", [["events", "events"], ["time", "time"]], () => state.axis, (axis) => { state.axis = axis; drawTimeline(); }),
    choice("height", [["reserved", "reserved"], ["live", "live"]], () => state.scale, (scale) => { state.scale = scale; drawTimeline(); }),
    element("span", { class: "group" }, press("+", "+ zoom in", () => zoom(0.5)), press("−", "− zoom out", () => zoom(2)),
      press("◀", "◀ earlier", () => showRange(state.from - part())), press("▶", "▶ later", () => showRange(state.from + part())),
      press("all", "show all", () => showRange(0, 1))),
    element("span", { class: "group", id: "jumps" }),
  );
  byId("range-bar").append(
    element("span", { class: "group" }, element("span", {}, "range"), press("view", "range: the view", rangeOfView),
      press("from", "range from the chosen moment", () => rangeEnd(0)), press("to", "range to the chosen moment", () => rangeEnd(1)),
      press("none", "range: none", () => setRange(null))),
  );
  setUpPointer(byId("timeline-canvas"));
}

/// Chooses the visible stretch as the range.
function rangeOfView() {
  const { recording } = state;
  setRange(momentOf(recording, state.from), momentOf(recording, state.to));
}

/// Moves one end of the range to the chosen moment.
function rangeEnd(end) {
  const [from, to] = state.range || [0, state.recording.events];
  if (end === 0) setRange(state.moment, Math.max(to, state.moment));
  else setRange(Math.min(from, state.moment), state.moment);
}

function setUpPointer(canvas) {
  let drag = null;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return { x: event.clientX - box.left, y: event.clientY - box.top, width: box.width, height: box.height }; };
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: state.from, moved: false, brush: event.shiftKey ? momentAtX(place(event).x, place(event).width) : null };
    canvas.setPointerCapture?.(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const { x, y, width, height } = place(event);
    if (drag && !drag.moved) chooseAt(x, y, width, height);
    else if (drag && drag.brush !== null) setRange(drag.brush, momentAtX(x, width));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => tip(null, null));
  canvas.addEventListener("pointermove", (event) => {
    const { x, y, width, height } = place(event);
    if (drag && Math.abs(event.clientX - drag.x) > 4) drag.moved = true;
    if (!drag?.moved) return hoverTimeline(event, x, y, width, height);
    if (drag.brush !== null) setRange(drag.brush, momentAtX(x, width), false);
    else showRange(drag.from + (drag.x - event.clientX) / (width - timeline.left - timeline.right) * (state.to - state.from));
    tip(null, null);
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const { x, width } = place(event);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, part(state.recording, momentAtX(x, width)));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.altKey || event.metaKey ? null : keyOf(event);
    if (act) { event.preventDefault(); act(); }
  });
}

/// Returns what a key does.
function keyOf({ key, shiftKey }) {
  const { recording } = state;
  const far = recording.moments ? 10 : Math.max(1, Math.round(recording.events * (state.to - state.from) / 50));
  const step = shiftKey ? far : 1;
  const page = (state.to - state.from) / 3;
  const acts = {
    ArrowLeft: () => stepMoment(-step), ArrowRight: () => stepMoment(step), Home: () => choose(0), End: () => choose(recording.events),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => showRange(0, 1), f: nextFailure,
    p: () => choose(recording.peak_reserved.moment), l: () => choose(recording.peak_live.moment),
    PageUp: () => showRange(state.from - page), PageDown: () => showRange(state.from + page),
    "[": () => rangeEnd(0), "]": () => rangeEnd(1), v: rangeOfView, Escape: state.range ? () => setRange(null) : null,
  };
  const way = waysOf(recording)[Number(key) - 1];
  return acts[key] || acts[key.toLowerCase()] || (way ? () => { setWay(way[0]); showWays(); } : null);
}

/// Chooses the moment that is drawn at a position, and the block there.
function chooseAt(x, y, width, height) {
  const found = drawnAt(x, y, height);
  if (found.block !== NOTHING) state.block = found.block;
  choose(isWide() ? found.moment : momentAtX(x, width));
  const name = nameOf(found);
  if (name) byId("timeline-text").textContent += ` ${name}`;
}

/// Returns what is drawn at a position as a sentence: a layer with its bytes, or a block with its size and its life.
function nameOf({ layer, block, bytes: size, moment }) {
  const { recording } = state;
  if (block !== NOTHING) return `${blockLines(recording, block, moment).join(", ")}.`;
  if (layer === NOTHING) return "";
  return `${layerStyle(recording, state.way, layer).name}: ${bytes(size)} at event ${grouped(moment)}.`;
}

function hoverTimeline(event, x, y, width, height) {
  const { recording } = state;
  const found = drawnAt(x, y, height);
  const moment = isWide() ? found.moment : Math.round(momentAtX(x, width));
  const failure = recording.failures.list.find(([at]) => Math.abs(xOf(at, width) - x) < 5);
  const annotation = recording.annotations.find(([at]) => Math.abs(xOf(at, width) - x) < 5);
  const lines = [];
  if (failure && y < height / 2) {
    const [, size, stream, stack] = failure;
    lines.push(`A request of ${exactly(size)} failed on ${streamTip(recording, stream)}`, ...(stack >= 0 ? [`requested by ${callerOf(recording, stack)}`] : []));
  }
  if (annotation && y < height / 4) lines.push(`${annotation[1]}: annotation of a block of ${exactly(annotation[2])}`);
  if (found.block !== NOTHING) lines.push(...blockTip(recording, found.block, found.moment));
  if (found.layer !== NOTHING) {
    const live = timeline.frame.live[Math.max(0, Math.min(timeline.frame.inner - 1, Math.floor(x - timeline.left)))];
    lines.push(layerStyle(recording, state.way, found.layer).name, `${exactly(found.bytes)}, ${percent(found.bytes, live)} of the live bytes`);
  }
  lines.push(`${when(recording, moment)}: ${bytesText(bytesAt(recording, moment))}`);
  tip(event, lines);
}

/// Adds the ways of dividing and the important moments of this recording.
function showJumps() {
  const { recording } = state;
  const jumps = recording.no_history ? [] : [["peak of live", recording.peak_live.moment], ["peak of reserved", recording.peak_reserved.moment]];
  const failures = recording.failures.list;
  if (failures.length) jumps.push(["first failure", failures[0][0]]);
  jumps.push(["end", recording.events]);
  byId("jumps").replaceChildren(element("span", {}, "go to"), ...jumps.map(([name, moment]) => press(name, `go to: ${name}`, () => choose(moment))));
  showWays();
}

function showWays() {
  byId("ways").replaceChildren(choice("layers by", waysOf(state.recording), () => state.way, setWay));
}

/// Returns the live bytes of each layer at a moment.
function layersNow(recording, way, moment) {
  if (isWhole(recording)) return layersAt(recording, way, [moment]);
  return seriesLayers(recording, way, [moment, moment + 1], [0]);
}

/// Shows the layers from the top down, with their bytes at the chosen moment, and the meaning of the other areas.
function showLegend() {
  const { recording } = state;
  const way = state.way === "block" && recording.layers.line.length ? "line" : state.way;
  const row = (background, name, size, border) => element("li", {}, element("i", { style: { background, border: border ? `2px ${border}` : "none" } }),
    element("span", { title: name }, name), element("b", {}, size));
  const rows = [];
  if (way === "block") rows.push(row(hatched(styleOf("", 1, "plain")), "live: an area for each block, coloured by size", ""));
  else {
    const now = layersNow(recording, way, state.moment);
    const order = [...layerOrder(recording, way)].reverse();
    rows.push(...order.map((layer) => row(hatched(layerStyle(recording, way, layer)), layerStyle(recording, way, layer).name, bytes(now[layer]))));
  }
  const { live, reserved, paused } = bytesAt(recording, state.moment);
  rows.push(row(colour("cached"), "cached: reserved and not live", bytes(reserved - live)));
  if (recording.column.total_max.some((total, at) => total > recording.column.reserved_max[at])) rows.push(row(colour("paused"), "paused: released, the addresses are kept", bytes(paused)));
  if (recording.failures.total) rows.push(row(colour("limit"), "requests that failed", grouped(recording.failures.total)));
  if (recording.annotations.length) rows.push(row(colour("text"), "annotations", grouped(recording.annotations.length)));
  byId("timeline-legend").replaceChildren(element("p", { class: "quiet" }, recording.no_history ? "At the moment of the dump" : `At event ${grouped(state.moment)}`), element("ul", {}, ...rows));
}
