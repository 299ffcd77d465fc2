"""The page in a real Chromium, over real deployment classes with fake engines: what people do, see and hear."""

import asyncio
import hashlib
import io
import subprocess
import sys
import threading
import time
import wave
from contextlib import contextmanager

import numpy as np
import pytest
import soundfile
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from deployments.reference_fetch import FetchPolicy
from tests.browser import open_browser, open_page
from tests.clips import wav_clip
from tests.deployments.conftest import GOLDEN, TINY, Chain
from tests.fakes import FakeReferenceEncoder, Script, fake_codes, fake_pcm, until

MODELS = {
    "tiny": TINY,
    "large": str(GOLDEN / "custom_voice_large"),
    "design": str(GOLDEN / "voice_design"),
    "base": str(GOLDEN / "base"),
}
KEY = "sk-page-55e0"
LONG = {"num_frames": 700}  # a minute of speech, made at once
expect.set_options(timeout=30_000)
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


class Site:
    """A chain behind a real HTTP server. script: of its talkers; tests may change it."""

    def __init__(self, folder, models, **settings):
        self.script, self._folder, self._models, self._settings = Script(), folder, models, settings
        self._ready, self._server = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self):
        encoders = {"base": FakeReferenceEncoder()} if "base" in self._models else {}
        self.chain = Chain(
            self.script, Script(), self._models, encoders, self._folder, FetchPolicy(), self._settings
        )
        config = uvicorn.Config(self.chain.app, port=0, log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve())
        try:
            await until(lambda: self._server.started or serving.done(), timeout_s=30)
            (socket,) = self._server.servers[0].sockets
            self.url = "http://{}:{}/".format(*socket.getsockname())
            self._ready.set()
            await serving
        finally:
            self.chain.stop()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory):
    with Site(tmp_path_factory.mktemp("voices"), MODELS, resume_timeout_s=0.0) as site:
        yield site


@pytest.fixture
def site(shared_site):
    vars(shared_site.script).update(vars(Script()))
    return shared_site


@pytest.fixture
def open_ready(browser, site):
    """The page once it knows what the server offers."""

    @contextmanager
    def opened(**context):
        with open_page(browser, site.url, **context) as page:
            expect(page.locator("#voice option")).not_to_have_count(0)
            yield page

    return opened


@pytest.fixture
def page(open_ready):
    with open_ready() as page:
        yield page


def wait_until(predicate, what, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_heard(page):
    return page.evaluate("loudness()") > 0


def speak_to_the_end(page):
    page.click("#speak")
    expect(page.locator("#speak")).to_have_text("Speak", timeout=60_000)


def expected_samples(page, num_frames):
    return np.frombuffer(fake_pcm(fake_codes(int(page.inner_text("#take-seed")), 0, num_frames), 1920), "<i2")


def downloaded(page):
    with page.expect_download() as download:
        page.click("#download")
    return download.value.path().read_bytes()


def num_colours(page):
    """Of the waveform's bars."""
    return page.evaluate("""() => {
      const canvas = document.querySelector('#waveform');
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      const colours = new Set();
      for (let n = 0; n < data.length; n += 4) if (data[n + 3] === 255) colours.add(data.slice(n, n + 3).join());
      return colours.size;
    }""")


# ---------------------------------------------------------------- heard
def test_speech_is_heard_while_it_is_made_and_can_be_stopped(page, site):
    vars(site.script).update(
        LONG, seconds_per_item=0.3, permits=threading.Semaphore(25)
    )  # of 31: never whole
    page.click("#speak")
    wait_until(lambda: is_heard(page), "nothing is heard")
    assert site.chain.num_held == 2, "the server had finished when the first sound was heard"
    assert page.inner_text("#status") == "Speaking…"
    assert int(page.inner_text("#ttfa").removesuffix(" ms")) >= 300  # the first item's time alone
    assert float(page.inner_text("#rtf")) > 0

    bars = page.get_attribute("#waveform", "data-bars")
    wait_until(lambda: page.get_attribute("#waveform", "data-bars") != bars, "the waveform doesn't grow")
    wait_until(lambda: num_colours(page) == 2, "what was heard and what waits look the same")

    assert page.inner_text("#speak") == "Stop"
    with page.expect_event("requestfailed"):  # what Serve makes of that: tests/e2e/test_page.py
        page.click("#speak")
    assert page.inner_text("#speak") == "Speak"
    assert page.inner_text("#status").startswith("Stopped after ")
    assert not is_heard(page)
    page.click("#replay")  # what came is kept
    wait_until(lambda: is_heard(page), "nothing is heard again")
    page.click("#speak")


def test_parts_are_played_once_in_order_and_without_a_gap(page):
    scheduled = page.evaluate("""async () => {
      const { PcmPlayer } = await import('./page/pcm_player.js');
      const scheduled = [], player = new PcmPlayer();
      const start = AudioBufferSourceNode.prototype.start;
      AudioBufferSourceNode.prototype.start = function (when) {
        const { sampleRate, length } = this.buffer;
        scheduled.push([when, length, this.buffer.getChannelData(0)[0], sampleRate, this.context.sampleRate]);
        return start.call(this, when);
      };
      player.open(24000, () => {});
      for (const [n, length] of [1920, 5760, 1, 15361, 777].entries()) {
        player.append(new Float32Array(length).fill((n + 1) / 8));
      }
      player.close();
      return scheduled;
    }""")
    begins, lengths, firsts, *rates = zip(*scheduled, strict=True)
    assert lengths == (1920, 5760, 1, 15361, 777)
    assert firsts == (1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8)
    assert {rate for both in rates for rate in both} == {24_000}
    ends = [begin + length / 24_000 for begin, length in zip(begins, lengths, strict=True)]
    assert begins[1:] == pytest.approx(ends[:-1], abs=1e-6)  # a sample is 4e-5 s


def test_a_dry_player_gathers_before_it_goes_on_and_says_so(page, site):
    """Parts of 0.08, 0.24 and 0.64 s, each when the one before has long been heard: dry twice if it didn't."""
    vars(site.script).update(num_frames=12, permits=threading.Semaphore(1))
    page.evaluate("""() => {
      window.numHeard = 0;
      const start = AudioBufferSourceNode.prototype.start;
      AudioBufferSourceNode.prototype.start = function (when) {
        this.addEventListener("ended", () => { window.numHeard += 1; });
        return start.call(this, when);
      };
    }""")
    page.click("#speak")
    wait_until(lambda: page.evaluate("numHeard") == 1, "the first part isn't heard")
    bars = page.get_attribute("#waveform", "data-bars")
    site.script.permits.release()
    wait_until(lambda: page.get_attribute("#waveform", "data-bars") != bars, "the second part doesn't come")
    page.wait_for_timeout(700)
    assert page.evaluate("numHeard") == 1, "it didn't gather"
    site.script.permits.release()
    expect(page.locator("#speak")).to_have_text("Speak", timeout=60_000)
    assert page.inner_text("#status") == "1.0 s of speech, and the sound ran dry once."


def test_downloads_are_what_was_heard_in_any_format(page, site):
    page.fill("#seed", "9007199254740993")  # no double holds it
    speak_to_the_end(page)
    assert page.inner_text("#take-seed") == "9007199254740993"
    assert page.inner_text("#length") == "0.7 s"
    expected = expected_samples(page, 9)
    with wave.open(io.BytesIO(downloaded(page))) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (24_000, 1, 2)
        assert np.array_equal(np.frombuffer(reader.readframes(1 << 20), "<i2"), expected)
    page.select_option("#response_format", "pcm")
    assert downloaded(page) == expected.tobytes()
    page.fill("#input", "Another text, which changes nothing about what was heard.")
    page.select_option("#response_format", "flac")
    assert page.inner_text("#download") == "Download FLAC"
    samples, rate_hz = soundfile.read(io.BytesIO(downloaded(page)), dtype="int16")
    assert rate_hz == 24_000
    assert np.array_equal(samples, expected)


def test_what_is_chosen_is_what_is_asked_for(page, site):
    page.select_option("#model", "large")
    page.wait_for_selector("#instructions-field:not([hidden])")
    page.select_option("#voice", "vivian")
    page.select_option("#language", "english")
    page.fill("#instructions", "Whisper.")
    page.fill("#speed", "2")
    page.fill("#seed", "-5")
    with page.expect_request("**/v1/audio/speech") as request:
        speak_to_the_end(page)
    assert request.value.post_data_json == {
        "input": page.input_value("#input"),
        "model": "large",
        "voice": "vivian",
        "language": "english",
        "instructions": "Whisper.",
        "speed": 2,
        "seed": -5,
        "response_format": "pcm",
        "stream": True,
    }
    assert page.inner_text("#length") == "0.4 s"
    page.fill("#seed", "")
    speak_to_the_end(page)
    drawn = page.inner_text("#take-seed")
    page.click("#keep-seed")
    assert page.input_value("#seed") == drawn


@pytest.mark.parametrize("program", ["curl", "python"])
def test_the_example_makes_the_file_that_the_page_makes(page, tmp_path, program):
    page.fill("#input", "It's “quoted”, \\ and $HOME, `too`.\nTrue? null!")
    page.fill("#seed", "9007199254740993")
    page.check(f"[name=snippet][value={program}]", force=True)
    speak_to_the_end(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    expect(page.locator("#copied")).to_have_text("Copied.")
    copied = page.evaluate("navigator.clipboard.readText()")
    command = ["sh", "-c", copied] if program == "curl" else [sys.executable, "-c", copied]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "speech.wav").read_bytes() == downloaded(page)


# ---------------------------------------------------------------- by keyboard
def focused(page):
    return page.evaluate("document.activeElement.id || document.activeElement.value || ''")


def test_everything_can_be_done_by_keyboard(page, site):
    vars(site.script).update(LONG)
    press = page.keyboard.press
    order, outlined = [], []
    while not order or order[-1] != "snippet":
        press("Tab")
        order.append(focused(page))
        outlined.append(
            page.evaluate("""() => {
              const it = document.activeElement;
              const shown = it.matches('.choice input') ? it.nextElementSibling : it;
              const { outlineStyle, outlineWidth } = getComputedStyle(shown);
              return outlineStyle !== 'none' && parseFloat(outlineWidth) >= 3;
            }""")
        )
        assert len(order) < 30, order
    assert order[1:] == [
        "input", "model", "voice", "language", "response_format", "speed", "seed", "speak", "curl", "copy", "snippet",
    ]  # fmt: skip
    assert all(outlined)

    page.focus("#input")
    press("Control+A")
    page.keyboard.type("Typed.")
    for _ in range(2):
        press("Tab")
    first = page.input_value("#voice")
    press("ArrowDown")
    assert page.input_value("#voice") != first
    for _ in range(3):
        press("Tab")
    press("ArrowRight")
    assert page.inner_text("#speed-shown") == "1.05×"
    press("Tab")
    page.keyboard.type("7")
    with page.expect_request("**/v1/audio/speech") as request:
        press("Enter")
    assert request.value.post_data_json["input"] == "Typed."
    assert request.value.post_data_json["seed"] == 7
    wait_until(lambda: is_heard(page), "nothing is heard")
    press("Escape")
    assert page.inner_text("#status").startswith("Stopped")
    assert focused(page) == "seed"  # nobody is moved about

    press("Tab")
    press("Space")
    wait_until(lambda: is_heard(page), "nothing is heard")
    assert focused(page) == "speak"
    press("Space")
    assert not is_heard(page)
    press("Control+Enter")
    wait_until(lambda: is_heard(page), "nothing is heard")
    press("Escape")
    press("Tab")
    press("Tab")
    press("Tab")
    press("Tab")
    assert focused(page) == "curl"
    press("ArrowRight")
    assert page.inner_text("#snippet").startswith("import httpx")


def test_what_happens_is_said_to_who_does_not_look(page):
    assert page.get_attribute("#status", "role") == "status"
    assert page.get_attribute("#alert", "role") == "alert"
    assert page.get_attribute("#waveform", "aria-label") == "Waveform: nothing spoken yet"
    speak_to_the_end(page)
    assert page.inner_text("#status").startswith("0.7 s of speech")
    assert page.get_attribute("#waveform", "aria-label") == "Waveform: 0.7 s of speech, 0.7 s heard"


# ---------------------------------------------------------------- what goes wrong
def assert_told_at(page, field, words):
    page.wait_for_selector(f"#{field}-error:not([hidden])")
    assert words in page.inner_text(f"#{field}-error")
    assert focused(page) == field
    assert page.get_attribute(f"#{field}", "aria-invalid") == "true"
    assert f"{field}-error" in page.get_attribute(f"#{field}", "aria-describedby").split()
    assert page.inner_text("#speak") == "Speak"


def test_a_refusal_is_told_at_the_field_that_it_names_until_that_is_mended(page):
    page.fill("#seed", "abc")
    page.click("#speak")
    assert_told_at(page, "seed", 'seed must be an integer, got "abc"')
    page.fill("#seed", "1")
    assert page.is_hidden("#seed-error")
    page.fill("#input", "  ")
    page.click("#speak")
    assert_told_at(page, "input", "input must hold text, got only whitespace")
    page.fill("#input", "Good.")
    speak_to_the_end(page)
    assert page.locator("[aria-invalid=true]").count() == 0


def test_a_full_server_is_no_fields_fault(page, site):
    site.script.capacity = 0
    page.click("#speak")
    page.wait_for_selector("#alert:not([hidden])")
    assert page.inner_text("#alert").endswith("; try again in 3 s")
    site.script.capacity = 1
    speak_to_the_end(page)
    assert page.is_hidden("#alert")


def test_a_stream_that_breaks_off_is_no_whole_take(page, site):
    vars(site.script).update(num_frames=40, fail_after_frames=15, seconds_per_item=0.5)
    page.select_option("#response_format", "mp3")
    page.click("#speak")
    page.wait_for_selector("#alert:not([hidden])")
    assert page.inner_text("#alert") == "The server broke off after 1.0 s of speech; what came is kept."
    page.wait_for_selector("#download:enabled")
    assert page.inner_text("#download") == "Download WAV"  # the server could only make all of it
    assert len(downloaded(page)) == 44 + 12 * 1920 * 2


def test_a_server_that_is_gone_is_said_to_be(page):
    page.route("**/v1/**", lambda route: route.abort())
    page.click("#speak")
    page.wait_for_selector("#alert:not([hidden])")
    assert page.inner_text("#alert") == "The server can't be reached."


# ---------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("tiny", ["voice-field"]),
        ("large", ["voice-field", "instructions-field"]),
        ("design", ["instructions-field"]),
        ("base", ["voice-field", "x-vector-field", "upload"]),
    ],
)
def test_each_model_is_asked_only_what_it_takes(page, model, expected):
    fields = ("voice-field", "instructions-field", "x-vector-field", "upload")
    page.select_option("#model", "base" if model != "base" else "tiny")
    page.select_option("#model", model)
    wait_until(lambda: [field for field in fields if page.is_visible(f"#{field}")] == expected, expected)
    with page.expect_request("**/v1/audio/speech") as request:
        page.click("#speak")
    assert ("voice" in request.value.post_data_json) == (model in ("tiny", "large"))


def test_a_voice_is_designed_by_its_description(page, site):
    page.select_option("#model", "design")
    page.wait_for_selector("#instructions-field:not([hidden])")
    assert page.inner_text("#instructions-label") == "Description of the voice"
    page.fill("#instructions", "A low, calm voice.")
    with page.expect_request("**/v1/audio/speech") as request:
        speak_to_the_end(page)
    sent = request.value.post_data_json
    assert (sent["instructions"], sent.get("voice")) == ("A low, calm voice.", None)
    assert site.chain.talker_engines["design"].requests[-1].seed == int(page.inner_text("#take-seed"))


def test_a_voice_is_added_spoken_with_and_deleted(page, site, tmp_path):
    clip = tmp_path / "my voice.wav"
    clip.write_bytes(wav_clip())
    page.select_option("#model", "base")
    page.click("#upload summary")
    page.click("#speak")
    assert_told_at(page, "voice", "send ref_audio")
    page.click("#upload-button")
    assert_told_at(page, "upload-clip", "Choose a file.")
    page.set_input_files("#upload-clip", {"name": "a.wav", "mimeType": "audio/wav", "buffer": b"no audio"})
    page.click("#upload-button")
    assert_told_at(page, "upload-consent", "consent")
    assert site.chain.encoder_handles["base"].calls.count("encode") == 0
    page.check("#upload-consent")
    page.click("#upload-button")
    assert_told_at(page, "upload-clip", "the clip can't be decoded")
    page.set_input_files("#upload-clip", clip)
    page.fill("#upload-name", "no/name")
    page.click("#upload-button")
    assert_told_at(page, "upload-name", "name")
    page.fill("#upload-name", "")
    page.set_input_files("#upload-clip", [])
    page.set_input_files("#upload-clip", clip)
    assert page.input_value("#upload-name") == "my-voice"
    page.fill("#upload-text", "Good day.")
    page.click("#upload-button")
    expect(page.locator("#upload-status")).to_have_text("my-voice is ready, and chosen.")
    assert page.input_value("#voice") == "my-voice"
    assert not page.is_checked("#upload-consent")  # of the next voice, its owner must be asked again

    page.check("#x_vector_only_mode")
    with page.expect_request("**/v1/audio/speech") as request:
        speak_to_the_end(page)
    sent = request.value.post_data_json
    assert (sent["model"], sent["voice"], sent["x_vector_only_mode"]) == ("base", "my-voice", True)
    page.select_option("#model", "tiny")
    page.wait_for_selector("#upload", state="hidden")
    page.select_option("#model", "base")
    page.wait_for_selector("#delete-voice:not([hidden])")
    assert page.inner_text("#delete-voice") == "Delete my-voice"
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete-voice")
    expect(page.locator("#upload-status")).to_have_text("my-voice is deleted.")
    assert page.input_value("#voice") == ""
    assert page.is_hidden("#delete-voice")


def test_a_second_click_or_a_key_held_down_asks_only_once(page, tmp_path):
    asked = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    page.keyboard.down("Control")
    for _ in range(3):
        page.keyboard.down("Enter")  # the second and third are repeats
    page.keyboard.up("Control")
    expect(page.locator("#speak")).to_have_text("Speak", timeout=60_000)
    assert len(asked) == 1
    asked.clear()
    (tmp_path / "twice.wav").write_bytes(wav_clip())
    page.select_option("#model", "base")
    page.click("#upload summary")
    page.set_input_files("#upload-clip", tmp_path / "twice.wav")
    page.check("#upload-consent")
    page.evaluate("for (const _ of [1, 2]) document.querySelector('#upload-button').click()")
    expect(page.locator("#upload-status")).to_have_text("twice is ready, and chosen.")
    assert len(asked) == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete-voice")
    expect(page.locator("#upload-status")).to_have_text("twice is deleted.")


# ---------------------------------------------------------------- keys
def test_a_key_is_asked_for_kept_in_the_tab_and_shown_nowhere(browser, tmp_path):
    with (
        Site(tmp_path, {"tiny": TINY}, api_key_hashes=(hashlib.sha256(KEY.encode()).digest(),)) as site,
        open_page(browser, site.url) as page,
    ):
        page.wait_for_selector("#key-form:not([hidden])")
        assert page.is_hidden("#api-key-error")
        assert page.is_hidden("#more")  # a link brings no key
        assert focused(page) == "api-key"
        page.keyboard.type("sk-wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#api-key-error:not([hidden])")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-form", state="hidden")
        assert focused(page) == "input"
        page.reload()
        expect(page.locator("#voice option")).not_to_have_count(0)
        assert page.is_hidden("#key-form")
        speak_to_the_end(page)
        assert page.inner_text("#length") == "0.7 s"
        for program, named in (("curl", "$QWEN3TTS_API_KEY"), ("python", "QWEN3TTS_API_KEY")):
            page.check(f"[name=snippet][value={program}]", force=True)
            assert named in page.inner_text("#snippet")
        assert KEY not in page.content()
        assert page.evaluate("localStorage.length + document.cookie.length") == 0


# ---------------------------------------------------------------- looks
@pytest.mark.parametrize("width", [320, 768])
def test_nothing_is_wider_than_the_screen(open_ready, width):
    with open_ready(**{**PHONE, "viewport": {"width": width, "height": 800}}) as page:
        page.select_option("#model", "base")
        page.wait_for_selector("#upload:not([hidden])")
        page.click("#upload summary")
        page.fill("#input", "https://example.org/" + "a" * 300)
        page.fill("#seed", "b" * 100)
        page.click("#speak")
        page.wait_for_selector("[aria-invalid=true]")
        page.fill("#seed", "-9223372036854775808")
        page.select_option("#model", "tiny")
        page.wait_for_selector("#upload", state="hidden")
        speak_to_the_end(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.eval_on_selector_all(
            "button, select, textarea, input:not([type=radio], [type=checkbox], [type=range]), .choice label",
            "all => all.map((it) => [it.id, it.getBoundingClientRect()]).map(([id, r]) => [id, r.width, r.height])",
        )
        shown = [(name, w, h) for name, w, h in sizes if w]
        assert len(shown) >= 10
        assert all(w >= 24 and h >= 24 for _, w, h in shown), shown


@pytest.mark.parametrize(("scheme", "screen"), [("light", {}), ("dark", PHONE)], ids=["desktop", "phone"])
def test_axe_finds_nothing(open_ready, site, scheme, screen):
    with open_ready(color_scheme=scheme, **screen) as page:
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = np.mean([int(part) for part in back.removeprefix("rgb(").removesuffix(")").split(", ")])
        assert (brightness < 60) == (scheme == "dark")
        page.select_option("#model", "base")
        page.wait_for_selector("#upload:not([hidden])")
        page.click("#upload summary")
        page.click("#upload-button")
        page.click("#speak")
        page.wait_for_selector("#voice-error:not([hidden])")
        assert_no_violations(page)  # with errors
        page.select_option("#model", "large")
        page.wait_for_selector("#upload", state="hidden")
        vars(site.script).update(LONG)
        page.click("#speak")
        wait_until(lambda: is_heard(page), "nothing is heard")
        assert_no_violations(page)  # while it speaks
        page.keyboard.press("Escape")


def assert_no_violations(page):
    result = Axe().run(page).response
    assert len(result["passes"]) > 20, "axe looked at next to nothing"
    assert [(v["id"], [node["html"] for node in v["nodes"]]) for v in result["violations"]] == []
