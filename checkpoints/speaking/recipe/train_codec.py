"""The codec's training, in one plan of two stages.

    python -m checkpoints.speaking.recipe.run codec --budget-s 500 [--resume]

Stage A regresses mel bands from the decoder's first half, with no waveform in sight: from scratch the
convolution stack leaves the latent in a handful of directions (measured, in README.md). Stage B
puts that stack on top, first on spectral losses, then with discriminators; A's head stays, so that the
latent can't collapse. Shares of the plan:

    0 ....... 0.03 ........ 0.07 ................ 0.32 ................. 0.875 ......... 1
    A, unquantised | A, books | B, spectral losses | B, discriminators | B, crops of 6 s

Discriminators see a third of each crop: they cost three times what the codec itself does, and many small steps
teach more than few large ones. On a GPU every step is one graph (`captured`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from checkpoints.speaking.recipe.captured import CapturedStep, adamw, set_rate
from checkpoints.speaking.recipe.codec_model import Codec
from checkpoints.speaking.recipe.corpus import WaveCorpus
from checkpoints.speaking.recipe.discriminators import (
    Discriminators,
    codec_losses,
    judge_loss,
)
from checkpoints.speaking.recipe.layout import SAMPLES_PER_FRAME
from checkpoints.speaking.recipe.mel import Mel
from checkpoints.speaking.recipe.sitting import Journal, Sitting, seed_step, warm_cosine
from checkpoints.speaking.recipe.synthesize import LABELS_PER_FRAME
from checkpoints.speaking.recipe.teacher import PHONES
from qwen3tts_core.config import CodecDecoderConfig

_REFRESH_EVERY_S = 5.0
_SCALES = ((2048, 80), (1024, 80), (512, 40), (256, 20))  # FFT size, bands; hop a quarter
_RATE_A, _RATE_B, _RATE_GAN = 2e-3, 1e-3, 3e-4


class Phase(NamedTuple):
    """What a step does. rows, frames: of the crops."""

    has_books: bool
    has_waves: bool
    has_judges: bool
    rows: int
    frames: int


@dataclass(frozen=True, slots=True)
class Plan:
    """books, waves, judges, long: progress at which each begins. batch: rows; frames: of a crop."""

    books: float = 0.03
    waves: float = 0.07
    judges: float = 0.32
    long: float = 0.875
    batch: int = 32
    frames: int = 25
    long_batch: int = 12
    long_frames: int = 75
    judge_scale: int = 8
    log_every: int = 50

    def phase(self, progress: float) -> Phase:
        is_long = progress >= self.long
        return Phase(
            progress >= self.books,
            progress >= self.waves,
            progress >= self.judges,
            self.long_batch if is_long else self.batch,
            self.long_frames if is_long else self.frames,
        )


FINE_TUNING = Plan(books=0.0, waves=0.0, judges=0.05, long=0.7)
REHEARSAL = Plan(
    batch=2, frames=8, long_batch=1, long_frames=12, judge_scale=1, log_every=1
)  # the same way through, small


class CodecTrainer:
    """Owns models, optimizers and losses; one call a step."""

    def __init__(
        self,
        config: CodecDecoderConfig,
        encoder_width: int,
        plan: Plan,
        device: torch.device,
        *,
        is_frozen: bool = False,
    ) -> None:
        """is_frozen: encoder and books stay as they are, so that codes that are made already keep their meaning."""
        self.plan, self.device, self._is_frozen = plan, device, is_frozen
        self.is_half = device.type == "cuda"  # bfloat16 where it is fast; spectra stay float32
        self.codec = Codec(config, encoder_width, len(PHONES), LABELS_PER_FRAME).to(device)
        if is_frozen:
            self.codec.encoder.requires_grad_(False)
            quantizer = self.codec.decoder.quantizer
            quantizer.rvq_first.input_proj.requires_grad_(False)
            quantizer.rvq_rest.input_proj.requires_grad_(False)
        self.judges = Discriminators(plan.judge_scale).to(device)
        self.optimizer = adamw(self.codec.parameters(), device, rate=_RATE_A, betas=(0.8, 0.95))
        self.judge_optimizer = adamw(self.judges.parameters(), device, rate=_RATE_GAN, betas=(0.8, 0.99))
        self._scales = nn.ModuleList(Mel(n, n // 4, bands) for n, bands in _SCALES).to(device)
        self._target = Mel(1024, SAMPLES_PER_FRAME // 8, self.codec.heads.num_bands).to(device)
        self._captured: CapturedStep[Phase] = CapturedStep(self._train, device)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "codec": self.codec,
            "judges": self.judges,
            "optimizer": self.optimizer,
            "judge_optimizer": self.judge_optimizer,
        }

    def step(self, wave: Tensor, phones: Tensor, number: int, progress: float) -> dict[str, Tensor]:
        """wave: [B, F * 1920]; phones: [B, F * 4], in the size of the plan's phase.

        Returns detached losses, still on the device, and overwritten by the next step.
        """
        self._set_rates(number, progress)
        return self._captured(self.plan.phase(progress), wave, phones)

    def _train(self, phase: Phase, wave: Tensor, phones: Tensor) -> dict[str, Tensor]:
        self.codec.train()
        if self._is_frozen:
            self.codec.encoder.eval()
            self.codec.decoder.quantizer.eval()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_half):
            losses, fake = self._spectral(phase, wave, phones)
            if fake is not None and phase.has_judges:
                real, fake = self._judged_piece(wave, fake)
                losses["judge"] = self._train_judges(real, fake)
                losses |= self._adversarial(real, fake)
        weights = {"mel": 15.0, "spectrum": 0.25, "commit": 0.25 / 16, "bands": 1.0, "phones": 0.3}
        weights |= {"adversarial": 1.0, "features": 2.0, "judge": 0.0}
        total = torch.stack(
            [weights[name] * loss.float() for name, loss in losses.items() if weights[name]]
        ).sum()
        self.optimizer.zero_grad()
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.codec.parameters(), 10.0 if "mel" in losses else 1.0)
        self.optimizer.step()
        return {name: loss.detach() for name, loss in losses.items()} | {"gradient": norm}

    def _set_rates(self, number: int, progress: float) -> None:
        plan = self.plan
        if progress < plan.waves:
            set_rate(
                self.optimizer,
                _RATE_A * warm_cosine(number, progress / plan.waves, warmup_steps=100, floor=0.3),
            )
        elif progress < plan.judges:
            set_rate(self.optimizer, _RATE_GAN if self._is_frozen else _RATE_B)
        else:
            factor = warm_cosine(
                number, (progress - plan.judges) / (1 - plan.judges), warmup_steps=1, floor=0.05
            )
            set_rate(self.optimizer, _RATE_GAN * factor)
            set_rate(self.judge_optimizer, _RATE_GAN * factor)

    def _spectral(
        self, phase: Phase, wave: Tensor, phones: Tensor
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """All losses that need no judge, and the decoded wave in the phases that have one."""
        codec = self.codec
        latent = codec.encoder(wave)
        losses = {}
        if not phase.has_books:
            quantized, first = codec.decoder.quantizer.bypass(latent)
        else:
            quantized, first, _, losses["commit"] = codec.decoder.quantizer(latent, self._kept(len(wave)))
        half = codec.decoder.first_half(quantized)
        bands = self._target(wave)[..., : half.shape[-1] * 2]
        losses["bands"] = functional.l1_loss(codec.heads.mel_bands(half).float(), bands)
        logits = codec.heads.phone_logits(first)
        losses["phones"] = functional.cross_entropy(logits.flatten(0, 1).float(), phones.flatten())
        if not phase.has_waves:
            return losses, None
        fake = codec.decoder.wave(half).float()
        mel, spectrum = [], []
        for scale in self._scales:
            assert isinstance(scale, Mel)
            ours, theirs = scale.magnitude(fake), scale.magnitude(wave)
            mel.append(functional.l1_loss(scale.log_bands(ours), scale.log_bands(theirs)))
            spectrum.append((ours - theirs).norm() / (theirs.norm() + 1e-3))
        losses["mel"], losses["spectrum"] = torch.stack(mel).mean(), torch.stack(spectrum).mean()
        return losses, fake

    def _kept(self, rows: int) -> Tensor:
        """Quantiser dropout on half of the rows: 1 to all books count, so that late groups are only polish."""
        books = self.codec.decoder.quantizer.rvq_rest.vq.layers
        total = len(books) + 1
        kept = torch.randint(1, total + 1, (rows,), device=self.device)
        return kept.masked_fill(torch.rand(rows, device=self.device) < 0.5, total)

    def _judged_piece(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        """The same third of both, from anywhere in each row."""
        rows, size = real.shape
        length = size // SAMPLES_PER_FRAME // 3 * SAMPLES_PER_FRAME
        start = (torch.rand(rows, 1, device=self.device) * (size - length)).long()
        sample = start + torch.arange(length, device=self.device)
        return real.gather(1, sample), fake.gather(1, sample)

    def _train_judges(self, wave: Tensor, fake: Tensor) -> Tensor:
        loss = judge_loss(self.judges(wave), self.judges(fake.detach()))
        self.judge_optimizer.zero_grad()
        loss.backward()
        self.judge_optimizer.step()
        return loss

    def _adversarial(self, wave: Tensor, fake: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            real = self.judges(wave)
        self.judges.requires_grad_(False)
        adversarial, features = codec_losses(real, self.judges(fake))
        self.judges.requires_grad_(True)
        return {"adversarial": adversarial, "features": features}


def train_codec(
    trainer: CodecTrainer, sitting: Sitting, shards: Path, *, seed: int, wait_s: float, journal: Journal
) -> None:
    """Train until the plan or the budget is over, on the shards that are there by then.

    wait_s: how long to wait for the first one. Raises FileNotFoundError when none comes.
    """
    corpus = WaveCorpus(shards, trainer.device)
    deadline = time.monotonic() + wait_s
    while not corpus.refresh(most=16):
        if time.monotonic() > deadline:
            raise FileNotFoundError(f"no shard in {shards}")
        time.sleep(1.0)
    started = last_refresh = time.monotonic()
    for number, progress in sitting.steps():
        seed_step(seed, number)
        phase = trainer.plan.phase(progress)
        wave, phones = corpus.crops(phase.rows, phase.frames)
        losses = trainer.step(wave, phones, number, progress)
        if number % trainer.plan.log_every == 0:
            journal.write(
                stage="codec",
                step=number,
                progress=round(progress, 4),
                elapsed_s=round(time.monotonic() - started, 1),
                hours=round(corpus.total_frames / 45_000, 2),
                **{name: round(float(value), 4) for name, value in losses.items()},
            )
        if time.monotonic() - last_refresh > _REFRESH_EVERY_S:
            corpus.refresh(most=16)
            last_refresh = time.monotonic()
