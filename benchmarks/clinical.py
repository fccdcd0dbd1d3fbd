"""Death within five years from what is known at the index date: `unpad train events` beside gradient boosting.

    python benchmarks/clinical.py [--only boosting] [--data shared/data/clinical] [--out benchmarks/clinical.md]
                                  [--recipe benchmarks/clinical.yaml] [--kept runs/clinical.json]
                                  [key=value ...]

Both sides see the same people: those who died within the horizon or were followed for at least as long, over five
random splits into 80 % to learn from and 20 % that are seen only in the end. Boosting (scikit-learn, extra `bench`)
reads a table made by hand; its settings are chosen within the 80 %. Ours reads the events of all of the 80 % for as
many epochs as were best on a tenth of them (--stop measures that tenth after every epoch and trains on the others), and
learns besides from how long those were followed whose outcome is not known; it is trained twice per split, with other
seeds, to tell what the mean of two runs gives. Other words change the recipe. All predictions go to --kept, so that one
side can be run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import describe_machine

import unpad
from unpad.data.family import open_data
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split
from unpad.evaluation.binary import auroc, average_precision, brier
from unpad.evaluation.metrics import bootstrap, ratio
from unpad.inference.patients import predict
from unpad.recipes.file import load_recipe
from unpad.storage import make_folder, write_atomic

HORIZON = 1825  # days
SEEDS = range(5)
STUDENT = 2.7764451052  # 97.5 % quantile of Student's t with a degree of freedom less than seeds
TRAIN_SHARE, STOPPING_SHARE = 0.8, 0.1
DAYS_PER_YEAR = 365.25
CLOSEST = 1e-12  # probabilities nearer to 0 or 1 count as this near


def log_loss(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean negative log-likelihood in nats; arguments as in `brier`."""
    p = np.clip(p, CLOSEST, 1 - CLOSEST)
    return ratio(-np.where(labels > 0, np.log(p), np.log1p(-p)), None, weights)


MEASURES: dict[str, Callable[..., np.ndarray]] = {
    "AUROC": auroc,
    "average precision": average_precision,
    "Brier score": brier,
}
COMPARED = ("AUROC", "average precision")
# What a user would try, from scikit-learn's defaults to slower and smaller trees.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"learning_rate": 0.05, "max_iter": 150},
    {"learning_rate": 0.05, "max_iter": 150, "max_leaf_nodes": 8, "min_samples_leaf": 40},
    {"learning_rate": 0.03, "max_iter": 250, "max_leaf_nodes": 6, "l2_regularization": 10.0},
    {"learning_rate": 0.03, "max_iter": 250, "max_leaf_nodes": 4, "l2_regularization": 1.0},
]
INNER_FOLDS = 5
OURS, BOOSTING = "unpad train events", "gradient boosting"
OTHER, BOTH = "unpad train events, other seeds", "mean of both"
DEFAULTS, BASIC = "gradient boosting, default settings", "gradient boosting, age and sex alone"


@dataclass(frozen=True)
class People:
    """Those whose outcome is known, in the order of subjects.parquet, and what happened to them up to the index date.

    Args:
        ids: (num_people,) int64.
        censored: ids of the others, whose observation ended too early to know; (num_others,) int64.
        basics: (num_people, 2) age and sex.
        died: (num_people,) int64, 1 within the horizon.
        tests, diagnoses: names.
        who, test, days, value: (num_measurements,), by person and then day; `who` and `test` are indices.
        flags: (num_people, diagnoses) whether each was made by the index date.
    """

    ids: np.ndarray
    censored: np.ndarray
    basics: np.ndarray
    died: np.ndarray
    tests: tuple[str, ...]
    diagnoses: tuple[str, ...]
    who: np.ndarray
    test: np.ndarray
    days: np.ndarray
    value: np.ndarray
    flags: np.ndarray


def load_people(folder: Path) -> People:
    """Read the three tables and keep the people of known outcome, and their history of days <= 0."""
    subjects = _columns(folder / "subjects.parquet")
    died = (subjects["status"] == 1) & (subjects["futime"] <= HORIZON)
    known = died | (subjects["futime"] >= HORIZON)
    ids = subjects["id"][known]
    assert np.all(np.diff(ids) > 0), "people are looked up by bisection"
    measured, diagnosed = _columns(folder / "measurements.parquet"), _columns(folder / "events.parquet")
    rows, who = _history(measured, ids)
    tests, test = np.unique(measured["test"][rows].astype(str), return_inverse=True)
    order = np.lexsort((measured["days"][rows], test, who))
    seen, whose = _history(diagnosed, ids)
    diagnoses, which = np.unique(diagnosed["event"][seen].astype(str), return_inverse=True)
    flags = np.zeros((len(ids), len(diagnoses)))
    flags[whose, which] = 1
    return People(
        ids=ids,
        censored=subjects["id"][~known],
        basics=np.stack([subjects["age"], subjects["male"]], 1)[known].astype(np.float64),
        died=died[known].astype(np.int64),
        tests=tuple(tests),
        diagnoses=tuple(diagnoses),
        who=who[order],
        test=test[order],
        days=measured["days"][rows][order].astype(np.float64),
        value=measured["value"][rows][order],
        flags=flags,
    )


def _columns(path: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def _history(table: dict[str, np.ndarray], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows up to the index date of people who take part, and the index of the person of each."""
    who = np.minimum(np.searchsorted(ids, table["id"]), len(ids) - 1)
    rows = np.flatnonzero((table["days"] <= 0) & (ids[who] == table["id"]))
    return rows, who[rows]


def features(people: People) -> np.ndarray:
    """Age, sex, diagnoses; of every test the count, first, last, mean, standard deviation and slope per year.

    (num_people, 2 + diagnoses + 6 tests); what cannot be computed is not a number, which boosting reads as missing.
    """
    num, kinds = len(people.ids), len(people.tests)
    run = people.who * kinds + people.test  # measurements lie in these runs, by day
    years = people.days / DAYS_PER_YEAR

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(run, values, num * kinds)

    count = np.bincount(run, minlength=num * kinds).astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, middle = total(people.value) / count, total(years) / count
        off, ahead = people.value - mean[run], years - middle[run]
        spread = np.where(count > 1, np.sqrt(total(off**2) / (count - 1)), np.nan)
        width = total(ahead**2)
        slope = np.where(width > 0, total(ahead * off) / width, np.nan)
    first, last = np.full((2, num * kinds), np.nan)
    first[run[::-1]] = people.value[::-1]
    last[run] = people.value
    tests = np.stack([count, first, last, mean, spread, slope], 1).reshape(num, -1)
    return np.concatenate([people.basics, people.flags, tests], 1)


def split_people(num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The people to learn from, in random order, and the others."""
    order = np.random.RandomState(seed).permutation(num)
    cut = int(TRAIN_SHARE * num)
    return order[:cut], order[cut:]


# --------------------------------------------------------------------------- the two sides


def boosted(
    x: np.ndarray, died: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int, tried: list[dict[str, Any]]
) -> np.ndarray:
    """Probabilities for `test` of those of the tried settings with the best log loss over folds of `train`."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    def fitted(settings: dict[str, Any], learn: np.ndarray, ask: np.ndarray) -> np.ndarray:
        # It cannot fit a column that is empty in what it learns from, as the slope of a test that no patient had twice.
        columns = np.flatnonzero(~np.isnan(x[learn]).all(0))
        model = HistGradientBoostingClassifier(**settings, early_stopping=False, random_state=seed)
        model.fit(x[np.ix_(learn, columns)], died[learn])
        found: np.ndarray = model.predict_proba(x[np.ix_(ask, columns)])[:, 1]
        return found

    if len(tried) == 1:
        return fitted(tried[0], train, test)
    folds = np.array_split(train, INNER_FOLDS)
    losses = []
    for settings in tried:
        p = [fitted(settings, np.setdiff1d(train, fold), fold) for fold in folds]
        losses.append(float(log_loss(died[train], np.concatenate(p))))
    best = int(np.argmin(losses))
    print(f"  seed {seed}: settings {best} of {' '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    return fitted(tried[best], train, test)


def boosting(people: People, tried: list[dict[str, Any]], columns: int | None = None) -> list[np.ndarray]:
    """Probabilities of the fifth of every split that was not learned from, from the first so many columns."""
    x = features(people)[:, :columns]
    return [boosted(x, people.died, *split_people(len(people.ids), seed), seed, tried) for seed in SEEDS]


def ours(people: People, recipe: str, overrides: Sequence[str], first_seed: int, stop: bool) -> list[np.ndarray]:
    """The same of the model of events."""
    return [_ours_once(people, recipe, [*overrides, f"train.seed={first_seed + seed}"], seed, stop) for seed in SEEDS]


def _ours_once(people: People, recipe: str, overrides: Sequence[str], seed: int, stop: bool) -> np.ndarray:
    train, test = split_people(len(people.ids), seed)
    stopping = train[int((1 - STOPPING_SHARE) * len(train)) if stop else len(train) :]
    sides = np.full(len(people.ids), "test", object)
    sides[train], sides[stopping] = "train", "holdout"
    ids = np.concatenate([people.ids, people.censored])

    def write(path: Path) -> None:
        """Those whose observation ended early help to train in every split; they are no part of any comparison."""
        all_sides = np.concatenate([sides, np.full(len(people.censored), "train", object)])
        pq.write_table(pa.table({"id": ids, "split": all_sides}), path)

    with tempfile.TemporaryDirectory() as folder:
        split, asked = Path(folder) / "split.parquet", Path(folder) / "asked.parquet"
        write(split)
        began = time.perf_counter()
        run = unpad.train(recipe, *overrides, f"events.split={split}", out=Path(folder) / "run")
        # The same people, of whom those that were never seen are now the ones held out.
        sides[stopping], sides[test] = "train", "holdout"
        write(asked)
        data: Any = open_data(load_recipe(recipe, [*overrides, f"events.split={asked}"]), run.files)
        held = np.flatnonzero(data.table.split == Split.HOLDOUT)
        found = predict(Measuring(run.model, data, held, run.recipe.plan))
        place = {person: row for row, person in enumerate(data.ids[held].tolist())}
        rows = np.array([place[person] for person in people.ids[test].tolist()])
        assert np.array_equal(found.labels[rows], people.died[test]), "the two sides disagree about who died"
        print(f"  seed {seed}: {run.step} steps, {time.perf_counter() - began:.0f} s", flush=True)
    return np.asarray(found.p[rows])


# --------------------------------------------------------------------------- the comparison


def scores(people: People, found: list[np.ndarray]) -> dict[str, list[float]]:
    """Every measure of every split."""
    tests = [split_people(len(people.ids), seed)[1] for seed in SEEDS]
    return {
        name: [float(measure(people.died[test], p)) for test, p in zip(tests, found, strict=True)]
        for name, measure in MEASURES.items()
    }


def paired(people: People, measure: Callable[..., np.ndarray], a: list[np.ndarray], b: list[np.ndarray]) -> list[str]:
    """Mean difference over splits and its 95 % intervals: t over the splits, and a bootstrap over people.

    The bootstrap draws people, each with all the splits that tested them. The five splits share most of their training
    people, so t over them says less than five independent repeats would.
    """
    tests = [split_people(len(people.ids), seed)[1] for seed in SEEDS]

    def difference(weights: np.ndarray) -> np.ndarray:
        """(draws, num_people) -> (draws,) mean over splits."""
        parts = [
            measure(people.died[test], one, weights[..., test]) - measure(people.died[test], other, weights[..., test])
            for test, one, other in zip(tests, a, b, strict=True)
        ]
        return np.asarray(np.mean(parts, 0))

    each = np.array(
        [
            float(measure(people.died[test], one)) - float(measure(people.died[test], other))
            for test, one, other in zip(tests, a, b, strict=True)
        ]
    )
    reach = STUDENT * each.std(ddof=1) / np.sqrt(len(each))
    samples = bootstrap(difference, len(people.ids))
    low, high = np.percentile(samples[np.isfinite(samples)], [2.5, 97.5])
    return [
        f"{each.mean():+.4f}",
        f"{each.mean() - reach:+.4f} to {each.mean() + reach:+.4f}",
        f"{low:+.4f} to {high:+.4f}",
        " ".join(f"{value:+.4f}" for value in each),
    ]


def markdown(people: People, sides: dict[str, list[np.ndarray]], words: str) -> str:
    machine = describe_machine()
    without = len(people.ids) - len(np.unique(people.who))
    lines = [
        "# Death within five years, beside gradient boosting",
        "",
        f"    python benchmarks/clinical.py {words}".rstrip(),
        "",
        f"{machine['cores']} cores of {machine['processor']}. {len(people.ids):,} people who died within {HORIZON:,}",
        f"days of the index date ({people.died.sum():,}) or were followed for at least as long; {without:,} of",
        f"them have no earlier measurement. {len(SEEDS)} random splits of {TRAIN_SHARE:.0%} to learn from; scores are",
        "of the rest. Boosting is scikit-learn's HistGradientBoostingClassifier on age, sex, diagnoses and six numbers",
        f"of every test, where nothing else is said with the best of {len(SETTINGS)} settings by log loss over",
        f"{INNER_FOLDS} folds of what it learns from. Differences are pair by pair. The splits share most people,",
        "so t over the five is narrower than of independent repeats; the bootstrap draws people with all their splits.",
        "",
        "| side | measure | mean |",
        "|---|---|---|",
    ]
    for side, found in sides.items():
        for name, values in scores(people, found).items():
            lines.append(f"| {side} | {name} | {np.mean(values):.4f} |")
    for side, other in ((OURS, BOOSTING), (BOTH, BOOSTING), (OURS, DEFAULTS)):
        if side not in sides or other not in sides:
            continue
        lines += [
            "",
            f"{side} minus {other}:",
            "",
            "| measure | mean difference | 95 %, t over splits | 95 %, bootstrap over people | every split |",
            "|---|---|---|---|---|",
        ]
        for name in COMPARED:
            cells = paired(people, MEASURES[name], sides[side], sides[other])
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--only", choices=["boosting", "ours", "other"], help="other: ours with other seeds")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared/data/clinical")
    parser.add_argument("--recipe", default=str(Path(__file__).with_suffix(".yaml")))
    parser.add_argument("--stop", action="store_true", help="stop early on a tenth of what is learned from")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--kept", type=Path, default=Path("runs/clinical.json"), help="predictions of every side")
    options = parser.parse_intermixed_args()
    people = load_people(options.data)
    known = json.loads(options.kept.read_text(encoding="utf-8")) if options.kept.exists() else {}
    sides = {name: [np.array(p) for p in found] for name, found in known.items()}
    if options.only in (None, "boosting"):
        sides[BASIC] = boosting(people, SETTINGS, people.basics.shape[1])
        sides[DEFAULTS] = boosting(people, SETTINGS[:1])
        sides[BOOSTING] = boosting(people, SETTINGS)
    fields = [f"data.root={options.data.resolve()}", *options.overrides]
    if options.only in (None, "ours"):
        sides[OURS] = ours(people, options.recipe, fields, 0, options.stop)
    if options.only in (None, "other"):
        sides[OTHER] = ours(people, options.recipe, fields, len(SEEDS), options.stop)
    if OURS in sides and OTHER in sides:
        sides[BOTH] = [(a + b) / 2 for a, b in zip(sides[OURS], sides[OTHER], strict=True)]
    order = (OURS, OTHER, BOTH, BOOSTING, DEFAULTS, BASIC)
    sides = {name: sides[name] for name in order if name in sides}
    make_folder(options.kept.parent)
    write_atomic(options.kept, json.dumps({name: [p.tolist() for p in found] for name, found in sides.items()}))
    write_atomic(options.out, markdown(people, sides, " ".join(options.overrides)))
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
