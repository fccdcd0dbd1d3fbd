"""From the latent of a set to the events that it may have held, as many as the set had."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unpad.batching.layout import Layout
from unpad.nn.block import BlockConfig, FeedForward
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.rope import rotary_frequencies, rotary_table
from unpad.nn.segments import segment_place, widened


def slot_table(num_slots: int, width: int) -> Tensor:
    """Sines, then cosines of the slot's index, (num_slots, width) fp64; width is even."""
    cos, sin = rotary_table(torch.arange(num_slots), rotary_frequencies(width, 1e4, "none", 1.0), torch.float64)
    return torch.cat([sin, cos], -1)[:, 0]


class SetDecoder(nn.Module):
    """Events of a set from its latent, the number of them, and the index of each one's slot.

    A slot is told apart from the others of its set by a fixed sinusoidal table, so that nothing is drawn in eval, and
    knows no event: permuting the events of a set changes nothing. It is residual feed-forward layers with norms before
    them. Outputs are not bounded, since embeddings of events are not.

    Args:
        config: sizes; width is even.
        latent: dimensions of the latent.
        layers: feed-forward layers.
        noise: standard deviation of what training adds to the table, whose entries lie in [-1, 1].
        history: slots are also told a vector (width,) of what came before the set.
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
        """Slots and latents weigh the same at first, and events come out about as long as embeddings are."""
        for linear in (self.to_slot, self.from_latent):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.normal_(self.to_event.weight, std=1 / self.to_event.in_features)

    def forward(self, latents: Tensor, members: Layout, history: Tensor | None = None) -> Tensor:
        """Make the events of every set.

        Args:
            latents: (num_sets, latent).
            members: how many events each set has.
            history: (num_sets, width), where the decoder reads it.

        Returns:
            (num_events, width), fp32 or wider, in the space of embedded events and in no order.
        """
        dtype = self.to_slot.weight.dtype
        sizes = members.lengths().to(latents.dtype).log1p()[:, None]
        of_set = widened(self.from_latent(torch.cat([latents, sizes], 1)))  # (num_sets, width)
        if self.from_history is not None:
            assert history is not None, "this decoder reads what came before a set"
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
    return slots + noise * torch.randn_like(slots)
