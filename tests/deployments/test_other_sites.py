"""A page of another site, open in a browser that can reach the server: it may not speak, nor keep a voice here."""

import json

import pytest

from tests.clips import form, wav_clip

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
PAGE = "https://app.example"
CROSS = {"origin": PAGE, "sec_fetch_site": "cross-site"}
BODY = json.dumps({"input": "Hello there.", "seed": 3}).encode()


async def speak(chain, **headers):
    return await chain.call("POST", SPEECH, BODY, content_type="application/json", **headers).finish()


async def test_its_requests_and_sockets_end_before_they_begin(open_base):
    async with open_base() as chain:
        body, content_type = form(audio_sample=wav_clip(), name="ada", ref_text="Hello.")
        upload = await chain.call("POST", VOICES, body, content_type=content_type, **CROSS).finish()
        deletion = await chain.call("DELETE", f"{VOICES}/ada", **CROSS).finish()
        for call in (upload, deletion, await speak(chain, **CROSS)):
            assert call.status == 403
            error = json.loads(call.body)["error"]
            assert error["code"] == "origin_not_allowed"
            assert PAGE in error["message"]
        socket = await chain.socket(**CROSS).wait_until_over()
        assert socket.status == 403
        listed = await chain.call("GET", VOICES, **CROSS).finish()
        assert listed.status == 200
        assert "ada" not in listed.body.decode()
        assert chain.num_held == 0


@pytest.mark.parametrize("site", ["same-origin", "same-site", "none", None])
async def test_the_own_page_other_ports_and_programs_may(open_chain, site):
    headers = {} if site is None else {"origin": "http://localhost:3000", "sec_fetch_site": site}
    async with open_chain() as chain:
        assert (await speak(chain, **headers)).status == 200


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_a_site_that_the_operator_names_may_and_reads_the_answer(open_chain, allowed):
    async with open_chain(allowed_origins=(allowed,)) as chain:
        call = await speak(chain, **CROSS)
        assert call.status == 200
        assert call.headers["access-control-allow-origin"] == allowed
        refused = await chain.call("POST", SPEECH, b"{}", content_type="application/json", **CROSS).finish()
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, allowed)
        asks = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
        assert (await chain.call("OPTIONS", SPEECH, **CROSS, **asks).finish()).status == 200
        socket = chain.socket(**CROSS)
        socket.send("session.config", response_format="pcm")
        await socket.wait_for("session.configured")


async def test_naming_one_site_lets_in_no_other(open_chain):
    async with open_chain(allowed_origins=(PAGE,)) as chain:
        assert (await speak(chain, **{**CROSS, "origin": "https://evil.example"})).status == 403
