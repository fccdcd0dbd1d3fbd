"""Files of a folder of somebody else: regular ones of a bounded size are read, and every other is refused."""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.interchange.theirs import tiny_folder
from unpad.errors import UnpadError
from unpad.interchange.folder import CONFIG, INDEX, JSON_FILES, MOST_CONTEXT, WEIGHTS
from unpad.interchange.runs import import_folder

NAMES = (*JSON_FILES, "chat_template.jinja", WEIGHTS, INDEX, "tokenizer.model", "merges.txt")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "theirs")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.promise("models.files")
@pytest.mark.slow
@pytest.mark.parametrize("make", [pipe, endless, sparse, directory])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_of_a_bounded_size_is_refused_or_left_alone(name, make, theirs, tmp_path):
    (theirs / name).unlink(missing_ok=True)
    if name == INDEX:
        (theirs / WEIGHTS).unlink()
    make(theirs / name)
    if name in ("tokenizer.model", "merges.txt") and make is not sparse:  # kept for an export, if they are files
        assert import_folder(str(theirs), tmp_path / "run")
        return
    with pytest.raises(UnpadError) as caught:
        import_folder(str(theirs), tmp_path / "run")
    assert caught.value.exit_code in (3, 4)
    assert name in str(caught.value)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_names_of_a_compiled_model_are_read_as_those_of_the_model(theirs, tmp_path):
    tensors = load_file(theirs / WEIGHTS)
    import_folder(str(theirs), tmp_path / "plain")
    save_file({f"_orig_mod.{name}".replace("layers.0.", "layers.0._orig_mod."): v for name, v in tensors.items()},
              theirs / WEIGHTS)  # fmt: skip
    import_folder(str(theirs), tmp_path / "compiled")
    files = [tmp_path / run / "checkpoints" / "best" / "model.safetensors" for run in ("plain", "compiled")]
    assert files[0].read_bytes() == files[1].read_bytes()


ABSURD = {
    "context": ({"max_position_embeddings": 2**31 - 1}, f"at most {MOST_CONTEXT:,}"),
    "context that is scaled": ({"max_position_embeddings": MOST_CONTEXT + 1}, f"at most {MOST_CONTEXT:,}"),
    "blocks": ({"num_hidden_layers": 9000}, "at most 2,000"),
    "vocabulary": ({"vocab_size": 2**31 - 1}, "at most 4,194,304"),
    "width": ({"hidden_size": 2**30, "head_dim": None, "num_attention_heads": 2}, "at most 1,048,576"),
    "heads": ({"num_attention_heads": 2**28, "num_key_value_heads": 2**28}, "at most 1,048,576"),
}


@pytest.mark.promise("models.files")
@pytest.mark.parametrize("name", ABSURD)
def test_sizes_beyond_reason_are_refused_before_anything_is_made_of_them(name, theirs, tmp_path):
    changed, message = ABSURD[name]
    (theirs / CONFIG).write_text(json.dumps({**json.loads((theirs / CONFIG).read_text()), **changed}))
    with pytest.raises(UnpadError, match=message):
        import_folder(str(theirs), tmp_path / "run")
