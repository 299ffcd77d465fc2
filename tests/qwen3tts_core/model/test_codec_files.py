import os
import shutil
from pathlib import Path

import pytest

from qwen3tts_core.model.codec_files import FileHashes, codec_digest

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny"


@pytest.fixture
def checkpoint(tmp_path):
    def copy(name):
        shutil.copytree(TINY / "speech_tokenizer", tmp_path / name / "speech_tokenizer")
        return tmp_path / name

    return copy


@pytest.fixture
def hashes(tmp_path):
    return FileHashes(tmp_path / "memory" / "hashes.json")


def test_copies_are_one_codec_and_a_changed_byte_makes_two(checkpoint, hashes):
    one, other = checkpoint("one"), checkpoint("other")
    assert codec_digest(one, hashes) == codec_digest(other, hashes)
    weights = other / "speech_tokenizer" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert codec_digest(one, hashes) != codec_digest(other, hashes)


def test_what_the_codec_does_not_read_does_not_count(checkpoint, hashes):
    one, other = checkpoint("one"), checkpoint("other")
    (other / "speech_tokenizer" / "README.md").write_text("anything")
    assert codec_digest(one, hashes) == codec_digest(other, hashes)
    (other / "speech_tokenizer" / "config.json").write_text("{}")
    assert codec_digest(one, hashes) != codec_digest(other, hashes)


def test_a_hash_is_remembered_until_size_or_time_changes(checkpoint, tmp_path):
    file = checkpoint("one") / "speech_tokenizer" / "model.safetensors"
    memory = tmp_path / "hashes.json"
    first = FileHashes(memory).of(file)
    stat = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FileHashes(memory).of(file) == first  # the same size and time: not read again
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert FileHashes(memory).of(file) != first


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff"])
def test_memory_that_cannot_be_used_costs_nothing_but_time(checkpoint, tmp_path, content, caplog):
    file = checkpoint("one") / "speech_tokenizer" / "config.json"
    memory = tmp_path / "hashes.json"
    if content is None:
        memory.mkdir()  # neither readable nor replaceable as a file
    else:
        memory.write_bytes(content)
    assert FileHashes(memory).of(file) == FileHashes(tmp_path / "fresh.json").of(file)
    assert caplog.records
