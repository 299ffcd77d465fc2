from load_tests.autoscale import Moment, phases_of, table


def moment(second, phase, in_flight, talkers, nodes, done, failed=0):
    return Moment(second, phase, in_flight, (talkers, 1), (0, 0), (0, 0), nodes, done, 0, failed)


TIMELINE = [
    moment(0.0, "wake", 1, 0, 0, 0),
    moment(1.0, "wake", 1, 1, 1, 0),
    moment(2.0, "load 6", 6, 1, 1, 1),
    moment(3.0, "load 6", 5, 2, 1, 4),
    moment(4.0, "load 6", 6, 1, 2, 5, failed=1),
    moment(5.0, "rest", 0, 1, 2, 9, failed=1),
    moment(6.0, "rest", 0, 0, 0, 9, failed=1),
]


def test_every_request_is_in_one_phase():
    rows = phases_of(TIMELINE)
    assert [(row["phase"], row["done"], row["failed"]) for row in rows] == [
        ("wake", 1, 0),
        ("load 6", 8, 1),
        ("rest", 0, 0),
    ]


def test_a_phase_shows_each_change_and_its_own_load():
    _, load, rest = phases_of(TIMELINE)
    assert (load["Talker"], load["Codec"], load["nodes"]) == ("1 > 2 > 1", "1", "1 > 2")
    assert (load["seconds"], load["most in flight"]) == (3, 6)
    assert (rest["Talker"], rest["nodes"], rest["most in flight"]) == ("1 > 0", "2 > 0", 0)


def test_the_table_is_one_of_markdown():
    lines = table(phases_of(TIMELINE)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == {"|", "-"}
