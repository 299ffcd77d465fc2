import argparse

import pytest

from load_tests import bench_serve
from load_tests.__main__ import build_parser, frame_range, jobs_of, key_and_value, target_of


def test_values_are_json_or_else_words():
    assert key_and_value("temperature=0.5") == ("temperature", 0.5)
    assert key_and_value("codec_dtype=float16") == ("codec_dtype", "float16")
    assert key_and_value('a={"b": 1}') == ("a", {"b": 1})
    with pytest.raises(argparse.ArgumentTypeError):
        key_and_value("float16")


def test_frame_ranges():
    assert frame_range("60-112") == (60, 112)
    assert frame_range("5") == (5, 5)
    for wrong in ("0-3", "9-3"):
        with pytest.raises(argparse.ArgumentTypeError):
            frame_range(wrong)


def test_arguments_become_a_target_and_jobs():
    arguments = build_parser().parse_args(
        ["closed", "--out", "x", "--engine", "mstar", "--seed", "-1", "--extra", "language=Chinese"]
    )
    assert target_of(arguments).adapter.name == "mstar"
    assert target_of(arguments).extra == {"language": "Chinese"}
    assert jobs_of(arguments).seed is None
    assert arguments.concurrency == [1, 8, 32]


def test_bench_serve_gives_as_many_slots_as_its_highest_concurrency_unless_told_otherwise():
    parser = bench_serve.build_parser()
    arguments = parser.parse_args(["--checkpoint", "/x", "--concurrency", "1,96"])
    assert bench_serve.changes_of(arguments) == {"talker.num_slots": 96, "checkpoint": "/x"}
    arguments = parser.parse_args(
        ["--set", "talker.num_slots=32", "--set", "transport.talker_to_codec=value"]
    )
    assert bench_serve.changes_of(arguments) == {"talker.num_slots": 32, "transport.talker_to_codec": "value"}
    assert (arguments.seconds, arguments.frames, arguments.concurrency) == (
        20.0,
        (60, 112),
        [1, 8, 32, 64, 128],
    )


def test_bench_serve_takes_variables_of_deployments():
    parser = bench_serve.build_parser()
    found = parser.parse_args(["--env", "Talker:A=1", "--env", "Codec:B=x=y:z"]).env
    assert found == [("Talker", "A", "1"), ("Codec", "B", "x=y:z")]
    for wrong in ("Talker", "Talker:A", ":A=1", "Talker:=1"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--env", wrong])


def test_bench_serve_takes_counts_of_replicas_by_name():
    parser = bench_serve.build_parser()
    assert parser.parse_args(["--replicas", "Ingress=2,Codec=3"]).replicas == {"Ingress": 2, "Codec": 3}
    assert parser.parse_args([]).replicas == {}
    for wrong in ("Codec", "Codec=", "Codec=0", "Codec=x", "=2", "Codec=1,"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench_serve.replica_counts(wrong)


def test_bench_serve_measures_no_fewer_replicas_than_were_asked_for():
    looks = iter([{"Codec": 1}, {"Codec": 2, "Ingress": 1}])
    bench_serve.wait_for_replicas({"Codec": 2}, lambda: next(looks))
    assert next(looks, None) is None
    bench_serve.wait_for_replicas({}, lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="1 of 2 of Codec, 0 of 1 of Ingress: is there no room"):
        bench_serve.wait_for_replicas(
            {"Codec": 2, "Ingress": 1, "Talker": 1}, lambda: {"Codec": 1, "Talker": 1}, -1
        )
