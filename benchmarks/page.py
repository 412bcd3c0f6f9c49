"""The page in a browser: python -m benchmarks.page

How long until the first band, and how steady the frames are while a network trains and 100 draws at 200 places are
redrawn, by the page's own clock in a headless chromium without a graphics card. Clocks run on while other programs have
the processor, so the processor time of the browser's own processes is measured beside them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import psutil

from benchmarks import history
from dropbayes.app.page import page_html

REPEATS = 7
SECONDS = 6
SCENE = "#scene=gap&draws=1&oneDraw=1&standard=1&process=1&nDraws=100"

RECORDER = """
window.frames_seen = [];
window.bands = [];
const Plain = window.Worker;
window.Worker = class extends Plain {
  constructor(...values) {
    super(...values);
    this.addEventListener("message", ({ data }) => {
      if (data.task === "band") window.bands.push({ step: data.step, places: data.grid.length, draws: data.draws.length / data.grid.length });
    });
  }
};
// The status has words once there is a band; it is drawn in the next frame.
const observer = new MutationObserver(() => {
  if (!document.getElementById("status")?.textContent) return;
  observer.disconnect();
  requestAnimationFrame(() => { window.first = performance.now(); });
});
observer.observe(document, { childList: true, subtree: true, characterData: true });
const plain = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (callback) => plain((now) => {
  const start = performance.now();
  callback(now);
  window.frames_seen.push({ now, cost: performance.now() - start });
});
"""

WATCH = """(seconds) => new Promise((done) => {
  const times = [];
  const bands = window.bands.length;
  const step = window.bands.at(-1).step;
  window.frames_seen.length = 0;
  const start = performance.now();
  const watch = (now) => {
    times.push(now);
    if (now - start < 1000 * seconds) window.requestAnimationFrame(watch);
    else done({ times, costs: window.frames_seen.map((frame) => frame.cost), bands: window.bands.length - bands,
                steps: window.bands.at(-1).step - step, last: window.bands.at(-1) });
  };
  window.requestAnimationFrame(watch);
})"""


def processor_seconds(kind: str) -> float:
    """Processor time so far of the browser's processes of a kind, all their threads together."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if f"--type={kind}" in process.cmdline():
                used = process.cpu_times()
                total += used.user + used.system
    return total


def first_band(browser: Any, address: str) -> tuple[float, float]:
    """Seconds from the start of navigation to the first frame with a band, and the renderer's processor time by then."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.add_init_script(RECORDER)
    page.goto(address)
    while not page.evaluate("window.first ?? 0"):
        time.sleep(0.005)
    used = processor_seconds("renderer")
    seconds = page.evaluate("window.first") / 1000
    page.close()
    return seconds, used


def frames(browser: Any, address: str) -> dict[str, float]:
    """Frames per second while training, the cost of drawing one, and what the worker did meanwhile."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.add_init_script(RECORDER)
    page.goto(address + SCENE)
    while page.evaluate("window.bands.length") < 3:
        page.wait_for_timeout(50)
    before = processor_seconds("gpu-process")
    seen = page.evaluate(WATCH, SECONDS)
    drawing = processor_seconds("gpu-process") - before
    page.close()
    if (seen["last"]["draws"], seen["last"]["places"]) != (100, 200):
        raise RuntimeError(f"the page drew {seen['last']}, not 100 draws at 200 places.")
    gaps = [later - earlier for earlier, later in zip(seen["times"], seen["times"][1:], strict=False)]
    costs = sorted(cost for cost in seen["costs"] if cost > 0.5)  # frames that drew the picture
    return {
        "frames_per_second": 1000 * len(gaps) / sum(gaps),
        "share_of_frames_late": sum(gap > 25 for gap in gaps) / len(gaps),
        "median_drawing_ms": statistics.median(costs),
        "rasterising_processor_ms_per_frame": 1000 * drawing / len(gaps),
        "bands_per_second": seen["bands"] / SECONDS,
        "training_steps_per_second": seen["steps"] / SECONDS,
    }


def main() -> None:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        sys.exit("no chromium on this machine")
    html = page_html()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = pathlib.Path(folder) / "page.html"
        file.write_text(html)
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        drawn = frames(browser, file.as_uri())
        version = browser.version
        browser.close()
        starts = []
        for _ in range(REPEATS):  # each in a browser of its own, so that only its own renderer is counted
            browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
            starts.append(first_band(browser, file.as_uri()))
            browser.close()
    measurements = {
        "chromium": version,
        "load_per_core": os.getloadavg()[0] / (os.cpu_count() or 1),
        "kilobytes": len(html.encode()) / 1000,
        "first_band_seconds": statistics.median(seconds for seconds, _ in starts),
        "first_band_processor_seconds": statistics.median(used for _, used in starts),
        **drawn,
    }
    for name, value in measurements.items():
        print(f"{name.replace('_', ' '):32} {value if isinstance(value, str) else f'{value:.3g}'}")
    history.write(
        "page",
        measurements,
        [
            history.Goal("size of the file in kB", measurements["kilobytes"], at_most=200),
            history.Goal("seconds to the first band", measurements["first_band_seconds"], at_most=0.5),
            history.Goal("frames per second while training", measurements["frames_per_second"], at_least=58),
        ],
    )


if __name__ == "__main__":
    main()
