"""LLaVA checkpoints: the same logits as transformers, read from its files and written back into them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.vision import IMAGE, ROWS, VOCAB, Row, prepare
from tests.interchange.theirs import largest_error
from unpad.batching.batch import RaggedBatch
from unpad.data.preprocess import Preprocessed
from unpad.errors import CheckpointError
from unpad.interchange.folder import CONFIG, load_model, read_json_files, save_model
from unpad.interchange.llava import Llava
from unpad.models import build_model, model_config
from unpad.models.vision_language.model import VisionLanguage

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"text": {"tie_word_embeddings": True}},
    "three by three, other angles": {
        "vision": {"image_size": 24, "patch_size": 8, "hidden_act": "gelu"},
        "text": {
            "num_key_value_heads": 4, "head_dim": 8,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        },
        "top": {"vision_feature_layer": -1, "projector_hidden_act": "relu"},
    },
    "biases": {
        "text": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
        "vision": {"layer_norm_eps": 1e-3},
        "top": {"multimodal_projector_bias": False, "vision_feature_layer": 1},
    },
}  # fmt: skip


def load(folder: Path) -> tuple[VisionLanguage, dict[str, Any]]:
    files = read_json_files(folder)
    return load_model(folder, Llava(), files[CONFIG]), files


def make_theirs(kind: str) -> nn.Module:
    """A small random model of transformers."""
    given = KINDS[kind]
    vision = {"image_size": 28, "patch_size": 14, **VISION, **given.get("vision", {})}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**{**TEXT, **given.get("text", {})}),
        image_token_index=IMAGE,
        **given.get("top", {}),
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def sides(model: nn.Module) -> tuple[int, int]:
    """Patches along a side of an image, and pixels along a side of a patch."""
    vision = model.config.vision_config
    return vision.image_size // vision.patch_size, vision.patch_size


def samples(model: nn.Module, rows: Sequence[Row] = ROWS, **options: Any) -> Preprocessed:
    side, patch = sides(model)
    return prepare([(row[0], [(side, side)] * len(row[1]), row[2]) for row in rows], patch, **options)


def pixels(model: nn.Module, media: RaggedBatch | None) -> Tensor | None:
    """Patches as the images they were cut from, (num_images, 3, height, width)."""
    if media is None:
        return None
    side, patch = sides(model)
    cells = media.inputs_embeds.reshape(-1, side, side, 3, patch, patch)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, side * patch, side * patch)


def their_logits(model: nn.Module, batch: RaggedBatch) -> list[Tensor]:
    """Logits of every row alone, each (length, vocab_size)."""
    rows = []
    for i in range(batch.num_seqs):
        one = batch.select([i])
        images = pixels(model, one.media if len(one.media_seqs) else None)
        rows.append(model(input_ids=one.input_ids[None], pixel_values=images).logits[0])
    return rows


def our_logits(model: VisionLanguage, batch: RaggedBatch) -> list[Tensor]:
    return list(model.logits(model(batch)).split(batch.layout.lengths().tolist()))


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path]:
    model = make_theirs(request.param)
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs"


# --------------------------------------------------------------------------- equal logits


@pytest.mark.promise("vqa.llava")
@torch.no_grad()
def test_logits_equal_those_of_transformers_row_by_row(saved):
    theirs, folder = saved
    ours, _ = load(folder)
    assert (ours.decoder.head is None) == theirs.config.tie_word_embeddings
    batch = samples(theirs).batch
    assert largest_error(our_logits(ours, batch), their_logits(theirs, batch)) < 1e-5


@torch.no_grad()
def test_logits_and_loss_equal_those_of_transformers_padded_right(saved):
    theirs, folder = saved
    ours, _ = load(folder)
    batch = samples(theirs).batch
    padded = batch.pad("right", pad_id=3)
    mask = padded.layout.attention_mask
    images = pixels(theirs, batch.media)
    out = theirs(input_ids=padded.input_ids.view(mask.shape), attention_mask=mask.long(), pixel_values=images)
    expected = [row[: int(n)] for row, n in zip(out.logits, mask.sum(1), strict=True)]
    assert largest_error(our_logits(ours, batch), expected) < 1e-5
    loss = nn.functional.cross_entropy(torch.cat(expected)[batch.loss_mask], batch.labels[batch.loss_mask])
    total, count = ours.losses(batch)["nll"]
    assert float(total) / count == pytest.approx(float(loss), rel=1e-5)


# --------------------------------------------------------------------------- written back


@pytest.mark.promise("vqa.llava")
@torch.no_grad()
def test_what_is_written_back_gives_the_same_logits_in_transformers(saved, tmp_path):
    theirs, folder = saved
    ours, files = load(folder)
    save_model(ours, tmp_path / "ours", Llava(), files)
    again, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    batch = samples(theirs).batch
    assert largest_error(their_logits(again.eval(), batch), their_logits(theirs, batch)) < 1e-6
    twice, _ = load(tmp_path / "ours")
    assert twice.config == ours.config
    for name, value in twice.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name


@pytest.mark.promise("vqa.llava")
@torch.no_grad()
def test_a_model_made_here_runs_in_transformers(tmp_path):
    sizes = {"width": 16, "blocks": 2, "heads": 2, "hidden": 24}
    section = {
        "kind": "vision_language", "image_id": IMAGE,
        "language": {**sizes, "rope_theta": 300.0, "eps": 1e-5, "tied": False},
        "vision": {**sizes, "patch": 2, "side": 2, "positions": "learned", "pre_norm": True},
    }  # fmt: skip
    torch.manual_seed(1)
    ours = build_model(model_config(section), VOCAB).eval()
    for parameter in ours.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    save_model(ours, tmp_path / "ours", Llava())
    # The names of the released checkpoints, which all versions read.
    names = {
        ".".join(name.split(".")[:2]) for file in (tmp_path / "ours").glob("*.safetensors") for name in load_file(file)
    }
    assert names == {
        "language_model.model", "language_model.lm_head", "vision_tower.vision_model", "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    }  # fmt: skip
    theirs = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    batch = samples(theirs).batch
    assert largest_error(our_logits(ours, batch), their_logits(theirs, batch)) < 1e-5


# --------------------------------------------------------------------------- refusals


def edit_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    for field, value in changes.items():
        config[field] = {**config[field], **value} if isinstance(config.get(field), dict) else value
    (folder / "config.json").write_text(json.dumps(config))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"model_type": "llava_next"}, "model_type is 'llava_next'"),
    "tower": ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type is 'siglip"),
    "language": ({"text_config": {"model_type": "qwen2"}}, "text_config.model_type is 'qwen2'"),
    "full": ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
    "layers": ({"vision_feature_layer": [-2, -1]}, r"vision_feature_layer is \[-2, -1\]"),
    "no such layer": ({"vision_feature_layer": 9}, "feature_layer 9 is none"),
    "half turned": (
        {"text_config": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
        "partial_rotary_factor is 0.5",
    ),
    "bias": ({"text_config": {"mlp_bias": True}}, "text_config.mlp_bias is True"),
    "activation": ({"vision_config": {"hidden_act": "gelu_new"}}, "vision_config.hidden_act is 'gelu_new'"),
    "projector": ({"projector_hidden_act": "silu"}, "projector_hidden_act is 'silu'"),
    "oblong": ({"vision_config": {"image_size": [28, 42]}}, r"vision_config.image_size is \[28, 42\]"),
    "cut patches": ({"vision_config": {"image_size": 30}}, "image_size is 30, .* expected a multiple of 14"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "size": ({"text_config": {"intermediate_size": 16}}, "tensors do not fit config.json"),
    "depth": ({"text_config": {"num_hidden_layers": 3}}, "layers.2.* is missing"),
    "shallow": ({"text_config": {"num_hidden_layers": 1}}, "layers.1.* is unknown"),
    "text": ({"text_config": {"hidden_size": "wide"}}, "text_config.hidden_size is 'wide'"),
    "tied": ({"tie_word_embeddings": True}, "the head differs from the embedding"),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make_theirs("grouped").save_pretrained(folder)
    return folder


@pytest.mark.promise("vqa.llava")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_covered_is_refused_by_the_name_of_its_field(case, small, tmp_path):
    changes, message = REFUSED[case]
    for path in small.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit_config(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
