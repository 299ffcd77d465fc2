import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.config import CheckpointConfig, CodecEngineConfig, TalkerEngineConfig
from qwen3tts_core.errors import CheckpointMismatch

ROOT = Path(__file__).parents[2]
SEED0 = ROOT / "tests" / "parity" / "golden" / "seed0"
TINY = ROOT / "checkpoints" / "tiny"
FOLDERS = [TINY, SEED0 / "custom_voice_large", SEED0 / "voice_design", SEED0 / "base"]
JSON_FILES = ("config.json", "generation_config.json", "speech_tokenizer/config.json")


@pytest.fixture
def edited(tmp_path):
    """A copy of a checkpoint's JSON files, and a way to change one key of one file."""

    def edit(file, key, value, source=TINY):
        (tmp_path / "speech_tokenizer").mkdir(exist_ok=True)
        for name in JSON_FILES:
            shutil.copy(source / name, tmp_path / name)
        content = json.loads((tmp_path / file).read_text("utf-8"))
        *sections, last = key.split(".")
        inner = content
        for section in sections:
            inner = inner[section]
        if value is KeyError:
            del inner[last]
        else:
            inner[last] = value
        (tmp_path / file).write_text(json.dumps(content), "utf-8")
        return tmp_path

    return edit


def mismatch(folder):
    with pytest.raises(CheckpointMismatch) as caught:
        CheckpointConfig.from_checkpoint(folder)
    return str(caught.value)


# ---------------------------------------------------------------- reading
def test_every_variant_is_told_from_its_files():
    configs = [CheckpointConfig.from_checkpoint(folder) for folder in FOLDERS]
    assert [config.model_type for config in configs] == [
        "custom_voice",
        "custom_voice",
        "voice_design",
        "base",
    ]
    assert [config.model_size for config in configs] == ["0b6", "1b7", "1b7", "0b6"]
    assert [config.speaker_encoder is not None for config in configs] == [False, False, False, True]
    assert [bool(config.speakers) for config in configs] == [True, True, False, False]


def test_numbers_come_from_the_files_and_not_from_here(edited):
    assert CheckpointConfig.from_checkpoint(TINY).talker.codec_eos_id == 166
    folder = edited("config.json", "talker_config.codec_eos_token_id", 77)
    assert CheckpointConfig.from_checkpoint(folder).talker.codec_eos_id == 77


def test_samples_per_frame_are_the_product_of_the_rates():
    codec = CheckpointConfig.from_checkpoint(TINY).codec
    assert (codec.samples_per_frame, codec.frame_rate_hz) == (1920, 12.5)


def test_names_are_lower_case(edited):
    folder = edited("config.json", "talker_config.spk_id", {"Vivian": 3, "ERIC": 4})
    assert dict(CheckpointConfig.from_checkpoint(folder).speakers) == {"vivian": 3, "eric": 4}


def test_only_named_dialects_count():
    config = CheckpointConfig.from_checkpoint(TINY)
    raw = json.loads((TINY / "config.json").read_text("utf-8"))["talker_config"]["spk_is_dialect"]
    assert False in raw.values()
    assert dict(config.speaker_dialects) == {name: dialect for name, dialect in raw.items() if dialect}


def test_a_speaker_that_no_dialect_entry_names_is_no_error(edited):
    folder = edited("config.json", "talker_config.spk_is_dialect", {})
    assert not CheckpointConfig.from_checkpoint(folder).speaker_dialects


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_config_survives_the_way_between_processes(folder):
    config = CheckpointConfig.from_checkpoint(folder)
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    with pytest.raises(TypeError):
        copy.speakers["new"] = 1


# ---------------------------------------------------------------- sampling defaults
def test_the_files_defaults_win_over_the_hard_ones(edited):
    folder = edited("generation_config.json", "subtalker_top_k", 7)
    config = CheckpointConfig.from_checkpoint(folder)
    assert config.sampling.subtalker.top_k == 7
    assert config.sampling.talker.top_k == 50
    assert config.max_new_tokens == 8192


def test_keys_the_file_leaves_out_get_the_documented_defaults(edited):
    folder = edited("generation_config.json", "max_new_tokens", KeyError)
    (folder / "generation_config.json").write_text("{}", "utf-8")
    config = CheckpointConfig.from_checkpoint(folder)
    assert config.max_new_tokens == 2048
    assert config.sampling.repetition_penalty == 1.05
    assert config.sampling.talker == config.sampling.subtalker
    talker = config.sampling.talker
    assert (talker.do_sample, talker.temperature, talker.top_k, talker.top_p) == (True, 0.9, 50, 1.0)


# ---------------------------------------------------------------- refusing
@pytest.mark.parametrize("name", JSON_FILES)
def test_a_missing_or_broken_file_is_named(edited, name):
    folder = edited("config.json", "tts_pad_token_id", 5)
    for content in ("{", "[]"):
        (folder / name).write_text(content, "utf-8")
        assert name in mismatch(folder)
    (folder / name).unlink()
    assert f"{name}: file is missing" in mismatch(folder)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("config.json", "tts_model_type"),
        ("config.json", "tts_pad_token_id"),
        ("config.json", "talker_config.num_hidden_layers"),
        ("config.json", "talker_config.codec_think_eos_id"),
        ("config.json", "talker_config.spk_id"),
        ("config.json", "talker_config.code_predictor_config.head_dim"),
        ("speech_tokenizer/config.json", "decoder_config.sliding_window"),
        ("speech_tokenizer/config.json", "output_sample_rate"),
    ],
)
@pytest.mark.parametrize("value", [KeyError, "many", True, None])
def test_a_missing_or_mistyped_key_is_named_with_its_path(edited, file, key, value):
    said = mismatch(edited(file, key, value))
    assert file in said
    assert key in said


def test_a_base_checkpoint_needs_its_speaker_encoder(edited):
    folder = edited("config.json", "speaker_encoder_config.enc_dim", KeyError, source=SEED0 / "base")
    assert "speaker_encoder_config.enc_dim" in mismatch(folder)


@pytest.mark.parametrize(
    ("file", "key", "value", "named"),
    [
        ("config.json", "talker_config.hidden_act", "gelu", "talker_config.hidden_act"),
        ("config.json", "talker_config.attention_bias", True, "talker_config.attention_bias"),
        ("config.json", "talker_config.use_sliding_window", True, "talker_config.use_sliding_window"),
        ("config.json", "tokenizer_type", "qwen3_tts_tokenizer_25hz", "tokenizer_type"),
        ("config.json", "tts_model_type", "music", "music"),
        ("config.json", "talker_config.num_key_value_heads", 3, "num_key_value_heads"),
        ("config.json", "talker_config.head_dim", 7, "head_dim"),
        ("config.json", "talker_config.num_code_groups", 8, "num_code_groups = 8"),
        ("config.json", "talker_config.code_predictor_config.vocab_size", 63, "63"),
        ("config.json", "talker_config.spk_is_dialect", {"eric": "martian"}, "martian"),
        ("config.json", "talker_config.spk_id", {"eric": "x"}, "spk_id.eric"),
        ("speech_tokenizer/config.json", "decode_upsample_rate", 1919, "1919"),
        ("speech_tokenizer/config.json", "decoder_config.upsample_rates", [], "upsample_rates"),
    ],
)
def test_what_is_not_implemented_or_contradicts_itself_stops_the_start(edited, file, key, value, named):
    assert named in mismatch(edited(file, key, value))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "tts_pad_token_id", -5),
        ("config.json", "tts_bos_token_id", 440),  # one beyond the text vocabulary
        ("config.json", "talker_config.codec_eos_token_id", -1),
        ("config.json", "talker_config.codec_pad_id", 10**6),
        ("config.json", "talker_config.spk_id.dylan", 1088),  # one beyond the codec vocabulary
        ("config.json", "talker_config.spk_id.dylan", -3),
        ("config.json", "talker_config.codec_language_id.english", 10**6),
        ("config.json", "talker_config.spk_is_dialect", []),
        ("config.json", "talker_config.spk_is_dialect.eric", 5),
        ("config.json", "talker_config.vocab_size", 2000),
        ("config.json", "talker_config.rope_theta", 0),
        ("config.json", "talker_config.rms_norm_eps", -1.0),
        ("config.json", "talker_config.rope_scaling.rope_type", "yarn"),
        ("config.json", "talker_config.code_predictor_config.rope_scaling", {"type": "linear", "factor": 2}),
        ("config.json", "talker_config.tie_word_embeddings", True),
        ("speech_tokenizer/config.json", "decoder_config.rope_theta", -10),
        ("generation_config.json", "do_sample", "false"),
        ("generation_config.json", "subtalker_dosample", 1),
        ("generation_config.json", "temperature", "hot"),
        ("generation_config.json", "temperature", 0),
        ("generation_config.json", "top_k", -1),
        ("generation_config.json", "top_k", 5.5),
        ("generation_config.json", "subtalker_top_p", 1.5),
        ("generation_config.json", "repetition_penalty", 0),
        ("generation_config.json", "max_new_tokens", 0),
    ],
)
def test_a_value_that_would_fail_or_mislead_later_stops_the_start(edited, file, key, value):
    """An id beyond its table killed the talker's loop at the first request that used it."""
    said = mismatch(edited(file, key, value))
    assert file in said or "these must" in said or "vocab_size" in said
    assert key.split(".")[-1] in said or key in said


def test_null_is_the_same_as_absent_where_a_default_is_documented(edited):
    assert (
        CheckpointConfig.from_checkpoint(
            edited("generation_config.json", "top_k", None)
        ).sampling.talker.top_k
        == 50
    )


# ---------------------------------------------------------------- engines
@given(st.integers(1, 300))
def test_decode_buckets_reach_every_number_of_rows_up_to_the_slots(num_slots):
    buckets = TalkerEngineConfig(num_slots=num_slots).decode_buckets
    assert buckets[0] == 1
    assert buckets[-1] == num_slots
    assert list(buckets) == sorted(set(buckets))
    assert all(later <= 2 * earlier for earlier, later in pairwise(buckets))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 5000))
def test_the_default_pages_hold_the_longest_request(num_slots, page_size, max_positions):
    config = TalkerEngineConfig(num_slots=num_slots, page_size=page_size, max_positions=max_positions)
    assert config.num_pages >= config.pages_for(max_positions)
    assert config.pages_for(max_positions) * page_size >= max_positions
    assert (config.pages_for(max_positions) - 1) * page_size < max_positions


@given(st.integers(1, 100))
def test_deterministic_mode_has_one_bucket_of_four_rows_or_more(num_slots):
    talker = TalkerEngineConfig(num_slots=num_slots, deterministic=True)
    codec = CodecEngineConfig(num_rows=num_slots, deterministic=True)
    assert len(talker.decode_buckets) == len(codec.frame_buckets) == len(codec.batch_buckets) == 1
    assert talker.decode_buckets[0] >= max(4, num_slots)
    assert talker.decode_buckets[0] % 4 == 0


@pytest.mark.parametrize(
    ("cls", "fields", "named"),
    [
        (TalkerEngineConfig, {"num_slots": 0}, "num_slots"),
        (TalkerEngineConfig, {"max_queued": -1}, "max_queued"),
        (TalkerEngineConfig, {"memory_gib": -1.0}, "memory_gib"),
        (TalkerEngineConfig, {"decode_buckets": (4, 2)}, "decode_buckets"),
        (TalkerEngineConfig, {"decode_buckets": (1, 2)}, "num_slots"),
        (TalkerEngineConfig, {"prefill_buckets": ()}, "prefill_buckets"),
        (CodecEngineConfig, {"mode": "magic"}, "magic"),
        (CodecEngineConfig, {"left_context_frames": -1}, "left_context_frames"),
        (CodecEngineConfig, {"frame_buckets": (0, 1)}, "frame_buckets"),
        (CodecEngineConfig, {"batch_buckets": (2, 2)}, "batch_buckets"),
        (CodecEngineConfig, {"max_batch_frames": -1}, "max_batch_frames"),
        (CodecEngineConfig, {"memory_gib": -0.5}, "memory_gib"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(cls, fields, named):
    with pytest.raises(ValueError, match=named):
        cls(**fields)


def test_pages_by_default_hold_a_minute_of_speech_in_every_slot():
    config = TalkerEngineConfig(num_slots=128)
    prompt_rows, frames = 200, 60 * 12.5
    assert 128 * config.pages_for(prompt_rows + int(frames)) <= config.num_pages
