// Paints layers and blocks into an array of pixels, from the bottom up. Each column of pixels is one moment, and its
// heights are exact: row r belongs to the layer that contains the byte in the middle of the row. Uses no element of
// the page, so that tests can count pixels.

/// Returns whether a pixel has the ink of a hatch.
function isInked(pattern, x, y) {
  const rising = (x + y) % 8 === 0, falling = (x - y + 8) % 8 === 0;
  switch (pattern) {
    case "rising": return rising;
    case "falling": return falling;
    case "crossed": return rising || falling;
    case "dots": return x % 4 === 0 && y % 4 === 0;
    case "level": return y % 6 === 0;
    case "upright": return x % 6 === 0;
    default: return false;
  }
}

/// Returns a colour as red, green and blue.
function rgbOf(text) {
  const digits = text.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16) || 0);
}

/// Returns a pixel. `shade` below 0 darkens the colour, above 0 lightens it.
function pixel([red, green, blue], shade = 0) {
  const of = (part) => Math.round(shade < 0 ? part * (1 + shade) : part + (255 - part) * shade);
  return (255 << 24 | of(blue) << 16 | of(green) << 8 | of(red)) >>> 0;
}

/// Returns true if a colour is so dark that its hatch must be lighter.
const isDeep = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue < 90;

/// The width and the height of the tile of a hatch; a multiple of the distances of all hatches.
const TILE = 24;

/// Returns the pixels of a layer's tile, and that of its upper edge.
function tileOf({ colour: text, pattern }) {
  const colour = rgbOf(text);
  const [plain, ink] = [pixel(colour), pixel(colour, isDeep(colour) ? 0.35 : -0.42)];
  return { pixels: Uint32Array.from({ length: TILE * TILE }, (_, at) => isInked(pattern, at % TILE, Math.floor(at / TILE)) ? ink : plain), edge: pixel(colour, -0.5) };
}

/// Returns the row at which a height of bytes ends, counted from the bottom.
const rowOf = (bytes, perRow, height) => Math.min(height, Math.floor(bytes / perRow + 0.5));

/// Paints layers. `stacks` has the bytes of layer l in column x at [l * width + x], `order` the layers from the
/// bottom up, `tiles` the tile of each layer.
function paintLayers({ pixels, width, height }, stacks, order, tiles, perRow) {
  for (let x = 0; x < width; x++) {
    let [sum, from] = [0, 0];
    for (const layer of order) {
      sum += stacks[layer * width + x];
      const to = rowOf(sum, perRow, height);
      const tile = tiles[layer].pixels;
      for (let row = from; row < to; row++) {
        const y = height - 1 - row;
        pixels[y * width + x] = tile[y % TILE * TILE + x % TILE];
      }
      // The outline separates layers also for readers who do not distinguish their colours.
      if (to - from > 2) pixels[(height - to) * width + x] = tiles[layer].edge;
      from = to;
    }
  }
}

/// Returns the layer at a height of a column, or -1.
function layerAtBytes(stacks, order, width, x, bytes) {
  let sum = 0;
  for (const layer of order) {
    sum += stacks[layer * width + x];
    if (bytes < sum) return layer;
  }
  return -1;
}

/// The most pairs of a block and a column that are painted in one picture.
const PAIRS_MOST = 2e6;

/// Returns the rows in the order in which they are stacked: by their births, so that only a free moves what is above
/// it. Of those from before the first event the longest lives come first.
function stackOrder(recording) {
  if (recording.stackOrder) return recording.stackOrder;
  const { length, born, freed, count } = recording.blocks;
  const order = new Uint32Array(length);
  let before = 0, kept = 0;
  for (let at = 0; at < length; at++) if (count[at] === 1) order[kept++] = at;
  while (before < kept && born[order[before]] === 0) before++;
  order.subarray(0, before).sort((a, b) => freed[b] - freed[a] || a - b);
  recording.stackOrder = order.subarray(0, kept);
  return recording.stackOrder;
}

/// Returns the blocks that live at some of the ascending `moments`, in the order in which they are stacked, with the
/// columns of pixels where each begins and ends. If there are too many, those below a size are left out.
function blocksOver(recording, moments) {
  const { blocks: { born, freed, requested }, events } = recording;
  const width = moments.length;
  // The first column at or after each moment, for the moments of the picture.
  const begin = moments[0], last = moments[width - 1];
  const columns = new Uint16Array(last - begin + 1);
  for (let x = 0, moment = begin; moment <= last; moment++) { while (moments[x] < moment) x++; columns[moment - begin] = x; }
  const order = stackOrder(recording);
  const found = recording.found ||= { places: new Uint32Array(order.length), from: new Uint16Array(order.length), to: new Uint16Array(order.length) };
  const { places, from, to } = found;
  // The pairs of blocks and columns, by the power of two of the size.
  const pairs = new Float64Array(64);
  const until = Math.min(last, events);
  let count = 0;
  for (let one = 0; one < order.length; one++) {
    const at = order[one];
    if (born[at] > last) break;
    if (freed[at] <= begin || requested[at] === 0) continue;
    const first = born[at] <= begin ? 0 : columns[born[at] - begin];
    const end = freed[at] > until ? width : columns[freed[at] - begin];
    if (end <= first) continue;
    places[count] = at; from[count] = first; to[count++] = end;
    pairs[powerOf(requested[at])] += end - first;
  }
  let [power, sum] = [64, 0];
  while (power > 0 && sum + pairs[power - 1] <= PAIRS_MOST) sum += pairs[--power];
  return { places, from, to, count, leastBytes: power === 0 ? 0 : 2 ** power };
}

/// Returns the power of two that a size reaches.
const powerOf = (size) => size < 4294967296 ? 31 - Math.clz32(size) : 63 - Math.clz32(size / 4294967296);

/// Stacks the blocks in each column, and returns the owner of each pixel (a row for a block plus 1), the live bytes
/// of the painted blocks in each column, and the least size that is painted.
function stackBlocks(recording, moments, height, perRow) {
  const { requested } = recording.blocks;
  const width = moments.length;
  const { places, from, to, count, leastBytes } = blocksOver(recording, moments);
  const owners = new Uint32Array(width * height);
  // The first column of each row for a block, for its outline.
  const first = recording.firstColumns ||= new Uint16Array(requested.length);
  // The bytes and the rows that are stacked in each column so far.
  const [tops, rows] = [new Float64Array(width), new Int32Array(width)];
  const scale = 1 / perRow;
  for (let one = 0; one < count; one++) {
    const size = requested[places[one]];
    if (size < leastBytes) continue;
    const owner = places[one] + 1;
    first[places[one]] = from[one];
    const last = to[one];
    for (let x = from[one]; x < last; x++) {
      const above = tops[x] + size;
      tops[x] = above;
      // As `rowOf`, without a call: this is the innermost loop.
      const end = (above * scale + 0.5) | 0;
      let row = rows[x];
      if (row === end) continue;
      rows[x] = end;
      for (; row < end && row < height; row++) owners[(height - 1 - row) * width + x] = owner;
    }
  }
  return { owners, first, tops, leastBytes, count };
}

/// Paints stacked blocks. `colours` has the number of a block's colour, the three shades of its area, and its outline.
/// Above the blocks, up to the live bytes, is the area of those that are not painted one by one.
function paintBlocks({ pixels, width, height }, { owners, first }, live, perRow, { keyOf, plain, edge }, rest) {
  const ends = Int32Array.from(live, (bytes) => height - rowOf(bytes, perRow, height));
  let owner = 0, key = 0;
  for (let y = 0; y < height; y++) {
    for (let x = 0, at = y * width; x < width; x++, at++) {
      const one = owners[at];
      if (one === 0) {
        if (y >= ends[x]) pixels[at] = rest[y % TILE * TILE + x % TILE];
        continue;
      }
      if (one !== owner) { owner = one; key = keyOf(one - 1); }
      // An outline at the upper edge, and where the block begins, if it has more pixels there.
      const isNext = x + 1 < width && owners[at + 1] === one;
      const isBehind = x > 0 && owners[at - 1] === one;
      const isTop = (isNext || isBehind) && (y === 0 || owners[at - width] !== one) && y + 1 < height && owners[at + width] === one;
      const isLeft = isNext && !isBehind && x > 0 && first[one - 1] === x;
      pixels[at] = isTop || isLeft ? edge[key] : plain[3 * key + (one - 1) % 3];
    }
  }
}
