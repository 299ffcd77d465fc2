from dataclasses import replace
from pathlib import Path

import pytest

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.errors import UnknownLanguage, UnknownVoice
from qwen3tts_core.text.voices import find_language, find_speaker, list_languages, list_speakers

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"
config = CheckpointConfig.from_checkpoint(TINY)


@pytest.mark.parametrize("spelling", ["vivian", "Vivian", "VIVIAN"])
def test_voices_are_found_in_any_case(spelling):
    speaker = find_speaker(config, spelling)
    assert speaker == ("vivian", config.speakers["vivian"], None)


def test_every_listed_voice_is_found():
    assert len(list_speakers(config)) > 3
    for name in list_speakers(config):
        assert find_speaker(config, name).codec_id == config.speakers[name]


def test_an_unknown_voice_names_the_field_and_every_accepted_voice():
    with pytest.raises(UnknownVoice) as caught:
        find_speaker(config, "nope")
    assert caught.value.param == "voice"
    assert caught.value.accepted == list_speakers(config)


def test_a_speaker_absent_from_the_dialects_has_none():
    bare = replace(config, speaker_dialects={})
    assert find_speaker(bare, "eric").dialect is None


@pytest.mark.parametrize("auto", [None, "", "auto", "Auto", "AUTO"])
def test_auto_leaves_the_language_to_the_model(auto):
    assert find_language(config, auto) is None


def test_languages_are_found_in_any_case():
    assert find_language(config, "German") == find_language(config, "german") == config.languages["german"]


def test_dialects_are_no_languages_of_their_own():
    assert "sichuan_dialect" in config.languages
    assert "Auto" in list_languages(config)
    assert not any("dialect" in name for name in list_languages(config))
    with pytest.raises(UnknownLanguage) as caught:
        find_language(config, "sichuan_dialect")
    assert caught.value.param == "language"
    assert caught.value.accepted == list_languages(config)


@pytest.mark.parametrize(
    ("language", "spoken"),
    [
        ("Auto", "sichuan_dialect"),
        ("Chinese", "sichuan_dialect"),
        ("English", "english"),
        ("german", "german"),
    ],
)
def test_a_dialect_replaces_auto_and_chinese_only(language, spoken):
    speaker = find_speaker(config, "Eric")
    assert speaker.dialect == "sichuan_dialect"
    assert find_language(config, language, speaker) == config.languages[spoken]
