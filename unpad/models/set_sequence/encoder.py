"""From the events of a set to a Gaussian that stands for it, whatever the number and the order of the events.

Events are embedded from their code and their value. Blocks of attention through inducing points (Lee et al. 2019, arXiv
1810.00825, section 3.1) let the events of a set look at each other at a cost that is linear in their number. After
every block the events of a set are pooled into a latent: a mean and a logarithm of a variance per dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.layout import Layout
from unpad.errors import RecipeError
from unpad.nn.activation import activate
from unpad.nn.block import BlockConfig, FeedForward
from unpad.nn.cross_attention import CrossAttention, PairGroup, Pairs, pair_sequences
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.pool import AttentionPool
from unpad.nn.segments import widened

# In standard deviations; closest together where most values lie.
KNOTS = (-4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
LOG_VAR_LIMIT = 8.0  # what the logarithm of a variance approaches and never passes, on both sides
FIRST_LOG_VAR = -2.0  # where training starts: noise that leaves the decoder something to learn from


# --------------------------------------------------------------------------- one event


def value_features(values: Tensor) -> Tensor:
    """What a network sees of a standardised value: asinh, which grows like a logarithm, so that no outlier drowns the
    others; and how much of every step between two knots the value has climbed, 0 to 1 (the piecewise-linear encoding of
    Gorishniy et al. 2022, arXiv 2203.05556, with fixed knots).

    Args:
        values: (num_events,) in standard deviations.

    Returns:
        (num_events, len(KNOTS)), of the same dtype.
    """
    knots = values.new_tensor(KNOTS)
    climbed = ((values[:, None] - knots[:-1]) / knots.diff()).clamp(0, 1)
    return torch.cat([values.asinh()[:, None], climbed], 1)


class EventEmbedding(nn.Module):
    """An event's code, and what its value adds to it.

    code + MLP([code, features of the value]) where there is a value, the code alone where there is none: an average
    value, no value, and a raw value of zero are three different things.

    Args:
        num_codes: rows of the table of codes.
        width: channels of an event.
        vector_size: length of the vectors that codes come with, such as embeddings of their names; None learns a table.
    """

    def __init__(self, num_codes: int, width: int, vector_size: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(num_codes, width) if vector_size is None else None
        self.from_vector = None if vector_size is None else Linear(vector_size, width)
        self.code_vectors: Tensor | None
        self.register_buffer("code_vectors", None if vector_size is None else torch.zeros(num_codes, vector_size))
        self.value_in = Linear(width + len(KNOTS), width)
        self.value_out = Linear(width, width)

    def load_code_vectors(self, vectors: Tensor) -> None:
        """Take over the vectors of all codes, (num_codes, vector_size), each scaled to length 1.

        Raises:
            RecipeError: the model was not built for vectors of this length.
        """
        expected = None if self.code_vectors is None else self.code_vectors.shape[1]
        if self.code_vectors is None or vectors.shape[1] != expected:
            raise RecipeError(
                f"codes come with vectors of {vectors.shape[1]} numbers, and the model expects {expected or 'none'}",
                where="model.code_vectors",
                fix=f"set model.code_vectors={vectors.shape[1]}, or leave out events.code_embeddings",
            )
        self.code_vectors.copy_(F.normalize(vectors.to(self.code_vectors), dim=1))

    def reset(self) -> None:
        """Embeddings of length about 1, to which a value of one standard deviation adds as much."""
        if self.table is not None:
            nn.init.normal_(self.table.weight, std=self.table.embedding_dim**-0.5)
        if self.from_vector is not None:
            nn.init.normal_(self.from_vector.weight, std=self.from_vector.out_features**-0.5)
        for linear in (self.value_in, self.value_out):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, codes: Tensor, values: Tensor, has_value: Tensor) -> Tensor:
        """Embed events.

        Args:
            codes: (num_events,) int64.
            values: (num_events,) in standard deviations; what stands where there is none does not matter.
            has_value: (num_events,) bool.

        Returns:
            (num_events, width) in the dtype of the weights.
        """
        dtype = self.value_in.weight.dtype
        if self.table is not None:
            code = self.table(codes)
        else:
            assert self.from_vector is not None, "codes come from a table or from vectors"
            assert self.code_vectors is not None, "codes come from a table or from vectors"
            code = self.from_vector(self.code_vectors.index_select(0, codes)).to(dtype)
        told = self.value_in(torch.cat([code, value_features(values.to(dtype))], 1))
        told = self.value_out(activate("gelu", told)).to(dtype)
        return torch.where(has_value[:, None], code + told, code)


# --------------------------------------------------------------------------- the events of a set


@dataclass(frozen=True)
class SetPairs:
    """Which events and which inducing points belong together.

    Args:
        points: (num_points,) int64, which inducing point each one is; a set of n events has the first n at most, since
            more points than events have nothing more to say.
        gather: points as queries, events as keys.
        spread: events as queries, points as keys.
    """

    points: Tensor
    gather: Pairs
    spread: Pairs


def pair_members(members: Layout, num_points: int) -> SetPairs:
    """Pair the events of every set with its inducing points; boundaries are read from the device once.

    Args:
        members: the events of every set.
        num_points: inducing points of a set, at most.
    """
    counts = members.lengths().clamp_max(num_points)
    bounds = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    gather = pair_sequences(Layout(bounds, min(num_points, members.max_seqlen)), members)
    first = torch.repeat_interleave(bounds[:-1].long(), counts, output_size=gather.num_queries)
    points = torch.arange(gather.num_queries, device=first.device) - first
    swapped = tuple(PairGroup(group.keys, group.queries) for group in gather.groups)
    return SetPairs(points, gather, Pairs(swapped, gather.num_keys, gather.num_queries))


class InducedBlock(nn.Module):
    """Attention of every set to itself through inducing points.

    The points gather from the events, then the events from the points. Both are residual, q + attention and then
    a + feed-forward, with norms before the branches as in `nn/block.Block`.

    Args:
        config: sizes; dropout is on what branches add, attention_dropout on attention weights.
        num_points: inducing points of a set.
    """

    def __init__(self, config: BlockConfig, num_points: int) -> None:
        super().__init__()

        def norm(dropout: float = config.dropout) -> Norm:
            return Norm(config.norm, config.width, config.eps, dropout)

        self.points = nn.Parameter(torch.empty(num_points, config.width))
        self.reset()
        self.norm_events, self.norm_points = norm(), norm(0.0)
        self.gather = CrossAttention(config.width, config.heads, config.attention_dropout)
        self.norm_gathered, self.feed_points, self.norm_summary = norm(), FeedForward(config), norm()
        self.spread = CrossAttention(config.width, config.heads, config.attention_dropout)
        self.norm_spread, self.feed_events = norm(), FeedForward(config)

    def reset(self) -> None:
        """Points about as long as embeddings of events."""
        nn.init.normal_(self.points, std=self.points.shape[1] ** -0.5)

    def forward(self, x: Tensor, delta: Tensor | None, pairs: SetPairs) -> tuple[Tensor, Tensor]:
        """One block's step along the residual stream of events, (num_events, width); as `nn/block.Block.forward`."""
        x, events = self.norm_events(x, delta)
        _, queries = self.norm_points(self.points)
        points = self.points.index_select(0, pairs.points)  # (num_points, width)
        gathered, _ = self.gather(queries.index_select(0, pairs.points), events, pairs.gather)
        points, y = self.norm_gathered(points, gathered)
        _, summary = self.norm_summary(points, self.feed_points(y))
        spread, _ = self.spread(events, summary, pairs.spread)
        x, y = self.norm_spread(x, spread)
        return x, self.feed_events(y)


# --------------------------------------------------------------------------- latents


@dataclass(frozen=True)
class Latent:
    """A diagonal Gaussian for every set, and one draw of it.

    Args:
        mean, log_var: (num_sets, latent), fp32 or wider.
        z: (num_sets, latent), mean + sigma * eps in training, the mean in eval.
    """

    mean: Tensor
    log_var: Tensor
    z: Tensor


def soft_clamp(log_var: Tensor) -> Tensor:
    """Keep logarithms of variances within +-LOG_VAR_LIMIT without ever stopping the gradient."""
    return LOG_VAR_LIMIT * torch.tanh(log_var / LOG_VAR_LIMIT)


def draw_latents(mean: Tensor, log_var: Tensor) -> Tensor:
    """One draw per set by torch's generator (Kingma and Welling 2014, arXiv 1312.6114, section 2.4)."""
    return mean + (0.5 * log_var).exp() * torch.randn_like(mean)


class LatentHead(nn.Module):
    """From the events of a set to its latent: attention pooling, the number of events, and an MLP.

    The number goes in by itself because weights of attention add up to one, however many events there are.

    Args:
        config: sizes of the events.
        latent: dimensions of the latent.
        sample: training draws from the latent; False takes its mean.
    """

    def __init__(self, config: BlockConfig, latent: int, sample: bool) -> None:
        super().__init__()
        self.sample = sample
        self.norm = Norm(config.norm, config.width, config.eps, config.dropout)
        self.pool = AttentionPool(config.width, config.heads)
        self.hidden, self.to_latent = Linear(config.width + 1, config.width), Linear(config.width, 2 * latent)

    def reset(self) -> None:
        """Means that differ between sets, and variances of exp(FIRST_LOG_VAR), so that latents say something."""
        for linear in (self.pool.to_value, self.hidden, self.to_latent):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.constant_(self.to_latent.bias[self.to_latent.out_features // 2 :], FIRST_LOG_VAR)

    def forward(self, x: Tensor, delta: Tensor | None, members: Layout) -> tuple[Tensor, Latent]:
        """Pool the residual stream of events.

        Args:
            x, delta: (num_events, width).

        Returns:
            The stream with delta added, and a latent for every set of `members`.
        """
        x, y = self.norm(x, delta)
        pooled = self.pool(y, members)  # (num_sets, width)
        sizes = members.lengths().to(pooled.dtype).log1p()[:, None]
        hidden = activate("gelu", self.hidden(torch.cat([pooled, sizes], 1)))
        mean, log_var = widened(self.to_latent(hidden)).chunk(2, 1)
        log_var = soft_clamp(log_var)
        z = draw_latents(mean, log_var) if self.training and self.sample else mean
        return x, Latent(mean, log_var, z)


class SetEncoder(nn.Module):
    """Induced blocks with a latent after each.

    The events that enter a block have been told the latent of the block before, so every latent rests on the one before
    it; the last one is the set's representation.

    Args:
        config: sizes.
        levels: blocks.
        num_points: inducing points of a set.
        latent: dimensions of every latent.
        sample: training draws from the latents; False takes their means.
    """

    def __init__(self, config: BlockConfig, levels: int, num_points: int, latent: int, sample: bool) -> None:
        super().__init__()
        self.num_points = num_points
        self.blocks = nn.ModuleList(InducedBlock(config, num_points) for _ in range(levels))
        self.heads = nn.ModuleList(LatentHead(config, latent, sample) for _ in range(levels))
        self.tell = nn.ModuleList(Linear(latent, config.width, bias=False) for _ in range(levels - 1))

    def reset(self) -> None:
        for part in (*self.blocks, *self.heads):
            assert isinstance(part, InducedBlock | LatentHead)
            part.reset()

    def forward(self, x: Tensor, members: Layout) -> list[Latent]:
        """Encode the events (num_events, width) of all sets; none may be empty, and there may be no set.

        Returns:
            A latent per level, the deepest last.
        """
        pairs = pair_members(members, self.num_points)
        set_of_event = torch.repeat_interleave(members.lengths(), output_size=len(x))
        latents: list[Latent] = []
        delta: Tensor | None = None
        for level, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            if latents:
                x = x + self.tell[level - 1](latents[-1].z).to(x.dtype).index_select(0, set_of_event)
                delta = None
            x, latent = head(*block(x, delta, pairs), members)
            latents.append(latent)
        return latents
