// The holders of the live bytes as a table: at a moment, or over a range.

/// Groups blocks by the code that requested them, without stacks by stream and size. `ageOf` returns the
/// age of a block, or -1 if it is not known.
function holdersOf(recording, places, ageOf) {
  const { blocks } = recording;
  const { caller } = recording.stacks;
  const found = new Map();
  const byStack = places.some((at) => blocks.stack[at] >= 0 || blocks.stack[at] === LEFT_OUT);
  const keyOf = (stack) => stack < 0 || state.allFrames ? stack : `caller ${caller[stack]}`;
  for (const at of places) {
    const [stream] = recording.heaps[blocks.heap[at]];
    const key = byStack ? keyOf(blocks.stack[at]) : `${stream} ${blocks.requested[at]}`;
    const age = ageOf(at);
    const row = found.get(key) || { stack: blocks.stack[at], stream, each: blocks.requested[at], blocks: 0, bytes: 0, newest: age, oldest: age };
    row.blocks += blocks.count[at]; row.bytes += blocks.requested[at];
    row.newest = row.newest < 0 || age < 0 ? Math.max(row.newest, age) : Math.min(row.newest, age);
    row.oldest = row.oldest < 0 || age < 0 ? -1 : Math.max(row.oldest, age);
    if (row.each !== blocks.requested[at]) row.each = 0;
    found.set(key, row);
  }
  // Rows with a stack come before rows without one.
  const last = (row) => byStack && row.stack < 0 ? -row.stack : 0;
  const list = [...found.values()].sort((a, b) => last(a) - last(b) || b.bytes - a.bytes);
  const sum = (name) => list.reduce((all, row) => all + row[name], 0);
  return { bytes: sum("bytes"), blocks: sum("blocks"), by_stack: byStack, list, places, rest_bytes: 0, rest_blocks: 0 };
}

/// Selects the blocks that live at a moment. Their ages are in requests; those of blocks from before the
/// recording are not known.
function holdersAt(recording, moment) {
  const { blocks } = recording;
  const live = aliveAt(blocks, moment).filter((at) => moment < blocks.freed[at]);
  const until = requestsUntil(recording, moment);
  const ageOf = (at) => blocks.born[at] === 0 ? -1 : until - requestsUntil(recording, blocks.born[at]);
  return { moment, ...holdersOf(recording, live, ageOf) };
}

/// Returns the holders that are shown: those of the chosen range, those at a moment that the data lists, or
/// those at the chosen moment.
function holdersNow(recording) {
  if (state.holders === "range" && state.range) return rangeHolders(recording, state.range, state.rangeWay);
  const listed = recording.holders[Number(state.holders)];
  // Not used when all frames are shown, because the listed holders are grouped by the program's code.
  if (listed && (listed.moment == null || !(state.allFrames && listed.by_stack))) return listed;
  return { name: listed ? listed.name : "the chosen moment", ...holdersAt(recording, listed ? listed.moment : state.moment) };
}

/// Returns true if a row of the table matches the search, in its text or in one of its frames.
function isRowFound(recording, holders, row) {
  if (state.search === "") return true;
  const texts = holders.by_stack ? [callerOf(recording, row.stack), ...framesOf(recording, row.stack).map(lineOf)] : [whatOf(recording, row)];
  return texts.some((text) => text.toLowerCase().includes(state.search));
}

function drawHolders() {
  const { recording } = state;
  const holders = holdersNow(recording);
  flames.root = treeOf(recording, holders);
  drawFlames(flames.root);
  showFound();
  const place = holders.moment == null ? `the ${holders.name} of a replay with the memory that is set` : when(recording, holders.moment);
  const found = holders.range ? rangeSentence(recording, holders) : `${plural(holders.blocks, "block", "blocks")} hold ${bytes(holders.bytes)} at ${place}`;
  byId("flames-text").textContent = found
    + (holders.by_stack ? "; callers are on top, the program's own code is blue." : "; the events have no stacks, so this is by stream and size.");
  byId("holders-missing").textContent = holders.range ? missingInRange(recording, holders.range, state.rangeWay) : "";
  drawHoldersTable(holders);
  const listed = holders.range ? undefined : recording.holders[Number(state.holders)] || recording.holders.find(({ moment }) => moment != null && moment === holders.moment);
  drawCategories(listed || { ...holders, categories: categoriesOf(recording, holders.places), categories_sentence: "" });
}

/// Returns the bytes and blocks of each category among some rows.
function categoriesOf(recording, places) {
  const { blocks, layers: { category: names } } = recording;
  const found = new Map();
  for (const at of names.length ? places : []) {
    const category = names[blocks.category[at]] ?? "small blocks together";
    const row = found.get(category) || { category, requested_bytes: 0, blocks: 0 };
    row.requested_bytes += blocks.requested[at];
    row.blocks += blocks.count[at];
    found.set(category, row);
  }
  return [...found.values()];
}

/// Shows the live bytes by category at one of the moments that the data lists.
function drawCategories({ name, bytes: all, range, categories, categories_sentence: sentence }) {
  const rows = [...categories].sort((a, b) => b.requested_bytes - a.requested_bytes).map(({ category, requested_bytes: size, blocks }) => ({ cells: [bytes(size), percent(size, all), grouped(blocks), withSwatch(state.recording, "category", category)] }));
  byId("categories").replaceChildren(...(rows.length ? [element("h3", {}, range ? "By category, in the range" : `By category, at ${/^the /.test(name) ? name : `the ${name}`}`),
    table([["bytes", false], ["share", false], ["blocks", false], ["category", true]], rows),
    element("p", { class: "quiet" }, `A category is shown where the stack or the lives of the blocks leave no doubt. ${sentence}`)] : []));
}

const whatOf = (recording, { stream, each, blocks }) => `${plural(blocks, "block", "blocks")} of ${each ? exactly(each) : "several sizes"} on stream ${recording.streams[stream]}`;

/// Shows the largest holders that match the search, and below them the holders without a stack.
function drawHoldersTable(holders) {
  const { recording } = state;
  const most = 25;
  const found = holders.list.filter((row) => isRowFound(recording, holders, row));
  const isWithout = ({ stack }) => holders.by_stack && stack < 0;
  const withCode = found.filter((row) => !isWithout(row));
  // The listed holders by size have no ages.
  const hasAges = !recording.no_history && (holders.by_stack || found.some(({ oldest }) => oldest >= 0));
  const rows = [...withCode.slice(0, most), ...found.filter(isWithout)].map((row) => {
    const { stack, blocks, bytes: size, newest, oldest } = row;
    const caller = holders.by_stack ? withSwatch(recording, "line", callerOf(recording, stack), callerElement(recording, stack)) : whatOf(recording, row);
    // A block from before the first event has no age, because its request was not recorded. Neither has the
    // life of a block that is not freed in the recording an end.
    const ages = [...new Set([newest, oldest])].map((age) => age < 0 ? (holders.range ? "open" : "before") : grouped(age));
    return { cells: [bytes(size), percent(size, holders.bytes), grouped(blocks), ...(hasAges ? [ages.join(" to ")] : []), caller] };
  });
  const age = holders.range ? "life in events" : "requests ago";
  const heading = [["bytes", false], ["share", false], ["blocks", false], ...(hasAges ? [[age, false]] : []), [holders.by_stack ? "requested by (called by)" : "what", true]];
  const rest = holders.rest_blocks + withCode.slice(most).reduce((all, row) => all + row.blocks, 0);
  const isAll = state.search === "";
  const more = rows.length === 0 ? "No holder has this text."
    : rest > 0 && isAll ? `${plural(rest, "block", "blocks")} of smaller holders are not listed.`
    : withCode.length > most ? `${grouped(withCode.length - most)} smaller holders with this text are not listed.` : "";
  byId("holders-table").replaceChildren(table(heading, rows), element("p", { class: "quiet" }, more));
}

/// Redraws everything that depends on the search: the marks in the flame graph, the sum of the matches,
/// and the rows of the table.
function showSearch(text) {
  state.search = text.trim().toLowerCase();
  drawFlames(flames.top);
  showFound();
  drawHoldersTable(holdersNow(state.recording));
}

/// Returns a text with the colour of its layer in the time line, if it has one of its own there.
function withSwatch(recording, by, name, shown = name) {
  const layer = recording.layers[by].indexOf(name);
  if (layer < 0) return shown;
  const mark = element("i", { class: "swatch", "aria-hidden": "true", style: { background: hatched(layerStyle(recording, by, layer)) } });
  return element("span", { class: "named" }, mark, shown);
}

function callerElement(recording, stack) {
  const frames = framesOf(recording, stack);
  const name = callerOf(recording, stack);
  if (frames.length < 2) return name;
  const line = (frame) => element("li", { class: frame.own ? "own" : null }, lineOf(frame));
  return element("details", {}, element("summary", {}, name), element("ol", {}, ...frames.map(line)));
}

/// Shows the recording's holders, beginning with the first listed moment: the first failure, or else the
/// peak of live bytes.
function showHolders() {
  state.holders = "0";
  showHoldersBar();
  drawHolders();
}

/// Makes the switches of the holders.
function showHoldersBar() {
  const { recording } = state;
  const options = recording.holders.map(({ name }, at) => [String(at), name]);
  const others = recording.no_history ? [] : [["now", "the chosen moment"], ["range", "a range"]];
  const hasStacks = recording.stacks.stacks.length > 0;
  const search = element("input", { type: "search", placeholder: "search code", "aria-label": "search code in the flame graph and the table", value: state.search,
    oninput: (event) => showSearch(event.target.value) });
  const frames = choice("frames", [["own", "program"], ["all", "all"]], () => state.allFrames ? "all" : "own",
    (which) => { state.allFrames = which === "all"; drawHolders(); });
  byId("holders-bar").replaceChildren(
    choice("at", [...options, ...others], () => state.holders, chooseHolders),
    ...(hasStacks ? [frames] : []), element("span", { class: "group" }, search, element("span", { id: "flames-found", "aria-live": "polite" })));
  byId("holders-range").replaceChildren(...(recording.no_history ? [] : rangeControls()));
  byId("holders-range").hidden = state.holders !== "range";
}

function chooseHolders(which) {
  state.holders = which;
  if (which === "range" && !state.range) return chooseRange(...firstRange(state.recording));
  byId("holders-range").hidden = which !== "range";
  drawHolders();
}
