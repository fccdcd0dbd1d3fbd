"""Trainers with our batches: gradients of one sequence at a time, exact evaluation, resume equal to the bit."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.hf.families import VOCAB, distance, make_model, targets_of, truth

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.utils import DistributedType
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        Llama4TextConfig,
        LlamaConfig,
        Phi3Config,
        Trainer,
        TrainerCallback,
    )

from tests.hf.trainers import ROWS, held_out_loss, make_trainer, trained
from unpad import prove_trainer
from unpad.errors import ProofError, RecipeError, ResumeError, UnpadError
from unpad.hf import attach, head
from unpad.hf import trainer as hf_trainer

pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs


# Mode of the loss: "chunks" where the head is a product, "targets" where logits are capped or scaled.
CASES = [
    ("plain", "llama", "chunks"),
    ("plain", "gpt2", "chunks"),
    ("plain", "gemma2", "targets"),
    ("plain", "qwen3_5", "chunks"),
    ("plain", "opt", "chunks"),  # its head calls the decoder, and not the base model around it
    ("sft", "llama", "chunks"),
    ("sft", "opt", "chunks"),
    ("sft", "gemma2", "targets"),
    ("sft", "gpt_oss", "chunks"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family", "mode"), CASES)
def test_an_update_and_an_evaluation_are_those_of_one_sequence_at_a_time(kind, family, mode, tmp_path):
    model = make_model(family)
    wanted_loss, wanted = truth(model, ROWS)
    wanted_evaluation = held_out_loss(model)
    options = {"packing": True, "max_length": 64} if family == "gpt_oss" and kind == "sft" else {}  # taken apart again
    trainer = make_trainer(kind, model, tmp_path, **options)
    with pytest.warns(UserWarning, match="eval_loss is now the mean over all targets of the set"):
        attachment = attach(trainer, tokens_per_micro=64)
    assert family != "gpt_oss" or prove_trainer(trainer).passed
    assert attachment.certificate is not None
    assert attachment.certificate.passed
    assert attachment.head.mode == mode
    assert repr(attachment) == f"Attachment(tokens_per_micro=64, sound in {attachment.certificate.precision})"
    recorder = trained(trainer)
    assert recorder.num_steps == 1
    assert distance(recorder.gradient, wanted) < 1e-5
    assert recorder.logs[0]["loss"] == pytest.approx(wanted_loss, rel=1e-5)
    for tokens in (40, 10_000):
        attachment.tokens_per_eval = tokens
        assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted_evaluation, rel=1e-6)
    copy.deepcopy(trainer.model)  # as an average of weights is begun


class OwnHead(type(make_model("llama"))):  # type: ignore[misc]
    """A model of one's own: a head that nobody is told of, a backbone in parts, or no loss."""

    has_head = has_loss = True

    def get_output_embeddings(self) -> Any:
        return super().get_output_embeddings() if self.has_head else None

    def forward(self, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **rest: Any) -> Any:
        out = self.model(input_ids=input_ids, **rest)
        logits = self.lm_head(out if isinstance(out, Tensor) else out[0])
        if labels is None or not self.has_loss:
            return {"logits": logits}
        loss = self.loss_function(logits, labels, VOCAB, num_items_in_batch=num_items_in_batch)
        return {"loss": loss, "logits": logits}


class LossOutside(Trainer):
    """A loss of one's own, since the model has none."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        out = model(**{name: value for name, value in inputs.items() if name != "labels"})
        total = F.cross_entropy(out["logits"][:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")
        return (total / num_items_in_batch, out) if return_outputs else total / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no head", "no loss", "a tuple", "a tensor", "nothing"])
def test_a_head_of_ones_own_is_kept_or_refused_by_name(kind, tmp_path):
    """Whatever a model does between its parts, `attach` finds a way, or says that there is none."""
    model = make_model("llama")
    wanted = truth(model, ROWS)[1]
    model.__class__ = type("Own", (OwnHead,), {"has_head": kind != "no head", "has_loss": kind != "no loss"})
    plain = model.model.forward
    wraps = {"a tuple": lambda out: (out.last_hidden_state,), "a tensor": lambda out: out.last_hidden_state}
    if kind in wraps:
        model.model.forward = lambda *args, **kwargs: wraps[kind](plain(*args, **kwargs))
    if kind == "nothing":
        model.__class__.forward = lambda self, input_ids=None, **rest: {"hidden": self.model(input_ids, **rest)[0]}
        with pytest.raises(UnpadError):
            attach(make_trainer("plain", model, tmp_path))
        return
    trainer = make_trainer("plain", model, tmp_path, LossOutside if kind == "no loss" else None)
    attach(trainer, tokens_per_micro=64)
    assert distance(trained(trainer).gradient, wanted) < 1e-5


@pytest.mark.nightly
def test_what_sft_trainer_logs_is_what_its_own_head_gives(tmp_path):
    logs = []
    for mode in ("chunks", "targets", "all"):
        trainer = make_trainer("sft", make_model("llama"), tmp_path)
        attach(trainer, tokens_per_micro=64).head.mode = mode
        first = trained(trainer).logs[0]
        logs.append({name: first[name] for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens")})
        logs[-1]["eval_entropy"] = trainer.evaluate()["eval_entropy"]
    assert logs[0] == pytest.approx(logs[2], rel=1e-5)
    assert logs[1] == pytest.approx(logs[2], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_targets_are_those_of_all_logits(dtype, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", 1)
    monkeypatch.setattr(head, "BLOCK_CELLS", 900)
    torch.manual_seed(0)
    hidden = torch.randn(150, 16, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(90, 16, dtype=torch.float64).requires_grad_()
    labels = torch.randint(90, (150,))
    found = head.scored_cross_entropy(hidden, weight.to(dtype), labels)
    gradients = torch.autograd.grad(found.total * 0.5, [hidden, weight])
    logits = hidden.double() @ weight.to(dtype).double().t()
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(1, labels[:, None])[:, 0]
    wanted = torch.autograd.grad(nll.sum() * 0.5, [hidden, weight])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip(
        [found.total, found.nll, found.entropy, *gradients],
        [nll.sum(), nll, -(log_p.exp() * log_p).sum(-1), *wanted],
        strict=True,
    ):
        gap = (one.double() - other.double()).norm() / other.double().norm()
        assert float(gap.detach()) < tolerance
    assert float((found.is_top1 == (logits.argmax(-1) == labels)).float().mean()) > (
        0.95 if dtype == torch.bfloat16 else 0.99
    )


def test_logits_of_tokens_without_a_target_never_exist(tmp_path):
    for kind, most in (("plain", 1), ("sft", 0)):  # TRL multiplies by the weights itself, without calling the head
        model = make_model("llama")
        trainer, rows = make_trainer(kind, model, tmp_path), list[int]()
        model.lm_head.register_forward_hook(lambda module, args, out, rows=rows: rows.append(out.shape[1]))
        attach(trainer, tokens_per_micro=64)
        rows.clear()
        trainer.train()
        trainer.evaluate()
        assert max(rows, default=0) == most


def test_an_adapter_of_peft_learns_as_on_one_sequence_at_a_time(tmp_path):
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(make_model("llama"), config)
    wanted = truth(adapted.get_base_model(), ROWS)[1]
    assert all("lora" in name for name in wanted)
    trainer = make_trainer("plain", adapted, tmp_path)
    assert attach(trainer, tokens_per_micro=64).head.mode == "chunks"
    assert distance(trained(trainer).gradient, wanted) < 1e-5


def test_steps_accumulate_micro_batches_and_weigh_targets_alike(tmp_path):
    trainer = make_trainer("plain", make_model("llama"), tmp_path, gradient_accumulation_steps=3)
    attach(trainer, tokens_per_micro=64)
    counts = []
    inner = trainer.get_batch_samples

    def counted(*args: Any) -> Any:
        batches, count = inner(*args)
        counts.append((len(batches), int(count)))
        return batches, count

    trainer.get_batch_samples = counted
    recorder = trained(trainer)
    assert [number for number, _ in counts[:-1]] == [3] * (len(counts) - 1)
    assert sum(count for _, count in counts) == targets_of(ROWS)
    assert recorder.num_steps == len(counts) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family", "options", "bound"),
    [
        ("plain", "lfm2", {"gradient_checkpointing": True}, 1e-5),
        ("sft", "llama", {"gradient_checkpointing": True}, 1e-5),
        ("plain", "llama", {"bf16": True}, 2e-2),
        ("sft", "llama", {"bf16": True}, 2e-2),
    ],
)
def test_checkpointing_and_mixed_precision_have_the_gradient_up_to_their_rounding(
    kind, family, options, bound, tmp_path
):
    model = make_model(family)
    _, wanted = truth(model, ROWS)
    trainer = make_trainer(kind, model, tmp_path, **options)
    assert attach(trainer, tokens_per_micro=64).head.mode == "chunks"
    assert distance(trained(trainer).gradient, wanted) < bound


def test_a_resumed_run_has_the_weights_of_one_that_was_not_stopped(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                control.should_training_stop = True

    def run(folder: Path, callbacks: list[TrainerCallback], resume: str | None = None) -> dict[str, Tensor]:
        model = make_model("llama", attention_dropout=0.1)
        options = {"learning_rate": 1e-3, "optim": "adamw_torch", "max_grad_norm": 1.0, "num_train_epochs": 3}
        options |= {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
        trainer = make_trainer("plain", model, folder, **options)
        for one in callbacks:
            trainer.add_callback(one)
        attach(trainer, tokens_per_micro=64)
        trainer.train(resume_from_checkpoint=resume)
        assert (trainer.state.global_step == 5) == bool(callbacks)
        assert trainer.state.epoch == (3 if not callbacks else pytest.approx(1.5, abs=0.4))
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}

    whole = run(tmp_path / "whole", [])
    run(tmp_path / "stopped", [Stop()])
    resumed = run(tmp_path / "stopped", [], str(tmp_path / "stopped" / "checkpoint-5"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_another_plan_is_refused_with_the_argument_that_fits(tmp_path):
    def run(tokens: int | None, resume: str | None = None, rows: int | None = None, **options: Any) -> None:
        options = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 2, **options}
        trainer = make_trainer("plain", make_model("llama"), tmp_path / str(tokens), **options)
        trainer.train_dataset = trainer.train_dataset.select(range(rows or len(trainer.train_dataset)))
        if tokens is not None:
            attach(trainer, tokens_per_micro=tokens)
        trainer.train(resume_from_checkpoint=resume)

    run(64)
    run(None)
    flat, padded = (str(tmp_path / name / "checkpoint-2") for name in ("64", "None"))
    run(64, flat)
    for fits, options in (
        (r"tokens_per_micro=64\)", {"tokens": 32}), (r"data_seed=42", {"seed": 7}),
        (" number of ranks = 1,", {"gradient_accumulation_steps": 2}), ("train_dataset of before", {"rows": 5}),
    ):  # fmt: skip
        with pytest.raises(ResumeError) as caught:
            run(**{"tokens": 64, "resume": flat, **options})
        assert re.search(fits, caught.value.fix), caught.value.fix
    with pytest.raises(ResumeError, match="without unpad"):
        run(64, padded)
    run(32, flat, ignore_data_skip=True)


BY_LENGTH: dict[str, tuple[type, dict[str, Any]]] = {  # with other numbers for rows, or batches, above 24 tokens
    "dynamic": (LlamaConfig, {"max_position_embeddings": 24, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "longrope": (Phi3Config, {
        "original_max_position_embeddings": 24, "pad_token_id": 0,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    }),
    "floor_scale": (Llama4TextConfig, {"floor_scale": 25, "head_dim": 8, "intermediate_size_mlp": 32}),
}  # fmt: skip


@pytest.mark.promise("hf.judged")
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_sequences_that_would_change_each_others_numbers_are_refused_by_name(kind, tmp_path):
    made, fields = BY_LENGTH[kind]
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(made(num_hidden_layers=4, intermediate_size=32, **sizes, **fields))
    trainer = make_trainer("plain", model, tmp_path)
    with pytest.raises(RecipeError, match=rf"\({kind}\)") as caught:
        attach(trainer, tokens_per_micro=64)
    assert "24" in caught.value.fix
    short = [row for row in trainer.train_dataset if len(row["input_ids"]) <= 24]
    assert 1 < len(short) < len(trainer.train_dataset)
    trainer.train_dataset = type(trainer.train_dataset).from_list(short)
    attach(trainer, tokens_per_micro=24)


def test_a_hook_that_comes_after_the_proof_is_warned_of_if_it_returns_a_value(tmp_path):
    trainer = make_trainer("plain", make_model("llama"), tmp_path, max_steps=1)
    attach(trainer)
    trainer.model.model.norm.register_forward_pre_hook(lambda module, args: None)
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(UserWarning, match="<lambda> returns a value, and came after unpad.hf.attach"):
        trainer.train()


# --------------------------------------------------------------------------- refusals


def test_rows_that_do_not_say_where_sequences_begin_are_refused(tmp_path):
    options = {"packing": True, "packing_strategy": "wrapped", "max_length": 64}
    trainer = make_trainer("sft", make_model("llama"), tmp_path, **options)
    with pytest.raises(RecipeError, match="rows do not say where"):
        attach(trainer)
    assert not trainer.model._forward_pre_hooks


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_ranks_that_hold_parts_of_the_model_are_refused(kind, tmp_path, monkeypatch):
    trainer = make_trainer("plain", make_model("llama"), tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", property(lambda self: kind))
    with pytest.raises(RecipeError, match=f"accelerate runs {kind.value}, and .*weights of the head"):
        attach(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["prove_ours", "add_target_head"])
@pytest.mark.parametrize(("kind", "family"), [("plain", "lfm2"), ("sft", "llama")])
def test_a_refused_trainer_and_its_model_are_as_they_were(kind, family, stage, tmp_path, monkeypatch):
    def refuse(*args: Any) -> None:
        raise ProofError("no", fix="none")

    if stage == "prove_ours":
        monkeypatch.setattr(hf_trainer, "prove_ours", refuse)
    else:
        monkeypatch.setattr(head, "_first_exact", refuse)
    options = {"max_steps": 1, "learning_rate": 0.1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    options |= {"packing": True, "max_length": 64} if kind == "sft" else {}
    trainer = make_trainer(kind, make_model(family), tmp_path, **options)
    untouched = make_trainer(kind, make_model(family), tmp_path, **options)
    loss_function = trainer.model.loss_function
    with pytest.raises(ProofError):
        attach(trainer)
    assert type(trainer) is type(untouched)
    assert trainer.args.packing if kind == "sft" else trainer.compute_loss_func is None
    assert trainer.model.config._attn_implementation == untouched.model.config._attn_implementation != "unpad"
    assert trainer.model.loss_function == loss_function
    for own, other in zip(trainer.model.modules(), untouched.model.modules(), strict=True):
        assert len(own._forward_pre_hooks) == len(other._forward_pre_hooks)
        assert len(own._forward_hooks) == len(other._forward_hooks)
        assert ("forward" in vars(own)) == ("forward" in vars(other))
    trainer.train()
    untouched.train()
    for own, other in zip(trainer.model.parameters(), untouched.model.parameters(), strict=True):
        assert torch.equal(own, other)
