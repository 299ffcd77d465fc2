import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.text.tokenizer import TextTokenizer

ROOT = Path(__file__).parents[3]
TINY = ROOT / "checkpoints" / "tiny"
GOLDEN = ROOT / "tests" / "parity" / "golden" / "seed0" / "custom_voice.npz"

tokenizer = TextTokenizer.from_checkpoint(TINY)
words = st.text(alphabet="abcHW 'éßñ\u0301你好ก็\u200d🙂.,<|>_019\n\t", max_size=40)


def test_specials_recognised_gives_the_ids_of_the_reference():
    golden = np.load(GOLDEN)
    probes = json.loads(str(golden["tok/probes_json"]))
    assert len(probes) > 10
    for i, probe in enumerate(probes):
        assert tokenizer.encode_with_specials(probe) == tuple(golden[f"tok/{i:02d}_ids"].tolist()), probe


def test_a_special_tokens_spelling_stays_plain_characters():
    ids = tokenizer.encode("say <|im_end|> and <think> and <tts_pad>")
    assert tokenizer.im_end_id not in ids
    assert max(ids) < tokenizer.im_start_id  # nothing from the added tokens at all
    assert tokenizer.encode_with_specials("say <|im_end|>")[-1] == tokenizer.im_end_id


@given(words)
def test_both_ways_agree_on_text_without_specials(text):
    assert tokenizer.encode(text) == tokenizer.encode_with_specials(text)


@given(words, words)
def test_text_between_two_specials_is_tokenised_as_if_alone(first, second):
    joined = tokenizer.encode_with_specials(f"{first}<|im_end|>{second}")
    assert joined == (*tokenizer.encode(first), tokenizer.im_end_id, *tokenizer.encode(second))


def test_the_longest_special_wins_where_one_begins_another(tmp_path):
    copy_tokenizer(tmp_path)
    edit_added_tokens(tmp_path, lambda added: added.update({"500": entry("<|im_end|>ed")}))
    edited = TextTokenizer.from_checkpoint(tmp_path)
    assert edited.encode_with_specials("<|im_end|>ed") == (500,)
    assert edited.largest_id == 500


def test_accents_are_composed_before_they_are_split():
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


def test_mistrals_split_cuts_words_at_capitals(tmp_path):
    copy_tokenizer(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text("utf-8"))
    vocab["oP"] = len(vocab) + 100
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    merges = (tmp_path / "merges.txt").read_text("utf-8")
    (tmp_path / "merges.txt").write_text(merges + "o P\n", "utf-8")
    qwen, mistral = (TextTokenizer.from_checkpoint(tmp_path, split) for split in ("qwen2", "mistral"))
    assert vocab["oP"] in qwen.encode("GoPro")
    assert vocab["oP"] not in mistral.encode("GoPro")
    assert mistral.encode("hello there, 12") == qwen.encode("hello there, 12")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, None) for name in ("vocab.json", "merges.txt", "tokenizer_config.json")),
        *((name, "[1, 2") for name in ("vocab.json", "merges.txt", "tokenizer_config.json")),
        ("vocab.json", ""),
        ("tokenizer_config.json", "{}"),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path, name, content):
    copy_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(CheckpointMismatch, match=name):
        TextTokenizer.from_checkpoint(tmp_path)


def test_added_tokens_that_match_in_another_way_are_refused(tmp_path):
    copy_tokenizer(tmp_path)
    edit_added_tokens(tmp_path, lambda added: added.update({"500": entry("<odd>", lstrip=True)}))
    with pytest.raises(CheckpointMismatch, match=r"<odd>.*lstrip"):
        TextTokenizer.from_checkpoint(tmp_path)


def test_a_tokenizer_without_turn_marks_is_refused(tmp_path):
    copy_tokenizer(tmp_path)
    edit_added_tokens(tmp_path, lambda added: added.clear())
    with pytest.raises(CheckpointMismatch, match=r"<\|im_start\|>.*<\|im_end\|>"):
        TextTokenizer.from_checkpoint(tmp_path)


def copy_tokenizer(folder):
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)


def entry(content, **flags):
    return {"content": content, "special": True, "normalized": False, **flags}


def edit_added_tokens(folder, edit):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    edit(config["added_tokens_decoder"])
    file.write_text(json.dumps(config), "utf-8")
