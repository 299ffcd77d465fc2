"""`tok/`, and the ids of `case/<name>/`: tokenizer and templates."""

import numpy as np

from tests.parity.registry import EXACT, INPUT, Computed, array


@array(r"tok/probes_json", r"case/[^/]+/spec_json", r"batch/[^/]+/members_json")
def requests(pair):
    return INPUT


@array(r"tok/(?P<index>\d+)_ids")
def probe_ids(pair, index):
    probe = pair.json("tok/probes_json")[int(index)]
    return Computed(np.array(pair.tokenizer.encode_with_specials(probe), np.int64), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/input_ids")
def target_ids(pair, case):
    """The role and text tokens of the plan, and the end of the template, which no plan holds."""
    plan, tokenizer = pair.plan(case, with_instructions=False), pair.tokenizer
    head = plan.text_ids[:3]
    config = pair.config
    text = [token for token in (*plan.text_ids[3:], *plan.trailing_ids) if token not in _marks(config)]
    if f"case/{case}/ref_ids" in pair.golden:  # an in-context plan tells the transcript first
        text = text[len(transcript(pair, case)) :]
    end = tokenizer.encode_with_specials("<|im_end|>\n<|im_start|>assistant\n")
    return Computed(np.array([*head, *text, *end]), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/ref_ids")
def reference_ids(pair, case):
    plan, tokenizer = pair.plan(case), pair.tokenizer
    end = tokenizer.encode_with_specials("<|im_end|>\n")
    return Computed(np.array([*plan.text_ids[:3], *transcript(pair, case), *end]), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/instruct_ids")
def instruction_ids(pair, case):
    """The rows that the instruction puts before the prompt, also where the reference drops it."""
    told, plain = (pair.plan(case, with_instructions=choice) for choice in (True, False))
    num_rows = told.num_rows - plain.num_rows
    assert told.text_ids[num_rows:] == plain.text_ids
    note = "dropped by the reference, refused by us" if pair.drops_instructions else ""
    return Computed(np.array(told.text_ids[:num_rows]), tolerance=EXACT, note=note)


def transcript(pair, case):
    """The reference transcript's ids, cut out of the plan: it is as long as the golden one or it differs."""
    config = pair.config
    plan = pair.plan(case)
    text = [token for token in (*plan.text_ids[3:], *plan.trailing_ids) if token not in _marks(config)]
    return text[: len(pair.golden[f"case/{case}/ref_ids"]) - 5]


def _marks(config):
    return (config.tts_pad_id, config.tts_bos_id, config.tts_eos_id)
