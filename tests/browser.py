"""A real browser for the tests of the page: Chromium without a window, and what it would send to the loudspeaker."""

import shutil
from contextlib import contextmanager

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")  # as in the Makefile

# Listens to whatever is connected to the loudspeaker, whoever connects it: the page knows nothing of it.
_TAP = """
(() => {
  const connect = AudioNode.prototype.connect, taps = new Map();
  AudioNode.prototype.connect = function (target, ...rest) {
    if (target instanceof AudioDestinationNode) {
      const context = target.context;
      if (!taps.has(context)) taps.set(context, context.createAnalyser());
      connect.call(this, taps.get(context));
    }
    return connect.call(this, target, ...rest);
  };
  window.loudness = () => Math.max(0, ...[...taps].map(([context, tap]) => {
    if (context.state !== "running") return 0;
    const samples = new Float32Array(tap.fftSize);
    tap.getFloatTimeDomainData(samples);
    return Math.max(...samples.map(Math.abs));
  }));
})();
"""


def find_chromium():
    """Of the machine: playwright's own is on no package registry. Raises where there is none: no test is skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "the tests of the page need Chromium: `make browser` as root, or install it another way"
    return found


@contextmanager
def open_browser():
    """Close it in the module that opened it: while it lives, pytest's own loop can't run in this thread."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(),
            args=["--no-sandbox"],  # root, as in a container, has none
        )
        yield browser
        browser.close()


@contextmanager
def open_page(browser, url, **context):
    """The page, ready; whatever it loads from elsewhere, or complains of in its console, fails the test."""
    context.setdefault("viewport", {"width": 1280, "height": 900})
    with browser.new_context(**context) as opened:
        page = opened.new_page()
        page.problems = []
        page.on("console", lambda m: m.type in ("error", "warning") and page.problems.append(m.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda r: r.url.startswith((url, "blob:", "data:")) or page.problems.append(r.url))
        page.add_init_script(_TAP)
        page.goto(url)
        yield page
        # Chromium itself logs every answer of 400 and above; the tests look at what the page makes of them.
        assert [p for p in page.problems if "Failed to load resource" not in p] == []
