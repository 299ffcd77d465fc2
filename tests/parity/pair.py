"""A checkpoint and the golden arrays that belong to it; opens what a family asks for, once."""

import json
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from qwen3tts_core.audio.clip import ReferenceClip
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.engine.codec_engine import open_codec_model
from qwen3tts_core.model.codec_decoder import open_codec_decoder
from qwen3tts_core.ops.interface import NoiseKey
from qwen3tts_core.ops.reference import ReferenceOps, run_eagerly
from qwen3tts_core.ops.sampling import cut_scores, first_code_scores
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.streaming.codec_window import window_at
from qwen3tts_core.text.prompt import CloneReference, SpeechText, build_plan, check_tokenizer
from qwen3tts_core.text.tokenizer import TextTokenizer
from qwen3tts_core.types import ReferenceVoice, Sampling, SpeechRequest
from tests.parity.taps import FirstDraw, TappedEngine


class Pair:
    """golden: {name: array}. Close it when done: it may have started engines.

    open_backend: fresh seams at each call, since a transfer belongs to one engine.
    """

    def __init__(self, checkpoint, golden, open_backend):
        self.checkpoint = checkpoint
        self.golden = golden
        self._open_backend = open_backend
        self.backend = open_backend()
        self.device = self.backend.device
        self.config = CheckpointConfig.from_checkpoint(checkpoint)
        self._runs = {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for name in ("engine", "graph_engine"):
            if name in self.__dict__:
                getattr(self, name).close()

    def json(self, name):
        return json.loads(str(self.golden[name]))

    # ------------------------------------------------------------ text
    @cached_property
    def tokenizer(self):
        tokenizer = TextTokenizer.from_checkpoint(self.checkpoint)
        check_tokenizer(self.config, tokenizer)
        return tokenizer

    @cached_property
    def cases(self):
        return sorted({name.split("/")[1] for name in self.golden if name.startswith("case/")})

    def spec(self, case):
        return self.json(f"case/{case}/spec_json")

    @property
    def drops_instructions(self):
        """The reference drops them in silence on a 0.6B CustomVoice checkpoint; we refuse them."""
        return self.config.model_type == "custom_voice" and self.config.model_size == "0b6"

    def plan(self, case, *, with_instructions=None):
        """The prompt of a case. with_instructions: force them in or out; None does as the reference."""
        spec, config = self.spec(case), self.config
        keep = not self.drops_instructions if with_instructions is None else with_instructions
        if keep and self.drops_instructions:
            config = replace(config, model_size="1b7")
        reference = None
        if config.model_type == "base":
            voice = self.reference_voice(case)
            num_frames = len(voice.codes) // (2 * config.talker.num_code_groups)
            reference = CloneReference(spec["ref_text"] if num_frames else None, num_frames)
        speech = SpeechText(
            spec["text"],
            voice=spec.get("speaker"),
            language=spec["language"],
            instructions=spec.get("instruct") if keep else None,
            reference=reference,
            layout="streaming" if spec["streaming"] else "full",
        )
        return build_plan(config, self.tokenizer, speech)

    def reference_voice(self, case):
        """A clone's voice from the golden arrays, so that prompts don't hang on the encoders."""
        if self.config.model_type != "base":
            return None
        spec = self.spec(case)
        codes = b"" if spec.get("xvec") else self.golden["enc/codes"].astype("<i2").tobytes()
        return ReferenceVoice(case, self.golden["spk/xvector"].astype("<f4").tobytes(), codes)

    # ------------------------------------------------------------ talker
    @cached_property
    def engine(self):
        return self._open_engine(is_tapped=True)

    @cached_property
    def graph_engine(self):
        """As it serves: every step a captured graph, so without measuring points."""
        return self._open_engine(is_tapped=False)

    def _open_engine(self, *, is_tapped):
        longest = max(self.plan(case).num_rows + self.num_samples(case) for case in self.cases)
        return TappedEngine(
            self.checkpoint,
            self.config,
            self._open_backend(),
            num_slots=max(8, len(self.cases)),
            max_positions=longest + 16,
            is_tapped=is_tapped,
        )

    @property
    def has_graphs(self):
        return self.backend.capture is not run_eagerly

    @property
    def keeps_scores(self):
        """Whether a draw's scores can be looked at: not where a kernel has them in registers."""
        return isinstance(self.backend.ops, ReferenceOps)

    @property
    def talker(self):
        return self.engine.talker

    def num_samples(self, case):
        """Group-0 codes the longest golden run of the case drew."""
        names = ("greedy_first", "sampled_first", "forced_logits")
        return max(len(self.golden.get(f"case/{case}/{name}", ())) for name in names)

    def request(self, case, num_samples, sampling=None):
        """sampling: None is greedy, with the checkpoint's repetition penalty."""
        default = self.config.sampling
        greedy = Sampling(
            talker=replace(default.talker, do_sample=False),
            subtalker=replace(default.subtalker, do_sample=False),
            repetition_penalty=default.repetition_penalty,
        )
        plan, voice = self.plan(case), self.reference_voice(case)
        return SpeechRequest(case, plan, sampling or greedy, seed=0, max_frames=num_samples, reference=voice)

    def greedy(self, case):
        """The case alone in the engine, until the golden run's last sample or EOS."""
        num_samples = len(self.golden[f"case/{case}/greedy_first"])
        return self._run(("greedy", case), [self.request(case, num_samples)])[case]

    def greedy_runs(self, case):
        """The case alone, step by step; where there are graphs, also among all cases in captured steps."""
        if not self.has_graphs:
            return [self.greedy(case)]
        lengths = {c: len(self.golden.get(f"case/{c}/greedy_first", ())) for c in self.cases}
        requests = [self.request(c, num_samples) for c, num_samples in lengths.items() if num_samples]
        return [self.greedy(case), self._run("graphs", requests, engine=self.graph_engine)[case]]

    def forced(self, case):
        """Golden frames forced on all cases at once, and one free step behind them."""
        codes = {c: self.golden[f"case/{c}/forced_codes"] for c in self.cases}
        requests = [self.request(c, len(codes[c]) + 1) for c in self.cases]
        return self._run("forced", requests, codes)[case]

    def sampled(self, case, run, sampling):
        """The draws of a sampled golden run forced on the engine, which has the run's settings.

        The group-0 codes are there of every run; the others only where the file holds whole frames.
        """
        first = self.golden[f"case/{case}/{run}_first"]
        codes = np.full((len(first), self.config.talker.num_code_groups), -1)
        codes[:, 0] = first
        frames = self.golden.get(f"case/{case}/{run}_codes", codes[:0])
        codes[: len(frames)] = frames
        request = self.request(case, len(first), sampling)
        return self._run((run, case), [request], {case: codes})[case]

    def batch(self, name):
        """Several cases at once, as the reference ran them; {case: Trace}."""
        num_samples = self.golden[f"batch/{name}/greedy_first"].shape[1]
        members = self.json(f"batch/{name}/members_json")
        return self._run(("batch", name), [self.request(case, num_samples) for case in members])

    def _run(self, key, requests, forced=None, engine=None):
        if key not in self._runs:
            self._runs[key] = (engine or self.engine).run(requests, forced)
        return self._runs[key]

    @torch.inference_mode()
    def hidden(self, trace):
        """[prompt rows + steps - 1, D] after the final norm."""
        return self.talker.final_norm(torch.cat(trace.layer_rows, dim=1)[-1])

    def step_hidden(self, trace, case):
        """[steps, D]: what each group-0 code was drawn from."""
        return self.hidden(trace)[self.plan(case).num_rows - 1 :]

    def drawn(self, trace):
        """Group-0 codes in order, EOS included when it was drawn."""
        eos = [self.config.talker.codec_eos_id] if trace.finish == "stop" else []
        return np.array([*(int(frame[0]) for frame in trace.frames), *eos])

    def first_scores(self, logits, trace, *, cut=False):
        """`logits` [S, V] through the group-0 processors, as the engine set them in the run of `trace`.

        cut: with temperature, top-k and top-p; a greedy run of the reference stops before them.
        """
        state = FirstDraw.stack(trace.first_draws[: len(logits)])
        allowed, eos_id = self.talker.allowed_ids, self.config.talker.codec_eos_id
        scores = first_code_scores(logits, state.seen, state.penalty, state.forbid_eos, allowed, eos_id)
        return cut_scores(scores, state.draw) if cut else scores

    def draws(self, logits, trace, num_seeds):
        """Group-0 codes of `logits` [S, V] as the backend draws them, set as in the run of `trace`.

        Every step under all seeds, the seeds in turn: codes [num_seeds S], the written noise [.., V] and
        whether the row samples, all on the host.
        """
        steps, vocab_size = logits.shape
        rows = torch.arange(steps).repeat(num_seeds)
        seeds = torch.arange(num_seeds).repeat_interleave(steps)
        key = NoiseKey(seeds * 2**33 - 5, 0 * rows, rows)
        sizes = (self.config.talker.num_code_groups, vocab_size, self.config.code_predictor.codebook_size)
        state = FirstDraw.stack([trace.first_draws[row] for row in rows.tolist()])
        ops, talker = self.backend.ops, self.talker
        on_device = NoiseKey(*(getattr(key, name).to(self.device) for name in NoiseKey.__slots__))
        codes = ops.draw_first(
            logits[rows],
            state.seen,
            state.penalty,
            state.forbid_eos,
            talker.allowed_ids,
            self.config.talker.codec_eos_id,
            state.draw,
            ops.frame_noise(on_device, *sizes),
        )
        return codes.cpu(), ReferenceOps().frame_noise(key, *sizes).first, state.draw.do_sample.cpu()

    # ------------------------------------------------------------ codec
    @cached_property
    def codec(self):
        """The decoder that serves on this device."""
        return open_codec_model(self.checkpoint, self.config.codec, self.backend, torch.float32)

    @cached_property
    def plain_codec(self):
        return open_codec_decoder(self.checkpoint, self.config.codec, self.device)

    def decode_whole(self, codes):
        """[F, G] -> [samples], in one pass."""
        codes_bfg = torch.tensor(codes, dtype=torch.int64, device=self.device)[None]
        return self.codec.decode(codes_bfg)[0].cpu().numpy()

    def decode_in_windows(self, codes, num_new, left_context):
        """The same through stateless windows: at a window's start everything is forgotten but its context."""
        parts = []
        for first in range(0, len(codes), num_new):
            window = window_at(first, min(num_new, len(codes) - first), left_context)
            frames = codes[first - window.num_context : first + window.num_new]
            parts.append(self.decode_whole(frames)[window.kept_samples(self.config.codec.samples_per_frame)])
        return np.concatenate(parts)

    def decode_in_steps(self, *streams):
        """Streams [F, G] side by side in one state arena, each cut along the chunk ramp: [samples] each."""
        state, parts, done = self.codec.new_state(len(streams)), [[] for _ in streams], 0
        rows = torch.arange(len(streams), device=self.device)
        for size in ChunkRamp().sizes():
            pieces = [codes[done : done + size] for codes in streams]
            num_valid = [len(piece) for piece in pieces]
            if not any(num_valid):
                return [np.concatenate(part) for part in parts]
            padded = np.zeros((len(streams), size, self.config.codec.num_quantizers), np.int64)
            for row, piece in enumerate(pieces):
                padded[row, : len(piece)] = piece
            lengths = torch.tensor(num_valid, device=self.device)
            batch = torch.from_numpy(padded).to(self.device)
            pcm = self.codec.decode_step(batch, state, rows, lengths).cpu().numpy()
            for row, valid in enumerate(num_valid):
                parts[row].append(pcm[row, : valid * self.config.codec.samples_per_frame])
            done += size
        raise AssertionError("the chunk ramp never ends")

    # ------------------------------------------------------------ reference audio
    @cached_property
    def clip(self):
        return ReferenceClip(self.golden["enc/clip_int16"].astype(np.float32) / 32768)
