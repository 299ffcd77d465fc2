"""The real deployment classes around fake engines, in one process and without Ray."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from deployments.codec import Codec
from deployments.codec_ingress import CodecIngress
from deployments.engines import CodecSettings, TalkerSettings
from deployments.ingress import Ingress, IngressModel, IngressSettings
from deployments.reference_encoder import EncoderSettings, ReferenceEncoder
from deployments.reference_fetch import FetchPolicy
from deployments.talker import Talker
from qwen3tts_core.audio.clip import ReferenceLimits
from qwen3tts_core.config import CodecEngineConfig, TalkerEngineConfig
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from tests.fakes import (
    AsgiCall,
    AsgiSocket,
    FakeHandle,
    FakeReferenceEncoder,
    Script,
    open_fake_codec,
    open_fake_talker,
)

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "checkpoints" / "tiny")
GOLDEN = ROOT / "tests" / "parity" / "golden" / "seed0"


@pytest.fixture
async def own_time():
    """The event loop's time is the test's own: with nothing to do, it is at once when the next timer is due.

    For coroutines that wait for each other and for timers alone, not for threads or sockets. However slow the machine
    is, what takes 0.1 s comes before what takes 0.2 s.
    """
    loop = asyncio.get_running_loop()
    select, now = loop._selector.select, loop.time()

    def select_at_once(timeout=None):
        nonlocal now
        now += timeout or 0.0
        return select(timeout and 0.0)

    loop.time, loop._selector.select = lambda: now, select_at_once
    yield
    del loop.time, loop._selector.select


@pytest.fixture
async def skip():
    """skip(seconds): so much later it is at once on the event loop; whatever else happens takes its time."""
    loop = asyncio.get_running_loop()
    plain, ahead = loop.time, 0.0

    def skip(seconds):
        nonlocal ahead
        ahead += seconds

    loop.time = lambda: plain() + ahead
    yield skip
    del loop.time


async def settled():
    """Every coroutine has gone as far as it can with what is there."""
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.fixture
def make_checkpoint(tmp_path):
    """A golden variant with its own codec or another's, in a folder of that name; links, so nothing is copied."""

    def make(name, variant, codec=None):
        folder = tmp_path / name
        folder.mkdir()
        for file in (GOLDEN / variant).iterdir():
            if file.is_file():
                (folder / file.name).symlink_to(file)
        (folder / "speech_tokenizer").symlink_to(GOLDEN / (codec or variant) / "speech_tokenizer")
        return str(folder)

    return make


class Chain:
    """Ingress -> Codec -> a Talker for each model; scripts say how the engines behave.

    shape: of the first two, `AppArgs.ingress`. models: {name: checkpoint folder}, one codec for all of them.
    encoders: {name of a Base model: engine}.
    settings: the rest of IngressSettings; `sleepers`, names of deployments that may have no replica; `home` of engines.
    """

    def __init__(
        self, talker_script, codec_script, models, encoders, voices_folder, policy, settings, shape="separate"
    ):
        home = settings.pop("home", "thread")
        self.talkers = {
            name: Talker(
                TalkerSettings(
                    checkpoint=folder,
                    engine=TalkerEngineConfig(),
                    ramp=ChunkRamp(),
                    device="cpu",
                    dtype="float32",
                    home=home,
                ),
                partial(open_fake_talker, talker_script),
            )
            for name, folder in models.items()
        }
        self.talker_engines = {name: talker._engine for name, talker in self.talkers.items()}
        self.talker_handles = {name: FakeHandle(talker) for name, talker in self.talkers.items()}
        first = next(iter(models))
        self.talker, self.talker_handle = self.talkers[first], self.talker_handles[first]
        self.talker_engine = self.talker_engines[first]
        codec_settings = CodecSettings(
            checkpoint=models[first], engine=CodecEngineConfig(), device="cpu", dtype="float32", home=home
        )
        open_codec = partial(open_fake_codec, codec_script)
        limits = ReferenceLimits(max_bytes=policy.max_bytes)
        self.encoder_handles = {
            name: FakeHandle(ReferenceEncoder(EncoderSettings(models[name], limits), lambda _, e=engine: e))
            for name, engine in encoders.items()
        }
        sleepers = settings.pop("sleepers", ())
        ingress_settings = IngressSettings(
            tuple(
                IngressModel(
                    folder,
                    name,
                    4096,
                    talker="Talker" if name == first else f"Talker-{name}",
                    encoder=f"Encoder-{name}" if name in encoders else None,
                    sleepers=sleepers,
                )
                for name, folder in models.items()
            ),
            voices_folder,
            policy,
            max_voices=5,
            **settings,
        )
        handles = {
            **{"Talker" if name == first else f"Talker-{name}": h for name, h in self.talker_handles.items()},
            **{f"Encoder-{name}": handle for name, handle in self.encoder_handles.items()},
        }
        if shape == "codec":
            self.codec = front = CodecIngress(
                codec_settings, ingress_settings, handles, "object_ref", open_codec
            )
            self.ingress = self.codec._ingress
        else:
            self.codec = Codec(codec_settings, self.talker_handles, "object_ref", open_codec)
            self.codec_handle = FakeHandle(self.codec)
            self.ingress = front = Ingress(ingress_settings, {**handles, "Codec": self.codec_handle}, "value")
        self.codec_engine = self.codec._engine
        if home == "thread":
            for engine in self.talker_engines.values():
                engine.num_decoded = self.codec_engine.num_decoded
        self.app = front.__serve_build_asgi_app__()

    @property
    def num_held(self):
        """Talker slots and codec rows that someone still holds."""
        engines = [*self.talker_engines.values(), self.codec_engine]
        return sum(engine.stats().num_active for engine in engines)

    async def until_held(self, num):
        """`num_held`, wherever the engines live."""
        async with asyncio.timeout(30):
            while True:
                held = [await deployment.stats() for deployment in (*self.talkers.values(), self.codec)]
                if sum(stats["num_active"] for stats in held) == num:
                    return
                await asyncio.sleep(0.005)

    def call(self, method, path, body=b"", **headers):
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return AsgiCall(self.app, method, path, body, named)

    def socket(self, *, on_message=None, **headers):
        """A WebSocket of `/v1/audio/speech/stream`."""
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return AsgiSocket(self.app, "/v1/audio/speech/stream", named, on_message=on_message)

    def stop(self):
        for engine in (*self.talker_engines.values(), self.codec_engine):
            engine.stop()


def pytest_generate_tests(metafunc):
    """`pytestmark = pytest.mark.both_shapes` runs a file's chains with the ingress apart from the codec, and in it."""
    if "shape" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_shapes"):
        metafunc.parametrize("shape", ["separate", "codec"])


@pytest.fixture
def shape():
    return "separate"


@pytest.fixture
def open_chain(tmp_path, shape):
    @asynccontextmanager
    async def opened(talker=None, codec=None, models=None, encoders=None, policy=None, **settings):
        chain = Chain(
            talker or Script(),
            codec or Script(),
            models or {"tiny": TINY},
            encoders or {},
            tmp_path / "voices",
            policy or FetchPolicy(),
            settings,
            shape,
        )
        try:
            async with chain.app.router.lifespan_context(chain.app):
                yield chain
        finally:
            chain.stop()
            await asyncio.sleep(0.001)  # the loop sees what has ended

    return opened


@pytest.fixture(params=["thread", "process"])
def open_either(open_chain, request):
    """A chain whose engines live here, and one whose engines have processes of their own."""
    return partial(open_chain, home=request.param)


@pytest.fixture
def open_base(open_chain):
    """A chain of one Base model, "base"."""

    def opened(encoder=None, **others):
        models = {"base": str(GOLDEN / "base")}
        return open_chain(models=models, encoders={"base": encoder or FakeReferenceEncoder()}, **others)

    return opened
