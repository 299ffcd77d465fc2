"""The published checkpoints as names and shapes; see manifests/README.md."""

import gzip
import json
from pathlib import Path

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.model.weights import ShapesOnly

VARIANTS = ("0b6_base", "0b6_custom_voice", "1b7_base", "1b7_custom_voice", "1b7_voice_design")
_FOLDER = Path(__file__).parent / "manifests"


def read_manifest(name):
    """`name`: one of VARIANTS, or "codec"."""
    return json.loads(gzip.decompress((_FOLDER / f"full_size_{name}.json.gz").read_bytes()))


def read_config(variant, folder):
    """Write the variant's JSON files into `folder` and read them as a start would."""
    for name, content in read_manifest(variant)["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return CheckpointConfig.from_checkpoint(folder)


def model_source(variant):
    return ShapesOnly(f"{variant}/model.safetensors", read_manifest(variant)["model"])


def codec_source():
    return ShapesOnly("speech_tokenizer/model.safetensors", read_manifest("codec"))
