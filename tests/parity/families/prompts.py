"""The rows a prompt becomes, alone and in a batch, and what the talker's config says."""

import numpy as np
import torch

from qwen3tts_core.config import TalkerEngineConfig
from tests.parity.registry import CLOSE, EXACT, Computed, array


@array(r"talker/tts_pad_embed")
def pad_feature(pair):
    return Computed(pair.talker.text_features([pair.config.tts_pad_id])[0], tolerance=CLOSE)


@array(r"talker/suppress_tokens")
def suppressed_ids(pair):
    return Computed((~pair.talker.allowed_ids).nonzero()[:, 0], tolerance=EXACT)


@array(r"talker/generate_defaults_json")
def defaults(pair):
    """Every number the reference's public API passes by default, or 0 for each that we have."""
    sampling = pair.config.sampling
    ours = {
        "max_new_tokens": pair.config.max_new_tokens,
        "min_new_tokens": TalkerEngineConfig().min_frames,
        "eos_token_id": pair.config.talker.codec_eos_id,
        "repetition_penalty": sampling.repetition_penalty,
        "do_sample": sampling.talker.do_sample,
        "temperature": sampling.talker.temperature,
        "top_k": sampling.talker.top_k,
        "top_p": sampling.talker.top_p,
        "subtalker_dosample": sampling.subtalker.do_sample,
        "subtalker_temperature": sampling.subtalker.temperature,
        "subtalker_top_k": sampling.subtalker.top_k,
        "subtalker_top_p": sampling.subtalker.top_p,
        "return_dict_in_generate": True,  # how the reference returns, nothing we have
    }
    theirs = pair.json("talker/generate_defaults_json")
    unknown = sorted(set(theirs) - set(ours))
    return Computed(
        np.array([float(ours.get(key, np.nan)) for key in theirs]),
        tolerance=EXACT,
        expected=np.array([float(value) for value in theirs.values()]),
        note=f"unknown: {', '.join(unknown)}" if unknown else f"{len(theirs)} values",
    )


@array(r"case/(?P<case>[^/]+)/prefill_embeds")
def prompt_rows(pair, case):
    rows = pair.talker.prompt_rows(pair.plan(case), pair.reference_voice(case))
    return Computed(rows, tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/trailing_text")
def trailing_rows(pair, case):
    return Computed(pair.talker.text_features(pair.plan(case).trailing_ids), tolerance=CLOSE)


@array(r"batch/(?P<batch>[^/]+)/prefill_embeds")
def batch_prompt_rows(pair, batch):
    """The reference pads on the left with zeros; we never pad, so our padding is made here."""
    members = pair.json(f"batch/{batch}/members_json")
    rows = [
        pair.talker.prompt_rows(pair.plan(case), pair.reference_voice(case)).cpu().numpy() for case in members
    ]
    longest = max(map(len, rows))
    padded = [np.pad(row, ((longest - len(row), 0), (0, 0))) for row in rows]
    return Computed(np.stack(padded), tolerance=CLOSE)


@array(r"batch/(?P<batch>[^/]+)/attention_mask")
def batch_mask(pair, batch):
    lengths = np.array([pair.plan(case).num_rows for case in pair.json(f"batch/{batch}/members_json")])
    longest = lengths.max()
    return Computed(np.arange(longest) >= longest - lengths[:, None], tolerance=EXACT)


@array(r"batch/(?P<batch>[^/]+)/trailing_text")
def batch_trailing_rows(pair, batch):
    """Past its own end, a row's text is the pad feature."""
    trailing = [pair.plan(case).trailing_ids for case in pair.json(f"batch/{batch}/members_json")]
    longest = max(map(len, trailing))
    ids = [row + (pair.config.tts_pad_id,) * (longest - len(row)) for row in trailing]
    return Computed(torch.stack([pair.talker.text_features(row) for row in ids]), tolerance=CLOSE)
