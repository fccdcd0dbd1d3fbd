"""Loss of pairs of replies to one prompt, one chosen and one rejected.

Direct preference optimization, Rafailov et al. 2023, arXiv 2305.18290: a reply's implicit reward is `beta` times its
log-probability over that under the reference, which are the weights that training started from, and the loss is the
negative log-likelihood that the chosen reply has the larger reward (Bradley-Terry). As in `losses.py`, terms are sums
and counts, here over pairs.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch
from unpad.batching.fields import BatchPart, per_sequence
from unpad.nn.losses import Terms
from unpad.nn.segments import segment_sum

# Terms over tokens; the others are over pairs, and their margins are small differences of large sums.
PER_TOKEN = ("cross_entropy", "rejected")


@dataclass(frozen=True)
class Pairs(BatchPart):
    """Pairs of a batch; its sequences are their chosen and rejected replies.

    Args:
        pair: (num_seqs,) int64, number of each sequence's pair; -1 for filler.
        chosen: (num_seqs,) bool, True for the chosen reply of its pair.
        reference: (num_seqs,) float64, log-probability of the reply's targets under the reference, in nats.
    """

    pair: Tensor = field(metadata=per_sequence())
    chosen: Tensor = field(metadata=per_sequence())
    reference: Tensor = field(metadata=per_sequence())

    @property
    def bundle(self) -> Tensor:
        return self.pair

    def rows(self) -> tuple[Tensor, Tensor]:
        """The sequences of the chosen and of the rejected replies, pair by pair, (num_pairs,) int64 each."""
        chosen = (self.chosen & (self.pair >= 0)).nonzero().flatten()
        rejected = (~self.chosen & (self.pair >= 0)).nonzero().flatten()
        chosen, rejected = (rows[self.pair[rows].argsort(stable=True)] for rows in (chosen, rejected))
        assert torch.equal(self.pair[chosen], self.pair[rejected]), "a micro-batch holds both replies of a pair"
        return chosen, rejected


def count_pairs(batch: RaggedBatch) -> dict[str, int]:
    """The counts of `pair_terms`, from the batch alone."""
    part = batch.require(Pairs)
    num = int((part.chosen & (part.pair >= 0)).sum())
    num_chosen = int(segment_sum(batch.loss_mask.double(), batch.layout)[part.chosen].sum())
    pairs = dict.fromkeys(("preference", "nll", "accuracy", "margin"), num)
    return {**pairs, "cross_entropy": num_chosen, "rejected": batch.num_targets - num_chosen}


def pair_terms(nll: Tensor, batch: RaggedBatch, beta: float, label_smoothing: float) -> Terms:
    """Terms of the pairs of a batch, summed in double.

    `preference` trains; `nll` is the same without label smoothing; `accuracy` counts pairs with a larger reward
    for the chosen reply; `margin` is the difference. `cross_entropy` over the chosen replies' tokens has a gradient as
    well; `rejected`, the same over the rejected replies, has none.

    Args:
        nll: (num_targets,) negative log-likelihood of the batch's targets, in nats.
        beta: factor of the rewards.
        label_smoothing: probability that a pair is labelled the wrong way round (Mitchell 2023, conservative DPO).
    """
    part, counts = batch.require(Pairs), count_pairs(batch)
    log_p = -segment_sum(
        nll.new_zeros(batch.total_tokens, dtype=torch.float64).index_copy(0, batch.target_index, nll.double()),
        batch.layout,
    )  # (num_seqs,)
    chosen, rejected = part.rows()
    reward = beta * (log_p - part.reference)
    margin = reward[chosen] - reward[rejected]  # (num_pairs,)
    plain, turned = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    sums = {
        "preference": ((1 - label_smoothing) * plain + label_smoothing * turned).sum(),
        "nll": plain.sum().detach(),
        "accuracy": (margin > 0).double().sum(),
        "margin": margin.sum().detach(),
        "cross_entropy": -log_p[chosen].sum(),
        "rejected": -log_p[rejected].sum().detach(),
    }
    return {name: (total, counts[name]) for name, total in sums.items()}
