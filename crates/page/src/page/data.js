// Reads the recordings of the page from its script elements. docs/report.md describes the format.
"use strict";

const NEVER = 0xffffffff;
const NOTHING = -1;
/// Values that take the place of a stack index.
const LEFT_OUT = -2, LIVED_BEFORE = -3;

/// Decodes numbers that are stored as differences from the previous number.
function summed(differences) {
  const numbers = new Float64Array(differences.length);
  let sum = 0;
  differences.forEach((difference, at) => { sum += difference; numbers[at] = sum; });
  return numbers;
}

const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
const DIGIT_OF = new Uint8Array(128);
for (let digit = 0; digit < 64; digit++) DIGIT_OF[DIGITS.charCodeAt(digit)] = digit;

/// Decodes packed numbers: five bits a digit, the lowest first; a digit from 32 on is followed by another one of
/// the same number. A number n is stored as 2n, a negative one as -2n - 1.
function unpacked(text) {
  let count = 0;
  for (let at = 0; at < text.length; at++) if (DIGIT_OF[text.charCodeAt(at)] < 32) count++;
  const numbers = new Float64Array(count);
  let place = 0, number = 0, scale = 1;
  for (let at = 0; at < text.length; at++) {
    const digit = DIGIT_OF[text.charCodeAt(at)];
    number += (digit & 31) * scale;
    if (digit >= 32) { scale *= 32; continue; }
    numbers[place++] = number % 2 ? -(number + 1) / 2 : number / 2;
    number = 0;
    scale = 1;
  }
  return numbers;
}

/// Returns the end of each lifetime. A length of -1 means that it never ends.
function ends(from, lives) {
  return Uint32Array.from(lives, (life, at) => life < 0 ? NEVER : from[at] + life);
}

/// Returns the deepest folder that contains all files of the program's own code, with its last slash.
function sharedFolder({ texts, frames }) {
  const files = frames.filter(([, , , kind]) => kind === 1).map(([file]) => texts[file].split("/").slice(0, -1));
  const [first = []] = files;
  let shared = first.length;
  for (const parts of files) while (first.slice(0, shared).some((part, at) => part !== parts[at])) shared--;
  return shared ? first.slice(0, shared).join("/") + "/" : "";
}

/// Returns the rows of a table that is stored as one list for each column.
function rowsOf(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((first, at) => Object.fromEntries(names.map((name) => [name, columns[name][at]])));
}

/// Decodes the rows for blocks. A row of several small blocks has no category and no line (255).
function unpackBlocks({ born: differences, life, wait: waits, address, kind: packed, kinds, runs }, unit) {
  const born = Uint32Array.from(summed(unpacked(differences)));
  const freed = ends(born, unpacked(life));
  const wait = unpacked(waits);
  const kind = unpacked(packed);
  const of = (Kind, value) => { const list = new Kind(born.length); for (let at = 0; at < list.length; at++) list[at] = value(kind[at], at); return list; };
  const count = new Uint32Array(born.length).fill(1);
  runs.forEach(([at, several]) => { count[at] = several; });
  return {
    length: born.length, born, freed, count,
    gone: of(Uint32Array, (_, at) => wait[at] < 0 || freed[at] === NEVER ? NEVER : freed[at] + wait[at]),
    address: unpacked(address).map((units) => units * unit),
    size: of(Float64Array, (one) => kinds.size[one] * unit),
    requested: of(Float64Array, (one) => kinds.size[one] * unit - kinds.unused[one]),
    heap: of(Uint32Array, (one) => kinds.heap[one]), stack: of(Int32Array, (one) => kinds.stack[one]),
    category: of(Uint8Array, (one) => kinds.category[one]), line: of(Uint8Array, (one) => kinds.line[one]),
  };
}

function unpack(sheet) {
  const { columns, segments, unit } = sheet;
  const column = Object.fromEntries(Object.entries(columns).map(([name, list]) => [name, summed(list)]));
  const held = Uint32Array.from(summed(segments.born));
  return {
    ...sheet,
    handles: sheet.streams,
    streams: sheet.stream_numbers,
    column,
    folder: sharedFolder(sheet.stacks),
    holders: sheet.holders.map((one) => ({ ...one, list: rowsOf(one.list) })),
    blocks: unpackBlocks(sheet.blocks, unit),
    segments: {
      length: held.length, born: held, gone: ends(held, segments.life),
      address: Float64Array.from(segments.address, (units) => units * unit),
      size: Float64Array.from(segments.size, (units) => units * unit),
      heap: Uint32Array.from(segments.heap), large: segments.large, expandable: segments.expandable,
    },
  };
}

/// Returns the last index whose number is at most `number`. The numbers are in ascending order.
function placeOf(numbers, number) {
  let low = 0, high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (numbers[middle] <= number) low = middle; else high = middle - 1;
  }
  return low;
}

/// Returns the number of requests until a moment.
function requestsUntil(recording, moment) {
  const { blocks } = recording;
  if (!blocks.until) {
    let sum = 0;
    blocks.until = Float64Array.from(blocks.count, (count, at) => { sum += recording.events > 0 && blocks.born[at] === 0 ? 0 : count; return sum; });
  }
  return blocks.length && blocks.born[0] <= moment ? blocks.until[placeOf(blocks.born, moment)] : 0;
}

/// Returns the time of a moment, in microseconds from the first event.
function timeOf(recording, moment) {
  const { start, time_us } = recording.column;
  const at = placeOf(start, moment);
  const last = at + 1 >= start.length;
  const [from, to] = [start[at], last ? recording.events + 1 : start[at + 1]];
  const [begin, end] = [time_us[at], last ? recording.duration_us : time_us[at + 1]];
  return to > from ? begin + (end - begin) * (moment - from) / (to - from) : begin;
}

function momentAt(recording, time) {
  const { start, time_us } = recording.column;
  const at = placeOf(time_us, time);
  const last = at + 1 >= start.length;
  const [from, to] = [start[at], last ? recording.events : start[at + 1]];
  const [begin, end] = [time_us[at], last ? recording.duration_us : time_us[at + 1]];
  return end > begin ? from + (to - from) * Math.min(1, (time - begin) / (end - begin)) : from;
}

/// Returns the nearest moment that the page can show.
function shownMoment(recording, moment) {
  const whole = Math.max(0, Math.min(recording.events, Math.round(moment)));
  const { moments } = recording;
  if (!moments) return whole;
  const at = placeOf(moments, whole);
  const next = Math.min(at + 1, moments.length - 1);
  return whole - moments[at] <= moments[next] - whole ? moments[at] : moments[next];
}

/// Returns the indices of the rows of a table that live at a moment.
function aliveAt(rows, moment) {
  const places = [];
  for (let at = 0; at < rows.length; at++) {
    if (rows.born[at] > moment) break;
    if (moment < rows.gone[at]) places.push(at);
  }
  return places;
}

function heapName(recording, heap) {
  const [stream, pool] = recording.heaps[heap];
  const { name, private: isPrivate } = recording.pools[pool];
  return `stream ${recording.streams[stream]}` + (isPrivate ? `, ${name}` : "");
}

function addressOf(recording, offset) {
  return "0x" + (BigInt(recording.base) + BigInt(offset)).toString(16);
}

/// Returns one line about the code that requested a block.
function callerOf(recording, stack) {
  if (stack === LIVED_BEFORE) return "(lived before the recording began)";
  if (stack === LEFT_OUT) return "(its stack is left out to keep the page small)";
  const { caller, callers } = recording.stacks;
  return stack < 0 ? "(no stack recorded)" : callers[caller[stack]][0];
}

/// Returns the frames of a stack, innermost first. Returns only the frames of the caller, unless `all`
/// is true.
function framesOf(recording, stack, all = state.allFrames) {
  if (stack < 0) return [];
  const { texts, frames, stacks, caller, callers } = recording.stacks;
  return (all ? stacks[stack] : callers[caller[stack]][1]).map((at) => {
    const [file, name, line, kind] = frames[at];
    return { file: texts[file], name: texts[name], line, kind, own: kind === 1 };
  });
}

/// Lets the page open at the only moment of a recording without history. Such a moment is no peak.
function withOnlyMoment(recording) {
  for (const name of ["peak_live", "peak_reserved"]) recording[name] ||= { moment: recording.events, bytes: 0 };
  return recording;
}

const recordings = [...document.querySelectorAll("script.recording")].map((element) => unpack(withOnlyMoment(JSON.parse(element.textContent))));
