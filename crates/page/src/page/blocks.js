// The blocks at the chosen moment as a table, and the neighbours of each.

/// The number of blocks that are listed if none is chosen, and of neighbours listed on each side of the
/// chosen block.
const LARGEST = 10, BESIDE = 5;

/// Returns all parts of the address range of a segment in address order, with the heap and the segment of
/// each. The range of an expandable segment has unmapped parts.
function partsAround(heap, { whole }) {
  return heap.bars.filter((bar) => bar.whole === whole).flatMap((segment) => segment.parts.map((part) => ({ heap, segment, part })));
}

/// Returns the chosen block with its part, segment and heap, or undefined.
function chosenPart() {
  if (state.block === NOTHING) return undefined;
  for (const heap of map.heaps) {
    for (const segment of heap.segments) {
      const part = segment.parts.find(({ block }) => block === state.block);
      if (part) return { heap, segment, part };
    }
  }
  return undefined;
}

function partText(found) {
  const { recording } = state;
  if (!found) return "none (edge of the segment)";
  const { part: { size, state: name, block } } = found;
  if (block === NOTHING) return `${exactly(size)} ${name}`;
  const count = recording.blocks.count[block];
  return `${exactly(size)} ${name}, ${count > 1 ? `${grouped(count)} small blocks together` : callerOf(recording, recording.blocks.stack[block])}`;
}

/// Returns one line about each neighbour of a part.
function besideLines(heap, segment, part) {
  const around = partsAround(heap, segment);
  const at = around.findIndex((found) => found.part === part);
  return [`left neighbour: ${partText(around[at - 1])}`, `right neighbour: ${partText(around[at + 1])}`];
}

/// Describes the chosen block and its neighbours in the text below the map.
function sayBlock() {
  const found = chosenPart();
  byId("segments-text").textContent = found
    ? [...blockLines(state.recording, state.block, state.moment), ...besideLines(found.heap, found.segment, found.part)].join("; ") : "";
}

/// Lists the chosen block between its neighbours, or the largest blocks if none is chosen. The rows can be
/// focused; a click or the Enter key chooses the block of a row.
function showBlocks() {
  const { recording } = state;
  const { blocks } = recording;
  const chosen = chosenPart();
  let parts = chosen ? partsAround(chosen.heap, chosen.segment)
    : map.heaps.flatMap((heap) => heap.segments.flatMap((segment) => segment.parts.map((part) => ({ heap, segment, part }))));
  let note;
  if (chosen) {
    const at = parts.findIndex(({ part }) => part === chosen.part);
    const isLong = parts.length > 2 * BESIDE + 1;
    note = `The chosen block between its neighbours, in address order${isLong ? `, at most ${BESIDE} on each side` : ""}, ${segmentText(chosen)}.`;
    parts = parts.slice(Math.max(0, at - BESIDE), at + BESIDE + 1);
  } else {
    parts = parts.filter(({ part }) => part.block !== NOTHING).sort((a, b) => b.part.size - a.part.size);
    note = `${parts.length > LARGEST ? `The ${LARGEST} largest of ${grouped(parts.length)} blocks` : plural(parts.length, "block", "blocks")}. Choose one to list its neighbours.`;
    parts = parts.slice(0, LARGEST);
  }
  const rows = parts.map(({ heap, part }) => {
    const { block } = part;
    const isSingle = block !== NOTHING && blocks.count[block] === 1;
    return {
      cells: [addressOf(recording, part.from), bytes(part.size), block === NOTHING ? "" : bytes(blocks.requested[block]), part.state,
        !isSingle ? "" : blocks.born[block] === 0 ? "before the recording" : grouped(blocks.born[block]),
        !isSingle ? "" : blocks.freed[block] === NEVER ? "never" : grouped(blocks.freed[block]),
        ...(chosen ? [] : [heapName(recording, heap.heap)]),
        isSingle ? callerOf(recording, blocks.stack[block]) : block === NOTHING ? "" : `${grouped(blocks.count[block])} small blocks together`],
      strong: block !== NOTHING && block === state.block,
      act: block === NOTHING ? null : () => { chooseBlock(block, true); byId("blocks").querySelector("tr.strong")?.focus(); },
    };
  });
  const heading = [["address", false], ["size", false], ["requested", false], ["state", true], ["allocated at event", false], ["freed at event", false],
    ...(chosen ? [] : [["stream", true]]), ["requested by", true]];
  const all = chosen ? [press("show the largest blocks", "show the largest blocks", () => chooseBlock(NOTHING, false))] : [];
  byId("blocks").replaceChildren(element("p", { class: "quiet" }, note, " ", ...all), ...(rows.length ? [table(heading, rows)] : []));
}

function segmentText({ heap, segment }) {
  return `${segment.expandable ? "expandable range" : "segment"} of ${bytes(segment.whole.size)}, ${heapName(state.recording, heap.heap)}`;
}
