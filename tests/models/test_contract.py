"""Every kind of model keeps the contract, and can do what its capabilities say."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from importlib import import_module
from inspect import getmembers, isfunction, signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn import functional as F

from tests.conftest import random_batch, tiny_model
from tests.helpers.image_models import (
    CLASSES,
    CLASSIFIERS,
    classifier,
    outputs,
    pack_images,
    pack_squares,
    random_images,
    tiny_vit,
)
from tests.helpers.models import Stub
from tests.helpers.patients import NUM_CODES, SET_SEQUENCES, random_patients, tiny_patients_model
from tests.helpers.tiny_models import DECODERS, EXAMPLES, Example
from tests.helpers.vision import ROWS, SAMPLES, TOWERS, prepare, tiny
from unpad.batching.batch import RaggedBatch
from unpad.errors import RecipeError
from unpad.models import build_model, model_config, model_kinds
from unpad.models.cnn import Cnn
from unpad.models.contract import (
    ORIGIN,
    WEIGHTS,
    Classifies,
    Generates,
    HasLatent,
    Model,
    PredictsSets,
    PrunesTokens,
    ReadsCodeVectors,
    ReadsTokens,
    ScoresTokens,
)
from unpad.models.vit import Vit
from unpad.nn.cache import CachedRow, KeyValueCache
from unpad.nn.native import library
from unpad.training.step import accumulate, train_step


@pytest.fixture(params=sorted(EXAMPLES))
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


@pytest.fixture
def model(example: Example) -> Model:
    return example[0]().eval()


@pytest.fixture
def batch(example: Example) -> RaggedBatch:
    return example[1]()


def test_every_kind_of_model_has_an_example_here():
    assert sorted(EXAMPLES) == model_kinds()


def test_losses_have_the_counts_that_were_promised_and_every_weight_a_term(model, batch):
    counts = model.count_targets(batch)
    terms = model.losses(batch)
    assert {name: count for name, (_, count) in terms.items() if count} == {n: c for n, c in counts.items() if c}
    assert model.weights.keys() <= terms.keys()
    assert model.trained == model.weights
    assert model.begin_step(0, 10, {name: 1.0 for name in model.weights}) == []


def test_members_with_defaults_hold_what_the_contract_says(model, batch):
    assert model.config.longest >= int(batch.position_ids.max()) + 1
    if model.config.kind != "cnn":  # one position whatever the image
        path = model.config.context_field.split(".")
        assert path[0] == "model"
        assert reduce(getattr, path[1:], model.config) == model.config.longest
    assert model.mode in model.modes
    assert model.modes[0] == ORIGIN
    for mode in model.modes:
        model.mode = mode
        assert model.mode == mode
    model.mode = None
    assert import_module(f"unpad.proof.{model.claims}").CLAIMS
    assert model.label_smoothing == 0
    assert model.head_dim is None or model.head_dim >= 1


def test_a_model_has_the_capabilities_of_its_example_and_no_other(example, model):
    known = (ReadsTokens, ScoresTokens, Generates, PrunesTokens, Classifies, HasLatent, PredictsSets, ReadsCodeVectors)
    assert {one for one in known if isinstance(model, one)} == example[2]
    for one in known:  # whoever has the members says so
        members = one.__abstractmethods__ - Model.__abstractmethods__
        has_all = bool(members) and all(hasattr(type(model), name) for name in members)
        assert not has_all or isinstance(model, one), one.__name__


def test_capabilities_do_what_they_say(model, batch):
    if isinstance(model, ReadsTokens):
        assert model.embed_tokens(torch.tensor([0, 1, 1])).shape[0] == 3
    if isinstance(model, ScoresTokens):
        assert model.token_nll(batch).shape == (batch.num_targets,)
    if isinstance(model, Generates):
        lengths = batch.layout.lengths().tolist()
        cache = KeyValueCache([CachedRow(length + 1) for length in lengths])
        cache.begin(lengths)
        assert model.logits(model.last_hidden(batch, cache)).shape == (batch.num_seqs, model.vocab_size)
    if isinstance(model, PrunesTokens):
        model(batch)
        assert model.given.shape == model.kept[-1].shape == (batch.num_seqs,)
        assert [int(one.sum()) for one in model.kept] == [len(one) for one in model.kept_tokens]
        assert bool((model.kept[-1] < model.given).any()), "hard is the mode of evaluation"
    if isinstance(model, Classifies):
        assert model.classify(batch).shape == (batch.num_seqs, 2 if isinstance(model, PredictsSets) else CLASSES)


def test_a_model_of_sets_answers_about_sets_and_sequences():
    model, batch = (make() for make in EXAMPLES["set_sequence"][:2])
    num_sets, size = batch.attended.lengths().sum() - batch.num_seqs, model.posterior(batch)[0].shape[1]
    assert [part.shape for part in model.posterior(batch)] == [(num_sets, size)] * 3
    assert model.reconstruct(batch, torch.zeros(num_sets, size, dtype=torch.float64)).shape == (num_sets,)
    hazards = model.hazards(batch)
    assert len(hazards) == len(model.vectors(batch, "patient")) == batch.num_seqs
    assert model.next_codes(batch).shape == (num_sets, NUM_CODES)
    assert model.vectors(batch, "set").shape == (num_sets, size)
    assert model.code_nll(batch).shape == (batch.total_tokens,)
    assert [part.shape for part in model.course(batch)] == [(num_sets, 2), (num_sets,)]


def test_methods_that_compute_with_weights_are_named(model):
    """Where the weights of a model are divided among processes, they are whole within these alone."""
    methods = [(name, one) for name, one in getmembers(type(model), isfunction) if one.__module__.startswith("unpad.")]
    inputs = {"batch", "media", "ids", "hidden", "stream"}
    found = {name for name, one in methods if name[0] != "_" and inputs & signature(one).parameters.keys()}
    assert set(model.all_computing()) == found - {"count_targets", "stream_of"}
    assert all(model.get_submodule(name) for name in model.optional)


def test_what_training_tells_a_model_replaces_its_own_weights():
    model = tiny_model()
    model.trained = {"cross_entropy": 0.5}
    assert (model.trained, model.weights) == ({"cross_entropy": 0.5}, {"cross_entropy": 1.0})


def test_a_model_that_says_nothing_of_itself_is_a_causal_model_of_tokens():
    model = Stub()
    assert (model.additions, model.label_smoothing, model.causal, model.head_dim) == ((), 0.0, True, None)
    assert (model.claims, dict(model.weights), model.trained) == ("tokens", {"cross_entropy": 1.0}, model.weights)


def test_a_model_without_a_member_of_the_contract_cannot_be_built():
    class Incomplete(Stub, Classifies):
        pass

    with pytest.raises(TypeError, match="classify"):
        Incomplete()


# --------------------------------------------------------------------------- batches of any composition


def gradients(model: Model, micros: Sequence[RaggedBatch]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of every parameter, and the mean of every term."""
    model.zero_grad()
    sums, counts = accumulate(model, micros, WEIGHTS, "fp32")
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert grads.keys() == {name for name, _ in model.named_parameters()}
    return {name: grad.clone() for name, grad in grads.items()}, {k: float(v) / counts[k] for k, v in sums.items()}


def assert_same(
    model: Model, expected: tuple[dict[str, Tensor], dict[str, float]], micros: Sequence[RaggedBatch]
) -> None:
    (grads, terms), (other_grads, other_terms) = expected, gradients(model, micros)
    assert set(terms) == {"cross_entropy", "nll"}
    assert other_terms == pytest.approx(terms, rel=1e-10)
    for name, grad in grads.items():
        assert (other_grads[name] - grad).norm() <= 1e-10 * max(float(grad.norm()), 1e-3), name


@pytest.mark.promise("images.own-size")
@pytest.mark.parametrize("path", [nullcontext, pytest.param(library.switched_off, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_images_in_one_batch_equal_each_alone_however_split_or_padded(kind, path):
    model, batch = classifier(kind)
    model.eval().label_smoothing = 0.1
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    with path():
        truth = [torch.cat(parts) for parts in zip(*(outputs(model, one) for one in alone), strict=True)]
        expected = gradients(model, alone)
        longest = int(batch.layout.lengths().max())
        for other in (batch, batch.pad("right"), batch.pad("left", pad_to=longest + 5)):
            torch.testing.assert_close(outputs(model, other), truth, rtol=1e-10, atol=1e-10)
            assert_same(model, expected, [other])
        assert_same(model, expected, [batch.select([4, 1]), batch.select([]), batch.select([6, 0, 3, 5, 2])])


PERMUTED = {
    **{kind: EXAMPLES[kind][:2] for kind in sorted(EXAMPLES)},
    "vit, attention": (lambda: tiny_vit(pool="attention"), random_images),
    "vision_language": (lambda: tiny(**TOWERS["clip"]), lambda: prepare(ROWS).batch),
}


@pytest.mark.parametrize("kind", PERMUTED)
def test_permuting_sequences_permutes_results(kind):
    make, examples = PERMUTED[kind]
    model, batch = make().eval(), examples()
    order = torch.randperm(batch.num_seqs, generator=torch.Generator().manual_seed(3)).tolist()
    (hidden, *answers), (other, *others) = outputs(model, batch), outputs(model, batch.select(order))
    lengths = [1] * batch.num_seqs if isinstance(model, PredictsSets) else batch.layout.lengths().tolist()
    parts = hidden.split(lengths)
    torch.testing.assert_close(other, torch.cat([parts[i] for i in order]), rtol=1e-10, atol=1e-10)
    for got, wanted in zip(others, answers, strict=True):
        torch.testing.assert_close(got, wanted[order], rtol=1e-10, atol=1e-10)


EMPTIED: dict[str, tuple[Callable[[], Model], Callable[[], RaggedBatch]]] = {
    **{kind: EXAMPLES[kind][:2] for kind in sorted(EXAMPLES)},
    **{
        kind: (lambda kind=kind: classifier(kind, token_drop=0.5)[0], lambda kind=kind: classifier(kind)[1])
        for kind in CLASSIFIERS
        if kind != "cnn"
    },
    "vision_language, clip": (lambda: tiny(**TOWERS["clip"]), lambda: prepare(ROWS).batch),
    "set_sequence, filter": (lambda: tiny_patients_model(**SET_SEQUENCES["filter"]), lambda: random_patients([3, 0])),
}


@pytest.mark.parametrize("kind", EMPTIED)
def test_a_batch_without_sequences_is_legal(kind):
    make, examples = EMPTIED[kind]
    model, full = make(), examples()
    width = model.eval()(full).shape[1]
    empty = full.select([])
    model.train()
    for batch in (empty, empty.pad()):
        assert model(batch).shape == (0, width)
        if isinstance(model, Vit | Cnn):
            assert model.classify(batch).shape == (0, CLASSES)
            assert model.nll(batch).shape == (0,)
        terms, counts = model.losses(batch), model.count_targets(batch)
        assert all(float(total.detach()) == count == 0 for total, count in terms.values())
        assert isinstance(model, PredictsSets) or {"cross_entropy", "nll"} <= terms.keys() & counts.keys()
        assert set(counts.values()) == {0}
        torch.stack([total for total, _ in terms.values() if total.requires_grad]).sum().backward()
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


# --------------------------------------------------------------------------- losses and gradients


@pytest.mark.parametrize("kind", ["vit, mean", "cnn"])
def test_losses_of_classes_are_sums_over_images_with_and_without_smoothing(kind):
    model, batch = classifier(kind)
    model.eval().label_smoothing = 0.2
    logits = model.classify(batch)
    terms = model.losses(batch)
    assert {name: count for name, (_, count) in terms.items()} == model.count_targets(batch)
    assert model.count_targets(batch) == {"cross_entropy": 7, "nll": 7}
    smoothed = F.cross_entropy(logits, batch.seq_labels, reduction="sum", label_smoothing=0.2)
    torch.testing.assert_close(terms["cross_entropy"][0], smoothed, rtol=1e-12, atol=1e-12)
    plain = F.cross_entropy(logits, batch.seq_labels, reduction="sum").detach()
    torch.testing.assert_close(terms["nll"][0], plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.nll(batch).sum(), plain, rtol=1e-12, atol=1e-12)
    # The loss forms its own gradients; those through the logits are autograd's.
    expected = torch.autograd.grad(smoothed, list(model.parameters()))
    got = torch.autograd.grad(terms["cross_entropy"][0], list(model.parameters()))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["vit, mean", "vit, attention only", "vit, convolutions", "cnn"])
def test_bf16_stays_close_to_fp64_and_scores_are_fp32(kind):
    (exact, batch), (low, _) = (
        (tiny_vit(dtype, pool="attention"), random_images())
        if kind == "vit, attention only"
        else classifier(kind, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    exact.eval(), low.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert kind == "cnn" or low(batch).dtype == torch.bfloat16
        logits, terms = low.classify(batch), low.losses(batch)
    terms["cross_entropy"][0].backward()
    assert logits.dtype == terms["nll"][0].dtype == torch.float32
    truth = exact.classify(batch)
    assert (logits.double() - truth).norm() <= 3e-2 * truth.norm()
    exact.losses(batch)["cross_entropy"][0].backward()
    pairs = zip(low.parameters(), exact.parameters(), strict=True)
    got, expected = zip(*((a.grad.double().flatten(), b.grad.flatten()) for a, b in pairs), strict=True)
    assert (torch.cat(got) - torch.cat(expected)).norm() <= 6e-2 * torch.cat(expected).norm()


MINIATURE: dict[str, Any] = {"width": 4, "heads": 2, "hidden": 3, "blocks": 1}
DIFFERENTIATED: dict[str, tuple[Callable[[], Model], Callable[[], RaggedBatch]]] = {
    **{
        f"decoder, {kind}": (
            lambda fields=fields: tiny_model(**MINIATURE, **{**fields, "kv_heads": None}),
            lambda: random_batch([4, 1, 6]),
        )
        for kind, fields in DECODERS.items()
    },
    **{
        f"vision_language, {kind}": (
            lambda kind=kind: tiny({**TOWERS[kind]["vision"], **MINIATURE, "feature_layer": -1}, MINIATURE),
            lambda kind=kind: prepare(SAMPLES[kind][:3]).batch,
        )
        for kind in ("clip", "any size")
    },
}


@pytest.mark.promise("batch.layers")
@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_gradients_of_every_parameter_equal_finite_differences(kind):
    make, examples = DIFFERENTIATED[kind]
    model, batch = make(), examples()
    names = [name for name, _ in model.named_parameters()]
    values = tuple(p.detach().requires_grad_() for p in model.parameters())

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return self.model.losses(batch)["cross_entropy"][0]

    loss = Loss()
    assert gradcheck(
        lambda *given: functional_call(loss, {f"model.{n}": v for n, v in zip(names, given, strict=True)}, ()),
        values,
        fast_mode=True,
    )


# --------------------------------------------------------------------------- learning


def halves(kind: str, num: int, seed: int) -> RaggedBatch:
    """Noisy images of many sizes, for a vit in patches of 4 and for a cnn brought to squares of 16; label 0 is brighter
    on the left half, 1 on the right."""
    generator = np.random.default_rng(seed)
    images, labels = [], generator.integers(0, 2, num).tolist()
    for label in labels:
        height, width = (generator.integers(8, 49, 2) if kind == "cnn" else generator.integers(2, 7, 2) * 4).tolist()
        image = generator.normal(0, 0.5, (3, height, width))
        image[:, :, width // 2 :] += 1 if label else -1
        images.append(torch.from_numpy(image).float())
    if kind == "vit":
        return pack_images(images, labels, 4)
    return pack_squares(torch.stack([F.interpolate(one[None], (16, 16), mode="area")[0] for one in images]), labels)


VIT = {"kind": "vit", "width": 32, "blocks": 2, "heads": 2, "hidden": 64, "patch": 4, "token_drop": 0.25}


@pytest.mark.promise("images.classes")
@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [VIT, VIT | {"pool": "attention"}, VIT | {"stem": (8, 16), "stem_residual": 1}, {"kind": "cnn", "patch": 16}],
    ids=["vit", "vit, attention", "vit, convolutions", "cnn"],
)  # fmt: skip
def test_it_learns_which_half_of_an_image_is_bright(section):
    torch.manual_seed(0)
    model = build_model(model_config(section), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        made = halves(section["kind"], 32, step)
        train_step(model, [made], optimizer, weights=WEIGHTS, precision="fp32", clip=1.0)
    model.eval()
    fresh = halves(section["kind"], 300, 10_000)
    with torch.no_grad():
        right = model.classify(fresh).argmax(1) == fresh.seq_labels
    assert right.double().mean() > 0.95


# --------------------------------------------------------------------------- sections of a recipe that cannot be

SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 8}
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {  # by kind: a section, where it is wrong, and what is said
    "decoder": [
        ({"width": 30, "heads": 4}, "model", "width 30 is not a multiple of heads 4"),
        ({"heads": 8, "kv_heads": 3}, "model", "kv_heads 3 does not divide heads 8"),
        ({"width": 36, "heads": 4}, "model", "need an even head size"),
        ({"positions": "learned", "context_method": "ntk"}, "model", "context_method is of rotary positions"),
        ({"heads": 0}, "model.heads", "greater than or equal to 1"),
        ({"dropout": 1.0}, "model.dropout", "less than 1"),
        ({"widht": 32}, "model.widht", 'unknown key "widht"'),
        ({"blocks": 2, "no_rope_blocks": [2]}, "model", "no_rope_blocks names block 2; the blocks are 0 to 1"),
        ({"positions": "learned", "no_rope_blocks": [0]}, "model", "no_rope_blocks is of rotary positions"),
        ({"sliding_rope_theta": 100.0}, "model", "sliding_rope_theta goes with sliding_window"),
        ({"sliding_window": 4, "causal": False}, "model", "sliding_window needs causal: true"),
        ({"context_method": "linear", "rope_scaling": SCALING}, "model", "both scale frequencies"),
        ({"preset": "large"}, "model.preset", "must be zh_gpt or llm"),
        ({"kind": "decodr"}, "model.kind", 'no model kind "decodr"'),
    ],
    "vit": [
        ({"patch": 0}, "model.patch", "greater than or equal to 1"),
        ({"pool": "max"}, "model.pool", "must be mean or attention"),
        ({"token_drop": 1.0}, "model.token_drop", "less than 1"),
        ({"positions": "rotary"}, "model.positions", 'unknown key "positions"'),
        ({"width": 30, "heads": 4}, "model", "width 30 is not a multiple of heads 4"),
        ({"patch": 12, "stem": [8, 8, 8]}, "model", "patch 12 cannot be halved 3 times"),
        ({"stem": [0]}, "model.stem.0", "greater than or equal to 1"),
    ],
    "cnn": [
        ({"patch": 8}, "model.patch", "a multiple of 16, got 8"),
        ({"patch": 40}, "model.patch", "a multiple of 16, got 40"),
        ({"dropout": 1.0}, "model.dropout", "less than 1"),
        ({"width": 8}, "model.width", 'unknown key "width"'),
    ],
    "vision_language": [
        ({"vision": {"heads": 3}}, "model.vision", "not a multiple of heads 3"),
        ({"language": {"widht": 3}}, "model.language.widht", 'unknown key "widht"'),
    ],
    "set_sequence": [
        ({"width": 15, "heads": 3}, "model.width", "multiple of 2"),
        ({"width": 30, "heads": 2}, "model", "even head size"),
        ({"width": 32}, "model", "width 32 is not a multiple of heads 3"),
        ({"blocks": 0}, "model.blocks", "greater than or equal to 1"),
        ({"causal": False}, "model.causal", "must be True"),
    ],
}


@pytest.mark.promise("cli.overrides")
@pytest.mark.parametrize(
    ("section", "where", "message"),
    [({"kind": kind, **section}, *told) for kind, rows in REFUSED.items() for section, *told in rows],
    ids=[f"{kind}-{number}" for kind, rows in REFUSED.items() for number in range(len(rows))],
)
def test_a_model_that_cannot_be_is_refused_by_name(section, where, message):
    with pytest.raises(RecipeError, match=message) as caught:
        model_config(section)
    assert caught.value.where == where
    assert caught.value.fix


def test_every_kind_of_model_has_sections_that_are_refused():
    assert sorted(REFUSED) == model_kinds(), "REFUSED above has a section of each kind, with the words of its refusal"
