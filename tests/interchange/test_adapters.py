"""Adapters trained here are opened by peft on the model of transformers, for every family, with equal logits."""

import json

import pytest
import torch

from tests.helpers.tiny_models import adapted
from tests.interchange.theirs import largest_error, load, make_theirs, our_logits, their_logits
from unpad.interchange.families import DECODERS
from unpad.interchange.runs import adapter_files
from unpad.models.adapters import kept_weights
from unpad.recipes.training import LoraSettings

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks

FIELDS: dict[str, dict[str, object]] = {
    "qwen2": {"head_dim": 4},
    "granite": {"head_dim": 4, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "smollm3": {"head_dim": 4},
}
SETTINGS = {"plain": LoraSettings(r=3, alpha=5), "dora": LoraSettings(r=2, dora=True, rslora=True)}


@pytest.mark.slow
@pytest.mark.promise("adapters.export")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(kind, "plain") for kind in DECODERS] + [(kind, "dora") for kind in ("qwen3", "granite", "gpt2")],
)
def test_peft_opens_our_adapters_on_their_model(kind, settings, tmp_path):
    theirs = make_theirs(kind, **FIELDS.get(kind, {}))
    theirs.save_pretrained(tmp_path / "theirs")
    base = load(tmp_path / "theirs")
    ours = adapted(base, SETTINGS[settings]).eval()
    given = json.loads((tmp_path / "theirs/config.json").read_text())
    family = DECODERS[kind]
    table = family.table(*family.config(given), given)
    (tmp_path / "adapter").mkdir()
    for name, content in adapter_files(kept_weights(ours), SETTINGS[settings], table, "theirs").items():
        (tmp_path / "adapter" / name).write_bytes(content)
    opened = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    expected = our_logits(ours)
    assert largest_error(expected, our_logits(base)) > 0.01
    assert largest_error(their_logits(opened, torch.float32), expected) < 1e-5
