"""A row is what its own collator makes of it alone: no verdict accuses what batching does not change."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

import unpad
from tests.proof.foreign.hugging_face import IGNORE, build, dataset, pad, quiet, sequences, trainer
from tests.proof.foreign.losses import logits_of, nll, own, shifted
from unpad.errors import ProofError, RecipeError

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and TRL
quiet()

IDS = sequences(8)
ROWS = dataset(IDS).remove_columns("labels")
Rows = list[dict[str, Any]]


def batch(rows: list[list[int]], labels: list[list[int]] | None = None) -> Any:
    made = rows if labels is None else labels
    return pad()([{"input_ids": one, "labels": own} for one, own in zip(rows, made, strict=True)])


def ids_of(rows: Rows) -> list[list[int]]:
    return [one["input_ids"] for one in rows]


def cuts(rows: Rows) -> Any:
    return batch([ids[-9:] for ids in ids_of(rows)])


def drops(rows: Rows) -> Any:
    return batch([[token for token in one["input_ids"] if token % 5] for one in rows])


def appends(rows: Rows) -> Any:
    return batch([[*one["input_ids"], 2] for one in rows])


def relabels(rows: Rows) -> Any:
    return batch(ids_of(rows), [[IGNORE] * 3 + one["input_ids"][3:] for one in rows])


def shifts(rows: Rows) -> Any:
    return batch(ids_of(rows), [[*one["input_ids"][1:], IGNORE] for one in rows])


def draws(rows: Rows) -> Any:
    return batch([[token if random.random() < 0.7 else 3 for token in one["input_ids"]] for one in rows])


def joins(rows: Rows) -> Any:
    one, two = (row["input_ids"] for row in rows)
    return batch([[*one, *two]])


def doubles(rows: Rows) -> Any:
    return batch([part for one in rows for part in (one["input_ids"], one["input_ids"][::-1])])


def hides(rows: Rows) -> Any:
    made = batch(ids_of(rows))
    made["attention_mask"][:, 2] = 0
    return made


def places(rows: Rows) -> Any:
    made = batch(ids_of(rows))
    made["position_ids"] = 5 + 2 * torch.arange(made["input_ids"].shape[1]).expand(made["input_ids"].shape)
    return made


def sees_its_begin(rows: Rows) -> Any:
    made = batch(ids_of(rows))
    width = made["input_ids"].shape[1]
    sees = torch.ones(width, width, dtype=torch.bool).tril()
    sees[:3, :3] = True
    return {**made, "attention_mask": sees.expand(len(rows), 1, width, width)}


COLLATORS = (cuts, drops, appends, relabels)
REFUSED: dict[Callable[[Rows], Any], str] = {
    shifts: "labels that are not the next token; are they shifted twice?",
    draws: "drawn anew each time that it is read",
    joins: "joins fails on a row alone: ValueError",
    doubles: r"makes \(2, .*\) input_ids of a single row",
    hides: "attention_mask that hides tokens in the middle",
    places: "that do not count the tokens of a sequence from 0",
    sees_its_begin: r"gives an attention_mask of shape \(1, 1, ",
}


def proved(folder: Path, collator: Any = None, kind: type[Trainer] = Trainer, **changes: Any) -> Any:
    return unpad.prove_trainer(
        trainer(build("llama"), folder, ROWS, collator=collator or batch_of, kind=kind, **changes)
    )


def batch_of(rows: Rows) -> Any:
    return batch(ids_of(rows))


@pytest.mark.promise("proof.trainers")
@pytest.mark.parametrize("collator", COLLATORS)
def test_what_a_collator_does_to_a_row_alone_is_the_scripts(collator, tmp_path):
    certificate = proved(tmp_path, collator)
    assert certificate.verdict == "sound", str(certificate)


@pytest.mark.promise("proof.trainers")
@pytest.mark.parametrize("collator", REFUSED)
def test_a_collator_that_gives_a_row_no_meaning_is_refused_by_name(collator, tmp_path):
    with pytest.raises(RecipeError, match=REFUSED[collator]):
        proved(tmp_path, collator)


@pytest.mark.slow
@pytest.mark.promise("proof.trainers")
@pytest.mark.parametrize("collator", [cuts, drops])
def test_a_wrong_mean_is_found_behind_any_collator(collator, tmp_path):
    made = trainer(build("llama"), tmp_path, ROWS, collator=collator)
    made.model_accepts_loss_kwargs = False
    certificate = unpad.prove_trainer(made)
    assert certificate.verdict == "wrong loss", str(certificate)
    assert [finding.kind for finding in certificate.failed] == ["loss", "gradient"]


def test_what_a_collator_does_in_a_batch_alone_is_found(tmp_path):
    def to_the_shortest(rows: Rows) -> Any:
        least = min(len(row["input_ids"]) for row in rows)
        return batch([row["input_ids"][:least] for row in rows])

    assert proved(tmp_path, to_the_shortest).verdict == "cut"


def unshifted(model, inputs, num):
    return nll(logits_of(model, inputs), inputs["labels"]).sum() / num


def by_a_constant(model, inputs, num):
    return shifted(model, inputs)[0].sum() / 100


def focal(model, inputs, num):
    each, _, _ = shifted(model, inputs)
    return ((1 - (-each).exp()) ** 2 * each).sum() / num


def over_rows(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    return (each.sum(1) / (targets != IGNORE).sum(1)).mean() / 2


def of_micro_batches(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    return each.sum() / (targets != IGNORE).sum() / 2


@pytest.mark.slow
@pytest.mark.promise("proof.trainers")
@pytest.mark.parametrize("loss", [focal, unshifted, by_a_constant, over_rows, of_micro_batches])
def test_a_loss_of_ones_own_that_is_another_is_named_and_not_judged(loss, tmp_path):
    certificate = proved(tmp_path, kind=own(loss))
    assert certificate.verdict == "not proven", str(certificate)
    gaps = [finding.gap for finding in certificate.findings if finding.kind in ("loss", "gradient")]
    assert all("OwnLoss.compute_loss is another loss than the mean cross-entropy over targets" in gap for gap in gaps)
    assert all("divide the sum over targets by the targets of the whole update" in gap for gap in gaps)


def test_a_model_with_another_loss_is_named_and_not_judged(tmp_path):
    """Bart's loss takes labels that are shifted already."""
    model = build("llama")

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: object) -> Tensor:
        return nll(logits, labels).sum() / (num_items_in_batch or (labels != IGNORE).sum())

    model.loss_function = loss
    certificate = unpad.prove_trainer(trainer(model, tmp_path))
    assert certificate.verdict == "not proven"
    assert "the loss of LlamaForCausalLM is another loss" in certificate.finding("loss").gap
    with pytest.raises(ProofError, match="the loss of LlamaForCausalLM for a sequence alone is not the mean"):
        unpad.prove_callable(model, lambda rows: batch(rows), IDS)


# --------------------------------------------------------------------------- what a row has besides its tokens


def with_types(rows: Rows) -> Any:
    made = relabels(rows)
    made["token_type_ids"] = made["input_ids"] % 7 + 40
    return made


def with_scales(rows: Rows) -> Any:
    return {**relabels(rows), "scale": torch.tensor([1.0 + one["input_ids"][0] / 99 for one in rows])}


BESIDE = {with_types: "token_type_ids", with_scales: "scale"}


@pytest.mark.parametrize("collator", BESIDE)
def test_what_a_collator_gives_besides_tokens_is_refused_by_name(collator, tmp_path):
    with pytest.raises(RecipeError, match=f"{collator.__name__} gives `{BESIDE[collator]}` of shape"):
        proved(tmp_path, collator, remove_unused_columns=False)


class OfHidden(Trainer):
    """A loss that reads hidden states, for which transformers adds hooks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs, output_hidden_states=True, num_items_in_batch=num_items_in_batch)
        self.num_hidden = len(out.hidden_states)
        return out.loss


def test_a_proof_leaves_no_hooks_for_hidden_states(tmp_path):
    made = trainer(build("llama"), tmp_path, ROWS, collator=batch_of, kind=OfHidden)
    assert unpad.prove_trainer(made).verdict == "sound"
    made.train()
    assert made.num_hidden == made.model.config.num_hidden_layers + 1
