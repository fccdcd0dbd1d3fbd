"""Paths and names of users: one place decodes and bounds them, for recipes, the command line and the cache."""

from pathlib import Path

import pytest

from tests.helpers.toy import write_toy
from unpad.errors import RecipeError
from unpad.recipes.file import load_recipe, parse_recipe
from unpad.recipes.recipe import Recipe
from unpad.recipes.section import kept_paths
from unpad.storage import cache_folder
from unpad.storage.paths import new_path, path_fault, refuse_format, user_path

IMPOSSIBLE = {
    "": "is empty", "a\0b": "NUL", "\udcd6.txt": "not UTF-8", "a" * 256: "256 bytes, more than 255",
    "data/" + "中" * 86 + ".txt": "262 bytes", "a/" * 2100: "4,200 bytes, more than 4,095",
}  # fmt: skip
PATH_FIELDS = (
    *("data.text", "data.chat", "data.images", "data.vqa", "data.pairs", "data.events", "data.root"),
    *("events.labels.path", "events.split", "events.code_embeddings", "augment.synonyms_file", "train.init_from"),
)


@pytest.mark.promise("input.paths")
@pytest.mark.parametrize(("path", "what"), IMPOSSIBLE.items(), ids=[what for what in IMPOSSIBLE.values()])
def test_an_impossible_path_is_refused_by_both_functions(path, what):
    assert what in path_fault(path)
    for decode in (user_path, new_path):
        with pytest.raises(RecipeError, match="E_NAME") as caught:
            decode(path)
        assert what in caught.value.what
        assert len(caught.value.where) <= 100


def test_sound_paths_pass(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a 中 👩.txt") == new_path("~/a 中 👩.txt") == tmp_path / "a 中 👩.txt"
    for path in ("a" * 255, "x/*" + "[ab]" * 60, "a\nb"):  # names that exist may be odd
        assert user_path(path) == Path(path)


@pytest.mark.promise("input.paths")
def test_the_home_of_an_unknown_user_is_refused_where_it_is_used(monkeypatch):
    for use in (user_path, new_path):
        with pytest.raises(RecipeError, match="there is no user ~nosuchuser"):
            use("~nosuchuser/x")
    monkeypatch.setenv("UNPAD_CACHE", "~nosuchuser/c")
    with pytest.raises(RecipeError, match="there is no user"):
        cache_folder()
    monkeypatch.setenv("UNPAD_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nosuchuser")
    with pytest.raises(RecipeError, match="there is no user"):
        cache_folder()


@pytest.mark.promise("input.paths")
@pytest.mark.parametrize("path", ["a\nb", "a\x1b[31m", "a\u202eb", "a\x7f"])
def test_nothing_is_written_under_a_name_with_control_characters(path):
    with pytest.raises(RecipeError, match="control character"):
        new_path(path)


@pytest.mark.promise("input.paths")
@pytest.mark.parametrize("field", PATH_FIELDS)
def test_recipes_refuse_impossible_paths_and_runs_of_earlier_versions_may_keep_one(field):
    values: dict[str, object] = {}
    inner = values
    *sections, name = field.split(".")
    for section in sections:
        inner[section] = inner = {}
    inner |= {name: "", "label": "died"} if name == "path" else {name: ""}
    with pytest.raises(RecipeError, match="the path is empty") as caught:
        parse_recipe(values)
    assert field in caught.value.where
    with kept_paths():
        Recipe(**values)


@pytest.mark.promise("input.paths")
def test_the_command_line_refuses_impossible_paths_with_code_2(unpad, tmp_path):
    recipe, home, long = write_toy(tmp_path / "toy"), "~nosuchuser/x", "a" * 300
    for arguments in (
        ("train", recipe, "--out", ""),
        ("train", recipe, "--out", long),
        ("train", recipe, "--out", "a\nb"),
        ("train", recipe, f"data.text={home}", "--out", "run"),
        ("train", recipe, f"data.text={long}*x{long}", "--out", "run"),
        ("train", recipe, "data.text=a.jsonl", f"data.root={home}", "--out", "run"),
        ("train", home + ".yaml"),
        ("data", "check", long),
        ("data", "check", home),
        ("chat", long),
        ("infer", home, "--image", "x.png"),
        ("import", home, "--out", "run"),
        ("recipes", "copy", "zh_chat", "a\x1bb.yaml"),
        ("compare", "a", "b", "--out", ""),
    ):
        done = unpad(*arguments)
        assert (done.code, done.out) == (2, ""), (arguments, done)
        assert "RecipeError" in done.err
        assert "Traceback" not in done.err
        assert "\x1b" not in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy"]


@pytest.mark.promise("input.paths")
def test_a_recipe_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path)

    def refuse(*given: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RecipeError, match="Permission denied") as caught:
        load_recipe(str(recipe))
    assert caught.value.where == str(recipe)


@pytest.mark.parametrize(
    ("name", "written", "fix"),
    [
        ("x.onnx", (), "name it x"), ("x.gguf", (), "name it x"), ("qwen3-0.6b", (), ""),
        ("e.csv", (".jsonl",), "name it e.jsonl"),
        ("e.JSONL", (".jsonl",), ""), ("e", (".jsonl",), ""), ("rows.jsonl", (".parquet", ".jsonl"), ""),
        ("page.pdf", (".html",), "name it page.html"),
    ],
)  # fmt: skip
def test_a_name_that_promises_another_format_is_refused(name, written, fix):
    if not fix:
        refuse_format(Path("a") / name, *written)
        return
    with pytest.raises(RecipeError) as caught:
        refuse_format(Path("a") / name, *written)
    assert caught.value.fix == fix
