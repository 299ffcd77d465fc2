"""The kinds of load by name, each a function from arguments and a run to measured levels."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp

from load_tests.client import Target, get_json
from load_tests.jobs import JobMaker, long_texts, made_up_clips, read_clips
from load_tests.run import Run, say
from load_tests.scenarios import LEAVER, STEADY, WARM_UP, Closed, OpenLoop, Players, Storm
from load_tests.uploads import uploaded_voices
from load_tests.workers import Pass, PassResult

Command = Callable[[argparse.Namespace, Run, Target, JobMaker], None]

_RECOVERY_S = 30.0


def closed(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker) -> None:
    """N sentences at each concurrency, or as many as there is time for."""
    for concurrency in arguments.concurrency:
        measure_closed(arguments, run, Pass(target, Closed(concurrency), jobs), str(concurrency))


def measure_closed(
    arguments: argparse.Namespace,
    run: Run,
    one_pass: Pass,
    name: str,
    around: Callable[[PassResult | None], dict[str, Any]] = lambda _: {},
    **fields: Any,
) -> dict[str, Any]:
    """One concurrency of a closed loop, warmed up. one_pass: its scenario tells the concurrency alone."""
    assert isinstance(one_pass.scenario, Closed)
    concurrency = one_pass.scenario.concurrency
    count = None if arguments.seconds else arguments.sentences
    scenario = replace(one_pass.scenario, num_requests=count, seconds=arguments.seconds)
    if arguments.warm_up:
        warming = Closed(concurrency, max(arguments.warm_up, min(concurrency, arguments.warm_up_most)))
        run.warm_up(replace(one_pass, scenario=warming), name)
    wav_folder = run.wav_folder(name) if arguments.save_wavs else None
    level = {"name": name, "scenario": "closed", "concurrency": concurrency, **fields}
    return run.measure(
        level, replace(one_pass, scenario=scenario, wav_folder=wav_folder), arguments.repeats, around
    )


def open_loop(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker) -> None:
    """Poisson arrivals at each rate: warm-up, then the window that counts."""
    for rate in arguments.rates:
        scenario = OpenLoop(rate, arguments.warm_up_s, arguments.window_s, max(arguments.seed, 0))
        level = {"name": f"{rate:g}/s", "scenario": "open", "rate_per_s": rate}
        run.measure(level, Pass(target, scenario, jobs), keep=lambda record: record.tag != WARM_UP)


def players(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker) -> None:
    """Listeners in real time."""
    for concurrency in arguments.concurrency:
        scenario = Players(concurrency, arguments.seconds)
        level = {"name": f"{concurrency} players", "scenario": "players", "concurrency": concurrency}
        run.measure(level, Pass(target, scenario, jobs))


def long(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker) -> None:
    """Long texts at each length and concurrency."""
    for num_chars in arguments.chars:
        texts = replace(jobs, texts=long_texts(jobs.texts, num_chars))
        for concurrency in arguments.concurrency:
            one_pass = Pass(target, Closed(concurrency), texts)
            measure_closed(
                arguments, run, one_pass, f"{num_chars} characters x {concurrency}", chars=num_chars
            )


def clones(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker) -> None:
    """Cloned voices, each used again and again; the warm-up has used each once."""
    clips = (
        read_clips(arguments.clips, arguments.voices) if arguments.clips else made_up_clips(arguments.voices)
    )
    arguments.warm_up = max(arguments.warm_up, len(clips))
    if arguments.sent == "inline":
        _closed_with(arguments, run, target, replace(jobs, clips=clips), "clips")
        return
    with uploaded_voices(target, clips) as names:
        _closed_with(arguments, run, target, replace(jobs, voices=names), "uploaded voices")


def _closed_with(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker, what: str) -> None:
    for concurrency in arguments.concurrency:
        one_pass = Pass(target, Closed(concurrency), jobs)
        measure_closed(arguments, run, one_pass, f"{what} x {concurrency}", voices=arguments.voices)


def storm(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker) -> None:
    """Clients that leave, beside steady ones; then, how soon the server holds as many as before."""

    def count_leavers(result: PassResult | None) -> dict[str, Any]:
        leavers = [record for record in result.records if record.tag == LEAVER] if result else []
        return {
            "num_left": sum(record.outcome == "left" for record in leavers),
            "num_leavers_refused": sum(record.outcome == "refused" for record in leavers),
            "num_leavers_failed": sum(record.outcome == "failed" for record in leavers),
        }

    for concurrency in arguments.concurrency:
        scenario = Storm(concurrency, arguments.steady, arguments.seconds)
        level = {"name": f"{concurrency} leavers", "scenario": "storm", "concurrency": concurrency}
        noted = run.measure(
            level, Pass(target, scenario, jobs), 1, count_leavers, lambda record: record.tag == STEADY
        )
        noted["recovered_s"] = _time_recovery(run, target, jobs, concurrency + arguments.steady)
        run.save()


def _time_recovery(run: Run, target: Target, jobs: JobMaker, count: int) -> float | None:
    """Seconds from the storm's end until `count` streams at once are all taken to their end; None: not in time."""
    began = time.perf_counter()
    while time.perf_counter() < began + _RECOVERY_S:
        tried_at = time.perf_counter()
        result = run.warm_up(Pass(target, Closed(count, count), jobs), f"all {count} at once")
        if all(record.outcome == "ok" for record in result.records):
            say(f"{tried_at - began:.2f} s after the storm the server took {count} streams at once")
            return tried_at - began
    say(f"{_RECOVERY_S:g} s after the storm the server still doesn't take {count} streams at once")
    return None


def refusals(arguments: argparse.Namespace, run: Run, target: Target, jobs: JobMaker) -> None:
    """More clients than the server takes: how soon the others are told so.

    They begin within `pause_s`, not all in one moment, and come again half of it to all of it after a refusal.
    """
    for concurrency in arguments.concurrency:
        scenario = Closed(concurrency, seconds=arguments.seconds, pause_s=arguments.pause_s)
        level = {"name": f"{concurrency} clients", "scenario": "refusals", "concurrency": concurrency}
        noted = run.measure(level, Pass(target, scenario, jobs))
        if not noted["num_refused"]:
            say(f"none of {concurrency} clients was refused: the server is not full, ask with more")


COMMANDS: dict[str, Command] = {
    "closed": closed,
    "open": open_loop,
    "players": players,
    "long": long,
    "clones": clones,
    "storm": storm,
    "refusals": refusals,
}


async def first_model(target: Target) -> str:
    """The name of the server's first model. Raises OSError when nobody answers, ValueError for a strange answer."""
    try:
        answer = await get_json(target, "v1/models")
        return str(answer["data"][0]["id"])
    except aiohttp.ClientError as error:
        raise OSError(f"{target.url}/v1/models: {error}") from error
    except (LookupError, TypeError) as error:
        raise ValueError(f"{target.url}/v1/models names no model") from error


def find_model(target: Target) -> Target:
    """The target with the name of the model to ask for, as the server tells it."""
    if target.model is not None:
        return target
    return replace(target, model=asyncio.run(first_model(target)))
