"""Products are timed once per machine; what a measurement depends on is measured anew, and its file may be lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unpad.nn import product_speed as module
from unpad.nn.product_speed import PROBE, SHAPES, Speed, cache_file, measure, product_speed, this_machine

Timer = Callable[[tuple[int, int, int], torch.dtype], float]
SPEED = Speed(fp32_seconds=2.0, bf16_seconds=1.0)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Speed]:
    """Results of measurements that are done, each `SPEED`, in a process and a cache that hold none yet."""
    done: list[Speed] = []

    def fake() -> Speed:
        done.append(SPEED)
        return SPEED

    monkeypatch.setattr(module, "measure", fake)
    monkeypatch.setattr(module, "_measured", {})
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    return done


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_measured", {})


def test_a_machine_is_measured_once(measured: list[Speed], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [product_speed() for _ in range(3)] == [SPEED] * 3
    new_process(monkeypatch)
    assert product_speed() == SPEED
    assert len(measured) == 1


def test_a_deleted_file_makes_the_next_process_measure_anew(
    measured: list[Speed], monkeypatch: pytest.MonkeyPatch
) -> None:
    product_speed()
    cache_file().unlink()
    new_process(monkeypatch)
    product_speed()
    assert len(measured) == 2


@pytest.mark.parametrize("variable", module.VARIABLES)
def test_limits_of_instructions_are_measured_apart(
    measured: list[Speed], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    product_speed()
    monkeypatch.setenv(variable, "avx2")
    product_speed()
    monkeypatch.delenv(variable)
    new_process(monkeypatch)
    product_speed()
    assert len(measured) == 2


def test_threads_libraries_and_processors_are_measured_apart(
    measured: list[Speed], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = this_machine()
    others = [{"threads": 99}, {"torch": "9.9"}, {"processor": "another"}, {"instructions": ("amx_bf16",)}]
    for change in [{}, *others, *others, {}]:
        changed = machine.model_copy(update=change)
        monkeypatch.setattr(module, "this_machine", lambda changed=changed: changed)
        new_process(monkeypatch)
        product_speed()
    assert len(measured) == 1 + len(others)


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"\xff", b"[]", b'{"entries": 3}', b'{"entries": [{}]}', b"null",
        b'{"entries": [{"machine": {}, "speed": {"fp32_seconds": 1, "bf16_seconds": 0}}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_and_written_anew(
    measured: list[Speed], monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    cache_file().parent.mkdir()
    cache_file().write_bytes(damage)
    for _ in range(2):
        assert product_speed() == SPEED
        new_process(monkeypatch)
    assert len(measured) == 1


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "fast"])
def test_a_time_that_no_measurement_gives_is_damage(
    measured: list[Speed], monkeypatch: pytest.MonkeyPatch, seconds: object
) -> None:
    product_speed()
    content = json.loads(cache_file().read_text())
    content["entries"][0]["speed"]["bf16_seconds"] = seconds
    cache_file().write_text(json.dumps(content))
    new_process(monkeypatch)
    assert product_speed() == SPEED
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_costs_only_the_measurement(
    measured: list[Speed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "file" / "cache"))
    assert [product_speed() for _ in range(2)] == [SPEED] * 2
    assert len(measured) == 1


def test_a_user_without_a_home_is_no_error(measured: list[Speed], monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(module, "cache_folder", homeless)
    assert product_speed() == SPEED


def test_the_file_keeps_the_newest_machines(measured: list[Speed], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = this_machine()
    for threads in range(1, module.MAX_ENTRIES + 4):
        monkeypatch.setattr(module, "this_machine", lambda t=threads: machine.model_copy(update={"threads": t}))
        product_speed()
    kept = [entry["machine"]["threads"] for entry in json.loads(cache_file().read_text())["entries"]]
    assert kept == list(range(4, module.MAX_ENTRIES + 4))


# --------------------------------------------------------------------------- measurement


def timed(monkeypatch: pytest.MonkeyPatch, timer: Timer) -> list[tuple[tuple[int, int, int], torch.dtype]]:
    """Replace the clock of products; return the products that are timed."""
    calls: list[tuple[tuple[int, int, int], torch.dtype]] = []

    def fake(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
        calls.append((shape, dtype))
        return timer(shape, dtype)

    monkeypatch.setattr(module, "products_seconds", fake)
    return calls


@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0, 8.0])
def test_the_gain_is_that_of_the_best_products(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    disturbed = iter(range(1000))

    def timer(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
        return (1.0 if dtype == torch.float32 else 1 / gain) * (5.0 if next(disturbed) < 12 else 1.0)

    monkeypatch.setattr(module, "LIMIT_SECONDS", 60.0)
    calls = timed(monkeypatch, timer)
    assert measure().gain == pytest.approx(gain)
    assert {(shape, dtype) for shape, dtype in calls} == {
        (shape, dtype) for shape in (PROBE, *SHAPES) for dtype in (torch.float32, torch.bfloat16)
    }


def test_emulated_bf16_is_timed_on_small_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = timed(monkeypatch, lambda shape, dtype: 1.0 if dtype == torch.float32 else 20.0)
    assert measure().gain == 1 / 20
    assert {shape for shape, _ in calls} == {PROBE}


def test_the_measurement_ends_after_the_round_in_which_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_SECONDS", -1.0)
    calls = timed(monkeypatch, lambda shape, dtype: 1.0)
    assert measure().gain == 1
    assert [shape for shape, _ in calls if shape != PROBE] == [SHAPES[0], SHAPES[0], SHAPES[1], SHAPES[1]]


def test_a_measurement_draws_no_random_number_and_ignores_the_modes_around_it() -> None:
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.products_seconds((4, 3, 2), torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), state)
