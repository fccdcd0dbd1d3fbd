"""Models of pictures of transformers: a sequence alone has its own pixels, and tokens that stand for them stay."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainingArguments

import unpad
import unpad.hf
from tests.proof.foreign import toy
from unpad.errors import PlanError, ProofError, RecipeError
from unpad.proof.foreign.model import untouched_generators

PICTURE, START, END = 120, 121, 122  # tokens
TEXT = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA = dict(model_type="llama", **TEXT)
SEEN = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIGLIP = dict(model_type="siglip_vision_model", image_size=16, patch_size=8, **SEEN)
QWEN = dict(
    depth=2, hidden_size=32, intermediate_size=64, num_heads=4, patch_size=4, temporal_patch_size=1,
    out_hidden_size=32, window_size=16, fullatt_block_indexes=[1],
)  # fmt: skip
IDEFICS = dict(
    vision_config=dict(image_size=16, patch_size=8, **SEEN),
    text_config=dict(model_type="llama", **TEXT),
    scale_factor=2,
)
ROPE = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)
FIELDS = {
    "Llava": dict(vision_config=SIGLIP, text_config=LLAMA, vision_feature_layer=-1,
                  vision_feature_select_strategy="full"),
    "Idefics3": IDEFICS, "SmolVLM": IDEFICS,
    "Gemma3": dict(vision_config=SIGLIP, text_config=dict(**TEXT, sliding_window=8), mm_tokens_per_image=4,
                   boi_token_id=START, eoi_token_id=END),
    "PaliGemma": dict(vision_config=dict(**SIGLIP, projection_dim=32), projection_dim=32,
                      text_config=dict(model_type="gemma", **TEXT)),
    "Qwen2_5_VL": dict(vision_config=QWEN, vision_start_token_id=START, vision_end_token_id=END, video_token_id=123,
                       text_config=dict(**TEXT, rope_parameters=ROPE)),
}  # fmt: skip
PLACES = {"Idefics3": 1, "SmolVLM": 1}  # tokens of a picture, of others 4
FLAT = dict.fromkeys(FIELDS, "sound") | {"Gemma3": "wrong loss", "PaliGemma": "leaking", "Qwen2_5_VL": "leaking"}


def small_model(name: str) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**FIELDS[name], image_token_id=PICTURE)
    with untouched_generators(0):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:  # so that what a token sees changes its logits
                    weight.copy_(torch.randn(weight.shape) * 0.8 * weight.shape[-1] ** -0.5)
    return model


class Pictures:
    """Sequences with a picture each, and a collator of them.

    Args:
        side: of padding; empty for one flat row. swapped: each sequence gets the picture of another.
    """

    def __init__(self, name: str, side: str = "right", *, swapped: bool = False) -> None:
        self.name, self.side, self.swapped = name, side, swapped
        generator = torch.Generator().manual_seed(1)
        ends = {"Gemma3": ([START], [END]), "Qwen2_5_VL": ([START], [END])}.get(name, ([], []))
        self.sequences, self.pixels = [], dict[tuple[int, ...], Tensor]()
        for before, after in ((2, 9), (3, 4), (1, 14), (4, 7)):
            words = torch.randint(3, 110, (before + after,), generator=generator).tolist()
            ids = [*words[:before], *ends[0], *[PICTURE] * PLACES.get(name, 4), *ends[1], *words[before:]]
            self.sequences.append(ids)
            self.pixels[tuple(ids)] = torch.randn(3, 16, 16, generator=generator)

    def __call__(self, sequences: list[list[int]]) -> dict[str, object]:
        if self.side:
            batch = toy.padded(sequences, self.side)
            batch["labels"][batch["attention_mask"].cumsum(1) == 1] = -100  # of the first tokens
        else:
            batch = {**toy.flat(sequences), "use_cache": False}
            del batch["document_ids"]
        batch["labels"][batch["input_ids"] == PICTURE] = -100
        return batch | self._beside(sequences, batch["input_ids"])

    def _beside(self, sequences: list[list[int]], ids: Tensor) -> dict[str, Tensor]:
        pixels = torch.stack([self.pixels[tuple(one)] for one in sequences])
        pixels = pixels.flip(0) if self.swapped else pixels
        is_picture = (ids == PICTURE).long()
        if self.name == "Qwen2_5_VL":
            patches = pixels.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 48)
            sizes = torch.tensor([[1, 4, 4]] * len(sequences))
            return {"pixel_values": patches, "image_grid_thw": sizes, "mm_token_type_ids": is_picture}
        if self.name in PLACES:
            return {"pixel_values": pixels[:, None] if self.side else pixels[None]}
        kinds = {"Gemma3": is_picture, "PaliGemma": torch.zeros_like(ids)}.get(self.name)
        return {"pixel_values": pixels} | ({} if kinds is None else {"token_type_ids": kinds})


def verdict(name: str, *args: object, **kwargs: object) -> str:
    data = Pictures(name, *args, **kwargs)
    return unpad.prove_callable(small_model(name), data, data.sequences).verdict


FAMILIES = [pytest.param(name, marks=[pytest.mark.nightly] if name != "Llava" else []) for name in FLAT]


@pytest.mark.promise("proof.pictures")
@pytest.mark.parametrize("name", FAMILIES)
def test_padded_and_flat_batches_with_pictures_are_judged_by_sequences_with_their_own_pixels(name):
    assert [verdict(name, side) for side in ("right", "left", "")] == ["sound", "sound", FLAT[name]]
    assert verdict(name, swapped=True) == "wrong loss"


def trainer(data: Pictures, folder) -> Trainer:
    def collate(rows: list[dict[str, list[int]]]) -> dict[str, object]:
        return data([row["input_ids"] for row in rows])

    rows = [{"input_ids": ids} for ids in data.sequences]
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, remove_unused_columns=False, use_cpu=True, report_to=[]
    )
    return Trainer(small_model(data.name), args, train_dataset=rows, data_collator=collate)


@pytest.mark.promise("proof.pictures")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trainer_of_pictures_is_judged_and_one_of_swapped_pictures_is_not_sound(name, tmp_path):
    assert unpad.prove_trainer(trainer(Pictures(name), tmp_path)).passed
    assert unpad.prove_trainer(trainer(Pictures(name, swapped=True), tmp_path)).passed is False


def test_attach_refuses_pixels_and_a_prepared_model_too_until_they_are_asked_for(tmp_path):
    with pytest.raises(RecipeError, match="`pixel_values` of shape"):
        unpad.hf.attach(trainer(Pictures("Llava"), tmp_path))
    data = Pictures("Llava", "")
    model = unpad.hf.prepare(small_model("Llava")).model
    with pytest.raises(PlanError, match="pixels besides its tokens"):
        model(**data(data.sequences))
    unpad.hf.prepare(model, pictures=True)
    assert unpad.prove_callable(model, data, data.sequences).passed


def test_a_collator_that_makes_no_batch_of_one_sequence_is_refused():
    data = Pictures("Llava")

    def collate(sequences: list[list[int]]) -> dict[str, object]:
        return data(sequences * 2 if len(sequences) == 1 else sequences)

    with pytest.raises(ProofError, match="no batch of one sequence alone with its pixels"):
        unpad.prove_callable(small_model("Llava"), collate, data.sequences)
