// The holders of the live bytes: a flame graph of their stacks, and a table of the largest holders.

const FLAME_ROW = 20;

/// Returns the holders at a moment that the data lists, or selects the blocks that live at the chosen one. The
/// ages are in requests; -1 if they are not known.
function holdersNow(recording) {
  const listed = recording.holders[Number(state.holders)];
  // Not used when all frames are shown, because the listed holders are grouped by the program's code.
  if (listed && (listed.moment == null || !(state.allFrames && listed.by_stack))) return listed;
  const { blocks } = recording;
  const { caller } = recording.stacks;
  const moment = listed ? listed.moment : state.moment;
  const found = new Map();
  const live = aliveAt(blocks, moment).filter((at) => moment < blocks.freed[at]);
  const byStack = live.some((at) => blocks.stack[at] >= 0 || blocks.stack[at] === LEFT_OUT);
  const keyOf = (stack) => stack < 0 || state.allFrames ? stack : `caller ${caller[stack]}`;
  for (const at of live) {
    const [stream] = recording.heaps[blocks.heap[at]];
    const key = byStack ? keyOf(blocks.stack[at]) : `${stream} ${blocks.requested[at]}`;
    // Blocks from before the recording have no age.
    const age = blocks.born[at] === 0 ? -1 : requestsUntil(recording, moment) - requestsUntil(recording, blocks.born[at]);
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
  return { name: listed ? listed.name : "the chosen moment", moment, bytes: sum("bytes"), blocks: sum("blocks"), by_stack: byStack, list, rest_bytes: 0, rest_blocks: 0 };
}

/// Returns the frames from the outermost to the innermost, as names for the flame graph.
function pathOf(recording, { by_stack: byStack }, { stack, stream, each }) {
  if (!byStack) return [{ name: `stream ${recording.streams[stream]}` }, { name: each ? `blocks of ${exactly(each)}` : "blocks of several sizes" }];
  const frames = framesOf(recording, stack);
  if (!frames.length) return [{ name: callerOf(recording, stack), without: true }];
  return frames.reverse().map((frame) => ({
    name: frame.name || frame.file, own: frame.own, short: fileOf(frame), place: shortFile(frame) + lineNumber(frame),
  }));
}

function treeOf(recording, holders) {
  const root = { name: "all live bytes", bytes: holders.bytes, blocks: holders.blocks, children: new Map(), depth: 0 };
  for (const row of holders.list) {
    let node = root;
    for (const step of pathOf(recording, holders, row)) {
      const key = `${step.name}\n${step.place || ""}`;
      if (!node.children.has(key)) node.children.set(key, { ...step, bytes: 0, blocks: 0, children: new Map(), depth: node.depth + 1, parent: node });
      node = node.children.get(key);
      node.bytes += row.bytes;
      node.blocks += row.blocks;
    }
  }
  if (holders.rest_bytes) root.children.set("", { name: "smaller holders", without: true, bytes: holders.rest_bytes, blocks: holders.rest_blocks, children: new Map(), depth: 1, parent: root });
  return root;
}

const flames = { root: null, top: null };

/// Returns true if a node of the flame graph matches the search.
const isFound = (node) => state.search !== "" && `${node.place || ""} ${node.name}`.toLowerCase().includes(state.search);

/// Returns the bytes and blocks of the nodes that match the search. Nodes inside a matching node are not
/// counted again.
function sumFound(node) {
  if (isFound(node)) return { bytes: node.bytes, blocks: node.blocks };
  const sums = { bytes: 0, blocks: 0 };
  for (const child of node.children.values()) {
    const { bytes, blocks } = sumFound(child);
    sums.bytes += bytes;
    sums.blocks += blocks;
  }
  return sums;
}

function showFound() {
  const { bytes: found, blocks } = sumFound(flames.root);
  byId("flames-found").textContent = state.search === "" ? "" : `found: ${bytes(found)}, ${percent(found, flames.root.bytes)}, in ${plural(blocks, "block", "blocks")}`;
}

/// Returns true if a row of the table matches the search, in its text or in one of its frames.
function isRowFound(recording, holders, row) {
  if (state.search === "") return true;
  const texts = holders.by_stack ? [callerOf(recording, row.stack), ...framesOf(recording, row.stack).map(lineOf)] : [whatOf(recording, row)];
  return texts.some((text) => text.toLowerCase().includes(state.search));
}

function nameHash(name) {
  let hash = 7;
  for (const sign of name) hash = (hash * 31 + sign.codePointAt(0)) % 9973;
  return hash;
}

/// Returns the lines of a frame's tooltip. For library code, the program's frame that called it comes
/// first.
function flameLines(node) {
  const line = ({ short, name, place }) => place ? [`${short || ""}${name}`, place] : [name];
  let caller = node.own ? null : node.parent;
  while (caller && !caller.own) caller = caller.parent;
  return caller ? [...line(caller), `calls ${line(node).join(", ")}`] : line(node);
}

/// Draws the tree below `top` over the whole width, and the callers of `top` above it.
function drawFlames(top) {
  flames.top = top;
  const box = byId("flames");
  const width = box.clientWidth;
  const made = [];
  let deepest = 0;
  const add = (node, x, w) => {
    deepest = Math.max(deepest, node.depth);
    const share = `${bytes(node.bytes)}, ${percent(node.bytes, flames.root.bytes)}`;
    const label = `${node.name}${node.place ? ` (${node.place})` : ""}: ${share}, ${plural(node.blocks, "block", "blocks")}`;
    const background = node === flames.root ? (isDark() ? "#8fa1b8" : "#c8d2de")
      : node.without ? (isDark() ? "#77828f" : "#dfe3e8") : `hsl(${node.own ? 205 : 28} ${node.own ? 62 : 45}% ${72 - nameHash(node.name) % 12}%)`;
    const button = element("button", { type: "button", "aria-label": label, tabindex: made.length ? "-1" : "0",
      class: state.search === "" ? null : isFound(node) ? "found" : "dim",
      style: { left: `${x}px`, top: `${node.depth * FLAME_ROW}px`, width: `${Math.max(2, w)}px`, background },
      onclick: () => { drawFlames(node === flames.top && node.parent ? node.parent : node); },
      onpointermove: (event) => tip(event, [...flameLines(node), `${share} of the live bytes, ${plural(node.blocks, "block", "blocks")}`]),
      onpointerleave: () => tip(null, null), onfocus: () => { byId("flames-text").textContent = label; },
    }, w > 30 ? (node.short || "") + node.name + (w > 260 ? ` ${share}` : "") : "");
    button.node = node;
    made.push(button);
  };
  const ways = [];
  for (let node = top; node; node = node.parent) ways.unshift(node);
  ways.forEach((node) => add(node, 0, width));
  const below = (node, x, w) => {
    let at = x;
    const children = [...node.children.values()].sort((a, b) => !!a.without - !!b.without || b.bytes - a.bytes);
    for (const child of children) {
      const wide = w * child.bytes / Math.max(1, node.bytes);
      if (wide < 1.5 || made.length > 3000) break;
      add(child, at, wide);
      below(child, at, wide);
      at += wide;
    }
  };
  below(top, 0, width);
  box.style.height = `${(deepest + 1) * FLAME_ROW}px`;
  box.replaceChildren(...made);
  const chosen = made[ways.length - 1];
  made.forEach((button) => { button.tabIndex = button === chosen ? 0 : -1; });
  return chosen;
}

/// Moves the focus by the arrow keys to the caller, the callee or a sibling of a frame.
function flameKeys(event) {
  const node = document.activeElement?.node;
  if (!node) return;
  const buttons = [...byId("flames").children];
  const beside = node.parent ? buttons.filter((button) => button.node.parent === node.parent) : [];
  const at = beside.findIndex((button) => button.node === node);
  const next = {
    ArrowUp: () => buttons.find((button) => button.node === node.parent),
    ArrowDown: () => buttons.find((button) => button.node.parent === node),
    ArrowLeft: () => beside[at - 1], ArrowRight: () => beside[at + 1],
  }[event.key];
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); drawFlames(node).focus(); return; }
  if (event.key === "Escape") { event.preventDefault(); drawFlames(flames.root).focus(); return; }
  if (!next) return;
  event.preventDefault();
  next()?.focus();
}

function drawHolders() {
  const { recording } = state;
  const holders = holdersNow(recording);
  flames.root = treeOf(recording, holders);
  drawFlames(flames.root);
  showFound();
  byId("flames-text").textContent = `${plural(holders.blocks, "block", "blocks")} hold ${bytes(holders.bytes)} at ${holders.moment == null ? `the ${holders.name} of a replay with the memory that is set` : when(recording, holders.moment)}`
    + (holders.by_stack ? "; callers are on top, the program's own code is blue." : "; the events have no stacks, so this is by stream and size.");
  drawHoldersTable(holders);
  drawCategories(recording.holders.find(({ moment }) => moment != null && moment === holders.moment) || recording.holders[Number(state.holders)] || recording.holders[0]);
}

/// Shows the live bytes by category at one of the moments that the data lists.
function drawCategories({ name, bytes: all, categories, categories_sentence: sentence }) {
  const rows = categories.map(({ category, requested_bytes: size, blocks }) => ({ cells: [bytes(size), percent(size, all), grouped(blocks), category] }));
  byId("categories").replaceChildren(...(rows.length ? [element("h3", {}, `By category, at the ${name}`),
    table([["bytes", false], ["", false], ["blocks", false], ["category", true]], rows),
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
  const rows = [...withCode.slice(0, most), ...found.filter(isWithout)].map((row) => {
    const { stack, blocks, bytes: size, newest, oldest } = row;
    const caller = holders.by_stack ? callerElement(recording, stack) : whatOf(recording, row);
    // A block from before the first event has no age, because its request was not recorded.
    const ages = [...new Set([newest, oldest])].map((age) => age < 0 ? "before" : grouped(age));
    return { cells: [bytes(size), percent(size, holders.bytes), grouped(blocks), ...(recording.no_history ? [] : [ages.join(" to ")]), caller] };
  });
  const heading = [["bytes", false], ["", false], ["blocks", false], ...(recording.no_history ? [] : [["requests ago", false]]), [holders.by_stack ? "requested by (called by)" : "what", true]];
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
  const { recording } = state;
  state.holders = "0";
  const options = recording.holders.map(({ name }, at) => [String(at), name]);
  const hasStacks = recording.stacks.stacks.length > 0;
  const search = element("input", { type: "search", placeholder: "search code", "aria-label": "Search the flame graph and the holders", value: state.search,
    oninput: (event) => showSearch(event.target.value) });
  const frames = choice("frames", [["own", "program"], ["all", "all"]], () => state.allFrames ? "all" : "own",
    (which) => { state.allFrames = which === "all"; drawHolders(); });
  byId("holders-bar").replaceChildren(
    choice("at", recording.no_history ? options : [...options, ["now", "the chosen moment"]], () => state.holders, (at) => { state.holders = at; drawHolders(); }),
    ...(hasStacks ? [frames] : []), element("span", { class: "group" }, search, element("span", { id: "flames-found", "aria-live": "polite" })));
  drawHolders();
}

/// Called when the chosen range changes.
function followRange() {}
