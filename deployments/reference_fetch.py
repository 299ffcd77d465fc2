"""Turns a request's `ref_audio` into the bytes of a clip: an https URL, a data: URI, base64, or a listed file.

A server that fetches what strangers name is a way into its own network. So a URL is followed by
hand, hop by hop: the host is resolved once, every address must be public, and the connection goes
to the very address that was checked (a name that resolves differently a moment later changes
nothing), while TLS and the Host header keep the name. Nothing here blocks the event loop. What the
bytes mean is `qwen3tts_core.audio.clip`'s business.
"""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import logging
import os
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import httpx

from qwen3tts_core.audio.clip import ReferenceLimits
from qwen3tts_core.errors import InvalidReferenceAudio, Overloaded

logger = logging.getLogger(__name__)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses; raises OSError when there are none."""
T = TypeVar("T")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_URL_CHARS = 8_192
_MAX_ADDRESSES = 3  # tried in turn before a host counts as unreachable
_BASE64_SLICE = 1 << 20  # characters decoded at once: the decoder holds the interpreter's lock meanwhile
_DROP_SPACE_ACCEPT_URL_SAFE = str.maketrans("-_", "+/", " \t\r\n")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")
_TUNNELS = tuple(  # Teredo, 6to4, and a site's own NAT64: where they end isn't known here
    ipaddress.IPv6Network(network) for network in ("2001::/32", "2002::/16", "64:ff9b:1::/48")
)
# Public by some Python's reckoning, but not ours: protocol assignments (among them Oracle's metadata),
# the 6to4 relays, and what the cloud's own host answers under a public number (Azure's metadata and DNS).
_NOT_PUBLIC = tuple(
    ipaddress.IPv4Network(network) for network in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")
)

_EXPECTED = "expected an https URL, a data: URI with base64, or plain base64"


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What may be fetched, and how much patience it gets.

    max_bytes: of the clip's file. connect_s: to resolve a host or to connect, each. total_s: for everything,
        redirects and the wait for a free place included. max_concurrent: fetches at once in this process.
    allowed_networks: addresses that are reached though they aren't public (an internal store, a test server).
    file_roots: folders whose files `file:` may name; empty refuses the scheme.
    """

    max_bytes: int = ReferenceLimits().max_bytes
    connect_s: float = 5.0
    total_s: float = 15.0
    max_redirects: int = 3
    max_concurrent: int = 8
    allow_http: bool = False
    allowed_networks: tuple[IPNetwork, ...] = ()
    file_roots: tuple[Path, ...] = ()


def max_base64_bytes(max_bytes: int) -> int:
    """What a clip of that size may take as base64, line breaks included."""
    return max_bytes * 7 // 5


async def resolve_host(host: str, port: int, pool: ThreadPoolExecutor | None = None) -> list[str]:
    """The system's addresses of a host, in its order. Odd numbers (`0x7f.1`, `2130706433`) mean what it says."""
    found = await asyncio.get_running_loop().run_in_executor(
        pool, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class ReferenceFetcher:
    """Fetches clips under one policy. One per process; `fetch` may run any number of times at once.

    resolve, ssl_context: replaced in tests; the defaults are the system's resolver and certifi's roots.
    """

    def __init__(
        self,
        policy: FetchPolicy = FetchPolicy(),
        resolve: Resolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        # Its own threads: names that hang must not hold up whatever else runs on the loop's.
        self._pool = ThreadPoolExecutor(2 * policy.max_concurrent, "reference-fetch")
        self._resolve: Resolver = resolve or (lambda host, port: resolve_host(host, port, self._pool))
        self._ssl_context = ssl_context or httpx.create_ssl_context(trust_env=False)
        self._places = asyncio.Semaphore(policy.max_concurrent)
        self._roots = tuple(root.resolve() for root in policy.file_roots)

    async def fetch(self, ref_audio: str) -> bytes:
        """The clip's file. Raises InvalidReferenceAudio saying what was expected, Overloaded without a place."""
        source = ref_audio.strip()
        if not source:
            raise InvalidReferenceAudio(f"ref_audio is empty, {_EXPECTED}")
        match = _SCHEME.match(source)
        scheme = match[1].lower() if match else None
        async with _Patience(self._policy.total_s) as patience:
            if scheme in ("https", "http"):
                async with self._places:
                    patience.place_taken()
                    return await self._fetch_url(source)
            patience.place_taken()
            if scheme == "data":
                return await self._in_thread(lambda: _read_data_uri(source, self._policy.max_bytes))
            if scheme == "file":
                return await self._in_thread(lambda: self._read_file(source))
            if scheme is not None:
                raise InvalidReferenceAudio(f"ref_audio has the scheme {scheme!r}, {_EXPECTED}")
            return await self._in_thread(lambda: _decode_base64(source, 0, self._policy.max_bytes))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # ------------------------------------------------------------ URLs
    async def _fetch_url(self, text: str) -> bytes:
        url = self._checked_url(text)
        for _ in range(self._policy.max_redirects + 1):
            answer = await self._request(url, await self._public_addresses(url))
            if isinstance(answer, bytes):
                return answer
            url = self._checked_url(answer)
        raise InvalidReferenceAudio(f"the clip's URL redirects more than {self._policy.max_redirects} times")

    def _checked_url(self, url: str | httpx.URL) -> httpx.URL:
        if len(str(url)) > _MAX_URL_CHARS:
            raise InvalidReferenceAudio(
                f"the clip's URL is {len(str(url)):,} characters, the limit is {_MAX_URL_CHARS:,}"
            )
        try:
            url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InvalidReferenceAudio(f"the clip's URL is malformed: {error}") from error
        accepted = ("https", "http") if self._policy.allow_http else ("https",)
        if url.scheme not in accepted:
            raise InvalidReferenceAudio(
                f"the clip's URL has the scheme {url.scheme!r}, expected {' or '.join(accepted)}"
            )
        if not url.host:
            raise InvalidReferenceAudio("the clip's URL names no host")
        if url.userinfo:
            raise InvalidReferenceAudio("the clip's URL carries credentials, expected none")
        if url.port is not None and not 0 < url.port < 1 << 16:
            raise InvalidReferenceAudio(f"the clip's URL has the port {url.port}, expected 1 to 65535")
        return url.copy_with(fragment=None)

    async def _public_addresses(self, url: httpx.URL) -> Sequence[str]:
        host = url.raw_host.decode("ascii")
        try:
            async with asyncio.timeout(self._policy.connect_s):
                addresses = await self._resolve(host, url.port or (443 if url.scheme == "https" else 80))
        except TimeoutError:
            raise InvalidReferenceAudio(
                f"the clip's host {host} wasn't found within {self._policy.connect_s:g} s"
            ) from None
        except (OSError, UnicodeError) as error:
            raise InvalidReferenceAudio(f"the clip's host {host} can't be found") from error
        if not addresses:
            raise InvalidReferenceAudio(f"the clip's host {host} can't be found")
        # One private address among public ones is refused too: it is what a rebinding name looks like.
        if not all(may_connect(address, self._policy.allowed_networks) for address in addresses):
            logger.warning("reference clip refused: %s resolves to %s", host, ", ".join(addresses))
            raise InvalidReferenceAudio(f"the clip's host {host} isn't a public one")
        return addresses[:_MAX_ADDRESSES]

    async def _request(self, url: httpx.URL, addresses: Sequence[str]) -> bytes | httpx.URL:
        """The body, or where to go next. Tries the addresses in turn."""
        for address in addresses:
            try:
                return await self._request_from(url, address)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure: httpx.HTTPError = error
            except httpx.HTTPError as error:
                failure = error
                break
        reason = (
            "timed out"
            if isinstance(failure, httpx.TimeoutException)
            else str(failure) or type(failure).__name__
        )
        raise InvalidReferenceAudio(f"the clip's URL can't be read: {reason}") from failure

    async def _request_from(self, url: httpx.URL, address: str) -> bytes | httpx.URL:
        # A transport per request: a kept connection would be reused by address, for another name's request.
        # No client above it: that would look at redirects and cookies by itself.
        transport = httpx.AsyncHTTPTransport(verify=self._ssl_context, trust_env=False, http2=False)
        timeout = httpx.Timeout(self._policy.total_s, connect=self._policy.connect_s)
        request = httpx.Request(
            "GET",
            url.copy_with(host=address),
            headers={
                "Host": url.netloc.decode("ascii"),
                "Accept": "audio/*, */*;q=0.5",
                "Accept-Encoding": "identity",
                "Connection": "close",
                "User-Agent": "qwen3tts-serve",
            },
            extensions={"sni_hostname": url.raw_host.decode("ascii"), "timeout": timeout.as_dict()},
        )
        async with transport:
            response = await transport.handle_async_request(request)
            try:
                if response.status_code in _REDIRECTS:
                    return _next_url(url, response)
                return await self._read_body(response)
            finally:
                await response.aclose()

    async def _read_body(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise InvalidReferenceAudio(f"the clip's URL answered {response.status_code}, expected 200")
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":  # not asked for; unpacking it would be unbounded
            raise InvalidReferenceAudio(
                f"the clip's URL answered with content-encoding {encoding!r}, expected none"
            )
        announced = response.headers.get("content-length", "")
        if announced.isdecimal():
            _check_size(int(announced), self._policy.max_bytes)
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            _check_size(len(body), self._policy.max_bytes)
        return bytes(body)

    # ------------------------------------------------------------ files
    def _read_file(self, url: str) -> bytes:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or "\0" in path:
            raise InvalidReferenceAudio("ref_audio isn't a plain file: URL, expected file:///folder/name")
        # The same words whether a file is missing, elsewhere or no file: the answer must not map the disk.
        refused = InvalidReferenceAudio(
            "ref_audio names no file in a folder that this server lists for file: URLs"
        )
        try:
            resolved = Path(path).resolve(strict=True)
            root = next((root for root in self._roots if resolved.is_relative_to(root)), None)
            if root is None or resolved == root or not Path(path).is_absolute():
                raise refused
            descriptor = _open_beneath(root, resolved.relative_to(root).parts)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
            raise refused from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise refused
            _check_size(found.st_size, self._policy.max_bytes)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(self._policy.max_bytes + 1)
        finally:
            os.close(descriptor)
        _check_size(len(data), self._policy.max_bytes)
        return data


class _Patience:
    """One deadline over a whole fetch, saying at its end what was waited for."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._timeout = asyncio.timeout(total_s)
        self._has_place = False

    def place_taken(self) -> None:
        self._has_place = True

    async def __aenter__(self) -> _Patience:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)  # type: ignore[arg-type]  # handed through
        except TimeoutError:
            if not self._has_place:
                raise Overloaded("every place for fetching clips is taken") from None
            raise InvalidReferenceAudio(f"the clip didn't arrive within {self._total_s:g} s") from None


# ---------------------------------------------------------------- addresses
def may_connect(address: str, allowed: Sequence[IPNetwork] = ()) -> bool:
    """Is it a public unicast address, or one of the allowed networks? IPv4 inside IPv6 counts as what it is."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if any(ip.version == network.version and ip in network for network in allowed):
        return True
    if isinstance(ip, ipaddress.IPv6Address):
        if any(ip in tunnel for tunnel in _TUNNELS) or ip.is_site_local:
            return False
        if ip in _NAT64 or ip in _IPV4_COMPATIBLE:
            return may_connect(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)), allowed)
    refused = (
        ip.is_private
        or ip.is_loopback
        or ip.is_link_local
        or ip.is_multicast
        or ip.is_reserved
        or ip.is_unspecified
        or any(ip.version == 4 and ip in network for network in _NOT_PUBLIC)
    )
    return ip.is_global and not refused


def _next_url(url: httpx.URL, response: httpx.Response) -> httpx.URL:
    location = response.headers.get("location")
    if not location:
        raise InvalidReferenceAudio(f"the clip's URL answered {response.status_code} without a location")
    try:
        return url.join(location)
    except httpx.InvalidURL as error:
        raise InvalidReferenceAudio(f"the clip's URL redirects to a malformed one: {error}") from error


# ---------------------------------------------------------------- bytes at hand
def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidReferenceAudio(f"the clip is {num_bytes:,} bytes or more, the limit is {max_bytes:,}")


def _read_data_uri(uri: str, max_bytes: int) -> bytes:
    head, comma, _ = uri[: 1 << 10].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidReferenceAudio(
            "ref_audio isn't a data: URI with base64, expected data:audio/wav;base64,..."
        )
    return _decode_base64(uri, len(head) + 1, max_bytes)


def _decode_base64(text: str, start: int, max_bytes: int) -> bytes:
    """text[start:], spaces and line breaks aside; the URL-safe alphabet and missing padding are fine."""
    decoded = bytearray()
    rest = ""
    for position in range(start, len(text), _BASE64_SLICE):
        rest += text[position : position + _BASE64_SLICE].translate(_DROP_SPACE_ACCEPT_URL_SAFE)
        is_last = position + _BASE64_SLICE >= len(text)
        whole = rest if is_last else rest[: (len(rest) - 1) // 4 * 4]  # padding stays with the end
        decoded += _decode_base64_slice(whole.rstrip("=") if is_last else whole, start)
        _check_size(len(decoded), max_bytes)
        rest = rest[len(whole) :]
    return bytes(decoded)


def _decode_base64_slice(text: str, start: int) -> bytes:
    """Without padding: an `=` inside the text is as wrong as any other character outside the alphabet."""
    try:
        if "=" in text:
            raise binascii.Error("padding before the end")
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except (binascii.Error, ValueError) as error:
        what = "is neither a URL nor base64" if start == 0 else "holds no valid base64"
        raise InvalidReferenceAudio(f"ref_audio {what}, {_EXPECTED}") from error


def _open_beneath(root: Path, parts: Sequence[str]) -> int:
    """Open root/parts without following a link on the way, so that nothing can be swapped in after the check."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Not blocking: a named pipe without a writer would wait for ever.
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
