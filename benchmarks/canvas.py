"""Canvases on which the question matters: accuracy of one and two hops with an eighth and less of the visual tokens.

    python benchmarks/canvas.py [--icons MANIFEST] [--work DIR] [--seeds 0 1 2] [--keep 0.0625] [--other 0.125 0.03125]
    python benchmarks/canvas.py --work DIR --seeds 0 --keep 0.0625 --arms random heads blind

`canvas_set.py` draws the set and says what is asked. Per seed one model learns captions of small canvases, then of
those of the study, then questions about these, with all visual tokens. A kind of questions is void if it answers fewer
than 90 % of them about held-out canvases; if both are, the seed ends there. Then every arm removes some of its tokens
before the first block, or after one where its name says so:

- `heads` learn which tokens to keep beside a model that stays as it is, and read the question; `blind` ones do not.
  They learn as tokens fade out, or by `relevance`, on what the loss depends.
- `oracle` keeps the tokens of the cells that a question depends on, and others by chance.

A control asks what fills a picture of the same size: one icon, as large as all cells. Its model is that of the first
seed, trained further.

Untuned, an arm is applied to the model of its seed; tuned, that model trains further with it, as long for every arm.
With `--other` shares only arms of whose training the share is no part are measured, untuned.
`--work` keeps the set, runs and answers, and a second call goes on from there; other sizes, steps or changes of the
recipe, which are the other words, are refused there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from canvas_report import ALL, GUESS, LEAST, TUNED, Study, markdown
from canvas_set import ICON, KINDS, STEPS, Size, cell_names, read_icons, write_set
from pruning import KEEP, ensure_run, scores
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from unpad.data.sources.split import Split
from unpad.data.vqa import VqaData
from unpad.inference.loaded import LoadedRun, load
from unpad.models.vision_language.model import VisionLanguage
from unpad.models.vision_language.prune import VisionTokens, select
from unpad.nn.block import BEFORE
from unpad.storage import write_atomic
from unpad.trials.bench.measure import describe_machine

HERE = Path(__file__).parent
ICONS = HERE.parents[1] / "shared" / "data" / "icons" / "images.jsonl"
PATCH = 8
FIRST, SECOND = 0, 1  # blocks
MODEL = [
    f'model.vision={{"patch": {PATCH}, "width": 64, "blocks": 1, "heads": 4, "hidden": 192, "feature_layer": -1, '
    '"pre_norm": true, "dropout": 0.1}',
    'model.language={"width": 64, "blocks": 3, "heads": 4, "hidden": 192, "context": 768, "qk_norm": true}',
    'data.template={"user": "", "assistant": ""}',
    # Of these canvases, most of whose pixels are white: what all patches have in common hides what tells them apart.
    "images.mean=[0.79, 0.79, 0.79]",
    "images.std=[0.25, 0.25, 0.25]",
    "plan.tokens_per_step=2048",
    "generate.max_new_tokens=3",
    "train.weights=last",
    "train.max_epochs=1000000",  # steps end a run
]
SMALLER = (1, 2, 4)  # sides of canvases whose captions come first: among few icons it is soon clear which one counts
CAPTIONS = ["optim.lr=2e-3", "optim.betas=[0.9, 0.98]", "optim.schedule=warmup"]
QUESTIONS = ["optim.lr=1e-3"]
HEADS = ['train.freeze=["tower.*", "projector.*", "decoder.*"]', "optim.lr=3e-3"]
FURTHER = ["optim.lr=5e-4"]
FROZEN_HEADS = ['train.freeze=["pruners.*"]']
WORDS = "words.json"
TEST = "test"
PARTS = {TEST: Split.TEST, "valid": Split.HOLDOUT}
BETWEEN = 1_000_000_000  # steps between evaluations: what a run is worth is measured once, by its answers


@dataclass(frozen=True)
class Arm:
    """One way to have fewer visual tokens.

    Args:
        model: fields of the model's section; KEEP is replaced by the share that every layer keeps.
        teaches: fields of the training of its heads, beside a model that stays as it is; None: it has none.
        knows: it ranks as `random` does, but for the cells that a question depends on.
    """

    model: dict[str, dict[str, Any]]
    teaches: tuple[str, ...] | None = None
    knows: bool = False

    @property
    def learns(self) -> bool:
        return self.teaches is not None

    @property
    def softens(self) -> bool:
        """Tokens fade out as its heads learn."""
        return self.teaches == FADING

    def overrides(self, keep: float) -> list[str]:
        """The recipe's fields for a share that is kept in the end."""
        layers = max((len(fields.get("layers", ())) for fields in self.model.values()), default=0) or 1
        share = keep ** (1 / layers)
        sections = {
            name: {key: share if value is KEEP else value for key, value in fields.items()}
            for name, fields in self.model.items()
        }
        return [f"model.{name}={json.dumps(fields)}" for name, fields in sections.items()]


FADING = ("losses.sparsity=30",)
RELEVANCE = (
    "plan.tokens_per_step=8192",
)  # more questions a step: what one of them depends on is found with much noise


def ranking(method: str, layer: int = BEFORE) -> dict[str, dict[str, Any]]:
    return {"prune": {"layers": [layer], "method": method, "keep": KEEP}}


def heads(*layers: int, question: bool = True) -> dict[str, dict[str, Any]]:
    cooling = {"start": 1.0, "end": 0.5, "share": 1.0}
    return {"prune": {"layers": layers, "inner": 128, "question": question, "keep": KEEP, "temperature": cooling}}


def relevance(layer: int, question: bool = True) -> dict[str, dict[str, Any]]:
    return {"prune": {"layers": [layer], "method": "relevance", "inner": 128, "question": question, "keep": KEEP}}


ARMS = {
    "random": Arm(ranking("random")),
    "uniform": Arm(ranking("uniform")),
    "class_token": Arm(ranking("class_token")),
    "similarity": Arm({"merge": {"variant": "similarity", "ratio": KEEP}}),
    "blind": Arm(heads(BEFORE, question=False), FADING),
    "heads": Arm(heads(BEFORE), FADING),
    "relevance": Arm(relevance(BEFORE), RELEVANCE),
    "blind relevance": Arm(relevance(BEFORE, question=False), RELEVANCE),
    "oracle": Arm(ranking("random"), knows=True),
    "attention, after block 1": Arm(ranking("attention", FIRST)),
    "attention, after block 2": Arm(ranking("attention", SECOND)),
    "random, after block 1": Arm(ranking("random", FIRST)),
    "uniform, after block 1": Arm(ranking("uniform", FIRST)),
    "blind, after block 1": Arm(heads(FIRST, question=False), FADING),
    "heads, after block 1": Arm(heads(FIRST), FADING),
    "heads, at two depths": Arm(heads(BEFORE, FIRST), FADING),
    "relevance, after block 1": Arm(relevance(FIRST), RELEVANCE),
    "oracle, after block 1": Arm(ranking("random", FIRST), knows=True),
    "random, after block 2": Arm(ranking("random", SECOND)),
    "oracle, after block 2": Arm(ranking("random", SECOND), knows=True),
}
CONTROL = ("random", "heads, after block 1")  # arms of the control


# --------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Asked:
    """The questions that a study scores.

    Args:
        part: of the set, a key of PARTS.
        data: the data of a run that holds them, of one part or more.
        rows: theirs, (num_rows,) int64 ids.
        canvases: (num_rows,) number of the canvas of each.
        kinds: (num_rows,) their kinds.
        guessed: (num_rows,) score of the look that the canvas shows most often.
    """

    part: str
    data: VqaData
    rows: np.ndarray
    canvases: np.ndarray
    kinds: np.ndarray
    guessed: np.ndarray

    def score(self, run: LoadedRun, place: Path) -> np.ndarray:
        """Score of the answers of a run, (num_rows,), kept beside `place`."""
        return scores(run, self.data, self.rows, place.with_name(f"{place.name}-{self.part}.json"))


def written_rows(data: VqaData) -> list[dict[str, Any]]:
    """The rows of the set's file that the sequences of a run come from, with kind and cells."""
    files = {example.where.rpartition(":")[0] for example in data.examples}
    lines = {file: Path(file).read_text(encoding="utf-8").splitlines() for file in files}
    places = [example.where.rpartition(":") for example in data.examples]
    return [json.loads(lines[file][int(line) - 1]) for file, _, line in places]


def look_up(run: LoadedRun, part: str) -> Asked:
    """The questions of one part."""
    data = run.test_data() if PARTS[part] == Split.TEST else run.data()
    assert isinstance(data, VqaData)
    rows = np.flatnonzero(data.table.split == PARTS[part])
    source = written_rows(data)
    shown = [source[row] for row in rows.tolist()]
    canvases = np.unique([asked["image"] for asked in shown], return_inverse=True)[1]
    guessed = np.array([float(asked["guess"] == asked["answer"]) for asked in shown])
    return Asked(part, data, rows, canvases, np.array([asked["kind"] for asked in shown]), guessed)


def asked_tokens(data: VqaData, side: int) -> np.ndarray:
    """Tokens of the cells that the answer of every sequence depends on, (num_sequences, tokens, tokens) bool."""
    source = written_rows(data)
    each = ICON // PATCH  # tokens of a cell, a side
    cells = np.zeros((len(source), side * each, side * each), np.bool_)
    for row, asked in enumerate(source):
        for down, aside in asked["cells"]:
            cells[row, down * each : (down + 1) * each, aside * each : (aside + 1) * each] = True
    return cells


@contextmanager
def knowing(asked: np.ndarray) -> Iterator[None]:
    """Let the ranking `random` put the asked tokens before all others.

    Args:
        asked: of `asked_tokens`, of the data that are read meanwhile.
    """
    cells = torch.from_numpy(asked)

    def rank(name: str, tokens: VisionTokens, seed: int = 0) -> torch.Tensor:
        chance = select(name, tokens, seed)
        assert tokens.sample_ids is not None, "random draws by sample ids"
        assert tokens.rows is not None, "images have grids"
        assert tokens.columns is not None, "images have grids"
        sample = tokens.sample_ids.index_select(0, tokens.layout.seq_of_token())
        return chance + cells[sample, tokens.rows, tokens.columns] * 2.0**32  # chance is below

    with patch("unpad.models.vision_language.prune_pass.select", rank):
        yield


# --------------------------------------------------------------------------- runs and answers


@dataclass(frozen=True)
class Steps:
    """Updates of every training.

    Args:
        smaller: captions of smaller canvases, for each of the cells that they have a side.
        captions, questions: of the canvases of the study.
        heads, relevance: of the heads of an arm, as tokens fade out and by relevance.
        tuned: of the model with an arm.
    """

    smaller: int
    captions: int
    questions: int
    heads: int
    relevance: int
    tuned: int

    @staticmethod
    def limit(steps: int) -> list[str]:
        return [f"train.max_steps={steps}", f"train.eval_every={BETWEEN}"]


def write_words(words: Sequence[str], side: int, file: Path) -> None:
    """Write the tokenizer of all runs, a token per word and none for the spaces between.

    The token before an answer is then the place that is asked for, and small canvases have the ids of the cells that
    they lack.
    """
    special = ["<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>"]
    ids = {word: number for number, word in enumerate([*special, *STEPS, *cell_names(side), *words])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    write_atomic(file, tokenizer.to_str())


def train_base(sets: dict[int, Path], folder: Path, seed: int, steps: Steps, changes: Sequence[str]) -> Path:
    """Train captions of every set, then questions of the last, with all visual tokens; where the run is.

    Args:
        sets: folders of sets by the cells of their canvases a side, the smallest first.
    """
    words = {"kind": "file", "path": str(folder.parent / WORDS)}
    shared = [*MODEL, f"tokenizer={json.dumps(words)}", f"train.seed={seed}", *changes]
    start: list[str] = []
    for side, files in sets.items():
        updates = steps.captions if side == max(sets) else steps.smaller * side
        told = [f"data.vqa={files / 'captions.jsonl'}", *CAPTIONS, *steps.limit(updates)]
        run = ensure_run("vqa", folder / f"captions-{files.name}", [*shared, *told, *start])
        start = [f"train.init_from={run}"]
    asked = [f"data.vqa={sets[max(sets)] / 'questions.jsonl'}", *QUESTIONS, *steps.limit(steps.questions)]
    return ensure_run("vqa", folder / "base", [*shared, *asked, *start])


def place_of(folder: Path, name: str, keep: float) -> Path:
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}-{keep:g}"


def learn_heads(base: Path, name: str, keep: float, steps: Steps, folder: Path) -> Path:
    """Train the heads of an arm beside a base that stays as it is; where the run is."""
    arm, updates = ARMS[name], steps.heads if ARMS[name].softens else steps.relevance
    start = [f"train.init_from={base}", *HEADS, *(arm.teaches or ()), *steps.limit(updates)]
    return ensure_run(str(base / "recipe.yaml"), place_of(folder, name, keep), [*start, *arm.overrides(keep)])


def tune(base: Path, name: str, keep: float, steps: Steps, folder: Path) -> Path:
    """Train a base further with the tokens that an arm leaves; where the run is."""
    arm = ARMS[name]
    start = learn_heads(base, name, keep, steps, folder) if arm.learns else base
    rest = FROZEN_HEADS if arm.learns else []
    overrides = [f"train.init_from={start}", *FURTHER, *rest, *steps.limit(steps.tuned), *arm.overrides(keep)]
    return ensure_run(str(base / "recipe.yaml"), place_of(folder, f"{name}{TUNED}", keep), overrides)


def measure_arm(
    base: Path, name: str, keep: float, steps: Steps, folder: Path, asked: Asked, side: int
) -> dict[str, np.ndarray]:
    """Scores of one arm, (num_rows,) each: untuned, tuned, and of heads before the model is tuned the soft ones."""
    arm, found = ARMS[name], {}

    def seen(data: VqaData) -> AbstractContextManager[None]:
        return knowing(asked_tokens(data, side)) if arm.knows else nullcontext()

    def score(run: LoadedRun, place: Path) -> np.ndarray:
        with seen(asked.data):
            return asked.score(run, place)

    start = learn_heads(base, name, keep, steps, folder) if arm.learns else base
    run = load(start, [] if arm.learns else arm.overrides(keep))
    place = place_of(folder, name, keep)
    found[name] = score(run, place)
    if arm.softens:
        assert isinstance(run.model, VisionLanguage)
        run.model.mode = "soft"
        found[f"{name}, soft"] = score(run, place.with_name(f"{place.name}-soft"))
    learnt = run.data()
    assert isinstance(learnt, VqaData)
    with seen(learnt):
        tuned = load(tune(base, name, keep, steps, folder))
    found[f"{name}{TUNED}"] = score(tuned, place_of(folder, f"{name}{TUNED}", keep))
    return found


def measure_other(
    base: Path, name: str, keep: float, folder: Path, asked: Asked, options: argparse.Namespace
) -> np.ndarray:
    """Scores of an untuned arm that nothing was trained for with this share, (num_rows,); heads that learn relevance
    are those of the first share."""
    arm = ARMS[name]
    start = learn_heads(base, name, options.keep[0], Steps(*options.steps), folder) if arm.learns else base
    with knowing(asked_tokens(asked.data, options.side)) if arm.knows else nullcontext():
        return asked.score(load(start, arm.overrides(keep)), place_of(folder, name, keep))


def measure(
    run: LoadedRun, arms: Sequence[str], others: Sequence[float], folder: Path, options: argparse.Namespace
) -> tuple[dict[tuple[str, float], np.ndarray], Asked]:
    """Scores of a run with all visual tokens, as ALL, and by every arm with every share unless all kinds are void."""
    asked = look_up(run, options.part)
    found = {ALL: asked.score(run, folder / "base"), GUESS: asked.guessed}
    of_kinds = {kind: float(found[ALL][asked.kinds == kind].mean()) for kind in np.unique(asked.kinds).tolist()}
    print(f"{folder.name}: " + ", ".join(f"{kind} {value:.1%}" for kind, value in of_kinds.items()), flush=True)
    if max(of_kinds.values()) < LEAST:
        return found, asked
    for keep in options.keep:
        for name in arms:
            measured = measure_arm(run.folder, name, keep, Steps(*options.steps), folder, asked, options.side)
            for arm, values in measured.items():
                found[arm, keep] = values
                print(f"  {arm}, {keep:g} kept: {values.mean():.1%}", flush=True)
    for keep in others:
        for name in arms:
            if not ARMS[name].softens:
                found[name, keep] = measure_other(run.folder, name, keep, folder, asked, options)
                print(f"  {name}, {keep:g} kept: {found[name, keep].mean():.1%}", flush=True)
    return found, asked


def measure_control(
    base: Path, files: Path, folder: Path, options: argparse.Namespace
) -> tuple[dict[tuple[str, float], np.ndarray], Asked]:
    """The same of pictures that one icon fills, by a model that was trained further on them."""
    folder.mkdir(exist_ok=True)
    asked = [f"data.vqa={files / 'questions.jsonl'}", f"train.init_from={base}"]
    further = [*FURTHER, *Steps.limit(Steps(*options.steps).smaller)]
    run = load(ensure_run(str(base / "recipe.yaml"), folder / "base", [*asked, *further]))
    return measure(run, [arm for arm in options.arms if arm in CONTROL], [], folder, options)


def run_study(options: argparse.Namespace, work: Path) -> tuple[Study, Study]:
    """Everything but the writing: the study, and its control."""
    icons, sets, control = read_icons(options.icons), {}, work / "control"
    train, held_out = options.canvases
    write_words(icons.words, options.side, work / WORDS)
    for side in (*(side for side in SMALLER if side < options.side), options.side):
        sets[side] = work / f"side-{side}"
        size = Size(side, train, held_out, options.asked, teaches=side < options.side)
        write_set(icons, size, KINDS if size.teaches else options.kinds, sets[side])
    write_set(icons, Size(1, train, held_out, 1, times=options.side), ["one"], control)
    steps, every, controls = Steps(*options.steps), [], []
    for seed in options.seeds:
        folder = work / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        base = train_base(sets, folder, seed, steps, options.overrides)
        every.append(measure(load(base), options.arms, options.other, folder, options))
        if not controls:
            controls.append(measure_control(base, control, folder / "control", options))

    def study(measured: Sequence[tuple[dict[tuple[str, float], np.ndarray], Asked]], num_cells: int) -> Study:
        found, asked = [one for one, _ in measured], measured[0][1]
        return Study(found, options.seeds[: len(found)], asked.canvases, asked.kinds, num_cells, describe_machine())

    return study(every, options.side**2), study(controls, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="fields of the recipe of captions and questions, such as optim.lr")
    parser.add_argument("--icons", type=Path, default=ICONS, help="JSONL of image, of icons named NAME_SIZE.png")
    parser.add_argument("--part", choices=list(PARTS), default=TEST, help="valid: to choose settings by")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--keep", type=float, nargs="+", default=[1 / 16], help="shares of visual tokens")
    parser.add_argument(
        "--other",
        type=float,
        nargs="*",
        default=[1 / 8, 1 / 32],
        help="shares of arms that do not learn a share",
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of captions and questions"
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs=6,
        default=[1200, 3000, 10000, 4000, 1000, 600],
        help="updates of captions of smaller canvases for each of their cells a side; of captions, of questions, of "
        "heads as tokens fade out and by relevance, and of the model with an arm",
    )
    parser.add_argument("--side", type=int, default=8, help="cells of a canvas, a side")
    parser.add_argument(
        "--canvases", type=int, nargs=2, default=[6000, 200], help="of training, and of each part besides"
    )
    parser.add_argument("--asked", type=int, default=4, help="questions of a kind about a canvas")
    parser.add_argument("--work", type=Path, help="keeps the set, runs and answers; default a temporary folder")
    parser.add_argument("--out", type=Path, default=HERE / "canvas.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        study, control = run_study(options, work)
    shown = ("part", "seeds", "keep", "other", "arms", "kinds", "steps", "side", "canvases", "asked")
    given = {name: getattr(options, name) for name in shown if getattr(options, name) != parser.get_default(name)}
    words = [
        f"--{name} {shlex.join(map(str, value if isinstance(value, list) else [value]))}"
        for name, value in given.items()
    ]
    command = " ".join(["python benchmarks/canvas.py", *options.overrides, *words])
    write_atomic(options.out, markdown(study, control, command))
    print(options.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
