"""The certificate of a recipe: on its own data, through the planner and loader that training uses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.toy import run, write_toy
from unpad.batching.batch import RaggedBatch
from unpad.batching.loader import TokenSource, load_micro
from unpad.batching.plan import Micro
from unpad.data import text as text_data
from unpad.data.sources.split import Split
from unpad.errors import PlanError
from unpad.proof import sample as samples
from unpad.proof.line import Certificate
from unpad.proof.recipe import prove_recipe
from unpad.proof.sample import LEAST, MOST, candidates_of, choose
from unpad.recipes.file import load_recipe
from unpad.recipes.training import strategy_names
from unpad.training.setup import Setup, prepare_setup

pytestmark = pytest.mark.slow

SMALL = ["model.width=16", "model.heads=2", "model.hidden=24", "model.blocks=1", "tokenizer.vocab_size=600"]


def failed(certificate: Certificate) -> list[str]:
    return [line.name for line in certificate.lines if line.passed is False]


@pytest.mark.promise("proof.names")
def test_a_run_is_proved_by_its_name_with_what_it_kept(unpad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_toy(tmp_path / "toy")
    run(recipe, tmp_path / "runs" / "first", "train.max_steps=1")
    run(recipe, tmp_path / "runs" / "mine", "train.max_steps=1", "train.init_from=runs/first", "model.dropout=0.2")
    shutil.rmtree(tmp_path / "runs" / "first")
    for name in ("mine", "runs/mine", tmp_path / "runs" / "mine"):
        assert json.loads(unpad("prove", name, "--json", code=0).out)["passed"] is True
    told = unpad("prove", "mnie")
    assert (told.code, "did you mean mine?" in told.err) == (2, True)
    told = unpad("prove", "mine", "model.dropuot=0")
    assert (told.code, "did you mean dropout" in told.err) == (2, True)
    assert unpad("prove", "mine", "--processes", "1,2").code == 0


def setup_of(recipe: Path, *overrides: str) -> Setup:
    return prepare_setup(load_recipe(str(recipe), list(overrides)), Path(), None)


@pytest.mark.parametrize(
    ("name", "precision"), [("zh_chat", "fp32"), ("zh_chat", "bf16"), ("llm", "fp32"), ("dpo", "bf16")]
)
def test_the_packaged_recipes_pass(name, precision):
    certificate = prove_recipe(name, [*SMALL, f"precision={precision}"])
    assert certificate.passed, failed(certificate)
    names = [line.name for line in certificate.lines]
    for strategy in strategy_names():
        assert f"plan {strategy} = alone" in names
    for claim in (
        "the same text has the same ids twice", "text comes back from its ids",
        "labels stay within their sequence", "padded left = alone", "split into micro-batches, one empty = alone",
        "no gradient crosses between sequences", "what padding holds is invisible",
        "a token never changes an earlier output", f"{precision} gradients against fp64",
        f"{precision} sequences are isolated, bit for bit",
    ):  # fmt: skip
        assert claim in names
    exact = [line for line in certificate.lines if line.name.endswith("= alone")]
    assert all(line.bound == 1e-10 and line.measured is not None and line.kernel for line in exact)


@pytest.mark.parametrize(
    "overrides",
    [
        ["plan.max_tokens=7", "plan.stride=3"],
        ["plan.max_tokens=9", "plan.overflow=truncate_left"],
        ["plan.cross_documents=true", "plan.max_tokens=20"],
        ["train.label_smoothing=0.1", "model.kv_heads=1"],
        ["augment.multiplier=1", "augment.synonyms=1.0"],
    ],
)
def test_every_way_to_cut_and_change_the_data_passes(tmp_path, overrides):
    certificate = prove_recipe(str(write_toy(tmp_path / "toy")), overrides)
    assert certificate.passed, failed(certificate)


def test_the_sample_holds_the_longest_and_the_shortest_sequence(tmp_path):
    setup = setup_of(write_toy(tmp_path / "toy"))
    sample = choose(setup, candidates_of(setup)).seq_ids
    lengths = setup.data.table.positions
    trained = lengths[setup.data.table.split == Split.TRAIN]
    assert lengths[sample].max() == trained.max()
    assert lengths[sample].min() == trained.min()
    assert not np.any(setup.data.table.split[sample]), "held-out documents stay out of it"
    assert LEAST <= len(sample) <= MOST


def test_sequences_that_the_plan_drops_are_no_part_of_the_sample(tmp_path):
    recipe = write_toy(tmp_path / "toy")
    drop = ["plan.overflow=drop", "plan.max_tokens=20"]
    setup = setup_of(recipe, *drop)
    assert setup.data.table.positions[choose(setup, candidates_of(setup)).seq_ids].max() == 20
    assert prove_recipe(str(recipe), drop).passed
    with pytest.raises(PlanError, match="drops every token"):
        prove_recipe(str(recipe), ["plan.overflow=drop", "plan.max_tokens=2"])


def long_and_short(folder: Path) -> Path:
    """Sequences on both sides of the length where bf16 changes its kernel."""
    recipe = write_toy(folder, model={"context": 700}, precision="bf16", stages=[], train={"max_epochs": 1})
    texts = [('{"text": "' + "春天的河水" * n + '", "split": "train"}') for n in (1, 2, 3, 200)]
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return recipe


def test_a_kernel_that_the_run_needs_and_the_sample_did_not_run_is_not_proven(tmp_path, monkeypatch):
    monkeypatch.setattr(
        samples,
        "candidates_of",
        lambda setup: [unit for unit in candidates_of(setup) if unit[0].stop - unit[0].start < 99],
    )
    certificate = prove_recipe(str(long_and_short(tmp_path / "toy")), [])
    assert certificate.passed is None
    unproven = [line for line in certificate.lines if line.passed is None and line.applies and line.kernel]
    assert [line.kernel for line in unproven][-1:] == ["group sdpa"]
    assert unproven[-1].note == "training runs this kernel at lengths that the sample does not have"
    text = certificate.text()
    assert any(line.startswith("NOT PROVEN") and "group sdpa" in line for line in text)
    assert "NOT PROVEN" in text[-1]


# --------------------------------------------------------------------------- faults of the path from data to batch


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    def broken(tokens: TokenSource, micro: Micro, pad_id: int) -> RaggedBatch:
        return fault(load_micro(tokens, micro, pad_id))

    monkeypatch.setattr(text_data, "load_micro", broken)


def test_windows_that_count_their_context_again_are_caught(tmp_path, monkeypatch):
    def everything(tokens: TokenSource, micro: Micro, pad_id: int) -> RaggedBatch:
        return load_micro(tokens, replace(micro, first_target=micro.starts), pad_id)

    monkeypatch.setattr(text_data, "load_micro", everything)
    certificate = prove_recipe(str(write_toy(tmp_path / "toy")), ["plan.max_tokens=7", "plan.stride=3"])
    assert "labels stay within their sequence" in failed(certificate)
    assert "plan pack = alone" in failed(certificate)


def test_labels_that_are_not_shifted_are_caught(tmp_path, monkeypatch):
    with_fault(monkeypatch, lambda batch: replace(batch, labels=batch.input_ids))
    assert "labels stay within their sequence" in failed(prove_recipe(str(write_toy(tmp_path / "toy")), []))


def test_a_user_turn_that_counts_in_the_loss_is_caught(tmp_path, monkeypatch):
    def all_targets(batch: RaggedBatch) -> RaggedBatch:
        everywhere = torch.ones_like(batch.loss_mask)
        return replace(batch, loss_mask=everywhere, target_index=everywhere.nonzero().flatten())

    with_fault(monkeypatch, all_targets)
    assert "labels stay within their sequence" in failed(prove_recipe(str(write_toy(tmp_path / "toy")), []))
