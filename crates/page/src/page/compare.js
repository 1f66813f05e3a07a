// Two recordings, or two moments of one, side by side: figures, the bytes of each line of code, and needs.

/// Returns the moments that can be compared, as options. The chosen moment and the ends of the range exist in
/// the recording that is shown.
function comparedMoments(recording) {
  const listed = recording.holders.map(({ name, moment }, at) => [String(at), name, moment]).filter(([, , moment]) => moment != null);
  if (recording !== state.recording || recording.no_history) return listed;
  const ends = state.range ? [["from", "begin of the range", state.range[0]], ["to", "end of the range", state.range[1]]] : [];
  const known = ends.map(([key, name, moment]) => [key, name, shownMoment(recording, moment)]);
  return [...listed, ["now", "the chosen moment", state.moment], ...known];
}

/// Returns the holders of one side. Those that the data lists are used where the page lacks blocks.
function comparedSide(recording, key) {
  const options = comparedMoments(recording);
  const [chosen, name, moment] = options.find(([value]) => value === key) || options[0];
  const listed = recording.moments && recording.holders[Number(chosen)];
  return { recording, key: chosen, name, moment, holders: listed || holdersAt(recording, moment) };
}

/// Returns both sides; undefined if a recording has no moment.
function comparedSides() {
  const second = recordings[state.second] || state.recording;
  if (![state.recording, second].every((one) => one.totals.length === 0 && comparedMoments(one).length)) return undefined;
  return [comparedSide(state.recording, state.left), comparedSide(second, state.right)];
}

/// Returns the bytes and blocks of each line on both sides, the largest difference first.
function comparedRows(sides) {
  const rows = new Map();
  sides.forEach(({ recording, holders }, side) => {
    const add = (name, size, blocks) => {
      if (!rows.has(name)) rows.set(name, { name, bytes: [0, 0], blocks: [0, 0] });
      rows.get(name).bytes[side] += size;
      rows.get(name).blocks[side] += blocks;
    };
    for (const row of holders.list) {
      const name = holders.by_stack ? callerOf(recording, row.stack) : row.each ? `blocks of ${exactly(row.each)}` : "blocks of several sizes";
      add(name, row.bytes, row.blocks);
    }
    if (holders.rest_blocks) add("(smaller holders)", holders.rest_bytes, holders.rest_blocks);
  });
  const change = ({ bytes: [one, other] }) => Math.abs(other - one);
  return [...rows.values()].sort((a, b) => change(b) - change(a));
}

const signed = (number, format) => number === 0 ? "0" : `${number < 0 ? "−" : "+"}${format(Math.abs(number))}`;

/// Returns the figures of both sides: a name, both numbers, and how they are formatted.
function comparedFigures(sides) {
  const of = (name, value, format) => [name, sides.map(value), format];
  const needOf = ({ recording: { needs } }) => needs.rows.find((row) => row.recorded)?.needs_bytes;
  const leastOf = ({ recording: { needs } }) => {
    const known = needs.rows.filter((row) => !row.is_model && row.needs_bytes != null).map((row) => row.needs_bytes);
    return known.length ? Math.min(...known) : undefined;
  };
  const moment = [of("live at the moment", ({ holders }) => holders.bytes, bytes), of("blocks at the moment", ({ holders }) => holders.blocks, grouped)];
  if (sides[0].recording === sides[1].recording) return moment;
  const history = ({ recording }, value) => recording.no_history ? undefined : value;
  return [...moment, of("most live", (side) => history(side, side.recording.peak_live.bytes), bytes), of("most reserved", (side) => history(side, side.recording.peak_reserved.bytes), bytes),
    of("events", (side) => history(side, side.recording.events), grouped), of("requests that failed", (side) => history(side, side.recording.failures.total), grouped),
    of("need as recorded", needOf, needed), of("least need", leastOf, needed)];
}

/// Returns the needs of both sides under each setting that any of them has.
function comparedNeeds([one, other]) {
  if (one.recording === other.recording) return [];
  const of = ({ recording }) => new Map(recording.needs.rows.map((row) => [row.recorded ? "as recorded" : settingName(row), row.needs_bytes]));
  const [first, second] = [of(one), of(other)];
  return [...new Set([...first.keys(), ...second.keys()])].map((name) => ({ name, bytes: [first.get(name), second.get(name)] }));
}

const COMPARED_ROWS = 20;

function showComparison() {
  const sides = comparedSides();
  byId("compare").hidden = !sides || state.recording.no_history !== null && recordings.length < 2;
  if (byId("compare").hidden) return;
  [state.left, state.right] = sides.map(({ key }) => key);
  const isSame = sides[0].recording === sides[1].recording;
  const select = (label, options, chosen, act) => element("label", {}, `${label} `, element("select", { onchange: ({ target }) => { act(target.value); showComparison(); } },
    ...options.map(([value, text]) => element("option", { value, selected: value === chosen }, text))));
  const moment = (label, { recording, key }, side) => select(label, comparedMoments(recording).map(([value, name, at]) => [value, `${name}${isSame ? ` (event ${grouped(at)})` : ""}`]), key, (value) => { state[side] = value; });
  const second = recordings.length < 2 ? [] : [select("with", recordings.map(({ name, device }, at) => [String(at), `${name}, device ${device}`]), String(recordings.indexOf(sides[1].recording)),
    (value) => { state.second = Number(value); state.right = "0"; })];
  byId("compare-bar").replaceChildren(moment("compare", sides[0], "left"), ...second, moment(second.length ? "at" : "with", sides[1], "right"));
  const names = isSame ? sides.map(({ name }) => name) : sides.map(({ recording, name }) => `${recording.name}, ${name}`);
  const both = (values, format) => [...values.map((value) => value == null ? "-" : format(value)), values.includes(undefined) || values.includes(null) ? "-" : signed(values[1] - values[0], format)];
  const heading = (last) => [[names[0], false], [names[1], false], ["difference", false], [last, true]];
  const figures = comparedFigures(sides).map(([name, values, format]) => ({ cells: [...both(values, format), name] }));
  byId("compare-figures").replaceChildren(table(heading("figure"), figures));
  const rows = comparedRows(sides);
  const most = Math.max(1, ...rows.map(({ bytes: [one, other] }) => Math.abs(other - one)));
  const bar = ([one, other]) => element("div", { class: "change", "aria-hidden": "true" }, element("i", { style: { width: `${50 * Math.abs(other - one) / most}%`,
    marginLeft: other < one ? `${50 - 50 * (one - other) / most}%` : "50%", background: `var(--${other < one ? "good" : "limit"})` } }));
  const cells = rows.slice(0, COMPARED_ROWS).map((row) => ({ cells: [...both(row.bytes, bytes), bar(row.bytes), both(row.blocks, grouped)[2], withSwatch(state.recording, "line", row.name)] }));
  const byLine = [[names[0], false], [names[1], false], ["difference", false], ["", true], ["difference in blocks", false], [sides[0].holders.by_stack ? "requested by" : "what", true]];
  const rest = rows.length > COMPARED_ROWS ? `${grouped(rows.length - COMPARED_ROWS)} rows with smaller differences are not listed; the CSV has all.` : "";
  byId("compare-holders").replaceChildren(table(byLine, cells), element("p", { class: "quiet" }, rest));
  const needs = comparedNeeds(sides);
  byId("compare-needs").replaceChildren(...(needs.length ? [element("h3", {}, "Needs under each setting"), table(heading("setting"), needs.map(({ name, bytes: values }) => ({ cells: [...both(values, needed), name] })))] : []));
  showRecordings();
  byId("compare-canvas").hidden = byId("compare-legend").hidden = isSame;
  drawComparison();
}

/// Lists all recordings of the page, if they are more than two.
function showRecordings() {
  const rows = recordings.length < 3 ? [] : recordings.map((recording, at) => ({
    strong: recording === state.recording,
    act: () => { byId("recording").value = String(at); show(recording); },
    cells: [recording.no_history ? "-" : bytes(recording.peak_live.bytes), recording.no_history ? "-" : bytes(recording.peak_reserved.bytes),
      recording.no_history ? "-" : grouped(recording.failures.total), needText(recording), `${recording.name}, device ${recording.device}`],
  }));
  const heading = [["most live", false], ["most reserved", false], ["requests that failed", false], ["need as recorded", false], ["recording", true]];
  byId("compare-all").replaceChildren(...(rows.length ? [element("h3", {}, "All recordings of this page"), table(heading, rows),
    element("p", { class: "quiet" }, "A click on a row shows that recording. stratalloc sweep compares the recordings of many ranks.")] : []));
}

function needText({ needs }) {
  const need = needs.rows.find((row) => row.recorded)?.needs_bytes;
  return need == null ? "-" : needed(need);
}

/// Returns the most bytes in each of `count` equal parts of a recording.
function mostOver({ column: { start }, events }, bytesOf, count) {
  const most = new Float64Array(count);
  bytesOf.forEach((number, at) => {
    const place = (moment) => Math.min(count - 1, Math.floor(moment / (events + 1) * count));
    const last = at + 1 < start.length ? start[at + 1] - 1 : events;
    for (let part = place(start[at]); part <= place(last); part++) most[part] = Math.max(most[part], number);
  });
  return most;
}

/// Draws live and reserved bytes of both recordings beside each other, at one scale.
function drawComparison() {
  const sides = comparedSides();
  if (byId("compare").hidden || byId("compare-canvas").hidden) return;
  const { pen, width, height } = cleared(byId("compare-canvas"));
  const [left, top, bottom, gap] = [76, 22, 8, 20];
  const wide = (width - left - gap - 12) / 2, tall = height - top - bottom;
  const columns = Math.max(1, Math.floor(wide));
  const most = Math.max(1, ...sides.map(({ recording: { column } }) => column.reserved_max.reduce((all, number) => Math.max(all, number), 0))) * 1.03;
  const yOf = (number) => top + tall - number / most * tall;
  drawByteAxis(pen, left, width - 12, 0, most, yOf);
  pen.textAlign = "left";
  sides.forEach(({ recording, moment }, side) => {
    const { column: { live_max: live, reserved_max: reserved }, events } = recording;
    const x0 = left + side * (wide + gap);
    const stairs = (list) => list.forEach((number, x) => { pen.lineTo(x0 + x, yOf(number)); pen.lineTo(x0 + x + 1, yOf(number)); });
    pen.fillStyle = colour("live");
    pen.beginPath();
    pen.moveTo(x0, yOf(0));
    stairs(mostOver(recording, live, columns));
    pen.lineTo(x0 + columns, yOf(0));
    pen.fill();
    pen.strokeStyle = colour("frame");
    pen.beginPath();
    stairs(mostOver(recording, reserved, columns));
    pen.stroke();
    pen.strokeStyle = colour("accent");
    const x = x0 + moment / Math.max(1, events) * wide;
    pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + tall); pen.stroke();
    pen.fillStyle = colour("text");
    pen.fillText(recording.name.slice(0, Math.floor(wide / 7)), x0, top - 8);
  });
  legend("compare-legend", [["live", colour("live")], ["reserved", colour("frame")], ["the compared moment", colour("accent")]]);
}

/// The moment of the second side at first: the same one of another recording, or the next one of the only
/// recording.
const firstRight = () => recordings.length > 1 ? "0" : "1";

/// The recording of the second side at first: another one, if there is one.
const firstSecond = () => Math.max(0, recordings.findIndex((one) => one !== state.recording));

/// Forgets what was chosen in another recording.
function forgetViews() {
  Object.assign(state, { range: null, second: firstSecond(), left: "0", right: firstRight() });
}

/// Shows the panels that have data of their own.
function showViews() {
  showSteps();
  showTemporary();
  showComparison();
  showKeep();
  showLinks();
}

/// Hides the links to panels that this recording does not have.
function showLinks() {
  for (const link of document.querySelectorAll("nav a")) link.hidden = document.querySelector(link.getAttribute("href")).hidden;
}
