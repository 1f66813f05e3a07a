// Unit tests of the views' scripts. Run by the tests: `node views.js SCRIPTS SHEET`. The sums here are computed
// block by block.
"use strict";
const { readFileSync } = require("node:fs");
const vm = require("node:vm");
const assert = require("node:assert");

const [scripts, sheet] = process.argv.slice(2).map((path) => readFileSync(path, "utf8"));
const nothing = { matches: false, addEventListener() {} };
const page = { window: {}, matchMedia: () => nothing, getComputedStyle: () => ({ getPropertyValue: () => "#123456" }), URLSearchParams, console,
  document: { querySelectorAll: () => [{ textContent: sheet }], createElement: () => ({}), documentElement: null } };
const names = "state, recordings, rangeBlocks, rangeHolders, isRun, holdersAt, comparedRows, comparedSides, csvText, SvgPen, svgPen, svgText, escapedXml, forgetViews, NEVER";
const { state, recordings, rangeBlocks, rangeHolders, isRun, holdersAt, comparedRows, comparedSides, csvText, svgPen, svgText, forgetViews } = vm.runInNewContext(`${scripts}\n;({ ${names} })`, page);
const [recording] = recordings;
const { blocks, events } = recording;
state.recording = recording;
forgetViews();
const rows = Array.from({ length: blocks.length }, (_, at) => at);
const bytesOf = (places) => places.reduce((sum, at) => sum + blocks.requested[at], 0);
const found = { runs: rows.filter((at) => isRun(recording, at)).length, ranges: 0 };

// Live bytes at the end of a range are those at its begin, plus what it allocates, minus what it frees.
const moments = recording.moments || [0, 1, Math.floor(events / 3), Math.floor(events / 2), events - 1, events];
for (const from of moments.slice(0, 40)) {
  for (const to of moments.slice(-40)) {
    if (from >= to) continue;
    const [allocated, freed, lived] = ["allocated", "freed", "lived"].map((way) => rangeBlocks(recording, [from, to], way));
    const live = (moment) => rows.filter((at) => !isRun(recording, at) && blocks.born[at] <= moment && moment < blocks.freed[at]);
    assert.equal(bytesOf(live(from)) + bytesOf(allocated) - bytesOf(freed), bytesOf(live(to)), `${from} to ${to}`);
    const wanted = live(from).filter((at) => blocks.freed[at] > to);
    assert.deepEqual([...lived], wanted, `${from} to ${to}`);
    assert.equal(rangeHolders(recording, [from, to], "allocated").bytes, bytesOf(allocated));
    found.ranges++;
  }
}

// Each side of a comparison adds up, and the difference of a side with itself is zero.
for (const moment of moments.slice(-3)) {
  const side = { recording, moment, holders: holdersAt(recording, moment) };
  const compared = comparedRows([side, side]);
  assert.equal(compared.reduce((sum, row) => sum + row.bytes[0], 0), side.holders.bytes);
  assert.ok(compared.every(({ bytes: [one, other] }) => one === other));
}
if (recording.holders.length > 1) {
  const sides = comparedSides();
  assert.deepEqual([...sides.map(({ key }) => key)], ["0", "1"]);
  const sums = [0, 1].map((side) => comparedRows(sides).reduce((sum, row) => sum + row.bytes[side], 0));
  assert.deepEqual(sums, [...sides.map(({ holders }) => holders.bytes)]);
}

// Cells of a CSV are quoted, and no text of a recording becomes a formula. Numbers stay numbers.
assert.equal(csvText([["a,b", 'say "x"', "two\nlines", 7, -7, null, undefined]]), '"a,b","say ""x""","two\nlines",7,-7,,\r\n');
for (const text of ["=1+1", "+1", "-1", "@A1", "\t=1", "\r=1"]) assert.ok(csvText([[text]]).replace('"', "").startsWith("'"), text);

// Texts of an SVG are inert; unknown calls and patterns are noted.
const pen = svgPen();
pen.fillText("</text><script>alert(1)</script>&\u0000\"", 1, 2);
pen.fillStyle = 'red" onload="alert(1)';
pen.fillRect(3, 4, -2, 5);
const text = svgText(pen, 10, 10);
assert.ok(!/<script|onload="|\u0000/.test(text), text);
assert.ok(text.includes('x="1" y="4" width="2" height="5"'), text);
assert.equal(pen.isLacking, false);
pen.putImageData({}, 0, 0);
assert.equal(pen.isLacking, true);
const other = svgPen();
other.fillStyle = {};
other.fillRect(0, 0, 1, 1);
assert.equal(other.isLacking, true);

console.log(JSON.stringify(found));
