"""The proof of an update: what is planted is found, by `attach` and by `prove_trainer` after it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, default_data_collator

from tests.hf import kept
from tests.hf.families import IGNORED, make_model, make_sequences
from tests.hf.trainers import make_trainer
from unpad import prove_trainer
from unpad.errors import ProofError, RecipeError, UnpadError
from unpad.hf import attach, loader
from unpad.hf.update import unequal

pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs


def shifted(labels: Tensor) -> Tensor:
    return torch.cat([labels[1:], labels.new_full((1,), IGNORED)])


FAULTS: dict[str, Any] = {
    "labels are shifted": lambda ids, labels: (ids, shifted(labels)),
    "prompts are trained": lambda ids, labels: (ids, torch.cat([labels[:1], ids[1:]])),
    "the last target is lost": lambda ids, labels: (ids, torch.cat([labels[:-1], labels.new_full((1,), IGNORED)])),
    "the first token is lost": lambda ids, labels: (ids[1:], labels[1:]),
    "a token is another": lambda ids, labels: (torch.cat([ids[:-1], ids[-1:] + 1]), labels),
}


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let examples have a fault from now on."""
    before = loader.read

    def read(row: Any, place: Any, columns: Any) -> dict[str, Tensor]:
        made = before(row, place, columns)
        ids, labels = FAULTS[name](made["input_ids"], made["labels"])
        return {**made, "input_ids": ids, "labels": labels}

    monkeypatch.setattr(loader, "read", read)


def trainer_of(kind: str, folder: Path) -> Trainer:
    if kind == "sft":
        return make_trainer("sft", make_model("llama"), folder, train_dataset=kept.data(kept.ROWS))
    return kept.plain(folder, kept.alone(kept.SEQUENCES), kept.masking)


@pytest.fixture(scope="module", params=["collator", "sft"])
def proved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trainer]:
    """A trainer of a kind with our batches, which are right."""
    trainer = trainer_of(request.param, tmp_path_factory.mktemp("proved"))
    attach(trainer, tokens_per_micro=64)
    assert prove_trainer(trainer).passed
    return request.param, trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_examples_is_found_by_attach_and_after_it(proved, name, tmp_path, monkeypatch):
    kind, trainer = proved
    plant(monkeypatch, name)
    assert trainer.attachment is not None
    trainer.attachment.examples.clear()
    assert prove_trainer(trainer).passed is False
    with pytest.raises(UnpadError, match="the update on flat batches is not that of its sequences"):
        attach(trainer_of(kind, tmp_path), tokens_per_micro=64)


def test_a_head_that_scales_the_loss_is_found(tmp_path, monkeypatch):
    from unpad.hf import trainer as module

    before = module.add_target_head

    def doubled(*args: Any, **options: Any) -> Any:
        made = before(*args, **options)
        inner = made.inner.loss_function
        made.inner.loss_function = lambda *given, **named: 1.001 * inner(*given, **named)
        return made

    monkeypatch.setattr(module, "add_target_head", doubled)
    with pytest.raises(ProofError, match=r"not that of its sequences one at a time.*another loss than the mean"):
        attach(kept.plain(tmp_path, kept.data(kept.ROWS)))


def test_another_attention_alone_is_found_against_the_model_as_it_was(tmp_path, monkeypatch):
    from contextlib import contextmanager

    from unpad.hf import trainer as module

    before = module.preparing

    @contextmanager
    def other(model: Any) -> Iterator[Any]:
        with before(model) as prepared:
            for layer in model.model.layers:
                layer.self_attn.scaling *= 1.01  # alone and in batches alike
            yield prepared

    monkeypatch.setattr(module, "preparing", other)
    with pytest.raises(ProofError, match=r"not that of its sequences one at a time.*gradient"):
        attach(kept.plain(tmp_path, kept.data(kept.ROWS)))


def test_the_trainer_and_its_generators_are_as_before_a_refusal_and_a_proof(tmp_path):
    for kind in (Trainer, kept.Ignoring):
        trainer = kept.plain(tmp_path, kept.data(kept.ROWS), None, kind, gradient_accumulation_steps=3)
        weights = [weight.detach().clone() for weight in trainer.model.parameters()]
        torch.manual_seed(4)
        wanted = torch.rand(3)
        torch.manual_seed(4)
        if kind is kept.Ignoring:
            with pytest.raises(RecipeError):
                attach(trainer)
            assert "compute_loss_func" in vars(trainer)
            assert trainer.compute_loss_func is None
        else:
            attach(trainer)
        assert torch.equal(torch.rand(3), wanted)
        assert all(torch.equal(one, two) for one, two in zip(weights, trainer.model.parameters(), strict=True))
        assert all(weight.grad is None for weight in trainer.model.parameters())
        assert trainer.state.global_step == 0


@pytest.mark.nightly
def test_an_update_that_shows_too_little_is_compared_with_further_rows(tmp_path):
    """One sequence, equal ones, none with a target: a loss that weighs sequences alike would look right in each."""
    silent = [{"input_ids": one, "labels": [IGNORED] * len(one)} for one in kept.SEQUENCES]
    first = {"one": 1, "equal": 4}
    for name in ("one", "equal", "silent"):
        rows = kept.ROWS if name != "silent" else [*silent, *kept.ROWS[:5]]
        rows = [kept.ROWS[0]] * 12 + kept.ROWS[1:5] if name == "equal" else rows
        options = {"per_device_train_batch_size": first.get(name, 4), "gradient_accumulation_steps": 2}
        trainer = kept.plain(tmp_path, kept.data(rows), None, kept.NO_MEANS[0], **options)
        with pytest.raises(RecipeError, match=r"PerSequence\.compute_loss"):
            attach(trainer)


def test_data_of_one_sequence_or_of_equal_ones_is_taken(tmp_path):
    for rows in ([kept.ROWS[3]], [kept.ROWS[3]] * 6):
        trainer = kept.plain(tmp_path, kept.data(rows))
        wanted = kept.truth_of(trainer.model, kept.labelled(rows))[1]
        attach(trainer)
        assert kept.error_of(trainer, wanted) < 1e-5


def test_a_row_of_another_length_than_its_labels_names_the_row(tmp_path):
    rows = [*kept.ROWS, {"input_ids": [5, 6, 7], "labels": [5, 6]}]

    def single(rows: list[dict[str, Any]]) -> Any:
        return default_data_collator(rows) if len(rows) == 1 else kept.pad(rows)

    with pytest.raises(RecipeError, match="no labels or shift_labels in the shape of input_ids\n  at: row 8"):
        attach(kept.plain(tmp_path, kept.data(rows), single))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda n: {"attention_mask": torch.full((1, n), 2)}, "attention_mask of shape"),
        (lambda n: {"attention_mask": torch.tensor([[1, *[0] * (n - 2), 1]])}, "hides tokens in the middle"),
        (lambda n: {"attention_mask": torch.ones(1, 1, n, n)}, "attention_mask of shape"),
        (lambda n: {"position_ids": torch.arange(3, 3 + n)[None]}, "that do not count the tokens of a sequence from 0"),
        (lambda n: {"kind": "chat"}, "gives `kind` of shape str"),
        (lambda n: {"features": torch.zeros(1, 2, n)}, "gives `features` of shape"),
    ],
)
def test_what_a_flat_batch_has_no_place_for_is_refused_by_name(made, message, tmp_path):
    def single(rows: list[dict[str, Any]]) -> Any:
        ids = torch.tensor([rows[0]["input_ids"]])
        return {"input_ids": ids, "labels": ids.clone(), **made(ids.shape[1])}

    with pytest.raises(RecipeError, match=message):
        attach(kept.plain(tmp_path, kept.alone(kept.SEQUENCES), single, per_device_train_batch_size=1), prove=False)


def test_labels_that_are_no_tokens_of_the_row_are_refused(tmp_path):
    def twice(rows: list[dict[str, Any]]) -> Any:
        made = kept.pad([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows])
        return {**made, "labels": torch.nn.functional.pad(made["labels"][:, 1:], (0, 1), value=IGNORED)}

    for size in (1, 3):  # in a batch of rows, and in the update
        with pytest.raises(RecipeError, match=r"labels .*not the next token; are they shifted twice"):
            attach(kept.plain(tmp_path, kept.alone(kept.SEQUENCES), twice, per_device_train_batch_size=size))


@pytest.mark.parametrize(("num", "parts"), [(1, 1), (5, 2), (5, 4), (16, 3), (3, 3), (7, 1)])
def test_parts_of_an_update_are_unlike(num, parts):
    made = unequal(list(range(num)), parts)
    assert [one for part in made for one in part] == list(range(num))
    assert len(made) == parts
    assert all(made)
    assert parts in (1, num) or len(made[0]) > len(made[-1])


@pytest.mark.nightly
def test_a_wrong_update_of_long_data_is_found_in_a_part_of_it(tmp_path):
    rows = kept.alone(make_sequences(150, seed=9, low=4, high=20))
    options = {"per_device_train_batch_size": 50, "gradient_accumulation_steps": 3}
    with pytest.raises(RecipeError, match=r"Ignoring.compute_loss is another loss than"):
        attach(kept.plain(tmp_path, rows, kept.masking, kept.Ignoring, **options))
