// The holders over a range of moments: blocks that were allocated in it, freed in it, or lived through it.

const RANGE_WAYS = { allocated: "allocated in the range", freed: "freed in the range", lived: "of blocks that lived through the range" };

/// Returns true if a row represents small blocks at one moment only, whose lives the page does not have.
function isRun(recording, at) {
  const { blocks, moments } = recording;
  if (blocks.count[at] > 1) return true;
  if (!moments || blocks.stack[at] >= 0 || blocks.gone[at] !== blocks.born[at] + 1 || !recording.blocks.runs) return false;
  return moments[placeOf(moments, blocks.born[at])] === blocks.born[at];
}

/// Returns the blocks of a range in one of the ways. An event of the range changes the bytes after its first
/// moment, and at its last one at the latest.
function rangeBlocks(recording, [from, to], way) {
  const { blocks } = recording;
  const isIn = {
    allocated: (at) => blocks.born[at] > from,
    freed: (at) => blocks.freed[at] > from && blocks.freed[at] <= to,
    lived: (at) => blocks.born[at] <= from && blocks.freed[at] > to,
  }[way];
  const found = [];
  for (let at = 0; at < blocks.length && blocks.born[at] <= to; at++) if (isIn(at) && !isRun(recording, at)) found.push(at);
  return found;
}

/// Returns the holders of a range. The ages are the lives of the blocks in events; -1 if a block lived before
/// the recording or is not freed in it.
function rangeHolders(recording, range, way) {
  const { blocks } = recording;
  const lifeOf = (at) => blocks.born[at] === 0 || blocks.freed[at] === NEVER ? -1 : blocks.freed[at] - blocks.born[at];
  return { name: "the range", range, ...holdersOf(recording, rangeBlocks(recording, range, way), lifeOf) };
}

function rangeSentence(recording, { range: [from, to], blocks, bytes: size }) {
  const were = { allocated: "were allocated", freed: "were freed", lived: "lived all the time" }[state.rangeWay];
  const change = bytesAt(recording, to).live - bytesAt(recording, from).live;
  const changed = change === 0 ? "live bytes are the same at both ends" : `live bytes ${change > 0 ? "grow" : "fall"} by ${bytes(Math.abs(change))}`;
  const time = recording.has_times ? ` (${duration(timeOf(recording, to) - timeOf(recording, from))})` : "";
  return `${plural(blocks, "block", "blocks")} of ${bytes(size)} ${were} between event ${grouped(from)} and event ${grouped(to)}${time}; ${changed}`;
}

/// Returns a text about the blocks of a range that the page does not have.
function missingInRange(recording, [from, to], way) {
  const { blocks, moments } = recording;
  if (!moments) return "";
  let known = 0;
  for (let at = 0; at < blocks.length; at++) known += blocks.born[at] > 0 && !isRun(recording, at);
  const isWhole = way === "lived" && moments[placeOf(moments, to)] >= from;
  const which = isWhole ? "Small blocks that the page draws together are missing here."
    : `Of ${grouped(recording.requests)} requests the page has ${plural(known, "block", "blocks")}: the largest, and those that live at one of ${grouped(moments.length)} moments. The others are missing here.`;
  return `The recording is large. ${which}`;
}

/// Returns the range to begin with: what the time line shows, or the second half if it shows all.
function firstRange(recording) {
  if (state.from > 0 || state.to < 1) return [momentOf(recording, state.from), momentOf(recording, state.to)];
  return [recording.events / 2, recording.events];
}

/// Chooses a range from any two numbers.
function chooseRange(first, last) {
  setRange(Number.isFinite(first) ? first : 0, Number.isFinite(last) ? last : state.recording.events);
}

/// Returns the switch between the ways, and fields for both ends of the range.
function rangeControls() {
  const { events } = state.recording;
  const field = (end) => element("input", { type: "number", min: "0", max: String(events), step: "1", id: `range-${end ? "to" : "from"}`, value: String(state.range?.[end] ?? ""),
    onchange: ({ target }) => { const range = state.range || [0, events]; chooseRange(end ? range[0] : Number(target.value), end ? Number(target.value) : range[1]); } });
  const label = (text, end) => element("label", {}, `${text} `, field(end));
  return [
    choice("blocks", [["allocated", "allocated in it"], ["freed", "freed in it"], ["lived", "lived through it"]], () => state.rangeWay,
      (way) => { state.rangeWay = way; drawHolders(); }),
    element("span", { class: "group" }, label("from event", 0), label("to event", 1)),
    press("no range", "no range: show a moment", () => setRange(null)),
  ];
}

/// Shows the holders of the range after it has changed, or those of a moment if there is none.
function followRange() {
  if (state.range) state.holders = "range";
  else if (state.holders === "range") state.holders = "0";
  showHoldersBar();
  drawHolders();
  showComparison();
}
