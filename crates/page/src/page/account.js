// The owners of the used memory of the device, when the recording was written.

const OWNER_COLOURS = { allocator: "live", context: "driver", unknown: "idle" };

function showAccount() {
  const { account } = state.recording;
  byId("account").hidden = account.length === 0;
  const used = account.reduce((sum, row) => sum + row.bytes, 0);
  const named = ({ owner, kind }) => kind ? `${owner}, ${kind}` : owner;
  const part = (row) => element("i", { title: `${named(row)}: ${bytes(row.bytes)}`,
    style: { width: `${100 * Math.max(0, row.bytes) / Math.max(1, used)}%`, background: `var(--${OWNER_COLOURS[row.owner] || "rest"})` } });
  const rows = account.map((row) => ({ cells: [row.owner, row.kind, bytes(row.bytes), percent(row.bytes, used), row.found_by] }));
  const heading = [["owner", true], ["kind", true], ["bytes", false], ["of used", false], ["found by", true]];
  const label = account.map((row) => `${named(row)}: ${bytes(row.bytes)}`).join("; ");
  byId("account-table").replaceChildren(element("div", { class: "stack", role: "img", "aria-label": label }, ...account.map(part)), table(heading, rows));
}
