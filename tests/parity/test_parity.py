"""The check itself: passes on the committed pairs, and fails wherever something is wrong."""

import re
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from qwen3tts_core.ops.select import select_backend
from tests.parity import check

ROOT = Path(__file__).parents[2]
SEED0 = Path(__file__).parent / "golden" / "seed0"
CHECKPOINTS = {
    "custom_voice": ROOT / "checkpoints" / "tiny",
    "custom_voice_large": SEED0 / "custom_voice_large",
    "voice_design": SEED0 / "voice_design",
    "base": SEED0 / "base",
}

# What no implementation can be compared by: inputs, and draws of torch's own generator.
NOT_COMPARABLE = re.compile(
    r"tok/probes_json|case/[^/]+/(spec_json|forced_codes|sampled_first|sampled_codes|sampled2_first)"
    r"|batch/[^/]+/members_json|codec/(codes|long_codes)|enc/(clip|stereo16k)_int16"
)


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny, and the machine may be busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def golden_arrays(variant):
    with np.load(SEED0 / f"{variant}.npz") as file:
        return {name: file[name] for name in file.files}


def run_check(variant, golden, device="cpu"):
    results = check.check_arrays(CHECKPOINTS[variant], golden, partial(select_backend, device))
    return {result.name: result for result in results}


def failures(results):
    return [str(result) for result in results.values() if result.status == "FAIL"]


# ---------------------------------------------------------------- passing
GPU = (pytest.mark.gpu, pytest.mark.xdist_group("parity"))  # all four share their compiled kernels


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("variant", CHECKPOINTS)
def test_every_array_of_the_pair_equals_the_reference(variant, device):
    golden = golden_arrays(variant)
    results = run_check(variant, golden, device)
    assert set(results) == set(golden)
    assert not failures(results)
    passed_over = {name for name, result in results.items() if result.status == "-"}
    assert passed_over == {name for name in golden if NOT_COMPARABLE.fullmatch(name)}


# ---------------------------------------------------------------- failing
def perturbed(array):
    """A copy with its first and last values changed by more than any tolerance."""
    if array.dtype.kind == "U":
        return np.array(str(array).replace("50", "51"))
    changed = array.reshape(-1).copy()
    for place in {0, changed.size - 1}:
        value = changed[place]
        if array.dtype.kind == "i":
            changed[place] = value - 1 if value else 1  # still a code, where it is one
        else:
            changed[place] = 0.5 if np.isinf(value) else value + 1e-3
    return changed.reshape(array.shape)


@pytest.mark.parametrize("variant", ["base", "custom_voice_large"])
def test_a_change_in_any_compared_array_is_noticed(variant):
    assert_changes_are_noticed(variant, golden_arrays(variant), but=VOICE)


def test_a_change_in_a_cloned_voice_is_noticed():
    golden = golden_arrays("base")
    assert_changes_are_noticed("base", {name: golden[name] for name in (*VOICE, "enc/clip_int16")})


VOICE = ("enc/codes", "spk/xvector")  # compared, and also what the prompts of the other arrays are made of


def assert_changes_are_noticed(variant, golden, but=()):
    compared = {name for name in golden if not NOT_COMPARABLE.fullmatch(name) and golden[name].size}
    compared.difference_update(but)
    wrong = {name: perturbed(array) if name in compared else array for name, array in golden.items()}
    results = run_check(variant, wrong)
    noticed = {name for name, result in results.items() if result.status == "FAIL" and result.error < np.inf}
    assert noticed == compared  # by their values, not by an exception on the way


def test_a_value_that_is_not_a_number_is_a_failure():
    name = "codec/wav_full"
    golden = {"codec/codes": golden_arrays("custom_voice")["codec/codes"]}
    golden[name] = np.full_like(golden_arrays("custom_voice")[name], np.nan)
    result = run_check("custom_voice", golden)[name]
    assert (result.status, result.error) == ("FAIL", np.inf)


def test_an_array_of_another_length_is_a_failure():
    golden = dict(golden_arrays("custom_voice"))
    subset = {
        name: golden[name][:-1] if name == "tok/08_ids" else golden[name] for name in golden if "tok/" in name
    }
    assert [line.split()[1] for line in failures(run_check("custom_voice", subset))] == ["tok/08_ids"]


@pytest.mark.parametrize(
    "name", ["tok/extra", "case/plain_auto_stream/greedy", "codec/wav", "new/array", "x"]
)
def test_an_unknown_array_is_a_failure_that_names_it(name):
    result = run_check("custom_voice", {name: np.zeros(3)})[name]
    assert result.status == "FAIL"
    assert "unknown" in str(result)
    assert name in str(result)


def test_one_array_that_cannot_be_computed_does_not_hide_the_others(capsys):
    golden = golden_arrays("custom_voice")
    subset = {
        "codec/wav_full": golden["codec/wav_full"],
        "talker/suppress_tokens": golden["talker/suppress_tokens"],
    }
    subset |= {name: golden[name] for name in golden if name.startswith("tok/")}  # but not the codec's codes
    results = run_check("custom_voice", subset)
    assert results["codec/wav_full"].status == "FAIL"
    assert "KeyError" in results["codec/wav_full"].note
    assert results["tok/02_ids"].status == "ok"
    assert "Traceback" in capsys.readouterr().err


# ---------------------------------------------------------------- the command
def run_command(tmp_path, golden, capsys):
    file = tmp_path / "golden.npz"
    np.savez(file, **golden)
    code = check.main(["--checkpoint", str(CHECKPOINTS["custom_voice"]), "--golden", str(file)])
    return code, capsys.readouterr().out.splitlines()


@pytest.fixture
def token_arrays():
    return {name: array for name, array in golden_arrays("custom_voice").items() if name.startswith("tok/")}


def test_the_command_prints_one_line_per_array_and_a_last_one(tmp_path, capsys, token_arrays):
    code, lines = run_command(tmp_path, token_arrays, capsys)
    assert code == 0
    assert len(lines) == len(token_arrays) + 1
    for name, line in zip(sorted(token_arrays), lines, strict=False):
        assert name in line
        assert "max error" in line or "not compared: " in line
    assert lines[-1] == f"{len(token_arrays)} arrays: {len(token_arrays) - 1} ok, 0 failed, 1 not compared"


def test_the_command_fails_on_a_wrong_array(tmp_path, capsys, token_arrays):
    token_arrays["tok/05_ids"] = perturbed(token_arrays["tok/05_ids"])
    code, lines = run_command(tmp_path, token_arrays, capsys)
    assert code == 1
    assert [line.split()[1] for line in lines if line.startswith("FAIL")] == ["tok/05_ids"]


def test_the_command_fails_on_an_unknown_array(tmp_path, capsys, token_arrays):
    code, lines = run_command(tmp_path, {**token_arrays, "tok/unheard_of": np.zeros(1)}, capsys)
    assert code == 1
    assert any(line.startswith("FAIL") and "tok/unheard_of" in line for line in lines)


@pytest.mark.parametrize(
    "names", [[], ["tok/probes_json"], ["codec/codes", "case/plain_auto_stream/forced_codes"]]
)
def test_the_command_fails_when_nothing_was_compared(tmp_path, capsys, names):
    code, lines = run_command(tmp_path, {name: golden_arrays("custom_voice")[name] for name in names}, capsys)
    assert code == 1
    assert "nothing was compared" in lines[-1]
