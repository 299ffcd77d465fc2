"""Sequences as FlashInfer wants them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.ops.attention_plan import PlannedSequence, page_arrays

PAGE = 4


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), max_size=6), st.integers(0, 3))
def test_every_position_is_in_its_sequence_s_own_pages(streams, num_missing):
    """streams: (new rows, cached positions); some sequences aren't there."""
    sequences, first = [], 100
    for rows, cached in streams:
        own = list(range(first, first + 13))
        sequences.append(PlannedSequence(rows, rows + cached, own))
        first += 13
    arrays = page_arrays(sequences, len(streams) + num_missing, PAGE)
    assert len(arrays.last_page_len) == len(streams) + num_missing
    for i, sequence in enumerate(sequences):
        pages = arrays.pages[arrays.page_starts[i] : arrays.page_starts[i + 1]].tolist()
        assert pages == list(sequence.pages)[: len(pages)]
        assert (len(pages) - 1) * PAGE + arrays.last_page_len[i] == sequence.num_context
        assert 1 <= arrays.last_page_len[i] <= PAGE
        assert arrays.row_starts[i + 1] - arrays.row_starts[i] == sequence.num_rows
    for starts in (arrays.row_starts, arrays.page_starts):
        assert (starts[len(streams) :] == starts[-1]).all()
    assert arrays.page_starts[-1] == len(arrays.pages)


def test_more_sequences_than_the_step_holds_are_refused():
    with pytest.raises(ValueError, match="2 sequences in a step that holds 1"):
        page_arrays([PlannedSequence(1, 1, [0])] * 2, 1, PAGE)


def test_a_context_beyond_its_pages_is_refused():
    with pytest.raises(ValueError, match="9 positions in 2 pages of 4"):
        page_arrays([PlannedSequence(1, 9, [0, 1])], 1, PAGE)
