import json
import logging

import pytest
import torch
from safetensors.torch import save_file

from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.weights import SafetensorsFolder, ShapesOnly, WeightReader

TENSORS = {
    "talker.norm.weight": torch.arange(4.0),
    "talker.q.weight": torch.arange(8.0).view(2, 4),
    "talker.k.weight": -torch.arange(4.0).view(1, 4),
    "talker.inner.head.weight": torch.ones(3),
    "speaker.fc": torch.zeros(2),
}


@pytest.fixture(params=["single", "sharded"])
def folder(request, tmp_path):
    """The same tensors as one file, or as two shards and their index."""
    if request.param == "single":
        save_file(TENSORS, tmp_path / "model.safetensors")
        return tmp_path
    weight_map = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(TENSORS)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in TENSORS.items() if weight_map[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return tmp_path


def open_reader(folder, **options):
    options = {"owned": "talker.", "elsewhere": ("speaker.",), **options}
    return WeightReader(SafetensorsFolder(folder), **options)


def take_all(reader):
    reader.take("norm.weight", 4)
    reader.take("q.weight", 2, 4)
    reader.take("k.weight", 1, 4)
    reader.take("inner.head.weight", 3)


def problems_of(reader):
    with pytest.raises(CheckpointMismatch) as caught:
        reader.finish()
    return caught.value.problems


def test_taking_everything_is_enough(folder):
    reader = open_reader(folder)
    take_all(reader)
    reader.finish()


def test_tensors_come_back_as_they_were_written(folder):
    reader = open_reader(folder)
    assert torch.equal(reader.take("q.weight", 2, 4), TENSORS["talker.q.weight"])
    assert reader.take("q.weight", 2, 4, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert open_reader(folder, dtype=torch.float64).take("norm.weight", 4).dtype == torch.float64


def test_joined_matrices_keep_their_order(folder):
    joined = open_reader(folder).concat({"k.weight": 1, "q.weight": 2}, 4)
    assert torch.equal(joined, torch.cat([TENSORS["talker.k.weight"], TENSORS["talker.q.weight"]]))


def test_stacked_tensors_keep_their_order(folder):
    both = WeightReader(SafetensorsFolder(folder), owned="").stack(["talker.norm.weight"] * 2, 4)
    assert torch.equal(both, TENSORS["talker.norm.weight"].expand(2, 4))


def test_what_an_inner_reader_takes_counts_for_the_outer(folder):
    reader = open_reader(folder)
    take_all(reader)
    inner = reader.within("inner.")
    assert torch.equal(inner.take("head.weight", 3), torch.ones(3))
    inner.take("absent", 7)
    assert problems_of(reader) == ("talker.inner.absent: expected shape [7], got missing",)


def test_one_start_reports_everything_that_is_wrong(folder):
    reader = open_reader(folder)
    assert reader.take("norm.weight", 5).shape == (5,)  # zeros, so that loading can go on
    reader.take("absent.weight", 2, 3)
    reader.take("q.weight", 2, 4)
    assert problems_of(reader) == (
        "talker.norm.weight: expected shape [5], got shape [4]",
        "talker.absent.weight: expected shape [2, 3], got missing",
        "talker.inner.head.weight: in the file, but nothing uses it",
        "talker.k.weight: in the file, but nothing uses it",
    )


def test_a_tensor_of_no_known_component_is_reported_by_name(folder):
    reader = open_reader(folder, elsewhere=())
    take_all(reader)
    assert problems_of(reader) == ("speaker.fc: in the file, but nothing uses it",)


def test_known_unused_tensors_are_listed_once_and_pass(folder, caplog):
    reader = open_reader(folder, elsewhere=(), known_unused=("speaker.*",))
    take_all(reader)
    with caplog.at_level(logging.INFO):
        reader.finish()
    assert [record.getMessage().count("speaker.*") for record in caplog.records] == [1]


def test_bare_shapes_check_coverage_without_weights():
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    reader = WeightReader(ShapesOnly("manifest", shapes), owned="talker.", elsewhere=("speaker.",))
    assert reader.take("q.weight", 2, 4).is_meta
    with pytest.raises(CheckpointMismatch, match=r"manifest: .*talker\.norm\.weight"):
        reader.finish()


# ---------------------------------------------------------------- broken folders
def test_a_folder_without_weights_says_so(tmp_path):
    with pytest.raises(CheckpointMismatch, match="neither"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a tensor file", b"\x10\0\0\0\0\0\0\0{"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointMismatch, match=r"model\.safetensors.*not a safetensors file"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content, "utf-8")
    with pytest.raises(CheckpointMismatch, match=r"index\.json.*not a shard index"):
        SafetensorsFolder(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(CheckpointMismatch, match=r"model-00001-of-00001\.safetensors is missing"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_that_no_shard_holds_is_named(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(CheckpointMismatch, match="b is in no shard"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path):
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    with pytest.raises(CheckpointMismatch, match="b is in a shard, but not in the index"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_a_weight_that_is_no_floating_point_number_is_reported(tmp_path, dtype):
    """Quantised weights need scales that nothing here would apply."""
    save_file({"talker.norm.weight": torch.ones(4, dtype=dtype)}, tmp_path / "model.safetensors")
    reader = open_reader(tmp_path)
    reader.take("norm.weight", 4)
    (problem,) = problems_of(reader)
    assert "talker.norm.weight" in problem
    assert str(dtype) in problem
