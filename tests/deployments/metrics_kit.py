"""A sink that remembers, in place of Ray's agent."""

from collections import defaultdict


class Memory:
    """counters, gauges: {(name, label values): number}; observed: {(name, label values): [value, …]}."""

    def __init__(self):
        self.counters, self.gauges, self.observed = defaultdict(float), {}, defaultdict(list)

    def add(self, counter, value, labels):
        assert value >= 0
        self.counters[self._key(counter, "counter", labels)] += value

    def set(self, gauge, value, labels):
        self.gauges[self._key(gauge, "gauge", labels)] = value

    def observe(self, histogram, value, labels):
        self.observed[self._key(histogram, "histogram", labels)].append(value)

    def _key(self, metric, kind, labels):
        assert metric.kind == kind
        assert set(labels) == set(metric.labels)
        assert all(isinstance(value, str) for value in labels.values())
        return metric.name.removeprefix("qwen3tts_"), *(labels[name] for name in metric.labels)
