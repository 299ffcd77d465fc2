"""Training steps made fast: what is one graph, and what is one kernel, on a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

from checkpoints.speaking.recipe.captured import CapturedStep, adamw, set_rate
from checkpoints.speaking.recipe.curves import main as draw_curves
from tests.qwen3tts_core.ops.test_triton_kernels import ROOT, interpreter_is_broken

CUDA = pytest.param("cuda:0", marks=pytest.mark.gpu)


@pytest.mark.skipif(
    interpreter_is_broken(), reason="no working Triton interpreter for this platform and NumPy"
)
def test_the_activation_s_kernels_are_its_formula_and_gradients():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", "-m", "tests.checkpoints.speaking.interpreted_snake"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = json.loads(done.stdout)
    assert len(cases) == 3
    for name, errors in cases.items():
        assert len(errors) == 4
        assert max(errors) < 1e-5, name


def trained(device, num_steps, is_captured):
    """Weights and losses of a small regression with dropout, whose rate falls from step to step, in two kinds of step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to(
        device
    )
    optimizer = adamw(model.parameters(), torch.device(device), rate=1.0, betas=(0.9, 0.95))
    inputs = torch.randn(2 * num_steps, 4, 8).to(device)

    def step(kind, x):
        loss = (model(x) - kind).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    run = CapturedStep(step, torch.device(device)) if is_captured else step
    losses = []
    for number, x in enumerate(inputs):
        torch.manual_seed(number)
        set_rate(optimizer, 0.1 / (number + 1))
        losses.append(float(run(number % 2, x)["loss"]))
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_captured_steps_are_the_steps_themselves(device):
    """The same draws, rates and inputs in every step, though a graph is recorded once."""
    losses, weights = trained(device, 8, is_captured=False)
    again, same = trained(device, 8, is_captured=True)
    assert len(set(losses)) == 16
    torch.testing.assert_close(again, losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(same, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_rate_holds_from_the_next_step_on(device):
    weight = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = adamw([weight], torch.device(device), rate=0.1, betas=(0.9, 0.95))
    seen = []
    for rate in (0.0, 0.01, 0.0):
        set_rate(optimizer, rate)
        before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
        optimizer.step()
        seen.append(float((before - weight.detach()).abs().max()))
    assert seen == [0.0, pytest.approx(0.01, rel=0.05), 0.0]


def test_curves_are_drawn_from_the_training_of_this_repository(tmp_path):
    png = tmp_path / "curves.png"
    assert draw_curves([str(ROOT / "checkpoints/speaking/curves.jsonl"), str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_curves_without_a_talker_say_what_is_missing(tmp_path, capsys):
    file = tmp_path / "curves.jsonl"
    file.write_text('{"stage": "codec", "step": 1, "progress": 0.5, "mel": 1.0}\n')
    assert draw_curves([str(file), str(tmp_path / "curves.png")]) == 1
    assert "no line of stage 'talker'" in capsys.readouterr().err
