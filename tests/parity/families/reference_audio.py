"""`enc/` and `spk/`: what a clone takes from its clip, and how the clip is read."""

import io

import numpy as np
import soundfile
import torch

from qwen3tts_core.audio.clip import CLIP_RATE_HZ, ReferenceClip, ReferenceLimits, read_clip
from qwen3tts_core.engine.reference_encoder import open_reference_encoder
from qwen3tts_core.model.codec_encoder import CodecEncoder
from qwen3tts_core.model.speaker_encoder import SpeakerEncoder, log_mel
from qwen3tts_core.model.weights import SafetensorsFolder
from tests.parity.registry import CLOSE, EXACT, INPUT, Computed, array

_FILE_RATE_HZ = 16_000


@array(r"enc/clip_int16", r"enc/stereo16k_int16")
def clips(pair):
    return INPUT


# ---------------------------------------------------------------- reading
@array(r"enc/stereo16k_mono")
def mean_of_channels(pair):
    """The same samples in a file that needs no resampling."""
    return Computed(_read_stereo(pair, CLIP_RATE_HZ).samples, tolerance=CLOSE)


@array(r"enc/stereo16k_resampled")
def resampled(pair):
    return Computed(_read_stereo(pair, _FILE_RATE_HZ).samples, tolerance=CLOSE)


def _read_stereo(pair, rate_hz):
    file = io.BytesIO()
    soundfile.write(file, pair.golden["enc/stereo16k_int16"], rate_hz, format="WAV", subtype="PCM_16")
    return read_clip(file.getvalue(), ReferenceLimits(min_seconds=0.1))


# ---------------------------------------------------------------- codes
@array(r"enc/codes")
def codes(pair):
    return Computed(_voice_codes(pair, pair.clip), tolerance=EXACT)


@array(r"enc/stereo16k_codes")
def codes_of_the_file(pair):
    return Computed(_voice_codes(pair, _read_stereo(pair, _FILE_RATE_HZ)), tolerance=EXACT)


@array(r"enc/codes_first_(?P<num_samples>\d+)")
def codes_of_a_part(pair, num_samples):
    """By the codec's encoder alone: some of these parts are too short for an x-vector."""
    samples = torch.tensor(pair.clip.samples[: int(num_samples)], device=pair.device)
    return Computed(_codec_encoder(pair)(samples), tolerance=EXACT)


@array(r"enc/codes_pair_0")
def codes_of_the_shorter(pair):
    """We encode clips singly (quirk Q9), so the frame that the reference pads into differs."""
    expected = pair.golden["enc/codes_pair_0"]
    ours = _voice_codes(pair, ReferenceClip(pair.clip.samples[:20_000]))
    assert len(ours) == len(expected)
    note = "without its last frame, which the longer clip's padding changes"
    return Computed(ours[:-1], tolerance=EXACT, expected=expected[:-1], note=note)


@array(r"enc/codes_pair_1")
def codes_of_the_longer(pair):
    return codes(pair)


@array(r"enc/(?P<stage>conv|transformer|downsampled)")
def encoder_stage(pair, stage):
    return Computed(_encoder_stages(pair)[stage], tolerance=CLOSE)


@array(r"enc/smallest_margin")
def smallest_margin(pair):
    """Over all frames and groups: how much nearer the best codebook row is than the second best."""
    encoder = _codec_encoder(pair)
    quantizer = encoder.mimi.quantizer
    features = _encoder_stages(pair)["downsampled"]
    margins = []
    for branch in (
        quantizer.semantic_residual_vector_quantizer,
        quantizer.acoustic_residual_vector_quantizer,
    ):
        residual = branch.input_proj(features[None])[0].T
        for layer in branch.layers:
            rows = layer.codebook.embed
            nearest = torch.cdist(residual, rows).topk(2, largest=False)
            margins.append((nearest.values[:, 1] - nearest.values[:, 0]).min())
            residual = residual - rows[nearest.indices[:, 0]]
    assert len(margins) == encoder.num_groups
    return Computed(torch.stack(margins).min(), tolerance=CLOSE)


def _codec_encoder(pair):
    folder = SafetensorsFolder(pair.checkpoint / "speech_tokenizer")
    return CodecEncoder(folder, pair.config.codec_encoder, pair.config.codec, pair.device)


@torch.inference_mode()
def _encoder_stages(pair):
    """Outputs on the way of an ordinary encode. The library moved these modules between releases."""
    encoder = _codec_encoder(pair)
    mimi, outputs = encoder.mimi, {}
    home = mimi.encoder if hasattr(mimi.encoder, "downsample") else mimi
    modules = {
        "conv": getattr(mimi.encoder, "encoder_seanet", mimi.encoder),
        "transformer": home.encoder_transformer,
        "downsampled": home.downsample,
    }
    for name, module in modules.items():
        module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
    encoder(torch.tensor(pair.clip.samples, device=pair.device))
    outputs["transformer"] = outputs["transformer"][0].transpose(1, 2)
    return {name: output[0] for name, output in outputs.items()}


# ---------------------------------------------------------------- x-vector
@array(r"spk/xvector")
def x_vector(pair):
    return Computed(_x_vector(pair, pair.clip), tolerance=CLOSE)


@array(r"spk/stereo16k_xvector")
def x_vector_of_the_file(pair):
    return Computed(_x_vector(pair, _read_stereo(pair, _FILE_RATE_HZ)), tolerance=CLOSE)


@array(r"spk/mel")
def mel(pair):
    return Computed(_speaker_stages(pair)["mel"].T, tolerance=CLOSE)


@array(r"spk/(?P<stage>block0|block1|mfa|pooled)")
def speaker_stage(pair, stage):
    return Computed(_speaker_stages(pair)[stage], tolerance=CLOSE)


@torch.inference_mode()
def _speaker_stages(pair):
    speaker = SpeakerEncoder(SafetensorsFolder(pair.checkpoint), pair.config.speaker_encoder, pair.device)
    outputs = {}
    modules = {
        "block0": speaker.first,
        "block1": speaker.blocks[0],
        "mfa": speaker.mfa,
        "pooled": speaker.asp,
    }
    for name, module in modules.items():
        module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
    samples = torch.tensor(pair.clip.samples, device=pair.device)
    speaker(samples)
    # The TDNNs' ReLU follows outside these modules.
    outputs |= {name: outputs[name].relu() for name in ("block0", "mfa")}
    return {"mel": log_mel(samples, speaker.filterbank), **outputs}


# ---------------------------------------------------------------- both, as served
def _voice(pair, clip):
    if "reference_encoder" not in pair.__dict__:
        pair.reference_encoder = open_reference_encoder(pair.checkpoint, pair.config, pair.device)
    return pair.reference_encoder.encode(clip, in_context=True)


def _voice_codes(pair, clip):
    return np.frombuffer(_voice(pair, clip).codes, "<i2").reshape(-1, pair.config.talker.num_code_groups)


def _x_vector(pair, clip):
    return np.frombuffer(_voice(pair, clip).x_vector, "<f4")
