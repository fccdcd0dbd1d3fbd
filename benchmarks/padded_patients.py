"""The model of patients without flat runs, for `patients.py`: on padded rectangles, and in a loop over sets.

Both share the modules of a `SetSequence`, and so its weights; what differs is how sets and patients come together.
Attention, pooling and distances between sets are written on (num_sets, members) rectangles, of one set in the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, to_padded
from unpad.batching.layout import PaddedLayout
from unpad.models.set_sequence.belief import slot_table
from unpad.models.set_sequence.encoder import Latent, LatentHead, draw_latents, soft_clamp
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.heads import sets_that_follow
from unpad.models.set_sequence.history import SetLayout, lay_out_course
from unpad.models.set_sequence.losses import SHORTEST, free_bits, gaussian_kl
from unpad.models.set_sequence.model import SetSequence
from unpad.nn.activation import activate
from unpad.nn.cross_attention import CrossAttention
from unpad.nn.linear import compute_dtype
from unpad.nn.losses import Terms
from unpad.nn.precision import widened

NO_CODE = -100


@dataclass(frozen=True)
class Sets:
    """Sets as a rectangle.

    Args:
        sizes: (num_sets,) int64 events; 0 for a set that only pads.
        real: (num_sets, members) bool.
    """

    sizes: Tensor
    real: Tensor

    @property
    def seen(self) -> Tensor:
        """`real`, and the first cell of a set that only pads: a softmax over nothing would be NaN."""
        first = torch.arange(self.real.shape[1], device=self.real.device) == 0
        return self.real | first

    def log_sizes(self, dtype: torch.dtype) -> Tensor:
        return self.sizes.to(dtype).log1p()[:, None]

    def repeat(self, times: int) -> Sets:
        return Sets(self.sizes.repeat(times), self.real.repeat(times, 1))


# --------------------------------------------------------------------------- sets on rectangles


def attend(layer: CrossAttention, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
    """Attention of x (num_sets * queries, width) to context (num_sets * keys, width), where mask (num_sets, keys)."""
    shape = len(mask), -1, layer.heads, x.shape[1] // layer.heads
    q = layer.to_q(x).view(shape).transpose(1, 2)  # (num_sets, heads, queries, head_dim)
    k, v = (part.reshape(shape).transpose(1, 2) for part in layer.to_kv(context).chunk(2, 1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    out: Tensor = layer.to_out(y.transpose(1, 2).reshape(len(x), -1))
    return out


def pooled_latent(head: LatentHead, x: Tensor, delta: Tensor, sets: Sets) -> tuple[Tensor, Latent]:
    x, y = head.norm(x, delta)
    scores = widened(head.pool.query(y) / math.sqrt(y.shape[1])).unflatten(0, sets.real.shape)
    weights = scores.masked_fill(~sets.seen[..., None], -math.inf).softmax(1)  # (num_sets, members, heads)
    values = widened(head.pool.to_value(y)).unflatten(0, sets.real.shape).unflatten(-1, (head.pool.heads, -1))
    pooled = (weights[..., None] * values).sum(1).flatten(1)  # (num_sets, width)
    hidden = activate("gelu", head.hidden(torch.cat([pooled, sets.log_sizes(pooled.dtype)], 1)))
    mean, log_var = widened(head.to_latent(hidden)).chunk(2, 1)
    log_var = soft_clamp(log_var)
    return x, Latent(mean, log_var, draw_latents(mean, log_var, None) if head.training and head.sample else mean)


def encode(model: SetSequence, x: Tensor, sets: Sets) -> list[Latent]:
    """Latents of the levels, of events x (num_sets * members, width)."""
    encoder: Any = model.encoder
    num_sets, members = sets.real.shape
    seen = sets.seen
    points_seen = torch.arange(encoder.num_points, device=x.device) < sets.sizes.clamp_min(1)[:, None]
    latents: list[Latent] = []
    delta: Tensor | None = None
    for level, (block, head) in enumerate(zip(encoder.blocks, encoder.heads, strict=True)):
        if latents:
            x = x + encoder.tell[level - 1](latents[-1].z).to(x.dtype).repeat_interleave(members, 0)
            delta = None
        x, events = block.norm_events(x, delta)
        queries = block.norm_points(block.points)[1].repeat(num_sets, 1)
        gathered = attend(block.gather, queries, events, seen)
        points, y = block.norm_gathered(block.points.repeat(num_sets, 1), gathered)
        summary = block.norm_summary(points, block.feed_points(y))[1]
        x, y = block.norm_spread(x, attend(block.spread, events, summary, points_seen))
        x, latent = pooled_latent(head, x, block.feed_events(y), sets)
        latents.append(latent)
    return latents


def decode(model: SetSequence, latents: Tensor, sets: Sets) -> Tensor:
    """Made events, (num_sets, members, width)."""
    decoder: Any = model.decoder
    members = sets.real.shape[1]
    of_set = widened(decoder.from_latent(torch.cat([latents, sets.log_sizes(latents.dtype)], 1)))
    table = slot_table(members, of_set.shape[1]).to(of_set.device, decoder.to_slot.weight.dtype)
    if decoder.training and decoder.noise:
        table = table.repeat(len(of_set), 1)
        slots = widened(decoder.to_slot(table + decoder.noise * torch.randn_like(table)))
        x = slots + of_set.repeat_interleave(members, 0)
    else:
        x = (widened(decoder.to_slot(table)) + of_set[:, None]).flatten(0, 1)
    delta: Tensor | None = None
    for norm, layer in zip(decoder.norms, decoder.layers, strict=True):
        x, y = norm(x, delta)
        delta = layer(y)
    events: Tensor = widened(decoder.to_event(decoder.norm(x, delta)[1]))
    return events.view(*sets.real.shape, -1)


@torch.no_grad()
def nearest(x: Tensor, y: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Of every x the nearest y and the reverse, (num_sets, members) int64, among pairs (num_sets, members, members)."""
    with torch.autocast(x.device.type, enabled=False):
        far = torch.cdist(x, y).masked_fill(~pairs, math.inf)
    return far.argmin(2), far.argmin(1)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of (num_sets, members, width) by (num_sets, members)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def chamfer(made: Tensor, target: Tensor, sets: Sets) -> Tensor:
    """As `losses.chamfer`, (num_sets,) of (num_sets, members, width)."""
    pairs = sets.real[:, :, None] & sets.real[:, None]
    lengths = [torch.linalg.vector_norm(x, dim=2, keepdim=True) for x in (made, target)]
    units = [x / size.clamp_min(SHORTEST) for x, size in zip((made, target), lengths, strict=True)]

    def both_ways(x: Tensor, y: Tensor, power: int) -> Tensor:
        of_x, of_y = nearest(x, y, pairs)
        return ((x - take(y, of_x)).abs().pow(power) + (take(x, of_y) - y).abs().pow(power)).sum(2) / 2

    total = 3 * both_ways(made, target, 2) + both_ways(units[0], units[1], 2) / 2
    total = total + both_ways(lengths[0], lengths[1], 1)
    return total.masked_fill(~sets.real, 0).sum(1) / sets.sizes.clamp_min(1)


def decoder_terms(model: SetSequence, latents: list[Latent], embedded: Tensor, codes: Tensor, sets: Sets) -> Terms:
    """reconstruction and made_code, of embedded and codes (num_sets * members, ...)."""
    target = widened(embedded.detach()).unflatten(0, sets.real.shape)
    levels = sets.repeat(len(latents))
    made = decode(model, torch.cat([latent.z for latent in latents]), levels)
    far = chamfer(made, target.repeat(len(latents), 1, 1), levels).chunk(len(latents))
    deepest = made[-len(target) :]
    index = nearest(deepest.detach(), target, sets.real[:, :, None] & sets.real[:, None])[1]
    chosen = take(deepest, index).flatten(0, 1)
    logits = model.made_code(chosen.to(compute_dtype(chosen)))
    labels = codes.masked_fill(~sets.real.flatten(), NO_CODE)
    nll = F.cross_entropy(widened(logits), labels, ignore_index=NO_CODE, reduction="sum")
    num_sets, num_events = int((sets.sizes > 0).sum()), int(sets.real.sum())
    return {"reconstruction": (model._over_levels(far).sum(), num_sets), "made_code": (nll, num_events)}


def divergence_terms(model: SetSequence, latents: list[Latent], is_set: Tensor) -> Terms:
    """kl and raw_kl, where is_set (num_sets,)."""
    parts = [gaussian_kl(latent.mean, latent.log_var) for latent in latents]
    kl = model._over_levels([free_bits(part, model.config.free_bits).sum(1) for part in parts])
    raw, count = parts[-1].detach().sum(1), int(is_set.sum())
    return {"kl": (kl.masked_fill(~is_set, 0).sum(), count), "raw_kl": (raw.masked_fill(~is_set, 0).sum(), count)}


# --------------------------------------------------------------------------- the two ways


class Shared:
    """What `train_step` asks of a model, and settings that are not written down here."""

    def __init__(self, model: SetSequence) -> None:
        config = model.config
        assert (config.prior, config.update, config.reconstruction) == ("standard", "none", "chamfer")
        assert not config.decoder_history
        assert not config.attention_dropout
        self.model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return self.model.count_targets(batch)


class Customary(Shared):
    """One set at a time through encoder and decoder; `train_step` gives it one patient at a time."""

    def losses(self, batch: RaggedBatch) -> Terms:
        model, events, codes = self.model, batch.require(EventSets), batch.input_ids
        assert events is not None
        assert codes is not None
        sizes = events.members.lengths().tolist()
        embedded = model.embedding(codes, events.values, events.has_value)
        each: list[list[Latent]] = []
        sums: dict[str, Tensor] = {}
        for x, own in zip(embedded.split(sizes), codes.split(sizes), strict=True):
            one = Sets(torch.tensor([len(x)]), torch.ones(1, len(x), dtype=torch.bool))
            each.append(encode(model, x, one))
            for name, (total, _) in decoder_terms(model, each[-1], x, own, one).items():
                sums[name] = sums[name] + total if name in sums else total
        levels = list(zip(*each, strict=True))
        latents = [
            Latent(*(torch.cat([getattr(one, name) for one in level]) for name in ("mean", "log_var", "z")))
            for level in levels
        ] or [Latent(*[events.times.new_zeros(0, model.config.latent)] * 3)] * model.config.levels
        course = lay_out_course(events.history, events.times)
        states = model.history(latents[-1].mean, course)
        counts = {"reconstruction": events.num_sets, "made_code": len(codes)}
        terms: Terms = {name: (sums.get(name, states.new_zeros(())), count) for name, count in counts.items()}
        terms |= divergence_terms(model, latents, torch.ones(events.num_sets, dtype=torch.bool))
        readouts, hidden = states.index_select(0, course.readouts), states.index_select(0, course.sets)
        terms |= model.patient.terms(readouts, None, batch.seq_labels, events, model.label_smoothing)
        following = sets_that_follow(events, course.is_first)
        return terms | model.next_set.terms(hidden, codes, events, following, {"next_code", "next_time", "next_value"})


class Padded(Shared):
    """All patients of one batch as a rectangle of (batch, sets, members), made here and so not timed.

    Args:
        batch: the only one whose losses this computes.
    """

    def __init__(self, model: SetSequence, batch: RaggedBatch) -> None:
        super().__init__(model)
        events = batch.require(EventSets)
        assert events is not None
        assert batch.input_ids is not None

        def rectangle(x: Tensor) -> Tensor:
            by_set = to_padded(x, events.members, pad_to=1)[0]
            return to_padded(by_set, events.history, pad_to=1)[0]

        self.codes, self.values = rectangle(batch.input_ids), rectangle(events.values)
        self.has_value, real = rectangle(events.has_value), rectangle(torch.ones_like(events.has_value))
        self.times, self.is_set = to_padded(events.times, events.history, pad_to=1)
        self.sets = Sets(real.sum(2).flatten(), real.flatten(0, 1))
        self.course = self._course()

    def losses(self, batch: RaggedBatch) -> Terms:
        model, events = self.model, batch.require(EventSets)
        assert events is not None
        codes = self.codes.flatten()
        embedded = model.embedding(codes, self.values.flatten(), self.has_value.flatten())
        latents = encode(model, embedded, self.sets)
        states = model.history(latents[-1].mean, self.course).unflatten(0, (len(self.codes), -1))
        terms = divergence_terms(model, latents, self.is_set.flatten())
        terms |= model.patient.terms(states[:, -1], None, batch.seq_labels, events, model.label_smoothing)
        terms |= self._next_terms(widened(states[:, :-2]), events)
        return terms | decoder_terms(model, latents, embedded, codes, self.sets)

    def _course(self) -> SetLayout:
        """Sets in the first columns, the readouts in the last."""
        batch, columns = self.is_set.shape
        count, nothing = self.is_set.sum(1, keepdim=True), self.times.new_zeros(batch, 1)
        last = self.times.gather(1, (count - 1).clamp_min(0)).masked_fill(count == 0, 0)
        gaps = torch.cat([nothing, self.times.diff(dim=1), -last], 1).clamp_min(0)
        layout = PaddedLayout(torch.cat([self.is_set, torch.ones(batch, 1, dtype=torch.bool)], 1))
        places = torch.arange(batch * (columns + 1)).view(batch, -1)
        position_ids = torch.cat([torch.arange(columns).expand(batch, -1), count], 1)
        return SetLayout(
            cast(Any, layout),
            sets=places[:, :-1].flatten(),
            readouts=places[:, -1],
            position_ids=position_ids.flatten(),
            days=torch.cat([self.times, nothing], 1).flatten(),
            gaps=gaps.flatten(),
        )

    def _next_terms(self, before: Tensor, events: EventSets) -> Terms:
        """As `NextSet.terms`, of before (batch, sets - 1, width)."""
        heads, follows = self.model.next_set, self.is_set[:, 1:]
        codes, values, has_value = self.codes[:, 1:], self.values[:, 1:], self.has_value[:, 1:]
        real, sizes = (x.unflatten(0, self.is_set.shape)[:, 1:] for x in (self.sets.real, self.sets.sizes))
        count = int(follows.sum())
        with torch.autocast(before.device.type, enabled=False):
            logs = heads.codes(before).log_softmax(2).gather(2, codes)  # (batch, sets - 1, members)
            code_nll = -(logs * real).sum(2) / sizes.clamp_min(1)
            gaps = self.times.diff(dim=1).clamp_min(0)
            time_nll = heads._time_nll(before.flatten(0, 1), gaps.flatten()).view_as(gaps)
            made = (before[:, :, None] * heads.values(codes)).sum(3) + heads.value_bias(codes)[..., 0]
            errors = (made - values.to(made.dtype).asinh()).square()
            return {
                "next_code": (code_nll.masked_fill(~follows, 0).sum(), count),
                "next_time": (time_nll.masked_fill(~follows, 0).sum(), count),
                "next_value": (errors.masked_fill(~has_value, 0).sum(), int(has_value.sum())),
            }
