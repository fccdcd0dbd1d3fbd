"""Targets: folders of Hugging Face, from which models come: config.json, the index, the weights, image processors."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_model
from tests.helpers.chat_folder import CHATML, byte_level
from tests.helpers.fuzz.mutate import damage_bytes, damage_json, damaged, damaged_json, either
from tests.helpers.fuzz.target import Target, WrongError, read_at
from unpad.data.tokens.folder_tokenizer import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from unpad.errors import CheckpointError, OutOfMemoryError, RecipeError, SourceError
from unpad.interchange import folder as folders
from unpad.interchange.families import FAMILIES, family_of
from unpad.interchange.folder import CONFIG, INDEX, JSON_FILES, OTHERS, WEIGHTS, load_model, read_json_files, save_model
from unpad.interchange.origin import folder_recipe
from unpad.interchange.runs import import_folder
from unpad.run.folder import run_recipe

ERRORS = (CheckpointError, RecipeError, OutOfMemoryError)
SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {**SIZES, "model_type": "llama", "rope_parameters": LLAMA3},
    {**SIZES, "model_type": "mistral", "sliding_window": 7},
    {**SIZES, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    {**SIZES, "model_type": "qwen3", "layer_types": ["full_attention", "full_attention"]},
    {**SIZES, "model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"},
    {**SIZES, "model_type": "gemma3_text", "sliding_window": 7, "query_pre_attn_scalar": 20, "rope_theta": 1000.0},
    {**SIZES, "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    {**SIZES, "model_type": "smollm3", "no_rope_layers": [0, 1]},
    {"model_type": "gpt2", "vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    {
        "model_type": "opt", "vocab_size": 50, "hidden_size": 16, "ffn_dim": 24, "word_embed_proj_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    },
    {
        "model_type": "llava", "vision_config": VISION, "text_config": {**SIZES, "model_type": "llama"},
        "image_token_index": 49, "vision_feature_layer": -2, "projector_hidden_act": "gelu",
    },
]  # fmt: skip
PREPROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.5, 0.5], "size": {"height": 28, "width": 28}}


def hf_config(folder: Path) -> Target:
    """config.json of every family, and the file of the image processor."""
    for config in CONFIGS:
        (folder / CONFIG).write_text(json.dumps(config))
        folder_recipe(folder)  # a seed that is refused would try nothing
    whole = [json.dumps(config, indent=1).encode() for config in CONFIGS]
    processor = folder / "preprocessor_config.json"

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.15:
            return b"P" + damage_json(PREPROCESSOR, rng, 0.2)
        if rng.random() < 0.7:
            return b"C" + damage_json(rng.choice(CONFIGS), rng, 0.05)
        return b"C" + damage_bytes(rng.choice(whole), whole, rng)

    def run(data: bytes) -> None:
        processor.write_bytes(data[1:] if data[:1] == b"P" else json.dumps(PREPROCESSOR).encode())
        (folder / CONFIG).write_bytes(data[1:] if data[:1] == b"C" else whole[-1])
        folder_recipe(folder)

    return Target(make, run, ERRORS)


def _written(folder: Path, shard_bytes: int) -> dict[str, bytes]:
    """The files of a tiny decoder in the form of Llama."""
    model = tiny_model(torch.float32, context=32)
    shutil.rmtree(folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "SHARD_BYTES", shard_bytes)
        save_model(model, folder, FAMILIES["llama"])
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "MANIFEST.json"}


def _load(folder: Path) -> None:
    given = read_json_files(folder)[CONFIG]
    load_model(folder, family_of(given, folder / CONFIG), given)


def hf_index(folder: Path) -> Target:
    """The index of weights in several files."""
    files = _written(folder / "model", 4000)
    pieces = [b"../", b"/dev/zero", b"model-00001-of-00002.safetensors"]
    make = either(0.6, damaged_json([json.loads(files[INDEX])], 0.05), damaged([files[INDEX]], pieces))
    return Target(make, read_at(folder / "model" / INDEX, lambda path: _load(path.parent)), ERRORS)


def hf_weights(folder: Path) -> Target:
    """Safetensors with another header, or with damaged bytes, and configs that do not fit them."""
    files = _written(folder / "model", 1 << 30)
    weights, config = files[WEIGHTS], json.loads(files[CONFIG])
    size = int.from_bytes(weights[:8], "little")
    head = json.loads(weights[8 : 8 + size])

    def make(rng: random.Random) -> bytes:
        drawn = rng.random()
        if drawn < 0.3:
            return b"C" + damage_json(config, rng, 0.05)
        if drawn < 0.7:
            changed = damage_json(head, rng, 0.03)
            return b"W" + len(changed).to_bytes(8, "little") + changed + weights[8 + size :]
        return b"W" + damage_bytes(weights[: size + 400], [weights[:size]], rng) + weights[size + 400 :]

    def run(data: bytes) -> None:
        (folder / "model" / WEIGHTS).write_bytes(data[1:] if data[:1] == b"W" else weights)
        (folder / "model" / CONFIG).write_bytes(data[1:] if data[:1] == b"C" else files[CONFIG])
        _load(folder / "model")

    return Target(make, run, ERRORS)


def hf_files(folder: Path) -> Target:
    """A folder in which some names are pipes, devices, folders, endless or empty files, links, or damaged."""
    library = byte_level(["what is one", "it is two"])
    model = tiny_model(torch.float32, context=32, vocab_size=library.get_vocab_size())
    about = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    shutil.rmtree(folder / "model", ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "SHARD_BYTES", 4000)
        contents = {TOKENIZER: json.loads(library.to_str()), TOKENIZER_CONFIG: about, CHAT_TEMPLATE: CHATML.encode()}
        save_model(model, folder / "model", FAMILIES["llama"], contents)
    files = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    import_folder(str(folder / "model"), folder / "run")  # a seed that is refused would try nothing
    names = sorted({*files, *JSON_FILES, *OTHERS, WEIGHTS})

    def make(rng: random.Random) -> bytes:
        chosen = rng.sample(names, rng.choice((1, 1, 1, 2, 3)))
        return json.dumps(
            {name: [rng.choice(KINDS), rng.choice(names), rng.randrange(1 << 30)] for name in chosen}
        ).encode()

    def run(data: bytes) -> None:
        shutil.rmtree(folder / "model", ignore_errors=True)
        shutil.rmtree(folder / "run", ignore_errors=True)
        (folder / "model").mkdir()
        for name, content in files.items():
            (folder / "model" / name).write_bytes(content)
        try:
            for name, (kind, other, seed) in json.loads(data).items():
                _spoil(folder / "model" / name, kind, other, random.Random(seed))
        except (ValueError, TypeError, AttributeError):
            return  # a case that was reduced too far
        import_folder(str(folder / "model"), folder / "run")
        if run_recipe(folder / "run").model["width"] != model.config.width:
            raise WrongError("an imported run is not the model of the folder")

    return Target(make, run, (*ERRORS, SourceError))


KINDS = ("gone", "pipe", "zero", "random", "folder", "sparse", "empty", "link", "loop", "nowhere", "closed", "damaged")


def _spoil(path: Path, kind: str, other: str, rng: random.Random) -> None:
    content = path.read_bytes() if path.is_file() else b"{}"
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("zero", "random", "link", "loop", "nowhere"):
        places = {"zero": "/dev/zero", "random": "/dev/urandom", "link": other, "loop": path.name, "nowhere": "../none"}
        path.symlink_to(places[kind])
    elif kind != "gone":
        path.write_bytes(
            damage_bytes(content, [content], rng) if kind == "damaged" else b"" if kind == "empty" else content
        )
        if kind == "sparse":
            os.truncate(path, 1 << 40)
        path.chmod(0 if kind == "closed" else 0o600)


BUILDERS: dict[str, Callable[[Path], Target]] = {
    "hf_config": hf_config, "hf_index": hf_index, "hf_weights": hf_weights, "hf_files": hf_files,
}  # fmt: skip
