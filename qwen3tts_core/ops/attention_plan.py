"""What an attention library asks of the host before a step: lengths and pages, in integers.

Our own kernels read both on the device and need none of it. FlashInfer cuts a step's work into blocks
ahead of the launch (`plan`), so whoever launches tells it first. Arithmetic only: no device here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One stream's part of a step. num_context: its positions up to and with the step's last new one."""

    num_rows: int
    num_context: int
    pages: Sequence[int]


class AttentionPlanner(Protocol):
    """Told of every step, before its launch, where `plans_…` says so."""

    plans_prefill: bool
    plans_decode: bool

    def plan_prefill(self, num_rows: int, sequences: Sequence[PlannedSequence]) -> None:
        """The next launch of the prefill of `num_rows` packs these, in order; the rows behind are padding."""
        ...

    def plan_decode(self, num_rows: int, sequences: Sequence[PlannedSequence]) -> None:
        """The next decode step of `num_rows` rows has these, one row each; the rows behind are padding."""
        ...


@dataclass(frozen=True, slots=True)
class PageArrays:
    """Sequences in FlashInfer's form, all int32, S sequences wide: row_starts and page_starts [S + 1], pages,
    last_page_len [S]. A sequence that isn't there has no rows and no pages.
    """

    row_starts: NDArray[np.int32]
    page_starts: NDArray[np.int32]
    pages: NDArray[np.int32]
    last_page_len: NDArray[np.int32]


def page_arrays(sequences: Sequence[PlannedSequence], num_sequences: int, page_size: int) -> PageArrays:
    """Raises ValueError for more sequences than `num_sequences`, or a context beyond its pages."""
    if len(sequences) > num_sequences:
        raise ValueError(f"{len(sequences)} sequences in a step that holds {num_sequences}")
    rows, counts, last_page_len = np.zeros((3, num_sequences), np.int32)
    pages: list[int] = []
    for i, sequence in enumerate(sequences):
        num_pages = -(-sequence.num_context // page_size)
        if num_pages > len(sequence.pages):
            raise ValueError(
                f"{sequence.num_context} positions in {len(sequence.pages)} pages of {page_size}"
            )
        rows[i], counts[i] = sequence.num_rows, num_pages
        last_page_len[i] = sequence.num_context - (num_pages - 1) * page_size
        pages.extend(sequence.pages[:num_pages])
    return PageArrays(_starts(rows), _starts(counts), np.array(pages, np.int32), last_page_len)


def _starts(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([[0], counts.cumsum()]).astype(np.int32)
