"""What sets of trainers as people write them share: small models and data, the truth of a script, and the judge.

A set-up builds a trainer of a tiny random model and says what its script means: the gradient of the first update,
computed in fp64, one sequence at a time, without unpad; where it evaluates, also its metrics. The trainer is then
attached and trained for real, and its gradient is read before the optimizer's step. Nothing is read from the network.

What comes of a set-up:

    kept     gradient and metrics are what the script means
    refused  an error of unpad says why not
    told     other than the script means, and a warning that the padded trainer does not give
    SILENT   other than the script means, without a word
    ALARM    kept, while the certificate calls the attached trainer wrong
    crash    any other exception

The column "padded" is the same gradient of the trainer without `attach`: 1e-7 where the script does what it means, and
large where batching itself makes it wrong. "before" and "after" are the verdicts of `unpad.prove_trainer`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import itertools
import logging
import operator
import os
import random
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")

import datasets
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from unpad import prove_trainer
from unpad.errors import UnpadError
from unpad.hf import attach

PAD, BOS, EOS, UNK, SEP, USER, ASSISTANT, END = range(8)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<user>", "<assistant>", "<end>"]
VOCAB = 120
WIDTH = 32
IGNORED = -100
NUM_ROWS = 12
TOLERANCE = 1e-4
SHARP = 0.1  # a learning rate at which one update is far above the rounding of fp32
DRIFT = 1e-3  # tolerated relative error of the weights' way after several updates in fp32
ACCUSING = ("leaking", "cut", "wrong loss")  # verdicts that call a trainer wrong
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<user> ' + message['content'] + ' <end> ' }}"
    "{% else %}{{ '<assistant> ' }}{% generation %}{{ message['content'] + ' <end>' }}{% endgeneration %}{{ ' ' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

Ids = list[int]
Example = tuple[Ids, Ids]  # token ids, and labels as a causal model takes them: -100 where nothing is learnt
Loss = Callable[[PreTrainedModel, list[Ids]], torch.Tensor]
Measures = dict[str, float]


# What a set-up is, and what a run of it leaves behind


@dataclass
class Run:
    """A real run of a trainer, up to its last step."""

    trainer: Trainer
    grads: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first update, before the optimizer's step
    steps: list[list[Ids]] = field(default_factory=lambda: [[]])  # rows of ids that the embedding saw, per update
    messages: set[str] = field(default_factory=set)  # warnings, logged and printed lines
    measures: Measures = field(default_factory=dict)

    def sequences(self, step: int = 0) -> list[Ids]:
        """Sequences that an update saw: they begin with `BOS`, whether in rows of their own or flat."""
        ids = [token for row in self.steps[step] for token in row if token != PAD]
        starts = [index for index, token in enumerate(ids) if token == BOS]
        return [ids[start:end] for start, end in itertools.pairwise([*starts, len(ids)])]


@dataclass
class Case:
    """A trainer, newly built, and what its script means.

    Args:
        loss: of the whole first update, of a copy of the model in fp64 and the sequences that the update saw.
        tokens: sequences of the first update; None where another check is made of them.
        check: what else is wrong with a run, in words; empty where nothing is.
        measure: evaluates the trainer before it is trained; `measured` is the truth of that.
        train: trains the trainer.
    """

    trainer: Trainer
    loss: Loss | None
    tokens: list[Ids] | None = None
    check: Callable[[Run, PreTrainedModel], str] | None = None
    measure: Callable[[Trainer], Measures] | None = None
    measured: Callable[[PreTrainedModel], Measures] | None = None
    tokens_per_micro: int = 48
    train: Callable[[Trainer], object] = operator.methodcaller("train")

    def __post_init__(self) -> None:
        if self.trainer.args.gradient_accumulation_steps == 1:
            self.tokens_per_micro = 4096  # an update is one micro-batch


@dataclass(frozen=True)
class Setup:
    """A script of a user.

    Args:
        expected: keep: a user would expect that it is kept; refuse: it cannot be; either.
        padded_is_true: whether the trainer without `attach` does what the script means.
    """

    name: str
    expected: str
    padded_is_true: bool
    build: Callable[[], Case]


SETUPS: list[Setup] = []


def setup(expected: str, padded_is_true: bool = True) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a function that builds a case to `SETUPS`, under its name."""

    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        SETUPS.append(Setup(build.__name__, expected, padded_is_true, build))
        return build

    return add


# Tiny models, a tokenizer and data


def tokenizer(**changes: object) -> PreTrainedTokenizerFast:
    """One token per word: `w8` to `w119`, and the special tokens."""
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{index}" for index in range(8, VOCAB))])}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=core, **{**names, **changes})
    made.add_tokens(SPECIAL[4:], special_tokens=True)
    made.chat_template = TEMPLATE
    return made


def model(kind: str = "Llama", head: str = "ForCausalLM", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model of two layers, without dropout."""
    common = {"vocab_size": VOCAB, "initializer_range": 0.15, "pad_token_id": PAD, "bos_token_id": BOS}
    common["eos_token_id"] = EOS
    if kind == "GPT2":
        sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 160}
        sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    elif kind == "OPT":
        sizes = {"hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 64, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "dropout": 0.0, "max_position_embeddings": 160}
    else:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 160, "attention_dropout": 0.0}
    if kind in ("Qwen3", "Gemma2", "Gemma3Text"):
        sizes["head_dim"] = 8
    settings = {**common, **sizes, **changes}
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(seed)
    name = {"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(f"{kind}{head}", f"{kind.removesuffix('Text')}{head}")
    return getattr(transformers, name)(config)


def words(num: int = NUM_ROWS, seed: int = 0, low: int = 5, high: int = 19) -> list[Ids]:
    """Sequences of `BOS`, words and `EOS`, of quite different lengths."""
    draw = random.Random(seed)
    return [[BOS, *(draw.randrange(8, VOCAB) for _ in range(draw.randint(low, high))), EOS] for _ in range(num)]


def with_prompts(rows: list[Ids]) -> list[Ids]:
    """The same with a `SEP` somewhere inside: what stands before it is a prompt."""
    draw = random.Random(1)
    cuts = [draw.randint(1, len(row) - 3) for row in rows]
    return [[*row[:cut], SEP, *row[cut:]] for row, cut in zip(rows, cuts, strict=True)]


def after(row: Ids, mark: int) -> Ids:
    """Labels of what stands behind a mark."""
    start = row.index(mark) + 1
    return [IGNORED] * start + row[start:]


def text(row: Ids) -> str:
    """The words of a sequence, without `BOS` and `EOS`."""
    return " ".join(f"w{token}" for token in row if token >= 8)


def table(rows: list[Ids], **columns: list) -> Dataset:
    """A dataset of input_ids and other columns."""
    return Dataset.from_dict({"input_ids": rows, **columns})


def padded(rows: Sequence[Sequence[float]], value: float, to: int | None = None, left: bool = False) -> torch.Tensor:
    """Rows as one tensor (batch, seq)."""
    width = to or max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*more, *row] if left else [*row, *more] for row, more in zip(rows, fill, strict=True)])


def batch_of(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """What most collators return, padded on the right."""
    rows = [ids for ids, _ in examples]
    return {
        "input_ids": padded(rows, PAD),
        "attention_mask": padded([[1] * len(row) for row in rows], 0),
        "labels": padded([labels for _, labels in examples], IGNORED),
    }


OUTPUT = tempfile.mkdtemp(prefix="attach_judge_")
QUIET = {
    **{"output_dir": OUTPUT, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"},
    **{"logging_strategy": "no", "optim": "sgd", "learning_rate": 1e-3, "lr_scheduler_type": "constant"},
    **{"max_grad_norm": 0.0, "seed": 3, "bf16": False, "max_steps": 1},
}


def arguments(batch: int = 2, accumulate: int = 6, **changes: object) -> TrainingArguments:
    """Arguments of an update of all rows."""
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    return TrainingArguments(**{**QUIET, **sizes, **changes})


def sft_arguments(batch: int = 2, accumulate: int = 6, **changes: object) -> SFTConfig:
    """The same of TRL."""
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    return SFTConfig(**{**QUIET, **sizes, "gradient_checkpointing": False, "max_length": 64, **changes})


# The truth: fp64, one sequence at a time


def copy_in_double(trainer: Trainer) -> PreTrainedModel:
    """A copy of a trainer's model in fp64 and without dropout, whose forward is that of its class."""
    made = copy.deepcopy(trainer.model)
    for module in made.modules():
        module.__dict__.pop("forward", None)  # TRL puts one on the model, bound to the original
    return made.double().eval()


def logits_of(m: PreTrainedModel, ids: Ids, **more: object) -> torch.Tensor:
    """Logits of one sequence, (seq, vocab)."""
    return m(input_ids=torch.tensor([ids]), use_cache=False, **more).logits[0, -len(ids) :]  # behind virtual tokens


def predictions(m: PreTrainedModel, example: Example, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets of the learnt tokens of one sequence, (num_targets, vocab) and (num_targets,)."""
    ids, labels = example
    targets = torch.tensor(labels[1:], dtype=torch.long)
    real = targets != IGNORED
    return logits_of(m, ids, **more)[:-1][real], targets[real]


def losses_of(m: PreTrainedModel, example: Example, **more: object) -> torch.Tensor:
    """Cross-entropy of the learnt tokens of one sequence, (num_targets,)."""
    return F.cross_entropy(*predictions(m, example, **more), reduction="none")


def token_mean(m: PreTrainedModel, examples: Sequence[Example]) -> torch.Tensor:
    """Mean over all learnt tokens of an update."""
    return torch.cat([losses_of(m, example) for example in examples]).mean()


def whole(rows: list[Ids]) -> list[Example]:
    """Examples in which every token is learnt."""
    return [(row, row) for row in rows]


def learns_all(m: PreTrainedModel, rows: list[Ids]) -> torch.Tensor:
    """Mean over all tokens of these rows."""
    return token_mean(m, whole(rows))


def case_of(trainer: Trainer, examples: Sequence[Example], **more: object) -> Case:
    """A case whose loss is the mean over the learnt tokens of these examples."""
    return Case(trainer, lambda m, _: token_mean(m, examples), [ids for ids, _ in examples], **more)


def error_of(grads: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Largest relative error of a parameter's gradient, of small ones relative to a hundredth of the whole."""
    norm = torch.stack([value.norm() for value in truth.values()]).norm()
    errors = [float((grads[name] - value).norm() / max(value.norm(), 0.01 * norm)) for name, value in truth.items()]
    return max(errors)


def true_gradient(m: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradient of each parameter of a model in fp64; zero where the loss does not reach."""
    m.zero_grad()
    loss.backward()
    return gradients(m)


def gradients(m: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the gradients by name."""
    return {
        name: torch.zeros_like(value).double() if value.grad is None else value.grad.detach().double().clone()
        for name, value in m.named_parameters()
    }


def towards(m: PreTrainedModel, wanted: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient is the wanted one."""
    return sum((value * wanted[name]).sum() for name, value in m.named_parameters() if name in wanted)


def descent(m: PreTrainedModel, updates: list[list[Ids]], loss: Loss, clip: float = 0.0) -> Iterator[PreTrainedModel]:
    """The model after each update of gradient descent in fp64, at the rate `SHARP`, by the rows of each update."""
    for rows in updates:
        truth = true_gradient(m, loss(m, rows))
        norm = torch.stack([value.norm() for value in truth.values()]).norm()
        scale = min(1.0, clip / float(norm)) if clip else 1.0
        with torch.no_grad():
            for name, value in m.named_parameters():
                value -= SHARP * scale * truth[name]
        yield m


def astray(found: nn.Module, m: PreTrainedModel, start: PreTrainedModel) -> str:
    """Words for weights that went another way than a model in fp64; empty where they did not."""
    begin = {name: value.detach() for name, value in start.named_parameters()}
    way = {name: value.detach() - begin[name] for name, value in m.named_parameters()}
    ours = {name: value.detach().double() - begin[name] for name, value in found.named_parameters()}
    error = error_of(ours, way)
    return "" if error < DRIFT else f"the weights are {error:.0e} away"


def next_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token, (batch, seq - 1), zero where it is ignored."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=IGNORED)


# Trainers


def folder() -> str:
    """A new folder for checkpoints."""
    return tempfile.mkdtemp(dir=OUTPUT)


def lm_collator() -> DataCollatorForLanguageModeling:
    """The collator of transformers."""
    return DataCollatorForLanguageModeling(tokenizer(), mlm=False)


def plain(
    trainer: type[Trainer], made: PreTrainedModel | str, args: TrainingArguments, rows: list[Ids], **more: object
) -> Trainer:
    """A trainer of the collator of transformers; a model of one's own, or the name of its kind."""
    made = model(made) if isinstance(made, str) else made
    return trainer(made, args, lm_collator(), table(rows), **more)


def sft(rows: list[Ids], made: PreTrainedModel | None = None, kind: type = SFTTrainer, **changes: object) -> SFTTrainer:
    """An SFTTrainer of token ids."""
    adapter = changes.pop("peft_config", None)
    args = sft_arguments(**changes)
    return kind(made or model(), args, None, table(rows), processing_class=tokenizer(), peft_config=adapter)


# The runner


class Recorder(TrainerCallback):
    """Copies the gradients before the first optimizer's step, and counts steps."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.run.grads:
            self.run.grads.update(gradients(self.run.trainer.model))

    def on_step_end(self, args, state, control, **kwargs):
        self.run.steps.append([])

    def saw(self, module: nn.Module, inputs: tuple) -> None:
        """Note the ids of a forward pass that trains; a hook of the embedding."""
        if module.training and torch.is_grad_enabled() and inputs:
            self.run.steps[-1].extend(inputs[0].reshape(-1, inputs[0].shape[-1]).tolist())


class Lines(logging.Handler):
    """Keeps the text of what is logged."""

    def __init__(self, messages: set[str]) -> None:
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.add(record.getMessage())


@contextlib.contextmanager
def listening(messages: set[str]) -> Iterator[None]:
    """Collect warnings, logged warnings and printed lines."""
    handler, printed = Lines(messages), io.StringIO()
    loggers = [logging.getLogger(name) for name in (None, "transformers", "trl", "accelerate", "unpad")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    messages.update(str(one.message) for one in caught)
    messages.update(line for line in printed.getvalue().splitlines() if line.strip() and not line.startswith("{"))


def execute(case: Case, attached: bool, tokens: int | None = None) -> Run:
    """Attach if asked, evaluate, and train for real."""
    run = Run(case.trainer)
    recorder = Recorder(run)
    case.trainer.add_callback(recorder)
    with listening(run.messages):
        if attached:
            attach(case.trainer, tokens_per_micro=tokens or case.tokens_per_micro)
        if case.measure:
            run.measures = {name: float(value) for name, value in case.measure(case.trainer).items()}
        handle = case.trainer.model.get_input_embeddings().register_forward_pre_hook(recorder.saw)
        case.train(case.trainer)
        handle.remove()
    return run


def first_line(error: BaseException | str) -> str:
    """The first line of a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def verdict(setup: Setup, attached: bool, tokens: int | None) -> str:
    """Of a trainer newly built, and attached if asked."""
    with listening(set()):
        case = setup.build()
        try:
            if attached:
                attach(case.trainer, tokens_per_micro=tokens or case.tokens_per_micro)
            return str(prove_trainer(case.trainer).verdict)
        except UnpadError as error:
            return type(error).__name__
        except Exception as error:
            return f"crash: {type(error).__name__}: {first_line(error)}"


def faults(case: Case, run: Run, m: PreTrainedModel) -> tuple[float | None, list[str]]:
    """What differs between a run and the truth: the gradient's error, and words of each fault."""
    found, error = [], None
    if case.measured:
        truth = case.measured(m)
        for name, value in truth.items():
            ours = run.measures.get(name, float("nan"))
            if not abs(ours - value) <= TOLERANCE * max(1.0, abs(value)):
                found.append(f"{name} is {ours:.5g}, of {value:.5g}")
    other = ""
    if case.tokens is not None:
        seen = Counter(token for row in run.steps[0] for token in row if token != PAD)
        true = Counter(token for row in case.tokens for token in row)
        if seen != true:
            other = f"the update saw {seen.total()} tokens, of {true.total()}, {(seen & true).total()} in common"
    if case.loss:
        error = error_of(run.grads, true_gradient(m, case.loss(m, run.sequences())))
        if not error <= TOLERANCE:  # a sequence without targets may be left out
            found.append(f"other gradient, {other}" if other else "other gradient")
    elif other:
        found.append(other)
    if case.check and (wrong := case.check(run, m)):
        found.append(wrong)
    return error, found


def unlike_before(case: Case, m: PreTrainedModel) -> str:
    """Words for a trainer that was refused and trains otherwise than before; empty where it does not."""
    reset()
    try:
        _, found = faults(case, execute(case, attached=False), m)
    except Exception as crash:
        found = [f"{type(crash).__name__}: {first_line(crash)}"]
    return f" [refused, and changed: {'; '.join(found)}]" if found else ""


@dataclass
class Judgement:
    """A line of the table."""

    setup: Setup
    outcome: str
    error: float | None
    padded: float | None
    before: str
    after: str
    note: str
    padded_is_true: bool
    is_told: bool  # whether there are warnings that the padded trainer does not give


def judge(setup: Setup, tokens: int | None = None, loud: bool = False) -> Judgement:
    """Run a set-up without and with `attach`, and compare both with the truth."""
    reset()
    with listening(set()):
        plain_case = setup.build()
    double = copy_in_double(plain_case.trainer)
    untouched = copy.deepcopy(double)
    try:
        plain_run = execute(plain_case, attached=False)
        padded_error, padded_faults = faults(plain_case, plain_run, copy.deepcopy(untouched))
    except Exception as error:
        if loud:
            traceback.print_exc()
        plain_run, padded_error, padded_faults = Run(plain_case.trainer), None, [f"padded crash: {first_line(error)}"]
    before, after = verdict(setup, False, tokens), ""
    outcome, note, error = "", "", None
    reset()
    try:
        with listening(set()):
            case = setup.build()
        run = execute(case, True, tokens)
        error, found = faults(case, run, copy.deepcopy(untouched))
        news = sorted(run.messages - plain_run.messages)
        outcome = "kept" if not found else "told" if news else "SILENT"
        note = "; ".join([*found, *(f"says: {first_line(line)}" for line in news)])
        after = verdict(setup, True, tokens)
        if outcome == "kept" and after in ACCUSING:
            outcome = "ALARM"
    except UnpadError as refusal:
        outcome, note = "refused", str(refusal) if loud else first_line(refusal)
        if setup.padded_is_true:
            note += unlike_before(case, copy.deepcopy(untouched))
    except Exception as crash:
        outcome, note = "crash", f"{type(crash).__name__}: {first_line(crash)}"
        if loud:
            traceback.print_exc()
    if bool(padded_faults) == setup.padded_is_true:
        note = f"[padded: {'; '.join(padded_faults) or 'true'}] {note}"
    return Judgement(setup, outcome, error, padded_error, before, after, note, not padded_faults, "says: " in note)


def reset() -> None:
    """Give every run of a set-up the same draws."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def number(value: float | None) -> str:
    """A relative error."""
    return "-" if value is None else f"{value:.0e}"


def report(judgements: list[Judgement]) -> str:
    """Counts of what must not be."""
    names: dict[str, list[str]] = {}
    for one in judgements:
        name = one.setup.name
        for kind, is_so in {
            "silent differences": one.outcome == "SILENT",
            "faults of the padded trainer mended without a word": one.outcome in ("kept", "ALARM")
            and not one.padded_is_true
            and not one.is_told,
            "differences that a warning tells": one.outcome == "told",
            "false alarms of the certificate before": one.before in ACCUSING and one.padded_is_true,
            "false alarms of the certificate after": one.after in ACCUSING and one.outcome in ("kept", "ALARM"),
            "sound before, though wrong": one.before == "sound" and not one.padded_is_true,
            "sound after, though wrong": one.after == "sound" and one.outcome in ("SILENT", "told"),
            "refused, and the trainer changed": "[refused, and changed" in one.note,
            "refused, though expected to be kept": one.outcome == "refused" and one.setup.expected == "keep",
            "not refused, though expected to be": one.outcome != "refused" and one.setup.expected == "refuse",
            "crashes": one.outcome == "crash" or "crash" in one.before + one.after,
            "truths that the padded trainer contradicts": one.padded_is_true != one.setup.padded_is_true,
        }.items():
            names.setdefault(kind, []).extend([name] if is_so else [])
    return "\n".join(f"{len(some):3d} {kind}: {', '.join(some)}" for kind, some in names.items())


def main() -> None:
    """Judge all set-ups, or those of the given names."""
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description="Judge what unpad.hf.attach makes of trainers as people write them.")
    parser.add_argument("names", nargs="*", help="set-ups; by default all")
    parser.add_argument("--tokens", type=int, help="tokens per micro-batch; by default about four are an update")
    args = parser.parse_args()
    asked = args.names
    start, judgements = time.perf_counter(), []
    print(
        f"{'set-up':34s} {'expected':8s} {'outcome':8s} {'error':>6s} {'padded':>6s} {'before':12s} {'after':12s} note"
    )
    for setup in SETUPS:
        if asked and setup.name not in asked:
            continue
        one = judge(setup, args.tokens, loud=bool(asked))
        judgements.append(one)
        cells = (
            f"{setup.name:34s} {setup.expected:8s} {one.outcome:8s} {number(one.error):>6s} {number(one.padded):>6s}"
        )
        note = one.note if asked else one.note[:300]
        print(f"{cells} {one.before[:40]:12s} {one.after[:40]:12s} {note}", flush=True)
    print(f"\n{len(judgements)} set-ups in {time.perf_counter() - start:.0f} s\n{report(judgements)}")
