"""The page's files over HTTP: what they are, when they are sent again, and what they may do in a browser."""

import fnmatch
import re
import tomllib
from typing import get_args

import pytest

from qwen3tts_core.audio.encoding import AudioFormat
from tests.deployments.conftest import ROOT

PAGE = ROOT / "deployments" / "page"
TYPES = {
    ".html": {"text/html; charset=utf-8"},
    ".css": {"text/css; charset=utf-8"},
    ".js": {"text/javascript; charset=utf-8", "application/javascript"},
    ".svg": {"image/svg+xml"},
}
FILES = sorted(file.name for file in PAGE.iterdir())


def path_of(name):
    return "/" if name == "index.html" else f"/page/{name}"


async def get(chain, path, method="GET", **headers):
    return await chain.call(method, path, **headers).finish()


@pytest.mark.parametrize("name", FILES)
async def test_every_file_comes_as_it_is_with_its_type(open_chain, name):
    async with open_chain() as chain:
        call = await get(chain, path_of(name))
        head = await get(chain, path_of(name), "HEAD")
    assert (call.status, call.body) == (200, (PAGE / name).read_bytes())
    assert call.headers["content-type"] in TYPES[(PAGE / name).suffix]
    assert call.headers["x-content-type-options"] == "nosniff"
    assert (head.status, head.body) == (200, b"")


async def test_a_browser_that_has_it_is_told_so(open_chain):
    async with open_chain() as chain:
        first = await get(chain, "/")
        assert first.headers["cache-control"] == "no-cache"
        again = await get(chain, "/", if_none_match=first.headers["etag"])
        other = await get(chain, "/", if_none_match='"of another release"')
    assert (again.status, again.body) == (304, b"")
    assert again.headers["cache-control"] == "no-cache"
    assert other.status == 200


async def test_the_page_may_load_and_run_only_what_this_server_sends(open_chain):
    async with open_chain() as chain:
        policy = (await get(chain, "/")).headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path", ["/page/", "/page/nope.js", "/page/../app.py", "/page/../../README.md", "/page//etc/passwd"]
)
async def test_nothing_else_can_be_fetched(open_chain, path):
    async with open_chain() as chain:
        assert (await get(chain, path)).status == 404


async def test_it_needs_no_key_and_lets_nobody_further(open_chain):
    async with open_chain(api_key_hashes=(b"0" * 32,)) as chain:
        for name in FILES:
            assert (await get(chain, path_of(name))).status == 200
        for path in ("/v1/models", "/pages", "/page", "/page/../v1/models"):
            assert (await get(chain, path)).status in (401, 404)
        assert (await get(chain, "/v1/models")).status == 401


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere_and_every_reference_leads_to_a_file(name):
    text = (PAGE / name).read_text(encoding="utf-8")
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg|192\.168)[\w.]+", text) == []
    found = re.findall(r'from "\./([^"]+)"|(?:src|href)="page/([^"]+)"', text)
    assert {one or other for one, other in found} <= set(FILES)


def test_every_file_is_in_the_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["deployments"]
    for name in FILES:
        assert any(fnmatch.fnmatch(f"page/{name}", pattern) for pattern in patterns)


def test_every_format_can_be_chosen():
    select = re.search(r'id="response_format".*?</select>', (PAGE / "index.html").read_text(), re.DOTALL)[0]
    assert sorted(re.findall(r'value="(\w+)"', select)) == sorted(get_args(AudioFormat))
