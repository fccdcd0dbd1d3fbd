"""Small cohorts: `unpad train events` beside ridge Cox regression on last values, over simulated cohorts of 250.

    python benchmarks/cohorts.py [--cohorts 20] [--first 100] [--families last course] [--out benchmarks/cohorts.md]
                                 [--kept runs/cohorts.json] [key=value ...]

Every cohort is drawn by its seed: repeated visits at random times, each with some of eight skewed measurements, age and
sex, and a time to the outcome that censoring cuts short. In the family `last` the outcome follows the logarithms of
last values linearly; in `course` it follows the slope of a measurement over the last year, or the product of two last
values, turn by turn. Both sides learn from the same 250 people and are asked about 2,000 others of the cohort, whose
outcome within the year after the landmark is known; the score is the AUROC. Cox regression reads the standardised
logarithms of last values, the form in which the family `last` is linear, whether each is there, age and sex; its
penalty is chosen by the partial likelihood over five folds of the 250. Ours is the packaged recipe `events` with the
cohort's tables, as a user would run it; other words change it. Nothing is chosen on the 2,000; model and recipe were
made by other seeds, below 100 and from 1,000 on. `--kept` holds the scores, and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from unpad.evaluation.binary import auroc
from unpad.inference.embed import embed_file
from unpad.inference.loaded import load
from unpad.storage import make_folder, write_atomic
from unpad.training.loop import train
from unpad.trials.bench.measure import describe_machine

HORIZON = 365.0  # days after the landmark
NUM_LEARN, NUM_ASKED = 250, 2000
TESTS = ("glucose", "creatinine", "bilirubin", "platelets", "ferritin", "crp", "albumin", "tsh")
VISITS = (2, 9)  # of a person, fewest and most
MEASURED = 0.6  # probability that a visit has a test
SHARE = 0.35  # of people with the outcome within the horizon, about
PENALTIES = np.logspace(-1, 3, 9)
FOLDS = 5
COX, OURS = "ridge Cox on last values", "unpad train events"
FAMILIES = ("last", "course")


# --------------------------------------------------------------------------- cohorts


@dataclass(frozen=True)
class Cohort:
    """People of one seed, those to learn from first.

    Args:
        age, sex: (num,).
        who, day, test, value: (num_measurements,), by person and day; days are at most 0, the landmark.
        duration: (num,) days from the landmark to the end of observation; outcome: (num,) bool, whether it came then.
        within: (num,) int64, whether the outcome comes within the horizon, had nobody been censored.
    """

    age: np.ndarray
    sex: np.ndarray
    who: np.ndarray
    day: np.ndarray
    test: np.ndarray
    value: np.ndarray
    duration: np.ndarray
    outcome: np.ndarray
    within: np.ndarray


def draw_cohort(family: str, seed: int) -> Cohort:
    """Draw a cohort; the same seed gives other people in every family."""
    rng = np.random.default_rng([FAMILIES.index(family), seed])
    num, kinds = NUM_LEARN + NUM_ASKED, len(TESTS)
    age, sex = rng.normal(60, 12, num).clip(18, 95), rng.integers(0, 2, num)
    visits = rng.integers(VISITS[0], VISITS[1] + 1, num)
    who = np.repeat(np.arange(num), visits)
    day = -np.floor(rng.uniform(0, 730, len(who)))
    order = np.lexsort((day, who))
    who, day = who[order], day[order]
    level, slope = rng.normal(size=(num, kinds)), rng.normal(0, 0.8, (num, kinds))  # slope per year
    z = level[who] + slope[who] * (day / 365)[:, None] + rng.normal(0, 0.4, (len(who), kinds))
    spread, middle = rng.uniform(0.5, 1.2, kinds), rng.uniform(0, 4, kinds)
    seen = rng.random(z.shape) < MEASURED
    last = np.zeros((num, kinds))  # a test that was never made tells nothing
    for visit in range(len(who)):
        last[who[visit]] = np.where(seen[visit], z[visit], last[who[visit]])
    if family == "last":
        effects = rng.normal(0, 1, kinds) * (rng.random(kinds) < 0.6)
        if not effects.any():
            effects[0] = 1.0
        score = last @ effects
    elif seed % 2:
        a, b = rng.permutation(kinds)[:2]
        score = last[:, a] * last[:, b]
    else:
        score = slope[:, rng.integers(kinds)]
    score = 1.2 * (score - score.mean()) / score.std() + 0.02 * (age - 60)
    wait = rng.exponential(size=num) / np.exp(score)
    time_to = wait * HORIZON / np.quantile(wait, SHARE)
    censoring = np.where(rng.random(num) < 0.4, rng.uniform(30, 900, num), 900)
    at, tests = np.nonzero(seen)
    return Cohort(
        age=age,
        sex=sex,
        who=who[at],
        day=day[at],
        test=tests,
        value=np.exp(middle[tests] + spread[tests] * z[at, tests]),
        duration=np.ceil(np.minimum(time_to, censoring)),
        outcome=time_to <= censoring,
        within=(time_to <= HORIZON).astype(np.int64),
    )


# --------------------------------------------------------------------------- ridge Cox


def last_values(cohort: Cohort) -> np.ndarray:
    """Logarithms of last values, standardised over those to learn from, 0 where there is none; whether there is one;
    age and sex. (num, 2 tests + 2)"""
    num, kinds = len(cohort.age), len(TESTS)
    last = np.full((num, kinds), np.nan)
    last[cohort.who, cohort.test] = np.log(cohort.value)  # by day: the last assignment stays
    columns = np.column_stack([last, ~np.isnan(last), cohort.age, cohort.sex]).astype(np.float64)
    learn = columns[:NUM_LEARN]
    spread = np.nanstd(learn, 0)
    return np.nan_to_num((columns - np.nanmean(learn, 0)) / np.where(spread > 0, spread, 1))


def fit_cox(x: np.ndarray, duration: np.ndarray, outcome: np.ndarray, penalty: float) -> np.ndarray:
    """Coefficients that maximise the partial likelihood (Breslow's ties) less penalty / 2 times their square."""
    order = np.argsort(-duration, kind="stable")
    x, outcome = x[order], outcome[order]
    last = np.searchsorted(-duration[order], -duration[order], "right") - 1  # of those still at risk
    beta = np.zeros(x.shape[1])
    for _ in range(50):
        weight = np.exp(x @ beta)
        total = np.cumsum(weight)[last]
        first = np.cumsum(weight[:, None] * x, 0)[last] / total[:, None]
        second = np.cumsum(weight[:, None, None] * x[:, :, None] * x[:, None, :], 0)[last] / total[:, None, None]
        gradient = (x - first)[outcome].sum(0) - penalty * beta
        curvature = (second - first[:, :, None] * first[:, None, :])[outcome].sum(0) + penalty * np.eye(len(beta))
        step = np.linalg.solve(curvature, gradient)
        beta += step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-8:
            break
    return beta


def partial_likelihood(risk: np.ndarray, duration: np.ndarray, outcome: np.ndarray) -> float:
    """Logarithm of Cox's partial likelihood."""
    at_risk = duration[None] >= duration[outcome][:, None]
    most = risk.max()
    return float((risk[outcome] - most - np.log((np.exp(risk - most) * at_risk).sum(1))).sum())


def cox(cohort: Cohort) -> np.ndarray:
    """Risk of those who are asked about, (NUM_ASKED,)."""
    x, duration, outcome = last_values(cohort), cohort.duration[:NUM_LEARN], cohort.outcome[:NUM_LEARN]
    learn, fold = x[:NUM_LEARN], np.arange(NUM_LEARN) % FOLDS
    found = []
    for penalty in PENALTIES:
        # Verweij and van Houwelingen 1993: what the left out add to the likelihood of all.
        parts = [fit_cox(learn[fold != k], duration[fold != k], outcome[fold != k], penalty) for k in range(FOLDS)]
        found.append(
            sum(
                partial_likelihood(learn @ beta, duration, outcome)
                - partial_likelihood(learn[fold != k] @ beta, duration[fold != k], outcome[fold != k])
                for k, beta in enumerate(parts)
            )
        )
    return x[NUM_LEARN:] @ fit_cox(learn, duration, outcome, PENALTIES[int(np.argmax(found))])


# --------------------------------------------------------------------------- ours


def write_tables(cohort: Cohort, people: np.ndarray, folder: Path) -> None:
    """Write the people of these indices as a user would have them: events and people."""
    mine = np.isin(cohort.who, people)
    folder.mkdir()
    events = {
        "id": cohort.who[mine],
        "days": cohort.day[mine],
        "code": np.array(TESTS)[cohort.test[mine]],
        "value": cohort.value[mine],
    }
    pq.write_table(pa.table(events), folder / "events.parquet")
    table = {"id": people, "age": cohort.age[people], "sex": np.where(cohort.sex[people], "male", "female")}
    table |= {"died": cohort.outcome[people].astype(np.int64), "days": cohort.duration[people]}
    pq.write_table(pa.table(table), folder / "patients.parquet")


def ours(cohort: Cohort, seed: int, overrides: Sequence[str]) -> np.ndarray:
    """Probability of the outcome within the horizon of those who are asked about, (NUM_ASKED,)."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tables(cohort, np.arange(NUM_LEARN), folder / "learn")
        write_tables(cohort, np.arange(NUM_LEARN, NUM_LEARN + NUM_ASKED), folder / "asked")
        sources = [
            {"path": str(folder / "learn/events.parquet"), "time": "days"},
            {"path": str(folder / "learn/patients.parquet"), "static": ["age", "sex"]},
        ]
        words = [f"data.events={json.dumps(sources)}", f"events.labels.path={folder / 'learn/patients.parquet'}"]
        train("events", folder / "run", [*words, f"train.seed={seed}", *overrides], console=Console(quiet=True))
        embed_file(load(folder / "run"), folder / "asked", "patient", folder / "vectors.parquet")
        found = pq.read_table(folder / "vectors.parquet", columns=["id", "probability"])
    p = np.full(NUM_ASKED, np.nan)
    p[found["id"].to_numpy() - NUM_LEARN] = found["probability"].to_numpy()
    assert not np.isnan(p).any(), "somebody was left out"
    return p


# --------------------------------------------------------------------------- the comparison


def t_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95 % interval of Student's t (its quantile by Abramowitz and Stegun 26.7.5, right to 0.3 % from 4)."""
    z, free = 1.959964, len(values) - 1
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    student += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    reach = student * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(values.mean() - reach), float(values.mean() + reach)


def markdown(scores: dict[str, dict[str, dict[str, float]]], words: str) -> str:
    """The page: per family the mean difference, and every cohort."""
    machine = describe_machine()
    lines = [
        "# Small cohorts, beside ridge Cox regression",
        "",
        f"    python benchmarks/cohorts.py {words}".rstrip(),
        "",
        f"{machine['cores']} cores of {machine['processor']}. Simulated cohorts of {NUM_LEARN} people to learn",
        f"from, and {NUM_ASKED:,} others to score; AUROC of the outcome within {HORIZON:g} days. `last`: the outcome",
        "follows last values; `course`: the slope of a measurement (even seeds) or the product of two last values (odd",
        "seeds).",
        "Cox regression reads the logarithms of last values, the form in which `last` is linear. Intervals are 95 %,",
        "of Student's t over the cohorts.",
        "",
        f"| family | cohorts | {COX} | {OURS} | mean difference | interval |",
        "|---|---|---|---|---|---|",
    ]
    for family, found in scores.items():
        cox_scores, our_scores = (np.array([one[side] for one in found.values()]) for side in (COX, OURS))
        mean, low, high = t_interval(our_scores - cox_scores)
        lines.append(
            f"| {family} | {len(found)} | {cox_scores.mean():.4f} | {our_scores.mean():.4f} | {mean:+.4f} "
            f"| {low:+.4f} to {high:+.4f} |"
        )
    lines += ["", f"| family | seed | {COX} | {OURS} | difference |", "|---|---|---|---|---|"]
    for family, found in scores.items():
        for seed, one in found.items():
            lines.append(f"| {family} | {seed} | {one[COX]:.4f} | {one[OURS]:.4f} | {one[OURS] - one[COX]:+.4f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="fields of the recipe `events`")
    parser.add_argument("--cohorts", type=int, default=20, help="of each family")
    parser.add_argument("--first", type=int, default=100, help="seed of the first")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--kept", type=Path, default=Path("runs/cohorts.json"), help="scores of every cohort")
    options = parser.parse_intermixed_args()
    make_folder(options.kept.parent)
    kept: dict[str, Any] = json.loads(options.kept.read_text("utf-8")) if options.kept.exists() else {}
    scores: dict[str, dict[str, dict[str, float]]] = {}
    for family in options.families:
        for seed in range(options.first, options.first + options.cohorts):
            key, began = json.dumps([family, seed, options.overrides]), time.process_time()
            if key not in kept:
                cohort = draw_cohort(family, seed)
                asked = cohort.within[NUM_LEARN:]
                found = {COX: cox(cohort), OURS: ours(cohort, seed, options.overrides)}
                kept[key] = {side: float(auroc(asked, p)) for side, p in found.items()}
                write_atomic(options.kept, json.dumps(kept))
                told = ", ".join(f"{side} {value:.4f}" for side, value in kept[key].items())
                print(f"{family} {seed}: {told}, {time.process_time() - began:.0f} s", flush=True)
            scores.setdefault(family, {})[str(seed)] = kept[key]
    write_atomic(options.out, markdown(scores, " ".join(options.overrides)))
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
