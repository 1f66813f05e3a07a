// Moves the slider, and reports what the page shows at each moment. The test appends this script to a copy
// of the page.
"use strict";

/// Returns the segments of the map: address, size, and the parts with their requested bytes.
function shownSegments(recording) {
  const parts = (segment) => segment.parts.map(({ from, size, state: name, block }) => [addressOf(recording, from), size, name, block === NOTHING ? 0 : recording.blocks.requested[block]]);
  return map.heaps.flatMap((heap) => heap.segments.map((segment) => [addressOf(recording, segment.address), segment.size, parts(segment)]));
}

/// Returns true if the segments and unmapped parts of each expandable range cover it without a gap.
function rangesAreCovered() {
  return map.heaps.every(({ bars }) => bars.filter((bar) => bar.whole !== bar).every((bar) => {
    const { address, size } = bar.whole;
    const inside = bars.filter(({ whole }) => whole === bar.whole);
    return inside[0].address === address && inside.reduce((at, { address, size }) => address === at ? at + size : NaN, address) === address + size;
  }));
}

function pressKey(target, key) {
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
}

/// Chooses a block by the keyboard, then its right neighbours by the rows of the table.
function useBlocks(recording) {
  const rows = () => [...byId("blocks").querySelectorAll("tbody tr")];
  const cells = (row) => [...row.cells].map((cell) => cell.textContent);
  const largest = rows().map(cells);
  pressKey(byId("segments-canvas"), "ArrowRight");
  const first = { text: byId("segments-text").textContent, rows: rows().map(cells) };
  const chosen = rows().findIndex((row) => row.className.includes("strong"));
  const next = rows().slice(chosen + 1).find((row) => row.tabIndex === 0);
  next.focus();
  pressKey(next, "Enter");
  const second = { text: byId("segments-text").textContent, address: addressOf(recording, recording.blocks.address[state.block]),
    isFocused: document.activeElement.className.includes("strong") && document.activeElement.cells[0].textContent === next.cells[0].textContent };
  const { block } = state;
  stepMoment(1);
  const isKept = state.block === (state.moment < recording.blocks.gone[block] ? block : NOTHING);
  return { largest, first, chosen, second, isKept };
}

/// Shows only three moments, as for a large recording, and moves the slider to the second.
function useFewMoments(recording) {
  recording.moments = [0, Math.floor(recording.events / 2), recording.events];
  choose(0);
  const slider = byId("moment");
  slider.value = "1";
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  return { isSecond: state.moment === recording.moments[1], max: slider.max, missing: byId("segments-missing").textContent };
}

const result = { width: innerWidth, dark: isDark(), recordings: [] };
try {
  recordings.forEach((recording, at) => {
    byId("recording").value = String(at);
    if (at > 0) byId("recording").dispatchEvent(new Event("change"));
    const slider = byId("moment");
    const shown = [];
    for (let part = 1; part < 8; part++) {
      slider.value = String(recording.blocks.born[Math.floor(recording.blocks.length * part / 8)]);
      slider.dispatchEvent(new Event("input", { bubbles: true }));
      shown.push({ moment: state.moment, value: slider.value, label: slider.getAttribute("aria-valuetext"), sums: byId("segments-sums").textContent,
        segments: shownSegments(recording), isCovered: rangesAreCovered(),
        unmapped: map.heaps.reduce((all, { bars, segments }) => all + bars.length - segments.length, 0) });
    }
    result.recordings.push({ name: recording.name, max: slider.max, shown, blocks: useBlocks(recording), few: useFewMoments(recording) });
  });
} catch (error) {
  problems.push(`the test: ${error.stack}`);
}
result.problems = problems;
parent.postMessage("RESULT" + JSON.stringify(result).replace(/[&<>]/g, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0")) + "TLUSER", "*");
