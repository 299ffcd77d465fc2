"""Load on an OpenAI-style speech server, measured at the client's socket.

    python -m load_tests closed   --url http://127.0.0.1:8000 --out runs/a --concurrency 1,8,32
    python -m load_tests open     --out runs/a --rates 1,6,10       Poisson arrivals
    python -m load_tests players  --out runs/a --concurrency 32     listeners in real time
    python -m load_tests long     --out runs/a --chars 1000,3000
    python -m load_tests clones   --out runs/a --voices 4 --sent uploaded
    python -m load_tests storm    --out runs/a --concurrency 24     clients that go away
    python -m load_tests refusals --out runs/a --concurrency 96     a server that is full
    python -m load_tests.report runs/a
    python -m load_tests.wer runs/a                                 needs --save-wavs

--engine says whose dialect the server speaks: ours, vllm-omni, sglang-omni, mstar. Every kind writes
NAME.json and NAME.jsonl into --out (`run.py`). Exits with 1 when an answer failed or audio was missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.adapters import ADAPTERS
from load_tests.client import Target
from load_tests.commands import COMMANDS, find_model
from load_tests.environment import describe_environment
from load_tests.jobs import SENTENCES, JobMaker, read_texts
from load_tests.run import Run, say
from load_tests.workers import Workers


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        target = find_model(target_of(arguments))
        jobs = jobs_of(arguments)
        about = {
            "kind": arguments.kind,
            "label": arguments.label or target.engine,
            "engine": target.engine,
            "model": target.model,
            "arguments": {name: plain(value) for name, value in vars(arguments).items() if name != "api_key"},
            "environment": describe_environment(["python", "-m", "load_tests", *(argv or sys.argv[1:])]),
        }
        with Workers(arguments.workers) as workers:
            run = Run(
                arguments.out,
                arguments.name or arguments.kind,
                about,
                workers,
                ends_by_limit=arguments.ends_by_limit,
            )
            try:
                COMMANDS[arguments.kind](arguments, run, target, jobs)
            finally:
                run.close()
    except (OSError, ValueError, RuntimeError) as error:
        print(f"==> {error}", file=sys.stderr)
        return 1
    say(f"written to {arguments.out}; python -m load_tests.report {arguments.out} draws tables and plots")
    return verdict(run.levels)


def verdict(levels: Sequence[dict[str, Any]]) -> int:
    """An exit status: 1 when an answer failed, or came with other audio than it should have."""
    bad = [level["name"] for level in levels if level["num_failed"] or level["missing"]]
    if bad:
        print(f"==> answers failed or were not whole: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


def target_of(arguments: argparse.Namespace) -> Target:
    return Target(
        url=arguments.url,
        engine=arguments.engine,
        model=arguments.model,
        api_key=arguments.api_key,
        extra=dict(arguments.extra),
        events=arguments.events,
        timeout_s=arguments.timeout_s,
    )


def jobs_of(arguments: argparse.Namespace) -> JobMaker:
    return JobMaker(
        texts=read_texts(arguments.texts),
        seed=None if arguments.seed < 0 else arguments.seed,
        frames=arguments.frames,
        voice=arguments.voice,
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="load_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, command in COMMANDS.items():
        kind = kinds.add_parser(name, help=(command.__doc__ or "").splitlines()[0])
        add_common(kind)
        if name != "open":
            kind.add_argument("--concurrency", type=whole_numbers, default=[1, 8, 32], help="a list: 1,8,32")
        if name in ("closed", "long", "clones"):
            add_closed(kind)
        if name in ("players", "storm", "refusals"):
            kind.add_argument("--seconds", type=float, default=30.0, help="of each level (30)")
    _add_own(kinds.choices)
    return parser


def _add_own(kinds: dict[str, argparse.ArgumentParser]) -> None:
    kinds["open"].add_argument("--rates", type=numbers, default=[1.0, 6.0, 10.0], help="requests/s, a list")
    kinds["open"].add_argument("--warm-up-s", type=float, default=30.0)
    kinds["open"].add_argument("--window-s", type=float, default=60.0)
    kinds["long"].add_argument("--chars", type=whole_numbers, default=[1000, 3000], help="lengths, a list")
    kinds["clones"].add_argument("--voices", type=int, default=4, help="how many (4)")
    kinds["clones"].add_argument("--sent", choices=("inline", "uploaded"), default="inline")
    kinds["clones"].add_argument(
        "--clips", type=Path, help="folder of NAME.wav and NAME.txt; default: made up"
    )
    kinds["storm"].add_argument("--steady", type=int, default=4, help="listeners who stay (4)")
    kinds["refusals"].add_argument(
        "--pause-s", type=float, default=1.0, help="of a client after a refusal, at most (1)"
    )


def add_common(parser: argparse.ArgumentParser, default_out: Path | None = None) -> None:
    """What every kind takes, and `bench_serve`."""
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--engine", choices=sorted(ADAPTERS), default="ours", help="the server's dialect")
    parser.add_argument(
        "--out", type=Path, required=default_out is None, default=default_out, help="folder for results"
    )
    parser.add_argument("--name", help="of the result files; default: the kind")
    parser.add_argument("--label", help="of the row in tables; default: the engine")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--voice")
    parser.add_argument("--api-key")
    parser.add_argument("--extra", type=key_and_value, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--events", action="store_true", help="ask for server-sent events, which tell frames")
    parser.add_argument("--texts", type=Path, default=SENTENCES, help="a file, one text a line")
    parser.add_argument("--seed", type=int, default=0, help="of the first request; -1 sends none")
    parser.add_argument("--frames", type=frame_range, metavar="LOW-HIGH", help="limit drawn per request")
    parser.add_argument(
        "--ends-by-limit", action="store_true", help="fewer frames than the limit are missing"
    )
    parser.add_argument("--workers", type=int, default=2, help="client processes (2)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one request")


def add_closed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sentences", type=int, default=200, help="requests of a repeat (200)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of a repeat, instead of --sentences")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="requests before each level, or one a client (3)"
    )
    parser.add_argument("--warm-up-most", type=int, default=64, help="of those one a client (64)")
    parser.add_argument("--save-wavs", action="store_true", help="for load_tests.wer")


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def whole_numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"1 or more expected, got {text}")
    return values


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def frame_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    limits = int(low), int(high or low)
    if not 1 <= limits[0] <= limits[1]:
        raise argparse.ArgumentTypeError(f"LOW-HIGH expected, from 1 on, got {text}")
    return limits


def key_and_value(text: str) -> tuple[str, Any]:
    """`name=value`; a value that is no JSON is a string."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"KEY=VALUE expected, got {text}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


if __name__ == "__main__":
    sys.exit(main())
