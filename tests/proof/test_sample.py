"""The sample of a recipe: micro-batches of unlike sequences, whatever the lengths and the recipe's sizes."""

import json
from pathlib import Path

import pytest

from tests.conftest import random_batch
from tests.helpers.pairs import write_pairs
from tests.helpers.toy import write_toy
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.models.objective import set_objective
from unpad.proof.content import content_of, gap_of, units_of
from unpad.proof.recipe import prove_recipe
from unpad.proof.sample import Piece, ProofSample, candidates_of, choose, many_of, micros_of, pieces_of
from unpad.recipes.file import load_recipe
from unpad.recipes.training import strategy_names
from unpad.training.setup import Setup, prepare_setup

WORDS = [
    "春天", "河水", "小猫", "老师", "月亮", "书店", "火车", "爷爷", "红花", "石桥", "早晨", "远山", "热茶", "夜晚",
    "下雨", "安静",
]  # fmt: skip
SHAPES = {"ragged": range(2, 15), "one length": [9] * 13, "two lengths": [12, 6] * 7}
TEXT = {"use": ["text"], "train": {"max_epochs": 1}}


def write_texts(folder: Path, texts: list[str]) -> Path:
    """A toy recipe of these texts, each its own sequence to train on."""
    recipe = write_toy(folder, stages=[{"name": "text", **TEXT}])
    rows = (json.dumps({"text": text, "split": "train"}, ensure_ascii=False) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text("".join(rows), encoding="utf-8")
    return recipe


def texts_of(shape: str) -> list[str]:
    """Unlike texts of so many words each."""
    return [
        "".join(WORDS[(first + 3 * i * (first + 1)) % 16] for i in range(n)) for first, n in enumerate(SHAPES[shape])
    ]


def setup_of(recipe: Path, *overrides: str) -> Setup:
    setup = prepare_setup(load_recipe(str(recipe), list(overrides)), Path(), None)
    set_objective(setup.model, setup.stages[-1].recipe, of_pairs=setup.stages[-1].of_pairs)
    return setup


def contents(setup: Setup, strategy: str, sample: ProofSample) -> list[set[bytes]]:
    """Contents of the pieces of every micro-batch."""
    micros = micros_of(setup, strategy, sample)
    return [{content_of(setup.data.alone(*piece)) for piece in pieces_of(micro)} for micro in micros]


@pytest.mark.promise("certificate.orders")
def test_the_sample_has_two_of_one_length_where_the_data_has_them(tmp_path):
    setup = setup_of(write_texts(tmp_path / "toy", texts_of("ragged")))
    pieces = [[Piece(seq, 0, int(n), 0)] for seq, n in enumerate(setup.data.table.positions)]
    unlike = list({unit[0].stop: unit for unit in pieces}.values())
    assert len(unlike) >= 8
    first = unlike[3][0]
    twin = [Piece(unlike[-1][0].seq_id, 0, first.stop, 0)]
    sample = choose(setup, [*unlike, twin], most=6)
    assert len(sample.pieces) == 6, "as many as without it"
    assert {first, *twin} <= set(sample.pieces)
    assert len(choose(setup, unlike, most=6).pieces) == 6


@pytest.mark.promise("certificate.orders")
def test_many_short_sequences_are_unlike_and_the_shortest(tmp_path):
    setup = setup_of(write_texts(tmp_path / "toy", texts_of("ragged")))
    candidates = candidates_of(setup)
    many = many_of(setup, choose(setup, candidates), candidates)
    contents = [content_of(one) for one in many]
    assert len(set(contents)) == len(contents) == len(candidates)
    sizes = [one.total_tokens for one in many]
    assert sizes == sorted(sizes)


@pytest.mark.slow
@pytest.mark.promise("certificate.batches")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["plan.batch_size=1", "plan.tokens_per_micro=1", "plan.row_tokens=1", "plan.bucket_width=1"],
        ["plan.max_tokens=5", "plan.stride=3"],
        ["plan.max_tokens=12", "plan.overflow=drop"],
        ["plan.batches_per_step=1", "plan.strategy=fixed", "model.context=8"],
    ],
)
def test_every_micro_batch_holds_unlike_sequences_and_there_are_several(tmp_path, shape, overrides):
    setup = setup_of(write_texts(tmp_path / "toy", texts_of(shape)), *overrides)
    sample = choose(setup, candidates_of(setup))
    assert len(sample.pieces) > 3
    for strategy in strategy_names():
        micros = micros_of(setup, strategy, sample)
        found = contents(setup, strategy, sample)
        assert len(found) > 1, strategy
        assert [len(one) for one in found] == [len(micro.seq_ids) for micro in micros], "no copies"
        assert min(map(len, found)) >= (
            4 if strategy in ("pack", "fixed", "dynamic") and len(sample.pieces) > 7 else 2
        ), strategy
        padded = sum(micro.pad_to * len(micro.seq_ids) > (micro.stops - micro.starts).sum() for micro in micros)
        assert strategy != "fixed" or padded or "plan.max_tokens=5" in overrides or "model.context=8" in overrides


@pytest.mark.promise("certificate.batches")
def test_pairs_meet_other_pairs_in_every_micro_batch(tmp_path):
    setup = setup_of(write_pairs(tmp_path), "tokenizer.vocab_size=400", "plan.tokens_per_micro=1", "plan.batch_size=1")
    sample, bundle = choose(setup, candidates_of(setup)), setup.data.table.bundle
    for strategy in strategy_names():
        micros = micros_of(setup, strategy, sample)
        assert len(micros) > 1
        assert min(len(set(bundle[micro.seq_ids].tolist())) for micro in micros) > 1, strategy


# --------------------------------------------------------------------------- nothing to compare


@pytest.mark.promise("certificate.not-proven")
def test_copies_are_not_proven_and_end_with_a_code_unless_it_is_allowed(unpad, tmp_path):
    recipe = str(write_texts(tmp_path / "toy", ["春天的河水"] * 12))
    done = unpad("prove", recipe, "--json")
    found = json.loads(done.out)
    assert (done.code, found["passed"]) == (12, None)
    lines = {line["name"]: line for line in found["lines"]}
    for name in ("labels stay within their sequence", "plan pack = alone", "plan rows = alone", "padded left = alone"):
        assert (lines[name]["passed"], lines[name]["note"]) == (
            None, "there is only one sequence; 11 more have the same content"
        ), name  # fmt: skip
    assert all(line["note"] for line in found["lines"] if line["passed"] is None)
    allowed = unpad("prove", recipe, "--allow-not-proven", code=0)
    assert "only one sequence" in allowed.out
    assert "NOT PROVEN" in allowed.out.splitlines()[-1]


@pytest.mark.promise("certificate.not-proven")
@pytest.mark.parametrize("num", [2, 3])
def test_two_sequences_make_no_split_and_three_do(tmp_path, num):
    certificate = prove_recipe(str(write_texts(tmp_path / "toy", texts_of("two lengths")[:num])), [])
    line = next(line for line in certificate.lines if line.name == "plan pack = alone")
    assert line.passed is (True if num == 3 else None)
    assert (certificate.passed is True) == (num == 3), certificate.text()
    assert num == 3 or line.note == "one micro-batch holds all 2 sequences, so no split of a step was compared"


def test_content_is_what_a_model_reads_and_not_its_labels_or_repetitions():
    def one(*tokens: int) -> RaggedBatch:
        return from_sequences([[*tokens, 0]])

    assert content_of(one(1, 2)) == content_of(from_sequences([[1, 2, 9]], [[False] * 3]))
    assert content_of(one(1, 2)) != content_of(one(2, 1))
    assert content_of(one(1, 1, 1)) == content_of(one(1)), "attention to equal tokens does not count them"
    assert len(set(units_of([one(1, 2), one(2, 1), one(1, 2)]))) == 2
    assert gap_of([[0, 1], [2]], [b"a", b"b", b"a"], split=True) == ""
    assert gap_of([[0, 2], [1]], [b"a", b"b", b"a"]) == (
        "no micro-batch holds two sequences of unlike content, so each was compared with itself"
    )
    assert gap_of([[0, 1, 2]], [b"a", b"a", b"a"]) == "all 3 sequences have the same content"
    assert gap_of([[0, 1]], [None, b"a"], what="sequence with an image") == "there is only one sequence with an image"
    assert random_batch([3]).num_seqs == 1
