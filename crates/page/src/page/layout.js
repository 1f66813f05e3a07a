// The layout of the segments at a moment, from the rows of the data: heaps, segments, and the parts of each. Draws
// nothing.

/// Returns the layout at a moment: the heaps, their segments, and the parts of each segment in address
/// order.
function layoutAt(recording, moment) {
  const { segments, blocks } = recording;
  const found = aliveAt(segments, moment).map((at) => ({
    address: segments.address[at], size: segments.size[at], heap: segments.heap[at],
    large: segments.large[at] === 1, expandable: segments.expandable[at] === 1,
  })).sort((a, b) => a.address - b.address);
  const joined = [];
  for (const segment of found) {
    const last = joined[joined.length - 1];
    const goesOn = last && last.expandable && segment.expandable && last.heap === segment.heap && last.large === segment.large;
    if (goesOn && last.address + last.size === segment.address) last.size += segment.size;
    else joined.push(segment);
  }
  const alive = aliveAt(blocks, moment).sort((a, b) => blocks.address[a] - blocks.address[b]);
  let next = 0;
  for (const segment of joined) {
    const end = segment.address + segment.size;
    while (next < alive.length && blocks.address[alive[next]] < segment.address) next++;
    const inside = [];
    while (next < alive.length && blocks.address[alive[next]] < end) inside.push(alive[next++]);
    fill(recording, segment, inside, moment);
  }
  const heaps = new Map();
  for (const segment of joined) {
    const key = segment.heap;
    if (!heaps.has(key)) heaps.set(key, { heap: segment.heap, segments: [], bars: [], size: 0, live: 0, requested: 0, waiting: 0, rest: 0, idle: 0 });
    const heap = heaps.get(key);
    heap.segments.push(segment);
    for (const name of ["size", "live", "requested", "waiting"]) heap[name] += segment[name];
    heap[segment.used ? "rest" : "idle"] += segment.free;
  }
  for (const bar of [...joined, ...unmappedIn(recording, joined)]) heaps.get(bar.heap).bars.push(bar);
  const all = [...heaps.values()].sort((a, b) => b.size - a.size);
  all.forEach((heap) => heap.bars.sort((a, b) => b.whole.size - a.whole.size || a.whole.address - b.whole.address || a.address - b.address));
  return all;
}

/// Returns the address ranges of the expandable segments, by address: the pages of one heap that are mapped
/// at any moment, adjacent ones joined.
function expandableRanges(recording) {
  if (recording.ranges) return recording.ranges;
  const { segments } = recording;
  const pages = [...segments.born.keys()].filter((at) => segments.expandable[at] === 1).sort((a, b) => segments.address[a] - segments.address[b]);
  const last = new Map();
  recording.ranges = [];
  for (const at of pages) {
    const [address, heap, large] = [segments.address[at], segments.heap[at], segments.large[at] === 1];
    const end = address + segments.size[at];
    const range = last.get(`${heap} ${large}`);
    if (range && address <= range.address + range.size) range.size = Math.max(range.size, end - range.address);
    else {
      last.set(`${heap} ${large}`, { address, size: end - address, heap, large });
      recording.ranges.push(last.get(`${heap} ${large}`));
    }
  }
  return recording.ranges;
}

/// Returns the unmapped parts of the expandable segments that have a mapped page. Sets `whole` of each
/// segment, which is the address range that contains it. The segments are in address order.
function unmappedIn(recording, segments) {
  const unmapped = [];
  segments.forEach((segment) => { segment.whole = segment; });
  const addresses = segments.map(({ address }) => address);
  for (const range of segments.length ? expandableRanges(recording) : []) {
    const end = range.address + range.size;
    const gaps = [];
    let at = range.address, isMapped = false;
    const gap = (to) => {
      if (to > at) gaps.push({ address: at, size: to - at, heap: range.heap, large: range.large, expandable: true, whole: range,
        parts: [{ from: at, size: to - at, block: NOTHING, state: "unmapped" }] });
    };
    for (let next = placeOf(addresses, range.address); next < segments.length && addresses[next] < end; next++) {
      const segment = segments[next];
      if (segment.address + segment.size <= range.address) continue;
      gap(segment.address);
      at = Math.max(at, segment.address + segment.size);
      if (!segment.expandable || segment.heap !== range.heap || segment.large !== range.large) continue;
      segment.whole = range;
      isMapped = true;
    }
    gap(end);
    if (isMapped) unmapped.push(...gaps);
  }
  return unmapped;
}

/// Adds the parts to a segment: its blocks and the free ranges between them.
function fill(recording, segment, inside, moment) {
  const { blocks } = recording;
  Object.assign(segment, { parts: [], live: 0, requested: 0, waiting: 0, free: 0, ranges: 0, largest: 0, used: inside.length > 0 });
  let at = segment.address;
  const free = (to) => {
    if (to <= at) return;
    segment.parts.push({ from: at, size: to - at, block: NOTHING, state: "free" });
    segment.free += to - at;
    segment.ranges++;
    segment.largest = Math.max(segment.largest, to - at);
  };
  for (const block of inside) {
    const from = blocks.address[block];
    free(from);
    const isLive = moment < blocks.freed[block];
    segment.parts.push({ from, size: blocks.size[block], block, state: isLive ? "live" : "waiting", apart: false });
    segment[isLive ? "live" : "waiting"] += blocks.size[block];
    if (isLive) segment.requested += blocks.requested[block];
    at = Math.max(at, from + blocks.size[block]);
  }
  free(segment.address + segment.size);
  markApart(segment);
}

/// Marks blocks between two free ranges if together they are smaller than each of these ranges.
function markApart(segment) {
  const { parts } = segment;
  segment.keepers = [];
  let before = -1;
  for (let at = 0; at < parts.length; at++) {
    if (parts[at].state !== "free") continue;
    if (before >= 0) {
      const run = parts.slice(before + 1, at);
      const size = run.reduce((sum, part) => sum + part.size, 0);
      if (size < Math.min(parts[before].size, parts[at].size)) {
        run.forEach((part) => { part.apart = true; });
        segment.keepers.push({ run, size, before: parts[before].size, behind: parts[at].size });
      }
    }
    before = at;
  }
}
