"""The text tokenizer: a small byte-level BPE in the files of the official one.

Prompts are cut by fixed counts (spec 3.1), so `assistant`, `user` and the newline must be one token
each; enough repetitions in the training text see to that, and `write_tokenizer` checks it.
Source: spec 6.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from qwen3tts_core.text.tokenizer import TextTokenizer

_SPLIT = (  # Qwen2's, as `TextTokenizer` reads the files with
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROLES = ("assistant", "user")
ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)


def write_tokenizer(folder: Path, lines: Sequence[str], vocab_size: int) -> dict[str, int]:
    """Train on `lines` and write vocab.json, merges.txt and tokenizer_config.json.

    vocab_size: bytes and merges; the added tokens come after them.
    Returns the ids of the added tokens and of the two roles. Raises ValueError when a role is no token.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    often = max(10_000, len(lines))  # the roles' merges must come before the last common syllable's
    bpe.train_from_iterator(chain(lines, _repeated(_ROLES, often)), trainer)
    model = json.loads(bpe.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    _write_files(folder, vocab, model["merges"])
    tokenizer = TextTokenizer.from_checkpoint(folder)
    for role in _ROLES:
        if len(tokenizer.encode(f"{role}\n")) != 2:
            raise ValueError(f"{role!r} and a newline must be two tokens: a larger vocabulary is needed")
    added = {content: len(vocab) + i for i, content in enumerate(ADDED_TOKENS)}
    return {**added, **{role: vocab[role] for role in _ROLES}}


def _repeated(words: Iterable[str], times: int) -> Iterable[str]:
    return (f"{word}\n" for word in words for _ in range(times))


def _write_files(folder: Path, vocab: dict[str, int], merges: Iterable[Sequence[str] | str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(len(vocab) + i): {"content": content, **plain} for i, content in enumerate(ADDED_TOKENS)
        },
        "additional_special_tokens": [content for content in ADDED_TOKENS if content != "<|endoftext|>"],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131_072,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen3TTSProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n", encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
