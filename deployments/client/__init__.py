"""A Python client of the server, and the command `qwen3tts`. Needs httpx, and websockets for sessions; nothing else.

from deployments.client import Client

with Client() as client:
    client.speak("Hello there.", voice="slt").save("hello.wav")
"""

from deployments.client.aio import AsyncClient
from deployments.client.sessions import AsyncSession, Session
from deployments.client.sync import Client
from deployments.client.wire import AudioDelta, ServerError, Speech, SpeechDone, StreamCut

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AudioDelta",
    "Client",
    "ServerError",
    "Session",
    "Speech",
    "SpeechDone",
    "StreamCut",
]
