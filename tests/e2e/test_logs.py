"""Lines of the log as JSON, where the Serve config asks for that."""

import json
import time
from pathlib import Path

import ray

ARRIVE_WITHIN_S = 120


def lines_of(request_id):
    """Whatever our loggers said during that request: each replica's stderr is a file of the session."""
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("worker-*.err")]
    whole = [text[: text.rfind("\n") + 1] for text in texts]  # the last line may still be on its way
    return [line for text in whole for line in text.splitlines() if request_id in line]


def test_a_request_s_line_is_an_object_with_its_id(deterministic):
    body = {"input": "Not one word of this.", "max_new_tokens": 5}
    headers = {"x-request-id": "an-id-for-the-log"}
    assert deterministic.client.post("v1/audio/speech", json=body, headers=headers).status_code == 200
    deadline = time.monotonic() + ARRIVE_WITHIN_S
    lines = []
    while not any('"speech"' in line for line in lines):
        assert time.monotonic() < deadline, lines
        time.sleep(0.2)
        lines = lines_of("an-id-for-the-log")
    found = [json.loads(line) for line in lines]
    (line,) = [each for each in found if "speech" in each]
    assert line["request_id"] == line["speech"]["request_id"] == "an-id-for-the-log"
    assert (line["levelname"], line["application"]) == ("INFO", "deterministic")
    assert line["deployment"] == "deterministic_Ingress"  # as Serve's own lines call it
    assert (line["speech"]["outcome"], line["speech"]["frames"]) == ("ok", 5)
    assert not any("Not one word" in each for each in lines)
