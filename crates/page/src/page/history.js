// The live and reserved bytes at every moment, and the bytes of each layer, computed from the rows of the page.
// Sums are exact at every zoom level. Without all rows the page has the layers at the peaks of columns only.
// This file draws nothing.

/// The moments of a chunk of the curve, and those between two stored sums of layers.
const CHUNK = 64, STORED = 128;

/// Returns true if the page has every block and segment of the recording.
const isWhole = (recording) => recording.layers.series === null;

/// Returns the live bytes at each moment, with the extremes of each chunk, and the rows in the order of their frees.
function historyOf(recording) {
  if (recording.history) return recording.history;
  const { blocks: { length, born, freed, requested }, events } = recording;
  const live = new Float64Array(events + 1);
  // `frees[m]` is the number of frees before moment m.
  const frees = new Uint32Array(events + 2);
  for (let at = 0; at < length; at++) {
    live[born[at]] += requested[at];
    if (freed[at] <= events) { live[freed[at]] -= requested[at]; frees[freed[at] + 1]++; }
  }
  for (let moment = 1; moment <= events; moment++) live[moment] += live[moment - 1];
  for (let moment = 1; moment <= events + 1; moment++) frees[moment] += frees[moment - 1];
  const order = new Uint32Array(frees[events + 1]);
  const next = frees.slice();
  for (let at = 0; at < length; at++) if (freed[at] <= events) order[next[freed[at]]++] = at;
  const chunks = Math.ceil((events + 1) / CHUNK);
  const [peak, low] = [new Uint32Array(chunks), new Float64Array(chunks)];
  for (let chunk = 0; chunk < chunks; chunk++) {
    const [from, to] = [chunk * CHUNK, Math.min(events + 1, (chunk + 1) * CHUNK)];
    let [most, least] = [from, live[from]];
    for (let moment = from + 1; moment < to; moment++) {
      if (live[moment] > live[most]) most = moment;
      if (live[moment] < least) least = live[moment];
    }
    peak[chunk] = most;
    low[chunk] = least;
  }
  recording.history = { live, order, peak, low };
  return recording.history;
}

/// Returns for each pixel the moment with the most live bytes, those bytes, and the least. Pixel x has the moments
/// from `edges[x]` to before `edges[x + 1]`, and at least one.
function peaksOf(recording, edges) {
  const { live, peak, low } = historyOf(recording);
  const count = edges.length - 1;
  const found = { at: new Float64Array(count), live: new Float64Array(count), low: new Float64Array(count) };
  for (let x = 0; x < count; x++) {
    const from = Math.min(edges[x], live.length - 1);
    const to = Math.max(from + 1, Math.min(edges[x + 1], live.length));
    let [most, least] = [from, live[from]];
    const take = (moment) => { if (live[moment] > live[most]) most = moment; if (live[moment] < least) least = live[moment]; };
    let moment = from + 1;
    for (; moment < to && moment % CHUNK; moment++) take(moment);
    for (; moment + CHUNK <= to; moment += CHUNK) {
      const chunk = moment / CHUNK;
      if (live[peak[chunk]] > live[most]) most = peak[chunk];
      if (low[chunk] < least) least = low[chunk];
    }
    for (; moment < to; moment++) take(moment);
    found.at[x] = most; found.live[x] = live[most]; found.low[x] = least;
  }
  return found;
}

/// Returns the moments at which the reserved bytes change, and the bytes from then on.
function reservedOf(recording) {
  if (recording.reserved) return recording.reserved;
  const { segments: { length, born, gone, size }, events } = recording;
  const changes = new Map([[0, 0]]);
  const add = (moment, change) => changes.set(moment, (changes.get(moment) || 0) + change);
  for (let at = 0; at < length; at++) {
    add(born[at], size[at]);
    if (gone[at] <= events) add(gone[at], -size[at]);
  }
  const at = Float64Array.from(changes.keys()).sort();
  let sum = 0;
  const after = at.map((moment) => { sum += changes.get(moment); return sum; });
  recording.reserved = { at, after };
  return recording.reserved;
}

/// Returns the most reserved bytes at each pixel.
function reservedPeaks(recording, edges) {
  const { at, after } = reservedOf(recording);
  const most = new Float64Array(edges.length - 1);
  let place = placeOf(at, edges[0]);
  for (let x = 0; x < most.length; x++) {
    const to = Math.max(edges[x] + 1, edges[x + 1]);
    while (place + 1 < at.length && at[place + 1] <= edges[x]) place++;
    most[x] = after[place];
    for (let next = place + 1; next < at.length && at[next] < to; next++) most[x] = Math.max(most[x], after[next]);
  }
  return most;
}

/// Returns the layer of each row in a way of dividing, and the sums of all layers at every STORED-th moment.
function dividedOf(recording, by) {
  recording.divided ||= {};
  if (recording.divided[by]) return recording.divided[by];
  const { blocks, events, layers } = recording;
  const { order } = historyOf(recording);
  const count = layers[by].length;
  const of = by === "category" || by === "line" ? blocks[by] : Uint8Array.from({ length: blocks.length }, (_, at) => layerOf(recording, at, by));
  const points = Math.floor(events / STORED) + 1;
  const [sums, births, frees] = [new Float64Array(points * count), new Uint32Array(points), new Uint32Array(points)];
  const divided = { count, of, order, sums, births, frees };
  const now = { sums: new Float64Array(count), birth: 0, free: 0 };
  for (let point = 0; point < points; point++) {
    advance(blocks, divided, now, point * STORED);
    sums.set(now.sums, point * count);
    births[point] = now.birth;
    frees[point] = now.free;
  }
  recording.divided[by] = divided;
  return divided;
}

/// Applies all births and frees up to a moment.
function advance({ length, born, freed, requested }, { of, order }, now, moment) {
  const { sums } = now;
  let { birth, free } = now;
  for (; birth < length && born[birth] <= moment; birth++) sums[of[birth]] += requested[birth];
  for (; free < order.length && freed[order[free]] <= moment; free++) sums[of[order[free]]] -= requested[order[free]];
  now.birth = birth;
  now.free = free;
}

/// Returns the bytes of each layer at ascending moments: those of layer l at moment x are at [l * moments.length + x].
function layersAt(recording, by, moments) {
  const { blocks } = recording;
  const divided = dividedOf(recording, by);
  const { count } = divided;
  const found = new Float64Array(count * moments.length);
  const now = { sums: new Float64Array(count), birth: 0, free: 0 };
  let at = -1;
  for (let x = 0; x < moments.length; x++) {
    const point = Math.floor(moments[x] / STORED);
    if (at < 0 || point * STORED > at) {
      now.sums.set(divided.sums.subarray(point * count, (point + 1) * count));
      now.birth = divided.births[point];
      now.free = divided.frees[point];
    }
    at = moments[x];
    advance(blocks, divided, now, at);
    for (let layer = 0; layer < count; layer++) found[layer * moments.length + x] = now.sums[layer];
  }
  return found;
}

/// Returns the bytes of each layer at the peaks of the columns.
function seriesOf(recording, by) {
  const { series } = recording.layers;
  series.ready ||= {};
  series.ready[by] ||= series[by].map((text) => summed(unpacked(text)));
  return series.ready[by];
}

/// Returns the layers at each pixel from the series: those of the column with the most live bytes. The moments of
/// their peaks are written to `moments`.
function seriesLayers(recording, by, edges, moments) {
  const { column: { start, live_max: live, live_peak: peaks } } = recording;
  const layers = seriesOf(recording, by);
  const width = edges.length - 1;
  const found = new Float64Array(layers.length * width);
  for (let x = 0; x < width; x++) {
    let most = placeOf(start, edges[x]);
    for (let next = most + 1; next < start.length && start[next] < edges[x + 1]; next++) if (live[next] > live[most]) most = next;
    layers.forEach((layer, one) => { found[one * width + x] = layer[most]; });
    moments[x] = peaks[most];
  }
  return found;
}

/// Returns the layers in the order in which they are drawn, the steadiest at the bottom: steps in their own order.
function layerOrder(recording, by) {
  recording.orders ||= {};
  if (recording.orders[by]) return recording.orders[by];
  const { layers, events } = recording;
  const count = layers[by].length;
  const edges = Float64Array.from({ length: 257 }, (_, x) => Math.floor(x * (events + 1) / 256));
  const moments = new Float64Array(256);
  const found = isWhole(recording) ? layersAt(recording, by, peaksOf(recording, edges).at) : seriesLayers(recording, by, edges, moments);
  const steady = Array.from({ length: count }, (_, layer) => {
    const bytes = found.subarray(layer * 256, (layer + 1) * 256);
    return bytes.reduce((sum, number) => sum + number, 0) / 256 / Math.max(1, ...bytes);
  });
  const order = steady.map((_, layer) => layer);
  if (by !== "step") order.sort((a, b) => steady[b] - steady[a]);
  recording.orders[by] = order;
  return order;
}
