"""flite in this process, through ctypes: text to 16 kHz samples and phone end times.

The libraries come from a folder, so that a machine without the package can be given them
(`copy_libraries` collects them, 15 MB); no start-up cost per sentence, 40x real time a core.
flite is deterministic. Source: CMU Flite 2.2, include/cst_utterance.h, cst_relation.h, cst_wave.h.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoints.speaking.recipe.layout import VOICES

SAMPLE_RATE_HZ = 16_000
_LANGUAGE_LIBRARIES = ("libasound.so.2", "libflite.so.1", "libflite_usenglish.so.1", "libflite_cmulex.so.1")
LIBRARIES = (*_LANGUAGE_LIBRARIES, *(f"libflite_cmu_us_{voice}.so.1" for voice in VOICES))
DEBIAN_FOLDER = Path("/usr/lib/x86_64-linux-gnu")
SILENCE = "pau"
PHONES = (  # flite's US English set; index 0 is silence
    *(SILENCE, "aa", "ae", "ah", "ao", "aw", "ax", "ay", "b", "ch", "d", "dh", "eh", "er", "ey", "f", "g"),
    *("hh", "ih", "iy", "jh", "k", "l", "m", "n", "ng", "ow", "oy", "p", "r", "s", "sh", "t", "th", "uh"),
    *("uw", "v", "w", "y", "z", "zh", "axr", "el", "em", "en", "other"),
)
_PHONE_IDS = {phone: i for i, phone in enumerate(PHONES)}
_OTHER = _PHONE_IDS["other"]


def copy_libraries(target: Path, source: Path = DEBIAN_FOLDER) -> int:
    """Copy what `Flite` opens into `target`; the bytes copied. Raises FileNotFoundError with the package."""
    target.mkdir(parents=True, exist_ok=True)
    missing = [name for name in LIBRARIES if not (source / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{source} lacks {', '.join(missing)}: install Debian's libflite1 and libasound2"
        )
    return sum(Path(shutil.copyfile(source / name, target / name)).stat().st_size for name in LIBRARIES)


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


@dataclass(frozen=True, slots=True)
class Utterance:
    """samples: [S] int16 at 16 kHz. phones: ids; ends_s: where each of them ends, in seconds."""

    samples: NDArray[np.int16]
    phones: NDArray[np.uint8]
    ends_s: NDArray[np.float64]


class Flite:
    """One process's flite with all voices. Not for threads."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError when a library can't be opened."""
        libraries = {name: ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES}
        self._flite: Any = libraries["libflite.so.1"]
        self._declare()
        self._flite.flite_init()
        self._voices = {}
        for voice in VOICES:
            register = getattr(libraries[f"libflite_cmu_us_{voice}.so.1"], f"register_cmu_us_{voice}")
            register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
            self._voices[voice] = register(None)

    def _declare(self) -> None:
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "flite_synth_text": (pointer, [text, pointer]),
            "utt_relation": (pointer, [pointer, text]),
            "utt_wave": (ctypes.POINTER(_Wave), [pointer]),
            "relation_head": (pointer, [pointer]),
            "item_next": (pointer, [pointer]),
            "item_feat_string": (text, [pointer, text]),
            "item_feat_float": (ctypes.c_float, [pointer, text]),
            "delete_utterance": (None, [pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._flite, name)
            function.restype, function.argtypes = result, arguments

    def say(self, text: str, voice: str) -> Utterance:
        """Raises ValueError for text that isn't ASCII, and for a voice at another rate."""
        if not text.isascii():
            raise ValueError(f"flite reads ASCII, got {text!r}")
        flite = self._flite
        utterance = flite.flite_synth_text(text.encode(), self._voices[voice])
        try:
            wave = flite.utt_wave(utterance).contents
            if wave.sample_rate != SAMPLE_RATE_HZ:
                raise ValueError(f"{voice} has {wave.sample_rate} Hz, expected {SAMPLE_RATE_HZ}")
            samples = np.ctypeslib.as_array(wave.samples, (wave.num_samples,)).astype(np.int16)
            phones, ends = self._segments(utterance)
        finally:
            flite.delete_utterance(utterance)
        return Utterance(samples, np.array(phones, np.uint8), np.array(ends, np.float64))

    def _segments(self, utterance: Any) -> tuple[list[int], list[float]]:
        flite, phones, ends = self._flite, [], []
        item = flite.relation_head(flite.utt_relation(utterance, b"Segment"))
        while item:
            phones.append(_PHONE_IDS.get(flite.item_feat_string(item, b"name").decode(), _OTHER))
            ends.append(float(flite.item_feat_float(item, b"end")))
            item = flite.item_next(item)
        return phones, ends
