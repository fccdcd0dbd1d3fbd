"""Checks of a trainer before it trains on flat batches: of its settings, and of its model by the proof."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer

from unpad.errors import ProofError, RecipeError
from unpad.hf.loader import IGNORED, Examples, collate
from unpad.hf.prepare import Prepared
from unpad.proof.foreign.certificate import ForeignCertificate
from unpad.proof.foreign.pairs import prove_callable

TRIED = 512  # examples that the sequences of the proof are taken from
SEQUENCES, LONGEST = 5, 1024  # of the proof; one that exceeds a window may be longer
RANDOM = (9, 17, 6)  # lengths of random sequences, where the data has too few


def refuse(trainer: Trainer) -> None:
    """Refuse settings that flat batches of our plan contradict.

    Raises:
        RecipeError: several devices in a process, rows without boundaries, or a sampling strategy.
    """
    args = trainer.args
    if args.n_gpu > 1:
        raise RecipeError(
            f"flat batches are trained on one device, and this process sees {args.n_gpu}",
            fix="start one process for each by torchrun, or set CUDA_VISIBLE_DEVICES to one of them",
        )
    if args.train_sampling_strategy != "random":
        raise RecipeError(
            f"train_sampling_strategy is {args.train_sampling_strategy}, and the plan chooses the order",
            fix="leave train_sampling_strategy out",
        )
    if is_sft(trainer):
        settings = args.to_dict()
        if (settings["packing"] or settings["eval_packing"]) and settings["packing_strategy"] == "wrapped":
            raise RecipeError(
                "packing_strategy is wrapped: rows do not say where sequences begin", fix="set packing=False"
            )


def stop_packing(trainer: Trainer) -> None:
    """Tell SFTTrainer that its rows are not packed any more, so that it packs no later evaluation set either."""
    if is_sft(trainer):
        trainer.args.packing, trainer.args.eval_packing = False, None


def warn_of_cuts(trainer: Trainer, examples: Examples) -> None:
    """Warn of examples as long as SFTTrainer's `max_length`, which cuts longer ones when it reads the data."""
    limit = trainer.args.to_dict()["max_length"] if is_sft(trainer) else None
    num_at_limit = int((examples.lengths == limit).sum()) if limit else 0
    if num_at_limit:
        warnings.warn(
            f"{num_at_limit} examples have exactly max_length={limit} tokens: SFTTrainer cuts longer ones. Set "
            "SFTConfig(max_length=None) to train on whole examples",
            stacklevel=3,
        )


def is_sft(trainer: Trainer) -> bool:
    """True for TRL's SFTTrainer; TRL is not imported for it."""
    module = sys.modules.get("trl.trainer.sft_trainer")
    return module is not None and isinstance(trainer, module.SFTTrainer)


def has_standard_loss(trainer: Trainer) -> bool:
    """True if the trainer's loss is the mean cross-entropy over targets that Trainer or SFTTrainer compute."""
    module = sys.modules.get("trl.trainer.sft_trainer")
    standard = {Trainer.compute_loss, *([module.SFTTrainer.compute_loss] if module is not None else [])}
    return type(trainer).compute_loss in standard and trainer.compute_loss_func is None and not trainer.label_smoother


def divide_by_targets(trainer: Trainer) -> None:
    """Let every micro-batch's loss be its sum over the targets of the whole step, also where the model cannot.

    Models whose `forward` takes no `num_items_in_batch` return a mean per micro-batch, and the mean of such means
    weighs targets of small micro-batches more. The same is true of means per rank.
    """
    trainer.args.average_tokens_across_devices = trainer.args.world_size > 1
    if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
        return
    if is_sft(trainer):  # it computes the loss itself, and only has to be told the number
        trainer.model_accepts_loss_kwargs = True
    else:
        trainer.compute_loss_func = mean_over_targets


def mean_over_targets(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Sum of the cross-entropy over the targets of a batch, divided by the number of those of the step."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    following = labels[:, 1:].flatten()
    total = F.cross_entropy(wide, following, ignore_index=IGNORED, reduction="sum")
    return total / ((following != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


# --------------------------------------------------------------------------- proof


def certify(prepared: Prepared, rows: Sequence[Mapping[str, Tensor]]) -> ForeignCertificate:
    """Prove that sequences in one flat batch are, to a model, what they are one at a time.

    Raises:
        ProofError: they are not.
    """
    sequences = [row["input_ids"].tolist() for row in rows]
    masks = [(row["labels"] != IGNORED).tolist() for row in rows]

    def flat(sequences: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> dict[str, Any]:
        labels = [
            [token if kept else IGNORED for token, kept in zip(ids, mask, strict=True)]
            for ids, mask in zip(sequences, masks, strict=True)
        ]
        return collate([{"input_ids": ids, "labels": own} for ids, own in zip(sequences, labels, strict=True)])

    certificate = prove_callable(prepared.model, flat, sequences, loss_masks=masks, precision="fp32")
    if not certificate.passed:
        reasons = [f"{one.claim} ({one.measured:.2g}, at most {one.bound:.0e})" for one in certificate.failed]
        reason = certificate.refused or "; ".join(reasons)
        raise ProofError(
            f"{type(prepared.inner).__name__} in a flat batch is not itself on one sequence at a time: {reason}",
            fix="train it on batches padded on the right, as the trainer does by itself",
        )
    return certificate


def sample(examples: Examples, prepared: Prepared) -> list[dict[str, Tensor]]:
    """Different sequences for the proof, of the data, or random ones where it has too few.

    Some are of ordinary length; one is longer than the model's sliding window, if there is such.
    """
    usable = np.flatnonzero(examples.targets > 0)
    tried = np.random.default_rng(0).permutation(usable)[:TRIED]
    short = tried[examples.lengths[tried] <= LONGEST]
    ordered = short[np.argsort(examples.lengths[short], kind="stable")]
    chosen = ordered[np.linspace(0, len(ordered) - 1, SEQUENCES).round().astype(int)].tolist() if len(ordered) else []
    window = prepared.inner.config.get_text_config().to_dict().get("sliding_window")
    if isinstance(window, int) and len(beyond := usable[examples.lengths[usable] > window]):
        chosen.append(int(beyond[np.argmin(examples.lengths[beyond])]))
    rows = {tuple(row["input_ids"].tolist()): row for row in (examples[index] for index in chosen)}
    if len(rows) >= 2:
        return list(rows.values())
    vocab = prepared.inner.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab, (length,), generator=generator) for length in RANDOM]
    return [{"input_ids": one, "labels": torch.cat([one.new_tensor([IGNORED]), one[1:]])} for one in ids]
