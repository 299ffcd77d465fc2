import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.streaming.player import Player


def player_of(*writes):
    player = Player()
    for at_s, audio_s in writes:
        player.got(at_s, audio_s)
    return player


def test_audio_that_comes_in_time_is_no_wait():
    player = player_of((10.0, 0.08), (10.0625, 0.32), (10.3, 0.96))
    assert player.waited_s == 0
    assert not player.has_underrun
    assert player.gaps_s == pytest.approx([0.0625, 0.2375])


def test_an_underrun_is_a_wait_of_more_than_a_tenth_of_a_second():
    assert not player_of((0, 0.08), (0.17, 0.2)).has_underrun
    player = player_of((0, 0.08), (0.19, 0.2))
    assert player.has_underrun
    assert player.waited_s == pytest.approx(0.11)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=20))
def test_the_wait_is_what_a_player_that_stops_and_goes_on_waits_in_all(steps):
    """Against the player itself: it holds seconds of audio, plays while it has some, and counts the rest."""
    player, now, audio, buffered, waited = Player(), 0.0, 0.0, 0.0, 0.0
    for i, (pause, more) in enumerate(steps):
        if i:
            now += pause
            waited += max(0.0, pause - buffered)
            buffered = max(0.0, buffered - pause)
        audio, buffered = audio + more, buffered + more
        player.got(now, audio)
    assert player.waited_s == pytest.approx(waited, abs=1e-9)
