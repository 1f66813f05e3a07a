// Compares the devices of a file with several. The order and the sentence are those of `stratalloc advise`.

/// Draws a bar for each device: its peak of reserved bytes, and in it the peak of live bytes.
function showDevices(recording) {
  const { devices, devices_sentence: sentence } = recording;
  if (!sentence) { byId("devices").replaceChildren(); return; }
  const most = Math.max(1, ...devices.map((one) => one.reserved_peak_bytes));
  const part = (colour, size) => element("i", { style: { width: `${100 * size / most}%`, background: painted(colour) } });
  const rows = devices.map((one) => {
    const live = Math.min(one.live_peak_bytes, one.reserved_peak_bytes);
    const name = one.device === recording.device ? element("b", {}, `device ${one.device}, shown`) : `device ${one.device}`;
    const failed = one.events === 0 ? "no events" : grouped(one.failures);
    return { cells: [name, element("div", { class: "share", "aria-hidden": "true" }, part("live", live), part("idle", one.reserved_peak_bytes - live)),
      bytes(one.reserved_peak_bytes), bytes(one.live_peak_bytes), failed] };
  });
  const heading = [["device", true], ["", true], ["most reserved", false], ["most live", false], ["requests that failed", false]];
  byId("devices").replaceChildren(element("p", {}, sentence), table(heading, rows));
}
