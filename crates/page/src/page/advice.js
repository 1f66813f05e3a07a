// The settings to make, and the causes of reserved memory. The sentences are those of
// `stratalloc advise`.

const CAUSE_COLOURS = ["live", "rounding", "waiting", "rest", "idle", "driver"];

function showAdvice() {
  const { recording } = state;
  const { advice } = recording;
  showFacts(recording);
  showDevices(recording);
  for (const [name, text] of Object.entries(recording.headline)) {
    const line = byId(`headline-${name}`);
    line.hidden = text === "";
    line.querySelector("span").textContent = text;
  }
  byId("sentence").textContent = advice.sentence;
  byId("set").replaceChildren(...(advice.set.length ? [element("div", { class: "set" },
    ...advice.set.flatMap(({ allocator, set, needs }) => [element("span", { class: "quiet" }, `in ${allocator}`), copied(set, ` ${needs}`)]))] : []));
  byId("more").textContent = [advice.limit, advice.searched].filter(Boolean).join(" ");
  byId("notes").replaceChildren(...recording.notes.map((note) => element("p", { class: "note" }, note)));
  byId("unknown").replaceChildren(...(advice.unknown.length ? [element("p", {}, "The recording does not show:"),
    element("ul", {}, ...advice.unknown.map((what) => element("li", {}, what)))] : []));
  byId("meaning").textContent = advice.is_searched ? "Needs: the smallest device size, or memory limit, from which on no request fails. With more memory a cache keeps more than that." : "";
  const totals = recording.totals.map(([name, number]) => ({ cells: [name, bytes(number)] }));
  byId("causes").replaceChildren(...advice.pictures.flatMap(causesOf), ...(totals.length ? [table([["total", true], ["bytes", false]], totals)] : []));
}

/// Returns a line of text to paste elsewhere, with a button that copies it.
function copied(line, after) {
  const code = element("code", {}, line);
  const button = press("copy", `copy ${line}`, () => {
    getSelection().selectAllChildren(code);
    // `execCommand` also works on a page opened from disk, and without a permission.
    button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl+C";
  });
  button.classList.add("copy");
  return element("span", {}, code, " ", button, after);
}

/// Returns the limit, or both ends of the interval that contains it.
function limitText(limit, format = bytes) {
  return limit.below_bytes == null ? format(limit.bytes) : `${format(limit.bytes)} to ${format(limit.below_bytes)}`;
}

function showFacts(recording) {
  const fact = (name, text, bad) => element("span", { class: bad ? "bad" : null }, `${name} `, element("b", {}, text));
  const failures = recording.advice.failures ?? recording.failures.total;
  byId("facts").replaceChildren(
    fact("recording", recording.name), fact("device", String(recording.device)), fact("settings", recording.conf || "(default)"),
    ...(recording.no_history ? [fact("entries", grouped(recording.no_history.entries))] : [fact("events", grouped(recording.events)),
      ...(recording.has_times ? [fact("time", duration(recording.duration_us))] : []),
      fact("most reserved", bytes(recording.peak_reserved.bytes)), fact("most live", bytes(recording.peak_live.bytes))]),
    ...(recording.limit ? [fact("limit", limitText(recording.limit))] : []),
    ...(recording.no_history ? [] : [fact("requests that failed", grouped(failures), failures > 0)]));
}

/// Returns the sentence about a moment, a bar of all causes, and a row for each stream and pool.
function causesOf({ name, sentence, causes, all, heaps }) {
  const total = all.reduce((sum, number) => sum + number, 0);
  const shown = causes.map((cause, at) => at).filter((at) => all[at] > 0);
  const bar = (numbers, of) => shown.map((at) => element("i", { style: { width: `${100 * numbers[at] / Math.max(1, of)}%`, background: painted(CAUSE_COLOURS[at]) },
    title: `${causes[at]}: ${bytes(numbers[at])}` }));
  const keys = element("div", { class: "legend" }, ...shown.map((at) => element("span", {},
    element("i", { style: { background: painted(CAUSE_COLOURS[at]) } }), `${causes[at]}: ${bytes(all[at])} (${percent(all[at], total)})`)));
  const largest = Math.max(1, ...heaps.map(([, numbers]) => numbers.reduce((sum, number) => sum + number, 0)));
  const rows = heaps.slice(0, 16).map(([heap, numbers, free]) => {
    const sum = numbers.reduce((all, number) => all + number, 0);
    return { cells: [element("span", { style: { whiteSpace: "nowrap" }, title: heap }, heap), element("div", { class: "share" }, ...bar(numbers, largest)), bytes(sum), ...shown.map((at) => bytes(numbers[at])), bytes(free)] };
  });
  const heading = [["stream or pool", true], ["", true], ["reserved", false], ...shown.map((at) => [causes[at], false]), ["largest free block", false]];
  const free = heaps.length === 1 ? [element("p", { class: "quiet" }, `The largest free block has ${bytes(heaps[0][2])}.`)] : [];
  const more = heaps.length > 16 ? [element("p", { class: "quiet" }, `and ${heaps.length - 16} more`)] : [];
  return [element("h3", {}, name === "first failure" ? "At the first failed request" : `At the ${name}`), element("p", {}, sentence),
    element("div", { class: "stack", role: "img", "aria-label": sentence }, ...bar(all, total)), keys, ...free, ...(rows.length > 1 ? [table(heading, rows)] : []), ...more];
}
