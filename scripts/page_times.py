#!/usr/bin/env python3
"""Measures pages of `stratalloc report` in headless Chromium: opening, drawing in each way, zoom steps.

    python3 scripts/page_times.py PAGE.html ..

Prints a line of JSON for each page. `opened_ms` is the time from the begin of the navigation until the page has drawn
itself and its pictures can be read. `first_ms` is the time of the first drawing in each way, `zoom_ms` the median of 50
zoom steps (25 in, 25 out), script time alone. CHROMIUM names another browser.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

SCRIPT = """<script>
{
  const timed = (act) => { const begin = performance.now(); act(); return performance.now() - begin; };
  const rounded = (ms) => Math.round(ms * 10) / 10;
  const zoomed = () => {
    showRange(0, 1);
    const steps = Array.from({ length: 50 }, (_, step) => timed(() => zoom(step < 25 ? 0.75 : 1 / 0.75, 0.43)));
    return rounded(steps.sort((a, b) => a - b)[25]);
  };
  for (const canvas of document.querySelectorAll("canvas")) canvas.getContext("2d").getImageData(0, 0, 1, 1);
  const found = { opened_ms: rounded(performance.now()), events: state.recording.events, rows: state.recording.blocks.length,
    has_every_block: isWhole(state.recording), first_ms: {}, zoom_ms: {} };
  for (const [way] of waysOf(state.recording)) {
    found.first_ms[way] = rounded(timed(() => setWay(way)));
    found.zoom_ms[way] = zoomed();
  }
  document.body.append("RESULT" + JSON.stringify(found) + "TLUSER");
}
</script></body>"""


def measured(page, folder):
    text = pathlib.Path(page).read_text(encoding="utf-8")
    begin, _, end = text.rpartition("</body>")
    copy = pathlib.Path(folder, "page.html")
    copy.write_text(begin + SCRIPT + end, encoding="utf-8")
    command = [os.environ.get("CHROMIUM", "chromium"), "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--disable-dev-shm-usage", "--window-size=1440,900", "--timeout=120000", "--dump-dom"]
    command += [f"--user-data-dir={folder}/browser", copy.as_uri()]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r'RESULT(\{"opened_ms".*?\})TLUSER', output)
    return json.loads(found[1]) if found else {"failed": "the page printed nothing"}


def main():
    for page in sys.argv[1:] or sys.exit(__doc__):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print(json.dumps({"page": pathlib.Path(page).name, "bytes": os.path.getsize(page), **measured(page, folder)}))


if __name__ == "__main__":
    main()
