"""Data that are padded before a collator sees them, as `tokenizer(..., padding="max_length")` makes them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import pytest
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer, default_data_collator

import unpad
from tests.proof.foreign.hugging_face import IGNORE, build, flatten, quiet, sequences, sft, tokenizer, trainer
from tests.proof.foreign.truth import alone, distance, first_update
from unpad.errors import RecipeError
from unpad.proof.foreign.certificate import ForeignCertificate

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and TRL
quiet()

WIDTH = 30
END = 2
ROWS = sequences(4)
Column = list[list[int]]


def padded(rows, side="right", *, labels=True, first=False, token=0, mask=True, in_padding=IGNORE):
    """Rows padded to one width.

    Args:
        first: whether the first token has a label, too.
        mask: False for a mask of ones, None for no mask.
        in_padding: label of the padding.
    """

    def wide(parts: Sequence[Sequence[int]], fill: int) -> Column:
        gaps = [[fill] * (WIDTH - len(part)) for part in parts]
        pairs = zip(parts, gaps, strict=True)
        return [[*part, *gap] if side == "right" else [*gap, *part] for part, gap in pairs]

    columns = {"input_ids": wide(rows, token)}
    if mask is not None:
        columns["attention_mask"] = wide([[1] * len(row) for row in rows], int(not mask))
    if labels:
        columns["labels"] = wide([[row[0] if first else IGNORE, *row[1:]] for row in rows], in_padding)
    return datasets.Dataset.from_dict(columns)


def proved(one: Trainer) -> ForeignCertificate:
    return unpad.prove_trainer(one)


def error(one: Trainer, rows: Sequence[Sequence[int]] = ROWS) -> float:
    """Distance of the trainer's own first gradient from the truth in fp64."""
    truth = alone(one.model, rows)
    return distance(first_update(one), truth)


def modeling(pad_is_end: bool = False) -> DataCollatorForLanguageModeling:
    words = tokenizer()
    if pad_is_end:
        words.pad_token = words.eos_token
    return DataCollatorForLanguageModeling(words, mlm=False)


def of_format(name: str) -> datasets.Dataset:
    return padded(ROWS).with_format(name)


SOUND: dict[str, Callable[[Path], Trainer]] = {
    "right, labels": lambda folder: made(folder, padded(ROWS)),
    "right, first label": lambda folder: made(folder, padded(ROWS, first=True)),
    "right, labels of the collator": lambda folder: made(folder, padded(ROWS, labels=False), modeling()),
    "left, first label -100": lambda folder: made(folder, padded(ROWS, "left")),
    "right, tensors": lambda folder: made(folder, of_format("torch")),
    "right, numpy": lambda folder: made(folder, of_format("numpy")),
    "right, with_transform": lambda folder: made(folder, padded(ROWS).with_transform(lambda rows: dict(rows))),
    "right, gpt2": lambda folder: made(folder, padded(ROWS), family="gpt2"),
    "right, no mask, labels of -100": lambda folder: made(folder, padded(ROWS, mask=None)),
    "right, a mask of ones, labels of -100": lambda folder: made(folder, padded(ROWS, mask=False)),
    "right, seq2seq collator": lambda folder: made(folder, padded(ROWS), DataCollatorForSeq2Seq(tokenizer())),
    "right, flattened": lambda folder: made(folder, padded(ROWS), flatten),
}


# What no mask hides is a part of its row, and changes nothing where it stands on the right and is no target.
NOT_HIDDEN = ("right, no mask, labels of -100", "right, a mask of ones, labels of -100", "right, flattened")


def made(folder, data, collator=default_data_collator, *, family="llama", pad=0):
    """A trainer; `pad` is the padding token of its tokenizer, None for a trainer without one."""
    one = trainer(build(family), folder, data, collator=collator, train_sampling_strategy="sequential")  # type: ignore[arg-type]
    one.processing_class.pad_token = f"t{pad}"
    if pad is None:
        one.processing_class = None
    return one


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_padding_in_the_data_is_no_part_of_a_sequence(name, tmp_path):
    certificate = proved(SOUND[name](tmp_path))
    assert certificate.verdict == "sound", str(certificate)
    hides = name not in NOT_HIDDEN
    assert certificate.num_tokens == (sum(map(len, ROWS)) if hides else len(ROWS) * WIDTH)
    assert error(SOUND[name](tmp_path)) < 1e-5


ENDED = [[*row, END] for row in ROWS]

FAULTS: dict[str, tuple[Callable[[Path], Trainer], str, str, str]] = {
    "padding is a target, a mask of ones": (
        lambda folder: made(folder, padded(ROWS, in_padding=0, mask=False)),
        "not proven", "targets", "a run of token 0 at an end",
    ),
    "left, a mask of ones": (
        lambda folder: made(folder, padded(ROWS, "left", mask=False)),
        "not proven", "targets", "a run of token 0 at an end that attention_mask does not hide",
    ),
    "left, first label": (
        lambda folder: made(folder, padded(ROWS, "left", first=True)),
        "wrong loss", "padding", "targets predicted from padding",
    ),
    "gpt2, left, without positions": (
        lambda folder: made(folder, padded(ROWS, "left"), family="gpt2"),
        "wrong loss", "logits", "positions count from the padding",
    ),
    "padding is the end, the collator hides it": (
        lambda folder: made(folder, padded(ENDED, labels=False, token=END), modeling(pad_is_end=True)),
        "not proven", "targets", "takes the last token, 2, of 4 of 4 rows",
    ),
    "padding is the end and a target, without a mask": (
        lambda folder: made(folder, padded(ENDED, token=END, mask=None, in_padding=END), pad=END),
        "not proven", "targets", "a run of token 2 at an end",
    ),
    "TRL drops the mask": (
        lambda folder: sft(build("llama"), folder, padded(ROWS, labels=False)),
        "not proven", "targets", "a run of token 0 at an end",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_padded_data_is_named(name, tmp_path):
    make, verdict, kind, advice = FAULTS[name]
    certificate = proved(make(tmp_path))
    assert certificate.verdict == verdict, str(certificate)
    assert advice in {finding.kind: finding.advice or finding.gap for finding in certificate.findings}[kind]
    assert not certificate.passed
    assert "cut" not in {finding.kind for finding in certificate.failed}
    assert error(make(tmp_path), ENDED if "end" in name else ROWS) > 1e-3


def test_padding_that_a_mask_hides_and_labels_teach_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="labels 19 tokens that attention_mask hides"):
        proved(made(tmp_path, padded(ROWS, in_padding=0)))


def test_the_end_of_a_sequence_is_no_padding_though_they_are_one_token(tmp_path):
    certificate = proved(made(tmp_path, padded(ENDED, token=END), pad=END))
    assert certificate.verdict == "sound", str(certificate)
    assert certificate.num_tokens == sum(map(len, ENDED))
