"""Losses of a trainer's own: which token each position is taught to predict."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unpad
from tests.proof.foreign.hugging_face import IGNORE, build, dataset, pad, quiet, sequences, trainer
from tests.proof.foreign.losses import Loss, logits_of, nll, own, shifted
from tests.proof.foreign.truth import alone, distance, first_update
from unpad.proof.foreign.judge import OWN_LOSS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and TRL
quiet()


def unshifted(model, inputs, num):
    return nll(logits_of(model, inputs), inputs["labels"]).sum() / num


def twice(model, inputs, num):
    return nll(logits_of(model, inputs)[:, :-2], inputs["labels"][:, 2:]).sum() / num


def of_inputs(model, inputs, num):
    """Targets are the input itself; labels only say which count."""
    ids = inputs["input_ids"].masked_fill(inputs["labels"] == IGNORE, IGNORE)
    return nll(logits_of(model, inputs), ids).sum() / num


def backwards(model, inputs, num):
    return nll(logits_of(model, inputs)[:, 1:], inputs["labels"][:, :-1]).sum() / num


def teacher_of(model: nn.Module) -> nn.Module:
    """A random model that predicts each token again, as tied embeddings do."""
    made = nn.Sequential(nn.Embedding(99, 99))
    with torch.no_grad():
        made[0].weight.copy_(6 * torch.eye(99) + torch.randn(99, 99, generator=torch.Generator().manual_seed(0)))
    return made.to(next(model.parameters()).dtype)


def copied(model, inputs, num):
    """Half the next token, and twice a teacher that repeats."""
    each, logits, targets = shifted(model, inputs)
    wanted = teacher_of(model)(inputs["input_ids"])[:, :-1].softmax(-1).detach()
    apart = F.kl_div(logits.log_softmax(-1), wanted, reduction="none").sum(-1)
    return (0.5 * each + 2 * apart * (targets != IGNORE)).sum() / num


def focal(model, inputs, num):
    each, _, _ = shifted(model, inputs)
    return ((1 - (-each).exp()) ** 2 * each).sum() / num


def smoothed(model, inputs, num):
    return shifted(model, inputs, label_smoothing=0.3)[0].sum() / num


def weighted(model, inputs, num):
    each, _, _ = shifted(model, inputs)
    return (each * (1 + torch.arange(each.shape[1]) / 5)).sum() / num


def dft(model, inputs, num):
    each, _, _ = shifted(model, inputs)
    return (each * (-each).exp().detach()).sum() / num


def with_z(model, inputs, num):
    each, logits, targets = shifted(model, inputs)
    return (each + (logits.logsumexp(-1) ** 2 + logits[..., 0]) * (targets != IGNORE)).sum() / num


def contrastive(model, inputs, num):
    """Similar positions are pushed apart."""
    each, logits, targets = shifted(model, inputs)
    near = F.cosine_similarity(logits[:, 1:], logits[:, :-1], dim=-1)
    return (each.sum() + (near * (targets[:, 1:] != IGNORE) * (targets[:, :-1] != IGNORE)).sum()) / num


def unlikelihood(model, inputs, num):
    """The token itself is made less likely."""
    each, logits, targets = shifted(model, inputs)
    again = logits.softmax(-1).gather(-1, inputs["input_ids"][:, :-1, None])[..., 0]
    return (each - 2 * (1 - again).log() * (targets != IGNORE)).sum() / num


def masked_further(model, inputs, num):
    each, _, targets = shifted(model, inputs)
    return (each * (targets % 2 == 0)).sum() / num


def shifted_of_inputs(model, inputs, num):
    ids = inputs["input_ids"].masked_fill(inputs["labels"] == IGNORE, IGNORE)
    return 0.7 * nll(logits_of(model, inputs)[:, :-1], ids[:, 1:]).sum() / num


def hardest(model, inputs, num):
    """Only targets with a high loss, of every sequence alone."""
    each, _, _ = shifted(model, inputs)
    return torch.where(each > each.mean(1, keepdim=True).detach() * 0, each, 0).sum() * 1.5 / num


FAULTS: dict[str, tuple[Loss, str]] = {
    "the token itself": (unshifted, "the loss takes each token for its own target: shift the labels"),
    "shifted twice": (twice, "the loss learns a label without the token before it: are the labels shifted twice?"),
    "the token before": (backwards, "the loss takes each token for its own target"),
}


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_loss_that_takes_other_targets_is_found_and_named(name: str, prompts: bool, tmp_path: Path) -> None:
    loss, sentence = FAULTS[name]
    rows = dataset(sequences(4), prompts=prompts)
    certificate = unpad.prove_trainer(trainer(build("llama"), tmp_path, rows, kind=own(loss)))
    assert certificate.verdict == "wrong loss", str(certificate)
    assert certificate.finding("targets").advice.startswith(sentence)
    found = first_update(trainer(build("llama"), tmp_path, rows, kind=own(loss)))
    assert distance(found, alone(build("llama"), rows["input_ids"], rows["labels"])) > 0.5


RIGHT: dict[str, Loss] = {
    "focal": focal,
    "smoothed": smoothed,
    "weights by place": weighted,
    "DFT": dft,
    "z-loss": with_z,
    "contrastive": contrastive,
    "unlikelihood": unlikelihood,
    "further masks": masked_further,
    "a teacher that repeats": copied,
    "the hardest targets": hardest,
}
REPEATING = [[*([one[0]] * 3), *one[1:], one[-1], one[-1]] for one in sequences()]


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_of_ones_own_that_takes_the_next_token_is_sound(name: str, repeats: bool, tmp_path: Path) -> None:
    rows = dataset(REPEATING if repeats else sequences())
    certificate = unpad.prove_trainer(trainer(build("llama"), tmp_path, rows, kind=own(RIGHT[name])))
    assert certificate.verdict == "sound", str(certificate)
    assert OWN_LOSS in certificate.notes


@pytest.mark.parametrize("loss", [of_inputs, shifted_of_inputs])
def test_a_loss_that_reads_its_targets_from_the_inputs_is_not_judged(loss: Loss, tmp_path: Path) -> None:
    certificate = unpad.prove_trainer(trainer(build("llama"), tmp_path, kind=own(loss)))
    assert certificate.verdict == "not proven", str(certificate)
    assert "reads its targets from input_ids" in certificate.finding("targets").gap


def test_a_model_that_does_not_shift_is_found_under_a_trainer_of_transformers(tmp_path: Path) -> None:
    """Bart's loss takes labels that are shifted already."""
    model = build("llama")

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | None = None, **_: object):
        return nll(logits, labels).sum() / (
            (labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        )

    model.loss_function = loss
    certificate = unpad.prove_trainer(trainer(model, tmp_path))
    assert "takes each token for its own target" in certificate.finding("targets").advice
    one = unpad.prove_callable(model, lambda rows: pad()([{"input_ids": row} for row in rows]), sequences())
    assert "takes each token for its own target" in one.finding("targets").advice


def test_a_mean_of_means_that_weighs_sequences_alike_is_told_so(tmp_path: Path) -> None:
    made = trainer(build("llama"), tmp_path, per_device_train_batch_size=1)
    made.model_accepts_loss_kwargs = False
    certificate = unpad.prove_trainer(made)
    assert certificate.verdict == "wrong loss"
    assert certificate.finding("loss").advice.startswith("the loss weighs sequences alike and not their targets")
