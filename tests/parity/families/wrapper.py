"""`wrapper/`: text in, samples out. A greedy run of the engine, decoded as a stream."""

import numpy as np

from tests.parity.registry import CLOSE, EXACT, Computed, array


@array(r"wrapper/(?P<case>.+)_rate")
def rate(pair, case):
    return Computed(pair.config.codec.sample_rate_hz, tolerance=EXACT)


@array(r"wrapper/(?P<case>.+)_wav")
def wave(pair, case):
    """In context the reference's frames come first and their samples are dropped.

    We drop them exactly; the reference's cut may be one sample short (quirk Q11), which leaves one
    sample more at its front.
    """
    expected = pair.golden[f"wrapper/{case}_wav"]
    frames = np.array(pair.greedy(case).frames[: len(pair.golden[f"case/{case}/greedy_codes"])])
    voice = pair.reference_voice(case)
    if voice is not None and voice.codes:
        groups = pair.config.talker.num_code_groups
        reference = np.frombuffer(voice.codes, "<i2").reshape(-1, groups)
        num_dropped = len(reference) * pair.config.codec.samples_per_frame
        (samples,) = pair.decode_in_steps(np.concatenate([reference, frames]))
        samples = samples[num_dropped:]
    else:
        (samples,) = pair.decode_in_steps(frames)
    extra = len(expected) - len(samples)
    if extra == 1:
        return Computed(
            samples, tolerance=CLOSE, expected=expected[1:], note="without its extra first sample"
        )
    return Computed(samples, tolerance=CLOSE)
