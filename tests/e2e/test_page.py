"""The page at / of the real app, in a real browser: what it promises to the ear, with real engines behind it."""

import json
import time
import wave
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from tests.browser import open_browser, open_page
from tests.e2e.conftest import DEADLINE_S

LONG_TEXT = "Every word of this takes its time, and there is no hurry. " * 100

SHORT = {
    "max_new_tokens": 30
}  # what the page doesn't ask for, and these weights need: they seldom find an end


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


def num_held(app):
    """From another thread: in this one, the browser's driver has a running loop, and Serve's handles would refuse."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: app.num_held).result(timeout=2 * DEADLINE_S)


def wait_until(predicate, what, timeout_s=DEADLINE_S):
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_long_text_is_heard_while_the_talker_speaks_on_and_stopping_frees_it(app, browser):
    with open_page(browser, app.url) as page:
        expect(page.locator("#voice option")).not_to_have_count(0)
        page.fill("#input", LONG_TEXT)
        page.click("#speak")
        wait_until(lambda: page.evaluate("loudness()") > 0, "nothing is heard")
        assert num_held(app) > 0, "the server had finished when the first sound was heard"
        assert page.inner_text("#ttfa").endswith(" ms")
        bars = int(page.get_attribute("#waveform", "data-bars"))
        wait_until(
            lambda: int(page.get_attribute("#waveform", "data-bars")) > bars, "the waveform doesn't grow"
        )
        page.keyboard.press("Escape")
        assert page.evaluate("loudness()") == 0
        wait_until(lambda: num_held(app) == 0, "the server speaks on to nobody")


def cut_short(request):
    return json.dumps({**request.post_data_json, **SHORT})


def test_the_file_is_the_servers_own_at_the_seed_that_is_shown(app, browser):
    with open_page(browser, app.url) as page:
        expect(page.locator("#voice option")).not_to_have_count(0)
        page.route("**/v1/audio/speech", lambda route: route.continue_(post_data=cut_short(route.request)))
        page.fill("#input", "Hi.")
        page.fill("#seed", "11")
        page.click("#speak")
        expect(page.locator("#status")).to_contain_text("s of speech", timeout=60_000)
        assert float(page.inner_text("#rtf")) > 0
        with page.expect_download() as download:
            page.click("#download")
        voice = page.input_value("#voice")
        served = app.speak(input="Hi.", seed=11, voice=voice, response_format="pcm", **SHORT).content
        with wave.open(str(download.value.path())) as reader:
            assert reader.readframes(reader.getnframes()) == served


def test_it_works_under_a_route_prefix(deterministic, browser):
    assert deterministic.url.endswith("/deterministic/")
    with open_page(browser, deterministic.url) as page:
        expect(page.locator("#voice option")).not_to_have_count(0)
        assert f"'{deterministic.url}v1/audio/speech'" in page.inner_text("#snippet")
        page.click("#speak")
        wait_until(lambda: page.evaluate("loudness()") > 0, "nothing is heard")
        page.keyboard.press("Escape")
