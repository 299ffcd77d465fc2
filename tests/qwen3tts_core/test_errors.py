import inspect
import pickle

import pytest

from qwen3tts_core import errors
from qwen3tts_core.errors import InvalidRequest, TTSError

EXAMPLES = {
    "TTSError": (),
    "InvalidRequest": ("speed must be 1", "speed"),
    "TextTooLong": (5210, 4096, "input"),
    "UnknownVoice": ("nope", ("serena", "vivian"), "voice"),
    "UnknownLanguage": ("Klingon", ("Auto", "english"), "language"),
    "UnknownModel": ("gpt", ("qwen3_tts",), "model"),
    "VoiceNameTaken": ("vivian", "name"),
    "EncoderUnavailable": ("response_format mp3", "no encoder libmp3lame", "response_format"),
    "InvalidReferenceAudio": ("the clip is silent", "ref_audio"),
    "Overloaded": ("the talker is full", 2.5),
    "FirstAudioTimeout": (30.0,),
    "SlowReader": (60.0,),
    "StorageFull": ("no room in the folder of voices",),
    "StreamLost": ("its codec died", 60.0),
    "StreamCancelled": (),
    "EngineFault": ("page table is full",),
    "EngineDown": ("the talker is stopped",),
    "InvalidCodes": ("code 4096 is beyond 2047",),
    "CheckpointMismatch": ("folder", ("a: missing", "b: in the file, but nothing uses it")),
}
CLASSES = [
    cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, TTSError) and not name.startswith("_")
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_survives_the_way_between_processes(cls):
    original = cls(*EXAMPLES[cls.__name__])
    twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(original))))
    assert type(twice) is cls
    assert str(twice) == str(original)
    assert vars(twice) == vars(original)


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = [line.strip(" │├└─").split()[0] for line in errors.__doc__.splitlines() if "─" in line]
    assert sorted(drawn) == sorted(cls.__name__ for cls in CLASSES if cls is not TTSError)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("TextTooLong", "input"),
        ("UnknownVoice", "voice"),
        ("UnknownLanguage", "language"),
        ("UnknownModel", "model"),
        ("VoiceNameTaken", "name"),
        ("InvalidReferenceAudio", "ref_audio"),
    ],
)
def test_what_the_caller_can_fix_names_the_field(name, field):
    cls = getattr(errors, name)
    error = cls(*EXAMPLES[name][: 1 if name in ("VoiceNameTaken", "InvalidReferenceAudio") else 2])
    assert isinstance(error, InvalidRequest)
    assert error.param == field


def test_messages_say_expected_and_got():
    assert str(errors.TextTooLong(5210, 4096)) == "input is 5,210 tokens, the limit is 4,096"
    assert str(errors.UnknownVoice("nope", ["a", "b"])) == "unknown voice 'nope'; accepted: a, b"
    assert str(errors.UnknownVoice("nope", [])) == "unknown voice 'nope'; accepted: none"
    assert "retry after 2.5 s" in str(errors.Overloaded("full", 2.5))
