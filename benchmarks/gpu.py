"""A decoder of 350 M parameters on a GPU: ours against Transformers padded, flattened, and TRL packing.

    python benchmarks/gpu.py                            about eight minutes; the card should have nothing else to do
    python benchmarks/gpu.py --sides ours,padded        on a card that cannot hold every side's weights at once
    python benchmarks/gpu.py --device cpu --tiny        runs every side at toy size; shows that it runs, not how fast

All sides train the same Llama (bf16 products, fp32 weights, fused AdamW, clipping at 1) on the same sequences, with
about the same real tokens per update, and take turns in one process. The peers are driven through their trainer's own
data loader and `training_step`. Their size of a pass is theirs to choose: a row each.
Lengths are log-normal with mean 400, clipped to 16 to 4,096 tokens. Needs `pip install unpad[bench]` for the peers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from unpad.api import batches
from unpad.batching.batch import RaggedBatch
from unpad.errors import OutOfMemoryError
from unpad.models.contract import WEIGHTS
from unpad.models.decoder import Config, Decoder
from unpad.nn.flops import sizes_of, training_operations
from unpad.recipes.training import OptimSettings
from unpad.storage import write_atomic
from unpad.training.optim import make_optimizer
from unpad.training.step import train_step
from unpad.trials.bench import measure
from unpad.trials.bench.measure import Work, spread

# Dense bf16 with fp32 sums, TFLOP/s, from the vendors' data sheets; figures "with sparsity" are halved.
# A longer name comes before a shorter one that it begins with.
PEAKS = {
    "B200": (2250.0, "NVIDIA Blackwell architecture brief, HGX B200"),
    "H200 NVL": (835.5, "NVIDIA H200 data sheet"),
    "H200": (989.5, "NVIDIA H200 data sheet"),
    "GH200": (989.5, "NVIDIA GH200 data sheet"),
    "H100 PCIe": (756.5, "NVIDIA H100 data sheet"),
    "H100 NVL": (835.5, "NVIDIA H100 data sheet"),
    "H100": (989.5, "NVIDIA H100 data sheet"),
    "A100": (312.0, "NVIDIA A100 data sheet"),
    "A40": (149.7, "NVIDIA A40 data sheet"),
    "A30": (165.0, "NVIDIA A30 data sheet"),
    "L40S": (362.0, "NVIDIA L40S data sheet"),
    "L4": (121.0, "NVIDIA L4 data sheet"),
    "RTX 4090": (165.2, "NVIDIA Ada GPU architecture white paper"),
    "RTX 3090": (71.0, "NVIDIA Ampere GA102 GPU architecture white paper"),
}


WARM_UPDATES = 5  # compiling included


@dataclass(frozen=True)
class Sizes:
    """Model, corpus and batches of a run.

    Args:
        mean, longest: of the log-normal lengths, in tokens; `sigma` is the spread of their logarithm.
        tokens_per_update: real tokens of an update, the same for every side as nearly as its batches allow.
        batch: sequences of a padded or flattened pass; the Trainer's default is 8.
    """

    width: int = 1024
    blocks: int = 24
    heads: int = 16
    hidden: int = 2816
    vocabulary: int = 32_000
    mean: int = 400
    sigma: float = 1.0
    shortest: int = 16
    longest: int = 4096
    sequences: int = 16_000
    tokens_per_update: int = 16_384
    batch: int = 8

    def lengths(self) -> np.ndarray:
        """(sequences,) int64."""
        drawn = np.random.default_rng(0).lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, self.sequences)
        return np.clip(drawn.round().astype(np.int64), self.shortest, self.longest)

    def corpus(self) -> list[np.ndarray]:
        """Random tokens; 0 to 2 are kept for padding, begin and end."""
        draw = np.random.default_rng(1)
        return [draw.integers(3, self.vocabulary, length) for length in self.lengths()]

    @property
    def passes(self) -> int:
        """Padded or flattened passes of an update."""
        return max(round(self.tokens_per_update / self.batch / float(self.lengths().mean())), 1)


TINY = Sizes(
    width=32,
    blocks=2,
    heads=2,
    hidden=64,
    vocabulary=200,
    mean=20,
    sigma=0.6,
    shortest=4,
    longest=64,
    sequences=200,
    tokens_per_update=320,
    batch=4,
)


class Side(Protocol):
    """One way to train the model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def update(self) -> np.ndarray:
        """Run one optimizer update; returns the positions of its sequences, (num_seqs,): n - 1 of n tokens."""
        ...


# --------------------------------------------------------------------------- ours


def ours_config(sizes: Sizes) -> Config:
    return Config(
        width=sizes.width,
        blocks=sizes.blocks,
        heads=sizes.heads,
        hidden=sizes.hidden,
        context=sizes.longest,
        activation="swiglu",
        norm="rmsnorm",
        positions="rotary",
        tied=True,
    )


class Ours:
    """Flat runs through `train_step`; on a GPU attention is torch's variable-length flash kernel."""

    def __init__(self, sizes: Sizes, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        self.model = Decoder(ours_config(sizes), sizes.vocabulary).to(device).train()
        self.optimizer = make_optimizer(self.model, OptimSettings(lr=1e-4))
        if compiled:
            # Lengths change with every batch: without dynamic shapes each would be compiled again. The toy run on a
            # processor checks that the blocks can be traced; compiling them there would take longer than all else.
            for block in self.model.blocks:
                block.compile(dynamic=True, backend="inductor" if device.type == "cuda" else "eager")
        self._updates = self._feed()

    def _feed(self) -> Iterator[list[RaggedBatch]]:
        corpus = self.sizes.corpus()
        counted = [np.ones(len(sequence), np.bool_) for sequence in corpus]
        settings = dict.fromkeys(("tokens_per_step", "tokens_per_micro"), self.sizes.tokens_per_update)
        for epoch in count():
            for micros in batches(corpus, counted, epoch=epoch, strategy="pack", **settings):  # type: ignore[arg-type]
                yield [batch.to(self.device) for batch in micros]

    def update(self) -> np.ndarray:
        micros = next(self._updates)
        train_step(self.model, micros, self.optimizer, weights=WEIGHTS, precision="bf16", clip=1.0)
        return np.concatenate([batch.layout.lengths().cpu().numpy() for batch in micros])


# --------------------------------------------------------------------------- peers


class Peer:
    """A Hugging Face trainer, driven update by update through its own loader and `training_step`.

    Args:
        trainer: a `transformers.Trainer` or one of its kind.
        passes: forward and backward passes of an update.
    """

    def __init__(self, trainer: Any, passes: int) -> None:
        self.trainer, self.passes = trainer, passes
        self._lengths: deque[list[int]] = deque()  # of batches that the loader has made and that are not used yet
        trainer.data_collator = self._recording(trainer.data_collator)
        trainer.create_optimizer()
        self.optimizer = trainer.optimizer
        # What `train` does before its loop: autocast and the device are installed here and nowhere else.
        self.model = trainer.accelerator.prepare_model(trainer.model).train()
        trainer.current_gradient_accumulation_steps = passes
        self._batches = self._feed()

    def _recording(self, collate: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(examples: Sequence[dict[str, Any]]) -> Any:
            packed = (example.get("seq_lengths") or [len(example["input_ids"])] for example in examples)
            self._lengths.append([int(length) for lengths in packed for length in lengths])
            return collate(examples)

        return recorded

    def _feed(self) -> Iterator[Any]:
        while True:
            yield from self.trainer.get_train_dataloader()

    def update(self) -> np.ndarray:
        lengths: list[int] = []
        for _ in range(self.passes):
            inputs = next(self._batches)
            lengths += self._lengths.popleft()
            self.trainer.training_step(self.model, inputs)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()
        return np.array(lengths, np.int64) - 1


def llama(sizes: Sizes) -> Any:
    """The same model in Transformers, with the fastest attention that is installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.longest,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=attention_name(),
        use_cache=False,  # with a cache, sequences of a flattened run would see each other
    )
    return LlamaForCausalLM(config)


def attention_name() -> str:
    has_flash = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if has_flash else "sdpa"


def _arguments(device: torch.device, batch: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": batch,
        "bf16": True,
        "learning_rate": 1e-4,
        "use_cpu": device.type == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": device.type == "cuda",
        "optim": "adamw_torch_fused",
    }


def _trainer(sizes: Sizes, device: torch.device, collate: Callable[..., Any], **options: Any) -> Peer:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    corpus = [sequence.tolist() for sequence in sizes.corpus()]
    columns = {"input_ids": corpus, "labels": corpus, "length": [len(sequence) for sequence in corpus]}
    arguments = TrainingArguments(**_arguments(device, sizes.batch), remove_unused_columns=False, **options)
    trainer = Trainer(
        model=llama(sizes), args=arguments, train_dataset=Dataset.from_dict(columns), data_collator=collate
    )
    return Peer(trainer, sizes.passes)


def _pad(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the batch's longest, as `DataCollatorForSeq2Seq` does, without a tokenizer."""
    tokens = [torch.tensor(example["input_ids"]) for example in examples]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=0)
    labels = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def padded(sizes: Sizes, device: torch.device) -> Peer:
    return _trainer(sizes, device, _pad)


def grouped(sizes: Sizes, device: torch.device) -> Peer:
    return _trainer(sizes, device, _pad, train_sampling_strategy="group_by_length")


def flattened(sizes: Sizes, device: torch.device) -> Peer:
    from transformers import DataCollatorWithFlattening

    flash = attention_name() != "sdpa"
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)

    def flat(examples: Sequence[dict[str, Any]]) -> Any:
        return collate([{"input_ids": example["input_ids"], "labels": example["labels"]} for example in examples])

    return _trainer(sizes, device, flat)


def trl_packing(sizes: Sizes, device: torch.device) -> Peer:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"t{i}": i for i in range(sizes.vocabulary)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), eos_token="t2", pad_token="t0"
    )
    arguments = SFTConfig(
        **_arguments(device, 1),
        packing=True,
        packing_strategy="bfd",
        max_length=sizes.longest,
        gradient_checkpointing=False,
    )
    corpus = Dataset.from_dict({"input_ids": [sequence.tolist() for sequence in sizes.corpus()]})
    trainer = SFTTrainer(model=llama(sizes), args=arguments, train_dataset=corpus, processing_class=tokenizer)
    return Peer(trainer, max(round(sizes.tokens_per_update / sizes.longest), 1))


# --------------------------------------------------------------------------- measuring

SIDES: dict[str, tuple[str, Callable[[Sizes, torch.device], Side]]] = {
    "ours": ("ours, flat runs", lambda sizes, device: Ours(sizes, device, compiled=False)),
    "compiled": ("ours, blocks compiled", lambda sizes, device: Ours(sizes, device, compiled=True)),
    "padded": ("Transformers, padded", padded),
    "grouped": ("Transformers, padded, grouped by length", grouped),
    "flattened": ("Transformers, flattened", flattened),
    "trl": ("TRL, packed rows", trl_packing),
}
PACKAGES = {
    "padded": ("transformers", "datasets"),
    "grouped": ("transformers", "datasets"),
    "flattened": ("transformers", "datasets"),
    "trl": ("trl",),
}


def missing_packages(side: str) -> list[str]:
    return [name for name in PACKAGES.get(side, ()) if importlib.util.find_spec(name) is None]


def measured_side(side: Side, sizes: Sizes) -> measure.Contender:
    counted = sizes_of(ours_config(sizes), sizes.vocabulary)

    def step() -> Work:
        lengths = side.update().tolist()
        return Work(sum(lengths), training_operations(counted, lengths, sum(lengths)))

    return measure.Contender(step)


@dataclass(frozen=True)
class Result:
    """All that was measured.

    Args:
        peak, source: operations per second of the card by its data sheet, None where it is not known.
        memory: per side, bytes of weights and optimizer and the most that an update added to them; None on a processor.
        not_run: side -> why.
    """

    sizes: Sizes
    parameters: int
    machine: dict[str, Any]
    attention: str
    rounds: measure.Rounds
    peak: float | None
    source: str
    memory: dict[str, int | None]
    not_run: dict[str, str]

    def lines(self) -> list[str]:
        """The table as Markdown."""
        measured = max(self.rounds.ceilings)
        sheet = f"{self.peak / 1e12:,.1f} TFLOP/s ({self.source})" if self.peak else "not in the table of this script"
        packages = ", ".join(f"{name} {version}" for name, version in self.machine["packages"].items() if version)
        lines = [
            f"# {self.parameters / 1e6:,.0f} M parameters on {self.machine['gpu'] or self.machine['processor']}",
            "",
            f"Mean length {self.sizes.lengths().mean():.0f} of at most {self.sizes.longest:,}, about "
            f"{self.sizes.tokens_per_update:,} real tokens per update; torch {self.machine['torch']}, "
            f"{packages}; Transformers' attention: {self.attention}.",
            f"Peak by data sheet: {sheet}. Peak measured here: {measured / 1e12:,.1f} TFLOP/s, a bf16 product.",
            f"Medians and quartiles of {len(next(iter(self.rounds.turns.values())))} rounds in which all take turns.",
            "",
            "| side | real tokens/s | quartiles | times the padded | of data sheet | of measured peak | memory |",
            "|---|---|---|---|---|---|---|",
            *map(self._row, self.rounds.turns),
        ]
        names = [SIDES[side][0] for side in ("ours", "compiled")]
        if all(name in self.rounds.turns for name in names):
            gain = spread(self.rounds.ratios(names[1], names[0]))
            kept = "kept" if gain.low > 1 else "not kept"
            lines += [
                "",
                f"Compiled blocks against ours as it is: {gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f}),",
            ]
            lines[-1] += f" {kept}: the lower quartile must win."
        lines += ["", *(f"Not run: {SIDES[side][0]}: {why}" for side, why in self.not_run.items())]
        return lines

    def _row(self, name: str) -> str:
        rate, base = spread(self.rounds.rates(name)), SIDES["padded"][0]
        times = f"{spread(self.rounds.ratios(name, base)).median:.2f}" if base in self.rounds.turns else "-"
        share = spread(self.rounds.shares(name)).median
        of_sheet = f"{share * max(self.rounds.ceilings) / self.peak:.1%}" if self.peak else "-"
        used = self.memory[name]
        memory = f"{used / 2**30:,.1f} GiB" if used is not None else "-"
        quartiles = f"{rate.low:,.0f} to {rate.high:,.0f}"
        return f"| {name} | {rate.median:,.0f} | {quartiles} | {times} | {of_sheet} | {share:.1%} | {memory} |"


def peak_of(name: str) -> tuple[float | None, str]:
    """Operations per second by data sheet, and which; (None, "") for a card that is not in the table."""
    for card, (tera, source) in PEAKS.items():
        if re.search(rf"\b{card}\b(?! (Laptop|D\b))", name):  # whole words: an RTX A4000 is no A40
            return tera * 1e12, source
    return None, ""


def memory_of(side: Side, device: torch.device) -> int | None:
    """Bytes of a side's weights and optimizer, and what an update adds at its peak."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(8):  # with long batches among them
        side.update()
    state = [value for values in side.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in [*side.model.parameters(), *state])
    return kept + torch.cuda.max_memory_allocated(device) - before


def run(sizes: Sizes, device: torch.device, asked: Sequence[str], rounds: int, seconds: float) -> Result:
    """Build the sides that can be built, warm them, and measure them."""
    sides: dict[str, Side] = {}
    not_run, memory = {}, {}
    for key in asked:
        name, make = SIDES[key]
        if missing := missing_packages(key):
            not_run[key] = f"{' and '.join(missing)} not installed: pip install unpad[bench]"
            continue
        try:
            side = make(sizes, device)
            for _ in range(WARM_UPDATES):
                side.update()
            memory[name] = memory_of(side, device)
        except (OutOfMemoryError, torch.OutOfMemoryError) as error:
            not_run[key] = f"out of memory: {str(error).splitlines()[0]}"
            continue
        sides[name] = side
    if not sides:
        raise SystemExit("no side could run:\n" + "\n".join(f"  {side}: {why}" for side, why in not_run.items()))
    ceiling_size = 8192 if device.type == "cuda" else 512
    measured = measure.measure_rounds(
        {name: measured_side(side, sizes) for name, side in sides.items()},
        rounds,
        seconds,
        ceiling=lambda: measure.matrix_ceiling(torch.bfloat16, device, ceiling_size),
        report=print,
    )
    machine = measure.describe_machine(("transformers", "trl", "flash_attn"))
    peak, source = peak_of(machine["gpu"] or "") if device.type == "cuda" else (None, "")
    parameters = sum(parameter.numel() for parameter in next(iter(sides.values())).model.parameters())
    return Result(sizes, parameters, machine, attention_name(), measured, peak, source, memory, not_run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, which say nothing about speed")
    parser.add_argument("--sides", default=",".join(SIDES), help="some of " + ", ".join(SIDES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a side's turn")
    parser.add_argument("--out", type=Path, help="folder for gpu.md and gpu.json; nothing is written without")
    chosen = parser.parse_args()
    asked = chosen.sides.split(",")
    if unknown := [side for side in asked if side not in SIDES]:
        parser.error(f"unknown side {unknown[0]}; there are {', '.join(SIDES)}")
    if chosen.device == "cpu" and not chosen.tiny:
        parser.error("350 M parameters want a GPU; on a processor only --device cpu --tiny runs")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here, nothing was run; --device cpu --tiny tries every side at toy size", file=sys.stderr)
        sys.exit(2)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    sizes, rounds, seconds = (TINY, 3, 0.1) if chosen.tiny else (Sizes(), chosen.rounds, chosen.seconds)
    result = run(sizes, torch.device(chosen.device), asked, rounds, seconds)
    text = "\n".join(result.lines()) + "\n"
    if chosen.tiny:
        text = "Toy sizes: these figures show that every side runs, and nothing about speed.\n\n" + text
    print(text, end="")
    if chosen.out:
        write_atomic(chosen.out / "gpu.md", text)
        write_atomic(chosen.out / "gpu.json", json.dumps(asdict(result), ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
