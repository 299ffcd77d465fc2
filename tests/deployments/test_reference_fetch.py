"""Clips are fetched from anywhere public, and from nowhere else.

Servers listen on two loopback addresses: 127.0.0.1 stands for the public internet (an allowed network),
127.0.0.2 for the server's own, which must never see a connection.
"""

import asyncio
import base64
import datetime
import ipaddress
import os
import random
import socket
import ssl
import threading
from contextlib import asynccontextmanager

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from deployments.reference_fetch import FetchPolicy, ReferenceFetcher, may_connect
from qwen3tts_core.errors import InvalidReferenceAudio, Overloaded
from tests.deployments.conftest import settled
from tests.fakes import until

PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"
BODY = b"RIFF" + bytes(range(256)) * 40


# ---------------------------------------------------------------- a small internet
@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """For clips.example and cdn.example, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("clips.example"), x509.DNSName("cdn.example"), x509.DNSName("xn--fiqs8s.example")]
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "test.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + built.public_bytes(serialization.Encoding.PEM)
    )
    return path


class Site:
    """One HTTP server; `answer(path)` gives raw response bytes or an async iterator of them."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []  # (server name of the TLS handshake, path, headers)
        self.num_connections = 0
        self.num_sent = 0
        self.names = []

    async def serve(self, reader, writer):
        self.num_connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request, *lines = head.strip().split("\r\n")
            path = request.split()[1]
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            self.requests.append((path, headers))
            answer = self.answer(path)
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                async for part in answer:
                    writer.write(part)
                    self.num_sent += len(part)
                    await writer.drain()
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def ok(body=BODY, *headers):
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location, status=302):
    return f"HTTP/1.1 {status} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


@asynccontextmanager
async def serving(site, certificate=None, address=PUBLIC):
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        context.sni_callback = lambda _, name, __: site.names.append(name)
    server = await asyncio.start_server(site.serve, address, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def fetcher(certificate=None, hosts=None, resolve=None, **policy):
    """Reaches 127.0.0.1 and no other address that isn't public; resolves `hosts` alone."""

    async def look_up(host, port):
        await asyncio.sleep(0)
        if hosts is None or host not in hosts:
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        return hosts[host]

    context = ssl.create_default_context(cafile=certificate) if certificate else None
    policy = {
        "allowed_networks": (ipaddress.ip_network(f"{PUBLIC}/32"),),
        "total_s": 60.0,
        "connect_s": 60.0,
    } | policy
    return ReferenceFetcher(FetchPolicy(**policy), resolve or look_up, context)


HOSTS = {
    "clips.example": [PUBLIC],
    "cdn.example": [PUBLIC],
    "evil.example": [PUBLIC],
    "inside.example": [PRIVATE],
}


# ---------------------------------------------------------------- addresses
@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_may_be_reached(address):
    assert may_connect(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
        "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.168.1.1",
        "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "233.252.0.1", "240.0.0.1",
        "255.255.255.255", "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe",
        "::ffff:0:7f00:1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "100::1", "2001::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "fc00::1",
        "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1", "no address", "",
    ],
)  # fmt: skip
def test_every_other_kind_of_address_may_not(address):
    assert not may_connect(address)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_the_same_inside_ipv6(ip):
    assert (
        may_connect(f"::ffff:{ip}")
        == may_connect(str(ip))
        == may_connect(str(ipaddress.ip_address(f"64:ff9b::{ip}")))
    )


def test_an_allowed_network_opens_that_network_alone():
    allowed = (ipaddress.ip_network("10.1.0.0/16"),)
    assert may_connect("10.1.2.3", allowed)
    assert may_connect("::ffff:10.1.2.3", allowed)
    assert not may_connect("10.2.0.1", allowed)
    assert may_connect("8.8.8.8", allowed)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "localhost",
        "LOCALHOST", "localhost.", "0", "0.0.0.0", "[::]", "[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[fe80::1]", "169.254.169.254", "2852039166", "0xA9FEA9FE", "[fd00:ec2::254]",
        "10.0.0.1", "192.168.0.1", "①②⑦.⓪.⓪.①", "127。0。0。1", "100.100.100.200", "224.0.0.1", "255.255.255.255",
    ],
)  # fmt: skip
async def test_no_spelling_of_a_private_host_is_reached(host):
    """known_faults row 45: no private address."""
    site = Site(lambda path: ok())
    async with serving(site) as port:
        # The system's own resolver, which knows the odd spellings; none of these needs the network.
        real = ReferenceFetcher(FetchPolicy(allow_http=True, connect_s=2))
        refusal = r"isn't a public one|malformed|can't be found|wasn't found"  # the last where no name server answers
        with pytest.raises(InvalidReferenceAudio, match=refusal):
            await real.fetch(f"http://{host}:{port}/clip.wav")
    assert site.num_connections == 0


async def test_one_private_address_among_public_ones_refuses_the_host():
    site = Site(lambda path: ok())
    async with serving(site) as port:
        mixed = fetcher(hosts={"clips.example": [PUBLIC, "10.0.0.1"]}, allow_http=True)
        with pytest.raises(InvalidReferenceAudio, match=r"clips\.example isn't a public one"):
            await mixed.fetch(f"http://clips.example:{port}/")
    assert site.num_connections == 0


async def test_a_name_that_changes_its_address_after_the_check_changes_nothing(certificate):
    """The system knows no clips.example and the second look-up would lead inside: one look-up a hop, and no other."""
    inside = Site(lambda path: ok(b"secret"))
    site = Site(lambda path: redirect("/moved") if path == "/" else ok())
    looked_up = []

    async def rebinding(host, port):
        await asyncio.sleep(0)
        looked_up.append(host)
        return [PUBLIC] if len(looked_up) <= 2 else [PRIVATE]

    async with serving(site, certificate) as port, serving(inside, certificate, PRIVATE):
        clips = fetcher(certificate, resolve=rebinding)
        assert await clips.fetch(f"https://clips.example:{port}/") == BODY
        assert looked_up == ["clips.example"] * 2  # one a hop
        with pytest.raises(InvalidReferenceAudio, match="isn't a public one"):
            await clips.fetch(f"https://clips.example:{port}/")
    assert inside.num_connections == 0


# ---------------------------------------------------------------- URLs
async def test_an_https_url_is_fetched_by_address_under_its_name(certificate, monkeypatch):
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.2:9")  # nobody is there: a proxy taken would fail
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable)
    site = Site(lambda path: ok())
    async with serving(site, certificate) as port:
        assert (
            await fetcher(certificate, HOSTS).fetch(f"  https://clips.example:{port}/a%20b?c=d#e\n") == BODY
        )
    [(path, headers)] = site.requests
    assert path == "/a%20b?c=d"
    assert headers["host"] == f"clips.example:{port}"
    assert headers["accept-encoding"] == "identity"
    assert "cookie" not in headers
    assert "authorization" not in headers
    assert site.names == ["clips.example"]


async def test_a_name_in_another_script_is_asked_for_in_ascii(certificate):
    site = Site(lambda path: ok())
    async with serving(site, certificate) as port:
        hosts = {"xn--fiqs8s.example": [PUBLIC]}
        assert await fetcher(certificate, hosts).fetch(f"https://中国.example:{port}/") == BODY
    assert site.names == ["xn--fiqs8s.example"]


async def test_a_certificate_for_another_name_is_refused(certificate):
    site = Site(lambda path: ok())
    async with serving(site, certificate) as port:
        with pytest.raises(InvalidReferenceAudio, match=r"can't be read: .*certificate verify failed"):
            await fetcher(certificate, HOSTS).fetch(f"https://evil.example:{port}/")
    assert site.requests == []


async def test_the_next_address_is_tried_when_one_does_not_answer():
    site = Site(lambda path: ok())
    async with serving(site) as port:
        hosts = {"clips.example": ["127.0.0.3", PUBLIC]}
        networks = (ipaddress.ip_network("127.0.0.1/32"), ipaddress.ip_network("127.0.0.3/32"))
        clips = fetcher(hosts=hosts, allow_http=True, allowed_networks=networks)
        assert await clips.fetch(f"http://clips.example:{port}/") == BODY


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://clips.example/", "scheme 'http', expected https"),
        ("ftp://clips.example/a.wav", "scheme 'ftp', expected an https URL"),
        ("gopher://clips.example/", "scheme 'gopher'"),
        ("javascript:alert(1)", "scheme 'javascript'"),
        ("https://user:pw@clips.example/", "carries credentials"),
        ("https://user@clips.example/", "carries credentials"),
        ("https:///etc/passwd", "names no host"),
        ("https://", "names no host"),
        ("https://clips.example:99999/", "port 99999, expected 1 to 65535"),
        ("https://clips.example:0/", "port 0, expected 1 to 65535"),
        ("https://clips.example:http/", "malformed"),
        ("https://[::1/", "malformed"),
        ("https://a..b/", r"malformed|can't be found"),
        ("https://nowhere.example/", "nowhere.example can't be found"),
        ("https://clips.example/" + "a" * 9_000, "9,022 characters, the limit is 8,192"),
        ("", "is empty"),
        ("  ", "is empty"),
        ("clip.wav", "neither a URL nor base64"),
        ("//clips.example/clip.wav", "neither a URL nor base64"),
        ("./clips/a.wav", "neither a URL nor base64"),
    ],
)
async def test_what_is_no_acceptable_url_is_refused_with_a_reason(url, message):
    with pytest.raises(InvalidReferenceAudio, match=message) as caught:
        await fetcher(hosts=HOSTS).fetch(url)
    assert caught.value.param == "ref_audio"


@pytest.mark.parametrize("status", [204, 206, 401, 404, 500])
async def test_any_answer_but_200_is_refused(certificate, status):
    site = Site(lambda path: f"HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n".encode())
    async with serving(site, certificate) as port:
        with pytest.raises(InvalidReferenceAudio, match=f"answered {status}, expected 200"):
            await fetcher(certificate, HOSTS).fetch(f"https://clips.example:{port}/")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_under_their_own_name(certificate, status):
    site = Site(lambda path: redirect(f"https://cdn.example:{port}/b", status) if path == "/a" else ok())
    async with serving(site, certificate) as port:
        assert await fetcher(certificate, HOSTS).fetch(f"https://clips.example:{port}/a") == BODY
    assert site.names == ["clips.example", "cdn.example"]
    assert [headers["host"] for _, headers in site.requests] == [
        f"clips.example:{port}",
        f"cdn.example:{port}",
    ]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("https://inside.example:{inside}/", "inside.example isn't a public one"),
        ("https://127.0.0.2:{inside}/", "127.0.0.2 isn't a public one"),
        ("https://[::ffff:127.0.0.2]:{inside}/", "isn't a public one"),
        ("//inside.example:{inside}/", "inside.example isn't a public one"),
        ("http://clips.example:{inside}/", "scheme 'http', expected https"),
        ("file:///etc/passwd", "scheme 'file', expected https"),
        ("data:audio/wav;base64,AAAA", "scheme 'data', expected https"),
        ("https://user:pw@cdn.example/", "carries credentials"),
        ("", "without a location"),
        ("https://bad host/", r"malformed|isn't a public one"),
    ],
)
async def test_every_hop_is_checked_like_the_first(certificate, location, message):
    """known_faults row 45: nor by a redirect."""
    inside = Site(lambda path: ok(b"secret"))
    async with serving(inside, certificate, PRIVATE) as inside_port:
        site = Site(lambda path: redirect(location.format(inside=inside_port)))
        async with serving(site, certificate) as port:

            async def look_up(host, port):
                await asyncio.sleep(0)
                return HOSTS.get(host, [host])

            with pytest.raises(InvalidReferenceAudio, match=message):
                await fetcher(certificate, resolve=look_up).fetch(f"https://clips.example:{port}/")
    assert inside.num_connections == 0
    assert len(site.requests) == 1


async def test_redirects_end(certificate):
    site = Site(lambda path: redirect("/again"))
    async with serving(site, certificate) as port:
        with pytest.raises(InvalidReferenceAudio, match="redirects more than 3 times"):
            await fetcher(certificate, HOSTS).fetch(f"https://clips.example:{port}/")
    assert len(site.requests) == 4


# ---------------------------------------------------------------- limits
async def test_an_announced_size_over_the_limit_is_refused_unread():
    async def huge():
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n"
        await asyncio.sleep(10)

    site = Site(lambda path: huge())
    async with serving(site) as port:
        with pytest.raises(InvalidReferenceAudio, match="99,999,999 bytes or more, the limit is 1,000"):
            await fetcher(hosts=HOSTS, allow_http=True, max_bytes=1_000).fetch(
                f"http://clips.example:{port}/"
            )


@pytest.mark.parametrize("framing", ["chunked", "close", "lie"])
async def test_an_endless_body_is_left_at_the_limit(framing):
    async def endless():
        header = {"chunked": "Transfer-Encoding: chunked", "close": "X: y", "lie": "Content-Length: 99"}[
            framing
        ]
        yield f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n".encode()
        part = b"a" * 16_384
        while True:
            yield b"4000\r\n" + part + b"\r\n" if framing == "chunked" else part
            await asyncio.sleep(0)

    site = Site(lambda path: endless())
    async with serving(site) as port:
        clips = fetcher(hosts=HOSTS, allow_http=True, max_bytes=100_000)
        url = f"http://clips.example:{port}/"
        if framing == "lie":  # what follows the announced bytes isn't part of the answer
            assert len(await clips.fetch(url)) == 99
        else:
            with pytest.raises(InvalidReferenceAudio, match="the limit is 100,000"):
                await clips.fetch(url)
    assert site.num_sent < 20_000_000


async def test_a_packed_body_is_refused_not_unpacked():
    site = Site(lambda path: ok(BODY, "Content-Encoding: gzip"))
    async with serving(site) as port:
        with pytest.raises(InvalidReferenceAudio, match="content-encoding 'gzip'"):
            await fetcher(hosts=HOSTS, allow_http=True).fetch(f"http://clips.example:{port}/")


async def test_a_body_of_exactly_the_limit_is_read():
    site = Site(lambda path: ok())
    async with serving(site) as port:
        clips = fetcher(hosts=HOSTS, allow_http=True, max_bytes=len(BODY))
        assert await clips.fetch(f"http://clips.example:{port}/") == BODY


@pytest.mark.parametrize("where", ["head", "body"])
async def test_a_slow_server_is_left_when_patience_ends(where):
    async def slow():
        if where == "body":
            yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
        while True:  # never silent for long, so that only the whole time can end it
            yield b"H" if where == "body" else b""
            await asyncio.sleep(0.05)

    site = Site(lambda path: slow())
    async with serving(site) as port:
        clips = fetcher(hosts=HOSTS, allow_http=True, total_s=0.4)
        async with asyncio.timeout(30):
            with pytest.raises(InvalidReferenceAudio, match=r"didn't arrive within 0\.4 s"):
                await clips.fetch(f"http://clips.example:{port}/")


async def test_a_name_that_hangs_is_left_and_holds_up_nobody(monkeypatch):
    asked, answered = threading.Event(), threading.Event()

    def hang(*_, **__):
        asked.set()
        assert answered.wait(60), "the event loop stood still"

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    fetching = asyncio.create_task(
        ReferenceFetcher(FetchPolicy(connect_s=0.2)).fetch("https://clips.example/")
    )
    await until(asked.is_set)
    with pytest.raises(InvalidReferenceAudio, match=r"clips.example wasn't found within 0\.2 s"):
        await fetching
    answered.set()


async def test_without_a_free_place_the_answer_is_come_back_later(skip):
    site = Site(lambda path: ok())
    async with serving(site) as port:
        clips = fetcher(hosts=HOSTS, allow_http=True, max_concurrent=1)
        async with clips._places:
            fetching = asyncio.create_task(clips.fetch(f"http://clips.example:{port}/"))
            await settled()
            skip(61)
            with pytest.raises(Overloaded, match="every place for fetching clips is taken"):
                await fetching
            assert await clips.fetch(base64.b64encode(BODY).decode()) == BODY  # needs no place
        assert await clips.fetch(f"http://clips.example:{port}/") == BODY


async def test_a_caller_that_leaves_gives_its_place_back():
    async def never():
        yield b""
        await asyncio.sleep(10)

    site = Site(lambda path: never())
    async with serving(site) as port:
        clips = fetcher(hosts=HOSTS, allow_http=True, max_concurrent=1)
        left = asyncio.create_task(clips.fetch(f"http://clips.example:{port}/"))
        await until(lambda: site.requests)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        site.answer = lambda path: ok()
        assert await clips.fetch(f"http://clips.example:{port}/") == BODY


# ---------------------------------------------------------------- data: and base64
@pytest.mark.parametrize("size", [0, 1, 2, 3, 1_000, 786_430, 786_431, 786_432, 786_433, 3_000_000])
async def test_base64_of_any_length_is_read(size):
    data = random.Random(size).randbytes(size)
    text = base64.b64encode(data).decode()
    url_safe = base64.urlsafe_b64encode(data).decode().rstrip("=")
    wrapped = base64.encodebytes(data).decode()
    clips = fetcher()
    for form in (
        f"data:audio/wav;base64,{text}",
        f"DATA:audio/x-wav;codecs=1;BASE64,{wrapped}",
        text,
        url_safe,
    ):
        if form:
            assert await clips.fetch(form) == data


@given(st.binary(min_size=1, max_size=200), st.integers(0, 300), st.sampled_from(" \n\r\t"))
def test_white_space_anywhere_changes_nothing(data, position, space):
    text = base64.b64encode(data).decode()
    text = text[:position] + space + text[position:]
    assert asyncio.run(fetcher().fetch(text)) == data


@pytest.mark.parametrize(
    ("ref_audio", "message"),
    [
        ("data:audio/wav,RIFF", r"expected data:audio/wav;base64"),
        ("data:audio/wav;base64", r"expected data:audio/wav;base64"),
        ("data:;base64,%%%", "holds no valid base64"),
        ("data:audio/wav;base64,AAAA=AAA", "holds no valid base64"),
        ("data:audio/wav;base64,AAAAA", "holds no valid base64"),
        ("AAAA*AAA", "neither a URL nor base64"),
        ("ÄÖÜß", "neither a URL nor base64"),
    ],
)
async def test_what_is_no_base64_is_refused(ref_audio, message):
    with pytest.raises(InvalidReferenceAudio, match=message):
        await fetcher().fetch(ref_audio)


async def test_padding_inside_a_long_text_is_refused_wherever_it_falls():
    for end in range(1_048_570, 1_048_580):  # about where one slice ends and the next begins
        text = "A" * (end - 2) + "==" + "A" * 400
        with pytest.raises(InvalidReferenceAudio, match="neither a URL nor base64"):
            await fetcher().fetch(text)


async def test_base64_over_the_limit_is_refused():
    clips = fetcher(max_bytes=1_000)
    assert len(await clips.fetch(base64.b64encode(bytes(1_000)).decode())) == 1_000
    with pytest.raises(InvalidReferenceAudio, match="the limit is 1,000"):
        await clips.fetch(base64.b64encode(bytes(1_001)).decode())


# ---------------------------------------------------------------- file:
@pytest.fixture
def folders(tmp_path):
    listed, other = tmp_path / "listed", tmp_path / "other"
    (listed / "sub dir").mkdir(parents=True)
    other.mkdir()
    (listed / "clip.wav").write_bytes(BODY)
    (listed / "sub dir" / "clip.wav").write_bytes(BODY)
    (other / "secret.wav").write_bytes(b"secret")
    (tmp_path / "listed-not").mkdir()
    (tmp_path / "listed-not" / "secret.wav").write_bytes(b"secret")
    (listed / "inner.wav").symlink_to(listed / "clip.wav")
    (listed / "escape.wav").symlink_to(other / "secret.wav")
    (listed / "escape").symlink_to(other)
    (listed / "loop").symlink_to(listed / "loop")
    os.mkfifo(listed / "pipe.wav")
    return tmp_path


@pytest.mark.parametrize(
    "url",
    [
        "file://{}/listed/clip.wav",
        "file:{}/listed/clip.wav",
        "FILE://localhost{}/listed/clip.wav",
        "file://{}/listed/sub%20dir/clip.wav",
        "file://{}/listed/sub dir/../clip.wav",
        "file://{}/listed/inner.wav",
    ],
)
async def test_a_file_under_a_listed_folder_is_read(folders, url):
    assert await fetcher(file_roots=(folders / "listed",)).fetch(url.format(folders)) == BODY


@pytest.mark.parametrize(
    "url",
    [
        "file://{}/other/secret.wav",
        "file://{}/listed-not/secret.wav",
        "file://{}/listed/../other/secret.wav",
        "file://{}/listed/%2e%2e/other/secret.wav",
        "file://{}/listed/..%2fother%2fsecret.wav",
        "file://{}/listed/escape.wav",
        "file://{}/listed/escape/secret.wav",
        "file://{}/listed/loop",
        "file://{}/listed/pipe.wav",
        "file://{}/listed/sub dir",
        "file://{}/listed",
        "file://{}/listed/missing.wav",
        "file://{}/listed/clip.wav/x",
        "file://{}/listed/clip.wav%00",
        "file://{}/listed/" + "a" * 300,
        "file://host.example{}/listed/clip.wav",
        "file:listed/clip.wav",
        "file:",
        "file:///dev/zero",
        "file:///proc/self/environ",
    ],
)
async def test_any_other_file_is_refused_without_a_hint(folders, url):
    clips = fetcher(file_roots=(folders / "listed",))
    async with asyncio.timeout(30):
        with pytest.raises(
            InvalidReferenceAudio, match=r"names no file in a folder|isn't a plain file: URL"
        ) as caught:
            await clips.fetch(url.format(folders))
    assert "secret" not in str(caught.value)


async def test_without_listed_folders_no_file_is_read(folders):
    """known_faults row 45: no file that isn't allowed."""
    with pytest.raises(InvalidReferenceAudio, match="names no file in a folder"):
        await fetcher().fetch(f"file://{folders}/listed/clip.wav")


async def test_a_file_over_the_limit_is_refused(folders):
    clips = fetcher(file_roots=(folders / "listed",), max_bytes=len(BODY) - 1)
    with pytest.raises(InvalidReferenceAudio, match="the limit is 10,243"):
        await clips.fetch(f"file://{folders}/listed/clip.wav")


async def test_a_link_swapped_in_after_the_check_is_not_followed(folders, monkeypatch):
    target = folders / "listed" / "clip.wav"
    real_open = os.open

    def swap_then_open(path, *arguments, **options):
        if path == "clip.wav":
            target.unlink()
            target.symlink_to(folders / "other" / "secret.wav")
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", swap_then_open)
    with pytest.raises(InvalidReferenceAudio, match="names no file"):
        await fetcher(file_roots=(folders / "listed",)).fetch(f"file://{target}")
