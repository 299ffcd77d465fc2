import base64
import io
from collections import Counter

import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from load_tests.jobs import SENTENCES, JobMaker, long_texts, made_up_clips, read_clips, read_texts


def test_two_hundred_english_sentences_of_seventeen_to_twenty_words():
    sentences = read_texts(SENTENCES)
    assert len(set(sentences)) == 200
    assert {len(sentence.split()) for sentence in sentences} <= {17, 18, 19, 20}


def test_fifty_chinese_sentences():
    sentences = read_texts(SENTENCES.with_name("sentences_zh_50.txt"))
    assert len(set(sentences)) == 50
    assert all(28 <= len(sentence) <= 40 for sentence in sentences)


@given(st.integers(0, 10_000))
def test_a_number_is_the_same_request_whenever_it_is_made(number):
    maker = JobMaker(["a", "b", "c"], seed=3, frames=(60, 112), voices=["x", "y"])
    job = maker.job(number)
    assert job == JobMaker(["a", "b", "c"], seed=3, frames=(60, 112), voices=["x", "y"]).job(number)
    assert job.text == "abc"[number % 3]
    assert job.seed == 3 + number
    assert 60 <= job.max_frames <= 112


def test_limits_are_spread_over_their_range_and_voices_are_used_again():
    maker = JobMaker(["a"], frames=(60, 112), voices=["x", "y"])
    jobs = [maker.job(number) for number in range(500)]
    assert len({job.max_frames for job in jobs}) > 45
    assert sum(job.max_frames for job in jobs) / 500 == pytest.approx(86, abs=2)
    assert Counter(job.voice for job in jobs) == {"x": 250, "y": 250}


def test_without_a_seed_none_is_sent():
    assert JobMaker(["a"], seed=None, frames=(5, 5)).job(9).seed is None


def test_long_texts_are_as_long_as_asked_and_made_of_whole_sentences():
    sentences = ["One is here.", "Two is there.", "Three."]
    texts = long_texts(sentences, 40)
    assert len(texts) == 3
    assert all(len(text) >= 39 for text in texts)
    assert texts[1].startswith("Two is there. Three. One is here.")


def test_an_empty_file_of_texts_is_an_error_with_its_name(tmp_path):
    (tmp_path / "none.txt").write_text("# only this\n\n")
    with pytest.raises(ValueError, match=r"none\.txt"):
        read_texts(tmp_path / "none.txt")


def test_made_up_clips_are_different_voices_of_three_seconds():
    clips = made_up_clips(3)
    assert len({clip.audio_base64 for clip in clips}) == 3
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(clips[0].audio_base64)))
    assert (rate, len(samples)) == (24_000, 72_000)


def test_clips_of_a_folder_come_with_their_texts(tmp_path):
    (tmp_path / "ada.wav").write_bytes(b"RIFF")
    (tmp_path / "ada.txt").write_text("What ada says.\n")
    (clip,) = read_clips(tmp_path, 4)
    assert (clip.name, clip.text) == ("ada", "What ada says.")
    with pytest.raises(ValueError, match=r"no \.wav"):
        read_clips(tmp_path / "empty", 1)
