"""From trained weights to the checkpoint's two weight files, under the official names.

The talker goes out in bfloat16; the codec in float16, for its weights feed audio directly and bfloat16's
eight bits of mantissa would be heard as noise. A codebook goes out as its rows with a usage of one, which is the same
quotient and fits half precision. The official class always builds a reference encoder, though a
CustomVoice checkpoint never runs one: it gets the small random one of `checkpoints/tiny`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.speaking.recipe.rvq import _EPS

LARGEST_BYTES = 26_000_000
TINY = Path(__file__).parents[2] / "tiny"
_BOOK, _USAGE, _SUM = "._codebook", "cluster_usage", "embedding_sum"


def export_talker(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """tensors: of `TrainableTalker.exported`, or their running average."""
    wanted = {
        f"talker.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
        if not name.startswith("phone_head.")
    }
    save_file(wanted, str(folder / "model.safetensors"), metadata={"format": "pt"})


def export_codec(folder: Path, tensors: Mapping[str, Tensor], tiny: Path = TINY) -> None:
    """tensors: `TrainableDecoder.state_dict()`. Writes the weights, and the encoder's section of the config."""
    target = folder / "speech_tokenizer"
    wanted = {f"decoder.{name}": tensor for name, tensor in quotients(tensors).items()}
    with safe_open(tiny / "speech_tokenizer" / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.startswith("encoder.")]  # noqa: SIM118 - not a dict
        wanted |= {name: file.get_tensor(name) for name in names}
    save_file(
        {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in wanted.items()},
        str(target / "model.safetensors"),
        metadata={"format": "pt"},
    )
    own, theirs = target / "config.json", tiny / "speech_tokenizer" / "config.json"
    config = json.loads(own.read_text(encoding="utf-8"))
    config["encoder_config"] = json.loads(theirs.read_text(encoding="utf-8"))["encoder_config"]
    own.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def quotients(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same codec with every book's usage at one."""
    out = dict(tensors)
    for name, usage in tensors.items():
        if name.endswith(f"{_BOOK}.{_USAGE}"):
            total = name.removesuffix(_USAGE) + _SUM
            out[total] = tensors[total] / usage.clamp(min=_EPS)[:, None]
            out[name] = torch.ones_like(usage)
    return out


def checked_size(folder: Path, largest: int = LARGEST_BYTES) -> int:
    """Bytes of the checkpoint's files; raises ValueError when they are more than allowed.

    The recipe and the model card beside them aren't counted.
    """
    files = [file for pattern in ("*.json", "*.txt", "*.safetensors") for file in folder.glob(pattern)]
    files += [file for file in (folder / "speech_tokenizer").iterdir() if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    if total > largest:
        raise ValueError(f"the checkpoint has {total:,} bytes, at most {largest:,} are allowed")
    return total
