"""Cohorts that come with packages: `unpad train events` beside a search and the regressions that a user would take.

    pip install lifelines scikit-survival scikit-learn optuna
    python benchmarks/small_cohorts.py tables FOLDER           # people.csv, events.csv and split.csv of every cohort
    python benchmarks/small_cohorts.py sides FOLDER            # simple.csv: Cox, logistic regression, boosting
    python benchmarks/small_cohorts.py ours FOLDER [--tries 7] [--seeds 3]
    python benchmarks/small_cohorts.py scores FOLDER

A third of the people are the test, drawn once in every class of outcome; a fifth of the others chooses weights and
settings of ours, and all of the others are what the regressions learn from, with settings by five folds of them.
"""

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import optuna
import pandas as pd

import unpad
from unpad.data.family import open_data
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split, Wanted
from unpad.evaluation.binary import auroc, brier, uncensored_weights
from unpad.evaluation.metrics import measured
from unpad.inference.patients import predict

HORIZONS = {"gbsg2": 1095, "actg175": 870, "whas500": 365}  # days from time 0
LANDMARKS = {"actg175": 140}
NOT_FACTS = ("id", "event", "duration", "label", "split")
SEARCH = [
    "losses.reconstruction=0", "losses.made_code=0", "train.min_delta=0", "train.eval_every=20", "train.patience=2",
    "train.max_steps=80",
]  # fmt: skip


def tables(folder: Path) -> None:
    """Write the tables of every cohort."""
    import lifelines
    from sksurv.datasets import load_gbsg2, load_whas500

    x, y = load_whas500()
    numbers = {column: x[column].astype(float) for column in x if column != "los"}  # the stay is known only later
    _write(folder, "whas500", pd.DataFrame(numbers), y["fstat"], y["lenfol"])
    x, y = load_gbsg2()
    _write(folder, "gbsg2", x, y["cens"], y["time"])
    trial = pd.read_csv(Path(lifelines.__file__).parent / "datasets" / "ACTG175.csv")
    trial = trial[trial.days > LANDMARKS["actg175"]].reset_index(drop=True)
    facts = ["age", "wtkg", "hemo", "homo", "drugs", "karnof", "oprior", "z30", "preanti", "race", "gender", "symptom"]
    people = trial[facts].assign(arms=trial.arms.map("arm{}".format))
    _write(folder, "actg175", people, trial.cens, trial.days)
    counts = ((0, "cd4", "cd40"), (0, "cd8", "cd80"), (140, "cd4", "cd420"), (140, "cd8", "cd820"))
    ids = [f"p{row}" for row in range(len(trial))]
    rows = [pd.DataFrame({"id": ids, "days": day, "code": code, "value": trial[name]}) for day, code, name in counts]
    pd.concat(rows).sort_values(["id", "days"], kind="stable").to_csv(folder / "actg175" / "events.csv", index=False)


def _write(folder: Path, name: str, facts: pd.DataFrame, event: np.ndarray, duration: np.ndarray) -> None:
    from sklearn.model_selection import StratifiedKFold

    (folder / name).mkdir(parents=True, exist_ok=True)
    people = facts.assign(event=np.asarray(event).astype(int), duration=np.asarray(duration))
    people.insert(0, "id", [f"p{row}" for row in range(len(people))])
    came = (people.event == 1) & (people.duration <= HORIZONS[name])
    label = np.where(came | (people.duration > HORIZONS[name]), came.astype(int), -1)
    people.assign(label=label).to_csv(folder / name / "people.csv", index=False)
    split = np.full(len(people), "train", object)
    split[next(StratifiedKFold(3, shuffle=True, random_state=0).split(people, label))[1]] = "test"
    draw = np.random.default_rng(0)
    for one in np.unique(label):
        rows = draw.permutation(np.flatnonzero((split == "train") & (label == one)))
        split[rows[: round(0.2 * len(rows))]] = "valid"
    pd.DataFrame({"id": people.id, "split": split}).to_csv(folder / name / "split.csv", index=False)


def _people(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / name / "people.csv").merge(pd.read_csv(folder / name / "split.csv"))


# --------------------------------------------------------------------------- what a user would take instead


def sides(folder: Path, name: str) -> None:
    """Write the probabilities of the test people by Cox and logistic regression and by boosting of three seeds."""
    from lifelines import CoxPHFitter
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    people = _people(folder, name)
    facts = people.drop(columns=list(NOT_FACTS))
    if (folder / name / "events.csv").exists():
        events = pd.read_csv(folder / name / "events.csv")
        events["key"] = events.code + "_" + events.days.astype(str)
        wide = events.pivot(index="id", columns="key", values="value").loc[people.id]
        facts = facts.join(wide.reset_index(drop=True))
    x = pd.get_dummies(facts, drop_first=True).astype(float)
    test = (people.split == "test").to_numpy()
    learn = ~test & (people.label >= 0).to_numpy()
    folds, how = StratifiedKFold(5, shuffle=True, random_state=0), "neg_log_loss"
    logistic = make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=10, cv=folds, scoring=how, max_iter=2000))
    logistic.fit(x[learn], people.label[learn])
    found = pd.DataFrame({"id": people.id[test], "logistic": logistic.predict_proba(x[test])[:, 1]})
    grid = {
        "learning_rate": [0.05], "max_iter": [50, 100], "max_leaf_nodes": [4, 8], "min_samples_leaf": [10, 30],
    }  # fmt: skip
    for seed in range(3):
        trees = HistGradientBoostingClassifier(random_state=seed, early_stopping=False)
        own = StratifiedKFold(5, shuffle=True, random_state=seed)
        boosted = GridSearchCV(trees, grid, scoring=how, cv=own).fit(x[learn], people.label[learn])
        found[f"boosting{seed}"] = boosted.predict_proba(x[test])[:, 1]
    z = (x - x[~test].mean()) / x[~test].std()
    z["time"], z["came"] = people.duration, people.event

    def likelihood(penalty: float) -> float:
        rows = z[~test]
        return np.mean([
            CoxPHFitter(penalizer=penalty).fit(rows.iloc[a], "time", "came").score(rows.iloc[b], "log_likelihood")
            for a, b in folds.split(rows, rows.came)
        ])  # fmt: skip

    cox = CoxPHFitter(penalizer=max([0.001, 0.01, 0.03, 0.1, 0.3], key=likelihood)).fit(z[~test], "time", "came")
    found["cox"] = 1 - cox.predict_survival_function(z[test], times=[HORIZONS[name]]).to_numpy()[0]
    found.to_csv(folder / name / "simple.csv", index=False)


# --------------------------------------------------------------------------- ours


def words(folder: Path, name: str) -> list[str]:
    """The fields of a cohort."""
    own, day = folder / name, LANDMARKS.get(name, 0)
    facts = [column for column in pd.read_csv(own / "people.csv", nrows=0) if column not in NOT_FACTS]
    events = f"{{path: {own}/people.csv, static: [{', '.join(facts)}]}}"
    if (own / "events.csv").exists():
        events = f"{{path: {own}/events.csv, time: days}}, {events}"
    ahead = HORIZONS[name] - day
    labels = f"{{path: {own}/people.csv, event: event, duration: duration, horizon: {ahead}}}"
    return [
        f"data.events=[{events}]", f"events.labels={labels}", "events.unit=days", f"events.landmark={day}",
        f"events.split={own}/split.csv", f"model.bins=[0, {ahead // 4}, {ahead // 2}, {ahead}, {2 * ahead}]",
        "train.threads=1",
    ]  # fmt: skip


def train(folder: Path, name: str, side: str, seed: int, fields: list[str]) -> float:
    """Train, write the probabilities of the test people, and return the least loss of `valid`."""
    out = folder / name / f"{side}-{seed}"
    run = unpad.train("events", *words(folder, name), *fields, f"train.seed={seed}", out=out, quiet=True)
    data = open_data(run.recipe, run.files, Wanted.TEST)
    rows = np.flatnonzero(data.table.split == Split.TEST)
    p = predict(Measuring(run.model, data, rows, run.recipe.plan)).p
    pd.DataFrame({"id": data.ids[rows], "p": p}).to_csv(folder / name / f"{side}-{seed}.csv", index=False)
    log = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    return [line["loss"] for line in log if line["kind"] == "eval" and line["best"]][-1]


def fields(trial: optuna.Trial) -> list[str]:
    """Those of examples/search.py, of smaller models."""
    found = {
        "optim.lr": trial.suggest_float("optim.lr", 1e-4, 1e-2, log=True),
        "optim.weight_decay": trial.suggest_float("optim.weight_decay", 1e-3, 0.3, log=True),
        "model.blocks": trial.suggest_int("model.blocks", 1, 3),
        "model.width": trial.suggest_int("model.width", 48, 96, step=48),
        "model.dropout": trial.suggest_float("model.dropout", 0.0, 0.4, step=0.1),
        "plan.tokens_per_step": trial.suggest_categorical("plan.tokens_per_step", [512, 1024, 2048]),
    }
    return [f"{name}={value:.6g}" for name, value in found.items()]


def ours(folder: Path, name: str, tries: int, seeds: int) -> None:
    """Train defaults and the best of a search."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=list(HORIZONS).index(name), n_startup_trials=5))
    study.optimize(
        lambda trial: train(folder, name, f"try{trial.number}", 0, [*SEARCH, *fields(trial)]), n_trials=tries
    )
    for seed in range(seeds):
        train(folder, name, "default", seed, [])
        train(folder, name, "best", seed, [*SEARCH, *fields(optuna.trial.FixedTrial(study.best_params))])


# --------------------------------------------------------------------------- scores


def scores(folder: Path, name: str) -> None:
    """Print AUROC and Brier score of every side, weighted for censoring, and differences of defaults from it."""
    people = _people(folder, name)
    people = people[people.split == "test"].reset_index(drop=True)
    simple = pd.read_csv(folder / name / "simple.csv").set_index("id").loc[people.id]
    found = {side: [simple[column].to_numpy() for column in simple if column.startswith(side)] for side in SIDES}
    for side in ("default", "best"):
        kept = (pd.read_csv(path).set_index("id").loc[people.id] for path in (folder / name).glob(f"{side}-*.csv"))
        found[side] = [one.p.to_numpy() for one in kept]
    label, known = (people.label == 1).to_numpy(int), (people.label >= 0).to_numpy()
    for side, all_p in found.items():
        for measure in (auroc, brier):

            def mean(w: np.ndarray, all_p=all_p, measure=measure) -> np.ndarray:
                weights = uncensored_weights(people.duration.to_numpy(float), known, w)
                return np.mean([measure(label, p, weights) for p in all_p], 0)

            one = measured(mean, len(people), share=True)
            apart = measured(lambda w, mean=mean: mean(w, found["default"]) - mean(w), len(people))
            limits = f"{one.value:.4f} ({one.low:.3f} to {one.high:.3f})"
            print(name, side, measure.__name__, limits, f"{apart.value:+.4f} ({apart.low:+.4f} to {apart.high:+.4f})")


SIDES = ("cox", "logistic", "boosting")

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tables", "sides", "ours", "scores"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tries", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for cohort in HORIZONS if options.what != "tables" else ():
        if options.what == "ours":
            ours(options.folder, cohort, options.tries, options.seeds)
        else:
            {"sides": sides, "scores": scores}[options.what](options.folder, cohort)
    if options.what == "tables":
        tables(options.folder)
