"""Budgets, checkpoints and resuming."""

import json

import pytest
import torch
from torch import nn

from checkpoints.speaking.recipe.code_corpus import CodeCorpus
from checkpoints.speaking.recipe.sitting import Journal, Sitting, seed_step, warm_cosine
from checkpoints.speaking.recipe.train_talker import REHEARSAL, TalkerTrainer, train_talker


class Clock:
    """Moves when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def sitting_of(file, parts, clock=None, **limits):
    limits = {"budget_s": 1e9, "planned_s": 1e9, **limits}
    return Sitting(file, parts, **limits, **({"clock": clock} if clock else {}))


def test_a_budget_ends_a_sitting_and_the_next_goes_on_there(tmp_path):
    clock, seen = Clock(), []
    for _ in range(3):
        sitting = sitting_of(tmp_path / "a.pt", {"m": nn.Linear(1, 1)}, clock, budget_s=10, planned_s=25)
        sitting.resume()
        for step in sitting.steps():
            seen.append(step)
            clock.now += 1
    assert [step.number for step in seen] == list(range(25))
    assert [step.progress for step in seen] == pytest.approx([i / 25 for i in range(25)])
    assert sitting.is_finished


def test_a_checkpoint_is_written_each_minute(tmp_path):
    clock, file = Clock(), tmp_path / "a.pt"
    sitting = sitting_of(file, {"m": nn.Linear(1, 1)}, clock, num_steps=200)
    saved = set()
    for _ in sitting.steps():
        clock.now += 1
        if file.exists():
            saved.add(torch.load(file, weights_only=True)["step"])
    assert saved == {60, 120, 180}


def test_a_step_that_fails_leaves_the_last_whole_checkpoint(tmp_path):
    clock, file = Clock(), tmp_path / "a.pt"
    sitting = sitting_of(file, {"m": nn.Linear(1, 1)}, clock)

    def fail_at_70():
        for step in sitting.steps():
            clock.now += 1
            if step.number == 70:
                raise RuntimeError("step 70")

    with pytest.raises(RuntimeError, match="step 70"):
        fail_at_70()
    again = sitting_of(file, {"m": nn.Linear(1, 1)}, clock)
    assert again.resume()
    assert again.step == 60


def test_a_checkpoint_of_other_parts_is_refused(tmp_path):
    sitting_of(tmp_path / "a.pt", {"m": nn.Linear(1, 1)}).save()
    with pytest.raises(ValueError, match=r"holds \['m'\], expected \['n'\]"):
        sitting_of(tmp_path / "a.pt", {"n": nn.Linear(1, 1)}).resume()


def test_a_training_that_was_stopped_goes_on_with_the_losses_of_the_whole_one(
    tmp_path, untrained, prompt_ids, code_file
):
    def train(name, stops):
        losses = []
        for stop in stops:
            torch.manual_seed(1)
            trainer = TalkerTrainer(untrained.config, REHEARSAL, torch.device("cpu"))
            clock = Clock()
            sitting = sitting_of(tmp_path / f"{name}.pt", trainer.parts, clock, num_steps=6, budget_s=stop)
            sitting.resume()
            corpus = CodeCorpus(code_file, prompt_ids, torch.device("cpu"))
            journal = Journal(tmp_path / f"{name}.jsonl", echo=lambda line: None)
            trainer.step = _ticking(trainer.step, clock)
            train_talker(trainer, sitting, corpus, seed=3, journal=journal)
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if "step" in row:
                losses.append((row["step"], row["first"], row["rest"], row["phones"]))
        return losses

    whole, cut = train("whole", [100]), train("cut", [2, 1, 100])
    assert [row[0] for row in cut] == [0, 1, 2, 3, 4, 5]
    assert cut == whole


def _ticking(step, clock):
    def ticked(*arguments):
        clock.now += 1
        return step(*arguments)

    return ticked


def test_a_steps_draws_follow_from_seed_and_step():
    def draw(seed, step):
        seed_step(seed, step)
        return torch.rand(3).tolist()

    assert draw(0, 5) == draw(0, 5)
    assert len({tuple(draw(seed, step)) for seed in range(3) for step in range(3)}) == 9


def test_the_rate_rises_then_falls_to_its_floor():
    rate = [warm_cosine(step, step / 100, warmup_steps=10, floor=0.1) for step in range(101)]
    assert rate[0] == pytest.approx(0.1)
    assert max(rate) == rate[9]
    assert rate[9:] == sorted(rate[9:], reverse=True)
    assert rate[-1] == pytest.approx(0.1)
