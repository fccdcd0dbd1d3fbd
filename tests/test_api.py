"""The Python interface: the three one-call trainings, plans and batches for another loop, and a run opened again."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import unpad
from tests.conftest import random_sequences, tiny_model
from tests.helpers.plans import contents
from tests.helpers.toy import rows, same_tensors, weights, write_toy
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.batching.loader import load_micro, load_steps
from unpad.batching.plan import plan as make_plan
from unpad.errors import PlanError, RecipeError
from unpad.models.decoder import PRESETS, Decoder
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.training.step import accumulate

pytestmark = pytest.mark.filterwarnings("ignore:unpad.train_monitored:DeprecationWarning")

WEIGHTS = {"cross_entropy": 1.0}
TEXTS = [f"第{n}天，小猫看见一座桥。" for n in "一二三四五六七八九十"]


@pytest.fixture(autouse=True)
def _small_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset those calls train, in a size and without the dropout that would hide equalities."""
    monkeypatch.setitem(PRESETS, "zh_gpt", {**PRESETS["zh_gpt"], "width": 16, "hidden": 24, "heads": 2, "dropout": 0.0})


def gradients(model: Decoder, steps: list[list[RaggedBatch]]) -> dict[str, torch.Tensor]:
    """Of all steps together, divided once by all their targets."""
    model.zero_grad()
    accumulate(model, [micro for micros in steps for micro in micros], WEIGHTS, "fp32")
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --------------------------------------------------------------------------- one call


@pytest.mark.promise("batch.train-texts")
def test_the_three_trainings_return_the_epochs_they_ran(tmp_path):
    assert unpad.train_texts(TEXTS, 3, 1e-3, out=tmp_path / "a") == 3
    assert unpad.train_monitored(TEXTS, 3, 1e-3, 30, 4, out=tmp_path / "b") == 3
    assert unpad.train_monitored_batch(TEXTS, 3, 1e-3, 30, 4, out=tmp_path / "c") == 3
    for name in "abc":
        assert rows(tmp_path / name, "train")
        assert unpad.load(tmp_path / name).step > 0
    updates = {name: len(rows(tmp_path / name, "train")) for name in "abc"}
    num = len(TEXTS) - 1  # one text is held out
    assert updates == {"a": 3 * num, "b": 3 * -(-num // 4), "c": updates["c"]}
    assert updates["c"] < updates["a"]


@pytest.mark.promise("train.patience")
def test_a_training_without_progress_stops_before_its_last_epoch(tmp_path):
    """At this rate nothing improves after the first checks, so patience 2 ends the run and the count says when."""
    epochs = unpad.train_monitored(TEXTS, 50, 1.0, 2, 4, out=tmp_path / "run")
    assert 2 < epochs < 50
    assert epochs == rows(tmp_path / "run", "train")[-1]["epoch"]


@pytest.mark.promise("batch.train-texts")
def test_accumulated_and_batched_training_are_the_same(tmp_path):
    """All texts have one length, so one batch of all is one step of all accumulated, to the rounding of bf16."""
    unpad.train_monitored(TEXTS, 3, 1e-3, 30, len(TEXTS), tmp_path / "accumulated")
    unpad.train_monitored_batch(TEXTS, 3, 1e-3, 30, len(TEXTS), out=tmp_path / "batched")
    accumulated, batched = (rows(tmp_path / name, "train") for name in ("accumulated", "batched"))
    assert len(accumulated) == len(batched) == 3
    for a, b in zip(accumulated, batched, strict=True):
        assert (a["targets"], a["sequences"]) == (b["targets"], b["sequences"])
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
    before, after = weights(tmp_path / "accumulated"), weights(tmp_path / "batched")
    for name, tensor in before.items():
        assert (tensor - after[name]).norm() <= 2e-2 * tensor.norm() + 1e-3, name


@pytest.mark.promise("batch.train-texts")
def test_accumulation_computes_one_text_at_a_time(tmp_path, monkeypatch):
    """The memory of accumulated training is that of one text, whatever the number of texts in a step."""
    passes = []

    def record(model: Decoder, batch: RaggedBatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        if model.training:
            passes.append(len(batch.layout.lengths()))
        return losses(model, batch)

    losses = Decoder.losses
    monkeypatch.setattr(Decoder, "losses", record)
    unpad.train_monitored(TEXTS, 1, 1e-3, 30, 4, tmp_path / "run")
    num = len(TEXTS) - 1  # one text is held out
    assert passes == [1] * num
    assert [row["sequences"] for row in rows(tmp_path / "run", "train")] == [4] * (num // 4) + [num % 4] * (num % 4 > 0)


@pytest.mark.promise("batch.train-texts", "versions.deprecated")
@pytest.mark.parametrize(
    ("call", "name", "instead"),
    [
        (
            lambda out: unpad.train_monitored(TEXTS, 2, 1e-3, 30, 4, out=out),
            "train_monitored",
            lambda out: unpad.train_texts(TEXTS, 2, 1e-3, out, patience=30, batch_size=4),
        ),
        (
            lambda out: unpad.train_monitored_batch(TEXTS, 2, 1e-3, 30, 4, out=out),
            "train_monitored_batch",
            lambda out: unpad.train_texts(TEXTS, 2, 1e-3, out, patience=30, batch_size=4, bucket=True),
        ),
    ],
    ids=["train_monitored", "train_monitored_batch"],
)
def test_a_deprecated_name_warns_with_its_replacement_which_trains_alike(call, name, instead, tmp_path):
    """The loss of the last step is that of the replacement, to the rounding of bf16 and of another order of sums."""
    with pytest.warns(DeprecationWarning, match=rf"^unpad\.{name} is deprecated .*unpad\.train_texts\(") as caught:
        assert call(tmp_path / "old") == 2
    assert {one.filename for one in caught} == {__file__}
    assert instead(tmp_path / "new") == 2
    old, new = (rows(tmp_path / run, "train") for run in ("old", "new"))
    assert [row["step"] for row in old] == [row["step"] for row in new]
    assert old[-1]["loss"] == pytest.approx(new[-1]["loss"], rel=2e-2)


# --------------------------------------------------------------------------- batches for another loop


@pytest.mark.promise("batch.train-texts")
@pytest.mark.parametrize("strategy", strategy_names())
def test_single_examples_and_batches_give_the_same_gradients(strategy):
    model = tiny_model().eval()
    sequences = random_sequences([5, 12, 2, 1, 20, 9, 9])
    masks = [[i % 3 != 1 for i in range(len(s))] for s in sequences]
    alone = gradients(model, [[from_sequences([s], [m])] for s, m in zip(sequences, masks, strict=True) if any(m[1:])])
    settings: dict[str, Any] = {"tokens_per_step": 15, "tokens_per_micro": 12, "batch_size": 2, "row_tokens": 20}
    batched = gradients(model, list(unpad.batches(sequences, masks, strategy=strategy, **settings)))
    torch.testing.assert_close(batched, alone, rtol=1e-9, atol=1e-12)


def test_batches_are_those_of_the_loader_that_training_uses(tmp_path):
    from tests.helpers.corpus import prepare
    from unpad.recipes.file import load_recipe

    tokens, tokenizer, _ = prepare(load_recipe(str(write_toy(tmp_path))))
    settings = PlanSettings(tokens_per_step=150, tokens_per_micro=60)
    made = make_plan(np.maximum(tokens.lengths - 1, 0), settings, seed=3, epoch=2, targets=tokens.count_targets)
    load = partial(load_micro, tokens, pad_id=tokenizer.pad_id)
    wanted = list(load_steps(load, made, torch.device("cpu"), group_lengths=False))
    everything = range(len(tokens))
    given = unpad.batches(
        [tokens.tokens(i).tolist() for i in everything], [tokens.loss_mask(i).tolist() for i in everything],
        seed=3, epoch=2, tokens_per_step=150, tokens_per_micro=60,
    )  # fmt: skip
    for ours, theirs in zip(given, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            for field in ("input_ids", "labels", "loss_mask", "position_ids", "seq_ids"):
                assert torch.equal(getattr(a, field), getattr(b, field)), field


def test_windows_of_batches_count_every_target_once():
    sequences = random_sequences([40, 7, 23])
    for stride in (None, 3):
        made = list(unpad.batches(sequences, max_tokens=10, stride=stride, tokens_per_step=30))
        assert sum(micro.num_targets for micros in made for micro in micros) == 39 + 6 + 22


def test_a_plan_is_the_planners_and_pure():
    lengths = [5, 12, 2, 20, 9, 9]
    ours = unpad.plan(lengths, seed=1, epoch=4, strategy="bucket", batch_size=2)
    settings = PlanSettings(strategy="bucket", batch_size=2)
    assert contents(ours) == contents(make_plan(np.array(lengths), settings, seed=1, epoch=4))
    assert contents(ours) == contents(unpad.plan(lengths, seed=1, epoch=4, strategy="bucket", batch_size=2))
    assert ours.ledger.total == sum(lengths)


@pytest.mark.parametrize("sequences", [[], [[1]], [[1], []]])
def test_nothing_to_plan_is_said(sequences):
    with pytest.raises(PlanError, match="no batch comes of"):
        list(unpad.batches(sequences))


# --------------------------------------------------------------------------- a run


def test_training_a_recipe_gives_a_run_that_opens_again(tmp_path):
    run = unpad.train(str(write_toy(tmp_path)), "train.max_steps=6", "optim.lr=3e-3", out=tmp_path / "run")
    again = unpad.load(tmp_path / "run")
    assert run.recipe.optim.lr == again.recipe.optim.lr == 3e-3
    assert same_tensors(dict(run.model.state_dict()), dict(again.model.state_dict()))
    prompts = ["小猫喜欢", "老师"]
    replies = run.generate(prompts, max_new_tokens=8, temperature=0.9)
    assert replies == again.generate(prompts, max_new_tokens=8, temperature=0.9)
    assert [run.generate([p], max_new_tokens=8)[0] for p in prompts] == run.generate(prompts, max_new_tokens=8)
    assert "".join(run.stream(prompts[0], max_new_tokens=8)) == run.generate(prompts[:1], max_new_tokens=8)[0]


def test_a_prompt_of_a_text_run_begins_with_bos_and_that_of_a_chat_run_with_its_template(tmp_path):
    chat = unpad.train(str(write_toy(tmp_path / "chat")), "train.max_steps=1", out=tmp_path / "a")
    text = unpad.train(
        str(write_toy(tmp_path / "text")), "data.chat=[]", "stages=[]", "train.max_steps=1", out=tmp_path / "b"
    )
    assert text.tokenizer.decode(text.prompt_ids("小猫")) == "小猫"
    assert chat.tokenizer.decode(chat.prompt_ids("小猫")) == "用户：小猫助手："
    assert chat.prompt_ids("小猫")[0] == chat.tokenizer.bos_id


def test_a_run_that_does_not_exist_names_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="there is no run") as caught:
        unpad.load("zh_chat-1")
    assert "unpad train zh_chat" in caught.value.fix
