"""The daemon's life, with a stand-in for the driver's program that keeps the same promises."""

import os
import subprocess
import sys

import pytest

from deployments import mps
from deployments.mps import LOG_FOLDER, PIPE_FOLDER, MpsUnavailable, mps_daemon

# `-f` serves until told to quit; without it, a line of stdin is a command to the one that serves.
CONTROL = """#!{python}
import os, pathlib, sys, time
pipes, logs = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    {before}
    (pipes / "control").write_text(str(os.getpid()))
    while not (pipes / "quit").exists():
        time.sleep(0.01)
    (pathlib.Path(__file__).parent / "has_quit").touch()
elif not (pipes / "control").exists():
    sys.exit("Cannot find MPS control daemon process")
elif sys.stdin.read().strip() == "quit":
    (pipes / "quit").touch()
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.delenv(PIPE_FOLDER, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(mps, "_START_S", 120.0)  # its programs are Python: each takes a while to start
    monkeypatch.setattr(mps, "_QUIT_S", 60.0)

    def put(before="pass"):
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(CONTROL.format(python=sys.executable, before=before))
        program.chmod(0o755)

    return put


def test_children_find_the_daemon_and_it_ends_with_them(install, tmp_path):
    install()
    with mps_daemon():
        show = [sys.executable, "-c", f"import os; print(os.environ['{PIPE_FOLDER}'])"]
        pipes = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
        assert os.path.exists(os.path.join(pipes, "control"))
        assert not (tmp_path / "has_quit").exists()
    assert (tmp_path / "has_quit").exists()
    assert not os.path.exists(pipes)
    assert PIPE_FOLDER not in os.environ
    assert LOG_FOLDER not in os.environ


def test_it_ends_with_a_server_that_fails(install, tmp_path):
    install()
    with pytest.raises(ZeroDivisionError), mps_daemon():
        1 / 0  # noqa: B018
    assert (tmp_path / "has_quit").exists()


def test_a_daemon_that_is_there_already_is_left_alone(install, tmp_path, monkeypatch):
    install()
    monkeypatch.setenv(PIPE_FOLDER, "/somebody's")
    with mps_daemon():
        assert os.environ[PIPE_FOLDER] == "/somebody's"
    assert os.environ[PIPE_FOLDER] == "/somebody's"
    assert not (tmp_path / "has_quit").exists()


def test_no_program_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv(PIPE_FOLDER, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsUnavailable, match="nvidia-cuda-mps-control can't be run"), mps_daemon():
        pytest.fail("there is no daemon")
    assert PIPE_FOLDER not in os.environ


def test_a_daemon_that_can_t_start_is_told_with_its_last_words(install):
    install("(logs / 'control.log').write_text('starting\\nno device\\n'); sys.exit(3)")
    with pytest.raises(MpsUnavailable, match="status 3; its log ends with: no device"), mps_daemon():
        pytest.fail("there is no daemon")
