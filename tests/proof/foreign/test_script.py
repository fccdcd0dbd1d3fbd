"""A row is what its own collator makes of it alone: no verdict accuses what batching does not change."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer

import unpad
from tests.hf.families import VOCAB
from tests.proof.foreign.hugging_face import IGNORE, build, dataset, pad, quiet, sequences, trainer
from tests.proof.foreign.losses import own, shifted
from unpad.errors import RecipeError

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
    places: "position_ids that do not begin a sequence at 0",
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
def test_what_a_collator_does_to_a_row_alone_is_the_scripts(collator: Any, tmp_path: Path) -> None:
    certificate = proved(tmp_path, collator)
    assert certificate.verdict == "sound", str(certificate)


@pytest.mark.promise("proof.trainers")
@pytest.mark.parametrize("collator", REFUSED)
def test_a_collator_that_gives_a_row_no_meaning_is_refused_by_name(collator: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=REFUSED[collator]):
        proved(tmp_path, collator)


class MeanOfMeans(Trainer):
    """Mean over micro-batches of their means."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.loss_is_scaled_for_ga = False
        return model(**inputs).loss


@pytest.mark.slow
@pytest.mark.promise("proof.trainers")
@pytest.mark.parametrize("collator", [cuts, drops])
def test_a_wrong_mean_is_found_behind_any_collator(collator: Any, tmp_path: Path) -> None:
    certificate = proved(tmp_path, collator, MeanOfMeans)
    assert certificate.verdict == "wrong loss", str(certificate)
    assert [finding.kind for finding in certificate.failed] == ["loss", "gradient"]


def test_what_a_collator_does_in_a_batch_alone_is_found(tmp_path: Path) -> None:
    def to_the_shortest(rows: Rows) -> Any:
        least = min(len(row["input_ids"]) for row in rows)
        return batch([row["input_ids"][:least] for row in rows])

    assert proved(tmp_path, to_the_shortest).verdict == "cut"


def by_a_constant(model, inputs, num):
    return shifted(model, inputs)[0].sum() / 100


def with_the_last(model, inputs, num):
    each, logits, targets = shifted(model, inputs)
    last = (targets != IGNORE).sum(1) - 1
    return each.sum() / num + logits[torch.arange(len(last)), last, 5].square().sum() / 50


def contrasting(model, inputs, num):
    each, logits, targets = shifted(model, inputs)
    ends = F.normalize(logits[torch.arange(len(logits)), (targets != IGNORE).sum(1) - 1], dim=-1)
    return each.sum() / num + (ends @ ends.T * 5).logsumexp(-1).mean()


def over_padding(model, inputs, num):
    each, logits, _ = shifted(model, inputs)
    return each.sum() / num + 0.1 * logits.logsumexp(-1).square().mean()


def with_a_mean(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    return ((1 - (-each).exp()) ** 2 * each).sum() / (targets != IGNORE).sum() / 2


def hardest(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    real = each.flatten()[targets.flatten() != IGNORE]
    return real.topk(len(real) // 2).values.mean() / 2


def by_their_losses(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    means = each.sum(1) / (targets != IGNORE).sum(1)
    return (means * means.detach().softmax(0)).sum() / 2


def over_rows(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    return (each.sum(1) / (targets != IGNORE).sum(1)).mean() / 2


def by_class(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    weights = torch.where(targets == IGNORE, 0, 1 + targets % 3)
    return (each * weights).sum() / weights.sum()


LOSSES: dict[str, tuple[Any, str]] = {
    "by the losses of rows": (by_their_losses, "not proven"),
    "by class, in one batch": (by_class, "not proven"),
    "the hardest of a batch": (hardest, "not proven"),
    "a sum": (by_a_constant, "not proven"),
    "a mean over rows": (over_rows, "not proven"),
    "a term per row": (with_the_last, "not proven"),
    "between rows": (contrasting, "not proven"),
    "over padding": (over_padding, "not proven"),
    "a mean of means": (with_a_mean, "wrong loss"),
}


@pytest.mark.slow
@pytest.mark.promise("proof.trainers")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_ones_own_is_accused_only_where_batches_change_it(name: str, tmp_path: Path) -> None:
    loss, verdict = LOSSES[name]
    is_one = name in ("between rows", "by class, in one batch")
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1} if is_one else {}
    certificate = proved(tmp_path, kind=own(loss), **sizes)
    assert certificate.verdict == verdict, str(certificate)
    reason = "OwnLoss.compute_loss is a loss of the trainer's own, and no mean over the targets of these batches"
    assert [finding.kind for finding in certificate.findings if finding.gap == reason] == (
        ["loss", "gradient"] if verdict == "not proven" else []
    )


# --------------------------------------------------------------------------- what a row has besides its tokens


def with_types(rows: Rows) -> Any:
    made = relabels(rows)
    made["token_type_ids"] = made["input_ids"] % 7 + 40
    return made


def with_scales(rows: Rows) -> Any:
    return {**relabels(rows), "scale": torch.tensor([1.0 + one["input_ids"][0] / 99 for one in rows])}


class Scaled(LlamaForCausalLM):
    """Logits of each row by a number of its own."""

    def forward(self, input_ids, scale=None, labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        out.logits = out.logits * (1.0 if scale is None else scale[:, None, None])
        if labels is not None:
            out.loss = self.loss_function(out.logits, labels, VOCAB, num_items_in_batch)
        return out


def of_kind(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind(build("llama").config)


BESIDE: dict[str, tuple[Any, Any]] = {
    "per token": (lambda: build("gpt2"), with_types),
    "per row": (lambda: of_kind(Scaled), with_scales),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_row_alone_has_its_own_columns(name: str, tmp_path: Path) -> None:
    model, collator = BESIDE[name]
    certificate = unpad.prove_trainer(trainer(model(), tmp_path, ROWS, collator=collator, remove_unused_columns=False))
    assert certificate.verdict == "sound", str(certificate)


class OfHidden(Trainer):
    """A loss that reads hidden states, for which transformers adds hooks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs, output_hidden_states=True, num_items_in_batch=num_items_in_batch)
        self.num_hidden = len(out.hidden_states)
        return out.loss


def test_a_proof_leaves_no_hooks_for_hidden_states(tmp_path: Path) -> None:
    made = trainer(build("llama"), tmp_path, ROWS, collator=batch_of, kind=OfHidden)
    assert unpad.prove_trainer(made).verdict == "sound"
    made.train()
    assert made.num_hidden == made.model.config.num_hidden_layers + 1
