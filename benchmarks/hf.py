"""Training speed of trainers of Hugging Face as they are, and on our batches: Trainer and SFTTrainer on equal data.

    python benchmarks/hf.py                  # writes benchmarks/hf.md and hf.json
    python benchmarks/hf.py --models 4x256 --rounds 5 --out /tmp/hf
    python benchmarks/hf.py --pairs          # trainers of pairs, with their padding and without it

Every side is a trainer with its own loader and `training_step`; a turn is one pass over all sequences and one update.
Sides take turns in one process with one thread, and the time is that of the process, so that others on the machine
count little. The data are sequences of 8 to 512 tokens, most of them short, and every token is a target.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gates import interval
from measure import describe_machine, load_average, spread
from torch import Tensor

from unpad.nn.native import library

VOCAB, LONGEST, SHORTEST = 4000, 512, 8
OURS = "Trainer, our batches"
NATIVE = "Trainer, our batches, our kernels"
PADDED = "Trainer, padded"
WITHOUT, KERNELS = "without padding", "without padding, our kernels"
GATES = {PADDED: 2.5, "the best of theirs": 1.2}  # of OURS, for the first model in fp32

SHARED = {
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "seed": 0, "logging_strategy": "no",
    "dataloader_pin_memory": False, "gradient_accumulation_steps": 10_000, "learning_rate": 1e-4,
}  # fmt: skip
PAIRS_TITLE, SETS_TITLE = "## Trainers of pairs, with padding and without", "## Trainers as people write them"
PAIRS = {"DPO": 16, "KTO": 16, "Reward": 16, "ORPO": 16, "CPO": 16, "GRPO": 8}  # rows of a pass, by kind of trainer


@dataclass(frozen=True)
class Size:
    """A Llama, and how many sequences a pass has."""

    layers: int
    width: int
    sequences: int

    @property
    def name(self) -> str:
        return f"{self.layers}x{self.width}"


SIZES = {size.name: size for size in (Size(4, 256, 64), Size(6, 512, 24))}


@dataclass(frozen=True)
class Side:
    """A way to train.

    Args:
        make: builds the trainer from a model and rows.
        native: whether our kernels may run.
        ours: whether the batches are ours.
    """

    make: Callable[[Any, Any, Path], Any]
    native: bool = False
    ours: bool = False


def sequences(num: int) -> list[list[int]]:
    """Token ids; lengths are log-normal with a median of 50 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(num, generator=generator) * 0.7 + 3.9).clamp(SHORTEST, LONGEST).long()
    lengths[0], lengths[1] = SHORTEST, LONGEST
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths.tolist()]


def model_of(size: Size) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=size.width, intermediate_size=3 * size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.width // 32, num_key_value_heads=size.width // 32, max_position_embeddings=4096,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Padded:
    """Rectangles, padded on the right, with -100 as the label of padding."""

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        columns = {**{name: [row[name] for row in rows] for name in ("input_ids", "labels")}}
        columns["attention_mask"] = [[1] * len(ids) for ids in columns["input_ids"]]
        return {
            name: torch.tensor([[*one, *[fill[name]] * (longest - len(one))] for one in values])
            for name, values in columns.items()
        }


def sides(batch_size: int, tokens: int, bf16: bool) -> dict[str, Side]:
    """All sides.

    Args:
        batch_size: sequences of a batch of theirs; tokens: of a micro-batch of ours.
    """
    import unpad.hf

    shared = {**SHARED, "bf16": bf16}

    def plain(collator: Any, size: int = batch_size, **changes: Any) -> Callable[[Any, Any, Path], Any]:
        def make(model: Any, data: Any, folder: Path) -> Any:
            from transformers import Trainer, TrainingArguments

            options = {**shared, "per_device_train_batch_size": size, "output_dir": str(folder), **changes}
            return Trainer(model=model, args=TrainingArguments(**options), train_dataset=data, data_collator=collator)

        return make

    def sft(size: int = batch_size, **changes: Any) -> Callable[[Any, Any, Path], Any]:
        def make(model: Any, data: Any, folder: Path) -> Any:
            from trl import SFTConfig, SFTTrainer

            options = {"max_length": None, "gradient_checkpointing": False, **shared, **changes}
            options |= {"per_device_train_batch_size": size, "output_dir": str(folder)}
            return SFTTrainer(
                model=model, args=SFTConfig(**options), train_dataset=data, processing_class=word_tokenizer()
            )

        return make

    def attached(make: Callable[[Any, Any, Path], Any]) -> Callable[[Any, Any, Path], Any]:
        def make_ours(model: Any, data: Any, folder: Path) -> Any:
            trainer = make(model, data, folder)
            unpad.hf.attach(trainer, tokens_per_micro=tokens)
            return trainer

        return make_ours

    from transformers import DataCollatorWithFlattening

    flattening = DataCollatorWithFlattening()
    by_length: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    return {
        PADDED: Side(plain(Padded())),
        "Trainer, padded, by length": Side(plain(Padded(), **by_length)),
        "Trainer, flattening": Side(plain(flattening)),
        f"Trainer, flattening, {batch_size // 4} a batch": Side(plain(flattening, batch_size // 4)),
        OURS: Side(attached(plain(None)), ours=True),
        NATIVE: Side(attached(plain(None)), native=True, ours=True),
        "SFTTrainer, padded": Side(sft()),
        "SFTTrainer, padding_free": Side(sft(padding_free=True)),
        "SFTTrainer, packing bfd": Side(sft(1, packing=True, max_length=LONGEST)),
        "SFTTrainer, our batches": Side(attached(sft()), ours=True),
        "SFTTrainer, our batches, our kernels": Side(attached(sft()), native=True, ours=True),
    }


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(index): index for index in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="0", unk_token="0")


def pairs(num: int) -> list[dict[str, Any]]:
    """Rows of a prompt and two answers; the prompt with the better answer is one of `sequences`."""
    given = sequences(2 * num)
    return [
        {
            "prompt": " ".join(map(str, one[: len(one) // 2])),
            "chosen": " ".join(map(str, one[len(one) // 2 :])),
            "rejected": " ".join(map(str, other[len(other) // 2 :])),
        }
        for one, other in zip(given[:num], given[num:], strict=True)
    ]


def pair_sides(kind: str, batch_size: int) -> dict[str, Side]:
    """Sides of a trainer of TRL, by the name of its kind."""
    import trl
    from trl.experimental import cpo, orpo

    import unpad.hf

    home = {"CPO": cpo, "ORPO": orpo}.get(kind, trl)

    def side(flat: bool, native: bool = False) -> Side:
        def make(model: Any, data: Any, folder: Path) -> Any:
            from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

            model.save_pretrained(folder)
            auto, head = AutoModelForCausalLM, {}
            if kind == "Reward":
                auto, head = AutoModelForSequenceClassification, {"num_labels": 1}
            model = auto.from_pretrained(folder, **head)  # a reference model is made of this folder too
            fields = {**SHARED, "gradient_checkpointing": False, "bf16": False, "output_dir": str(folder)}
            fields |= {"per_device_train_batch_size": batch_size}
            given: dict[str, Any] = {}
            if kind == "GRPO":
                fields |= {"num_generations": 4, "max_completion_length": 32, "beta": 0.1, "steps_per_generation": 1}
                given = {"reward_funcs": lambda completions, **rest: [float(len(one) % 7) for one in completions]}
            args = getattr(home, f"{kind}Config")(**fields)
            given |= {"model": model, "args": args, "train_dataset": data, "processing_class": word_tokenizer()}
            trainer = getattr(home, f"{kind}Trainer")(**given)
            if flat:
                unpad.hf.without_padding(trainer)
            return trainer

        return Side(make, native=native, ours=flat)

    return {PADDED: side(False), WITHOUT: side(True), KERNELS: side(True, native=True)}


class Pass:
    """One pass of a trainer over all its data and one update, timed by the process."""

    def __init__(self, side: Side, size: Size, rows: list[dict[str, Any]], folder: Path) -> None:
        from datasets import Dataset

        self.native = side.native
        with self.kernels():
            self.trainer = side.make(model_of(size), Dataset.from_list(rows), folder)
        self.loader = self.trainer.get_train_dataloader()
        self.optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-4)
        self.epoch = self.cells = self.tokens = 0
        self.trainer.model.base_model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        ids, mask = args[0] if args else inputs["input_ids"], inputs.get("attention_mask")
        self.cells += ids.numel()
        self.tokens += int(mask.sum()) if mask is not None and mask.shape == ids.shape else ids.numel()

    def kernels(self) -> Any:
        return nullcontext() if self.native else library.switched_off()

    def __call__(self) -> float:
        """Real tokens per second of processor time."""
        trainer = self.trainer
        self.cells = self.tokens = 0
        begin = time.process_time()
        with self.kernels():
            self.loader.set_epoch(self.epoch)
            trainer.model.train()
            batches, count = trainer.get_batch_samples(iter(self.loader), len(self.loader), trainer.args.device)
            trainer.current_gradient_accumulation_steps = len(batches)
            for batch in batches:
                trainer.training_step(trainer.model, batch, count)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.epoch += 1
        return self.tokens / (time.process_time() - begin)


def measure(name: str, size: Size, found: dict[str, Side], rows: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Rates of all sides on the same rows, in turn.

    Args:
        name: of the part.
    """
    with tempfile.TemporaryDirectory() as folder:
        passes = {side: Pass(one, size, rows, Path(folder)) for side, one in found.items()}
        for one in passes.values():
            one()  # untimed
        rates: dict[str, list[float]] = {side: [] for side in passes}
        computed: dict[str, list[float]] = {side: [] for side in passes}
        for number in range(rounds):
            names = list(passes)
            for side in names[number % len(names) :] + names[: number % len(names)]:
                rates[side].append(passes[side]())
                computed[side].append(passes[side].cells / passes[side].tokens)
            print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    theirs = [side for side, one in found.items() if not one.ours]
    return {
        "model": name,
        "tokens": next(iter(passes.values())).tokens,
        "sequences": len(rows),
        "rates": rates,
        "computed": {side: spread(shares).median for side, shares in computed.items()},
        "best": max(theirs, key=lambda side: spread(rates[side]).median),
        "ours": [side for side, one in found.items() if one.ours],
    }


def table(part: dict[str, Any], gates: bool) -> list[str]:
    rates, best = part["rates"], part["best"]
    lines = [
        f"## Llama {part['model'].replace('x', ' x ')}, {part['precision']}",
        "",
        f"{part['sequences']} sequences, {part['tokens']:,} tokens. The best of theirs: {best}.",
        "",
        "| side | tokens/s | computed per real token | of Trainer, padded | of the best of theirs |",
        "|---|---|---|---|---|",
    ]
    for name, own in rates.items():
        cells = [name, f"{spread(own).median:,.0f}", f"{part['computed'][name]:.2f}"]
        for other in (PADDED, best):
            ratio = interval([a / b for a, b in zip(own, rates[other], strict=True)])
            cells.append("" if name == other else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    if gates:
        for (what, gate), other in zip(GATES.items(), (PADDED, best), strict=True):
            ratio = interval([a / b for a, b in zip(rates[OURS], rates[other], strict=True)])
            verdict = "met" if ratio.low >= gate else "NOT met" if ratio.high < gate else "not resolved"
            lines.append(
                f"Gate on torch's kernels, {gate} times {what}: {ratio.low:.2f} to {ratio.high:.2f}, {verdict}."
            )
        lines.append("")
    return lines


def pairs_table(result: dict[str, Any]) -> str:
    """The section on trainers of pairs."""
    machine = result["machine"]
    versions = ", ".join(f"{key} {value}" for key, value in machine["packages"].items() if value)
    lines = [
        PAIRS_TITLE,
        "",
        f"`{result['command']}`, {machine['processor']}, one thread, load {machine['load']:.1f} to "
        f"{result['load_after']:.1f}; torch {machine['torch']}, {versions}.",
        f"Llama 4 x 256, fp32; pairs whose better row has {SHORTEST} to {LONGEST} tokens, {result['batch_size']} a "
        f"batch, reference passes and generation included. {result['rounds']} rounds; ratios as above.",
        "",
        "| trainer | padded, tokens/s | cells a token | without padding, to padded | the same on our kernels |",
        "|---|---|---|---|---|",
    ]
    for part in result["parts"]:
        rates = part["rates"]
        cells = [part["model"], f"{spread(rates[PADDED]).median:,.0f}", f"{part['computed'][PADDED]:.2f}"]
        for side in (WITHOUT, KERNELS):
            ratio = interval([a / b for a, b in zip(rates[side], rates[PADDED], strict=True)])
            cells.append(f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{key} {value}" for key, value in machine["packages"].items() if value)
    lines = [
        "# Trainers of Hugging Face, as they are and on our batches",
        "",
        f"    {result['command']}",
        "",
        f"Machine: {machine['cores']} cores of {machine['processor']}, one thread, load {machine['load']:.1f} before "
        f"and {result['load_after']:.1f} after.",
        f"Python {machine['python']}, torch {machine['torch']}, {versions}; {result['kernels']}.",
        "",
        f"Sequences of {SHORTEST} to {LONGEST} tokens, most of them short; every token is a target. Forward, backward "
        "and one update of AdamW per pass",
        f"over all of them. Theirs have {result['batch_size']} sequences a batch unless the side says otherwise, and "
        f"rows of {LONGEST} tokens when packed; ours {result['tokens_per_micro']:,}",
        f"tokens. {result['rounds']} rounds, in turn in one process. Tokens are real ones per second of processor "
        "time. Ratios are those of the rounds: median, and",
        "95 % by Student's t of their logarithms. Without \"our kernels\" all sides run on torch's.",
        "",
    ]
    for number, part in enumerate(result["parts"]):
        lines += table(part, gates=number == 0 and part["precision"] == "fp32")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--bf16", action="store_true", help="also in bf16, where the processor has it")
    parser.add_argument("--pairs", action="store_true", help="trainers of pairs instead")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import datasets

    datasets.disable_progress_bars()
    machine = describe_machine(("transformers", "trl", "accelerate"))
    parts: list[dict[str, Any]] = []
    result = {
        "command": shlex.join(["python", "benchmarks/hf.py", *sys.argv[1:]]),
        "machine": machine,
        "kernels": library.describe(),
        "rounds": args.rounds,
        "batch_size": args.batch_size,
        "tokens_per_micro": args.tokens,
        "parts": parts,
    }
    page, kept = args.out.with_suffix(".md"), args.out.with_suffix(".json")
    before = page.read_text("utf-8") if page.is_file() else PAIRS_TITLE + SETS_TITLE
    known = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
    rows_of_pairs, mark, rest = before[before.index(PAIRS_TITLE) :].partition(SETS_TITLE)
    if args.pairs:
        for kind, num in PAIRS.items():
            parts.append(measure(kind, SIZES["4x256"], pair_sides(kind, args.batch_size), pairs(num), args.rounds))
            result["load_after"] = load_average()
        kept.write_text(json.dumps({**known, "pairs": result}, indent=1) + "\n", encoding="utf-8")
        page.write_text(before.replace(rows_of_pairs, pairs_table(result)), encoding="utf-8")
        print(pairs_table(result))
        return
    for name in args.models:
        for bf16 in (False, True) if args.bf16 else (False,):
            size = SIZES[name]
            rows = [{"input_ids": one, "labels": one} for one in sequences(size.sequences)]
            part = measure(name, size, sides(args.batch_size, args.tokens, bf16), rows, args.rounds)
            parts.append({**part, "precision": "bf16" if bf16 else "fp32"})
            result["load_after"] = load_average()
            kept.write_text(json.dumps({**known, **result}, indent=1) + "\n", encoding="utf-8")
            page.write_text(markdown(result) + rows_of_pairs + mark + rest, encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
