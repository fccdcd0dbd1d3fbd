"""Adapters begin without effect, learn in every kind of model, and merge into the base's weights."""

import copy
import sys

import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch, tiny_model
from tests.helpers.tiny_models import EXAMPLES, adapted
from unpad.batching.batch import RaggedBatch
from unpad.errors import RecipeError
from unpad.models import adapters
from unpad.models.contract import Model
from unpad.nn import linear
from unpad.proof.certificate import prove
from unpad.proof.measure import ProofSubject, in_own_precision, one_at_a_time
from unpad.recipes.training import LoraSettings

VARIANTS = [LoraSettings(r=3, alpha=6), LoraSettings(r=3, alpha=5, rslora=True), LoraSettings(r=3, dora=True)]
KINDS = sorted(set(EXAMPLES) - {"cnn"})  # which has no linear layer in its blocks


def terms(model: Model, batch: RaggedBatch) -> dict[str, Tensor]:
    torch.manual_seed(0)  # of models that draw in evaluation too
    return {name: value.detach() for name, (value, _) in model.losses(batch).items()}


def backward(model: Model, batch: RaggedBatch) -> None:
    torch.stack([value.double() for value, _ in model.losses(batch).values() if value.requires_grad]).sum().backward()


@pytest.mark.promise("adapters.lora")
@pytest.mark.parametrize("kind", KINDS)
def test_in_every_kind_of_model_adapters_begin_without_effect_then_learn_alone_and_merge(kind):
    base, batch = EXAMPLES[kind][0]().double().eval(), EXAMPLES[kind][1]()
    model = copy.deepcopy(base)
    adapters.adapt(model, VARIANTS[0])
    before, begun = terms(base, batch), terms(model, batch)
    assert type(model) is type(base)
    assert all(torch.allclose(before[name], value, rtol=1e-12) for name, value in begun.items())
    adapters.draw_adapters(model.double())
    backward(model, batch)
    learn = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    unused = "tower.blocks.1."  # its output would be that of the last layer, and the projector reads the one before
    assert learn == {name for name in adapters.adapter_names(model) if not name.startswith(unused)}
    plain = copy.deepcopy(base)
    plain.load_state_dict(adapters.merged(base.state_dict(), adapters.kept_weights(model), VARIANTS[0].scaling))
    found, wanted = terms(plain, batch), terms(model, batch)
    assert all(torch.allclose(found[name], value, rtol=1e-10, atol=1e-12) for name, value in wanted.items())
    assert any(not torch.allclose(before[name], value, rtol=1e-6) for name, value in wanted.items())


@pytest.mark.promise("adapters.bf16")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_learns_on_a_base_in_bf16(kind):
    base, batch = EXAMPLES[kind][0]().float().eval(), EXAMPLES[kind][1]()
    model = adapted(base, VARIANTS[0])
    lowered = adapters.lower_base(model, torch.bfloat16)
    rounded = adapted(base, VARIANTS[0])
    adapters.load_kept(rounded, adapters.kept_weights(model))
    for name, parameter in rounded.named_parameters():
        if name.replace(".base_layer", "") in lowered:
            parameter.data = parameter.data.bfloat16().float()
    wanted = terms(rounded, batch)
    assert all(torch.allclose(wanted[name], value, rtol=1e-5) for name, value in terms(model, batch).items())
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, batch)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.promise("adapters.merge")
@pytest.mark.parametrize("settings", VARIANTS, ids=["plain", "rslora", "dora"])
def test_merged_weights_and_the_folder_compute_what_peft_does(settings, tmp_path):
    from peft import PeftModel

    base, batch = tiny_model(torch.float32, bias=True).eval(), random_batch([5, 1, 9])
    model = adapted(base, settings).eval()
    kept = adapters.kept_weights(model)
    assert all(adapters.ADAPTER in name for name in kept)
    plain = copy.deepcopy(base)
    plain.load_state_dict(adapters.merged(base.state_dict(), kept, settings.scaling))
    for name, content in adapters.peft_files(kept, settings, "base").items():
        (tmp_path / name).write_bytes(content)
    opened = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).eval()
    with torch.no_grad():
        wanted = model(batch)
        assert float((wanted - base(batch)).abs().max()) > 0.1
        torch.testing.assert_close(opened(batch), wanted, rtol=0, atol=0)
        torch.testing.assert_close(plain(batch), wanted, rtol=1e-5, atol=1e-5)


def test_targets_are_whole_names_or_last_parts():
    model = tiny_model(torch.float32)
    adapters.adapt(model, LoraSettings(targets=["to_qkv", "blocks.1.*.down"]))
    layers = {name.partition(adapters.ADAPTER)[0] for name in adapters.adapter_names(model)}
    assert layers == {"blocks.0.attention.to_qkv", "blocks.1.attention.to_qkv", "blocks.1.feed_forward.down"}


@pytest.mark.promise("adapters.lora")
def test_a_target_that_is_no_linear_layer_is_refused_with_names():
    for target in ("q_proj", "embed", "norm"):
        with pytest.raises(RecipeError, match=f'"{target}" matches no linear layer') as caught:
            adapters.adapt(tiny_model(), LoraSettings(targets=[target]))
        assert "down, to_out, to_qkv, up" in caught.value.fix
    with pytest.raises(RecipeError, match=r'"\*" matches no linear layer of a block') as caught:
        adapters.adapt(EXAMPLES["cnn"][0](), LoraSettings())
    assert caught.value.fix == "train without the section lora"


@pytest.mark.promise("adapters.lora")
def test_without_peft_the_section_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RecipeError, match="need the package peft") as caught:
        adapters.adapt(tiny_model(), LoraSettings())
    assert "pip install 'unpad[lora]'" in caught.value.fix


@pytest.mark.promise("adapters.bf16")
def test_a_base_in_bf16_is_multiplied_without_copies_and_its_adapters_learn_in_fp32(monkeypatch):
    batch = random_batch([9, 4, 12])
    model = adapted(tiny_model(torch.float32, tied=False), LoraSettings(r=2))
    names = adapters.lower_base(model, torch.bfloat16)
    assert {"embed.weight", "head.weight", "blocks.1.feed_forward.down.weight"} <= set(names)
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name or adapters.ADAPTER in name} == {
        torch.float32
    }
    copied = []
    real = linear.computing_copy

    def noting(parameter: Tensor, dtype: torch.dtype) -> Tensor:
        copied.append(parameter.dtype != dtype)
        return real(parameter, dtype)

    monkeypatch.setattr(linear, "computing_copy", noting)
    monkeypatch.setattr("unpad.nn.losses.computing_copy", noting)
    with torch.autocast("cpu", torch.bfloat16):
        model.losses(batch)["cross_entropy"][0].backward()
    assert copied
    assert not any(copied)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == set(adapters.adapter_names(model))
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


@pytest.mark.promise("adapters.certificate")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapted_model_is_proved_and_an_adapter_that_mixes_tokens_is_not(precision):
    model, batch = adapted(tiny_model(torch.float32), LoraSettings(r=2)), random_batch([9, 4, 12])
    adapters.lower_base(model, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    assert prove(model, batch, precision=precision).passed
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, given: (given[0].roll(1, 0),))
    assert not prove(model, batch, precision=precision).passed


def test_kept_weights_are_loaded_back_and_leave_the_base():
    first, second = (adapted(tiny_model(torch.float32), LoraSettings(r=2)) for _ in range(2))
    for name, parameter in second.named_parameters():
        if name.endswith(adapters.UP):
            parameter.data.mul_(3.0)
    adapters.load_kept(second, adapters.kept_weights(first))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    with pytest.raises(AssertionError, match="has no"):
        adapters.load_kept(second, {"blocks.9.weight": torch.zeros(1)})


def test_the_proof_in_the_own_precision_computes_on_the_base_as_it_is_held():
    model, batch = adapted(tiny_model(torch.float32), LoraSettings(r=2)), random_batch([9, 4])
    lowered = adapters.lower_base(model, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    truth = one_at_a_time(exact, [batch], {"cross_entropy": 1.0}, lambda model, batch: [model(batch)])
    own = in_own_precision(ProofSubject(exact, truth, torch.device("cpu"), lambda *_: None), model).model
    assert {name: p.dtype for name, p in own.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    assert lowered
