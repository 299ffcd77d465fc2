"""From the teacher's samples to frames, phones and batches."""

import math
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoints.speaking.recipe import parcels
from checkpoints.speaking.recipe.code_corpus import CodeCorpus
from checkpoints.speaking.recipe.corpus import WaveCorpus, resample_16k_to_24k
from checkpoints.speaking.recipe.encode import encode_corpus, silent_codes, write_codes
from checkpoints.speaking.recipe.lines import Utterance
from checkpoints.speaking.recipe.probe import num_edits, spoken_phones
from checkpoints.speaking.recipe.sitting import Journal
from checkpoints.speaking.recipe.synthesize import sample_labels, shard_name, speak
from checkpoints.speaking.recipe.talker_model import Corruption
from checkpoints.speaking.recipe.teacher import Utterance as Said
from checkpoints.speaking.recipe.train_codec import REHEARSAL, CodecTrainer
from checkpoints.speaking.recipe.train_talker import REHEARSAL as TALKER_REHEARSAL
from checkpoints.speaking.recipe.train_talker import TalkerTrainer

CPU = torch.device("cpu")


class Humming:
    """A teacher that hums phone 1 for 0.1 s, then phone 2 for 0.05 s, whatever it reads."""

    def say(self, text, voice):
        return Said(np.full(2_400, 1_000, np.int16), np.array([1, 2], np.uint8), np.array([0.1, 0.15]))


def test_an_utterance_has_whole_frames_silence_around_it_and_labels_where_the_sound_is():
    spoken = speak(Humming(), Utterance(("a", "b"), "slt"), Random(0))
    assert len(spoken.samples) == 1_280 * spoken.num_frames
    assert len(spoken.phones) == 4 * spoken.num_frames
    loud = np.flatnonzero(spoken.samples)
    assert loud[0] == 2 * 1_280
    assert len(spoken.samples) - loud[-1] > 3 * 1_280
    assert len(loud) == 4_800
    sound = spoken.samples[160::320] != 0
    assert np.array_equal(spoken.phones != 0, sound)
    assert sorted(set(spoken.phones)) == [0, 1, 2]


def test_labels_end_where_the_phones_do():
    labels = sample_labels(
        Said(np.zeros(100, np.int16), np.array([3, 4], np.uint8), np.array([0.001, 0.005]))
    )
    assert labels.tolist() == [3] * 16 + [4] * 64 + [0] * 20


@pytest.mark.parametrize("hz", [100, 1_000, 6_000])
def test_resampling_keeps_a_tone(hz):
    at_16k = torch.sin(2 * math.pi * hz * torch.arange(1_600) / 16_000)
    expected = torch.sin(2 * math.pi * hz * torch.arange(2_400) / 24_000)
    got = resample_16k_to_24k(at_16k)
    assert len(got) == 2_400
    torch.testing.assert_close(got[100:-100], expected[100:-100], atol=5e-3, rtol=0)  # the filter's ripple


def write_shard(folder, number, lengths, rng):
    frames = sum(lengths)
    arrays = {
        "samples": rng.integers(-8_000, 8_000, 1_280 * frames).astype(np.int16),
        "phones": rng.integers(1, 5, 4 * frames).astype(np.uint8),
        "num_frames": np.array(lengths, np.int32),
        "voices": np.zeros(len(lengths), np.uint8),
        "text_ids": np.arange(3 * len(lengths)).astype(np.int16),
        "num_text": np.full(len(lengths), 3, np.int32),
    }
    arrays["phones"][: 4 * 2] = 0  # two frames of silence in front
    arrays["samples"][: 1_280 * 2] = 0
    save_file({k: torch.from_numpy(v) for k, v in arrays.items()}, folder / shard_name(number))


def test_shards_that_come_later_are_taken_up(tmp_path):
    rng = np.random.default_rng(0)
    corpus = WaveCorpus(tmp_path, CPU)
    assert corpus.refresh() == 0
    write_shard(tmp_path, 0, [12, 20], rng)
    assert corpus.refresh() == 1
    write_shard(tmp_path, 1, [9], rng)
    (tmp_path / "shard-00002.partial").write_bytes(b"half")
    assert corpus.refresh() == 1
    assert corpus.refresh() == 0
    assert corpus.total_frames == 41
    assert len(corpus.samples) == 41 * 1_920
    waves, phones = corpus.crops(50, 8)
    assert waves.shape == (50, 8 * 1_920)
    assert phones.shape == (50, 32)
    assert waves.abs().max() <= 1


def test_crops_stay_within_an_utterance_that_is_long_enough(tmp_path):
    write_shard(tmp_path, 0, [30, 10], np.random.default_rng(0))
    corpus = WaveCorpus(tmp_path, CPU)
    corpus.refresh()
    corpus.phones = torch.cat([torch.full((120,), 1), torch.full((40,), 2)]).to(torch.uint8)
    _, phones = corpus.crops(200, 10)
    assert (phones == phones[:, :1]).all()
    assert set(phones[:, 0].tolist()) == {1, 2}


@pytest.fixture
def codec_trainer(untrained):
    torch.manual_seed(0)
    return CodecTrainer(untrained.config.codec, 32, REHEARSAL, CPU)


def test_the_codecs_plan_goes_through_all_its_stages(tmp_path, codec_trainer):
    write_shard(tmp_path, 0, [30, 30], np.random.default_rng(0))
    corpus = WaveCorpus(tmp_path, CPU)
    corpus.refresh()
    seen = []
    for number, progress in enumerate([0.0, 0.05, 0.2, 0.5, 0.9]):
        phase = codec_trainer.plan.phase(progress)
        losses = codec_trainer.step(*corpus.crops(phase.rows, phase.frames), number, progress)
        assert all(math.isfinite(value) for value in losses.values())
        seen.append(set(losses))
    a, books, spectral, judged, long = seen
    assert "commit" not in a
    assert "commit" in books
    assert "mel" not in books
    assert "mel" in spectral
    assert "judge" not in spectral
    assert {"judge", "adversarial", "features"} <= judged == long


def test_judges_hear_the_same_third_of_both(codec_trainer):
    wave = torch.arange(2 * 9 * 1920).float().view(2, -1)
    real, fake = codec_trainer._judged_piece(wave, -wave)
    assert torch.equal(real, -fake)
    assert torch.equal(real.diff(dim=1), torch.ones(2, 3 * 1920 - 1)), "one piece, a third as long"
    assert (real[:, 0] >= wave[:, 0]).all()
    assert (real[:, -1] <= wave[:, -1]).all()


def test_a_step_in_half_precision_is_a_step(tmp_path, codec_trainer, untrained, prompt_ids, code_file):
    """As on a GPU: what autocast mixes must fit together."""
    write_shard(tmp_path, 0, [30, 30], np.random.default_rng(0))
    corpus = WaveCorpus(tmp_path, CPU)
    corpus.refresh()
    codec_trainer.is_half = True
    losses = codec_trainer.step(*corpus.crops(1, 8), 0, 0.5)
    talker_trainer = TalkerTrainer(untrained.config, TALKER_REHEARSAL, CPU)
    talker_trainer.is_half = True
    batch = CodeCorpus(code_file, prompt_ids, CPU, edges=(128,)).draw(256)
    losses |= talker_trainer.step(batch, 0, 0.0)
    assert all(math.isfinite(value) for value in losses.values())


def test_fine_tuning_keeps_the_codes(tmp_path, untrained):
    write_shard(tmp_path, 0, [30, 30], np.random.default_rng(0))
    corpus = WaveCorpus(tmp_path, CPU)
    corpus.refresh()
    trainer = CodecTrainer(untrained.config.codec, 32, REHEARSAL, CPU, is_frozen=True)
    trainer.codec.load_state_dict(
        {
            **trainer.codec.state_dict(),
            **{f"decoder.{k}": v for k, v in untrained.codec.decoder.state_dict().items()},
        }
    )
    wave, phones = corpus.crops(2, 8)
    before, weight = trainer.codec.eval().encode(wave), trainer.codec.decoder.pre_conv.conv.weight.clone()
    trainer.step(wave, phones, 0, 0.5)
    assert torch.equal(trainer.codec.eval().encode(wave), before)
    assert not torch.equal(trainer.codec.decoder.pre_conv.conv.weight, weight)


def test_encoding_in_windows_is_encoding_whole_and_silence_has_one_row(tmp_path, untrained):
    write_shard(tmp_path, 0, [70, 60], np.random.default_rng(0))
    corpus = WaveCorpus(tmp_path, CPU)
    corpus.refresh()
    journal = Journal(tmp_path / "log.jsonl", echo=lambda line: None)
    codes = encode_corpus(untrained.codec, corpus, window=50, batch=2, journal=journal)
    whole = untrained.codec.encode(corpus.samples[None].float() / 32768)[0].to(torch.uint8)
    assert codes.shape == (130, 16)
    # The ends of the corpus are encoded with silence around them, here; far from them all is the same.
    assert torch.equal(codes[45:85], whole[45:85])
    assert torch.equal(codes[:2], silent_codes(untrained.codec).expand(2, 16))
    write_codes(tmp_path / "codes.safetensors", codes, corpus)


# ---------------------------------------------------------------- the talker's input
def test_history_is_corrupted_at_the_rates_that_are_asked_for():
    torch.manual_seed(0)
    corruption, shape = Corruption(), torch.Size((400, 200, 16))
    dropped = 1 - corruption.keep(shape, CPU).float().mean(dim=1)
    assert 0.28 < dropped.mean() < 0.32
    assert dropped.min() < 0.16
    assert dropped.max() > 0.44
    codes = torch.zeros(shape, dtype=torch.int64)
    changed = corruption.redraw(codes, 256) != codes
    assert not changed[..., :4].any()
    assert 0.09 < changed[..., 4:].any(dim=-1).float().mean() < 0.11


def test_corruption_is_for_training_and_never_for_what_is_to_be_predicted(untrained, prompt_ids, code_file):
    corpus = CodeCorpus(code_file, prompt_ids, CPU, edges=(128,))
    batch = corpus.draw(600)
    codes = batch.codes.clone()
    with torch.no_grad():
        plain = untrained.talker.rows(batch)
        torch.manual_seed(0)
        corrupted = untrained.talker.rows(batch, Corruption(zeroed=(0.5, 0.5)))
    assert torch.equal(batch.codes, codes)
    differs = (plain != corrupted).any(dim=-1)
    assert 0.4 < differs[batch.frame >= 0].float().mean() < 0.7
    assert not differs[batch.frame < 0].any()  # the prompt stays


def test_batches_have_their_buckets_shape(code_file, prompt_ids):
    corpus = CodeCorpus(code_file, prompt_ids, CPU, edges=(26, 128))
    shapes = {tuple(corpus.draw(256).text_ids.shape) for _ in range(40)}
    assert shapes <= {(9, 26), (2, 128)}
    assert corpus.num_utterances == 5


def test_a_corpus_of_too_long_utterances_is_refused(code_file, prompt_ids):
    with pytest.raises(ValueError, match="at most 5 rows"):
        CodeCorpus(code_file, prompt_ids, CPU, edges=(5,))


# ---------------------------------------------------------------- around them
def test_phones_are_compared_as_they_are_said():
    assert spoken_phones([0, 0, 3, 3, 0, 4, 4, 4, 0]) == [3, 4]
    assert num_edits([1, 2, 3], [1, 2, 3]) == 0
    assert num_edits([1, 2, 3], [1, 3]) == 1
    assert num_edits([], [5, 6]) == 2
    assert num_edits([1, 2, 3, 4], [2, 3, 9, 4]) == 2


def test_parcels_come_back_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(parcels, "LARGEST_PIECE", 5_000)
    data = np.random.default_rng(0).bytes(12_345)
    (tmp_path / "a.bin").write_bytes(data)
    parcels.pack(tmp_path / "out", [tmp_path / "a.bin"])
    assert len(list((tmp_path / "out").iterdir())) > 3
    assert parcels.unpack(tmp_path / "out", tmp_path / "back") == ["a.bin"]
    assert (tmp_path / "back" / "a.bin").read_bytes() == data
    (tmp_path / "out" / "parcel-1.bin").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"parcel-1.bin isn't what was packed"):
        parcels.unpack(tmp_path / "out", tmp_path / "back")


def test_more_than_comes_back_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(parcels, "LARGEST_PIECE", 1_000)
    (tmp_path / "a.bin").write_bytes(bytes(20_000))
    with pytest.raises(ValueError, match="come back"):
        parcels.pack(tmp_path / "out", [tmp_path / "a.bin"])
    assert not (tmp_path / "out").exists()
