"""`unpad prove --hf`: which ways to make batches are sound for an architecture."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.shell import Outcome, Shell
from unpad.errors import NOT_PROVED

# As the config.json of released models have them.
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "torch_dtype": "bfloat16", "vocab_size": 128256}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 24, "sliding_window": 128, "vocab_size": 201088}


def prove(unpad: Shell, folder: Path, config: dict[str, object], *options: str) -> Outcome:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return unpad("prove", "--hf", "model", *options)


def rows(found: Outcome) -> dict[str, list[str]]:
    """Cells after the name, by name; a cell has no two blanks in a row."""
    table = found.out.split("\n\n")[1].splitlines()[1:]
    cells = [[cell for cell in line.split("  ") if cell] for line in table]
    return {name.strip(): [cell.strip() for cell in rest] for name, *rest in cells}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
BY_LENGTH: dict[str, dict[str, object]] = {
    "longrope": {"model_type": "phi3", "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE},
    "dynamic": {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "floor_scale": {"model_type": "llama4_text", "num_hidden_layers": 4},
}


@pytest.mark.promise("hf.judged")
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_a_model_with_other_numbers_above_a_length_is_tried_above_it(kind, unpad, tmp_path):
    found = prove(unpad, tmp_path, BY_LENGTH[kind])
    verdicts = {name: cells[0] for name, cells in rows(found).items()}
    assert (verdicts["flattening"], verdicts["unpad"]) == ("wrong loss", "refused")
    assert f"({kind})" in found.out.replace("\n", " ")


@pytest.mark.nightly
@pytest.mark.promise("hf.judged")
def test_packing_of_a_sound_architecture_passes(unpad, tmp_path):
    found = prove(unpad, tmp_path, LLAMA)
    assert (found.code, found.err) == (0, "")
    verdicts = {name: cells[0] for name, cells in rows(found).items()}
    sound = ["padded right", "flattening", "flattening + seq_idx", "TRL padding_free"]
    sound += ["TRL packing bfd", "TRL packing bfd_split", "unpad"]
    assert [name for name, verdict in verdicts.items() if verdict == "sound"] == sound
    assert verdicts["padded left"] == "wrong loss"
    assert verdicts["flattening + cache"] == verdicts["TRL packing wrapped"] == "LEAKING"
    assert int(rows(found)["TRL packing wrapped"][-1]) > 0  # tokens torn from their sequence
    assert all(float(cells[1]) < 1e-10 for cells in rows(found).values() if cells[0] == "sound")
    assert "pass use_cache=False" in " ".join(found.out.split())
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.promise("hf.judged")
def test_a_silent_leak_fails_and_says_what_to_do_instead(unpad, tmp_path):
    found = prove(unpad, tmp_path, GPT_OSS, "--json")
    proof = json.loads(found.out)
    assert (found.code, proof["passed"], proof["class"]) == (NOT_PROVED, False, "GptOssForCausalLM")
    verdicts = {way["batches"]: way["verdict"] for way in proof["ways"]}
    assert verdicts["padded right"] == verdicts["unpad"] == "sound"
    assert verdicts["flattening"] == verdicts["TRL padding_free"] == verdicts["TRL packing bfd"] == "leaking"
    flat = next(way for way in proof["ways"] if way["batches"] == "flattening")
    assert flat["others_move"]
    assert flat["gradient"] > 10 * flat["loss"] > 0.001  # nobody sees it in a curve
    assert "pad on the right; unpad.hf.attach(trainer)." in proof["advice"].partition("Do not use")[0]
    assert "TRL padding_free" in proof["advice"].partition("Do not use")[2]


@pytest.mark.promise("hf.judged")
def test_a_way_that_proves_first_refuses_where_it_fails(unpad, tmp_path):
    found = prove(unpad, tmp_path, {"model_type": "bart"})
    text = " ".join(found.out.split())
    assert "unpad: unpad.hf.attach(trainer) proves the model first: logits differ though nothing leaks" in text
    assert (rows(found)["padded right"][0], rows(found)["unpad"][0]) == ("sound", "refused")
    assert "as where it does not shift the labels" in text


@pytest.mark.promise("hf.judged")
def test_bad_input_is_an_error_of_three_lines(unpad, tmp_path):
    missing = unpad("prove", "--hf", tmp_path / "nowhere")
    assert (missing.code, missing.err.count("\n")) == (3, 3)
    assert "Traceback" not in missing.err
    unknown = prove(unpad, tmp_path, {"model_type": "gpt_os"})
    assert (unknown.code, "did you mean gpt_oss" in unknown.err) == (2, True)
    refused = prove(unpad, tmp_path, {"model_type": "musicgen"})
    assert (refused.code, "cannot be made small" in refused.err) == (NOT_PROVED, True)
    both = unpad("prove", "zh_chat", "--hf", tmp_path)
    assert (both.code, "a recipe or run and --hf" in both.err) == (2, True)
    neither = unpad("prove")
    assert (neither.code, "nothing to prove" in neither.err) == (2, True)


@pytest.mark.promise("hf.judged")
def test_without_the_extra_the_command_says_what_to_install(unpad, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = prove(unpad, tmp_path, LLAMA)
    assert (found.code, "pip install" in found.err, "unpad[hf]" in found.err) == (2, True, True)
