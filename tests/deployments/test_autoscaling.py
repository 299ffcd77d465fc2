"""The policy as arithmetic: monotone, bounded, steady, never below what running streams need."""

import io
import math
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.config import AutoscalingPolicy

from deployments.autoscaling import (
    TOO_MANY_FOR_S,
    FreeSlotsPolicy,
    ReplicaLoad,
    ScalingLimits,
    wanted_replicas,
)
from deployments.scaling_args import ScalingArgs

LIMITS = ScalingLimits(max_use=0.8, min_use=0.5, min_slack_s=0.0)
EASY, LATE = 5.0, -1.0


def load(streams, queued=0, slots=10, slack_s=EASY):
    return ReplicaLoad(streams, queued, slots, slack_s)


@st.composite
def loads(draw, min_size=0):
    slots = draw(st.integers(1, 64))
    streams = st.floats(0, slots)
    one = st.builds(ReplicaLoad, streams, st.floats(0, 100), st.just(slots), st.floats(-10, 10))
    return draw(st.lists(one, min_size=min_size, max_size=8))


limits = (
    st.tuples(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(-1, 1))
    .filter(lambda three: three[1] < three[0])
    .map(lambda three: ScalingLimits(*three))
)
waiting = st.floats(0, 500)
targets = st.integers(0, 20)


# ---------------------------------------------------------------- examples
@pytest.mark.parametrize(
    ("now", "num_waiting", "target", "wanted"),
    [
        ([load(8)], 0, 1, 1),  # 0.8 in use is still what it is for
        ([load(9)], 0, 1, 2),
        ([load(10, queued=30)], 0, 1, 5),  # all of the queue, at 0.8
        ([load(8)], 4, 1, 2),  # requests that no replica has taken count, too
        ([load(6), load(0)], 0, 2, 2),  # one would do at 0.8, but not at 0.5
        ([load(5), load(0)], 0, 2, 1),
        ([load(0), load(0)], 0, 2, 0),  # Serve's bounds and delays say whether
        ([load(0.1)], 0, 1, 1),  # a stream in the look-back
        ([load(9)], 0, 2, 2),  # one is starting already
        ([load(4, slack_s=LATE)], 0, 1, 2),  # 4 is all that it can
        ([load(4, slack_s=LATE), load(0)], 0, 2, 2),  # and the other takes what comes: no third
        ([], 0, 3, 3),
        ([], 2, 0, 1),
        ([], 0, 0, 0),
    ],
)  # fmt: skip
def test_what_a_load_wants(now, num_waiting, target, wanted):
    assert wanted_replicas(now, num_waiting, target, LIMITS) == wanted


# ---------------------------------------------------------------- properties
@given(loads(min_size=1), waiting, targets, limits)
def test_never_fewer_than_the_running_streams_need(now, num_waiting, target, limits):
    wanted = wanted_replicas(now, num_waiting, target, limits)
    assert wanted * now[0].slots >= sum(load.streams for load in now) - 1e-6


@given(loads(min_size=1), waiting, targets, limits, st.data())
def test_more_load_never_wants_fewer(now, num_waiting, target, limits, data):
    number = data.draw(st.integers(0, len(now) - 1))
    one = now[number]
    more = one._replace(
        streams=data.draw(st.floats(one.streams, one.slots)), queued=one.queued + data.draw(waiting)
    )
    heavier = [*now[:number], more, *now[number + 1 :]]
    waiting_too = num_waiting + data.draw(waiting)
    assert wanted_replicas(heavier, waiting_too, target, limits) >= wanted_replicas(
        now, num_waiting, target, limits
    )


@given(loads(min_size=1), waiting, targets, limits, st.data())
def test_less_slack_never_wants_fewer(now, num_waiting, target, limits, data):
    number = data.draw(st.integers(0, len(now) - 1))
    later = now[number]._replace(slack_s=data.draw(st.floats(-10, now[number].slack_s)))
    worse = [*now[:number], later, *now[number + 1 :]]
    assert wanted_replicas(worse, num_waiting, target, limits) >= wanted_replicas(
        now, num_waiting, target, limits
    )


@given(st.floats(0.01, 500), st.integers(1, 64), st.integers(1, 20), limits)
def test_a_steady_load_settles_at_once_and_stays(streams, slots, num_replicas, limits):
    """Whatever it starts from; spread evenly over whatever there is."""

    def spread(count):
        each = streams / count
        running = min(each, slots)
        return [ReplicaLoad(running, each - running, slots, EASY) for _ in range(count)]

    settled = wanted_replicas(spread(num_replicas), 0, num_replicas, limits)
    assert wanted_replicas(spread(settled), 0, settled, limits) == settled
    assert settled >= math.ceil(streams / (limits.max_use * slots) - 1e-6)


@given(st.floats(0.1, 200), st.integers(1, 64), limits)
def test_it_shrinks_only_to_where_it_would_not_grow(streams, slots, limits):
    """Hysteresis: what it shrinks to takes more load before it wants more."""
    many = [ReplicaLoad(min(streams / 20, slots), 0, slots, EASY)] * 20
    demand = sum(load.streams for load in many)
    fewer = wanted_replicas(many, 0, 20, limits)
    if fewer < 20:
        assert demand <= fewer * slots * limits.min_use + 1e-6


# ---------------------------------------------------------------- as Serve has it
def context(metrics, target=1, waiting=0.0, lowest=0, highest=4, state=None, now=1_000.0):
    return SimpleNamespace(
        policy_state=state or {},
        current_time=now,
        aggregated_metrics=metrics,
        total_queued_requests=waiting,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=lowest,
        capacity_adjusted_max_replicas=highest,
    )


def serves_policy(**args):
    """Through Serve's own code, pickled by value as it sends it to the controller."""
    config = ScalingArgs(max_replicas=4, **args).autoscaling_config["policy"]
    policy = AutoscalingPolicy(**config)
    sent = AutoscalingPolicy.from_serialized_policy_def(
        {"policy_function": policy.policy_function, "policy_kwargs": policy.policy_kwargs},
        policy.get_serialized_policy_def(),
    )
    return _resolve_policy_callable(sent)


def test_serve_runs_it_with_the_limits_of_the_args():
    metrics = {"streams": {"a": 6.0}, "queued": {"a": 0.0}, "slots": {"a": 10.0}, "slack_s": {"a": 5.0}}
    assert serves_policy()(context(metrics)) == (1, {})
    assert serves_policy(max_use=0.5, min_use=0.4)(context(metrics)) == (2, {})
    wanted, _ = serves_policy(min_slack_s=6.0)(context(metrics))
    assert wanted == 2


def test_what_serve_sends_to_its_controller_needs_nothing_of_ours():
    config = ScalingArgs(max_replicas=4).autoscaling_config["policy"]
    modules = ImportsOf(AutoscalingPolicy(**config).get_serialized_policy_def()).modules
    assert not [name for name in modules if name.partition(".")[0] in ("deployments", "qwen3tts_core")]


class ImportsOf(pickle.Unpickler):
    """The modules that something pickled imports when it is read."""

    def __init__(self, pickled):
        super().__init__(io.BytesIO(pickled))
        self.modules = set()
        self.load()

    def find_class(self, module, name):
        self.modules.add(module)
        return super().find_class(module, name)


@given(loads(), waiting, targets, st.integers(0, 3), st.integers(3, 6))
def test_the_answer_is_within_the_bounds(now, num_waiting, target, lowest, highest):
    metrics = {
        name: {str(number): getattr(load, name) for number, load in enumerate(now)}
        for name in ReplicaLoad._fields
    }
    policy = FreeSlotsPolicy(*LIMITS)
    wanted, state = policy(context(metrics, target, num_waiting, lowest, highest))
    assert lowest <= wanted <= highest
    assert cloudpickle.loads(cloudpickle.dumps(policy))(
        context(metrics, target, num_waiting, lowest, highest)
    ) == (wanted, state)


class Cluster:
    """Replicas of 10 slots that share the streams evenly; with more than `keeps_up` each they are late."""

    def __init__(self, keeps_up):
        self._policy, self._keeps_up = serves_policy(), keeps_up
        self._state, self.now = {}, 1_000.0

    def run(self, num_streams, num_replicas):
        """The replicas, time after time, each time what was wanted before."""
        each, seen = num_streams / num_replicas, []
        for _ in range(12):
            slack_s = LATE if each > self._keeps_up else EASY
            row = {"streams": min(each, 10), "queued": max(0, each - 10), "slots": 10, "slack_s": slack_s}
            metrics = {name: dict.fromkeys(range(num_replicas), value) for name, value in row.items()}
            state = {"of_serve": 1, **self._state}
            now = context(metrics, num_replicas, lowest=1, highest=20, state=state, now=self.now)
            num_replicas, self._state = self._policy(now)
            each = num_streams / num_replicas
            seen.append(num_replicas)
            self.now += 10
        return seen


@pytest.mark.parametrize("start", [1, 3, 20])
@pytest.mark.parametrize(("num_streams", "keeps_up"), [(3, 2), (5, 2), (9, 8), (12, 4), (40, 6)])
def test_it_does_not_shrink_to_where_it_was_late(num_streams, keeps_up, start):
    seen = Cluster(keeps_up).run(num_streams, start)
    assert len(set(seen[-4:])) == 1, seen
    assert num_streams / seen[-1] <= keeps_up


def test_it_shrinks_all_the_same_when_there_is_less_to_do():
    cluster = Cluster(keeps_up=2)
    assert cluster.run(6, 1)[-1] > 1
    assert cluster.run(2, 3)[-1] == 1


def test_that_so_many_were_too_many_is_forgotten_in_the_end():
    cluster = Cluster(keeps_up=2)
    (*_, grown) = cluster.run(3, 1)
    cluster._keeps_up = 10  # whatever slowed it is gone
    assert cluster.run(3, grown)[-1] == grown
    cluster.now += TOO_MANY_FOR_S
    assert cluster.run(3, grown)[-1] == 1


def test_a_replica_that_has_not_reported_all_is_not_counted_as_idle():
    """Serve records its own metric before the first of ours."""
    metrics = {"running_requests": {"a": 3.0, "b": 1.0}}
    assert FreeSlotsPolicy(*LIMITS)(context(metrics, target=2)) == (2, {})
    part = {**metrics, "streams": {"a": 9.0}, "queued": {"a": 0.0}, "slots": {"a": 10.0}}
    assert FreeSlotsPolicy(*LIMITS)(context(part, target=2)) == (2, {})
