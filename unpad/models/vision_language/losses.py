"""Losses of pruning of vision tokens: on the kept share, on what the answer depends on, and by an adversary that reads
the text of both passes.

Losses are (sum, count) over samples, as everywhere. `keep` is the probability of being kept by all heads together
(`prune.cumulative_keep`), since heads prune one after another; its gradient trains the heads.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.models.vision_language.prune import DiscriminatorConfig
from unpad.models.vision_language.prune_pass import BlockRecord
from unpad.models.vision_language.visual import Visual, cells, is_text
from unpad.nn.activation import activate
from unpad.nn.block import Between
from unpad.nn.draws import draw, dropout, normal
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms
from unpad.nn.precision import widened
from unpad.nn.segments import reduce_runs, segment_mean, segment_place, segment_sum

Term = tuple[Tensor, int]
EPS = 1e-12  # of a mean square

# --------------------------------------------------------------------------- the kept share


def sparsity(
    keep: Tensor, layout: Layout, target: float, unit: Literal["tokens", "ratio"], one_sided: bool = True
) -> Term:
    """Squared distance of each sample's kept share from the target, (share - target)^2.

    Args:
        keep: (num_vision,).
        target: tokens to keep per sample, all tokens of a sample with fewer; or the share to keep.
        one_sided: keeping less than the target costs nothing.
    """
    mean = segment_mean(keep, layout)
    tokens = layout.lengths().clamp_min(1).to(mean.dtype) if unit == "tokens" else torch.ones_like(mean)
    gap = mean - (target / tokens).clamp_max(1)
    gap = gap.clamp_min(0) if one_sided else gap
    return _sum(gap.square(), layout)


def token_count(keep: Tensor, layout: Layout) -> Term:
    """Kept share of each sample; keep (num_vision,)."""
    return _sum(segment_mean(keep, layout), layout)


def binarisation(keep: Tensor, layout: Layout) -> Term:
    """mean(m (1 - m)) - var(m) / 2 over the tokens of each sample: lowest where every m is 0 or 1.

    The variance is taken over the sample's own tokens, around their own mean.

    Args:
        keep: (num_vision,).
    """
    keep = widened(keep)
    mean = segment_mean(keep, layout)
    spread = (keep - mean.index_select(0, layout.seq_of_token())).square()
    return _sum(segment_mean(keep * (1 - keep), layout) - segment_mean(spread, layout) / 2, layout)


def keep_terms(keep: Tensor, layout: Layout, target: float, unit: Literal["tokens", "ratio"], one_sided: bool) -> Terms:
    """The three terms of the kept share, by their names in recipes; arguments as in `sparsity`."""
    return {
        "sparsity": sparsity(keep, layout, target, unit, one_sided),
        "token_count": token_count(keep, layout),
        "binarisation": binarisation(keep, layout),
    }


# --------------------------------------------------------------------------- what the loss depends on


def relevance(found: Tensor, logits: Tensor, layout: Layout) -> Term:
    """Cross entropy of what a head expects the loss of every sample to depend on, with what it does depend on.

    The latter is the derivative of the loss by the token's weight, as in the first-order importance of channels of
    Molchanov et al. 2019 (arXiv 1906.10771), at weights that vary from step to step, as along the paths of integrated
    gradients (Sundararajan et al. 2017, arXiv 1703.01365). A sample whose loss falls with no token costs nothing.

    Args:
        found: (num_vision,) how much the loss falls as the token's weight grows, without gradient; below 0 counts as 0.
        logits: (num_vision,) of the head; it expects shares as of their softmax over the sample's tokens.
    """
    seqs, lengths, found = layout.seq_of_token(), layout.lengths(), found.clamp_min(0)
    total = segment_sum(found, layout)
    wanted = found / torch.where(total > 0, total, 1).index_select(0, seqs)
    shifted = logits - reduce_runs(logits.detach(), "max", lengths).index_select(0, seqs)
    log_sum = segment_sum(shifted.exp(), layout).clamp_min(1).log()  # >= 1 of any token
    expected = shifted - log_sum.index_select(0, seqs)
    return _sum(-segment_sum(wanted * expected, layout), layout)


def _sum(per_sample: Tensor, layout: Layout) -> Term:
    """Sum over the samples with vision tokens, and their number."""
    present = layout.lengths() > 0
    return torch.where(present, per_sample, 0).sum(), int(present.sum())


# --------------------------------------------------------------------------- pooled text


FIRST, LAST = 0.3, 1.0  # weights of the first and of the last token of a text
FIRST_NOISE, LAST_NOISE = 0.05, 0.01  # deviations of the noise there


class TextPool(nn.Module):
    """Mean of the text tokens of each sample, with weights that rise towards its end.

    Training adds Gaussian noise, eval none. Weights and the noise's deviation change linearly from the sample's first
    token to its last.
    """

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Pool (num_text, width) into (num_seqs, width), fp32 or wider; zeros for a sample without text."""
        hidden = widened(hidden)
        last = (layout.lengths() - 1).clamp_min(1).index_select(0, layout.seq_of_token())
        way = segment_place(layout).to(hidden.dtype) / last  # 0 at the first token, 1 at the last
        if self.training:
            deviation = FIRST_NOISE + (LAST_NOISE - FIRST_NOISE) * way
            hidden = hidden + deviation[:, None] * normal(hidden, layout.places)
        weight = FIRST + (LAST - FIRST) * way
        total = segment_sum(weight, layout)
        return segment_sum(weight[:, None] * hidden, layout) / torch.where(total > 0, total, 1)[:, None]


# --------------------------------------------------------------------------- the adversary


class Discriminator(nn.Module):
    """Classifier of pooled hidden states: real from the whole model, fake from the pruned one.

    Each layer's vector h becomes z + Linear(z) with z = dropout(gelu(Linear(tanh(h / rms(h))))); two hidden layers map
    the concatenated vectors of all layers to one logit, positive for real.

    Args:
        width: channels of hidden states.
        layers: hidden states per sample.
        inner: channels inside.
        dropout: share of z that training sets to zero.
    """

    def __init__(self, width: int, layers: int = 3, inner: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.squeeze = nn.ModuleList(Linear(width, inner) for _ in range(layers))
        self.refine = nn.ModuleList(Linear(inner, inner) for _ in range(layers))
        self.hidden_1, self.hidden_2 = Linear(layers * inner, inner), Linear(inner, inner)
        self.to_logit = Linear(inner, 1)
        self.reinitialise()

    def reinitialise(self) -> None:
        """Reinitialize all weights; the caller resets their optimizer state."""
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, pooled: Tensor, places: Tensor | None = None) -> Tensor:
        """Judge (num_seqs, layers, width), as `TextPool` makes them: (num_seqs,) logits, fp32 or wider.

        Args:
            places: (num_seqs,) of the samples in draws, as `Layout.bases`.
        """
        parts = []
        for h, squeeze, refine in zip(pooled.unbind(1), self.squeeze, self.refine, strict=True):
            unit = h * (h.square().mean(-1, keepdim=True) + EPS).rsqrt()
            z = activate("gelu", squeeze(torch.tanh(unit)))
            if self.training and self.dropout:
                z = dropout(z, self.dropout, draw(), places)
            parts.append(z + refine(z))
        x = activate("gelu", self.hidden_1(torch.cat(parts, 1)))
        return widened(self.to_logit(activate("gelu", self.hidden_2(x)))[:, 0])


def discriminator_terms(
    discriminator: Discriminator, real: Tensor, fake: Tensor, places: Tensor | None = None
) -> Terms:
    """Terms that train the discriminator alone: `discriminator`, BCE(D(real), 1) + BCE(D(fake), 0).

    `real_accuracy` and `fake_accuracy` count the samples of each kind that it classified correctly.

    Args:
        real, fake: (num_seqs, layers, width), the same samples pooled in the same way; no gradient flows to them.
        places: as of `Discriminator.forward`.
    """
    on_real, on_fake = (discriminator(x.detach(), places) for x in (real, fake))
    num = len(on_real)
    return {
        "discriminator": (_bce(on_real, 1) + _bce(on_fake, 0), num),
        "real_accuracy": ((on_real.detach() > 0).sum(), num),
        "fake_accuracy": ((on_fake.detach() <= 0).sum(), num),
    }


def adversarial(discriminator: Discriminator, fake: Tensor, places: Tensor | None = None) -> Term:
    """Term that trains the source of `fake` (num_seqs, layers, width) to pass for real, BCE(D(fake), 1).

    Gradient flows to `fake` and not to the discriminator: one backward pass of this term and `discriminator_terms`
    gives each side only its own gradients.
    """
    frozen = {name: parameter.detach() for name, parameter in discriminator.named_parameters()}
    return _bce(functional_call(discriminator, frozen, (fake, places)), 1), len(fake)


def _bce(logits: Tensor, label: int) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label), reduction="sum")


TERMS = ("adversarial", "discriminator")  # terms that train
ACCURACIES = ("real_accuracy", "fake_accuracy")  # terms that are only reported


class Adversary(nn.Module):
    """A discriminator of pooled text, and the selection of its inputs.

    Args:
        config: blocks that it compares.
        width: channels of hidden states.
        blocks: of the language model.
    """

    def __init__(self, config: DiscriminatorConfig, width: int, blocks: int) -> None:
        super().__init__()
        self.reinit, self.layers = config.reinit, sorted({layer % blocks for layer in config.layers})
        self.judge, self.pool = Discriminator(width, len(self.layers), config.inner), TextPool()

    def begin_step(self) -> list[nn.Parameter]:
        """Reinitialize the weights if due; return the reinitialized parameters."""
        if self.reinit == 0 or float(torch.rand(())) >= self.reinit:
            return []
        self.judge.reinitialise()
        return list(self.judge.parameters())

    def watch(self, batch: RaggedBatch, visual: Visual, inner: Between | None = None) -> BlockRecord:
        """Record the text's states of a pass over this batch at the blocks that the discriminator compares."""
        return BlockRecord(self.layers, is_text(batch, visual.index).nonzero().flatten(), inner)

    def terms(self, batch: RaggedBatch, visual: Visual, real: BlockRecord, fake: BlockRecord) -> Terms:
        """`discriminator`, `adversarial` and the accuracies, over the samples with visual tokens.

        Args:
            batch, visual: of the whole pass.
            real, fake: records of the whole pass, without gradient, and of the pruned pass.
        """
        rows = cells(batch.layout)
        layout = rows.keep(is_text(batch, visual.index))
        seqs = rows.seq_of_token()[visual.index].unique()

        def pooled(seen: BlockRecord) -> Tensor:
            return torch.stack([self.pool(states, layout) for states in seen.states], 1).index_select(0, seqs)

        of_whole, of_pruned = pooled(real), pooled(fake)  # (num_samples, layers, width)
        places = None if layout.bases is None else layout.bases.index_select(0, seqs)
        judged = discriminator_terms(self.judge, of_whole, of_pruned, places)
        return {**judged, "adversarial": adversarial(self.judge, of_pruned, places)}
