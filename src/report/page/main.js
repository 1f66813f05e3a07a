// Which recording and which moment are shown.

/// Shows a moment, or the one beside it that can be shown.
function choose(moment) {
  const { recording } = state;
  state.moment = shownMoment(recording, moment);
  state.block = NOTHING;
  follow();
  drawTimeline();
  drawSegments();
  byId("segments-says").textContent = "";
  const { live, reserved } = bytesAt(recording, state.moment);
  byId("timeline-says").textContent = `Chosen: ${when(recording, state.moment)}: ${bytes(live)} live, ${bytes(reserved - live)} cached, ${bytes(reserved)} reserved.`;
  if (state.holders === "now") drawHolders();
}

function show(recording) {
  Object.assign(state, { recording, from: 0, to: 1, block: NOTHING, wide: 1 });
  if (!recording.has_times) state.axis = "events";
  byId("title").textContent = recordings.length > 1 ? "stratalloc report" : `stratalloc report: ${recording.name}`;
  document.title = `${recording.name}: stratalloc report`;
  showAdvice();
  showJumps();
  showHolders();
  showNeeds();
  const [failure] = recording.failures.list;
  choose(failure ? failure[0] : recording.peak_reserved.moment);
}

function redraw() {
  drawTimeline();
  drawSegments();
  drawFlames(flames.top);
  drawNeeds();
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
  byId("flames").addEventListener("keydown", flameKeys);
  show(recordings[0]);
  let waits = 0;
  addEventListener("resize", () => { clearTimeout(waits); waits = setTimeout(redraw, 60); });
  scheme.addEventListener("change", () => { showJumps(); showNeeds(); redraw(); });
}

begin();
