"""What the drills say of a server can be trusted: each counts what it should, and a broken promise is an exit status."""

import asyncio
import os
import random
import subprocess
import sys
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests import soak
from load_tests.chaos import Scale
from load_tests.drills.flatness import growth
from load_tests.drills.listening import (
    BYTES_PER_FRAME,
    SAMPLES_PER_FRAME,
    Difference,
    Heard,
    compare,
    compare_lengths,
)
from load_tests.drills.processes import descendants, end_all, is_alive, name_of, num_open_files, rss_bytes
from load_tests.drills.report import BEGUN, DrillResult, drilling, table
from load_tests.drills.server import Held


def speech(num_frames, seed=0):
    draw = random.Random(seed)
    return b"".join(draw.randbytes(8) * (BYTES_PER_FRAME // 8) for _ in range(num_frames))


FRAMES = st.integers(1, 12)


# ---------------------------------------------------------------- lost and repeated samples
@given(FRAMES)
def test_what_came_whole_has_nothing_lost_and_nothing_repeated(num_frames):
    assert compare(speech(num_frames), speech(num_frames)) == (0, 0)


@given(num_frames=FRAMES, data=st.data())
def test_a_cut_counts_what_is_missing_to_the_sample(num_frames, data):
    whole = speech(num_frames)
    kept = data.draw(st.integers(0, len(whole) // 2))
    assert compare(whole[: 2 * kept], whole) == (len(whole) // 2 - kept, 0)


@given(num_frames=FRAMES, data=st.data())
def test_a_frame_that_comes_again_is_counted_and_one_left_out_too(num_frames, data):
    whole = speech(num_frames)
    at = data.draw(st.integers(0, num_frames - 1)) * BYTES_PER_FRAME
    frame = whole[at : at + BYTES_PER_FRAME]
    assert compare(whole[:at] + frame + whole[at:], whole) == (0, SAMPLES_PER_FRAME)
    if at + BYTES_PER_FRAME < len(whole):
        assert compare(whole[:at] + whole[at + BYTES_PER_FRAME :], whole) == (SAMPLES_PER_FRAME, 0)


def test_an_altered_frame_is_lost_and_its_stand_in_is_too_much():
    whole = speech(5)
    altered = bytearray(whole)
    altered[2 * BYTES_PER_FRAME] ^= 1
    assert compare(bytes(altered), whole) == (SAMPLES_PER_FRAME, SAMPLES_PER_FRAME)


def test_where_only_the_length_is_promised_only_it_counts():
    assert compare_lengths(Heard(pcm=bytes(100)), 100) == (0, 0)
    assert compare_lengths(Heard(pcm=bytes(90)), 100) == (5, 0)
    assert compare_lengths(Heard(pcm=bytes(110)), 100) == (0, 5)


@pytest.mark.parametrize(
    ("status", "code", "headers", "is_refused"),
    [
        (503, "overloaded", {"retry-after": "1"}, True),
        (503, "overloaded", {}, False),
        (503, "overloaded", {"retry-after": "0"}, False),
        (503, "unavailable", {"retry-after": "1"}, False),
        (500, "overloaded", {"retry-after": "1"}, False),
        (200, "", {}, False),
    ],
)
def test_a_refusal_is_what_the_api_promises_and_nothing_else(status, code, headers, is_refused):
    assert Heard(status=status, code=code, headers=headers).is_refused == is_refused


# ---------------------------------------------------------------- results
WHOLE = Heard(status=200, is_whole=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda result: result.add(Difference(1, 0), WHOLE),
        lambda result: result.add(Difference(0, 1), WHOLE),
        lambda result: result.add(Difference(0, 0), Heard(status=200, is_whole=False)),
        lambda result: result.add(Difference(0, 0), Heard(status=500, is_whole=True)),
        lambda result: result.fail("a request"),
        lambda result: result.problem("a promise"),
        lambda result: result.leaks(Held(1, 0, 0)),
        lambda result: result.leaks(Held(0, 1, 0)),
        lambda result: result.leaks(Held(0, 0, 1)),
    ],
)
def test_every_broken_promise_spoils_the_verdict(spoil):
    result = DrillResult("one")
    result.add(Difference(0, 0), WHOLE)
    result.leaks(Held(0, 0, 0))
    assert result.is_good
    spoil(result)
    assert not result.is_good


def test_a_drill_that_breaks_is_not_good_and_does_not_end_the_others(capsys):
    with drilling("one") as result:
        raise TimeoutError("no replica")
    assert not result.is_good
    assert "no replica" in capsys.readouterr().out


def test_ctrl_c_ends_all_drills_and_what_was_begun_is_not_good():
    with pytest.raises(KeyboardInterrupt), drilling("one") as result:
        raise KeyboardInterrupt
    assert BEGUN[-1] is result
    assert not result.is_good


def test_the_table_has_a_row_for_each_drill_and_columns_that_line_up():
    results = [
        DrillResult("kill", requests=1234, lost_samples=7),
        DrillResult("overload", notes={"served": 3}),
    ]
    lines = table(results).splitlines()
    assert len(lines) == 4
    assert len({line.rindex("|") for line in lines}) == 1
    names = [cell.strip() for cell in lines[0].split("|")]
    cells = [cell.strip() for cell in lines[2].split("|")]
    assert (cells[names.index("requests")], cells[names.index("lost samples")]) == ("1234", "7")
    assert "served 3" in lines[3]


def test_a_scale_makes_less_of_each_drill_but_never_nothing():
    assert [Scale(factor).count(100, least=2) for factor in (1, 0.5, 0.001)] == [100, 50, 2]
    assert [Scale(factor).seconds(60, least=5) for factor in (1, 0.01)] == [60, 5]


# ---------------------------------------------------------------- processes
SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"


def test_children_and_their_children_are_found_and_ended_by_their_ids():
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        while len(family := [one for one in descendants(os.getpid()) if is_below(one, child.pid)]) < 2:
            assert child.poll() is None
        assert end_all(family, patience_s=0) == family
        child.wait(60)
        assert not end_all(family, patience_s=60)
        assert not any(is_alive(one) for one in family)
    finally:
        child.kill()
        child.wait()


def is_below(process, pid):
    return process.pid == pid or process in descendants(pid)


HOLDER = """
import os
print(flush=True)
input()
held, files = bytearray(b"x") * (64 << 20), [open(os.devnull) for _ in range(7)]
print(flush=True)
input()
"""


@contextmanager
def a_process(code):
    """Of Python, that speaks and hears by lines, and that nobody else has to do with."""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


def test_memory_and_files_of_a_process_are_those_of_the_kernel():
    with a_process(HOLDER) as child:
        num_bytes, num_files = rss_bytes(child.pid), num_open_files(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert 48 << 20 < rss_bytes(child.pid) - num_bytes < 80 << 20
        assert num_open_files(child.pid) == num_files + 7
        assert name_of(child.pid).startswith(f"{sys.executable} -c")


def test_of_a_process_that_is_gone_there_is_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert (rss_bytes(child.pid), num_open_files(child.pid), name_of(child.pid)) == (0, 0, "")


# ---------------------------------------------------------------- soak
@given(st.lists(st.floats(0, 5), min_size=30, max_size=60))
def test_noise_about_a_level_is_flat(noise):
    warming_up = [float(n) for n in range(0, 100, 10)]
    assert growth([*warming_up, *(100 + one for one in noise)]).is_flat(share=0.06, slack=0)


def test_a_leak_is_not_flat():
    assert not growth([100 + 2 * n for n in range(30)]).is_flat(share=0.05, slack=10)
    with pytest.raises(ValueError, match="too few"):
        growth([1.0] * 8)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ray::ServeReplica:soak:Talker", "Talker"),
        ("ray::ServeReplica:soak:Codec.handle_request_streaming", "Codec"),
        ("/x/python -m deployments.engine_child Talker 9", "Talker engine"),
        ("ray::ProxyActor.receive_asgi_messages", "ProxyActor"),
        ("/opt/ray/core/src/ray/raylet/raylet --x=gcs", "raylet"),
        ("ray::IDLE", "other"),
        ("", "other"),
    ],
)
def test_a_process_is_told_by_its_command_line(name, kind):
    assert soak.kind_of(name) == kind


def samples(memory, files):
    made = soak.Samples(at_s=[5.0 * n for n in range(len(memory))])
    made.memory_mib["Talker"], made.files["Talker"] = memory, files
    return made


def test_a_soak_names_what_has_grown():
    flat, leaking = [300.0] * 30, [300.0 + 5 * n for n in range(30)]
    for memory, files, unit in ((flat, flat, None), (leaking, flat, "MiB"), (flat, leaking, "files")):
        result = DrillResult("soak")
        soak.judge(result, samples(memory, files))
        assert result.is_good == (unit is None)
        if unit:
            assert result.problems[0].startswith("Talker grew")
            assert result.problems[0].endswith(unit)


def test_a_soak_s_plot_is_a_picture(tmp_path):
    made = samples([300.0] * 30, [20.0] * 30)
    made.held["slots"] = [float(n % 3) for n in range(30)]
    soak.plot(made, tmp_path / "build" / "soak.png")
    assert (tmp_path / "build" / "soak.png").read_bytes().startswith(b"\x89PNG")


async def test_samples_of_a_kind_that_comes_later_line_up(monkeypatch):
    class Server:
        processes = ()

    made, server = soak.Samples(), Server()
    await asyncio.to_thread(made.look, server, 0.0)
    with a_process("print(flush=True); input()") as child:
        server.processes = [one for one in descendants(os.getpid()) if one.pid == child.pid]
        made.look(server, 5.0)
    assert made.at_s == [0.0, 5.0]
    assert made.memory_mib["other"][0] == 0
    assert made.memory_mib["other"][1] > 0
    assert {len(series) for series in made.memory_mib.values()} == {2}
