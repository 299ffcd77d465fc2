"""One command, one stage at a time; each goes on where it stopped. README.md beside this file is the runbook.

python -m checkpoints.speaking.recipe.run STAGE [--work build/speaking] [--budget-s 480] [--resume] ...

prepare    what the other stages need of this machine: teacher's libraries, text, tokenizer, configs
data       the corpus, in shards (can run beside `codec`)
codec      train the codec            encode   the corpus in codes
talker     train the talker           export   the checkpoint
evaluate   word error rates
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.speaking.recipe import train_codec, train_talker
from checkpoints.speaking.recipe.bpe import write_tokenizer
from checkpoints.speaking.recipe.code_corpus import CodeCorpus
from checkpoints.speaking.recipe.codec_model import Codec
from checkpoints.speaking.recipe.corpus import WaveCorpus
from checkpoints.speaking.recipe.encode import encode_corpus, write_codes
from checkpoints.speaking.recipe.export import checked_size, export_codec, export_talker, quotients
from checkpoints.speaking.recipe.layout import SIZES, VOICES, Sizes, write_configs
from checkpoints.speaking.recipe.lines import collect, held_out_sentences, read_lines
from checkpoints.speaking.recipe.probe import code_phones, probe_talker, write_probe
from checkpoints.speaking.recipe.sitting import Journal, Sitting
from checkpoints.speaking.recipe.synthesize import (
    LABELS_PER_FRAME,
    UTTERANCES_PER_SHARD,
    ShardMaker,
    synthesize,
)
from checkpoints.speaking.recipe.talker_model import PromptIds
from checkpoints.speaking.recipe.teacher import DEBIAN_FOLDER, PHONES, copy_libraries
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.text.tokenizer import TextTokenizer

VOCAB_SIZE = 1_024
_TOKENIZER_LINES = 60_000
_FRAMES_PER_HOUR = 45_000


@dataclass(frozen=True)
class Place:
    """Where everything lies. carry: what another machine needs; the rest is made there."""

    work: Path

    @property
    def carry(self) -> Path:
        return self.work / "carry"

    @property
    def flite(self) -> Path:
        return self.carry / "flite"

    @property
    def lines(self) -> Path:
        return self.carry / "lines.txt.gz"

    @property
    def skeleton(self) -> Path:
        """The checkpoint without weights."""
        return self.carry / "skeleton"

    @property
    def probe(self) -> Path:
        return self.carry / "probe.json"

    @property
    def shards(self) -> Path:
        return self.work / "shards"

    @property
    def codes(self) -> Path:
        return self.work / "codes.safetensors"

    @property
    def codec_state(self) -> Path:
        return self.work / "codec.pt"

    @property
    def codec_weights(self) -> Path:
        return self.work / "codec.safetensors"

    @property
    def talker_state(self) -> Path:
        return self.work / "talker.pt"

    @property
    def talker_weights(self) -> Path:
        return self.work / "talker.safetensors"

    @property
    def config(self) -> CheckpointConfig:
        return CheckpointConfig.from_checkpoint(self.skeleton)


@dataclass(frozen=True)
class Call:
    """A parsed command line."""

    place: Place
    journal: Journal
    sizes: Sizes
    is_rehearsal: bool
    device: torch.device
    arguments: argparse.Namespace

    def sitting(self, file: Path, parts: Mapping[str, object], planned_s: float) -> Sitting:
        """Fresh, or resumed. Raises FileExistsError where a fresh one would write over another's checkpoint."""
        arguments = self.arguments
        if file.exists() and not arguments.resume:
            raise FileExistsError(f"{file} is there: --resume goes on with it; remove it to start anew")
        sitting = Sitting(
            file,
            parts,  # type: ignore[arg-type]
            budget_s=arguments.budget_s,
            planned_s=arguments.planned_s or planned_s,
            num_steps=arguments.steps,
        )
        if sitting.resume(self.device):
            self.journal.write(stage="resume", step=sitting.step, progress=round(sitting.progress, 4))
        return sitting


# ---------------------------------------------------------------- stages
def prepare(call: Call) -> None:
    place, seed = call.place, call.arguments.seed
    examples, glosses, words = collect(place.lines, seed)
    libraries = copy_libraries(place.flite, call.arguments.flite)
    lines = read_lines(place.lines)
    spoken = [lines.utterance(seed, i).text for i in range(_TOKENIZER_LINES // 2)]
    # A rehearsal's talker has few rows to learn; its tokenizer is the real one all the same.
    ids = write_tokenizer(place.skeleton, spoken, VOCAB_SIZE)
    write_configs(place.skeleton, call.sizes, ids)
    write_probe(place.probe, place.flite)
    call.journal.write(
        stage="prepare", examples=examples, glosses=glosses, words=words, library_bytes=libraries
    )


def data(call: Call) -> None:
    place, arguments = call.place, call.arguments
    utterances = 4 if call.is_rehearsal else UTTERANCES_PER_SHARD
    maker = ShardMaker(place.lines, place.skeleton, place.flite, place.shards, arguments.seed, utterances)
    synthesize(
        maker,
        hours=arguments.hours,
        processes=arguments.processes,
        budget_s=arguments.budget_s,
        journal=call.journal,
    )


def codec(call: Call) -> None:
    place, arguments = call.place, call.arguments
    plan = train_codec.FINE_TUNING if arguments.fine_tune else train_codec.Plan()
    trainer = train_codec.CodecTrainer(
        place.config.codec,
        call.sizes.encoder_width,
        train_codec.REHEARSAL if call.is_rehearsal else plan,
        call.device,
        is_frozen=arguments.fine_tune,
    )
    if arguments.fine_tune and not place.codec_state.exists():
        trainer.codec.load_state_dict(load_file(place.codec_weights))
    sitting = call.sitting(place.codec_state, trainer.parts, planned_s=480.0)
    train_codec.train_codec(
        trainer, sitting, place.shards, seed=arguments.seed, wait_s=120.0, journal=call.journal
    )
    save_weights(place.codec_weights, quotients(trainer.codec.state_dict()))


def encode(call: Call) -> None:
    place = call.place
    corpus = WaveCorpus(place.shards, call.device)
    while corpus.refresh(most=16):
        pass
    sizes = {"window": 50, "batch": 2} if call.is_rehearsal else {}
    codes = encode_corpus(trained_codec(call), corpus, journal=call.journal, **sizes)
    write_codes(place.codes, codes, corpus)


def talker(call: Call) -> None:
    place, arguments, config = call.place, call.arguments, call.place.config
    plan = train_talker.FINE_TUNING if arguments.fine_tune else train_talker.Plan()
    trainer = train_talker.TalkerTrainer(
        config, train_talker.REHEARSAL if call.is_rehearsal else plan, call.device
    )
    if arguments.fine_tune and not place.talker_state.exists():
        weights = load_file(place.talker_weights)
        trainer.talker.load_state_dict(weights)
        trainer.average.load_state_dict(weights)
    tokenizer = TextTokenizer.from_checkpoint(place.skeleton)
    start, name, newline = tokenizer.encode_with_specials("<|im_start|>assistant\n")
    ids = PromptIds.of(config, (start, name, newline), VOICES)
    corpus = CodeCorpus(place.codes, ids, call.device)
    sitting = call.sitting(place.talker_state, trainer.parts, planned_s=500.0)
    train_talker.train_talker(
        trainer, sitting, corpus, seed=arguments.seed, journal=call.journal, probe=_prober(call)
    )
    save_weights(place.talker_weights, trainer.average.tensors)


def _prober(call: Call) -> Callable[[Mapping[str, Tensor]], Mapping[str, float]]:
    place = call.place
    corpus = load_file(place.codes)
    size = place.config.codec.codebook_size
    table = code_phones(corpus["codes"], corpus["phones"], size)
    return lambda tensors: probe_talker(place.skeleton, place.probe, tensors, table, call.device)


def export(call: Call) -> None:
    place, target = call.place, call.arguments.checkpoint
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(place.skeleton, target, dirs_exist_ok=True)
    trained = trained_codec(call)
    export_codec(target, trained.decoder.state_dict())
    if not call.arguments.codec_only:
        export_talker(target, load_file(place.talker_weights))
    call.journal.write(stage="export", bytes=checked_size(target))


def evaluate(call: Call) -> None:
    from checkpoints.speaking.recipe import evaluate as evaluation  # only here: needs the extra `wer`

    place, arguments = call.place, call.arguments
    evaluation.evaluate(
        arguments.checkpoint,
        place.flite,
        held_out_sentences()[: arguments.sentences],
        place.work / "evaluation",
        codec=trained_codec(call) if place.codec_weights.exists() else None,
        speaks=not arguments.codec_only,
        seed=arguments.seed,
        journal=call.journal,
    )


STAGES: Mapping[str, Callable[[Call], None]] = {
    stage.__name__: stage for stage in (prepare, data, codec, encode, talker, export, evaluate)
}


# ---------------------------------------------------------------- weights
def save_weights(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """float16: half the bytes on the way back, and enough to go on from."""
    halves = {name: t.detach().to("cpu", torch.float16).contiguous() for name, t in tensors.items()}
    save_file(halves, str(file))


def trained_codec(call: Call) -> Codec:
    place = call.place
    model = Codec(place.config.codec, call.sizes.encoder_width, len(PHONES), LABELS_PER_FRAME)
    model.load_state_dict(load_file(place.codec_weights))
    return model.to(call.device).eval()


# ---------------------------------------------------------------- command line
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="recipe.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--work", type=Path, default=Path("build/speaking"), help="(build/speaking)")
    parser.add_argument(
        "--sizes", choices=list(SIZES), default="speaking", help="rehearsal is tiny (speaking)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (0)")
    parser.add_argument("--device", help="(cuda where there is one, else cpu)")
    parser.add_argument("--budget-s", type=float, default=480.0, help="stop cleanly after so long (480)")
    parser.add_argument(
        "--planned-s", type=float, help="training time of all sittings (codec 480, talker 500)"
    )
    parser.add_argument("--steps", type=int, help="plan by steps instead")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the last checkpoint, if there is one"
    )
    parser.add_argument(
        "--fine-tune",
        action="store_true",
        help="codec: decoder alone, on fixed codes; talker: from its weights",
    )
    parser.add_argument("--hours", type=float, default=40.0, help="data: of speech (40)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="data: (all cores)")
    parser.add_argument("--flite", type=Path, default=DEBIAN_FOLDER, help="prepare: the libraries' folder")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoints/speaking"), help="export, evaluate"
    )
    parser.add_argument(
        "--codec-only", action="store_true", help="export, evaluate: while there is no talker yet"
    )
    parser.add_argument("--sentences", type=int, default=40, help="evaluate: how many (40)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    torch.backends.cudnn.benchmark = True  # shapes are static
    place = Place(arguments.work)
    call = Call(
        place,
        Journal(place.work / "curves.jsonl"),
        SIZES[arguments.sizes],
        arguments.sizes == "rehearsal",
        device,
        arguments,
    )
    try:
        STAGES[arguments.stage](call)
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        print(f"==> {arguments.stage}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
