"""Models other than causal language models, and trainers with other objectives than the next token, by class name.

Classes are recognised by their names and those of their bases, so that neither transformers nor TRL is imported.
"""

import sys
from dataclasses import dataclass, replace

from torch import nn

from unpad.proof.foreign.model import base_of, config_of

HEADS = (  # ends of the names of classes with a head of another kind
    *("ForMaskedLM", "ForPreTraining", "ForTokenClassification", "ForSequenceClassification", "ForQuestionAnswering"),
    *("ForMultipleChoice", "ForNextSentencePrediction"),
)
OTHER_TASK = "is no causal language model: it predicts something else than the next token"
CAUSAL_FIX = "use a causal language model, as AutoModelForCausalLM makes it"

NOT_TRAINED = "KL_completion_ids"  # column of rows that are computed and not trained on
INPUTS = (("chosen_input_ids",), ("rejected_input_ids",))
# Trainers of TRL that are judged by their rows: the columns that the tokens of a row stand in.
ROWS: dict[str, tuple[tuple[str, ...], ...]] = {
    "DPOTrainer": (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")),
    "RewardTrainer": (("chosen_ids",), ("rejected_ids",)),
    "KTOTrainer": (("prompt_ids", "completion_ids"), ("prompt_ids", NOT_TRAINED)),
    "ORPOTrainer": INPUTS,
    "CPOTrainer": INPUTS,
}
TOKENS = ("SFTTrainer", "_BaseTrainer")  # trainers of TRL that train on the next token, or leave it open
TRAINER_FIX = "try unpad.hf.without_padding(trainer), which proves a step; unpad.prove_callable judges its model"


@dataclass(frozen=True)
class Reason:
    """Reason why something is not judged: one sentence that begins with its name, and a fix."""

    what: str
    fix: str


def no_causal_model(model: nn.Module) -> Reason | None:
    """The reason why a model is not a causal language model; None if there is none.

    Adapters and compilation are looked through.
    """
    inner = _uncompiled(base_of(_uncompiled(model)))
    in_two_parts = getattr(config_of(inner), "is_encoder_decoder", None) is True
    for kind in type(inner).__mro__:  # a class of a user's own has the name of its base
        reason = no_causal_name(kind.__name__, in_two_parts=False)
        if reason is not None:
            return replace(reason, what=reason.what.replace(kind.__name__, type(inner).__name__, 1))
    return no_causal_name(type(inner).__name__, in_two_parts=in_two_parts)


def no_causal_name(name: str, *, in_two_parts: bool, is_encoder: bool = False) -> Reason | None:
    """The reason why a class is not a causal language model, by its name.

    Args:
        in_two_parts: whether its configuration says that it has an encoder and a decoder.
        is_encoder: whether models of its kind are encoders, unless they have a head of another kind.
    """
    if name.endswith(("ForCausalLM", "LMHeadModel", "Decoder")):
        return None
    is_other = name.endswith(HEADS) or in_two_parts or (is_encoder and name.endswith("Model"))
    return Reason(f"{name} {OTHER_TASK}", CAUSAL_FIX) if is_other else None


def _uncompiled(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _is_of_trl(kind: type) -> bool:
    """True for a class defined in a module of TRL; a class derived at run time may only name that module."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__.partition(".")[0] == "trl" and getattr(module, kind.__name__, None) is kind


def _of_trl(trainer: object) -> type | None:
    return next((kind for kind in type(trainer).__mro__ if _is_of_trl(kind)), None)


def columns_of_rows(trainer: object) -> tuple[tuple[str, ...], ...]:
    """The columns of the rows of a trainer of pairs that is judged; empty for others."""
    ours = _of_trl(trainer)
    return ROWS.get(ours.__name__, ()) if ours else ()


def no_trainer_of_tokens(trainer: object) -> Reason | None:
    """The reason why a trainer does not train on the next token; None if there is none.

    It is the trainer's class, its model or its collator.
    """
    ours = _of_trl(trainer)
    if ours is not None and ours.__name__ not in TOKENS:
        own = "" if type(trainer) is ours else f"{type(trainer).__name__} is a "
        generates = ours.__name__ in ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer")
        why = "generates the rows of a step" if generates else "has an objective that is not the next token"
        return Reason(f"{own}{ours.__name__} of TRL: it {why}, and is not judged", TRAINER_FIX)
    model, collator = getattr(trainer, "model", None), getattr(trainer, "data_collator", None)
    reason = no_causal_model(model) if isinstance(model, nn.Module) else None
    if reason is None and getattr(collator, "mlm", False):
        what = f"{type(collator).__name__} has mlm=True: it hides tokens, which a causal model cannot predict"
        return Reason(what, "set mlm=False")
    return reason
