// The layers of the live bytes: by category, line of code, stream, step, or block. One layer has the same colour
// and hatch everywhere on the page.

/// The ways of dividing the live bytes, with their texts.
const WAYS = [["category", "category"], ["line", "line"], ["stream", "stream"], ["step", "step"], ["block", "block"]];
/// The layer of rows that represent several blocks, where the property is not known.
const NO_LAYER = 255;
/// The hatches, from the plainest on.
const HATCHES = ["plain", "rising", "dots", "falling", "level", "upright", "crossed"];

/// The number of the colour and the hatch of each category. Categories of one purpose share a colour.
const CATEGORY_STYLES = {
  "parameters and buffers": [1, "plain"], "loaded from a file": [1, "dots"],
  "gradients": [6, "plain"], "backward pass": [6, "rising"],
  "optimizer state": [3, "plain"], "optimizer step": [3, "rising"],
  "activations kept for the backward pass": [2, "plain"], "activations": [2, "rising"],
  "activations recomputed in the backward pass": [2, "crossed"], "copies of autocast": [2, "dots"],
  "temporary": [4, "falling"], "communication buffers": [5, "plain"], "KV cache": [7, "plain"], "workspace": [8, "plain"],
  "CuPy": [5, "rising"], "RMM": [5, "dots"], "Numba": [5, "falling"], "ONNX Runtime": [8, "rising"], "TensorRT": [8, "dots"],
  "unknown": ["rest", "plain"],
};
/// The hatches of lines and streams, by rank; neighbours differ.
const RANK_HATCHES = ["plain", "rising", "plain", "dots", "plain", "falling", "plain", "level", "crossed", "upright"];
/// The colours of steps, from the first to the last: a scale whose lightness rises.
const STEP_COLOURS = ["#3b2f6b", "#3d4f8a", "#33708e", "#26908c", "#35ae78", "#7fc653", "#c8d63c", "#f5e66b"];

/// Returns the ways in which this recording can be divided.
const waysOf = (recording) => WAYS.filter(([by]) => by === "block" || recording.layers[by].length > (by === "stream" ? 1 : 0));

/// Returns the way to show first: by category if stacks show some, else by line if there are stacks, else by stream.
function firstWay({ layers: { category, line, stream } }) {
  if (category.some((name) => !name.startsWith("unknown"))) return "category";
  if (line.length) return "line";
  return stream.length > 1 ? "stream" : "block";
}

/// Returns the layer of a row for a block: an index among the layers, or for `block` the row itself.
function layerOf(recording, place, by) {
  const { blocks, layers } = recording;
  switch (by) {
    case "block": return place;
    case "stream": return Math.min(recording.heaps[blocks.heap[place]][0], layers.stream.length - 1);
    case "step": {
      let at = 0;
      while (at < layers.step_bounds.length && layers.step_bounds[at] < blocks.born[place]) at++;
      return at;
    }
    default: return blocks[by][place];
  }
}

const styleOf = (name, number, pattern) => ({ name, colour: colour(`layer-${number}`), pattern });

/// Returns the name, the colour and the hatch of a layer.
function layerStyle(recording, by, key) {
  if (by === "block") return blockStyle(recording, key);
  const names = recording.layers[by];
  const name = names[key];
  if (name === undefined) return styleOf("small blocks together", "none", "rising");
  if (by === "category") return styleOf(name, ...(CATEGORY_STYLES[name] || ["none", "rising"]));
  if (by === "step") {
    const step = Math.round(key / Math.max(1, names.length - 1) * (STEP_COLOURS.length - 1));
    return { name, colour: STEP_COLOURS[step], pattern: key % 2 ? "rising" : "plain" };
  }
  const others = by === "line" ? names.length - 2 : names.length > 10 ? 10 : names.length;
  if (key >= others) return key > others ? styleOf(name, "none", "rising") : styleOf(name, "rest", "plain");
  return styleOf(name, 1 + key % 8, RANK_HATCHES[key]);
}

/// Returns the number of a block's colour: its line; without stacks, a number for its size.
const blockKey = ({ blocks, layers }, place) => layers.line.length ? blocks.line[place] : sizeNumber(blocks.requested[place]) % 8;

/// Returns the colour and hatch of a block by that number.
const keyStyle = (recording, key) => recording.layers.line.length ? layerStyle(recording, "line", key) : styleOf("", 1 + key, "plain");

function blockStyle(recording, place) {
  const { blocks } = recording;
  const name = blocks.count[place] > 1 ? `${grouped(blocks.count[place])} small blocks together` : `${callerOf(recording, blocks.stack[place])}: ${exactly(blocks.requested[place])}`;
  return { ...keyStyle(recording, blockKey(recording, place)), name };
}

/// Returns a number for a size, so that equal sizes get equal colours.
const sizeNumber = (size) => Math.floor(size / 512) * 2654435761 % 4294967296 >>> 13;

/// Returns the background of a cause or state of memory by its name. Completely free segments have a hatch, so that
/// they differ from free parts not by their colour alone.
const painted = (name) => name === "idle" ? hatched({ colour: "var(--idle)", pattern: "rising" }) : `var(--${name})`;

/// Returns a style's colour and hatch as the value of the CSS property `background`.
function hatched({ colour: plain, pattern }) {
  const ink = isDeep(rgbOf(plain)) ? "rgb(255 255 255 / .4)" : "rgb(0 0 0 / .42)";
  const lines = (angle) => `repeating-linear-gradient(${angle}deg, ${ink} 0 1px, transparent 1px 5px)`;
  const over = { plain: [], rising: [lines(135)], falling: [lines(45)], level: [lines(0)], upright: [lines(90)], crossed: [lines(45), lines(135)],
    dots: [`radial-gradient(${ink} 30%, transparent 32%) 0 0 / 4px 4px`] }[pattern];
  return [...over, plain].join(", ");
}
