"""`make serve` with what can't be served: it ends, says why, and leaves nothing behind."""

import shutil
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file, save_file

from deployments.launch import Address, find_problem
from load_tests.drills.ports import free_port
from tests.e2e.conftest import CONFIG, ROOT

TENSOR = "talker.code_predictor.model.layers.0.input_layernorm.weight"
END_TIMEOUT_S = 600


@pytest.fixture
def broken_checkpoint(tmp_path):
    """The tiny one without one tensor."""
    folder = tmp_path / "broken"
    shutil.copytree(ROOT / "checkpoints" / "tiny", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[TENSOR]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_checkpoint_that_cannot_be_loaded_ends_the_start_by_the_tensors_name(broken_checkpoint, tmp_path):
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    port = config["http_options"]["port"] = free_port()
    config["applications"][0]["args"]["checkpoint"] = str(broken_checkpoint)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    launch = [sys.executable, "-m", "deployments.launch", str(file)]
    ended = subprocess.run(launch, cwd=ROOT, capture_output=True, text=True, timeout=END_TIMEOUT_S)
    assert ended.returncode == 1
    told = ended.stderr.strip().splitlines()[-1]
    assert told.startswith("==> ")
    assert TENSOR in told
    assert "Traceback" not in told
    assert find_problem(Address("127.0.0.1", port)) is None, "somebody still listens"
