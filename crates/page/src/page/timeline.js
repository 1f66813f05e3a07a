// The time line: reserved bytes, the live bytes as layers or blocks, failures, and the limit.

const timeline = { left: 64, right: 12, top: 30, bottom: 26, most: 1, frame: null, sheet: document.createElement("canvas") };

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

/// Returns the first moment of each pixel, and the moment after the last pixel.
function edgesOf(inner, width) {
  const edges = Float64Array.from({ length: inner + 1 }, (_, x) => Math.floor(momentAtX(timeline.left + x, width)));
  edges[inner] += 1;
  return edges;
}

/// Returns the extremes of the columns at each pixel, and the moment of the most live bytes.
function columnPeaks({ column }, edges) {
  const count = edges.length - 1;
  const found = { at: new Float64Array(count), live: new Float64Array(count), low: new Float64Array(count), reserved: new Float64Array(count), total: new Float64Array(count) };
  for (let x = 0; x < count; x++) {
    let peak = placeOf(column.start, edges[x]);
    let [low, reserved, total] = [column.live_min[peak], column.reserved_max[peak], column.total_max[peak]];
    for (let at = peak + 1; at < column.start.length && column.start[at] < edges[x + 1]; at++) {
      if (column.live_max[at] > column.live_max[peak]) peak = at;
      low = Math.min(low, column.live_min[at]);
      reserved = Math.max(reserved, column.reserved_max[at]);
      total = Math.max(total, column.total_max[at]);
    }
    found.live[x] = column.live_max[peak]; found.low[x] = low; found.reserved[x] = reserved; found.total[x] = total;
    found.at[x] = column.live_peak[peak];
  }
  return found;
}

/// Returns what is drawn: for each pixel the moment with the most live bytes, the extremes, and the layers then.
function frameOf(recording, inner, width) {
  const edges = edgesOf(inner, width);
  let frame = columnPeaks(recording, edges);
  if (isWhole(recording)) {
    const hasPaused = recording.column.total_max.some((total, at) => total > recording.column.reserved_max[at]);
    const reserved = reservedPeaks(recording, edges);
    frame = { ...peaksOf(recording, edges), reserved, total: hasPaused ? frame.total : reserved };
  }
  const stacks = state.way === "block" ? null
    : isWhole(recording) ? layersAt(recording, state.way, frame.at) : seriesLayers(recording, state.way, edges, frame.at);
  return { ...frame, edges, inner, stacks };
}

function drawTimeline() {
  const { recording } = state;
  const { pen, width, height } = cleared(byId("timeline-canvas"));
  const { left, right, top, bottom } = timeline;
  const inner = Math.max(10, Math.floor(width - left - right));
  const tall = height - top - bottom;
  const frame = frameOf(recording, inner, width);
  timeline.frame = frame;
  const highest = (list) => list.reduce((most, number) => Math.max(most, number), 1);
  let most = state.scale === "live" ? highest(frame.live) : highest(frame.total);
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
  if (frame.total !== frame.reserved) area(frame.total, colour("paused"));
  area(frame.reserved, colour("cached"));
  drawLayers(pen, frame, tall);
  pen.strokeStyle = colour("frame");
  pen.lineWidth = 1.2;
  const line = (list) => { pen.beginPath(); for (let x = 0; x < inner; x++) pen.lineTo(left + x + 0.5, yOf(list[x])); pen.stroke(); };
  line(frame.reserved);
  pen.strokeStyle = colour("text");
  pen.lineWidth = 0.7;
  if (frame.low.some((low, x) => low < frame.live[x])) line(frame.low);
  drawAxes(pen, width, height, inner, tall, most, yOf);
  drawMarks(pen, width, height, yOf);
  byId("timeline-detail").textContent = detailText(recording, frame);
}

/// Paints the layers or blocks in the resolution of the screen, and draws that picture.
function drawLayers(pen, frame, tall) {
  const { recording } = state;
  const { sheet, most, left, top } = timeline;
  const [width, height] = [frame.inner, Math.max(1, Math.round(tall * (window.devicePixelRatio || 1)))];
  frame.height = height;
  frame.perRow = most / height;
  const image = { pixels: new Uint32Array(width * height), width, height };
  if (frame.stacks) {
    const tiles = recording.layers[state.way].map((_, layer) => tileOf(layerStyle(recording, state.way, layer)));
    paintLayers(image, frame.stacks, layerOrder(recording, state.way), tiles, frame.perRow);
  } else {
    frame.stacked = stackBlocks(recording, frame.at, height, frame.perRow);
    const together = tileOf(styleOf("", "none", "rising")).pixels;
    paintBlocks(image, frame.stacked, frame.live, frame.perRow, blockPixels(recording), together);
  }
  [sheet.width, sheet.height] = [width, height];
  sheet.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(image.pixels.buffer), width, height), 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(sheet, left, top, width, tall);
}

/// Returns the pixels of the areas and outlines of blocks, by the number of their colour. Blocks of one colour get
/// three shades, so that neighbours differ.
function blockPixels(recording) {
  const count = recording.layers.line.length || 8;
  const [plain, edge] = [new Uint32Array(3 * count), new Uint32Array(count)];
  for (let key = 0; key < count; key++) {
    const rgb = rgbOf(keyStyle(recording, key).colour);
    [0, 0.16, -0.14].forEach((shade, at) => { plain[3 * key + at] = pixel(rgb, shade); });
    edge[key] = pixel(rgb, -0.5);
  }
  return { keyOf: (place) => blockKey(recording, place), plain, edge };
}

/// Returns a sentence about what the picture leaves out, if it does.
function detailText(recording, { stacks, stacked, live }) {
  if (stacked) {
    const shown = `${plural(stacked.count, "block lives", "blocks live")} at the moments of the picture`;
    const small = stacked.leastBytes ? `; those under ${bytes(stacked.leastBytes)} are drawn together` : "";
    const some = isWhole(recording) ? "" : `; the page has only the blocks that matter most: the hatched area has the others`;
    return `${shown}${small}${some}.`;
  }
  if (stacks && !isWhole(recording)) return `The page does not have every block: the layers are those at the peaks of ${grouped(recording.column.start.length)} stretches.`;
  return live.length && recording.events / live.length > 2 ? "Each pixel shows the moment with the most live bytes in it." : "";
}

function drawAxes(pen, width, height, inner, tall, most, yOf) {
  const { recording } = state;
  const { left, top } = timeline;
  pen.fillStyle = colour("quiet");
  pen.strokeStyle = colour("frame");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  const [unit, name] = most >= 4 * 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
  for (const number of ticks(0, most / unit, 6)) {
    const y = yOf(number * unit);
    pen.globalAlpha = 0.35;
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(left + inner, y); pen.stroke();
    pen.globalAlpha = 1;
    pen.fillText(`${number < 1 ? number : grouped(number)} ${name}`, left - 6, y + 4);
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
}

function drawMarks(pen, width, height, yOf) {
  const { recording } = state;
  const { left, right, top, bottom } = timeline;
  const inside = (x) => x >= left - 1 && x <= width - right + 1;
  const line = (x, from, to) => { pen.beginPath(); pen.moveTo(x, from); pen.lineTo(x, to); pen.stroke(); };
  drawRange(pen, width, height);
  const { limit } = recording;
  if (limit && limit.bytes > timeline.most && state.scale !== "live") {
    pen.fillStyle = colour("limit");
    pen.textAlign = "right";
    pen.fillText(`limit ${limitText(limit)}, above the picture`, width - right, top - 14);
  }
  if (limit && limit.bytes <= timeline.most) {
    pen.strokeStyle = pen.fillStyle = colour("limit");
    pen.setLineDash([6, 4]);
    const y = yOf(limit.bytes);
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - right, y); pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.fillText(`limit ${limitText(limit, (number) => inPicture(number, timeline.most))}`, left + 4, y - 4);
  }
  pen.textAlign = "center";
  pen.strokeStyle = pen.fillStyle = colour("limit");
  for (const [moment] of recording.failures.list) {
    const x = xOf(moment, width);
    if (!inside(x)) continue;
    pen.globalAlpha = 0.35; line(x, top, height - bottom); pen.globalAlpha = 1;
    pen.beginPath(); pen.moveTo(x - 5, top - 9); pen.lineTo(x + 5, top - 9); pen.lineTo(x, top); pen.fill();
  }
  const [failure] = recording.failures.list;
  if (failure && inside(xOf(failure[0], width))) label(pen, `request of ${bytes(failure[1])} failed`, xOf(failure[0], width), top - 14, width);
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
    const isLabelled = number === recording.peak_live.bytes && !recording.failures.list.length;
    if (isLabelled) label(pen, `${inPicture(number, timeline.most)} live`, x, top - 14, width);
  }
  const x = xOf(state.moment, width);
  if (inside(x)) {
    pen.strokeStyle = colour("accent");
    pen.lineWidth = 2;
    line(x, top - 10, height - bottom);
    pen.lineWidth = 1;
  }
}

/// Writes a text near a mark, inside the picture.
function label(pen, text, x, y, width) {
  const half = pen.measureText(text).width / 2;
  pen.textAlign = "center";
  pen.fillText(text, Math.max(timeline.left + half, Math.min(width - timeline.right - half, x)), y);
}

/// Draws the chosen range as a band.
function drawRange(pen, width, height) {
  if (!state.range) return;
  const { left, right, top, bottom } = timeline;
  const [from, to] = state.range.map((moment) => Math.max(left, Math.min(width - right, xOf(moment, width))));
  pen.fillStyle = pen.strokeStyle = colour("accent");
  pen.globalAlpha = 0.14;
  pen.fillRect(from, top, to - from, height - top - bottom);
  pen.globalAlpha = 1;
  for (const x of [from, to]) { pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, height - bottom); pen.stroke(); }
}

/// Returns the column of pixels at a position, and what is drawn there: a layer, or a row for a block.
function drawnAt(x, y, height) {
  const { frame, left, top, bottom, most } = timeline;
  const tall = height - top - bottom;
  const column = Math.max(0, Math.min(frame.inner - 1, Math.floor(x - left)));
  const number = (top + tall - y) / tall * most;
  const found = { moment: frame.at[column], layer: NOTHING, block: NOTHING, bytes: 0 };
  if (y < top || number < 0 || x < left) return found;
  if (frame.stacks) {
    found.layer = layerAtBytes(frame.stacks, layerOrder(state.recording, state.way), frame.inner, column, number);
    if (found.layer !== NOTHING) found.bytes = frame.stacks[found.layer * frame.inner + column];
  } else {
    const row = Math.min(frame.height - 1, Math.floor((y - top) / tall * frame.height));
    found.block = frame.stacked.owners[row * frame.inner + column] - 1;
  }
  return found;
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

/// Sets the chosen range, two moments, or clears it with `null`. While the pointer draws it, the other panels wait.
function setRange(from, to, isDrawn = true) {
  const { recording } = state;
  const inside = (moment) => Math.max(0, Math.min(recording.events, Math.round(moment)));
  const range = from === null ? null : [inside(Math.min(from, to)), inside(Math.max(from, to))];
  state.range = range && range[0] < range[1] ? range : null;
  byId("timeline-range").textContent = state.range ? `Range: events ${grouped(state.range[0])} to ${grouped(state.range[1])}.` : "";
  drawTimeline();
  if (!isDrawn) return;
  followRange();
  showAddress();
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

