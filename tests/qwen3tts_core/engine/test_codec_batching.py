"""Which lengths share a codec batch."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.engine.codec_batching import LAUNCH_FRAMES, BatchShapes

WIDTHS = (1, 2, 4, 8, 16, 25)


def make_shapes(max_batch_frames=400):
    buckets = (1, 2, 4, 8, 16, 32, 64)
    max_rows = {width: max(b for b in buckets if b * width <= max_batch_frames) for width in WIDTHS}
    return BatchShapes(max_rows, buckets)


def cost(shapes, counts, divided):
    """Of batches with these widths, a piece being in the first that holds it."""
    rows = dict.fromkeys(divided, 0)
    for width, count in counts.items():
        rows[next(wider for wider in divided if wider >= width)] += count
    return sum(shapes.cost(num_rows, width) for width, num_rows in rows.items())


@given(counts=st.dictionaries(st.sampled_from(WIDTHS), st.integers(1, 40), min_size=1))
def test_no_other_division_is_cheaper(counts):
    shapes = make_shapes()
    widths = sorted(counts)
    others = [
        [*chosen, widths[-1]] for n in range(len(widths)) for chosen in combinations(widths[:-1], n)
    ]  # whatever else, the longest must fit
    cheapest = min(cost(shapes, counts, other) for other in others)
    assert cost(shapes, counts, shapes.divide(counts)) == cheapest


def test_few_short_pieces_ride_with_a_long_one_and_many_go_alone():
    shapes = make_shapes()
    assert shapes.divide({1: 1, 25: 1}) == [25], "25 frames more cost less than a launch"
    assert shapes.divide({1: 8, 25: 8}) == [1, 25]
    assert shapes.divide({16: 2, 25: 2}) == [25]


@given(num_rows=st.integers(1, 64), width=st.sampled_from(WIDTHS))
def test_padding_is_taken_only_where_it_costs_less_than_a_launch(num_rows, width):
    shapes = make_shapes()
    taken = shapes.without_padding(num_rows, width)
    assert 1 <= taken <= num_rows
    assert shapes.padded(taken, width) - taken * width <= LAUNCH_FRAMES
    if taken < num_rows:
        assert shapes.padded(num_rows, width) - num_rows * width > LAUNCH_FRAMES


def test_a_piece_joins_while_that_costs_less_than_a_launch():
    shapes = make_shapes()
    assert [shapes.may_join(n, 25) for n in (1, 2, 3, 4, 16)] == [True, False, True, False, False]
    assert [shapes.may_join(n, 1) for n in (31, 32)] == [True, False]
    assert not shapes.may_join(64, 1), "no batch has more rows"


def test_one_bucket_for_everything_has_no_padding_to_save():
    """As in deterministic mode: each batch costs the same."""
    shapes = BatchShapes({25: 8}, (8,))
    assert shapes.without_padding(3, 25) == 3
    assert [shapes.may_join(n, 25) for n in range(1, 9)] == [True] * 7 + [False]


def test_a_piece_is_as_wide_as_the_smallest_bucket_that_holds_it():
    shapes = make_shapes()
    assert [shapes.width(n) for n in (1, 3, 9, 25, 60)] == [1, 4, 16, 25, 25]
