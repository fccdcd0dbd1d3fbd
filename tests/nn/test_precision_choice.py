"""auto takes the faster precision of the machine by measurement, says why, and leaves a run as it was begun."""

import pytest
import torch

from unpad.inference.loaded import generation_precision
from unpad.nn import product_speed
from unpad.nn.product_speed import Speed, Speeds, choose_precision
from unpad.recipes.training import GenerateSettings

CPU = torch.device("cpu")


def machine(monkeypatch: pytest.MonkeyPatch, gain: float, decoding: float = 1.0) -> None:
    """A processor with bf16 instructions whose products in bf16 are `gain` times as fast as in fp32."""
    of_training, of_decoding = (Speed(fp32_seconds=one, bf16_seconds=1.0) for one in (gain, decoding))
    monkeypatch.setattr(product_speed, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(product_speed, "product_speeds", lambda: Speeds(training=of_training, decoding=of_decoding))


@pytest.mark.promise("train.precision-auto")
@pytest.mark.parametrize(
    ("gain", "chosen", "reason"),
    [
        (6.0, "bf16", "its products are 6.0 times as fast as fp32's here, measured"),
        (1.1, "bf16", "its products are 1.1 times as fast as fp32's here, measured"),
        (1.09, "fp32", "products in bf16 are only 1.09 times as fast here, measured; 1.1 are needed"),
        (1.0, "fp32", "its products are 1.0 times as fast as bf16's here, measured"),
        (0.5, "fp32", "its products are 2.0 times as fast as bf16's here, measured"),
    ],
)
def test_the_faster_precision_is_taken_with_the_measured_reason(monkeypatch, gain, chosen, reason):
    machine(monkeypatch, gain)
    assert choose_precision("auto", CPU) == (chosen, reason)


def test_a_recipe_decides_without_a_measurement(monkeypatch):
    monkeypatch.setattr(product_speed, "product_speeds", lambda: pytest.fail("measured"))
    for asked in ("fp32", "bf16", "fp16"):
        assert choose_precision(asked, CPU, "bf16") == (asked, "as the recipe says")


def test_a_processor_without_bf16_instructions_is_not_measured(monkeypatch):
    monkeypatch.setattr(product_speed, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(product_speed, "product_speeds", lambda: pytest.fail("measured"))
    chosen, reason = choose_precision("auto", CPU)
    assert chosen == "fp32"
    assert "emulated" in reason
    assert torch.backends.cpu.get_cpu_capability() in reason


@pytest.mark.parametrize(("gain", "own", "other"), [(2.0, "bf16", "fp32"), (0.5, "fp32", "bf16")])
def test_a_run_that_goes_on_keeps_its_precision_and_says_what_a_new_one_would_take(monkeypatch, gain, own, other):
    machine(monkeypatch, gain)
    _, reason = choose_precision("auto", CPU)
    assert choose_precision("auto", CPU, own) == (own, reason)
    kept = (other, f"as this run was begun; a new one here would take {own}: {reason}")
    assert choose_precision("auto", CPU, other) == kept


@pytest.mark.promise("train.precision-auto")
@pytest.mark.parametrize(("training", "decoding", "chosen"), [(0.5, 3.0, "bf16"), (2.0, 0.7, "fp32")])
def test_generation_has_a_choice_of_its_own(monkeypatch, training, decoding, chosen):
    machine(monkeypatch, training, decoding)
    assert generation_precision(GenerateSettings()) == chosen != choose_precision("auto", CPU)[0]
    assert generation_precision(GenerateSettings(precision="fp16")) == "fp16"


def test_generation_in_emulated_bf16_is_not_taken_for_the_sake_of_one_token(monkeypatch):
    machine(monkeypatch, 0.03, decoding=2.4)
    assert generation_precision(GenerateSettings()) == "fp32"
