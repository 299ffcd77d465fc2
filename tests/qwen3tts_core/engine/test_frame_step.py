import pytest
import torch

from qwen3tts_core.engine.frame_step import FRAME, FRAME_AND_LIMIT, INERT, STOP, decode_frame
from qwen3tts_core.engine.scheduler import Scheduler
from qwen3tts_core.engine.slots import INT, SlotState
from qwen3tts_core.engine.talker_runner import TalkerRunner
from qwen3tts_core.ops.reference import ReferenceOps
from qwen3tts_core.types import DrawParams, Sampling
from tests.qwen3tts_core.request_kit import make_plan, make_request
from tests.qwen3tts_core.talker_kit import always_eos, backend_for, engine_config, small_talker

EOS = small_talker().config.talker.codec_eos_id
PAD = small_talker().config.tts_pad_id
PAGE = engine_config().page_size


class Stage:
    """Slots, cache and model, with streams joined by hand; `step` is one call of `decode_frame`."""

    def __init__(self, talker=None, *, min_frames=2, poison=False, **changes):
        self.talker = talker or small_talker()
        self.config = engine_config(num_slots=6, min_frames=min_frames, **changes)
        self.runner = TalkerRunner(self.talker, self.config, backend_for(self.talker))
        self.scheduler = Scheduler(self.config)
        self.state, self.cache = self.runner.state, self.runner.cache
        if poison:
            for kv in self.cache:
                kv.key.fill_(torch.nan)
                kv.value.fill_(torch.nan)
            self.state.input_rows.fill_(torch.nan)

    def join(self, request):
        """The request's slot, with its prompt cached."""
        self.scheduler.enqueue(request)
        (placed,) = self.scheduler.admit()
        self.runner.admit(placed)
        while pieces := self.scheduler.next_prefill():
            self.runner.prefill(pieces)
        return placed.slot

    def step(self, *slots, padding=0):
        """Outcomes and codes of the slots, then of the padding rows: [B], [B, G]."""
        rows = torch.tensor([*slots, *[self.state.padding_slot] * padding])
        out = torch.full((len(rows), self.talker.config.talker.num_code_groups + 1), -7)
        decode_frame(
            self.talker,
            self.state,
            self.cache,
            rows,
            out,
            min_frames=self.config.min_frames,
            trash_page=self.runner.trash_page,
        )
        return out[:, -1].tolist(), out[:, :-1]

    def run(self, slot, num_steps, **step):
        outcomes, codes = zip(*(self.step(slot, **step) for _ in range(num_steps)), strict=True)
        return [outcome[0] for outcome in outcomes], torch.stack([c[0] for c in codes])

    def snapshot(self):
        """Every slot's row, and every page but the trash page."""
        rows = {name: getattr(self.state, name).clone() for name in SlotState.__slots__}
        pages = [torch.stack([kv.key[:-1], kv.value[:-1]]) for kv in self.cache]
        return rows, torch.stack(pages)

    def pages(self, request_id):
        return self.scheduler.placed(request_id).pages


# ---------------------------------------------------------------- when a stream ends
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_n_frames_at_most_means_n_and_the_step_itself_stops_there(limit):
    stage = Stage()
    slot = stage.join(make_request("a", frames=limit))
    outcomes, _ = stage.run(slot, limit + 2)
    assert outcomes == [FRAME] * (limit - 1) + [FRAME_AND_LIMIT, INERT, INERT]


@pytest.mark.parametrize("min_frames", [1, 2, 3])
def test_the_end_is_forbidden_before_the_least_number_of_frames(min_frames):
    """known_faults row 1: no end at frame 0."""
    stage = Stage(always_eos(small_talker()), min_frames=min_frames)
    slot = stage.join(make_request("a", frames=9))
    outcomes, codes = stage.run(slot, min_frames + 2)
    assert outcomes == [FRAME] * min_frames + [STOP, INERT]
    assert EOS not in codes[:min_frames, 0]


def test_a_limit_below_the_least_number_of_frames_wins():
    stage = Stage(always_eos(small_talker()))
    slot = stage.join(make_request("a", frames=1))
    assert stage.run(slot, 2)[0] == [FRAME_AND_LIMIT, INERT]


def test_one_row_stops_while_its_neighbour_goes_on():
    """Each at its own step, told by its own outcome."""
    stage = Stage()
    short, long = stage.join(make_request("a", frames=2)), stage.join(make_request("b", frames=4))
    outcomes = [stage.step(short, long, padding=1)[0] for _ in range(5)]
    assert outcomes == [
        [FRAME, FRAME, INERT],
        [FRAME_AND_LIMIT, FRAME, INERT],
        [INERT, FRAME, INERT],
        [INERT, FRAME_AND_LIMIT, INERT],
        [INERT, INERT, INERT],
    ]


# ---------------------------------------------------------------- rows that must not matter
@pytest.mark.parametrize("trim_context", [True, False])
def test_nan_in_free_pages_and_padding_rows_never_leaks(trim_context):
    """Pages nobody wrote, the trash page, stale slots and the padding slot's input: all NaN."""
    clean = Stage(small_talker())
    poisoned = Stage(small_talker(ops=ReferenceOps(trim_context=trim_context)), poison=True)
    request = make_request("a", rows=11, frames=9)
    expected = clean.run(clean.join(request), 9)
    slot = poisoned.join(request)
    for t in range(9):
        poisoned.state.input_rows[poisoned.state.padding_slot] = torch.nan
        outcome, codes = poisoned.step(slot, padding=3)
        assert outcome[0] == expected[0][t]
        assert torch.equal(codes[0], expected[1][t])
    assert torch.isfinite(poisoned.state.input_rows[slot]).all()


def test_a_step_changes_its_own_slots_and_pages_only():
    stage = Stage()
    frames = {"running": 9, "absent": 9, "done": 1}
    slots = {name: stage.join(make_request(name, rows=6, frames=count)) for name, count in frames.items()}
    stage.step(slots["done"])
    progress = [INT[name] for name in ("position", "frame", "active")]
    for rows in (["running", "done"], ["done", "running"], ["done"]):
        before, pages_before = stage.snapshot()
        stage.step(*(slots[name] for name in rows), padding=2)
        after, pages_after = stage.snapshot()
        for name in SlotState.__slots__:
            assert torch.equal(before[name][slots["absent"]], after[name][slots["absent"]]), name
        for inert in (slots["done"], stage.state.padding_slot):
            assert torch.equal(before["ints"][inert][progress], after["ints"][inert][progress])
        is_same = (pages_before == pages_after) | (pages_before.isnan() & pages_after.isnan())
        changed = (~is_same).transpose(0, 2).flatten(1).any(dim=1).nonzero().flatten().tolist()
        written = [stage.pages("running")[int(before["ints"][slots["running"], INT["position"]]) // PAGE]]
        assert changed == (written if "running" in rows else [])


def test_neighbours_and_padding_change_no_code():
    requests = [make_request(str(i), rows=4 + 3 * i, frames=8, trailing=i + 1) for i in range(5)]
    alone = []
    for request in requests:
        stage = Stage()
        alone.append(stage.run(stage.join(request), 8)[1])
    stage = Stage()
    slots = [stage.join(request) for request in requests]
    for t in range(8):
        order = slots if t % 2 else slots[::-1]
        _, codes = stage.step(*order, padding=3)
        for row, slot in enumerate(order):
            assert torch.equal(codes[row], alone[slots.index(slot)][t])


# ---------------------------------------------------------------- what the next step feeds
def test_the_next_input_is_the_frame_and_its_text_row():
    """Trailing rows one a frame, then the pad feature for ever."""
    stage = Stage()
    plan = make_plan(5, num_trailing=3)
    slot = stage.join(make_request("a", plan=plan, frames=9))
    for t in range(6):
        _, codes = stage.step(slot)
        text = plan.trailing_ids[t] if t < 3 else PAD
        expected = stage.talker.frame_embeddings(codes[0]) + stage.talker.text_features([text])[0]
        torch.testing.assert_close(stage.state.input_rows[slot], expected)


def test_a_stale_longer_text_behind_the_slot_is_not_read():
    stage = Stage()
    slot = stage.join(make_request("a", trailing=9, frames=1))
    stage.step(slot)
    stage.scheduler.release("a")
    assert stage.join(make_request("b", trailing=1, frames=5)) == slot
    for t in range(4):
        _, codes = stage.step(slot)
        if t > 0:
            expected = stage.talker.frame_embeddings(codes[0]) + stage.talker.text_features([PAD])[0]
            torch.testing.assert_close(stage.state.input_rows[slot], expected)


# ---------------------------------------------------------------- how it draws
def test_the_penalty_remembers_every_group_0_code_of_this_request():
    """A penalty beyond measure: no code comes twice, although the plain run repeats itself."""

    def codes_with(penalty):
        stage = Stage()
        sampling = Sampling(DrawParams(do_sample=False), DrawParams(do_sample=False), penalty)
        slot = stage.join(make_request("a", frames=30, sampling=sampling))
        _, codes = stage.run(slot, 30)
        seen = stage.state.seen[slot].nonzero().flatten().tolist()
        assert seen == sorted(set(codes[:, 0].tolist()))
        return codes[:, 0].tolist()

    assert len(set(codes_with(1.0))) < 30
    assert len(set(codes_with(1e9))) == 30


def test_a_new_request_in_the_slot_has_an_empty_history():
    stage = Stage()
    slot = stage.join(make_request("a", frames=20))
    stage.run(slot, 20)
    stage.scheduler.release("a")
    assert stage.join(make_request("b", frames=20)) == slot
    assert not stage.state.seen[slot].any()
    _, again = stage.run(slot, 20)
    fresh = Stage()
    assert torch.equal(again, fresh.run(fresh.join(make_request("b", frames=20)), 20)[1])


def test_seed_piece_and_frame_choose_the_noise():
    def codes_with(**request):
        stage = Stage()
        slot = stage.join(make_request("a", frames=12, sampling=Sampling(), **request))
        return stage.run(slot, 12)[1]

    plain = codes_with(seed=1)
    assert torch.equal(plain, codes_with(seed=1))
    assert torch.equal(plain, codes_with(seed=1 + 2**64))
    for other in ({"seed": 2}, {"seed": 1 + 2**32}, {"seed": 1, "piece": 1}):
        assert not torch.equal(plain, codes_with(**other)), other


def test_groups_draw_by_their_own_settings():
    """A sampled group 0 over greedy others, and the other way round."""

    def codes_with(first, rest, seed):
        stage = Stage()
        draws = (DrawParams(do_sample=first), DrawParams(do_sample=rest))
        slot = stage.join(make_request("a", frames=1, sampling=Sampling(*draws, 1.0), seed=seed))
        return stage.run(slot, 1)[1][0].tolist()

    greedy = codes_with(False, False, 0)
    assert len({tuple(codes_with(False, False, seed)) for seed in range(8)}) == 1
    rest_sampled = [codes_with(False, True, seed) for seed in range(8)]
    assert all(codes[0] == greedy[0] for codes in rest_sampled)
    assert len({tuple(codes) for codes in rest_sampled}) > 1
    assert len({codes_with(True, False, seed)[0] for seed in range(8)}) > 1
