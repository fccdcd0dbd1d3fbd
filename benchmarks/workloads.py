"""Workloads of `speed.py`: three synthetic ones and three Chinese corpora, and our side of every comparison.

| workload | model | lengths in tokens, log-normal |
|---|---|---|
| W1 | pre-LN GPT: 256 wide, 2 blocks, 8 heads, feed-forward 512, vocabulary 8,000 | mean 20, 2 to 128 |
| W2 | Llama style: 512 wide, 6 blocks, 8 heads, SwiGLU 2,048, vocabulary 16,000 | mean 180, 8 to 1,024 |
| W3 | encoder of 768-wide inputs: 256 wide, 4 blocks, 8 heads, feed-forward 1,024, 16 classes | mean 340, 20 to 2,000 |
| pretraining, chat, sayings | the preset zh_gpt with its dropout, on the corpora of shared/data/zh | their own |

Everybody trains on the same token ids and targets. A sequence of n tokens has n - 1 positions with a label each, and
those are the tokens that are counted, for every side; in W3 every input has a label.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Work
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import TokenSource, load_micro, load_steps
from unpad.batching.plan import Plan, plan
from unpad.data.text import TextData
from unpad.models.contract import Trainable
from unpad.models.cost import reading_operations, sizes_of
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import Block, BlockConfig, Stream, init_weights
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms, cross_entropy
from unpad.nn.native import library
from unpad.nn.norm import Norm
from unpad.nn.precision import DTYPES, autocast
from unpad.nn.product_speed import choose_precision
from unpad.recipes.file import load_recipe
from unpad.recipes.training import OptimSettings, PlanSettings
from unpad.training.optim import make_optimizer
from unpad.training.setup import Setup, prepare_setup
from unpad.training.stage import plan_inputs
from unpad.training.step import train_step

CPU = torch.device("cpu")
NO_LABEL = -100  # what the peers' losses pass over
SEED = 0
NUM_FEATURES, FEATURE_WIDTH, NUM_CLASSES = 16_384, 768, 16


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Args:
        config: of our model; peers build theirs of the same sizes.
        outputs: channels of the head: vocabulary or classes.
        context: longest sequence, in positions.
        tokens: where the loader reads sequences.
        lengths: positions per sequence, (num_sequences,).
        training, held_out: ids of sequences.
        build: makes our model, the same at every call.
        settings: plan settings of our default side.
        optim: of all sides.
        features: of W3: the inputs by token id, (NUM_FEATURES, FEATURE_WIDTH), and their classes, (NUM_FEATURES,).
    """

    name: str
    config: Config | BlockConfig
    outputs: int
    context: int
    tokens: TokenSource
    lengths: np.ndarray
    training: np.ndarray
    held_out: np.ndarray
    build: Callable[[], nn.Module]
    settings: PlanSettings
    optim: OptimSettings
    features: tuple[Tensor, Tensor] | None = None

    def operations(self, lengths: list[int], num_targets: int) -> int:
        """Operations of an update on sequences of these lengths: forward, and twice that backward."""
        sizes = sizes_of(self.config, self.outputs, FEATURE_WIDTH if self.features else 0)
        return 3 * reading_operations(sizes, [lengths] * sizes.blocks, num_targets)

    def plan(self, settings: PlanSettings, epoch: int, ids: np.ndarray | None = None) -> Plan:
        """One epoch of the training sequences, or of `ids`."""
        ids = self.training if ids is None else ids
        return plan(self.lengths, settings, seed=SEED, epoch=epoch, max_tokens=self.context, seq_ids=ids)

    def examples(self, ids: np.ndarray | None = None) -> list[tuple[Tensor, Tensor]]:
        """What peers train on: token ids and labels of every piece, each (positions + 1,) int64.

        Labels are the ids, unshifted as peers take them, and NO_LABEL where no loss counts.
        """
        pieces = self.plan(self.settings, 0, ids).pieces
        flat, counts_loss, offsets = self.tokens.gather(pieces.seq_ids, pieces.starts, pieces.stops)
        labels = np.where(counts_loss, flat, NO_LABEL)
        spans = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        return [(torch.from_numpy(flat[a:b].astype(np.int64)), torch.from_numpy(labels[a:b])) for a, b in spans]

    def prepare(self, batch: RaggedBatch) -> RaggedBatch:
        """Look up inputs and classes where the workload has features; W3 has a label at every real position."""
        if self.features is None:
            return batch
        table, classes = self.features
        assert batch.input_ids is not None
        return replace(batch, inputs_embeds=table[batch.input_ids], labels=classes[batch.input_ids], input_ids=None)


# --------------------------------------------------------------------------- our side


class Ours:
    """Training as a user of the package gets it: its plan, loader, step, optimizer and precision.

    Args:
        precision: as in a recipe.
        native: False computes without the native kernels.
        fields: plan settings that differ from the workload's.
    """

    def __init__(self, workload: Workload, *, precision: str = "auto", native: bool = True, **fields: Any) -> None:
        self.workload, self.native = workload, native
        self.model: Any = workload.build().train()
        self.optimizer = make_optimizer(self.model, workload.optim)
        self.precision = choose_precision(precision, CPU)[0]
        self.settings = workload.settings.model_copy(update=fields)
        self.losses: list[float] = []  # of every step
        self._updates = self._load()

    def _load(self) -> Iterator[list[RaggedBatch]]:
        for epoch in count():
            made = self.workload.plan(self.settings, epoch)
            load = partial(load_micro, self.workload.tokens, pad_id=0)
            yield from load_steps(load, made, CPU, group_lengths=not (self.native and self._has_kernels()))

    def _has_kernels(self) -> bool:
        return library.computes(DTYPES[self.precision])

    def next_micros(self) -> list[RaggedBatch]:
        """The micro-batches of the next update."""
        return [self.workload.prepare(batch) for batch in next(self._updates)]

    def step(self) -> Work:
        """One update."""
        micros = self.next_micros()
        model: Trainable = self.model
        with nullcontext() if self.native else library.switched_off():
            result = train_step(
                model,
                micros,
                self.optimizer,
                weights={"cross_entropy": 1.0},
                precision=self.precision,
                clip=self.workload.optim.clip,
            )
        self.losses.append(result.terms["cross_entropy"])
        lengths = [length for batch in micros for length in batch.layout.lengths().tolist()]
        return Work(sum(lengths), self.workload.operations(lengths, result.num_targets))

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean negative log-likelihood per held-out target, in nats."""
        self.model.eval()
        made = self.workload.plan(self.workload.settings, 0, self.workload.held_out)
        total, targets = 0.0, 0
        load = partial(load_micro, self.workload.tokens, pad_id=0)
        for micros in load_steps(load, made, CPU, group_lengths=not self._has_kernels()):
            for batch in micros:
                with autocast(self.precision, CPU):
                    total += float(self.model.token_nll(batch).sum())
                targets += batch.num_targets
        self.model.train()
        return total / targets


def our_sides(precision: str = "auto") -> dict[str, Callable[[Workload], Ours]]:
    """Every way of ours, by name; the first is what a user gets.

    Args:
        precision: of all of them, as in a recipe; with auto those named after a precision compute in it.
    """
    alone: dict[str, Any] = {"tokens_per_step": 1, "tokens_per_micro": 1}  # a micro-batch holds one sequence at least
    # A loop over examples without this package computes in fp32 unless told otherwise.
    loop, chosen = "fp32" if precision == "auto" else precision, choose_precision(precision, CPU)[0]

    def one_at_a_time(asked: str) -> Callable[[Workload], Ours]:
        return lambda w: Ours(w, precision=asked, **alone)

    return {
        "ours": lambda w: Ours(w, precision=precision),
        "ours, torch kernels": lambda w: Ours(w, precision=precision, native=False),
        "one at a time, torch": lambda w: Ours(w, precision=loop, native=False, **alone),
        **{f"ours, one at a time, {asked}": one_at_a_time(asked) for asked in dict.fromkeys((loop, chosen))},
        "ours, buckets": lambda w: Ours(w, precision=precision, strategy="bucket"),
        "ours, dynamic": lambda w: Ours(w, precision=precision, strategy="dynamic"),
        "ours, fixed": lambda w: Ours(w, precision=precision, strategy="fixed"),
    }


# --------------------------------------------------------------------------- synthetic workloads


@dataclass(frozen=True)
class Sequences:
    """Sequences in memory, as the loader reads them; every token counts as a label.

    Args:
        flat: (num_tokens,) int64.
        offsets: (num_sequences + 1,) int64.
    """

    flat: np.ndarray
    offsets: np.ndarray

    def gather(
        self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, lengths = self.offsets[seq_ids] + starts, stops.astype(np.int64) - starts + 1
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = self.flat[np.repeat(first - offsets[:-1], lengths) + np.arange(offsets[-1])]
        return flat, np.ones(flat.size, np.bool_), offsets


def log_normal_lengths(num: int, mean: float, sigma: float, low: int, high: int) -> np.ndarray:
    """Lengths in tokens, (num,) int64, of the given mean before they are clipped."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(mean) - sigma**2 / 2, sigma, num)
    return np.clip(np.rint(drawn), low, high).astype(np.int64)


def language(lengths: np.ndarray, vocab_size: int) -> Sequences:
    """Sequences with something to learn: Zipf words, of which six in ten are followed by their own successor."""
    rng = np.random.default_rng(SEED + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    weights = 1 / (np.arange(vocab_size) + 10)
    drawn = rng.choice(vocab_size, offsets[-1], p=weights / weights.sum()).tolist()
    follows = rng.random(offsets[-1]) < 0.6
    follows[offsets[:-1]] = False
    successor = rng.permutation(vocab_size).tolist()
    for i in np.flatnonzero(follows).tolist():
        drawn[i] = successor[drawn[i - 1]]
    return Sequences(np.array(drawn, np.int64), offsets)


def decoder_workload(
    name: str, config: Config, vocab_size: int, lengths: np.ndarray, settings: PlanSettings, held_out: int = 0
) -> Workload:
    """A decoder on the synthetic language, its last `held_out` sequences held out."""

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return Decoder(config, vocab_size)

    ids = np.arange(lengths.size)
    training, kept = ids[: lengths.size - held_out], ids[lengths.size - held_out :]
    return Workload(
        name,
        config,
        vocab_size,
        config.context,
        language(lengths, vocab_size),
        lengths - 1,
        training,
        kept,
        build,
        settings,
        OptimSettings(schedule="constant"),
    )


def w1() -> Workload:
    config = Config(
        norm="layernorm",
        eps=1e-5,
        activation="gelu",
        bias=True,
        positions="learned",
        tied=False,
        width=256,
        blocks=2,
        heads=8,
        hidden=512,
        context=128,
    )
    lengths = log_normal_lengths(20_000, 20, 0.6, 2, 128)
    return decoder_workload("W1", config, 8000, lengths, PlanSettings(tokens_per_step=2048))


def w2() -> Workload:
    config = Config(
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        tied=False,
        width=512,
        blocks=6,
        heads=8,
        hidden=2048,
        context=1024,
    )
    lengths = log_normal_lengths(2000, 180, 0.8, 8, 1024)
    return decoder_workload("W2", config, 16_000, lengths, PlanSettings(tokens_per_step=4096))


class Encoder(nn.Module):
    """Blocks over 768-wide inputs, and a class for every one of them."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.front = Linear(FEATURE_WIDTH, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = Norm(config.norm, config.width, config.eps)
        self.head = nn.Linear(config.width, NUM_CLASSES, bias=False)
        init_weights(self, config.blocks)

    def losses(self, batch: RaggedBatch) -> Terms:
        stream = Stream(self.front(batch.inputs_embeds).float(), None, batch.layout)  # x: (total_tokens, width)
        for block in self.blocks:
            stream = block(stream)
        hidden = self.norm(stream.x, stream.delta)[1].index_select(0, batch.target_index)  # (num_targets, width)
        labels = batch.labels.index_select(0, batch.target_index)
        loss, nll = cross_entropy(hidden, self.head.weight, labels)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return {"cross_entropy": batch.num_targets, "nll": batch.num_targets}


def w3() -> Workload:
    config = BlockConfig(
        norm="layernorm",
        eps=1e-5,
        activation="gelu",
        bias=True,
        width=256,
        blocks=4,
        heads=8,
        hidden=1024,
        causal=False,
    )

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return Encoder(config)

    generator = torch.Generator().manual_seed(SEED)
    features = torch.randn(NUM_FEATURES, FEATURE_WIDTH, generator=generator)
    classes = (features @ torch.randn(FEATURE_WIDTH, NUM_CLASSES, generator=generator)).argmax(1)
    lengths = log_normal_lengths(1000, 340, 0.8, 20, 2000)
    # The loader gives a sequence of n tokens n - 1 positions, so each has one more here, which nobody looks up.
    rng, offsets = np.random.default_rng(SEED + 1), np.concatenate([[0], np.cumsum(lengths + 1)])
    sequences = Sequences(rng.integers(0, NUM_FEATURES, offsets[-1]), offsets)
    ids = np.arange(lengths.size)
    return Workload(
        "W3",
        config,
        NUM_CLASSES,
        2000,
        sequences,
        lengths,
        ids,
        ids[:0],
        build,
        PlanSettings(tokens_per_step=4096),
        OptimSettings(schedule="constant"),
        (features, classes),
    )


# --------------------------------------------------------------------------- corpora

CORPORA = {
    "pretraining": ["data.text={data}/zh/pretraining", "data.chat=[]"],
    "chat": ["data.chat={data}/zh/chat", "data.text=[]"],
    "sayings": ["data.text={data}/zh/sayings.jsonl", "data.chat=[]"],
}


def corpus(name: str, data: Path, overrides: tuple[str, ...] = ()) -> Workload:
    """The preset zh_gpt on a corpus, through the recipe: sources, tokenizer, cache."""
    fixed = ["stages=[]", "train.max_epochs=1", "plan.tokens_per_step=2048", f"train.seed={SEED}"]
    paths = [text.format(data=data) for text in CORPORA[name]]
    setup = prepare_setup(load_recipe("zh_chat", [*paths, *fixed, *overrides]), Path(), None)
    stage = setup.stages[0]
    lengths, settings, _ = plan_inputs(stage, 0)
    config, texts = setup.model.config, setup.data
    assert isinstance(config, Config)
    assert isinstance(texts, TextData)
    return Workload(
        name,
        config,
        texts.num_outputs,
        config.longest,
        texts.tokens,
        lengths,
        stage.train_ids,
        stage.held_out_ids,
        lambda: _copy(setup),
        settings,
        setup.recipe.optim,
    )


def _copy(setup: Setup) -> nn.Module:
    torch.manual_seed(SEED)  # for dropout
    return copy.deepcopy(setup.model)


def small_language() -> Workload:
    """W1's model on the synthetic language with fewer words, for time to a loss."""
    config = w1().config
    assert isinstance(config, Config)
    lengths = log_normal_lengths(40_500, 20, 0.6, 2, 128)
    return decoder_workload("language", config, 2000, lengths, PlanSettings(tokens_per_step=2048), held_out=500)


def workload(name: str, data: Path) -> Workload:
    """A workload by name."""
    synthetic = {"W1": w1, "W2": w2, "W3": w3, "language": small_language}
    return synthetic[name]() if name in synthetic else corpus(name, data)


NAMES = ["W1", "W2", "W3", *CORPORA]
