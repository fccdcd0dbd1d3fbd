"""Trainers with our batches: gradients of one sequence at a time, exact evaluation, resume equal to the bit."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.hf.families import FAMILIES, VOCAB, distance, make_model, truth

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.utils import DistributedType
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig, Phi3Config, Trainer

from tests.helpers.paths import Waits
from tests.hf.trainers import ROWS, Backwards, Recorder, Stop, held_out_loss, make_trainer, trained, weights_of
from unpad import prove_trainer
from unpad.errors import ProofError, RecipeError, UnpadError
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
def test_what_sft_trainer_logs_is_what_its_own_head_gives_in_any_micro_batches(tmp_path):
    logs = []
    for mode, tokens in (("all", 10_000), ("chunks", 40), ("targets", 100)):
        trainer = make_trainer("sft", make_model("llama"), tmp_path, gradient_accumulation_steps=1)
        attach(trainer, tokens_per_micro=tokens).head.mode = mode
        logs.append(
            {str(at): each for at, each in enumerate(trained(trainer).logs[:-1])} | {"eval": trainer.evaluate()}
        )
    for other in logs[1:]:
        for at, each in logs[0].items():
            names = [name for name in each if name.endswith(("loss", "entropy", "accuracy", "num_tokens"))]
            assert len(names) == 4
            assert [other[at][name] for name in names] == pytest.approx([each[name] for name in names], rel=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_of_targets_are_those_of_all_logits(dtype, monkeypatch):
    monkeypatch.setattr("unpad.nn.losses.CHUNK_BYTES", 1)
    monkeypatch.setattr(head, "BLOCK_CELLS", 900)
    torch.manual_seed(0)
    hidden = torch.randn(150, 16, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(90, 16, dtype=torch.float64).requires_grad_()
    labels = torch.randint(90, (150,))
    with Waits() as waits:
        found = head.scored_cross_entropy(hidden, weight.to(dtype), labels)
        gradients = torch.autograd.grad(found.total * 0.5, [hidden, weight])
    assert not waits.found
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


def weights_after(
    folder: Path, tokens: int | None, kind: str = "plain", stop: int = 0, resume: Path | None = None, **options: Any
) -> tuple[Tensor, Trainer, Recorder]:
    """Weights after two epochs of updates of 6 or so of 16 rows, with `attach` or, for None tokens, without.

    Args:
        stop: the update behind which training ends; 0 goes on.
    """
    shared = {"learning_rate": 0.1, "num_train_epochs": 2, "per_device_train_batch_size": 3, "max_grad_norm": 1.0}
    shared |= {"gradient_accumulation_steps": 2, "warmup_steps": 2}
    model = make_model("llama")
    trainer = make_trainer(kind, model, folder, **{**shared, **options})
    if tokens is not None:
        attach(trainer, tokens_per_micro=tokens)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.add_callback(Stop(stop))
    torch.manual_seed(0)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return weights_of(model), trainer, recorder


def gap(one: Tensor, other: Tensor) -> float:
    """Distance relative to what training changed."""
    return float((one - other).norm() / (other - weights_of(make_model("llama"))).norm())


PACKING = {"packing": True, "max_length": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tokens", "options"),
    [
        ("sft", 40, {"gradient_accumulation_steps": 3}),
        ("plain", 40, {}),
        ("plain", 4096, {"gradient_accumulation_steps": 1, "dataloader_drop_last": True, "dataloader_num_workers": 1}),
        ("sft", 64, {"gradient_accumulation_steps": 4, "dataloader_drop_last": True, **PACKING}),
        ("plain", 64, {"train_sampling_strategy": "group_by_length"}),
        ("plain", 64, {"base": Backwards, "max_steps": 4, "data_seed": 7}),
        ("plain", 64, {"accelerator_config": {"use_seedable_sampler": False}}),
    ],
)  # fmt: skip
def test_updates_and_weights_are_those_of_the_trainer_alone(kind, tokens, options, tmp_path):
    wanted, own, told = weights_after(tmp_path, None, kind, **options)
    found, trainer, recorder = weights_after(tmp_path, tokens, kind, **options)
    assert gap(found, wanted) < 5e-6
    assert trainer.args.gradient_accumulation_steps == own.args.gradient_accumulation_steps
    assert (trainer.state.global_step, trainer.state.epoch) == (own.state.global_step, own.state.epoch)
    speeds = [logs["train_samples_per_second"] * logs["train_runtime"] for logs in (told.logs[-1], recorder.logs[-1])]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.02)
    for name in ("loss", "grad_norm", "learning_rate", "epoch"):
        both = [[logs[name] for logs in one.logs[:-1]] for one in (recorder, told)]
        assert both[0] == pytest.approx(both[1], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(None, 64), (64, None), (64, 40), (40, 40)])
def test_a_checkpoint_resumes_at_the_right_row_with_attach_and_without(before, after, tmp_path, monkeypatch):
    """At the same `tokens_per_micro` to the bit, with dropout too."""
    options = {"save_strategy": "steps", "save_steps": 1}
    monkeypatch.setitem(FAMILIES["llama"], "attention_dropout", 0.1 * (before == after))
    wanted = weights_after(tmp_path / "whole", before if before == after else None, **options)[0]
    weights_after(tmp_path, before, stop=4, **options)  # of six: in the middle of the second epoch
    found = weights_after(tmp_path, after, resume=tmp_path / "checkpoint-4", **options)[0]
    assert gap(found, wanted) <= (0 if before == after else 5e-6)


def test_an_update_without_targets_changes_nothing(tmp_path):
    silent = [{"input_ids": row["input_ids"], "labels": [-100] * len(row["labels"])} for row in ROWS[:3]]
    data = type(make_trainer("plain", make_model("llama"), tmp_path).train_dataset).from_list([*silent, *ROWS[:3]])
    options = {"train_dataset": data, "train_sampling_strategy": "sequential", "gradient_accumulation_steps": 1}
    found, _, recorder = weights_after(tmp_path, 64, warmup_steps=0, stop=1, **options)
    assert recorder.logs[0]["loss"] == recorder.logs[0]["grad_norm"] == 0
    assert torch.equal(found, weights_of(make_model("llama")))


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


def test_rows_longer_than_learned_positions_are_refused_by_name(tmp_path):
    rows = [{"input_ids": [5] * length, "labels": [5] * length} for length in (9, 70, 65)]
    trainer = make_trainer("plain", make_model("gpt2"), tmp_path, train_dataset=rows)
    with pytest.raises(RecipeError, match="cannot compute sequences of up to 70 tokens alone") as caught:
        attach(trainer)
    assert "longer than its 64 positions" in caught.value.fix


def test_a_model_that_sees_later_tokens_is_warned_of(tmp_path):
    model = make_model("gemma3", use_bidirectional_attention=True)
    with pytest.warns(UserWarning, match=r"the model sees later tokens \(use_bidirectional_attention\)"):
        attach(make_trainer("plain", model, tmp_path), prove=False)


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
