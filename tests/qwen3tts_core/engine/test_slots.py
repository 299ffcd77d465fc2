from dataclasses import replace

import pytest
import torch

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.slot_row import RowPacker
from qwen3tts_core.engine.slots import SlotState
from qwen3tts_core.types import NO_ID, DrawParams, Sampling
from tests.qwen3tts_core.request_kit import GREEDY, make_plan, make_request

WIDTH, VOCAB, TRASH = 6, 32, 99
CONFIG = TalkerEngineConfig(num_slots=3, page_size=4, max_positions=24)


def empty(config=CONFIG):
    return SlotState.empty(
        config,
        width=WIDTH,
        vocab_size=VOCAB,
        num_groups=4,
        trash_page=TRASH,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.fixture
def state():
    return empty()


def admit(state, slot, request, pages, first_input, old_codes=None):
    """As the runner does it."""
    num_old = 0 if old_codes is None else len(old_codes)
    num_replayed = num_old if state.steps_through_old_frames else 0
    packer = RowPacker(state.page_table.shape[1], state.trailing_ids.shape[1], TRASH)
    counts = {"num_prefilled": num_old - num_replayed, "num_replayed": num_replayed}
    row = torch.from_numpy(packer.request(slot, request, pages, **counts))

    def rows_of(text_ids, codec_ids):
        assert (text_ids.tolist(), codec_ids.tolist()) == (
            [request.plan.text_ids[-1]],
            [request.plan.codec_ids[-1]],
        )
        return first_input[None]

    state.put(row, rows_of)
    if old_codes is not None:
        state.recall(slot, old_codes)


def tensors(state):
    return {name: getattr(state, name) for name in SlotState.__slots__}


def snapshot(state):
    return {name: tensor.clone() for name, tensor in tensors(state).items()}


def only(slot):
    return torch.tensor([slot])


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, deterministic=True)])
def test_admission_writes_one_row_and_no_other(config):
    state = empty(config)
    for tensor in tensors(state).values():  # a recognisable something everywhere
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 2)
    before = snapshot(state)
    old_codes = torch.full((5, 4), 9)
    admit(state, 1, make_request("a", rows=7, trailing=3), [4, 5], torch.full((WIDTH,), 0.5), old_codes)
    for name, tensor in tensors(state).items():
        assert torch.equal(tensor[[0, 2, 3]], before[name][[0, 2, 3]]), name
        assert not torch.equal(tensor[1], before[name][1]) or not tensor.numel(), name


def test_a_request_starts_at_the_end_of_its_prompt(state):
    plan = make_plan(7, num_trailing=3)
    admit(state, 2, make_request("a", plan=plan, frames=11), [8, 2, 6], torch.arange(6.0))
    expected = {"position": 6, "frame": 0, "frame_limit": 11, "active": 1, "piece": 0, "num_trailing": 3}
    assert {name: int(state.read(only(2)).column(name)) for name in expected} == expected
    assert state.input_rows[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert tuple(state.trailing_ids[2, :3].tolist()) == plan.trailing_ids
    assert state.page_table[2, :3].tolist() == [8, 2, 6]


def test_a_resumed_request_starts_after_its_frames_as_if_it_had_drawn_them(state):
    plan, codes = make_plan(7, num_trailing=3), torch.tensor([[4, 9, 9, 9], [8, 7, 6, 5], [4, 9, 9, 9]])
    admit(state, 2, make_request("a", plan=plan, frames=11), [8, 2, 6], torch.arange(6.0), codes)
    expected = {"position": 9, "frame": 3, "frame_limit": 11, "num_replayed": 0}
    assert {name: int(state.read(only(2)).column(name)) for name in expected} == expected
    assert state.seen[2].nonzero()[:, 0].tolist() == [4, 8]


def test_in_deterministic_mode_it_starts_at_its_prompt_and_has_its_frames_at_hand():
    state = empty(replace(CONFIG, deterministic=True))
    plan, codes = make_plan(7, num_trailing=3), torch.tensor([[4, 9, 9, 9], [8, 7, 6, 5], [4, 9, 9, 9]])
    admit(state, 2, make_request("a", plan=plan, frames=11), [8, 2, 6], torch.arange(6.0), codes)
    expected = {"position": 6, "frame": 0, "frame_limit": 11, "num_replayed": 3}
    assert {name: int(state.read(only(2)).column(name)) for name in expected} == expected
    assert not state.seen[2].any()
    assert torch.equal(state.replayed[2, :3].long(), codes)


def test_nothing_of_the_request_before_is_left(state):
    old = make_request("a", trailing=9, frames=3, seed=5, sampling=Sampling())
    admit(state, 0, old, [1], torch.ones(WIDTH), torch.ones(2, 4, dtype=torch.int64))
    state.seen[0] = True
    slots = state.read(only(0))
    slots.column("frame").copy_(only(3))
    slots.column("active").copy_(only(0))
    state.write(only(0), slots)
    request = make_request("b", trailing=2, frames=8)
    admit(state, 0, request, [1], torch.ones(WIDTH))
    fresh = empty()
    admit(fresh, 0, request, [1], torch.ones(WIDTH))
    for name in ("ints", "floats", "seen", "input_rows"):
        assert torch.equal(getattr(state, name)[0], getattr(fresh, name)[0]), name
    assert int(state.read(only(0)).column("num_trailing")) == 2  # so what a longer text left is never read


@pytest.mark.parametrize(
    ("seed", "stored"),
    [
        (0, 0),
        (-1, -1),
        (2**32 + 7, 2**32 + 7),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (2**64 + 5, 5),
        (-(2**200) + 3, 3),
    ],
)
def test_any_int_is_a_seed_and_its_lower_64_bits_count(state, seed, stored):
    admit(state, 1, make_request("a", seed=seed, piece=4), [0], torch.zeros(WIDTH))
    key = state.read(only(1)).noise_key
    assert (int(key.seed), int(key.piece), int(key.frame)) == (stored, 4, 0)


def test_group_0_and_the_others_draw_by_their_own_settings(state):
    sampling = Sampling(DrawParams(True, 0.5, 7, 0.75), DrawParams(False, 0.25, 9, 1.0), 1.5)
    admit(state, 0, make_request("a", sampling=sampling), [0], torch.zeros(WIDTH))
    slots = state.read(only(0))
    first, rest = slots.draw_rows(), slots.draw_rows("sub_")
    assert (bool(first.do_sample), float(first.temperature), int(first.top_k)) == (True, 0.5, 7)
    assert float(first.tail_mass) == 0.25
    assert (bool(rest.do_sample), int(rest.top_k), float(rest.tail_mass)) == (False, 9, 0.0)
    assert float(rest.temperature) == 1.0  # greedy: the arg max of untouched scores
    assert float(slots.penalty) == 1.5


def test_nobody_s_row_leaves_the_padding_row_as_it_was(state):
    before = snapshot(state)
    packer = RowPacker(state.page_table.shape[1], state.trailing_ids.shape[1], TRASH)
    row = torch.from_numpy(packer.nobody(state.padding_slot))
    state.put(row, lambda *ids: torch.full((1, WIDTH), float(sum(ids) - 2 * NO_ID)))  # zeros for no ids alone
    for name, tensor in tensors(state).items():
        assert torch.equal(tensor, before[name]), name


def test_the_padding_row_belongs_to_nobody(state):
    assert state.padding_slot == CONFIG.num_slots
    assert int(state.read(only(state.padding_slot)).column("active")) == 0
    assert (state.page_table[state.padding_slot] == TRASH).all()
    admit(state, 0, make_request("a", sampling=GREEDY), [0], torch.zeros(WIDTH))
    assert int(state.read(only(state.padding_slot)).column("active")) == 0
