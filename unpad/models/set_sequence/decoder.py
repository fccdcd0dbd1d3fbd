"""Set decoder: reconstructs as many events as a set had from its latent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unpad.batching.layout import Layout
from unpad.nn.block import BlockConfig, FeedForward
from unpad.nn.draws import random_like
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.precision import widened
from unpad.nn.rope import rotary_frequencies, rotary_table
from unpad.nn.segments import segment_place


def slot_table(num_slots: int, width: int) -> Tensor:
    """Sines, then cosines of the slot's index, (num_slots, width) fp64; width is even."""
    cos, sin = rotary_table(torch.arange(num_slots), rotary_frequencies(width, 1e4, "none", 1.0), torch.float64)
    return torch.cat([sin, cos], -1)[:, 0]


class SetDecoder(nn.Module):
    """Residual feed-forward layers, with norms before them, from a set's latent, its number of events and the index of
    each event's slot.

    A fixed sinusoidal table distinguishes the slots of a set, so evaluation is deterministic. Slots do not see the
    events: permuting the events of a set changes nothing. Outputs are unbounded, as embeddings of events are.

    Args:
        config: sizes; width is even.
        latent: dimensions of the latent.
        layers: feed-forward layers.
        noise: standard deviation of noise on the table in training; its entries are in [-1, 1].
        history: slots also read a vector (width,) of the history before the set.
    """

    def __init__(self, config: BlockConfig, latent: int, layers: int, noise: float, history: bool) -> None:
        super().__init__()
        self.noise = noise
        self.to_slot = Linear(config.width, config.width)
        self.from_latent = Linear(latent + 1, config.width)
        self.from_history = Linear(config.width, config.width, bias=False) if history else None
        self.norms = nn.ModuleList(
            Norm(config.norm, config.width, config.eps, config.dropout if index else 0.0) for index in range(layers)
        )
        self.layers = nn.ModuleList(FeedForward(config) for _ in range(layers))
        self.norm = Norm(config.norm, config.width, config.eps, config.dropout)
        self.to_event = Linear(config.width, config.width)

    def reset(self) -> None:
        """Initialize slots and latents to equal weight, and outputs to about the length of embeddings."""
        for linear in (self.to_slot, self.from_latent):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.normal_(self.to_event.weight, std=1 / self.to_event.in_features)

    def forward(self, latents: Tensor, members: Layout, history: Tensor | None = None) -> Tensor:
        """Reconstruct the events of every set.

        Args:
            latents: (num_sets, latent).
            members: number of events of every set.
            history: (num_sets, width), for a decoder that reads it.

        Returns:
            (num_events, width), fp32 or wider, in the space of embedded events, unordered.
        """
        dtype = self.to_slot.weight.dtype
        sizes = members.lengths().to(latents.dtype).log1p()[:, None]
        of_set = widened(self.from_latent(torch.cat([latents, sizes], 1)))  # (num_sets, width)
        if self.from_history is not None:
            assert history is not None, "this decoder reads the history before a set"
            of_set = of_set + widened(self.from_history(history))
        place = segment_place(members)  # (num_events,)
        table = slot_table(members.max_seqlen, self.to_slot.in_features).to(place.device, dtype)
        if self.training and self.noise:
            slots = self.to_slot(_noisy(table.index_select(0, place), self.noise))
        else:
            slots = self.to_slot(table).index_select(0, place)
        set_of_event = torch.repeat_interleave(members.lengths(), output_size=len(place))
        x = widened(slots) + of_set.index_select(0, set_of_event)
        delta: Tensor | None = None
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x, y = norm(x, delta)
            delta = layer(y)
        return widened(self.to_event(self.norm(x, delta)[1]))


def _noisy(slots: Tensor, noise: float) -> Tensor:
    return slots + noise * random_like(slots, torch.randn_like)
