"""Collapse detection on a small VAE over sets of one topic each, whose decoder may ignore its informative latent."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.models import Stub
from tests.helpers.patients import random_patients, tiny_patients_model
from unpad.batching.batch import RaggedBatch, make_batch
from unpad.batching.layout import build_layout
from unpad.batching.plan import Micro
from unpad.data.family import sequence_table
from unpad.errors import CollapseError
from unpad.models.contract import HasLatent
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.losses import Terms
from unpad.nn.segments import segment_mean
from unpad.recipes.file import parse_recipe
from unpad.recipes.training import CollapseSettings, OptimSettings
from unpad.run import checkpoint
from unpad.run.timers import Timers
from unpad.training.context import SavedWatches, Verdict
from unpad.training.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from unpad.training.progress import Progress
from unpad.training.stage import StageSetup
from unpad.training.stage_loop import start_watches
from unpad.training.step import train_step
from unpad.training.watches.collapse import CollapseMonitor, CollapseState, LatentReading, LatentSample, read_latent

TOPICS, WORDS, LATENT = 4, 6, 6
FAST = CollapseSettings(every=10, warmup=30, patience=3, window=120)


class Topics:
    """Patients whose sets hold three to eight codes of one topic; some patients have no set at all."""

    def __init__(self, num_patients: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.sets = [
            [rng.integers(WORDS, size=rng.integers(3, 9)) + WORDS * rng.integers(TOPICS) for _ in range(num_sets)]
            for num_sets in rng.integers(0, 9, num_patients)
        ]
        positions = np.array([sum(map(len, sets)) for sets in self.sets], np.int64)
        self.table = sequence_table(positions, np.zeros(num_patients, np.uint8))
        self.loaded: list[int] = []

    def load(self, micro: Micro) -> RaggedBatch:
        assert not micro.starts.any()
        assert (micro.stops == self.table.positions[micro.seq_ids]).all()
        self.loaded += micro.seq_ids.tolist()
        return self.batch(micro.seq_ids.tolist())

    def batch(self, ids: list[int]) -> RaggedBatch:
        sets = [one for i in ids for one in self.sets[i]]
        codes = np.concatenate([np.zeros(0, np.int64), *sets])
        lengths, num_sets = self.table.positions[ids], np.array([len(self.sets[i]) for i in ids], np.int64)
        nothing = torch.zeros(codes.size)
        events = EventSets(
            values=nothing, has_value=nothing.bool(), members=build_layout(np.array([len(s) for s in sets], np.int64)),
            history=build_layout(num_sets), times=torch.zeros(len(sets)),
        )  # fmt: skip
        unlabelled = np.zeros(codes.size, np.int64)
        made = make_batch(codes, unlabelled, unlabelled.astype(bool), lengths, np.array(ids, np.int64))
        return made.with_part(events)


class TopicVae(Stub, HasLatent):
    """Codes of a set -> mean of embeddings -> latent -> distribution over codes; `listens` is whether z is read."""

    def __init__(self, listens: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(TOPICS * WORDS, 16)
        self.posterior_head = nn.Linear(16, 2 * LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.GELU(), nn.Linear(32, TOPICS * WORDS))
        self.listens = listens

    def _encode(self, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
        pooled = segment_mean(self.embedding(batch.input_ids), batch.require(EventSets).members)
        pooled = pooled.to(self.embedding.weight.dtype)
        mean, log_var = self.posterior_head(pooled).chunk(2, -1)
        return mean, log_var, (mean**2 + log_var.exp() - 1 - log_var) / 2

    def _nll(self, batch: RaggedBatch, latents: Tensor) -> Tensor:
        members = batch.require(EventSets).members
        log_p = self.decoder(latents if self.listens else latents * 0).log_softmax(-1)
        return segment_mean(-log_p[members.seq_of_token(), batch.input_ids], members)

    @torch.no_grad()
    def posterior(self, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
        assert not self.training
        return self._encode(batch)

    @torch.no_grad()
    def reconstruct(self, batch: RaggedBatch, latents: Tensor | None = None) -> Tensor:
        assert not self.training
        return self._nll(batch, self._encode(batch)[0] if latents is None else latents)

    def losses(self, batch: RaggedBatch) -> Terms:
        mean, log_var, kl = self._encode(batch)
        nll = self._nll(batch, mean + (log_var / 2).exp() * torch.randn_like(mean))
        return {"reconstruction": (nll.sum(), len(nll)), "kl": (kl.sum(), len(nll))}

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return dict.fromkeys(("reconstruction", "kl"), batch.require(EventSets).num_sets)


DATA = Topics(160)
SAMPLE = LatentSample([DATA.batch(list(range(9)))], True)
HELD_OUT, TRAIN = np.arange(40), np.arange(40, 160)


def stage_of(
    data: Topics, held_out: np.ndarray = HELD_OUT, train_ids: np.ndarray = TRAIN, **sections: Any
) -> StageSetup:
    return StageSetup("train", parse_recipe(sections), data, ("events",), train_ids, held_out, 10**6)


class Run:
    """The part of a training loop that the detector sees: step, read, act, save; KL at `kl` in the end."""

    def __init__(self, model: TopicVae, settings: CollapseSettings, folder: Path, kl: float = 0.1) -> None:
        self.model, self.settings, self.folder, self.kl = model, settings, folder, kl
        self.optimizer = make_optimizer(model, OptimSettings(lr=1e-2))
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.verdicts: list[Verdict] = []
        self.told: list[str] = []
        self.read_at: dict[int, dict[str, Tensor]] = {}  # the weights at every reading
        self.monitor = self._monitor(SavedWatches())

    def _monitor(self, saved: SavedWatches) -> CollapseMonitor:
        return CollapseMonitor.start(stage_of(DATA, collapse=self.settings.model_dump()), self.model, saved)

    @property
    def state(self) -> CollapseState:
        return self.monitor.state

    def train(self, steps: int) -> None:
        for _ in range(steps):
            torch.manual_seed(self.step)
            batch = DATA.batch(np.random.default_rng(self.step).choice(TRAIN, 16).tolist())
            weights = {"reconstruction": 1.0, "kl": self.kl * min(self.step / 50, 1.0)}
            self.model.train()
            train_step(
                self.model, [batch], self.optimizer,
                weights=self.monitor.scaled(weights), precision="fp32", clip=1.0,
            )  # fmt: skip
            self.step += 1
            if self.monitor.due(self.step):
                self._read()

    def _read(self) -> None:
        self.read_at[self.step] = {name: value.clone() for name, value in self.model.state_dict().items()}
        verdict = self.monitor.check(self.step)
        self.verdicts.append(verdict)
        self.rows.append({"step": self.step, **verdict.values})
        if verdict.changed:
            self.told.append(verdict.message)
        if verdict.action == "save":
            self.monitor.save_healthy(self.folder)
        elif verdict.action == "recover":
            self.told.append(self.monitor.recover(self.step, self.optimizer))
        elif verdict.action == "stop":
            raise self.monitor.error(verdict)

    def save(self) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= optimizer_tensors(self.model, self.optimizer) | self.monitor.tensors()
        checkpoint.save(self.folder, checkpoint.State(self.step, tensors, {"collapse": self.monitor.values()}), keep=2)

    def load(self) -> None:
        state = checkpoint.load_newest(self.folder)[0]
        self.step = state.step
        self.model.load_state_dict({k[6:]: v for k, v in state.tensors.items() if k.startswith("model.")})
        load_optimizer_tensors(self.model, self.optimizer, state.tensors)
        self.monitor = self._monitor(SavedWatches(self.step, 0, state.values, state.tensors))

    @property
    def lights(self) -> dict[int, str]:
        return {verdict.step: verdict.light for verdict in self.verdicts}


# --------------------------------------------------------------------------- a reading


class Known(Stub, HasLatent):
    """A model whose posterior and reconstruction are given numbers: z is the place of a set in the corpus."""

    def __init__(self, latents: Tensor, log_var: Tensor) -> None:
        super().__init__()
        self.latents, self.log_var, self.modes_seen = latents, log_var, list[bool]()

    def _places(self, batch: RaggedBatch) -> Tensor:
        return batch.seq_ids

    def posterior(self, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
        self.modes_seen.append(self.training)
        mean, log_var = self.latents[self._places(batch)], self.log_var[self._places(batch)]
        return mean, log_var, (mean**2 + log_var.exp() - 1 - log_var) / 2

    def reconstruct(self, batch: RaggedBatch, latents: Tensor | None = None) -> Tensor:
        own = self.latents[self._places(batch)]
        return 1 + ((own if latents is None else latents) - own).abs().sum(1)


def one_set_each(ids: list[int]) -> RaggedBatch:
    batch = DATA.batch([next(i for i, sets in enumerate(DATA.sets) if len(sets) == 1)] * len(ids))
    return replace(batch, seq_ids=torch.tensor(ids))


@pytest.mark.promise("patients.monitor")
def test_a_reading_equals_the_sums_by_hand():
    rng = np.random.default_rng(3)
    mean, log_var = rng.normal(size=(7, 3)) * [2, 0.05, 0], rng.normal(size=(7, 3)) * [1, 0.01, 0]
    model = Known(torch.tensor(mean), torch.tensor(log_var))
    got = read_latent(model, [one_set_each([0, 1, 2, 3]), one_set_each([4, 5, 6])], CollapseSettings())
    for d in range(3):
        kl = [(math.exp(v) + m * m - 1 - v) / 2 for m, v in zip(mean[:, d], log_var[:, d], strict=True)]
        centre = sum(mean[:, d]) / 7
        assert got.kl[d] == pytest.approx(sum(kl) / 7, rel=1e-5, abs=1e-12)
        assert got.variance[d] == pytest.approx(sum((m - centre) ** 2 for m in mean[:, d]) / 7, rel=1e-5)
    # Set i is read with the latent of set i - 3, counted around.
    shuffled = sum(1 + sum(abs(mean[i - 3][d] - mean[i][d]) for d in range(3)) for i in range(7)) / 7
    assert got.num_sets == 7
    assert got.reconstruction == pytest.approx(1.0)
    assert got.shuffled == pytest.approx(shuffled)
    assert got.probe_gap == pytest.approx(shuffled - 1)
    assert got.active_share == pytest.approx(1 / 3)
    assert got.dead_share == pytest.approx(2 / 3)


def test_a_reading_does_not_depend_on_batches_and_changes_nothing():
    model = TopicVae().double().train()
    together, cut = [DATA.batch(list(range(40)))], [DATA.batch([i]) for i in range(40)]
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    whole, apart = (asdict(read_latent(model, batches, FAST)) for batches in (together, cut))
    for name, value in whole.items():
        assert apart[name] == pytest.approx(value, rel=1e-10 if isinstance(value, float) else 2e-5), name
    assert model.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("missing", ["policy", "sets"])
def test_nothing_is_read_without_a_policy_or_sets(missing):
    settings = {"policy": "off" if missing == "policy" else "recover", "every": 1}
    ids = HELD_OUT[:0] if missing == "sets" else HELD_OUT
    [watch] = start_watches(stage_of(DATA, ids, ids, collapse=settings), TopicVae(), SavedWatches(), Timers())
    assert not any(watch.due(step) for step in range(4))
    assert not watch.describe()
    assert not watch.tensors()


# --------------------------------------------------------------------------- what it means


def reading(active: float, dead: float, gap: float) -> LatentReading:
    return LatentReading(100, [0.5] * 4, [0.5] * 4, active, dead, 1.0, 1.0 + gap, gap)


@pytest.mark.parametrize(
    ("active", "dead", "gap", "light"),
    [(0.5, 0.5, 0.5, "green"), (0.05, 0.5, 0.5, "yellow"), (0.5, 0.95, 0.5, "yellow"), (0.5, 0.5, 0.01, "yellow"),
     (0.05, 0.95, 0.5, "orange"), (0.5, 0.95, 0.01, "orange"), (0.05, 0.5, 0.01, "red"), (0.05, 0.95, 0.01, "red")],
)  # fmt: skip
def test_one_sign_is_yellow_several_orange_and_two_for_long_red(active, dead, gap, light, monkeypatch):
    monkeypatch.setattr("unpad.training.watches.collapse.read_latent", lambda *_: reading(active, dead, gap))
    settings = CollapseSettings(warmup=30, every=10, patience=2)
    monitor = CollapseMonitor(settings, TopicVae(), SAMPLE, SavedWatches())
    verdicts = [monitor.check(step) for step in (10, 20, 30, 40, 50)]
    suspected = "orange" if light == "red" else light
    assert [v.light for v in verdicts] == [suspected] * 3 + [light] * 2
    assert [v.step for v in verdicts if v.changed] == ([] if light == "green" else [30] + [40] * (light == "red"))
    assert {v.action for v in verdicts} == {None}
    assert ("healthy one at step 0" in verdicts[-1].message) == (light == "red")


@pytest.mark.promise("patients.monitor")
def test_a_decoder_that_ignores_its_latent_is_found_within_the_window(tmp_path):
    run = Run(TopicVae(listens=False), FAST, tmp_path)
    run.train(60)
    # The first reading after the warm-up is at 30; three in a row end at 50.
    assert [step for step, light in run.lights.items() if light == "red"] == [50, 60]
    assert run.rows[-1]["probe_gap"] == pytest.approx(0, abs=1e-9)
    assert any("latent red at step 50" in line for line in run.told)


@pytest.mark.promise("patients.monitor")
def test_the_decoder_of_a_real_model_that_ignores_an_active_latent_is_found():
    model = tiny_patients_model(torch.float32)
    monitor = CollapseMonitor(FAST, model, LatentSample([random_patients([30, 40, 50])], True), SavedWatches())
    assert [monitor.check(step).light for step in (30, 40, 50)].count("red") == 0
    for parameter in model.decoder.from_latent.parameters():
        parameter.data.zero_()
    verdicts = [monitor.check(step) for step in (60, 70, 80)]
    assert verdicts[-1].values["active_share"] >= FAST.active_share
    assert [verdict.light == "red" for verdict in verdicts] == [False, False, True]


@pytest.mark.promise("patients.monitor")
def test_a_weight_of_the_kl_that_drowns_the_latent_is_found(tmp_path):
    run = Run(TopicVae(), FAST, tmp_path, kl=5.0)
    run.train(60)
    assert run.lights[60] == "red"


@pytest.mark.nightly
@pytest.mark.promise("patients.monitor")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_healthy_training_is_never_suspected(seed, tmp_path):
    run = Run(TopicVae(seed=seed), FAST, tmp_path)
    run.train(150)
    assert {light for step, light in run.lights.items() if step >= FAST.warmup} <= {"green", "yellow"}
    assert run.rows[-1]["probe_gap"] > 0.2
    assert run.lights[150] == "green"


# --------------------------------------------------------------------------- what follows


def changed(policy: str, **fields: Any) -> CollapseSettings:
    return FAST.model_copy(update={"policy": policy, **fields})


@pytest.mark.promise("patients.collapse")
def test_save_keeps_the_weights_of_the_last_healthy_reading_once(tmp_path):
    run = Run(TopicVae(), changed("save"), tmp_path)
    run.train(60)
    assert run.lights[60] == "green"
    run.kl = 20.0
    run.train(200)
    healthy_step = run.state.healthy_step
    assert run.lights[run.step] == "red"
    assert healthy_step >= 60
    found = list(tmp_path.glob("before-collapse-*"))
    assert [path.name for path in found] == [f"before-collapse-step-{healthy_step:08d}"]
    assert sum(verdict.action == "save" for verdict in run.verdicts) == 1
    kept = checkpoint.load(found[0])
    assert kept.step == healthy_step
    assert kept.tensors.keys() == {f"model.{name}" for name in run.model.state_dict()}
    then = CollapseState(light="red", streak=run.settings.patience, healthy_step=healthy_step)
    assert kept.values == {"collapse": asdict(then)}
    assert all(torch.equal(kept.tensors[f"model.{name}"], value) for name, value in run.read_at[healthy_step].items())
    assert run.lights[healthy_step] in ("green", "yellow")
    assert checkpoint.load_newest(tmp_path) is None  # it is no checkpoint that a resume would take


@pytest.mark.promise("patients.collapse")
def test_stop_says_what_where_and_what_to_do(tmp_path):
    run = Run(TopicVae(listens=False), changed("stop"), tmp_path)
    with pytest.raises(CollapseError) as caught:
        run.train(100)
    assert run.step == 50
    assert caught.value.exit_code == 11
    assert "latent red at step 50" in caught.value.what
    assert caught.value.where == "step 50"
    assert "collapse.policy=warn" in caught.value.fix


@pytest.mark.promise("patients.collapse")
def test_recovery_goes_back_and_training_goes_on(tmp_path):
    run = Run(TopicVae(), changed("recover", factor=0.1), tmp_path, kl=5.0)
    while not run.state.num_recoveries:
        run.train(10)
        assert run.step < 300
    recovered, healthy = run.step, run.read_at[run.state.healthy_step]
    assert not run.optimizer.state
    assert run.state == CollapseState(recovered, "green", 0, run.state.healthy_step, 0.1, 1, False)
    assert run.monitor.scaled({"kl": 0.5, "reconstruction": 1.0}) == {"kl": 0.05, "reconstruction": 1.0}
    assert 0 < run.state.healthy_step < recovered
    assert all(torch.equal(healthy[name], value) for name, value in run.model.state_dict().items())
    assert any(f"recovery 1 of 3 at step {recovered}" in line for line in run.told)
    run.train(100)
    assert run.state.num_recoveries == 1
    assert run.lights[run.step] == "green"
    assert run.rows[-1]["reconstruction"] < 2.4  # nats; with nothing known of the set it is log 24 = 3.2


LONG = changed("recover", warmup=20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A healthy phase, a collapse, three recoveries and training after them."""
    run = Run(TopicVae(), LONG, tmp_path_factory.mktemp("whole"), kl=5.0)
    run.train(160)
    assert run.state.num_recoveries == 3
    assert run.lights[160] == "green"
    return run


@pytest.mark.promise("patients.collapse")
@pytest.mark.parametrize("cut", [45, 70, 130])
def test_a_resumed_run_is_the_uninterrupted_one(cut, whole, tmp_path):
    begun = Run(TopicVae(), LONG, tmp_path, kl=5.0)
    begun.train(cut)
    begun.save()
    resumed = Run(TopicVae(seed=9), LONG, tmp_path, kl=5.0)
    resumed.load()
    resumed.train(160 - cut)
    assert begun.rows + resumed.rows == whole.rows
    assert begun.told + resumed.told == whole.told
    assert resumed.state == whole.state
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for name, value in whole.monitor.tensors().items():
        assert torch.equal(value, resumed.monitor.tensors()[name]), name


def test_the_state_survives_a_checkpoint_and_a_stage_begins_with_a_fresh_one():
    state = CollapseState(3, "orange", 2, 1, 0.25, 2, True)
    progress = Progress(step=9, stage_step=6, watches={"collapse": asdict(state)})
    values = json.loads(json.dumps(progress.to_values()))
    assert values["collapse"] == asdict(state)  # the place where every version looks for it
    assert Progress.from_values(values) == progress
    resumed = CollapseMonitor(FAST, TopicVae(), SAMPLE, SavedWatches(9, 3, progress.watches))
    assert resumed.state == state
    progress.next_stage()
    fresh = CollapseMonitor(FAST, TopicVae(), SAMPLE, SavedWatches(9, 9, progress.watches))
    assert fresh.state == CollapseState(9, "green", 0, 9, 1.0, 0, False)
