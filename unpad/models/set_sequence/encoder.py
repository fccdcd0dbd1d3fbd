"""Set encoder: events of a set, in any number and order, to Gaussian latents.

Events are embedded from their code and their value. Blocks of attention through inducing points (Lee et al. 2019, arXiv
1810.00825, section 3.1) let the events of a set attend to each other at a cost linear in their number. After every
block the events of a set are pooled into a latent: a mean and a logarithm of a variance per dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.layout import Layout
from unpad.errors import RecipeError
from unpad.nn.activation import activate
from unpad.nn.block import BlockConfig, FeedForward
from unpad.nn.cross_attention import CrossAttention, PairedRuns, PairGroup, pair_sequences
from unpad.nn.draws import normal
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.precision import widened
from unpad.nn.segments import AttentionPool

# In standard deviations; closest where values are most frequent.
KNOTS = (-4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
LOG_VAR_LIMIT = 8.0  # bound of the logarithm of a variance, approached on both sides
FIRST_LOG_VAR = -2.0  # at initialization: noise small enough for the decoder to learn


# --------------------------------------------------------------------------- one event


def value_features(values: Tensor) -> Tensor:
    """Features of a standardised value: asinh, which grows like a logarithm, so that outliers stay moderate; and the
    share of every step between two knots that the value has climbed, 0 to 1 (the piecewise-linear encoding of Gorishniy
    et al. 2022, arXiv 2203.05556, with fixed knots).

    Args:
        values: (num_events,) in standard deviations.

    Returns:
        (num_events, len(KNOTS)), of the same dtype.
    """
    knots = values.new_tensor(KNOTS)
    climbed = ((values[:, None] - knots[:-1]) / knots.diff()).clamp(0, 1)
    return torch.cat([values.asinh()[:, None], climbed], 1)


class EventEmbedding(nn.Module):
    """Embedding of an event's code and value.

    code + MLP([code, features of the value]) with a value, the code alone without: an average value, a missing value,
    and a raw value of zero have different embeddings.

    Args:
        num_codes: number of different codes.
        width: channels of an event.
        vector_size: length of given vectors of codes, such as embeddings of their names; None learns a table.
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
        """Load the vectors of all codes, (num_codes, vector_size), each scaled to length 1.

        Raises:
            RecipeError: the model was not built for vectors of this length.
        """
        expected = None if self.code_vectors is None else self.code_vectors.shape[1]
        if self.code_vectors is None or vectors.shape[1] != expected:
            what = f"codes come with vectors of {vectors.shape[1]} numbers, and the model expects {expected or 'none'}"
            fix = f"set model.code_vectors={vectors.shape[1]}, or leave out events.code_embeddings"
            raise RecipeError(what, where="model.code_vectors", fix=fix)
        self.code_vectors.copy_(F.normalize(vectors.to(self.code_vectors), dim=1))

    def reset(self) -> None:
        """Initialize embeddings to length about 1, and values so that one standard deviation adds as much."""
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
            values: (num_events,) in standard deviations; ignored for events without a value.
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
        hidden = self.value_in(torch.cat([code, value_features(values.to(dtype))], 1))
        shift = self.value_out(activate("gelu", hidden)).to(dtype)
        return torch.where(has_value[:, None], code + shift, code)


# --------------------------------------------------------------------------- the events of a set


@dataclass(frozen=True)
class SetPairs:
    """Pairs of the events and the inducing points of every set.

    Args:
        points: (num_points,) int64, index of each inducing point; a set of n events uses at most the first n, since
            more points than events add nothing.
        gather: points as queries, events as keys.
        spread: events as queries, points as keys.
    """

    points: Tensor
    gather: PairedRuns
    spread: PairedRuns


def pair_members(members: Layout, num_points: int) -> SetPairs:
    """Pair the events of every set with its inducing points; reads boundaries from the device once.

    Args:
        members: events of every set.
        num_points: most inducing points of a set.
    """
    counts = members.lengths().clamp_max(num_points)
    bounds = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    gather = pair_sequences(Layout(bounds, min(num_points, members.max_seqlen), keys=members.keys), members)
    first = torch.repeat_interleave(bounds[:-1].long(), counts, output_size=gather.num_queries)
    points = torch.arange(gather.num_queries, device=first.device) - first
    swapped = tuple(PairGroup(group.keys, group.queries) for group in gather.groups)
    return SetPairs(points, gather, PairedRuns(swapped, gather.num_keys, gather.num_queries, members, gather.queries))


class InducedBlock(nn.Module):
    """Attention of every set to itself through inducing points.

    The points gather from the events, then the events from the points. Both are residual, q + attention and then
    a + feed-forward, with norms before the branches as in `nn/block.Block`.

    Args:
        config: sizes; dropout applies to the outputs of branches, attention_dropout to attention weights.
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
        """Initialize points to about the length of embeddings of events."""
        nn.init.normal_(self.points, std=self.points.shape[1] ** -0.5)

    def forward(self, x: Tensor, delta: Tensor | None, pairs: SetPairs) -> tuple[Tensor, Tensor]:
        """One block's step along the residual stream of events, (num_events, width); as `nn/block.Block.forward`."""
        of_points, of_events = pairs.gather.queries, pairs.gather.keys
        x, events = self.norm_events(x, delta, of_events)
        _, queries = self.norm_points(self.points)
        points = self.points.index_select(0, pairs.points)  # (num_points, width)
        gathered, _ = self.gather(queries.index_select(0, pairs.points), events, pairs.gather)
        points, y = self.norm_gathered(points, gathered, of_points)
        _, summary = self.norm_summary(points, self.feed_points(y), of_points)
        spread, _ = self.spread(events, summary, pairs.spread)
        x, y = self.norm_spread(x, spread, of_events)
        return x, self.feed_events(y)


# --------------------------------------------------------------------------- latents


@dataclass(frozen=True)
class Latent:
    """A diagonal Gaussian for every set, and one sample of it.

    Args:
        mean, log_var: (num_sets, latent), fp32 or wider.
        z: (num_sets, latent), mean + sigma * eps in training, the mean in eval.
    """

    mean: Tensor
    log_var: Tensor
    z: Tensor


def soft_clamp(log_var: Tensor) -> Tensor:
    """Bound logarithms of variances to +-LOG_VAR_LIMIT with a gradient everywhere."""
    return LOG_VAR_LIMIT * torch.tanh(log_var / LOG_VAR_LIMIT)


def draw_latents(mean: Tensor, log_var: Tensor, places: Tensor | None) -> Tensor:
    """One sample per set (Kingma and Welling 2014, arXiv 1312.6114, section 2.4); `places` of the sets in draws."""
    return mean + (0.5 * log_var).exp() * normal(mean, places)


class LatentHead(nn.Module):
    """Latent of a set from its events: attention pooling, the number of events, and an MLP.

    The number is a separate input because attention weights add up to one for any number of events.

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
        """Initialize means that differ between sets, and variances of exp(FIRST_LOG_VAR), for informative latents."""
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
        x, y = self.norm(x, delta, members)
        mean, log_var = self.gaussian(self.pool(y, members), members.lengths())
        z = draw_latents(mean, log_var, members.bases) if self.training and self.sample else mean
        return x, Latent(mean, log_var, z)

    def gaussian(self, pooled: Tensor, num_events: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance, (num_sets, latent), of sets from their events pooled, (num_sets, width),
        and the number of them, (num_sets,)."""
        sizes = num_events.to(pooled.dtype).log1p()[:, None]
        hidden = activate("gelu", self.hidden(torch.cat([pooled, sizes], 1)))
        mean, log_var = widened(self.to_latent(hidden)).chunk(2, 1)
        return mean, soft_clamp(log_var)


class SetEncoder(nn.Module):
    """Induced blocks with a latent after each.

    Events receive the latent of each block before they enter the next, so every latent depends on the previous ones;
    the last represents the set.

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
        """Encode the events (num_events, width) of all non-empty sets; there may be no such set.

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
