"""The arrows of README "Architecture" never turn back."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PURE = (  # arithmetic and plain values: must start at once, without torch
    "qwen3tts_core.audio.clip",
    "qwen3tts_core.config",
    "qwen3tts_core.engine.memo",
    "qwen3tts_core.engine.outbox",
    "qwen3tts_core.engine.codec_scheduler",
    "qwen3tts_core.engine.frame_checks",
    "qwen3tts_core.engine.pages",
    "qwen3tts_core.engine.scheduler",
    "qwen3tts_core.engine.stats",
    "qwen3tts_core.errors",
    "qwen3tts_core.json_section",
    "qwen3tts_core.streaming.chunk_ramp",
    "qwen3tts_core.streaming.codec_window",
    "qwen3tts_core.streaming.pcm",
    "qwen3tts_core.text.sentences",
    "qwen3tts_core.text.splitter",
    "qwen3tts_core.types",
)


def core_modules():
    found = pkgutil.walk_packages([str(ROOT / "qwen3tts_core")], "qwen3tts_core.")
    return [module.name for module in found if not module.name.startswith("qwen3tts_core.ops.cuda")]


def import_without(blanked, modules):
    """Import `modules` in a fresh interpreter where importing any of `blanked` fails."""
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({list(blanked)!r}))\n"
        f"for name in {list(modules)!r}: importlib.import_module(name)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )


def test_the_core_runs_without_ray_http_or_gpu_packages():
    modules = core_modules()
    assert len(modules) >= 10, "the walk over the package found next to nothing"
    result = import_without(["ray", "fastapi", "starlette", "pydantic", "flashinfer", "triton"], modules)
    assert result.returncode == 0, result.stderr


def test_pure_modules_run_without_torch():
    result = import_without(["torch", "ray", "fastapi", "transformers"], PURE)
    assert result.returncode == 0, result.stderr


def test_the_client_runs_without_the_server_s_packages():
    modules = [
        f"deployments.client.{path.stem}" for path in (ROOT / "deployments" / "client").glob("[!_]*.py")
    ]
    assert len(modules) >= 5
    result = import_without(
        ["torch", "ray", "fastapi", "starlette", "pydantic", "transformers"], ["deployments.client", *modules]
    )
    assert result.returncode == 0, result.stderr


def test_an_engine_s_process_runs_without_what_serves():
    result = import_without(["ray", "fastapi", "starlette", "pydantic"], ["deployments.engine_child"])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ["torch", "ray"])
def test_blanking_a_package_really_fails_its_importers(package):
    result = import_without([package], [package])
    assert result.returncode != 0
    assert f"import of {package} halted" in result.stderr


def test_imports_follow_the_layers():
    lint_imports = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 kept, 0 broken" in result.stdout, result.stdout
