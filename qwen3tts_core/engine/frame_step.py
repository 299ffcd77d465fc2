"""One frame for every row of a batch: the function that a CUDA graph captures.

Backbone, group-0 draw, code predictor with its draws, the next input, EOS and limit. It reads and
writes only `SlotState`, the cache and `out`; nothing depends on the host. Rows that aren't active
(padding, finished ones) write to the trash page and change nothing else that anybody reads.
Source: spec 2.3 to 2.6.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen3tts_core.engine.slots import SlotRows, SlotState
from qwen3tts_core.model.talker import Talker
from qwen3tts_core.ops.interface import DecodeLayout, LayerKV

# The last column of `out`: what became of the row in this step.
INERT, FRAME, STOP, FRAME_AND_LIMIT = 0, 1, 2, 3


def decode_frame(
    talker: Talker,
    state: SlotState,
    cache: Sequence[LayerKV],
    rows: Tensor,
    out: Tensor,
    *,
    min_frames: int,
    trash_page: int,
) -> None:
    """Advance the slots named by `rows` by one frame.

    rows: [B] int64 slot numbers, the padding slot for unused places. out: [B, G + 1] int64, codes
    and then INERT, FRAME, STOP (EOS drawn, no frame) or FRAME_AND_LIMIT.
    """
    config, ops = talker.config.talker, talker.ops
    slots = state.read(rows)
    active = slots.column("active") > 0
    frame = slots.column("frame")

    layout = _layout(state, rows, slots, active, cache[0].page_size, trash_page)
    hidden = talker.final_norm(talker(state.input_rows[rows], layout, cache))

    codebook_size = talker.config.code_predictor.codebook_size
    noise = ops.frame_noise(slots.noise_key, config.num_code_groups, config.vocab_size, codebook_size)
    first_codes = ops.draw_first(
        talker.first_logits(hidden),
        state.seen[rows],
        slots.penalty,
        frame < min_frames,
        talker.allowed_ids,
        config.codec_eos_id,
        slots.draw_rows(),
        noise,
    )
    rest = slots.draw_rows("sub_")
    codes = talker.code_predictor(
        hidden,
        first_codes,
        ops,
        lambda logits, group, inputs: ops.draw_next(logits, rest, noise, group, inputs),
    )
    if state.steps_through_old_frames:
        codes = _replayed_or(codes, state, rows, slots)
        first_codes = codes[:, 0]

    state.input_rows[rows] = talker.frame_embeddings(codes) + _text_rows(talker, state, rows, slots)
    state.seen[rows, first_codes] = torch.ones_like(active)  # a device value: a capture can copy no scalar
    stop = active & (first_codes == config.codec_eos_id)
    made_frame = active & ~stop
    at_limit = made_frame & (frame + 1 >= slots.column("frame_limit"))
    slots.column("position").add_(active)
    slots.column("frame").add_(made_frame)
    slots.column("active").copy_(made_frame & ~at_limit)
    state.write(rows, slots)
    out[:, :-1] = codes
    out[:, -1] = torch.where(stop, STOP, made_frame * FRAME + at_limit * (FRAME_AND_LIMIT - FRAME))


def _layout(
    state: SlotState, rows: Tensor, slots: SlotRows, active: Tensor, page_size: int, trash_page: int
) -> DecodeLayout:
    """Where the step's new position of each row goes: its own page, or the trash page."""
    positions = torch.where(active, slots.column("position"), 0)
    page_table = torch.where(active[:, None], state.page_table[rows], trash_page)
    page = page_table.gather(1, (positions // page_size)[:, None])[:, 0]
    return DecodeLayout(positions, page * page_size + positions % page_size, page_table)


def _replayed_or(codes: Tensor, state: SlotState, rows: Tensor, slots: SlotRows) -> Tensor:
    """The frame that the stream has at this place already, else the one just drawn."""
    frame = slots.column("frame")
    old = state.replayed[rows, frame.clamp(max=state.replayed.shape[1] - 1)].to(codes.dtype)
    return torch.where((frame < slots.column("num_replayed"))[:, None], old, codes)


def _text_rows(talker: Talker, state: SlotState, rows: Tensor, slots: SlotRows) -> Tensor:
    """The trailing text row of this frame, the pad feature past its end (spec 2.3)."""
    frame = slots.column("frame")
    ids = state.trailing_ids[rows, frame.clamp(max=state.trailing_ids.shape[1] - 1)].long()
    is_text = frame < slots.column("num_trailing")
    return talker.text_table[torch.where(is_text, ids, talker.config.tts_pad_id)]
