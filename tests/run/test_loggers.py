"""Curves go to other programs too, and what those do changes nothing of a run. Their libraries are stand-ins here."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.toy import write_toy
from unpad.errors import RecipeError
from unpad.recipes.recipe import may_change_on_resume
from unpad.recipes.training import LogSettings
from unpad.run import loggers
from unpad.run.monitor import Monitor, StepRecord
from unpad.training.loop import train

pytestmark = pytest.mark.promise("run.loggers")

ALL = LogSettings(to=["wandb", "mlflow"], project="mine")


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(members)
    made.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, made)


class Servers:
    """What stand-ins of both libraries were given, and what they do besides."""

    def __init__(self) -> None:
        self.wandb: list[dict[str, Any]] = []  # runs, in the order of `init`
        self.mlflow: dict[str, dict[str, Any]] = {}  # runs by id
        self.newest, self.places = "", list[str]()
        self.fail: dict[str, Any] = {}  # name of a call -> function that is called first

    def before(self, call: str) -> None:
        self.fail.get(call, lambda: None)()

    def init(self, **given: Any) -> Any:
        self.before("wandb.init")
        made = {"given": given, "logged": [], "exit_code": None}
        self.wandb.append(made)

        def log(values: dict[str, float], step: int) -> None:
            self.before("wandb.log")
            made["logged"].append((step, values))

        return SimpleNamespace(log=log, finish=lambda exit_code: made.update(exit_code=exit_code))

    def start_run(self, id: str | None, run_name: str) -> Any:
        self.before("mlflow.start_run")
        self.newest = id or f"run-{len(self.mlflow)}"
        if id is None:
            self.mlflow[self.newest] = {"name": run_name, "params": {}, "metrics": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=self.newest))

    def log_metrics(self, values: dict[str, float], step: int, synchronous: bool) -> None:
        self.before("mlflow.log_metrics")
        self.mlflow[self.newest]["metrics"] += [(step, *item) for item in values.items()]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    module(monkeypatch, "wandb", init=made.init, Settings=lambda **values: values)
    module(
        monkeypatch, "mlflow", is_tracking_uri_set=lambda: False, start_run=made.start_run,
        set_tracking_uri=lambda uri: made.places.append(uri), set_experiment=lambda name: made.places.append(name),
        log_params=lambda params: made.mlflow[made.newest]["params"].update(params), log_metrics=made.log_metrics,
        end_run=lambda status: made.mlflow[made.newest].update(status=status),
    )  # fmt: skip
    return made


def watched(folder: Path, first: int, last: int, *, log: LogSettings = ALL, finished: bool = True) -> None:
    """A run's monitor from one step to another, without TensorBoard."""
    folder.mkdir(exist_ok=True)
    config = {"optim": {"lr": 1e-3}, "data": {"chat": [{"path": "my.jsonl"}]}}
    run = Monitor(folder, log_every=5, grad_norm_warning=9.0, console=Console(quiet=True), total_steps=None)
    run.send_to(log, config)
    if first > 1:
        run.resume(first - 1)
    for step in range(first, last + 1):
        row = StepRecord(step, "train", 1, 1, 2, 20, 20, 18, 3.0 / step, 1e-3, 1.0, {}, {})
        run.step(row, seconds=0.1, waited=0.0, processor=0.1, memory_bytes=1)
    run.evaluation(last, "train", {"loss": 2.0}, 9, best=True)
    if finished:
        run.log("finished")
    run.close()


def warnings(folder: Path) -> list[str]:
    rows = map(json.loads, (folder / "log.jsonl").read_text("utf-8").splitlines())
    return [row["message"] for row in rows if row["kind"] == "warning"]


def test_both_get_the_recipe_and_every_number_and_a_resumed_run_goes_on_under_its_ids(servers, tmp_path):
    folder = tmp_path / "a-run"
    watched(folder, 1, 4, finished=False)
    watched(folder, 3, 6)  # from a checkpoint of step 2
    assert not (folder / "tensorboard").exists()
    assert warnings(folder) == []
    first, second = servers.wandb
    assert first["given"]["id"] == second["given"]["id"]
    assert {key: first["given"][key] for key in ("project", "name", "resume")} == {
        "project": "mine", "name": "a-run", "resume": "allow",
    }  # fmt: skip
    assert first["given"]["config"]["optim"] == {"lr": 1e-3}
    assert [step for step, values in second["logged"] if "train/loss" in values] == [3, 4, 5, 6]
    assert (6, {"heldout/loss": 2.0, "heldout/perplexity": pytest.approx(7.389, rel=1e-3)}) in second["logged"]
    assert (first["exit_code"], second["exit_code"]) == (1, 0)
    ((id, run),) = servers.mlflow.items()
    assert json.loads((folder / loggers.LOGGERS).read_text()) == {"wandb": first["given"]["id"], "mlflow": id}
    assert (run["name"], run["status"]) == ("a-run", "FINISHED")
    assert servers.places[:2] == [f"sqlite:///{folder / 'mlflow.db'}", "mine"]
    assert run["params"] == {"optim": '{"lr": 0.001}', "data": '{"chat": [{"path": "my.jsonl"}]}'}
    losses = [(step, value) for step, name, value in run["metrics"] if name == "train/loss"]
    assert losses == [(step, 3.0 / step) for step in (1, 2, 3, 4, 3, 4, 5, 6)]


def exits() -> None:
    raise SystemExit("no login")


def breaks() -> None:
    raise RuntimeError("502 Bad Gateway\nof a proxy")


@pytest.mark.parametrize("fault", [exits, breaks])
@pytest.mark.parametrize("call", ["wandb.init", "wandb.log", "mlflow.start_run", "mlflow.log_metrics"])
def test_a_logger_that_fails_changes_nothing_and_is_told_once(servers, tmp_path, call, fault):
    watched(tmp_path / "plain", 1, 6, log=LogSettings(to=[]))
    servers.fail[call] = fault
    watched(tmp_path / "run", 1, 6)
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    [message] = warnings(tmp_path / "run")
    name, _, _ = call.partition(".")
    assert message.startswith(f"nothing more goes to {name}: {'SystemExit' if fault is exits else 'RuntimeError'}: ")
    assert "of a proxy" not in message
    other = servers.mlflow["run-0"]["metrics"] if name == "wandb" else servers.wandb[0]["logged"]
    assert len(other) > 6, "the other one has everything"


@pytest.mark.parametrize("text", ["", "[1]", '{"wandb": 3}', "[" * 100_000])
def test_damaged_ids_are_made_again(servers, tmp_path, text):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / loggers.LOGGERS).write_text(text)
    watched(folder, 1, 1)
    assert set(json.loads((folder / loggers.LOGGERS).read_text())) == {"wandb", "mlflow"}
    assert warnings(folder) == []


def test_a_run_hands_its_recipe_over(servers, tmp_path):
    quiet = Console(quiet=True)
    train(str(write_toy(tmp_path / "toy")), tmp_path / "run", ["train.max_steps=1", "log.to=[wandb]"], console=quiet)
    [made] = servers.wandb
    assert made["given"]["config"]["train"]["max_steps"] == 1
    assert (made["given"]["name"], made["exit_code"], made["logged"][0][0]) == ("run", 0, 1)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="not installed") as caught:
        train("chat", tmp_path / "run", ["data.chat=absent.jsonl", f"log.to=[{name}]"])
    assert f"'unpad[{name}]'" in caught.value.fix
    assert may_change_on_resume("log.to")
