"""A picture of how a WAV sounds: frequency over time, in decibels.

    python -m load_tests.spectrogram hello.wav hello.png

Any rate and bit depth that libsndfile reads; channels are averaged. Needs the extra `load`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
from matplotlib import colormaps, mlab
from matplotlib.figure import Figure
from numpy.typing import NDArray

_WINDOW_S, _STEP_S = 0.03, 0.01
"""Fine enough to see a voice's harmonics, and short enough to see its consonants."""
FLOOR_DB = -80.0
"""Below the loudest point; what is quieter looks the same."""
_NUM_COLOURS = 32  # 2.5 dB each: half the file's size


class Spectrogram(NamedTuple):
    """levels_db: [bins, columns], 0 is the loudest; frequencies_hz: [bins]; times_s: [columns], their middles."""

    levels_db: NDArray[np.float64]
    frequencies_hz: NDArray[np.float64]
    times_s: NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="load_tests.spectrogram",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wav", type=Path)
    parser.add_argument("png", type=Path)
    arguments = parser.parse_args(argv)
    try:
        draw(arguments.wav, arguments.png)
    except (OSError, ValueError, soundfile.SoundFileError) as error:
        print(f"==> {error}", file=sys.stderr)
        return 1
    return 0


def spectrogram(samples: NDArray[np.float64], sample_rate_hz: int) -> Spectrogram:
    """samples: [N]. Raises ValueError where they are shorter than one window."""
    window = round(_WINDOW_S * sample_rate_hz)
    if len(samples) < window:
        raise ValueError(f"{len(samples)} samples at {sample_rate_hz} Hz: at least {window} are needed")
    overlap = window - round(_STEP_S * sample_rate_hz)
    drawn = mlab.specgram(samples, window, sample_rate_hz, noverlap=overlap)
    power, frequencies_hz, times_s = map(np.asarray, drawn)
    loudest = power.max() or 1.0  # silence is as quiet as can be drawn
    return Spectrogram(
        10 * np.log10(np.maximum(power / loudest, 10 ** (FLOOR_DB / 10))), frequencies_hz, times_s
    )


def draw(wav: Path, png: Path) -> None:
    """Raises OSError or SoundFileError for what can't be read or written, ValueError for what is too short."""
    samples, sample_rate_hz = soundfile.read(str(wav), always_2d=True)
    shown = spectrogram(samples.mean(axis=1), sample_rate_hz)
    seconds = len(samples) / sample_rate_hz
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        shown.levels_db,
        origin="lower",
        aspect="auto",
        extent=(0.0, seconds, 0.0, sample_rate_hz / 2000),
        vmin=FLOOR_DB,
        vmax=0.0,
        cmap=colormaps["magma"].resampled(_NUM_COLOURS),
        interpolation="nearest",
    )
    axes.set_xlabel("time, s")
    axes.set_ylabel("frequency, kHz")
    figure.colorbar(image, label="level, dB", pad=0.01)
    figure.savefig(png, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
