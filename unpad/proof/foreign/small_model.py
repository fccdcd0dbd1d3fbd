"""Small random models of the architecture in a config.json: no weights are read, and no code of the folder runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unpad.errors import ProofError, RecipeError, SourceError, nearest
from unpad.proof.foreign.kinds import no_causal_name
from unpad.proof.foreign.lengths import row_limit
from unpad.proof.foreign.shrink import ORDINARY, Fields, shrink
from unpad.storage.reading import read_file
from unpad.storage.strict_json import strict_value

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LENGTHS = (5, 31, 12, 22, 8, 27, 17)  # of the sequences of the proof, in tokens
MOST_BYTES = 1 << 24  # of a config.json
MOST_LAYERS = 10_000
GAIN = 0.8  # standard deviation of a matrix's output for independent inputs of variance 1
BY_LENGTH = (
    "numbers depend on the length of the row above {:,} tokens ({}), here above 8; batches of rows below it "
    "are as sound as those of a model without"
)
OWN_CODE = "the folder's own code (auto_map) is not run; this is transformers' class"
TEXT_ALONE = "text alone is judged; for pictures and sounds call unpad.prove_callable or unpad.prove_trainer"


@dataclass(frozen=True)
class SmallModel:
    """A small random model.

    Args:
        whole: the configuration of the whole model; small: that of this one.
        attention: the implementation that it computes with.
        notes: differences from the folder, for the certificate.
    """

    model: PreTrainedModel
    whole: PreTrainedConfig
    attention: str
    notes: tuple[str, ...] = ()


def read_config(path: Path) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """Read a configuration of a causal language model, and notes about it.

    Args:
        path: a config.json, or a folder with one.

    Raises:
        SourceError: there is no such file, or it is not a configuration.
        RecipeError: the extra `hf` is not installed, or transformers has no causal model of that type.
    """
    causal = causal_types()
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        fix = "name a folder with a config.json, or the file"
        raise SourceError("there is no configuration here", where=str(file), fix=fix)
    fix = "name the config.json that `save_pretrained` wrote"
    data = read_file(file, SourceError, MOST_BYTES, fix)
    try:
        fields = _with_floats(strict_value(data, constant=float))
    except ValueError as error:
        raise SourceError(f"the file is not JSON: {error}", where=str(file), fix=fix) from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or not kind:
        fix = "name the config.json of a transformers model, not of its tokenizer or generation"
        raise SourceError("the file has no model_type", where=str(file), fix=fix)
    own_code = isinstance(fields.get("auto_map"), dict)
    _refuse_architectures(kind, fields, str(file))
    if kind not in causal:
        raise _not_causal(kind, own_code, causal, file)
    _refuse_sizes(fields, str(file))
    media = any(fields.get(name) for name in ("vision_config", "audio_config"))
    return build_config(kind, fields, str(file)), (OWN_CODE,) * own_code + (TEXT_ALONE,) * media


def _with_floats(value: Any) -> Any:
    """A value with the numbers that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if list(value) == ["__float__"]:
        return float(value["__float__"])
    return {name: _with_floats(one) for name, one in value.items()}


def _refuse_architectures(kind: str, fields: Fields, where: str) -> None:
    """Refuse a configuration with a class in `architectures` that is not a causal language model, by its name."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    given = fields.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in CONFIG_MAPPING or any(name in causal.values() for name in names):
        return
    in_two_parts = fields.get("is_encoder_decoder", getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False))
    is_encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not fields.get("is_decoder")
    for name in names:
        reason = no_causal_name(name, in_two_parts=in_two_parts is True, is_encoder=is_encoder)
        if reason is not None:
            raise RecipeError(f"the folder's model, {reason.what}", where=where, fix=reason.fix)


def _refuse_sizes(fields: Fields, where: str) -> None:
    """Refuse an implausible number of layers: transformers builds lists of them before the model is shrunk."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _refuse_sizes(value, where)
        elif "layer" in name and isinstance(value, int | float) and abs(value) > MOST_LAYERS:
            what = f"{name} is {str(value)[:20]}; at most {MOST_LAYERS:,} are read"
            raise SourceError(what, where=where, fix="correct the field")


def causal_types() -> list[str]:
    """Values of `model_type` for which the installed transformers has a causal language model.

    Raises:
        RecipeError: transformers is not installed.
    """
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        what = "unpad prove --hf needs transformers, which is not installed"
        raise RecipeError(what, fix="pip install 'unpad[hf]'") from None
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _not_causal(kind: str, own_code: bool, causal: list[str], file: Path) -> RecipeError:
    from transformers import CONFIG_MAPPING, __version__

    if own_code:
        what = f'transformers {__version__} has no causal model of type "{kind}"; its code is in the folder'
        fix = "code of a folder is never run here: load the model yourself and call unpad.prove_callable"
    elif kind in CONFIG_MAPPING:
        what = f'a model of type "{kind}" is no causal language model'
        fix = "prove causal language models; for others call unpad.prove_callable with your own model"
    else:
        what = f'transformers {__version__} knows no model_type "{kind}"'
        fix = f"update transformers, or correct the name: {nearest(kind, causal)}"
    return RecipeError(what, where=str(file), fix=fix)


def build_config(kind: str, fields: Fields, where: str) -> PreTrainedConfig:
    """The configuration of a type from its fields; those that are left out have the defaults of its class.

    Raises:
        SourceError: the class of the type refuses the fields.
    """
    from transformers import CONFIG_MAPPING

    given = {name: value for name, value in fields.items() if name not in ("auto_map", "quantization_config")}
    try:
        with quiet():
            made: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(given)
    except Exception as error:
        fix = "correct the field, or use the transformers version that wrote the file"
        raise SourceError(f"{kind} refuses the configuration: {message_of(error)}", where=where, fix=fix) from None
    return made


def build_small(whole: PreTrainedConfig, notes: tuple[str, ...] = (), seed: int = 0) -> SmallModel:
    """Build a small random model, in fp32 and in training mode, of the architecture of a configuration.

    Raises:
        ProofError: the architecture cannot be made small, or not on this machine.
    """
    from transformers import AutoModelForCausalLM

    kind = whole.model_type
    try:
        with quiet():
            small = type(whole).from_dict(shrink(whole.to_dict()))
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(small, trust_remote_code=False)
    except Exception as error:
        fix = "build a small model of this type yourself and call unpad.prove_callable with it"
        raise ProofError(f'a model of type "{kind}" cannot be made small: {message_of(error)}', fix=fix) from None
    model = model.float().train()
    _spread(model, seed)
    limit = row_limit(whole.get_text_config().to_dict())
    notes = (*notes, BY_LENGTH.format(*limit)) if limit else notes
    return SmallModel(model, whole, str(model.config._attn_implementation), notes)


def sample(seed: int = 0) -> list[list[int]]:
    """Sequences of ordinary ids, short and long ones in turn."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(ORDINARY.start, ORDINARY.stop, (sum(LENGTHS),), generator=generator)
    return [part.tolist() for part in drawn.split(LENGTHS)]


@torch.no_grad()
def _spread(model: PreTrainedModel, seed: int) -> None:
    """Scale the weights so that a difference in what a token sees changes its logits.

    Fresh weights are so small that attention averages and gates are constant; vectors are similar, and the embedding of
    padding is zero, unlike in any trained model that pads with the end token.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not name.endswith("A_log"):  # exponents
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                _scale(parameter, noise)
    embedding = model.get_input_embeddings().weight
    if isinstance(embedding, Tensor) and embedding.dim() == 2:
        embedding[0] = GAIN * embedding.shape[1] ** -0.5 * torch.randn(embedding.shape[1], generator=generator)


def _scale(matrix: Tensor, noise: Tensor) -> None:
    """Give a matrix, or a stack of matrices or filters, the deviation that keeps the size of what passes it."""
    inputs = matrix.shape[-1] * (matrix.shape[-2] if matrix.dim() > 2 and matrix.shape[-1] <= 8 else 1)
    goal = GAIN * inputs**-0.5
    now = float(matrix.std()) if matrix.numel() > 1 else 0.0
    matrix.copy_(noise * goal if now < 1e-6 else matrix * (goal / now))


def message_of(error: Exception) -> str:
    """The part of an exception's message that names the cause, on one line."""
    text = re.sub(r"^Class validation error for validator '\w+':\s*", "", str(error))
    text = " ".join(text.split())
    return (text if re.match(r"\w*(Error|Exception)\b", text) else f"{type(error).__name__}: {text}")[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep remarks of transformers, about fields of a configuration or kernels it lacks, off the terminal."""
    import warnings

    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
