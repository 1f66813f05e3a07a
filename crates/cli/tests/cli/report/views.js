// Uses every control of the views, and reports the results. The test appends this script to a copy of the
// page.
"use strict";

/// Presses a button with this value, or with this text.
function pressIn(id, value) {
  const buttons = [...document.querySelectorAll(`#${id} button`)];
  const found = buttons.find((button) => button.dataset.value === value || button.textContent === value);
  if (!found) throw new Error(`${id} has no button ${value}`);
  found.click();
  return found.getAttribute("aria-pressed");
}

const key = (canvas, name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));

/// Chooses ranges by the fields, and shows their blocks in each way.
function useRanges(recording) {
  if (recording.no_history) return [];
  const { events } = recording;
  const found = [];
  pressIn("holders-bar", "range");
  for (const [from, to] of [[0, events], [Math.floor(events / 3), Math.ceil(events / 2)], [events - 1, events]]) {
    for (const [id, value] of [["range-from", 0], ["range-to", to], ["range-from", from]]) {
      byId(id).value = String(value);
      byId(id).dispatchEvent(new Event("change"));
    }
    for (const way of ["allocated", "freed", "lived"]) {
      const isPressed = pressIn("holders-range", way) === "true";
      const { bytes, blocks, places } = holdersNow(recording);
      const categories = categoriesOf(recording, places).reduce((all, row) => all + row.requested_bytes, 0);
      found.push({ range: state.range, way, bytes, blocks, isByCategory: recording.layers.category.length === 0 || categories === bytes, isPressed, text: byId("flames-text").textContent, missing: byId("holders-missing").textContent,
        flames: byId("flames").children.length, rows: byId("holders-table").querySelectorAll("tbody tr").length, csv: csvText(TABLES.holders(recording)).split("\r\n").length });
    }
  }
  pressIn("holders-range", "no range");
  return [...found, { isGone: state.range === null && state.holders === "0" && byId("holders-range").hidden }];
}

function useTemporary({ temporary }) {
  if (byId("temporary").hidden) return null;
  const rows = () => [...byId("temporary-table").querySelectorAll("tbody tr")];
  const first = TEMPORARY_ORDERS.map(([order]) => { pressIn("temporary-bar", order); return rows()[0].textContent; });
  byId("temporary-table").querySelector("button")?.click();
  const all = rows().length;
  pressIn("temporary-bar", "requested_bytes");
  return { text: byId("temporary-text").textContent, first, isWhole: all === temporary.rows.length };
}

function useSteps({ steps }) {
  if (byId("steps").hidden) return null;
  const canvas = byId("steps-canvas");
  const before = canvas.toDataURL();
  const box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new MouseEvent("click", { clientX: box.left + stepsChart.left + 1, clientY: box.top + 50, bubbles: true }));
  const first = { range: state.range, text: byId("steps-chosen").textContent, isDrawn: canvas.toDataURL() !== before };
  key(canvas, "End");
  key(canvas, "ArrowLeft");
  const result = { growth: byId("steps-growth").innerText, first, last: state.range, count: steps.list.length, holders: state.holders, csv: csvText(TABLES.steps({ steps })).split("\r\n").length };
  setRange(null);
  return result;
}

/// Compares the recording with each other one at each moment, and two moments of it.
function useComparison(recording) {
  if (byId("compare").hidden) return null;
  const selects = () => [...byId("compare-bar").querySelectorAll("select")];
  const choose = (at, value) => { const select = selects()[at]; select.value = value; select.dispatchEvent(new Event("change")); };
  const found = [];
  const others = recordings.length > 1 ? recordings.map((_, at) => String(at)) : [null];
  for (const other of others) {
    if (recordings[other]?.totals.length) continue;
    if (other !== null) choose(1, other);
    for (const { value } of [...selects().at(-1).options]) {
      choose(selects().length - 1, value);
      const sides = comparedSides();
      const rows = comparedRows(sides);
      const sum = (side) => rows.reduce((all, row) => all + row.bytes[side], 0);
      found.push({ other, value, isSum: sides.every(({ holders }, side) => sum(side) === holders.bytes), figures: byId("compare-figures").innerText, isShown: byId("compare-holders").querySelectorAll("tbody tr").length > 0,
        needs: byId("compare-needs").innerText, isCanvas: !byId("compare-canvas").hidden, csv: csvText(TABLES.compare(recording)).split("\r\n").length === rows.length + 2 });
    }
  }
  return found;
}

/// Saves every picture and table, and returns their sizes.
function useKeep(recording) {
  const files = [];
  const create = URL.createObjectURL;
  URL.createObjectURL = (blob) => { files.push([blob.type, blob.size]); return "#"; };
  const click = HTMLAnchorElement.prototype.click;
  HTMLAnchorElement.prototype.click = function () { files.push(this.download); };
  const isShown = (box) => box.offsetParent !== null;
  const boxes = [...document.querySelectorAll("[data-keep]")].filter(isShown);
  for (const box of boxes) for (const button of box.querySelectorAll("button")) if (button.textContent !== "PNG") button.click();
  byId("keep-answer").querySelector("button").click();
  const pictures = boxes.map((box) => box.dataset.keep).filter((which) => PICTURES[which] && (!PICTURES[which].canvas || !byId(PICTURES[which].canvas).hidden)).map((which) => {
    const svg = new DOMParser().parseFromString(pictureSvg(which), "image/svg+xml");
    const canvas = pictureCanvas(which);
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = new Set();
    for (let at = 0; at < data.length; at += 4) colours.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
    return { which, isXml: svg.querySelector("parsererror") === null, parts: svg.querySelectorAll("rect, path, text, image").length, scripts: svg.querySelectorAll("script, foreignObject").length, colours: colours.size };
  });
  URL.createObjectURL = create;
  HTMLAnchorElement.prototype.click = click;
  const { trace, version, device } = JSON.parse(answerText(recording));
  return { files, pictures, answer: { trace, version, device }, formula: csvText([["=1+1", '"', -5, "a,b\nc"]]) };
}

/// Restores a view from its address.
function useAddress(recording) {
  if (recording.no_history) return null;
  const which = recordings.length > 1 ? `recording=${recordings.indexOf(recording)}&` : "";
  const layers = recording.layers.category.length ? "&layers=block" : "";
  const wanted = `&colours=pool&curves=unlimited&floor=auto&blocks=freed&order=blocks${layers}&zoom=0.25-0.75&range=1-2&holders=range&frames=all&search=a%20b%26c`;
  const go = (hash) => { history.replaceState(null, "", hash); dispatchEvent(new Event("hashchange")); };
  go(`#${which}moment=0${wanted}`);
  const restored = viewText();
  const isShown = byId("segments-bar").querySelector('[data-value="pool"]').getAttribute("aria-pressed") === "true" && byId("holders-bar").querySelector("input").value === "a b&c";
  go(`#${which}moment=0&zoom=9-1&range=5-1&holders=constructor&over=x&layers=x&colours=__proto__&with=99&left=x&right=%00`);
  const refused = { zoom: [state.from, state.to], range: state.range, by: state.by, holders: state.holders };
  setRange(null);
  Object.assign(state, { by: "state", curve: "at_need", floor: "all", rangeWay: "allocated", temporaryOrder: "requested_bytes", allFrames: false, search: "", from: 0, to: 1, holders: "0" });
  show(recording);
  return { wanted, restored, isShown, refused };
}

/// Returns the luminance of a colour, as the guidelines for contrast define it.
function luminance([red, green, blue]) {
  const [r, g, b] = [red, green, blue].map((part) => part / 255).map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const parts = (text) => text.match(/[\d.]+/g).map(Number);

/// Returns a text without the signs that speech does not name.
const plainText = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}\p{P} ]/gu, "").trim();

/// Returns elements whose text has too little contrast, whose name does not contain their text, or that lack
/// a name; and headings of tables without a text.
function barriers() {
  const found = [];
  const visible = [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() && node.tagName !== "SCRIPT");
  for (const node of visible) {
    const own = [...node.childNodes].filter(({ nodeType }) => nodeType === 3).map(({ textContent }) => textContent.trim()).join("");
    if (own !== "" && !node.closest("canvas, option, #tip")) {
      let back = node;
      while (back && parts(getComputedStyle(back).backgroundColor)[3] === 0) back = back.parentElement;
      const [one, other] = [getComputedStyle(node).color, back ? getComputedStyle(back).backgroundColor : "rgb(255, 255, 255)"].map((text) => luminance(parts(text))).sort((a, b) => b - a);
      if ((one + 0.05) / (other + 0.05) < 4.5 && !node.closest(".dim")) found.push(`contrast ${((one + 0.05) / (other + 0.05)).toFixed(1)}: ${node.outerHTML.slice(0, 90)}`);
    }
    const label = node.getAttribute("aria-label");
    const text = node.innerText?.trim() ?? "";
    if (node.tagName === "BUTTON" && !(label || text)) found.push(`no name: ${node.outerHTML.slice(0, 90)}`);
    if (node.tagName === "BUTTON" && label && /\p{L}/u.test(text) && !plainText(label).includes(plainText(text))) found.push(`${text} is not in ${label}`);
    if (node.tagName === "TH" && text === "" && innerWidth > 600) found.push(`empty heading: ${node.outerHTML}`);
    if (/^(INPUT|SELECT)$/.test(node.tagName) && !label && !node.labels.length) found.push(`no label: ${node.outerHTML.slice(0, 90)}`);
    if (/^(canvas)$/i.test(node.tagName) && !label) found.push(`no label: ${node.id}`);
  }
  return [...new Set(found)];
}

/// Returns the rows of tables that are too high, or whose last column is outside of the window.
function poorRows() {
  const rows = [...document.querySelectorAll("main .table tbody tr")].filter((row) => row.checkVisibility());
  const isPoor = (row) => {
    const box = row.getBoundingClientRect();
    const last = row.lastElementChild.getBoundingClientRect();
    return box.height > 160 || innerWidth < 600 && (last.right > innerWidth || last.width < 60 && row.lastElementChild.matches(".text"));
  };
  return rows.filter(isPoor).map((row) => `${Math.round(row.getBoundingClientRect().height)} px: ${row.innerText.slice(0, 120)}`);
}

function tooWide() {
  const wide = [...document.querySelectorAll("body *")].filter((node) => !node.closest(".table, #flames, #tip") && node.getBoundingClientRect().right > innerWidth + 0.5);
  return wide.map((node) => `${node.tagName} ${node.id}: ${node.textContent.slice(0, 40)}`);
}

const result = { width: innerWidth, dark: isDark(), recordings: [] };
try {
  const select = byId("recording");
  recordings.forEach((recording, at) => {
    select.value = String(at);
    if (at > 0) select.dispatchEvent(new Event("change"));
    if (recording.totals.length) return;
    const seen = { name: recording.name, barriers: barriers(), poorRows: poorRows(), address: useAddress(recording), ranges: useRanges(recording), temporary: useTemporary(recording), steps: useSteps(recording),
      links: [...document.querySelectorAll("nav a")].every((link) => link.hidden !== document.querySelector(link.getAttribute("href")).checkVisibility()),
      compared: useComparison(recording), kept: useKeep(recording), tooWide: tooWide() };
    result.recordings.push(seen);
  });
} catch (error) {
  problems.push(`the test: ${error.stack}`);
}
result.problems = problems;
parent.postMessage("RESULT" + JSON.stringify(result).replace(/[&<>]/g, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0")) + "TLUSER", "*");
