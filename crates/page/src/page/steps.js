// The steps of the program: the live bytes at the end of each, and their peak in it. A step can be chosen as
// the range of the holders.

const stepsChart = { left: 76, right: 12, top: 10, bottom: 26, chosen: -1 };

function showSteps() {
  const { steps } = state.recording;
  byId("steps").hidden = !steps;
  stepsChart.chosen = -1;
  if (!steps) return;
  steps.list ||= stepsOf(steps);
  byId("steps-text").textContent = steps.sentence;
  byId("steps-found").textContent = steps.found;
  byId("steps-chosen").textContent = steps.is_drawn ? "" : "The steps are those of a replay with the memory that is set, so none can be chosen.";
  byId("steps-growth").replaceChildren(...growthOf(state.recording.growth));
  drawSteps();
}

/// Returns a table of the code whose live bytes grow from step to step.
function growthOf(growth) {
  if (!growth || growth.rows.length === 0) return [];
  const heading = [["a step", false], ["at the end", false], ["blocks", false], ["growth", true], ["requested by", true]];
  const rows = growth.rows.map(([each, held, blocks, course, code]) => ({ cells: [each ? bytes(each) : "-", bytes(held), grouped(blocks), course, withSwatch(state.recording, "line", code)] }));
  return [element("h3", {}, "Code that grows from step to step"), table(heading, rows)];
}

/// Returns the steps, each with both ends, its live bytes then, and its peak.
function stepsOf({ ends }) {
  const [moment, live, peak] = [ends.moment, ends.live, ends.peak].map(summed);
  return Array.from({ length: Math.max(0, moment.length - 1) }, (_, at) => ({ from: moment[at], to: moment[at + 1], before: live[at], live: live[at + 1], peak: peak[at + 1] }));
}

function drawSteps() {
  const { steps } = state.recording;
  if (!steps) return;
  const { pen, width, height } = cleared(byId("steps-canvas"));
  const { left, right, top, bottom } = stepsChart;
  const [inner, tall] = [width - left - right, height - top - bottom];
  const { list } = steps;
  const most = list.reduce((all, { peak }) => Math.max(all, peak), 1) * 1.05;
  const yOf = (number) => top + tall - number / most * tall;
  drawByteAxis(pen, left, left + inner, 0, most, yOf);
  const wide = inner / Math.max(1, list.length);
  const gap = wide > 4 ? 1 : 0;
  list.forEach(({ live, peak }, at) => {
    const x = left + at * wide;
    pen.fillStyle = colour("rounding");
    pen.fillRect(x, yOf(peak), Math.max(0.5, wide - gap), yOf(0) - yOf(peak));
    pen.fillStyle = colour("live");
    pen.fillRect(x, yOf(live), Math.max(0.5, wide - gap), yOf(0) - yOf(live));
  });
  if (stepsChart.chosen >= 0) {
    pen.strokeStyle = colour("text");
    pen.lineWidth = 2;
    pen.strokeRect(left + stepsChart.chosen * wide - 1, top, Math.max(3, wide - gap) + 2, tall);
    pen.lineWidth = 1;
  }
  pen.fillStyle = colour("quiet");
  pen.textAlign = "center";
  for (const at of ticks(1, list.length, Math.min(list.length, inner / 60))) if (Number.isInteger(at)) pen.fillText(grouped(at), left + (at - 0.5) * wide, height - 8);
  pen.textAlign = "left";
  pen.fillText("step", 4, height - 8);
  legend("steps-legend", [["live at the end of the step", colour("live")], ["the peak in the step", colour("rounding")]]);
}

function stepText(at) {
  const { before, live, peak, from, to } = state.recording.steps.list[at];
  const change = live - before;
  return `step ${grouped(at + 1)}: ${bytes(live)} live at its end (${change < 0 ? "−" : "+"}${bytes(Math.abs(change))}), at most ${bytes(peak)}, events ${grouped(from)} to ${grouped(to)}`;
}

/// Chooses a step as the range of the holders.
function chooseStep(at) {
  const { steps } = state.recording;
  stepsChart.chosen = Math.max(0, Math.min(steps.list.length - 1, at));
  byId("steps-chosen").textContent = `Chosen: ${stepText(stepsChart.chosen)}. The holders below show this range.`;
  drawSteps();
  setRange(steps.list[stepsChart.chosen].from, steps.list[stepsChart.chosen].to);
}

function setUpSteps() {
  const canvas = byId("steps-canvas");
  const stepAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - stepsChart.left) / (box.width - stepsChart.left - stepsChart.right);
    const { list } = state.recording.steps;
    return Math.max(0, Math.min(list.length - 1, Math.floor(share * list.length)));
  };
  canvas.addEventListener("pointerleave", () => tip(null, null));
  canvas.addEventListener("pointermove", (event) => tip(event, [stepText(stepAt(event))]));
  canvas.addEventListener("click", (event) => { if (state.recording.steps.is_drawn) chooseStep(stepAt(event)); });
  canvas.addEventListener("keydown", (event) => {
    const { steps } = state.recording;
    const to = { ArrowLeft: stepsChart.chosen - 1, ArrowRight: stepsChart.chosen + 1, Home: 0, End: steps.list.length - 1 }[event.key];
    if (to === undefined || !steps.is_drawn || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    chooseStep(to);
  });
}
