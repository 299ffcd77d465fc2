"""Text to ids: the Qwen2 byte-level BPE, from the checkpoint's own files.

Reads `vocab.json`, `merges.txt` and `tokenizer_config.json` through the `tokenizers` library; a
`tokenizer.json`, which no official repository has, is not looked at. Special tokens are told
apart by us and not by the library, for two reasons: the text of a request must be able to hold
`<|im_end|>` as ten harmless characters, and the ids of the added tokens come from the file.
Knows nothing of prompts.
Source: spec section 6; qwen-tts 0.1.1, inference/qwen3_tts_model.py, `_tokenize_texts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from qwen3tts_core.errors import CheckpointMismatch

Split = Literal["qwen2", "mistral"]

_SPLITS: Mapping[Split, str] = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "mistral": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

_REQUIRED_SPECIALS = ("<|im_start|>", "<|im_end|>")
_PLAIN_MATCH_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


class TextTokenizer:
    """Ids of a text, with or without its special tokens recognised."""

    def __init__(self, bpe: Tokenizer, specials: Mapping[str, int]) -> None:
        self._bpe = bpe
        self._specials = dict(specials)
        # Alternatives are tried in order, so the longest goes first: `<a>` must not cut `<a><b>`.
        longest_first = sorted(specials, key=len, reverse=True)
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    @classmethod
    def from_checkpoint(cls, folder: Path, split: Split = "qwen2") -> TextTokenizer:
        """Read the tokenizer that lies in `folder`.

        split: which expression cuts text into words. "qwen2" is what the vocabulary was made
            with. The reference may load the same files with Mistral's (spec section 6); "mistral"
            is there to compare with such a run.
        Raises CheckpointMismatch naming the file and what is wrong with it.
        """
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        for file in (vocab, merges):
            if not file.is_file():
                raise CheckpointMismatch(str(file), ["file is missing"])
        try:
            model = models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointMismatch(str(folder), [f"vocab.json and merges.txt: {error}"]) from error
        bpe = Tokenizer(model)
        bpe.normalizer = normalizers.NFC()
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[split]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        return cls(bpe, _read_added_tokens(folder / "tokenizer_config.json"))

    @property
    def im_start_id(self) -> int:
        return self._specials["<|im_start|>"]

    @property
    def im_end_id(self) -> int:
        return self._specials["<|im_end|>"]

    @property
    def largest_id(self) -> int:
        return max(self._bpe.get_vocab_size() - 1, *self._specials.values())

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of the text as plain characters: nothing in it is a special token."""
        return tuple(self._bpe.encode(text, add_special_tokens=False).ids)

    def encode_with_specials(self, text: str) -> tuple[int, ...]:
        """Ids of the text as the reference takes it: a special token's spelling is that token.

        Each stretch between two special tokens is normalised and split on its own.
        """
        ids: list[int] = []
        for stretch in self._special_pattern.split(text):
            if stretch in self._specials:
                ids.append(self._specials[stretch])
            else:
                ids.extend(self.encode(stretch))
        return tuple(ids)


def _read_added_tokens(file: Path) -> dict[str, int]:
    """The added tokens' spellings and ids, e.g. {"<|im_start|>": 151644, …}."""
    try:
        entries: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))[
            "added_tokens_decoder"
        ]
        ids = {str(entry["content"]): int(key) for key, entry in entries.items()}
        odd = [e["content"] for e in entries.values() if any(e.get(flag) for flag in _PLAIN_MATCH_FLAGS)]
    except FileNotFoundError:
        raise CheckpointMismatch(str(file), ["file is missing"]) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(str(file), [f"added_tokens_decoder can't be read: {error!r}"]) from error
    problems = [f"added_tokens_decoder lacks {name}" for name in _REQUIRED_SPECIALS if name not in ids]
    problems += [f"{name}: {', '.join(_PLAIN_MATCH_FLAGS)} are only implemented as false" for name in odd]
    if problems:
        raise CheckpointMismatch(str(file), problems)
    return ids
