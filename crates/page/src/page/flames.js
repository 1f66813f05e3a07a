// The flame graph: the stacks of the holders, as wide as their bytes.

const FLAME_ROW = 20;

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
  const root = { name: holders.range ? `all bytes ${RANGE_WAYS[state.rangeWay]}` : "all live bytes", bytes: holders.bytes, blocks: holders.blocks, children: new Map(), depth: 0 };
  for (const row of holders.list) {
    let node = root;
    for (const step of pathOf(recording, holders, row)) {
      const key = `${step.name}\n${step.place || ""}`;
      if (!node.children.has(key)) node.children.set(key, { ...step, bytes: 0, blocks: 0, children: new Map(), depth: node.depth + 1, parent: node });
      node = node.children.get(key);
      node.bytes += row.bytes;
      node.blocks += row.blocks;
    }
    if (holders.by_stack) node.layer ??= recording.layers.line.indexOf(callerOf(recording, row.stack));
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

function flameColour(node) {
  if (node === flames.root) return isDark() ? "#8fa1b8" : "#c8d2de";
  if (node.without) return isDark() ? "#8f9baa" : "#dfe3e8";
  return `hsl(${node.own ? 205 : 28} ${node.own ? 62 : 45}% ${72 - nameHash(node.name) % 12}%)`;
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
    // The label begins with the text that is visible, as users of speech input expect.
    const name = (node.short || "") + node.name;
    const label = `${name} ${share}, ${plural(node.blocks, "block", "blocks")}${node.place ? `, ${node.place}` : ""}`;
    const background = flameColour(node);
    const edge = node.layer >= 0 ? layerStyle(state.recording, "line", node.layer).colour : "";
    const button = element("button", { type: "button", "aria-label": label, tabindex: made.length ? "-1" : "0",
      class: state.search === "" ? null : isFound(node) ? "found" : "dim",
      style: { left: `${x}px`, top: `${node.depth * FLAME_ROW}px`, width: `${Math.max(2, w)}px`, background, boxShadow: edge ? `inset 5px 0 ${edge}` : "", paddingLeft: edge ? "8px" : "" },
      onclick: () => { drawFlames(node === flames.top && node.parent ? node.parent : node); },
      onpointermove: (event) => tip(event, [...flameLines(node), `${share} of ${flames.root.name.replace(/^all /, "the ")}, ${plural(node.blocks, "block", "blocks")}`]),
      onpointerleave: () => tip(null, null), onfocus: () => { byId("flames-text").textContent = label; },
    }, w > 30 ? name + (w > 260 ? ` ${share}` : "") : "");
    Object.assign(button, { node, place: { x, y: node.depth * FLAME_ROW, w: Math.max(2, w), background, edge } });
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

/// Draws the frames that are shown with a pen, for a picture of its own.
function paintFlames(pen) {
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  for (const { place: { x, y, w, background, edge }, textContent } of byId("flames").children) {
    pen.fillStyle = background;
    pen.fillRect(x, y, Math.max(1, w - 1), FLAME_ROW - 1);
    if (edge) {
      pen.fillStyle = edge;
      pen.fillRect(x, y, Math.min(5, w), FLAME_ROW - 1);
    }
    const fits = Math.floor((w - 12) / 6.6);
    if (!textContent || fits < 3) continue;
    pen.fillStyle = "#16202c";
    pen.fillText(textContent.length > fits ? `${textContent.slice(0, fits - 1)}…` : textContent, x + (edge ? 9 : 4), y + 14);
  }
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

