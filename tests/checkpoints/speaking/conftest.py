"""A rehearsal-sized checkpoint of untrained weights, written by the recipe's own exporters."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.speaking.recipe.bpe import write_tokenizer
from checkpoints.speaking.recipe.codec_model import Codec
from checkpoints.speaking.recipe.export import export_codec, export_talker
from checkpoints.speaking.recipe.layout import REHEARSAL, VOICES, write_configs
from checkpoints.speaking.recipe.talker_model import PromptIds, TrainableTalker
from checkpoints.speaking.recipe.templates import SENTENCES
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.text.prompt import text_tokens
from qwen3tts_core.text.tokenizer import TextTokenizer

NUM_PHONES, LABELS_PER_FRAME = 5, 4
TEXTS = ("Good morning, Anna.", "It is half past seven.", "No.", "the apple was red and sweet", "Page 12.")


@pytest.fixture(scope="session")
def skeleton(tmp_path_factory):
    """A checkpoint without weights."""
    folder = tmp_path_factory.mktemp("speaking") / "skeleton"
    write_configs(folder, REHEARSAL, write_tokenizer(folder, SENTENCES, 400))
    return folder


@pytest.fixture(scope="session")
def untrained(skeleton, tmp_path_factory):
    """The exported folder, and the trainable models with the very weights that it holds."""
    folder = tmp_path_factory.mktemp("speaking") / "checkpoint"
    shutil.copytree(skeleton, folder)
    config = CheckpointConfig.from_checkpoint(folder)
    torch.manual_seed(0)
    codec = Codec(config.codec, 32, NUM_PHONES, LABELS_PER_FRAME)
    codec.decoder.quantizer.train()
    codec.decoder.quantizer(torch.randn(2, config.codec.codebook_dim, 40))  # seeds the books
    talker = TrainableTalker(config, NUM_PHONES)
    with torch.no_grad():
        for parameter in talker.parameters():
            parameter.mul_(3.0)  # large enough that the context decides
    export_codec(folder, codec.decoder.state_dict())
    export_talker(folder, talker.state_dict())
    codec.decoder.load_state_dict(_own(folder / "speech_tokenizer", "decoder."))
    talker.load_state_dict(_own(folder, "talker."), strict=False)
    return SimpleNamespace(folder=folder, config=config, codec=codec.eval(), talker=talker.eval())


def _own(folder, prefix):
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="session")
def tokenizer(skeleton):
    return TextTokenizer.from_checkpoint(skeleton)


@pytest.fixture(scope="session")
def prompt_ids(untrained, tokenizer):
    return PromptIds.of(untrained.config, tokenizer.encode_with_specials("<|im_start|>assistant\n"), VOICES)


@pytest.fixture
def code_file(tmp_path, untrained, tokenizer):
    """A corpus of random codes for `TEXTS`, as `encode` writes it."""
    rng = np.random.default_rng(0)
    frames = [6, 9, 4, 12, 7]
    texts = [text_tokens(tokenizer, text) for text in TEXTS]
    arrays = {
        "codes": rng.integers(0, untrained.config.codec.codebook_size, (sum(frames), 16)).astype(np.uint8),
        "phones": rng.integers(0, NUM_PHONES, sum(frames)).astype(np.uint8),
        "num_frames": np.array(frames, np.int32),
        "voices": np.array([0, 1, 2, 0, 1], np.uint8),
        "text_ids": np.concatenate([np.array(ids, np.int16) for ids in texts]),
        "num_text": np.array([len(ids) for ids in texts], np.int32),
    }
    file = tmp_path / "codes.safetensors"
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    return file
