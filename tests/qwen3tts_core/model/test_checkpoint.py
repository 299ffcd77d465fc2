from pathlib import Path

import pytest
from huggingface_hub import constants

from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.checkpoint import CHECKPOINTS, resolve_checkpoint

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and no way to the hub."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return cache


def put_in_cache(cache, repo, ref="main", files=("config.json",)):
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}", "utf-8")
    (home / "refs").mkdir()
    (home / "refs" / ref).write_text(COMMIT, "utf-8")
    return snapshot


def refusal(name):
    with pytest.raises(CheckpointMismatch) as caught:
        resolve_checkpoint(name)
    return str(caught.value)


def test_a_folder_with_a_config_is_taken_as_it_is(cache):
    assert resolve_checkpoint(str(TINY)) == TINY


@pytest.mark.parametrize("name", ["mine", "owner/mine", "qwen3_tts"])
def test_a_local_folder_wins_over_every_other_meaning(cache, tmp_path, name):
    put_in_cache(cache, "owner/mine")
    put_in_cache(cache, CHECKPOINTS["qwen3_tts"])
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "config.json").write_text("{}", "utf-8")
    assert resolve_checkpoint(name) == tmp_path / name


def test_home_is_expanded(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(TINY.parent))
    assert resolve_checkpoint("~/tiny") == TINY


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_short_names_find_the_published_checkpoints(cache, name):
    snapshot = put_in_cache(cache, CHECKPOINTS[name])
    assert resolve_checkpoint(name) == snapshot
    assert resolve_checkpoint(CHECKPOINTS[name]) == snapshot


def test_a_revision_is_looked_up_by_itself(cache):
    snapshot = put_in_cache(cache, "owner/mine", ref="v2")
    assert resolve_checkpoint("owner/mine@v2") == snapshot
    assert resolve_checkpoint(f"owner/mine@{COMMIT}") == snapshot
    assert "owner/mine (default revision)" in refusal("owner/mine")


def test_offline_and_not_cached_says_what_where_and_what_to_do(cache):
    said = refusal("qwen3_tts")
    assert "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice" in said
    assert constants.ENDPOINT in said
    assert str(cache) in said
    assert "give the path of a folder" in said


def test_an_unreachable_hub_says_the_same_as_no_hub(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    said = refusal("owner/absent")
    assert "http://127.0.0.1:9" in said
    assert "Connect" in said  # it did try
    assert "give the path of a folder" in said


def test_a_cached_repository_without_a_config_is_not_a_checkpoint(cache):
    put_in_cache(cache, "owner/mine", files=("README.md",))
    assert "holds no config.json" in refusal("owner/mine")


def test_a_folder_without_a_config_is_not_looked_up_elsewhere(cache, tmp_path):
    put_in_cache(cache, "owner/mine")
    (tmp_path / "owner" / "mine").mkdir(parents=True)
    assert "holds no config.json" in refusal("owner/mine")


def test_an_unrelated_folder_does_not_hide_a_short_name(cache, tmp_path):
    snapshot = put_in_cache(cache, CHECKPOINTS["qwen3_tts"])
    (tmp_path / "qwen3_tts").mkdir()
    assert resolve_checkpoint("qwen3_tts") == snapshot


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "./a/b", "../a", "a/b/c", "", "a b/c"])
def test_what_is_neither_path_nor_name_is_refused_with_all_three_meanings(cache, name):
    said = refusal(name)
    assert "no such folder" in said or "holds no config.json" in said
    if "no such folder" in said:
        assert "qwen3_tts_voicedesign" in said
        assert "owner/name" in said
