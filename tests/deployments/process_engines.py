"""An engine without a mind of its own, for processes that must start at once: it does what each request brings along."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Order:
    """In a request's place. do: called over there with the engine and the request's id."""

    request_id: str
    do: Callable


@dataclass(frozen=True)
class PuppetStats:
    """known: streams that the outbox would still pass on."""

    known: int
    open: tuple[str, ...]
    cancelled: tuple[str, ...]


class Puppet:
    def __init__(self, outbox):
        self.outbox, self.open, self.cancelled, self.illness = outbox, [], [], None

    def start(self): ...

    def stop(self): ...

    def submit(self, order):
        order.do(self, order.request_id)
        self.open.append(order.request_id)

    def cancel(self, request_id):
        if request_id in self.open:
            self.open.remove(request_id)
        self.cancelled.append(request_id)

    def check_health(self):
        if self.illness is not None:
            raise self.illness

    def stats(self):
        return PuppetStats(len(self.outbox._streams), tuple(self.open), tuple(self.cancelled))

    def say(self, request_id, *items):
        for item in items:
            self.outbox.put(request_id, item)
        self.outbox.flush()


# ---------------------------------------------------------------- what opens it, or doesn't
def open_puppet(settings, outbox):
    return Puppet(outbox)


def open_failing(error, outbox):
    raise error


def open_dying(code, outbox):
    import os

    os._exit(code)


def open_slowly(settings, outbox):
    time.sleep(1000)


class FailingStart(Puppet):
    def start(self):
        raise MemoryError("warming up needs 80 GiB")


def open_failing_start(settings, outbox):
    return FailingStart(outbox)


class Stubborn(Puppet):
    def stop(self):
        time.sleep(1000)


def open_stubborn(settings, outbox):
    return Stubborn(outbox)


# ---------------------------------------------------------------- what requests bring along
def nothing(engine, request_id): ...


def speak(engine, request_id, *, items):
    engine.say(request_id, *items)


def count(engine, request_id, *, num_items, per_flush, num_bytes=8, done=None):
    """Numbered items, from a thread of the engine's. done: a file, made when the last is flushed."""

    def run():
        for first in range(0, num_items, per_flush):
            numbers = range(first, min(first + per_flush, num_items))
            engine.say(request_id, *(number.to_bytes(8, "little").ljust(num_bytes) for number in numbers))
        if done is not None:
            Path(done).touch()

    threading.Thread(target=run, daemon=True).start()


def refuse(engine, request_id, *, error):
    raise error


def fall_ill(engine, request_id, *, error):
    engine.illness = error


def log(engine, request_id):
    try:
        raise ZeroDivisionError("in a step")
    except ZeroDivisionError:
        logging.getLogger("qwen3tts_core.engine").exception("request %s: odd", request_id)


def hang(engine, request_id, *, with_interpreter):
    """An engine's thread that never comes back, as from a GPU that doesn't answer; it says so first."""

    def run():
        engine.say(request_id, b"hangs")
        (ctypes.PyDLL if with_interpreter else ctypes.CDLL)(None).sleep(1000)

    threading.Thread(target=run, daemon=True).start()


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def talk_nonsense(engine, request_id):
    engine.outbox._link.send([b"\xff" + bytes(12)])  # an empty frame of no kind


def put_unknown(engine, request_id):
    """An error of a kind that the replica has never heard of: it can be pickled here alone."""
    engine.say(request_id, _made_here("Unheard"))


def _made_here(name):
    kind = type(name, (Exception,), {"__module__": __name__})
    globals()[name] = kind
    return kind("of")


def raise_unpicklable(engine, request_id):
    raise Unpicklable("this", "that")
