"""A real browser for the tests of the page: Chromium without a window, and what it would send to the loudspeaker.

    python -m tests.browser http://127.0.0.1:8000/ tests/pictures

takes the README's pictures of a server that runs.
"""

import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

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
    expect.set_options(timeout=60_000)  # of 5 s; a busy machine is no failure
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


def take_pictures(url, folder):
    """While it speaks: on a desk in daylight, and on a phone at night."""
    desk = {"viewport": {"width": 1120, "height": 735}}
    phone = {"viewport": {"width": 390, "height": 880}, "color_scheme": "dark", "has_touch": True}
    with open_browser() as browser:
        for name, context in (("page.png", desk), ("page_phone.png", phone)):
            with open_page(browser, url, **context) as page:
                page.wait_for_selector("#voice option", state="attached")
                page.fill("#seed", "7")
                page.click("#speak")
                page.wait_for_timeout(4_000)
                page.mouse.move(0, 0)
                page.evaluate("document.activeElement.blur()")
                if context is phone:
                    page.locator(".settings").evaluate("it => it.scrollIntoView()")
                page.screenshot(path=folder / name)
                print(f"{name}: RTF {page.inner_text('#rtf')}")


if __name__ == "__main__":
    take_pictures(sys.argv[1], Path(sys.argv[2]))
