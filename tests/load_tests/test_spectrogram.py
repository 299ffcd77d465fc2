import numpy as np
import pytest
import soundfile
from matplotlib import image

from load_tests.spectrogram import FLOOR_DB, main, spectrogram

RATE_HZ = 24_000


def tone(frequency_hz, seconds, level=0.5):
    return level * np.sin(2 * np.pi * frequency_hz * np.arange(int(seconds * RATE_HZ)) / RATE_HZ)


def test_a_tone_is_loudest_where_and_when_it_sounds():
    shown = spectrogram(np.concatenate([tone(1_000, 0.5), tone(5_000, 0.5)]), RATE_HZ)
    peaks_hz = shown.frequencies_hz[shown.levels_db.argmax(axis=0)]
    assert peaks_hz[shown.times_s < 0.48] == pytest.approx(1_000, abs=40)
    assert peaks_hz[shown.times_s > 0.52] == pytest.approx(5_000, abs=40)
    assert (shown.frequencies_hz[-1], shown.times_s[-1]) == pytest.approx((RATE_HZ / 2, 1.0), abs=0.03)


def test_levels_are_decibels_below_the_loudest():
    shown = spectrogram(np.concatenate([tone(1_000, 0.5), tone(1_000, 0.5, level=0.05)]), RATE_HZ)
    loud, quiet = (shown.levels_db[:, column].max() for column in (20, -20))
    assert (loud, quiet) == pytest.approx((0, -20), abs=0.5)


def test_silence_is_at_the_floor_and_no_warning():
    assert (spectrogram(np.zeros(RATE_HZ), RATE_HZ).levels_db == FLOOR_DB).all()


def bright_half(picture):
    """Where along the height of the plot most light is: 0 is its top, 1 its bottom."""
    rows = picture[20:-60, 100:-160, :3].sum(axis=(1, 2))
    return (rows * np.linspace(0, 1, len(rows))).sum() / rows.sum()


def test_a_wav_becomes_a_small_png_with_low_sounds_below(tmp_path):
    pictures = []
    for name, frequency_hz in (("low", 1_500), ("high", 10_500)):
        wav, png = tmp_path / f"{name}.wav", tmp_path / f"{name}.png"
        stereo = np.stack([tone(frequency_hz, 1.0), np.zeros(RATE_HZ)], axis=1)
        soundfile.write(wav, stereo, RATE_HZ, "PCM_16")
        assert main([str(wav), str(png)]) == 0
        assert 1_000 < png.stat().st_size < 300_000
        pictures.append(image.imread(png))
    low, high = map(bright_half, pictures)
    assert low > 0.6
    assert high < 0.4


@pytest.mark.parametrize("content", [None, b"", b"no audio at all", "short"])
def test_what_cannot_be_drawn_is_told_and_nothing_is_written(tmp_path, capsys, content):
    wav, png = tmp_path / "in.wav", tmp_path / "out.png"
    if content == "short":
        soundfile.write(wav, np.zeros(100), RATE_HZ, "PCM_16")
    elif content is not None:
        wav.write_bytes(content)
    assert main([str(wav), str(png)]) == 1
    assert capsys.readouterr().err.startswith("==> ")
    assert not png.exists()
