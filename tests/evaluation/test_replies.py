"""Replies are made greedily from the question alone, and right when every keyword is in them."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.corpus import prepare
from tests.helpers.toy import quiet, write_recipe
from unpad.data.tokens.token_set import TokenSet
from unpad.evaluation.run import evaluate_run
from unpad.evaluation.text import answer, question, sample_replies, with_keywords
from unpad.inference.loaded import LoadedRun, load
from unpad.training.loop import train

pytestmark = pytest.mark.slow

TALKS = [
    ("天空是什么颜色？", "天空是蓝色的。", ["蓝色"]),
    ("草地是什么颜色？", "草地是绿色的。", ["草地", "绿色"]),
    ("雪花是什么颜色？", "雪花是白色的。", ["黑色"]),  # the data asks for a word that its own answer lacks
    ("你好！", "你好，很高兴见到你。", []),  # nothing to score
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedRun, TokenSet, Path]:
    """A model that has learned four conversations by heart."""
    folder = tmp_path_factory.mktemp("replies")
    rows = [
        {
            "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}],
            "keywords": keywords,
            "split": "train",
        }
        for asked, said, keywords in TALKS
    ]
    rows.append({**rows[0], "split": "holdout", "messages": rows[0]["messages"]})
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    model = {"kind": "decoder", "width": 32, "blocks": 1, "heads": 2, "hidden": 64, "context": 64}
    recipe = {
        "data": {"chat": str(folder / "chats.jsonl")},
        "model": model,
        "optim": {"lr": 1e-2},
        "train": {"max_epochs": 150, "threads": 1, "eval_every": 1000},
        "checkpoint": {"every": 1000},
        "precision": "fp32",
        "generate": {"max_new_tokens": 30, "temperature": 5.0},
    }
    train(str(write_recipe(folder / "replies.yaml", recipe)), folder / "run", console=quiet())
    run = load(folder / "run")
    tokens, _, _ = prepare(run.recipe, tokenizer=run.tokenizer)
    return run, tokens, folder


def test_a_reply_is_right_when_it_holds_every_keyword(trained):
    run, tokens, _ = trained
    replies = answer(run, tokens, np.arange(4))
    assert [reply.reply for reply in replies] == [said for _, said, _ in TALKS]  # greedy, whatever the recipe draws
    assert [reply.right for reply in replies] == [True, True, False, True]
    assert all(asked in reply.question for reply, (asked, said, _) in zip(replies, TALKS, strict=True))
    assert not any(said in reply.question for reply, (asked, said, _) in zip(replies, TALKS, strict=True))


def test_answers_do_not_depend_on_the_other_questions(trained):
    run, tokens, _ = trained
    together = answer(run, tokens, np.arange(4))
    assert [answer(run, tokens, np.array([i]))[0] for i in range(4)] == together


def test_only_questions_with_keywords_are_asked(trained):
    _, tokens, _ = trained
    asked = np.flatnonzero(tokens.split == 0)
    assert with_keywords(tokens, asked, seed=0).tolist() == [0, 1, 2]
    assert with_keywords(tokens, np.flatnonzero(tokens.split == 1), seed=0).tolist() == [4]
    some = with_keywords(tokens, asked, seed=0, most=2)
    assert len(some) == 2
    assert some.tolist() == with_keywords(tokens, asked, seed=0, most=2).tolist()


def test_evaluation_of_the_run_scores_both_sides_and_shows_replies(trained, tmp_path):
    metrics, lines = evaluate_run(str(trained[2] / "run"), num_shown=1, rows=tmp_path / "rows.jsonl")
    assert metrics["keywords_trained"].value == pytest.approx(2 / 3)
    assert metrics["keywords_trained"].num == 3
    assert metrics["keywords_heldout"].value == 1
    assert {"loss", "perplexity", "bits_per_char", "bits_per_byte"} <= set(metrics)
    assert [line.split()[0] for line in lines[:-1]] == ["trained", "reply", "heldout", "reply"]
    assert lines[3].endswith("天空是蓝色的。")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    asked = [row for row in rows if row["keywords_trained"] is not None]
    assert [row["keywords_trained"] for row in asked] == [1, 1, 0]
    assert [row["reply"] for row in asked] == [said for _, said, _ in TALKS[:3]]
    assert all((row["part"], row["loss"], row["num_targets"]) == ("train", None, None) for row in asked)
    assert [row["part"] for row in rows if row["keywords_heldout"] == 1] == ["valid"]


def test_samples_are_the_likeliest_replies_to_held_out_questions(trained):
    run, tokens, _ = trained
    data = run.data()
    asked = run.tokenizer.decode(question(tokens, 4))
    assert sample_replies(run.generator, data, run.recipe, data.kinds) == [(asked, "天空是蓝色的。")]
    short = run.recipe.model_copy(update={"generate": run.recipe.generate.model_copy(update={"max_new_tokens": 2})})
    [(_, cut)] = sample_replies(run.generator, data, short, data.kinds)
    assert 0 < len(cut) < len("天空是蓝色的。")
    assert "天空是蓝色的。".startswith(cut)
    assert not run.model.training
