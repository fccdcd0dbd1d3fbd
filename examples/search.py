"""Search the usual settings of a recipe by held-out loss, with optuna; a run directory for each trial.

python examples/search.py RECIPE FOLDER NUM_TRIALS [key=value ...]

It needs `pip install optuna`. Called again, it goes on after the last finished trial. Trials are compared by the part
`valid`, never by `test`: what `unpad eval` of the best one then says of `test` is of rows that chose nothing. Change
`fields` to search others.
"""

import sys
from pathlib import Path

import optuna

import unpad
from unpad.evaluation.run import evaluate_run


def fields(trial: optuna.Trial) -> list[str]:
    """The recipe fields of a trial."""
    found = {
        "optim.lr": trial.suggest_float("optim.lr", 1e-4, 1e-2, log=True),
        "optim.weight_decay": trial.suggest_float("optim.weight_decay", 1e-3, 0.3, log=True),
        "model.blocks": trial.suggest_int("model.blocks", 1, 4),
        "model.width": trial.suggest_int("model.width", 48, 192, step=48),
        "model.dropout": trial.suggest_float("model.dropout", 0.0, 0.4, step=0.1),
        "plan.tokens_per_step": trial.suggest_categorical("plan.tokens_per_step", [512, 1024, 2048]),
    }
    return [f"{name}={value:.6g}" for name, value in found.items()]


def main(recipe: str, folder: Path, num_trials: int, *fixed: str) -> None:
    """Train trials and print the best."""
    folder.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "trials.log")))
    study = optuna.create_study(storage=storage, study_name=recipe, load_if_exists=True)

    def loss(trial: optuna.Trial) -> float:
        out = folder / f"trial-{trial.number}"
        unpad.train(recipe, *fixed, *fields(trial), out=out, quiet=True)
        metrics, _ = evaluate_run(str(out), part="valid")
        return next(metric.value for name, metric in metrics.items() if name.endswith("loss"))

    finished = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    study.optimize(loss, n_trials=max(num_trials - len(finished), 0))
    print(f"best: trial-{study.best_trial.number}, loss {study.best_value:.4f}, {study.best_params}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
