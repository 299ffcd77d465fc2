"""Voices that are uploaded before a measurement and deleted after it: `POST` and `DELETE /v1/audio/voices`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import aiohttp

from load_tests.adapters import Clip
from load_tests.client import Target


@contextmanager
def uploaded_voices(target: Target, clips: Sequence[Clip]) -> Iterator[list[str]]:
    """Their names. Raises ValueError where the server takes none, OSError when it refuses one."""
    if not target.adapter.uploads_voices:
        raise ValueError(f"uploading voices to {target.engine} is not supported here: use --sent inline")
    names = [clip.name for clip in clips]
    try:
        asyncio.run(_upload(target, clips))
        yield names
    finally:
        asyncio.run(_delete(target, names))


def _session(target: Target) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=target.headers, timeout=aiohttp.ClientTimeout(total=120))


async def _upload(target: Target, clips: Sequence[Clip]) -> None:
    async with _session(target) as session:
        for clip in clips:
            form = aiohttp.FormData()
            form.add_field("name", clip.name)
            form.add_field("ref_text", clip.text)
            form.add_field(
                "audio_sample",
                base64.b64decode(clip.audio_base64),
                filename="clip.wav",
                content_type="audio/wav",
            )
            async with session.post(f"{target.url.rstrip('/')}/v1/audio/voices", data=form) as response:
                if response.status >= 400:
                    raise OSError(f"voice {clip.name}: {response.status} {(await response.text())[:300]}")


async def _delete(target: Target, names: Sequence[str]) -> None:
    async with _session(target) as session:
        for name in names:
            async with session.delete(f"{target.url.rstrip('/')}/v1/audio/voices/{name}") as response:
                await response.read()  # one that was never uploaded is a 404, and just as gone
