"""Products are timed once per machine; what a measurement depends on is measured anew, and its file may be lost."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unpad.nn import product_speed as module
from unpad.nn.product_speed import (
    DECODING,
    PROBE,
    TRAINING,
    Shape,
    Speed,
    Speeds,
    cache_file,
    measure,
    product_speeds,
    this_machine,
)

Timer = Callable[[Shape, torch.dtype], float]
FAST, SLOW = Speed(fp32_seconds=2.0, bf16_seconds=1.0), Speed(fp32_seconds=1.0, bf16_seconds=2.0)
SPEEDS = Speeds(training=SLOW, decoding=FAST)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Speeds]:
    """Results of measurements that are done, each `SPEEDS`, in a process and a cache that hold none yet."""
    done: list[Speeds] = []

    def fake() -> Speeds:
        done.append(SPEEDS)
        return SPEEDS

    monkeypatch.setattr(module, "measure", fake)
    monkeypatch.setattr(module, "_measured", {})
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    return done


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measured", {})


@pytest.mark.promise("train.precision-auto")
def test_a_machine_is_measured_once(measured, monkeypatch):
    assert [product_speeds() for _ in range(3)] == [SPEEDS] * 3
    new_process(monkeypatch)
    assert product_speeds() == SPEEDS
    assert len(measured) == 1


@pytest.mark.promise("train.precision-auto")
@pytest.mark.parametrize("variable", module.VARIABLES)
def test_limits_of_instructions_are_measured_apart(measured, monkeypatch, variable):
    monkeypatch.delenv(variable, raising=False)
    product_speeds()
    monkeypatch.setenv(variable, "avx2")
    product_speeds()
    monkeypatch.delenv(variable)
    new_process(monkeypatch)
    product_speeds()
    assert len(measured) == 2


def test_threads_libraries_and_processors_are_measured_apart(measured, monkeypatch):
    machine = this_machine()
    others = [{"threads": 99}, {"torch": "9.9"}, {"processor": "another"}, {"instructions": ("amx_bf16",)}]
    for change in [{}, *others, *others, {}]:
        changed = machine.model_copy(update=change)
        monkeypatch.setattr(module, "this_machine", lambda changed=changed: changed)
        new_process(monkeypatch)
        product_speeds()
    assert len(measured) == 1 + len(others)


@pytest.mark.promise("train.precision-auto")
@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"\xff", b"[]", b'{"entries": 3}', b'{"entries": [{}]}', b"null",
        b'{"entries": [{"machine": {}, "speeds": {}}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_and_written_anew(measured, monkeypatch, damage):
    cache_file().parent.mkdir()
    cache_file().write_bytes(damage)
    for _ in range(2):
        assert product_speeds() == SPEEDS
        new_process(monkeypatch)
    assert len(measured) == 1


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "fast"])
def test_a_time_that_no_measurement_gives_is_damage(measured, monkeypatch, seconds):
    product_speeds()
    content = json.loads(cache_file().read_text())
    content["entries"][0]["speeds"]["decoding"]["bf16_seconds"] = seconds
    cache_file().write_text(json.dumps(content))
    new_process(monkeypatch)
    assert product_speeds() == SPEEDS
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_costs_only_the_measurement(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "file" / "cache"))
    assert [product_speeds() for _ in range(2)] == [SPEEDS] * 2
    assert len(measured) == 1


def test_a_user_without_a_home_is_no_error(measured, monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(module, "cache_folder", homeless)
    assert product_speeds() == SPEEDS


def test_the_file_keeps_the_newest_machines(measured, monkeypatch):
    machine = this_machine()
    for threads in range(1, module.MAX_ENTRIES + 4):
        monkeypatch.setattr(module, "this_machine", lambda t=threads: machine.model_copy(update={"threads": t}))
        product_speeds()
    kept = [entry["machine"]["threads"] for entry in json.loads(cache_file().read_text())["entries"]]
    assert kept == list(range(4, module.MAX_ENTRIES + 4))


# --------------------------------------------------------------------------- measurement


def timed(monkeypatch: pytest.MonkeyPatch, training: Timer, decoding: Timer) -> list[tuple[Shape, torch.dtype]]:
    """Replace the clock of products; return the products that are timed."""
    calls: list[tuple[Shape, torch.dtype]] = []

    def replace(name: str, timer: Timer) -> None:
        def fake(shape: Shape, dtype: torch.dtype) -> float:
            calls.append((shape, dtype))
            return timer(shape, dtype)

        monkeypatch.setattr(module, name, fake)

    replace("training_seconds", training)
    replace("decoding_seconds", decoding)
    return calls


def as_fast(gain: float) -> Timer:
    """bf16 is `gain` times as fast as fp32; the first product of each kind takes five times as long."""
    seen = set[tuple[Shape, torch.dtype]]()

    def seconds(shape: Shape, dtype: torch.dtype) -> float:
        cold = (shape, dtype) not in seen
        seen.add((shape, dtype))
        return (5.0 if cold else 1.0) * (1.0 if dtype == torch.float32 else 1 / gain)

    return seconds


@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0, 8.0])
def test_the_gain_is_that_of_the_best_products(monkeypatch, gain):
    monkeypatch.setattr(module, "LIMIT_SECONDS", 60.0)
    calls = timed(monkeypatch, as_fast(gain), as_fast(3 * gain))
    speeds = measure()
    assert speeds.training.gain == pytest.approx(gain)
    assert speeds.decoding.gain == pytest.approx(3 * gain)
    assert speeds.training.fp32_seconds == len(TRAINING)  # nothing cold counts
    assert set(calls) == {(s, d) for s in (PROBE, *TRAINING, *DECODING) for d in (torch.float32, torch.bfloat16)}


@pytest.mark.promise("train.precision-auto")
def test_emulated_bf16_is_timed_on_small_products_alone(monkeypatch):
    calls = timed(monkeypatch, as_fast(1 / 20), as_fast(1 / 20))
    assert measure().training.gain == pytest.approx(1 / 20)
    assert {shape for shape, _ in calls} == {PROBE, *DECODING}


def test_rounds_end_when_their_time_is_over(monkeypatch):
    monkeypatch.setattr(module, "LIMIT_SECONDS", -1.0)
    calls = timed(monkeypatch, as_fast(2.0), as_fast(2.0))
    assert measure().training.gain == 2
    assert len(calls) == len(set(calls)) == 2 * len([PROBE, *TRAINING, *DECODING])


@pytest.mark.parametrize("seconds", [module.training_seconds, module.decoding_seconds])
def test_a_measurement_draws_no_random_number_and_ignores_the_modes_around_it(monkeypatch, seconds):
    state, dtypes = torch.get_rng_state(), list[torch.dtype]()
    linear = torch.nn.functional.linear

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtypes.append(linear(x, weight, bias).dtype)
        return linear(x, weight, bias)

    monkeypatch.setattr(module.F, "linear", spy)
    monkeypatch.setattr(module, "product", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert seconds((4, 3, 2), torch.float32) > 0
    assert dtypes == [torch.float32]
    assert torch.equal(torch.get_rng_state(), state)
