"""What is trained is what is loaded: the recipe's models beside the project's, on one checkpoint."""

import numpy as np
import pytest
import torch

from checkpoints.speaking.recipe.code_corpus import CodeCorpus
from checkpoints.speaking.recipe.codec_model import TrainableDecoder
from checkpoints.speaking.recipe.export import checked_size, quotients
from checkpoints.speaking.recipe.layout import SPEAKING, VOICES, write_configs
from checkpoints.speaking.recipe.speaking import Wanted, to_samples, utter
from checkpoints.speaking.recipe.talker_model import TrainableTalker
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.model.codec_decoder import open_codec_decoder
from qwen3tts_core.model.talker import open_talker
from qwen3tts_core.ops.reference import ReferenceOps
from qwen3tts_core.text.prompt import SpeechText, build_plan, check_tokenizer, text_tokens
from tests.checkpoints.speaking.conftest import TEXTS
from tests.qwen3tts_core.talker_kit import run_rows, scripted

CLOSE = {"atol": 2e-5, "rtol": 1e-4}  # float32, other kernels and other orders of sums


def test_our_decoder_loads_every_tensor_and_decodes_the_same(untrained):
    config = untrained.config.codec
    decoder = open_codec_decoder(untrained.folder, config)  # raises unless every key is matched
    codes = torch.randint(config.codebook_size, (2, 21, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = untrained.codec.decoder.codes_to_wave(codes).clamp(-1, 1)
    torch.testing.assert_close(ours, decoder.decode(codes), **CLOSE)


def test_books_go_out_as_the_same_rows():
    torch.manual_seed(0)
    before = {
        "a._codebook.cluster_usage": torch.rand(4) * 1000,
        "a._codebook.embedding_sum": torch.randn(4, 2),
    }
    after = quotients(before)
    rows = before["a._codebook.embedding_sum"] / before["a._codebook.cluster_usage"][:, None]
    torch.testing.assert_close(after["a._codebook.embedding_sum"], rows)
    assert after["a._codebook.cluster_usage"].eq(1).all()


@pytest.fixture(scope="session")
def served_talker(untrained):
    return open_talker(untrained.folder, untrained.config, num_positions=128, ops=ReferenceOps())


def one_batch(untrained, prompt_ids, code_file, number, is_streaming, is_auto):
    corpus = CodeCorpus(code_file, prompt_ids, torch.device("cpu"), edges=(128,))
    flags = (torch.tensor([is_streaming]), torch.tensor([is_auto]))
    return corpus.batch(torch.tensor([number]), corpus.buckets[0], *flags)


@pytest.mark.parametrize("is_auto", [True, False], ids=["auto", "english"])
@pytest.mark.parametrize("layout", ["full", "streaming"])
@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_a_batch_has_the_rows_of_the_projects_own_prompts(
    untrained, served_talker, tokenizer, prompt_ids, code_file, number, layout, is_auto
):
    batch = one_batch(untrained, prompt_ids, code_file, number, layout == "streaming", is_auto)
    voice = VOICES[[0, 1, 2, 0, 1][number]]
    language = None if is_auto else "English"
    plan = build_plan(untrained.config, tokenizer, SpeechText(TEXTS[number], voice, language, layout=layout))
    codes = batch.codes[0, : batch.num_frames[0]]
    expected = torch.cat([served_talker.prompt_rows(plan), served_talker.frame_rows(plan, codes)])
    with torch.no_grad():
        rows = untrained.talker.rows(batch)[0]
    torch.testing.assert_close(rows[: len(expected)], expected, **CLOSE)
    assert rows[len(expected) :].abs().max() == 0
    # The prompt's last row predicts frame 0, the last frame's row the end.
    target = batch.target[0]
    assert target[: plan.num_rows - 1].eq(-1).all()
    assert target[plan.num_rows - 1 : len(expected)].tolist() == list(range(len(codes) + 1))
    assert target[len(expected) :].eq(-1).all()


def test_hidden_states_and_all_logits_are_the_served_talkers(untrained, served_talker, prompt_ids, code_file):
    batch = one_batch(untrained, prompt_ids, code_file, 3, True, False)
    talker, num_rows = untrained.talker, int((batch.target[0] >= 0).nonzero()[-1]) + 1
    with torch.no_grad():
        rows = talker.rows(batch)
        hidden = talker.hidden(rows)[0][0, :num_rows]
        served = run_rows(served_talker, rows[0, :num_rows], [num_rows])
        torch.testing.assert_close(hidden, served, **CLOSE)
        torch.testing.assert_close(talker.codec_head(hidden), served_talker.first_logits(served), **CLOSE)

        codes, log = batch.codes[0, :4], []
        served_talker.code_predictor(hidden[-4:], codes[:, 0], served_talker.ops, scripted(codes, log))
        expected = torch.stack([logits for _, logits in log], dim=1)
        torch.testing.assert_close(talker.rest_logits(hidden[-4:], codes), expected, **CLOSE)


def test_a_frame_is_predicted_without_having_been_read(untrained, prompt_ids, code_file):
    for is_streaming in (True, False):
        batch = one_batch(untrained, prompt_ids, code_file, 3, is_streaming, True)
        with torch.no_grad():
            before = untrained.talker.hidden(untrained.talker.rows(batch))[0][0]
            batch.codes[0, 5] = (batch.codes[0, 5] + 1) % untrained.config.codec.codebook_size
            after = untrained.talker.hidden(untrained.talker.rows(batch))[0][0]
        changed = (before != after).any(dim=1)
        assert batch.target[0][changed.nonzero()[0]] == 6


def test_the_exported_checkpoint_speaks_through_the_engine(untrained):
    wanted = [Wanted(text, VOICES[i % 3], seed=i) for i, text in enumerate(TEXTS[:3])]
    uttered = utter(untrained.folder, wanted, most_frames=12)
    assert all(2 <= len(one.codes) <= 12 for one in uttered)
    samples = to_samples(untrained.folder, [one.codes for one in uttered])
    assert [len(one) for one in samples] == [1920 * len(one.codes) for one in uttered]
    assert all(one.dtype == np.int16 and one.any() for one in samples)


def test_the_tokenizer_is_cut_where_prompts_are_cut(skeleton, tokenizer):
    config = CheckpointConfig.from_checkpoint(skeleton)
    check_tokenizer(config, tokenizer)
    whole = tokenizer.encode_with_specials(
        "<|im_start|>assistant\nGood morning.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert whole[3:-5] == text_tokens(tokenizer, "Good morning.")
    assert len(tokenizer.encode("assistant")) == len(tokenizer.encode("\n")) == 1


def test_the_full_size_fits_its_limit_by_count(tmp_path, skeleton):
    write_configs(tmp_path, SPEAKING, {"assistant": 0, **_ids(skeleton)})
    config = CheckpointConfig.from_checkpoint(tmp_path)
    with torch.device("meta"):
        models = TrainableTalker(config, 1), TrainableDecoder(config.codec)
    num_values = sum(t.numel() for model in models for t in model.state_dict().values())
    assert 20e6 < 2 * num_values < 25.5e6  # 16 bits each; the tokenizer and the unused encoder come on top


def _ids(skeleton):
    names = ("<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
    return {name: 1024 + i for i, name in enumerate(names)}


def test_a_checkpoint_that_is_too_large_is_refused(untrained):
    size = checked_size(untrained.folder)
    with pytest.raises(ValueError, match="at most 1,000 are allowed"):
        checked_size(untrained.folder, largest=1_000)
    assert size > 100_000
