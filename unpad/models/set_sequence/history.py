"""History encoder: causal transformer over the sets of a patient, and one readout after the last set.

A set attends to itself and the sets before it. The readout, at the landmark (day 0), attends to all sets; a patient
without sets has a readout too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.layout import Layout
from unpad.nn.activation import activate
from unpad.nn.block import Block, BlockConfig, Cache, Stream
from unpad.nn.cross_attention import pair_sequences, received_attention
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.precision import widened
from unpad.nn.rope import Rotary, rotary_frequencies, rotary_table
from unpad.nn.segments import segment_place

CHUNK_TOKENS = 1 << 16  # most places at a time, of histories that end after every set
LOG_DAYS = 5.0  # divisor of log1p of days: half a year is 1


@dataclass(frozen=True)
class SetLayout:
    """The run that the transformer reads: the sets of every patient, then the readout.

    Args:
        layout: num_seqs patients over num_sets + num_seqs places; boundaries are never read back from the device.
        sets: (num_sets,) int64, places of the sets.
        readouts: (num_seqs,) int64, places of the readouts.
        position_ids: (num_sets + num_seqs,) int64, counted from 0 in every patient.
        days: (num_sets + num_seqs,) days from the landmark, 0 for a readout.
        gaps: (num_sets + num_seqs,) days since the place before, 0 for the first of a patient.
        cache: by which the history attends instead of by its layout; None: by this.
    """

    layout: Layout
    sets: Tensor
    readouts: Tensor
    position_ids: Tensor
    days: Tensor
    gaps: Tensor
    cache: Cache | None = None

    @property
    def is_first(self) -> Tensor:
        """True for the first set of a patient, (num_sets,) bool."""
        return self.position_ids.index_select(0, self.sets) == 0


def lay_out_course(history: Layout, times: Tensor) -> SetLayout:
    """Append a readout to the sets of every patient.

    Args:
        history: sets of every patient; a patient may have none.
        times: (num_sets,) days from the landmark, ascending within a patient.
    """
    num_seqs, num_sets, device = history.num_seqs, len(times), times.device
    patient = torch.repeat_interleave(history.lengths(), output_size=num_sets)  # (num_sets,)
    bounds = history.cu_seqlens + torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    sets, readouts = torch.arange(num_sets, device=device) + patient, bounds[1:].long() - 1
    layout = Layout(bounds, history.max_seqlen + (num_seqs > 0), keys=history.keys)
    first = torch.repeat_interleave(bounds[:-1].long(), layout.lengths(), output_size=num_sets + num_seqs)
    position_ids = torch.arange(num_sets + num_seqs, device=device) - first
    days = times.new_zeros(num_sets + num_seqs).index_copy(0, sets, times)
    gaps = torch.where(position_ids > 0, days - days.roll(1), 0).clamp_min(0)
    return SetLayout(layout, sets, readouts, position_ids, days, gaps)


def records(begins: Tensor, lengths: Tensor) -> Iterator[tuple[Layout, Tensor]]:
    """Records that overlap, as runs of their own: some at a time, with their layout and the entries they read.

    Args:
        begins: (num_records,) int64, first entry of each, such as the first set of its patient.
        lengths: (num_records,) int64, entries of each.
    """
    chunks = (lengths.cumsum(0) // CHUNK_TOKENS).unique_consecutive(return_counts=True)[1].tolist()
    for first, size in zip(begins.split(chunks), lengths.split(chunks), strict=True):
        layout = Layout(F.pad(size.cumsum(0, dtype=torch.int32), (1, 0)), int(size.max()))
        yield layout, segment_place(layout) + first.repeat_interleave(size)


class TimeEncoding(nn.Module):
    """MLP on the logarithms of the days to the landmark and of the days since the set before.

    Args:
        width: channels of the encoding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden, self.out = Linear(3, width), Linear(width, width)

    def reset(self) -> None:
        for linear in (self.hidden, self.out):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, course: SetLayout) -> Tensor:
        """Encode every place of a course, (num_sets + num_seqs, width), in fp32 or wider."""
        days, gaps = (x.to(self.hidden.weight.dtype) for x in (course.days, course.gaps))
        to_landmark = days.sign() * days.abs().log1p() / LOG_DAYS
        features = [to_landmark, gaps.log1p() / LOG_DAYS, (course.position_ids == 0).to(days.dtype)]
        return widened(self.out(activate("gelu", self.hidden(torch.stack(features, 1)))))


class HistoryEncoder(nn.Module):
    """Causal transformer over the latents of a patient's sets.

    Args:
        config: sizes of the blocks; at least one block, and causal.
        latent: dimensions of a set's latent.
        rotary: rotate queries and keys by the number of sets between them; times are encoded separately.
    """

    def __init__(self, config: BlockConfig, latent: int, rotary: bool) -> None:
        super().__init__()
        assert config.causal, "a set must not see later sets"
        assert config.blocks, "the readout needs a block to see the sets"
        self.head_dim, self.rotary = config.head_dim, rotary
        self.from_latent = Linear(latent, config.width)
        self.readout = nn.Parameter(torch.randn(config.width) * config.width**-0.5)
        self.time = TimeEncoding(config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = Norm(config.norm, config.width, config.eps, config.dropout)

    def reset(self) -> None:
        nn.init.xavier_uniform_(self.from_latent.weight)
        self.time.reset()

    def forward(self, latents: Tensor, course: SetLayout) -> Tensor:
        """Hidden states of sets and readouts after the last norm, (num_sets + num_seqs, width), in the computing dtype.

        Args:
            latents: (num_sets, latent).
        """
        stream = Stream(self._embed(latents, course), None, course.layout, self._rotary(course))
        for block in self.blocks:
            stream = block(stream, course.cache)
        return self.norm(stream.x, stream.delta, stream.layout)[1]

    def attention(self, latents: Tensor, course: SetLayout) -> Tensor:
        """Share of every place in its readout's attention in the last block, mean of all heads.

        Returns:
            (num_sets + num_seqs,) in fp32 or wider; adds up to 1 per patient, including the readout's own share.
        """
        rotary = self._rotary(course)
        stream = Stream(self._embed(latents, course), None, course.layout, rotary)
        for block in self.blocks[:-1]:
            stream = block(stream)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        q, k = last.attention.queries_and_keys(last.norm_1(stream.x, stream.delta)[1], rotary)
        num_seqs = course.layout.num_seqs
        one_each = Layout(torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device), int(num_seqs > 0))
        return received_attention(q.index_select(0, course.readouts), k, pair_sequences(one_each, course.layout))

    def at_every_set(self, latents: Tensor, history: Layout, times: Tensor, part: slice = slice(None)) -> Tensor:
        """Readout of a record that ends with a set, for every set of a part, (num_sets, width).

        Time grows with the square of a patient's sets, memory only linearly.

        Args:
            latents: (num_sets, latent).
            history, times: as in `lay_out_course`.
        """
        lengths = segment_place(history) + 1  # (num_sets,) sets up to and including each
        begins = torch.arange(len(times), device=times.device) + 1 - lengths  # (num_sets,) first set of its patient
        parts = [self.readout[None][:0]]
        for layout, sets in records(begins[part], lengths[part]):
            course = lay_out_course(layout, times.index_select(0, sets))
            parts.append(self(latents.index_select(0, sets), course).index_select(0, course.readouts))
        return torch.cat(parts[1:] or parts)

    def _embed(self, latents: Tensor, course: SetLayout) -> Tensor:
        """First residual stream, (num_sets + num_seqs, width), fp32 or wider."""
        start = self.readout.expand(course.position_ids.shape[0], -1)
        return start.index_copy(0, course.sets, self.from_latent(latents).to(start.dtype)) + self.time(course)

    def _rotary(self, course: SetLayout) -> Rotary | None:
        if not self.rotary:
            return None
        frequencies = rotary_frequencies(self.head_dim, 1e4, "none", 1.0)
        return rotary_table(course.position_ids, frequencies, widened(self.readout).dtype)
