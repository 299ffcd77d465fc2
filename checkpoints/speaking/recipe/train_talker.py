"""The talker's training, teacher-forced in both text layouts.

    python -m checkpoints.speaking.recipe.run talker --budget-s 520 [--resume]

Group 0 at every frame, the end of speech weighted up; the other groups on a sample of the frames; and,
thrown away later, the phones of this frame and the next from the third layer, which teaches the
alignment in the first minutes. The history it reads is corrupted from the first step (`Corruption`).
Weights that are used are a running average.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from checkpoints.speaking.recipe.captured import CapturedStep, adamw, set_rate
from checkpoints.speaking.recipe.code_corpus import CodeCorpus
from checkpoints.speaking.recipe.sitting import Journal, Sitting, seed_step, warm_cosine
from checkpoints.speaking.recipe.talker_model import Batch, Corruption, TrainableTalker
from checkpoints.speaking.recipe.teacher import PHONES
from qwen3tts_core.config import CheckpointConfig

logger = logging.getLogger(__name__)

_IGNORED = -100

Probe = Callable[[Mapping[str, Tensor]], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """rows: of all sequences of a step, padding counted. frames: of them, on which the code predictor trains."""

    rows: int = 16_384
    frames: int = 6_144
    rate: float = 1.5e-3
    floor: float = 0.03
    warmup_steps: int = 500
    eos_weight: float = 3.0
    phone_weight: float = 0.3
    average_decay: float = 0.999
    log_every: int = 50


FINE_TUNING = Plan(rate=3e-4, warmup_steps=100)
REHEARSAL = Plan(rows=600, frames=32, warmup_steps=2, log_every=1)


class Average:
    """The running average of a model's weights; what is exported."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        live = model.state_dict()  # shares the weights' memory, in which they are updated and loaded
        self._live, self._decay = list(live.values()), decay
        self.tensors = {name: t.detach().clone() for name, t in live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """A young average forgets its random start sooner."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.tensors.values()), self._live, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(state_dict[name])


class TalkerTrainer:
    def __init__(self, config: CheckpointConfig, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.is_half = device.type == "cuda"
        self.talker = TrainableTalker(config, len(PHONES)).to(device)
        self.average = Average(self.talker, plan.average_decay)
        self.corruption = Corruption()
        self.optimizer = adamw(self.talker.parameters(), device, rate=plan.rate, betas=(0.9, 0.95))
        weights = torch.ones(config.talker.vocab_size, device=device)
        weights[config.talker.codec_eos_id] = plan.eos_weight
        self._class_weights = weights
        self._captured: CapturedStep[tuple[torch.Size, ...]] = CapturedStep(self._train, device)

    @property
    def parts(self) -> dict[str, Any]:
        return {"talker": self.talker, "average": self.average, "optimizer": self.optimizer}

    def step(self, batch: Batch, number: int, progress: float) -> dict[str, Tensor]:
        """Returns detached losses and accuracies, still on the device, and overwritten by the next step."""
        plan = self.plan
        set_rate(
            self.optimizer,
            plan.rate * warm_cosine(number, progress, warmup_steps=plan.warmup_steps, floor=plan.floor),
        )
        tensors = batch.tensors
        numbers = self._captured(tuple(one.shape for one in tensors), *tensors)
        self.average.update(number)
        return numbers

    def _train(self, shapes: tuple[torch.Size, ...], *tensors: Tensor) -> dict[str, Tensor]:
        self.talker.train()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_half):
            numbers = self.losses(Batch(*tensors))
        total = numbers["first"] + numbers["rest"] + self.plan.phone_weight * numbers["phones"]
        self.optimizer.zero_grad()
        total.backward()
        numbers["gradient"] = nn.utils.clip_grad_norm_(self.talker.parameters(), 1.0)
        self.optimizer.step()
        return {name: value.detach() for name, value in numbers.items()}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        talker = self.talker
        corruption = self.corruption if talker.training else None
        hidden, tapped = talker.hidden(talker.rows(batch, corruption))
        target, codes = batch.target, batch.codes
        frame = target.clamp(0, codes.shape[1] - 1)
        is_frame = (target >= 0) & (target < batch.num_frames[:, None])
        is_end = target == batch.num_frames[:, None]

        wanted = codes[..., 0].gather(1, frame)
        wanted = wanted.masked_fill(~is_frame, _IGNORED).masked_fill(is_end, talker.eos_id)
        logits = talker.codec_head(hidden).flatten(0, 1).float()
        first = functional.cross_entropy(logits, wanted.flatten(), self._class_weights, ignore_index=_IGNORED)
        right = (logits.argmax(dim=1) == wanted.flatten()) & is_frame.flatten()

        rest, rest_right = self._rest_losses(hidden, codes, frame, is_frame)
        return {
            "first": first,
            "rest": (rest * self._group_weights(rest)).sum(),
            "phones": self._phone_loss(tapped, batch, frame, is_frame),
            "accuracy0": right.sum() / is_frame.sum(),
            "rest1": rest[0],
            "rest_last": rest[-1],
            "accuracy1": rest_right[0],
        }

    def _rest_losses(
        self, hidden: Tensor, codes: Tensor, frame: Tensor, is_frame: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy and accuracy of each group from 1 on, over `plan.frames` of the frames: [G - 1] each."""
        flat = is_frame.flatten().float()
        # Drawn by place in the running count of frames, so that shapes are static and nothing waits.
        place = (torch.rand(self.plan.frames, device=self.device) * flat.sum()).floor() + 0.5
        chosen = torch.searchsorted(flat.cumsum(0), place).clamp(max=len(flat) - 1)
        row = chosen // frame.shape[1]
        picked = codes[row, frame.flatten()[chosen]]
        logits = self.talker.rest_logits(hidden.flatten(0, 1)[chosen], picked).float()
        loss = functional.cross_entropy(logits.transpose(1, 2), picked[:, 1:], reduction="none").mean(dim=0)
        return loss, (logits.argmax(dim=-1) == picked[:, 1:]).float().mean(dim=0)

    def _group_weights(self, rest: Tensor) -> Tensor:
        """From 1 for group 1 to 0.3 for the last, with mean 1 / groups: the late ones are polish."""
        weights = torch.linspace(1.0, 0.3, len(rest), device=rest.device)
        return weights / weights.sum()

    def _phone_loss(self, tapped: Tensor, batch: Batch, frame: Tensor, is_frame: Tensor) -> Tensor:
        logits = self.talker.phone_head(tapped).float().unflatten(-1, (2, -1))
        following = torch.minimum(frame + 1, (batch.num_frames - 1)[:, None])
        wanted = torch.stack([batch.phones.gather(1, frame), batch.phones.gather(1, following)], dim=-1)
        wanted = wanted.masked_fill(~is_frame[..., None], _IGNORED)
        return functional.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=_IGNORED)


def train_talker(
    trainer: TalkerTrainer,
    sitting: Sitting,
    corpus: CodeCorpus,
    *,
    seed: int,
    journal: Journal,
    probe: Probe | None = None,
    probe_every_s: float = 90.0,
) -> None:
    """Train until the plan or the budget is over. probe: what is asked of the average now and then, and at the end."""
    journal.write(stage="talker", utterances=corpus.num_utterances, buckets=len(corpus.buckets))
    started = last_probe = time.monotonic()
    for number, progress in sitting.steps():
        if probe is not None and time.monotonic() - last_probe > probe_every_s:
            _probe(probe, trainer, number, journal)
            last_probe = time.monotonic()
        seed_step(seed, number)
        numbers = trainer.step(corpus.draw(trainer.plan.rows), number, progress)
        if number % trainer.plan.log_every == 0:
            journal.write(
                stage="talker",
                step=number,
                progress=round(progress, 4),
                elapsed_s=round(time.monotonic() - started, 1),
                **{name: round(float(value), 4) for name, value in numbers.items()},
            )
    if probe is not None:
        _probe(probe, trainer, sitting.step, journal)


def _probe(probe: Probe, trainer: TalkerTrainer, step: int, journal: Journal) -> None:
    """What fails is told, and no more: an observation must not cost a training its minutes."""
    try:
        numbers: Mapping[str, object] = probe(trainer.average.tensors)
    except Exception as error:
        logger.exception("the probe at step %d", step)
        numbers = {"error": repr(error)}
    journal.write(stage="probe", step=step, **numbers)
