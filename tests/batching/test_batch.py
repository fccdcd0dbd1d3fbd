"""A batch is its sequences and nothing else: round trips, labels, padding and splits lose and add nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import random_batch, random_sequences, tiny_model
from unpad.api import batches
from unpad.batching.batch import RaggedBatch, concatenate, from_padded, from_sequences, make_batch, to_padded
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.models.decoder import Decoder
from unpad.recipes.training import OptimSettings, PlanSettings
from unpad.training.step import accumulate

LENGTHS = st.lists(st.integers(0, 12), max_size=8)
SIDES = st.sampled_from(["left", "right"])
WEIGHTS = {"cross_entropy": 1.0}


def padded_mask(layout: Layout | PaddedLayout) -> torch.Tensor:
    return layout.attention_mask


def mean_nll(model: Decoder, *micros: object) -> float:
    with torch.no_grad():
        terms = [model.losses(batch)["nll"] for batch in micros]
    return float(sum(total for total, _ in terms)) / sum(count for _, count in terms)


# --------------------------------------------------------------------------- round trips


@pytest.mark.promise("batch.worked-example")
def test_the_worked_example_of_lengths_2_3_4():
    sequences = [[5, 6], [7, 8, 9], [1, 2, 3, 4]]
    flat = np.concatenate([np.array(s) for s in sequences])
    batch = make_batch(flat, np.zeros_like(flat), np.zeros(flat.size, np.bool_), np.array([2, 3, 4]))
    assert batch.layout.lengths().tolist() == [2, 3, 4]
    assert batch.layout.cu_seqlens.tolist() == [0, 2, 5, 9]
    rectangle = batch.pad(pad_id=0)
    mask = padded_mask(rectangle.layout)
    tokens = rectangle.input_ids.unflatten(0, mask.shape)
    assert tokens.tolist() == [[5, 6, 0, 0], [7, 8, 9, 0], [1, 2, 3, 4]]
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert [row[real].tolist() for row, real in zip(tokens, mask, strict=True)] == sequences
    assert from_padded(tokens, mask).tolist() == flat.tolist()


@pytest.mark.promise("batch.worked-example")
@settings(deadline=None)
@given(lengths=LENGTHS, side=SIDES, pad_to=st.integers(0, 20), width=st.integers(0, 3))
def test_padding_and_back_is_exact(lengths, side, pad_to, width):
    layout = build_layout(np.array(lengths, np.int64))
    values = torch.arange(sum(lengths) * max(width, 1)).view((-1, width) if width else (-1,))
    padded, mask = to_padded(values, layout, side, pad_to, fill=-1)
    assert padded.shape[:2] == (len(lengths), max([pad_to, *lengths]))
    assert mask.sum(1).tolist() == lengths
    assert bool((padded[~mask] == -1).all())
    assert torch.equal(from_padded(padded, mask), values)


@settings(deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_any_choice_of_sequences_is_those_sequences(lengths, data):
    batch = replace(random_batch([n + 1 for n in lengths]), seq_ids=torch.arange(len(lengths)) + 100)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6)) if lengths else []
    part = batch.select(chosen)
    assert part.layout.lengths().tolist() == [lengths[i] for i in chosen]
    assert part.seq_ids.tolist() == [100 + i for i in chosen]
    for name in ("input_ids", "labels", "loss_mask", "position_ids"):
        whole = getattr(batch, name).split(lengths) if lengths else []
        expected = torch.cat([whole[i] for i in chosen]) if chosen else getattr(batch, name)[:0]
        assert torch.equal(getattr(part, name), expected), name
    assert part.num_targets == int(part.loss_mask.sum())


# --------------------------------------------------------------------------- labels


@pytest.mark.promise("batch.labels")
def test_inputs_are_all_but_the_last_token_and_labels_all_but_the_first():
    batch = from_sequences([[3, 4, 5], [6, 7], [8, 9, 1, 2]])
    assert batch.input_ids.tolist() == [3, 4, 6, 8, 9, 1]
    assert batch.labels.tolist() == [4, 5, 7, 9, 1, 2]
    assert batch.position_ids.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.loss_mask.all()


@pytest.mark.promise("batch.labels")
def test_the_end_of_a_short_row_is_no_target():
    """The last token of a short row has no successor in the rectangle but padding, which nobody has to predict."""
    rectangle = from_sequences([[3, 4, 5], [6, 7], [8, 9, 1, 2]]).pad(pad_to=6, pad_id=0)
    mask = padded_mask(rectangle.layout)
    loss_mask = rectangle.loss_mask.unflatten(0, mask.shape)
    assert loss_mask.sum(1).tolist() == [2, 1, 3]  # one less than tokens, in every row
    assert not (loss_mask & ~mask).any()
    assert rectangle.num_targets == 6


@pytest.mark.promise("batch.labels")
def test_a_sequence_of_one_token_gives_no_position_and_changes_nothing():
    model = tiny_model().eval()
    with_single, without = from_sequences([[3, 4, 5], [6], []]), from_sequences([[3, 4, 5]])
    assert with_single.layout.lengths().tolist() == [2, 0, 0]
    assert mean_nll(model, with_single) == mean_nll(model, without)


def test_only_the_tokens_chosen_for_the_loss_are_targets():
    batch = from_sequences([[3, 4, 5, 6], [7, 8]], [[True, False, True, True], [False, True]])
    assert batch.loss_mask.tolist() == [False, True, True, True]
    assert batch.labels.tolist() == [0, 5, 6, 8]
    assert batch.target_index.tolist() == [1, 2, 3]
    with pytest.raises(AssertionError, match="differs from its sequence"):
        from_sequences([[1, 2, 3]], [[True]])


@pytest.mark.promise("train.replies-only")
def test_a_label_that_does_not_count_can_be_anything():
    model = tiny_model().eval()
    batch = random_batch([6, 9], share=0.5)
    other = torch.where(batch.loss_mask, batch.labels, (batch.labels + 7) % 50)
    assert not torch.equal(other, batch.labels)
    assert mean_nll(model, replace(batch, labels=other)) == mean_nll(model, batch)


# --------------------------------------------------------------------------- padding


@pytest.mark.promise("batch.pad-share")
@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), pad_to=st.integers(0, 60))
def test_a_rectangle_is_as_long_as_its_own_longest_sequence(lengths, pad_to):
    batch = random_batch([n + 1 for n in lengths])
    mask = padded_mask(batch.pad().layout)
    assert mask.shape == (len(lengths), max(lengths))
    share = 1 - sum(lengths) / (len(lengths) * max(lengths))
    assert 1 - float(mask.double().mean()) == pytest.approx(share)
    assert padded_mask(batch.pad(pad_to=pad_to).layout).shape[1] == max(pad_to, *lengths)


@pytest.mark.promise("batch.mean-loss")
@settings(deadline=None, max_examples=25)
@given(lengths=LENGTHS.filter(any), side=SIDES, pad_to=st.integers(0, 30), pad_id=st.integers(0, 49))
def test_the_mean_loss_is_that_of_the_sequences_one_by_one(lengths, side, pad_to, pad_id):
    model = tiny_model().eval()
    batch = random_batch([n + 1 for n in lengths], share=1.0)
    expected = mean_nll(model, *[batch.select([i]) for i in range(batch.num_seqs)])
    assert mean_nll(model, batch) == pytest.approx(expected, rel=1e-10)
    assert mean_nll(model, batch.pad(side, pad_to, pad_id)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.promise("batch.pad-id")
def test_the_pad_id_is_the_callers_and_changes_no_gradient():
    """Token 0 is a word of this corpus; padding with it or with any other id must give the same training."""
    model = tiny_model().eval()
    batch = random_batch([4, 9, 2], share=1.0)
    batch = replace(batch, input_ids=torch.where(batch.input_ids < 10, 0, batch.input_ids))
    gradients = []
    for pad_id in (0, 7, 49):
        padded = batch.pad(pad_id=pad_id)
        assert bool((padded.input_ids[~padded_mask(padded.layout).flatten()] == pad_id).all())
        model.zero_grad()
        accumulate(model, [padded], WEIGHTS, "fp32")
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for other in gradients[1:]:
        assert all(torch.equal(other[name], grad) for name, grad in gradients[0].items())


@pytest.mark.promise("batch.pad-gradient")
def test_no_gradient_reaches_the_embedding_of_the_pad_id():
    model = tiny_model(tied=False).eval()
    batch = random_batch([4, 9, 2], share=1.0)
    pad_id = 7
    batch = replace(batch, input_ids=torch.where(batch.input_ids == pad_id, 8, batch.input_ids))
    accumulate(model, [batch.pad(pad_id=pad_id, pad_to=20)], WEIGHTS, "fp32")
    assert torch.equal(model.embed.weight.grad[pad_id], torch.zeros(16, dtype=torch.float64))
    assert model.embed.weight.grad[8].abs().sum() > 0


@pytest.mark.promise("batch.pad-gradient")
def test_a_padded_query_without_any_key_gives_finite_values_and_no_gradient():
    model = tiny_model().eval()
    batch = random_batch([1, 9]).pad()  # its first row is padding from end to end
    assert not padded_mask(batch.layout)[0].any()
    assert torch.isfinite(model(batch)).all()
    accumulate(model, [batch], WEIGHTS, "fp32")
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("strategy", ["fixed", "dynamic", "bucket", "budget", "pack", "rows"])
def test_every_strategy_feeds_the_same_sequences_and_targets(strategy):
    sequences = random_sequences([9, 2, 1, 14, 30, 7, 7, 3])
    found: list[list[int]] = []
    for micros in batches(sequences, strategy=strategy, tokens_per_step=25, row_tokens=30, batch_size=3):
        for micro in micros:
            ids, labels, mask = micro.input_ids, micro.labels, micro.loss_mask
            if isinstance(micro.layout, PaddedLayout):
                real = micro.layout.attention_mask.flatten()
                ids, labels, mask = ids[real], labels[real], mask[real]
            start = 0
            for length in micro.layout.lengths().tolist():
                if mask[start]:
                    found.append([*ids[start : start + length].tolist(), int(labels[start + length - 1])])
                start += length
    assert sorted(found) == sorted(s for s in sequences if len(s) > 1)


@pytest.mark.promise("batch.buckets", "llm.windows")
def test_sections_of_a_recipe_refuse_batches_that_cannot_be():
    for field in ("batch_size", "bucket_width", "tokens_per_step", "tokens_per_micro", "max_tokens", "stride"):
        with pytest.raises(ValueError, match=r"greater than or equal to 1|at least 1"):
            PlanSettings(**{field: 0})
    with pytest.raises(ValueError, match="greater than 0"):
        OptimSettings(lr=0)


# --------------------------------------------------------------------------- images among the tokens


def image_batch(sizes: list[tuple[int, int]], seed: int = 0) -> RaggedBatch:
    """Images of these rows and columns, with patches of 12 random numbers and a class each."""
    lengths = np.array([rows * columns for rows, columns in sizes], np.int64)
    total = int(lengths.sum())
    positions = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    nothing = torch.zeros(total, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    return RaggedBatch(
        layout=build_layout(lengths), position_ids=torch.from_numpy(positions), input_ids=None, labels=nothing,
        loss_mask=nothing.bool(), target_index=nothing[:0],
        inputs_embeds=torch.randn(total, 12, generator=generator), seq_labels=torch.arange(len(sizes)) % 3,
        image_sizes=torch.arange(2 * len(sizes)).reshape(-1, 2),
        grid=torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2),
    )  # fmt: skip


def mixed_batch() -> RaggedBatch:
    """Four texts with 2, 0, 1 and 1 images; a patch of image i stands where the text holds the token 40 + i."""
    sizes = [(1, 2), (2, 2), (3, 1), (1, 1)]
    rows = [[5, 40, 40, 6, 41, 41, 41, 41, 7], [8, 9, 1], [42, 42, 42, 2, 3], [4, 43, 5]]
    batch = from_sequences(rows)
    return replace(
        batch,
        media=image_batch(sizes),
        media_index=(batch.input_ids >= 40).nonzero().flatten(),
        media_seqs=torch.tensor([0, 0, 2, 3]),
    )


def places(batch: RaggedBatch) -> dict[int, list[float]]:
    """For every token of an image: the token that stands in its place, and the first number of its patch."""
    found: dict[int, list[float]] = {}
    for token, patch in zip(batch.input_ids[batch.media_index].tolist(), batch.media.inputs_embeds, strict=True):
        found.setdefault(token, []).append(float(patch[0]))
    return found


def test_a_choice_of_sequences_brings_their_images_along():
    batch = mixed_batch()
    wanted = places(batch)
    for chosen in ([0, 1, 2, 3], [3, 0], [2], [1], [], [0, 0]):
        part = batch.select(chosen)
        images = {0: [40, 41], 1: [], 2: [42], 3: [43]}
        tokens = [image for seq in chosen for image in images[seq]]
        assert part.media.num_seqs == len(tokens) == part.media_seqs.numel()
        assert part.media_seqs.tolist() == [new for new, seq in enumerate(chosen) for _ in images[seq]]
        assert set(places(part)) == set(tokens)
        if len(set(chosen)) == len(chosen):
            assert places(part) == {token: wanted[token] for token in tokens}


@pytest.mark.parametrize("make", [mixed_batch, lambda: image_batch([(2, 3), (1, 1), (4, 2)])])
def test_sequences_apart_and_joined_again_are_the_batch(make):
    batch = make()
    again = concatenate([batch.select([i]) for i in range(batch.num_seqs)])
    for name, value in vars(batch).items():
        other = getattr(again, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other), name
    assert torch.equal(batch.layout.lengths(), again.layout.lengths())
    if batch.media is not None:
        assert torch.equal(batch.media.layout.lengths(), again.media.layout.lengths())
        assert places(batch) == places(again)


def test_a_left_pad_pads_left():
    batch = random_batch([3, 4, 5])
    assert batch.pad("left").layout.attention_mask.int().tolist() == [[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.pad("right").flat().layout.max_seqlen == 4


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_keeps_images_at_their_tokens(side):
    batch = mixed_batch()
    assert places(batch.pad(side, pad_to=11, pad_id=1)) == places(batch)


def test_labels_of_sequences_are_the_targets_where_there_are_any():
    batch = image_batch([(2, 3), (1, 1), (4, 2)])
    assert batch.num_targets == 3
    assert batch.select([2, 0]).num_targets == 2
    assert batch.select([]).num_targets == 0


# --------------------------------------------------------------------------- layouts without some tokens


@pytest.mark.promise("vqa.hard-pruning")
@settings(deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_a_layout_without_some_tokens_counts_those_that_are_left(lengths, data):
    layout = build_layout(np.array(lengths, np.int64))
    kept = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))), dtype=torch.bool
    )
    left = layout.keep(kept)
    expected = [int(part.sum()) for part in kept.split(lengths)] if lengths else []
    assert left.lengths().tolist() == expected
    assert left.cu_seqlens.dtype == torch.int32
    assert left.max_seqlen == max(expected, default=0)
    assert layout.seq_of_token().tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
