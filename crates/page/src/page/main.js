// Selects the recording and the moment that the page shows. The page's address contains both, so that a
// link restores them.

/// Shows a moment, or the nearest one that the page can show. The chosen block stays chosen while it lives.
function choose(moment) {
  const { recording } = state;
  const { born, gone } = recording.blocks;
  state.moment = shownMoment(recording, moment);
  if (!(born[state.block] <= state.moment && state.moment < gone[state.block])) state.block = NOTHING;
  follow();
  drawTimeline();
  showLegend();
  drawSegments();
  sayBlock();
  byId("timeline-text").textContent = `Chosen: ${when(recording, state.moment)}: ${bytesText(bytesAt(recording, state.moment))}.`;
  if (state.holders === "now") drawHolders();
  if (state.left === "now" || state.right === "now") showComparison();
  showAddress();
}

const address = { written: -Infinity, waits: 0 };

/// Writes the moment into the address. Does so at most four times a second, because browsers refuse
/// more.
function showAddress() {
  clearTimeout(address.waits);
  const rest = address.written + 250 - performance.now();
  if (rest > 0) { address.waits = setTimeout(showAddress, rest); return; }
  address.written = performance.now();
  const which = recordings.length > 1 ? `recording=${recordings.indexOf(state.recording)}&` : "";
  history.replaceState(null, "", `#${which}moment=${state.moment}${viewText()}`);
}

/// Returns the recording and the moment that the address contains, if any.
function addressed() {
  const named = new URLSearchParams(location.hash.slice(1));
  const number = (name) => named.has(name) ? Number(named.get(name)) : NaN;
  const recording = recordings[number("recording")] || (recordings.length === 1 ? recordings[0] : undefined);
  const moment = number("moment");
  return recording && Number.isFinite(moment) ? { recording, moment } : {};
}

/// Returns the moment to show first: the first failure, or else the peak of live bytes. Without a history
/// there is only one moment.
function firstMoment(recording) {
  const [failure] = recording.failures.list;
  return failure ? failure[0] : recording.peak_live.moment;
}

function show(recording, moment = firstMoment(recording)) {
  Object.assign(state, { recording, from: 0, to: 1, block: NOTHING, wide: 1, range: null, way: firstWay(recording) });
  byId("timeline-range").textContent = "";
  forgetViews();
  if (!recording.has_times) state.axis = "events";
  byId("title").textContent = recordings.length > 1 ? "stratalloc report" : `stratalloc report: ${recording.name}`;
  document.title = `${recording.name}: stratalloc report`;
  document.querySelector("#timeline .hint").hidden = recording.no_history !== null;
  showAdvice();
  showAccount();
  // A file with totals only has nothing to draw.
  const isTotals = recording.totals.length > 0;
  for (const panel of ["timeline", "segments", "steps", "holders", "temporary", "needs", "compare"]) byId(panel).hidden = isTotals;
  if (isTotals) return showLinks();
  showJumps();
  showHolders();
  showNeeds();
  choose(moment);
  showViews();
}

function redraw() {
  if (state.recording.totals.length > 0) return;
  drawTimeline();
  drawSegments();
  drawFlames(flames.top);
  drawNeeds();
  drawSteps();
  drawComparison();
}

function begin() {
  if (!recordings.length) return;
  const select = byId("recording");
  recordings.forEach((recording, at) => select.append(element("option", { value: String(at) }, recording.name)));
  select.addEventListener("change", () => show(recordings[Number(select.value)]));
  byId("chooser").hidden = recordings.length < 2;
  setUpTimeline();
  setUpSegments();
  setUpNeeds();
  setUpSteps();
  byId("flames").addEventListener("keydown", flameKeys);
  const { hash } = location;
  const { recording = recordings[0], moment } = addressed();
  select.value = String(recordings.indexOf(recording));
  show(recording, moment);
  restoreView(hash);
  for (const used of ["click", "change", "input", "keyup", "pointerup", "wheel"]) addEventListener(used, showAddress, { passive: true });
  // A link to a panel only scrolls. It must not replace the recording and moment in the address.
  document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).scrollIntoView();
  }));
  addEventListener("hashchange", () => {
    const { hash } = location;
    const { recording, moment } = addressed();
    if (!recording) return;
    select.value = String(recordings.indexOf(recording));
    if (recording === state.recording && recording.totals.length === 0) choose(moment); else show(recording, moment);
    restoreView(hash);
  });
  let waits = 0;
  addEventListener("resize", () => { clearTimeout(waits); waits = setTimeout(redraw, 60); });
  scheme.addEventListener("change", () => {
    if (state.recording.totals.length > 0) return;
    showJumps(); showLegend(); showNeeds(); showComparison(); redraw();
  });
}

begin();
