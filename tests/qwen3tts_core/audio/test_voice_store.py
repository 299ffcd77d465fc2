"""Named voices outlive the process, are seen by every process at once, and are never seen by halves."""

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import time

import numpy as np
import pytest

from qwen3tts_core.audio.clip import ReferenceClip
from qwen3tts_core.audio.voice_store import VoiceStore
from qwen3tts_core.errors import EngineFault, InvalidRequest, StorageFull, UnknownVoice, VoiceNameTaken
from qwen3tts_core.types import ReferenceVoice

SPAWN = multiprocessing.get_context("spawn")


def make_clip(seed, num_samples=2_400):
    return ReferenceClip(np.random.default_rng(seed).uniform(-0.5, 0.5, num_samples).astype(np.float32))


def encode(clip):
    """Stands in for the networks: arrays that only this clip can have."""
    codes = np.frombuffer(bytes.fromhex(clip.digest), "<i2").reshape(1, 16)
    return ReferenceVoice(
        clip.voice_key(True), clip.samples[:8].tobytes(), np.repeat(codes, 3, axis=0).astype("<i2").tobytes()
    )


def put(store, name, seed, **options):
    clip = make_clip(seed)
    return store.put(name, clip, encode(clip), 16, encoder="weights-1", **options)


def belongs_together(store, voice):
    """Do record, arrays and clip come from one upload?"""
    clip = store.clip(voice.record)
    return voice.reference(True) == encode(clip) and clip.digest == voice.record.clip_digest


@pytest.fixture
def store(tmp_path):
    return VoiceStore(tmp_path / "voices", reserved=("Vivian", "eric"), max_voices=5)


def test_a_voice_comes_back_as_it_was_encoded(store):
    clip = make_clip(0)
    begin = time.time()
    record = put(store, "Ada", 0, transcript="  Guten Morgen.\ud83d ")  # half an emoji, as JSON may carry
    voice = store.get("Ada")
    assert voice.record == record
    assert (record.name, record.encoder, record.transcript) == ("Ada", "weights-1", "Guten Morgen.\ud83d")
    assert record.clip_seconds == pytest.approx(0.1)
    assert begin <= record.created_at <= time.time()
    assert voice.reference(in_context=True) == encode(clip)
    x_vector_only = voice.reference(in_context=False)
    assert (x_vector_only.key, x_vector_only.codes) == (clip.voice_key(False), b"")
    np.testing.assert_array_equal(store.clip(record).samples, clip.samples)


def test_voices_survive_a_restart(store, tmp_path):
    put(store, "ada", 0)
    again = VoiceStore(tmp_path / "voices")
    assert belongs_together(again, again.get("ada"))
    assert [record.name for record in again.records()] == ["ada"]


def test_upper_and_lower_case_are_one_name(store):
    put(store, "Ada", 0)
    put(store, "ADA", 1)
    assert store.get("ada").record.clip_digest == make_clip(1).digest
    assert [record.name for record in store.records()] == ["ADA"]
    store.delete("aDa")
    assert store.records() == []


def test_a_name_uploaded_again_speaks_with_the_new_clip(store, tmp_path):
    old = put(store, "ada", 0, transcript="old")
    put(store, "ada", 1)
    voice = store.get("ada")
    assert voice.reference(True) == encode(make_clip(1))
    assert voice.record.transcript is None
    assert len(list((tmp_path / "voices").iterdir())) == 3, "the old clip is still on disk"
    with pytest.raises(UnknownVoice):
        store.clip(old)


def test_the_same_clip_uploaded_again_stays(store):
    for transcript in ("one", "two"):
        put(store, "ada", 0, transcript=transcript)
    voice = store.get("ada")
    assert voice.record.transcript == "two"
    assert belongs_together(store, voice)


def test_the_same_clip_under_two_names_is_two_voices(store):
    put(store, "ada", 0)
    put(store, "bob", 0)
    store.delete("ada")
    assert belongs_together(store, store.get("bob"))


def test_deleted_means_gone(store, tmp_path):
    put(store, "ada", 0)
    put(store, "bob", 1)
    store.delete("ada")
    for read in (store.get, store.delete):
        with pytest.raises(UnknownVoice, match="unknown voice 'ada'; accepted: bob"):
            read("ada")
    assert not [path for path in (tmp_path / "voices").iterdir() if not path.name.startswith("bob.")]


@pytest.mark.parametrize("name", ["vivian", "VIVIAN", "Eric"])
def test_a_built_in_name_cannot_be_taken_or_deleted(store, name):
    with pytest.raises(VoiceNameTaken):
        put(store, name, 0)
    with pytest.raises(InvalidRequest, match="built-in voice") as caught:
        store.delete(name)
    assert caught.value.param == "name"
    assert store.records() == []


ODD_NAMES = [
    "", " ", "a b", ".", "..", "../ada", "..\\ada", "/etc/passwd", "a/b", "a\\b", "a.json", ".hidden", "-ada", "_ada",
    "ada\n", "ada\0", "ada*", "a?", "[a]", "~", "ä", "ａda", "名", "\u212a", "ſ", "a" * 65, "%2e%2e%2f", "CON.", "ada:x",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_refused_and_touch_nothing(store, tmp_path, name):
    before = sorted(tmp_path.rglob("*"))
    for refused in (lambda: put(store, name, 0), lambda: store.delete(name)):
        with pytest.raises(InvalidRequest, match="expected 1 to 64 ASCII letters") as caught:
            refused()
        assert caught.value.param == "name"
    with pytest.raises(UnknownVoice):
        store.get(name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["a", "Ada-2_b", "0", "con", "a" * 64])
def test_plain_names_are_taken(store, name):
    put(store, name, 0)
    assert belongs_together(store, store.get(name))


def test_the_number_of_voices_is_bounded(store):
    for i in range(5):
        put(store, f"voice{i}", i)
    with pytest.raises(InvalidRequest, match="holds 5 voices, which is its limit") as caught:
        put(store, "one-more", 9)
    assert caught.value.param == "name"
    put(store, "voice0", 7)  # replacing isn't adding
    store.delete("voice1")
    put(store, "one-more", 9)
    assert len(store.records()) == 5


def test_a_transcript_beyond_the_limit_is_refused(store):
    with pytest.raises(InvalidRequest, match="5,000 characters, the limit is 4,096") as caught:
        put(store, "ada", 0, transcript="x" * 5_000)
    assert caught.value.param == "ref_text"
    assert store.records() == []


def test_another_store_sees_uploads_and_deletions_at_once(store, tmp_path):
    other = VoiceStore(tmp_path / "voices")
    put(store, "ada", 0)
    assert belongs_together(other, other.get("ada"))
    put(other, "ada", 1)
    assert store.get("ada").reference(True) == encode(make_clip(1))
    other.delete("ada")
    with pytest.raises(UnknownVoice):
        store.get("ada")


# ---------------------------------------------------------------- crashes
def age(path):
    os.utime(path, (time.time() - 10_000,) * 2)


def test_what_a_crashed_upload_left_is_removed_when_it_is_old(store, tmp_path):
    folder = tmp_path / "voices"
    put(store, "ada", 0)
    for path in folder.iterdir():
        age(path)  # an old voice is no left-over
    left = [folder / "ada.00-11.clip.safetensors", folder / "bob.00-11.voice.safetensors", folder / ".00.tmp"]
    for path in left:
        path.write_bytes(b"half")
    VoiceStore(folder)
    assert all(path.exists() for path in left), "an upload in progress was disturbed"
    for path in left:
        age(path)
    VoiceStore(folder)
    assert not any(path.exists() for path in left)
    assert belongs_together(store, store.get("ada"))


@pytest.mark.parametrize("fatal", [1, 2, 3])
def test_an_upload_that_dies_half_way_leaves_the_old_voice(store, monkeypatch, fatal):
    put(store, "ada", 0)
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 2 * fatal - 1:  # each file is synced, then the folder
            raise OSError("disk full")
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="disk full"):
        put(store, "ada", 1)
    assert store.get("ada").reference(True) == encode(make_clip(0))
    assert belongs_together(store, store.get("ada"))


def test_a_broken_record_is_an_engine_fault_and_hides_no_other_voice(store, tmp_path):
    put(store, "ada", 0)
    (tmp_path / "voices" / "bob.json").write_text('{"name": "bob"')
    (tmp_path / "voices" / "cy.json").write_text(json.dumps({"name": "cy"}))
    assert [record.name for record in store.records()] == ["ada"]
    for name in ("bob", "cy"):
        with pytest.raises(EngineFault, match="not a voice record"):
            store.get(name)


def test_a_record_without_its_payload_is_an_engine_fault(store, tmp_path):
    put(store, "ada", 0)
    for path in (tmp_path / "voices").glob("*.voice.safetensors"):
        path.unlink()
    with pytest.raises(EngineFault, match="payload that its record names is missing"):
        store.get("ada")


# ---------------------------------------------------------------- several processes
def churn(folder, worker, enough):
    """Put and delete two names as fast as possible."""
    store = VoiceStore(folder)
    number = 0
    while not enough.is_set():
        number += 1
        name = ("ada", "bob")[number % 2]
        if number % 7 == 0:
            with contextlib.suppress(UnknownVoice):
                store.delete(name)
        else:
            put(store, name, 1_000 * worker + number)


def test_readers_never_see_a_half_while_processes_write_and_delete(tmp_path):
    folder = tmp_path / "voices"
    store = VoiceStore(folder)
    enough = SPAWN.Event()
    writers = [SPAWN.Process(target=churn, args=(folder, i, enough)) for i in range(3)]
    for writer in writers:
        writer.start()
    num_seen, digests, deadline = 0, set(), time.monotonic() + 240
    try:
        while num_seen <= 200 or len(digests) <= 30:
            assert time.monotonic() < deadline
            assert all(writer.is_alive() for writer in writers)
            for name in ("ada", "BOB"):
                try:
                    voice = store.get(name)
                except UnknownVoice:
                    continue
                num_seen += 1
                digests.add(voice.record.clip_digest)
                assert len(voice.x_vector) == 32
                try:
                    assert belongs_together(store, voice)
                except UnknownVoice:
                    continue  # replaced between the two reads, and said so
            store.records()
    finally:
        enough.set()
        for writer in writers:
            writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    for name in ("ada", "bob"):
        put(store, name, 1)
        assert belongs_together(store, store.get(name))
    for path in folder.iterdir():
        age(path)
    VoiceStore(folder)
    assert len(list(folder.iterdir())) == 6, "left-overs of the races stay for ever"


def add_one(folder, name, ready, go, results):
    store = VoiceStore(folder, max_voices=4)
    ready.release()
    go.wait()
    try:
        put(store, name, 0)
        results.put(True)
    except InvalidRequest:
        results.put(False)


def test_processes_that_add_at_the_same_time_stay_within_the_bound(tmp_path):
    folder = tmp_path / "voices"
    store = VoiceStore(folder, max_voices=4)
    put(store, "first", 0)
    put(store, "second", 1)
    ready, go, results = SPAWN.Semaphore(0), SPAWN.Event(), SPAWN.Queue()
    adders = [SPAWN.Process(target=add_one, args=(folder, f"new{i}", ready, go, results)) for i in range(4)]
    for adder in adders:
        adder.start()
    for _ in adders:
        assert ready.acquire(timeout=240)
    go.set()
    added = sum(results.get(timeout=240) for _ in adders)
    for adder in adders:
        adder.join()
    assert len(store.records()) == 2 + added <= 4


@pytest.mark.parametrize("names", ["a new name", "a name that is there"])
@pytest.mark.parametrize("full_at", [1, 2, 3, 4, 5])
def test_a_full_disk_is_told_and_nothing_of_the_voice_stays(store, tmp_path, monkeypatch, full_at, names):
    """At any write of its three files, or of the folder between."""
    old = put(store, "ada", 0)
    before = sorted(path.name for path in (tmp_path / "voices").iterdir())
    num_syncs, sync = 0, os.fsync

    def fill_up(descriptor):
        nonlocal num_syncs
        num_syncs += 1
        if num_syncs == full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill_up)
    name = "bob" if names == "a new name" else "ada"
    with pytest.raises(StorageFull, match="no room"):
        put(store, name, 1)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "voices").iterdir()) == before
    assert store.get("ada").record == old
    assert belongs_together(store, store.get("ada"))
    put(store, name, 2)


def test_a_file_beyond_the_limit_of_its_process_is_a_full_disk_too(store, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
    try:
        with pytest.raises(StorageFull):
            put(store, "ada", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "voices").iterdir())
    put(store, "ada", 0)
