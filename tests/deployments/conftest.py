"""The real deployment classes around fake engines, in one process and without Ray."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deployments.codec import Codec, CodecSettings
from deployments.ingress import Ingress, IngressModel, IngressSettings
from deployments.reference_fetch import FetchPolicy
from deployments.talker import Talker, TalkerSettings
from qwen3tts_core.config import CodecEngineConfig, TalkerEngineConfig
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from tests.fakes import AsgiCall, FakeCodecEngine, FakeHandle, FakeTalkerEngine, Script

TINY = str(Path(__file__).parents[2] / "checkpoints" / "tiny")


class Chain:
    """Ingress -> Codec -> Talker; scripts say how the engines behave."""

    def __init__(self, talker_script, codec_script):
        self.talker_engine = self.codec_engine = None
        self._talker_script, self._codec_script = talker_script, codec_script
        ramp = ChunkRamp()
        self.talker = Talker(
            TalkerSettings(TINY, TalkerEngineConfig(), ramp, "cpu", "float32"), self._open_talker
        )
        self.talker_handle = FakeHandle(self.talker)
        self.codec = Codec(
            CodecSettings(TINY, CodecEngineConfig(), "cpu", "float32"),
            {"tiny": self.talker_handle},
            "object_ref",
            self._open_codec,
        )
        self.codec_handle = FakeHandle(self.codec)
        self.ingress = Ingress(
            IngressSettings((IngressModel(TINY, "tiny", 4096),), Path("never made"), FetchPolicy()),
            {"Talker": self.talker_handle, "Codec": self.codec_handle},
            "value",
        )
        self.app = self.ingress.build_http_app()

    def _open_talker(self, settings, outbox):
        self.talker_engine = FakeTalkerEngine(outbox, self._talker_script, settings.ramp)
        return self.talker_engine

    def _open_codec(self, settings, outbox):
        self.codec_engine = FakeCodecEngine(outbox, self._codec_script)
        return self.codec_engine

    @property
    def num_held(self):
        """Talker slots and codec rows that someone still holds."""
        return self.talker_engine.stats().num_active + self.codec_engine.stats().num_active

    def call(self, method, path, body=b"", **headers):
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return AsgiCall(self.app, method, path, body, named)

    def stop(self):
        self.talker_engine.stop()
        self.codec_engine.stop()


@pytest.fixture
def open_chain():
    @asynccontextmanager
    async def opened(talker=None, codec=None):
        chain = Chain(talker or Script(), codec or Script())
        try:
            async with chain.app.router.lifespan_context(chain.app):
                yield chain
        finally:
            chain.stop()

    return opened
