"""Worth of visual tokens: accuracy and prefill time of questions about icons with a half, a quarter, an eighth.

    python benchmarks/pruning.py MANIFEST [--seeds 0 1 2] [--keep 0.5 0.25 0.125] [--work DIR] [key=value ...]
    python benchmarks/pruning.py MANIFEST --methods learned random --bases RUN RUN RUN

MANIFEST is a JSONL of image, question, answer and split, of icons named NAME_SIZE.png whose names have one split each.
Per seed one model is trained with all visual tokens (or `--bases` are taken), and every method removes some of them
before the first block, or after it where attention ranks them. A tuned method trains the model a little further with
its removal, each for as long; learned heads are trained before that, beside a model that stays as it is. Scored are the
questions about held-out icons of at least 32 pixels. Methods are compared question by question, resampling icons.
`--work` keeps runs and answers, and a second call goes on from there. Other words change the bases' recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pruning_report import Study, draw, markdown
from rich.console import Console

from unpad.data.sources.split import Split
from unpad.data.vqa import VqaData
from unpad.errors import SourceError
from unpad.evaluation.vqa import vqa_accuracy
from unpad.inference.answers import answer
from unpad.inference.loaded import LoadedRun, generation_precision, load
from unpad.inference.steps import prefill
from unpad.nn.block import BEFORE
from unpad.nn.linear import independent_rows, keep_copies
from unpad.nn.precision import autocast
from unpad.recipes.file import RECIPES
from unpad.run.folder import find_run
from unpad.run.report.history import log_file
from unpad.storage import write_atomic
from unpad.training.loop import train
from unpad.trials.bench.measure import Contender, Spread, Work, describe_machine, measure_rounds, spread

HERE = Path(__file__).parent
LEFT_OUT = "Name the icon"  # the file name of an unseen icon cannot be known
SMALLEST = 32  # pixels of a scored image, on its shorter side
LAYER = BEFORE  # a block that reads all tokens would tell the text what they hold
FIRST = 0  # the earliest block after which attention of the question can rank them
BASE = [
    "images.flip=0.5",
    "images.shift=0.1",
    "model.vision.blocks=1",
    "model.vision.hidden=384",
    "model.language.blocks=6",
    "model.language.hidden=384",
    "plan.tokens_per_step=2048",
    "plan.tokens_per_micro=4096",
    "optim.lr=1.5e-3",
    "train.max_epochs=16",
    "train.eval_every=1000",
]
TUNED = ["train.weights=last", "optim.lr=5e-4"]
HEADS_ALONE = ['train.freeze=["tower.*", "projector.*", "decoder.*"]', "optim.lr=3e-3"]
# Frozen heads take tokens out for good, so that what learns after them learns from what is left.
REST = ['train.freeze=["pruners.*"]']
NUM_PROMPTS = 8  # of the measured prefill, together and one by one


@dataclass(frozen=True)
class Method:
    """One way to have fewer visual tokens.

    Args:
        model: fields of the model's section; KEEP is replaced by the share that stays.
        training: how the model trains further with it; None, it does not.
        after: the method whose run it trains further, of the same share; default the base.
    """

    model: dict[str, dict[str, Any]]
    training: Sequence[str] | None = None
    after: str | None = None

    def overrides(self, keep: float) -> list[str]:
        """The recipe's fields for one share."""
        sections = {
            name: {key: keep if value is KEEP else value for key, value in fields.items()}
            for name, fields in self.model.items()
        }
        return [f"model.{name}={json.dumps(fields)}" for name, fields in sections.items()]


KEEP = object()


def ranking(name: str, layer: int = LAYER) -> dict[str, dict[str, Any]]:
    return {"prune": {"layers": [layer], "method": name, "keep": KEEP}}


LEARNED = {"prune": {"layers": [LAYER], "method": "learned", "inner": 64, "keep": KEEP}}
# class_token ranks by attention in the tower (VisionZip), attention by that of the question (FastV); similarity merges
# the most alike before the decoder (ToMe).
METHODS = {
    "learned, heads alone": Method(LEARNED, HEADS_ALONE),
    "learned": Method(LEARNED, REST, after="learned, heads alone"),
    "random, tuned": Method(ranking("random"), ()),
    "uniform, tuned": Method(ranking("uniform"), ()),
    "random": Method(ranking("random")),
    "uniform": Method(ranking("uniform")),
    "attention": Method(ranking("attention", FIRST)),
    "class_token": Method(ranking("class_token")),
    "similarity": Method({"merge": {"variant": "similarity", "ratio": KEEP}}),
}


# --------------------------------------------------------------------------- data


def prepare(manifest: Path, folder: Path) -> tuple[Path, Path]:
    """Write the questions of the study, and the same without their images, beside a copy of the images.

    Returns:
        Both manifests; lines of one are those of the other.
    """
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [row for row in rows if not row["question"].startswith(LEFT_OUT)]
    study, blind = folder / "study.jsonl", folder / "blind.jsonl"
    for image in {row["image"] for row in rows}:
        place = folder / image
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(manifest.parent / image, place)
    write_atomic(study, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    unseen = ({**row, "image": None} for row in rows)
    write_atomic(blind, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in unseen))
    return study, blind


def scored(data: VqaData) -> tuple[np.ndarray, np.ndarray]:
    """The held-out rows that count, (num_rows,) int64 ids, and the number of each one's icon, (num_rows,) int64."""
    rows, names = [], []
    for row in np.flatnonzero(data.table.split == Split.HOLDOUT).tolist():
        image = data.album.images[data.examples[row].images[0]]
        if min(image.width, image.height) >= SMALLEST:
            rows.append(row)
            names.append(image.path.stem.rpartition("_")[0])
    return np.array(rows, np.int64), np.unique(names, return_inverse=True)[1]


def commonest(data: VqaData, rows: np.ndarray) -> np.ndarray:
    """Score of answering every question as training rows answer it most often, (num_rows,)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in np.flatnonzero(data.table.split == Split.TRAIN).tolist():
        counts[data.examples[row].question][data.examples[row].answer] += 1
    best = {question: found.most_common(1)[0][0] for question, found in counts.items()}
    return np.array(
        [vqa_accuracy(best.get(data.examples[row].question, ""), data.examples[row].answers) for row in rows]
    )


# --------------------------------------------------------------------------- runs and answers


def finished(folder: Path) -> bool:
    log = log_file(folder)
    return log.is_file() and '"kind": "finished"' in log.read_text(encoding="utf-8")


def ensure_run(name: str, folder: Path, overrides: Sequence[str]) -> Path:
    """Train a run unless it is there; an interrupted run starts again.

    Raises:
        SourceError: the run that is there was asked for with other words.
    """
    note, asked = folder.with_name(f"{folder.name}-asked.json"), json.dumps([name, *overrides])
    if finished(folder):
        if not note.is_file() or note.read_text(encoding="utf-8") != asked:
            raise SourceError("this run has other settings", where=str(folder), fix="name another folder for the study")
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    train(name, folder, overrides, console=Console(quiet=True))
    write_atomic(note, asked)
    return folder


def tune(base: Path, name: str, keep: float, epochs: int, folder: Path) -> Path:
    """Train a base further by a method, for as many epochs as every step of it takes; where the run is."""
    method, place = METHODS[name], run_of(folder, name, keep)
    assert method.training is not None, f"{name} trains nothing"
    start = base if method.after is None else tune(base, method.after, keep, epochs, folder)
    overrides = [f"train.init_from={start}", *TUNED, f"train.max_epochs={epochs}", *method.training]
    return ensure_run(str(base / "recipe.yaml"), place, [*overrides, *method.overrides(keep)])


def run_of(folder: Path, name: str, keep: float) -> Path:
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}-{keep:g}"


def scores(run: LoadedRun, data: VqaData, rows: np.ndarray, file: Path) -> np.ndarray:
    """Score of every answer, (num_rows,), read from `file` where it is known."""
    if file.is_file():
        return np.array(json.loads(file.read_text(encoding="utf-8")))
    given = answer(run, data, rows)
    found = [vqa_accuracy(text, data.examples[row].answers) for text, row in zip(given, rows.tolist(), strict=True)]
    write_atomic(file, json.dumps(found))
    return np.array(found)


def measure_seed(
    base: Path, methods: Sequence[str], shares: Sequence[float], epochs: int, folder: Path
) -> tuple[dict[tuple[str, float], np.ndarray], VqaData]:
    """Scores of one base with all visual tokens, as ("origin", 1.0), and by every method with every share.

    Args:
        epochs: of every training of a tuned method.
    """
    run = load(base)
    data = run.data()
    assert isinstance(data, VqaData)
    rows, _ = scored(data)
    found = {("origin", 1.0): scores(run, data, rows, folder / "origin.json")}
    for name in methods:
        method = METHODS[name]
        for keep in shares:
            if method.training is not None:
                changed = load(tune(base, name, keep, epochs, folder))
            else:
                changed = load(base, method.overrides(keep))
            found[name, keep] = scores(changed, data, rows, Path(f"{run_of(folder, name, keep)}.json"))
            print(f"  {name}, {keep:g} kept: {found[name, keep].mean():.1%}", flush=True)
    return found, data


def question_only(blind: Path, folder: Path, seed: int, overrides: Sequence[str], rows: np.ndarray) -> np.ndarray:
    """Scores of a model that was trained without images, (num_rows,)."""
    run = load(ensure_run("vqa", folder, [f"data.vqa={blind}", *overrides, f"train.seed={seed}", "train.max_epochs=3"]))
    data = run.data()
    assert isinstance(data, VqaData)
    return scores(run, data, rows, folder.with_name(folder.name + ".json"))


# --------------------------------------------------------------------------- cost


def prompts_of_sizes(data: VqaData, rows: np.ndarray) -> list[int]:
    """Rows with few, more and many visual tokens, evenly over those that are scored."""
    order = rows[np.argsort(data.num_patches[rows], kind="stable")]
    return order[np.linspace(0, len(order) - 1, NUM_PROMPTS).round().astype(int)].tolist()


def measure_prefill(
    base: Path, tuned: dict[float, Path], data: VqaData, rows: np.ndarray, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Prefill of the same prompts with all visual tokens and with fewer, in turns, one by one and as one batch.

    Returns:
        A row of the table per batch size and side.
    """
    chosen, table = prompts_of_sizes(data, rows), []
    runs = {1.0: load(base)} | {keep: load(folder) for keep, folder in tuned.items()}
    precision = generation_precision(runs[1.0].recipe.generate)
    with torch.inference_mode(), autocast(precision, torch.device("cpu")), keep_copies(), independent_rows():
        for size in (1, NUM_PROMPTS):
            batches = [data.prompts(chosen[at : at + size]) for at in range(0, NUM_PROMPTS, size)]
            sides = {f"{keep:g}": _prefill_side(run.model, batches) for keep, run in runs.items()}
            measured = measure_rounds(sides, rounds, seconds)
            for keep, run in runs.items():
                spent = spread([turn.seconds / turn.steps / len(batches) for turn in measured.turns[f"{keep:g}"]])
                ratio = spread(measured.ratios(f"{keep:g}", "1"))
                table.append(_cost_row(run.model, batches, {"batch": size, "keep": keep}, spent, ratio))
    return table


def _prefill_side(model: Any, batches: Sequence[Any]) -> Contender:
    longest = [batch.layout.max_seqlen for batch in batches]
    tokens = sum(batch.total_tokens for batch in batches)

    def step() -> Work:
        for batch, most in zip(batches, longest, strict=True):
            prefill(model, batch, most)
        return Work(tokens, 0)

    return Contender(step)


def _cost_row(model: Any, batches: Sequence[Any], row: dict[str, Any], spent: Spread, ratio: Spread) -> dict[str, Any]:
    kept, held = [], 0
    for batch in batches:
        held += prefill(model, batch, batch.layout.max_seqlen)[0].num_bytes
        kept += (model.kept[-1] if model.kept else batch.media.layout.lengths()).tolist()
    return row | {"seconds": vars(spent), "ratio": vars(ratio), "kept": kept, "cache_bytes": held // len(batches)}


# --------------------------------------------------------------------------- the study


def run_study(options: argparse.Namespace, work: Path) -> Study:
    """Everything but the writing."""
    study, blind = prepare(options.manifest, work)
    bases = [find_run(name).resolve() for name in options.bases]
    names = [f"seed-{seed}" for seed in options.seeds[: len(bases) or None]]
    if bases and len(bases) != len(names):
        raise SystemExit("--bases and --seeds differ in number")
    all_scores: dict[tuple[str, float], list[np.ndarray]] = defaultdict(list)
    costs: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        folder, seed = work / name, options.seeds[number]
        folder.mkdir(exist_ok=True)
        shared = [*BASE, *options.overrides]
        print(name, flush=True)
        base = (
            bases[number]
            if bases
            else ensure_run("vqa", folder / "base", [f"data.vqa={study}", *shared, f"train.seed={seed}"])
        )
        found, data = measure_seed(base, options.methods, options.keep, options.epochs, folder)
        rows, icons = scored(data)
        found["commonest answer", 0.0] = commonest(data, rows)
        if options.question_only:
            found["question only", 0.0] = question_only(blind, folder / "blind", seed, shared, rows)
        for key, values in found.items():
            all_scores[key].append(values)
        tuned = {keep: run_of(folder, "learned", keep) for keep in options.keep if "learned" in options.methods}
        if tuned and not costs:
            costs = measure_prefill(base, tuned, data, rows, options.rounds, options.seconds)
    questions = np.array([data.examples[row].question for row in rows.tolist()])
    together = {key: np.stack(values) for key, values in all_scores.items()}
    return Study(together, icons, questions, costs, list(options.seeds), describe_machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("overrides", nargs="*", help="fields of the bases' recipe, " + str(RECIPES / "vqa.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bases", nargs="*", default=[], help="runs to start from, one per seed")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25, 0.125], help="shares of visual tokens")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epochs", type=int, default=1, help="of every training of a tuned method")
    parser.add_argument("--question-only", action="store_true", help="train a model without images beside")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each side's turn in a round of prefill")
    parser.add_argument("--work", type=Path, help="keeps runs and answers; default a temporary folder")
    parser.add_argument("--out", type=Path, default=HERE / "pruning.md")
    options = parser.parse_args()
    if not options.manifest.is_file():
        raise SourceError("there is no such manifest", where=str(options.manifest), fix="name a JSONL of questions")
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        study = run_study(options, work)
    chosen = ["--seeds", *options.seeds, "--keep", *options.keep, "--epochs", options.epochs, *options.overrides]
    words = " ".join(str(word) for word in ["python benchmarks/pruning.py MANIFEST", *chosen])
    write_atomic(options.out, markdown(study, words))
    draw(study, options.out.with_suffix(".png"))
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
