// Compares what the time line draws with sums over all rows of a recording. Run by the tests: `node drawn.js SCRIPTS SHEET`.
// The sums here are computed block by block, without the structures of the page.
"use strict";
const { readFileSync } = require("node:fs");
const vm = require("node:vm");

const [scripts, sheet] = process.argv.slice(2).map((path) => readFileSync(path, "utf8"));
const nothing = { matches: false, addEventListener() {} };
const page = { window: {}, matchMedia: () => nothing, getComputedStyle: () => ({ getPropertyValue: () => "#123456" }),
  document: { querySelectorAll: () => [{ textContent: sheet }], createElement: () => ({}), documentElement: null } };
const { state, timeline, recordings, waysOf, isWhole, frameOf, layerOrder, paintLayers, stackBlocks, paintBlocks, layerOf, TILE } = vm.runInNewContext(
  `${scripts}\n;({ state, timeline, recordings, waysOf, isWhole, frameOf, layerOrder, paintLayers, stackBlocks, paintBlocks, layerOf, TILE })`, page);
const [recording] = recordings;
const { blocks, events } = recording;
const problems = [];
const same = (found, wanted, what) => { if (found !== wanted && problems.length < 9) problems.push(`${what}: ${found} instead of ${wanted}`); };

/// Returns the rows for blocks that live at a moment.
const liveAt = (moment) => Array.from({ length: blocks.length }, (_, at) => at).filter((at) => blocks.born[at] <= moment && moment < blocks.freed[at]);
const bytesOf = (places) => places.reduce((sum, at) => sum + blocks.requested[at], 0);

/// Returns the number of rows whose middle is in a range of bytes.
function rowsIn(from, to, perRow, height) {
  let rows = 0;
  for (let row = 0; row < height; row++) { const middle = (row + 0.5) * perRow; if (middle >= from && middle < to) rows++; }
  return rows;
}

function checkLayers(way, frame, x, image) {
  const { width, height } = image;
  const live = liveAt(frame.at[x]);
  const count = recording.layers[way].length;
  const wanted = Array.from({ length: count }, (_, layer) => bytesOf(live.filter((at) => layerOf(recording, at, way) === layer)));
  wanted.forEach((sum, layer) => same(frame.stacks[layer * width + x], sum, `${way} ${layer} at ${frame.at[x]}`));
  let below = 0;
  for (const layer of layerOrder(recording, way)) {
    const drawn = Array.from({ length: height }, (_, y) => image.pixels[y * width + x]).filter((pixel) => pixel === layer + 1 || pixel === layer + 1001).length;
    same(drawn, rowsIn(below, below + wanted[layer], frame.perRow, height), `rows of ${way} ${layer} at ${frame.at[x]}`);
    below += wanted[layer];
  }
}

function checkBlocks(frame, x, stacked, image) {
  const { width, height } = image;
  const live = liveAt(frame.at[x]).filter((at) => blocks.requested[at] >= stacked.leastBytes);
  same(stacked.tops[x], bytesOf(live), `the blocks at ${frame.at[x]}`);
  const owners = Array.from({ length: height }, (_, y) => stacked.owners[y * width + x]).filter(Boolean);
  same(owners.every((owner) => live.includes(owner - 1)), true, `the owners at ${frame.at[x]}`);
  // A block of more than a row has as many rows as its bytes, up to the rounding of its two ends.
  for (const at of live) {
    const rows = owners.filter((owner) => owner === at + 1).length;
    same(Math.abs(rows - blocks.requested[at] / frame.perRow) < 1 + 1e-6, true, `the rows of block ${at}`);
  }
  const painted = Array.from({ length: height }, (_, y) => image.pixels[y * width + x]).filter(Boolean).length;
  same(painted, rowsIn(0, frame.live[x], frame.perRow, height), `the painted rows at ${frame.at[x]}`);
}

/// Draws the chosen part in one way, and checks some of its columns.
function check(way, from, to) {
  const [inner, height] = [300, 180];
  Object.assign(state, { recording, way, from, to, axis: "events" });
  const frame = frameOf(recording, inner, inner + timeline.left + timeline.right);
  const most = Math.max(...frame.live, 1) * 1.04;
  frame.perRow = most / height;
  const image = { pixels: new Uint32Array(inner * height), width: inner, height };
  let stacked = null;
  if (way === "block") {
    stacked = stackBlocks(recording, frame.at, height, frame.perRow);
    paintBlocks(image, stacked, frame.live, frame.perRow, { keyOf: () => 0, plain: [7, 7, 7], edge: [8] }, new Uint32Array(TILE * TILE).fill(9));
  } else {
    const tiles = recording.layers[way].map((_, layer) => ({ pixels: new Uint32Array(TILE * TILE).fill(layer + 1), edge: layer + 1001 }));
    paintLayers(image, frame.stacks, layerOrder(recording, way), tiles, frame.perRow);
  }
  for (let x = 0; x < inner; x += 23) {
    if (way !== "block") {
      const sum = recording.layers[way].reduce((all, _, layer) => all + frame.stacks[layer * inner + x], 0);
      same(sum, frame.live[x], `the layers by ${way} at ${frame.at[x]}`);
    }
    if (!isWhole(recording)) continue;
    // No moment of the pixel has more live bytes than the one that is drawn.
    const moments = [];
    for (let moment = frame.edges[x]; moment < Math.max(frame.edges[x] + 1, frame.edges[x + 1]); moment += 1 + Math.floor((frame.edges[x + 1] - frame.edges[x]) / 7)) moments.push(moment);
    same(moments.every((moment) => bytesOf(liveAt(moment)) <= frame.live[x]), true, `the peak of pixel ${x}`);
    same(frame.live[x], bytesOf(liveAt(frame.at[x])), `the live bytes at ${frame.at[x]}`);
    if (way === "block") checkBlocks(frame, x, stacked, image); else checkLayers(way, frame, x, image);
  }
}

const zooms = [[0, 1], [0.1, 0.6], [0.41, 0.43], [0.5, 0.5 + 20 / Math.max(20, events)]];
for (const [way] of waysOf(recording)) for (const [from, to] of zooms) check(way, from, to);
// The peak of live bytes is drawn at every zoom level.
Object.assign(state, { recording, way: "block" });
for (const span of [1, 0.1, 0.003]) {
  const middle = recording.peak_live.moment / Math.max(1, events);
  [state.from, state.to] = [Math.max(0, middle - span / 2), Math.min(1, middle + span / 2)];
  same(Math.max(...frameOf(recording, 250, 250 + timeline.left + timeline.right).live), recording.peak_live.bytes, `the peak within ${span}`);
}
console.log(JSON.stringify({ problems, ways: waysOf(recording).map(([way]) => way), whole: isWhole(recording) }));
