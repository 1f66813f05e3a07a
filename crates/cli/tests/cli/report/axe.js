// Runs axe-core, which the test puts before this script, and reports its findings. It goes on after the page
// has loaded.
"use strict";

const findings = { width: innerWidth, dark: isDark(), violations: [], problems };
const post = () => parent.postMessage("RESULT" + JSON.stringify(findings).replace(/[&<>]/g, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0")) + "TLUSER", "*");
const note = ({ violations }) => findings.violations.push(...violations.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html }) => html.slice(0, 120)).join(" | ")}`));
const rules = { "label-content-name-mismatch": { enabled: true } };
const shownWith = (act) => () => { act(); return axe.run(document, { rules }).then(note); };
shownWith(() => {})()
  .then(shownWith(() => { if (!state.recording.no_history) chooseHolders("range"); }))
  .then(shownWith(() => { const last = recordings.length - 1; byId("recording").value = String(last); show(recordings[last]); }))
  .catch((error) => findings.violations.push(String(error.stack))).then(post);
