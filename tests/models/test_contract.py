"""Every kind of model keeps the contract, and can do what its capabilities say."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from inspect import getmembers, isfunction, signature

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_model
from tests.helpers.image_models import CLASSES
from tests.helpers.models import Stub
from tests.helpers.patients import NUM_CODES
from tests.helpers.tiny_models import EXAMPLES, Example
from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.models import model_kinds
from unpad.models.contract import (
    ORIGIN,
    Classifies,
    Generates,
    HasLatent,
    Model,
    ModelConfig,
    PredictsSets,
    PrunesTokens,
    ReadsCodeVectors,
    ReadsTokens,
    ScoresTokens,
)
from unpad.nn.cache import KeyValueCache


@pytest.fixture(params=sorted(EXAMPLES))
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


@pytest.fixture
def model(example: Example) -> Model:
    return example[0]().eval()


@pytest.fixture
def batch(example: Example) -> RaggedBatch:
    return example[1]()


def test_every_kind_of_model_has_an_example_here() -> None:
    assert sorted(EXAMPLES) == model_kinds()


def test_losses_have_the_counts_that_were_promised_and_every_weight_a_term(model: Model, batch: RaggedBatch) -> None:
    counts = model.count_targets(batch)
    terms = model.losses(batch)
    assert {name: count for name, (_, count) in terms.items() if count} == {n: c for n, c in counts.items() if c}
    assert model.weights.keys() <= terms.keys()
    assert model.trained == model.weights
    assert model.begin_step(0, 10, {name: 1.0 for name in model.weights}) == []


def test_members_with_defaults_hold_what_the_contract_says(model: Model, batch: RaggedBatch) -> None:
    assert isinstance(model.config, ModelConfig)
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


def test_a_model_has_the_capabilities_of_its_example_and_no_other(example: Example, model: Model) -> None:
    known = (ReadsTokens, ScoresTokens, Generates, PrunesTokens, Classifies, HasLatent, PredictsSets, ReadsCodeVectors)
    assert {one for one in known if isinstance(model, one)} == example[2]
    for one in known:  # whoever has the members says so
        members = one.__abstractmethods__ - Model.__abstractmethods__
        has_all = bool(members) and all(hasattr(type(model), name) for name in members)
        assert not has_all or isinstance(model, one), one.__name__


def test_capabilities_do_what_they_say(model: Model, batch: RaggedBatch) -> None:
    if isinstance(model, ReadsTokens):
        assert model.embed_tokens(torch.tensor([0, 1, 1])).shape[0] == 3
    if isinstance(model, ScoresTokens):
        assert model.token_nll(batch).shape == (batch.num_targets,)
    if isinstance(model, Generates):
        assert isinstance(batch.layout, Layout)
        cache = KeyValueCache(batch.layout, batch.layout.max_seqlen + 1)
        assert model.logits(model.last_hidden(batch, cache)).shape == (batch.num_seqs, model.vocab_size)
    if isinstance(model, PrunesTokens):
        model(batch)
        assert model.given.shape == model.kept[-1].shape == (batch.num_seqs,)
        assert [int(one.sum()) for one in model.kept] == [len(one) for one in model.kept_tokens]
        assert bool((model.kept[-1] < model.given).any()), "hard is the mode of evaluation"
    if isinstance(model, Classifies):
        assert model.classify(batch).shape == (batch.num_seqs, 2 if isinstance(model, PredictsSets) else CLASSES)


def test_a_model_of_sets_answers_about_sets_and_sequences() -> None:
    model, batch = (make() for make in EXAMPLES["set_sequence"][:2])
    assert isinstance(model, PredictsSets)
    num_sets, size = batch.attended.lengths().sum() - batch.num_seqs, model.posterior(batch)[0].shape[1]
    assert [part.shape for part in model.posterior(batch)] == [(num_sets, size)] * 3
    assert model.reconstruct(batch, torch.zeros(num_sets, size, dtype=torch.float64)).shape == (num_sets,)
    hazards = model.hazards(batch)
    assert isinstance(hazards, Tensor)
    assert len(hazards) == len(model.vectors(batch, "patient")) == batch.num_seqs
    assert model.next_codes(batch).shape == (num_sets, NUM_CODES)
    assert model.vectors(batch, "set").shape == (num_sets, size)
    assert model.code_nll(batch).shape == (batch.total_tokens,)
    assert [part.shape for part in model.course(batch)] == [(num_sets,)] * 2


def test_methods_that_compute_with_weights_are_named(model: Model) -> None:
    """Where the weights of a model are divided among processes, they are whole within these alone."""
    methods = [(name, one) for name, one in getmembers(type(model), isfunction) if one.__module__.startswith("unpad.")]
    inputs = {"batch", "media", "ids", "hidden", "stream"}
    found = {name for name, one in methods if name[0] != "_" and inputs & signature(one).parameters.keys()}
    assert set(model.all_computing()) == found - {"count_targets", "stream_of"}
    assert all(model.get_submodule(name) for name in model.optional)


def test_code_vectors_are_taken() -> None:
    model = EXAMPLES["set_sequence"][0]()
    assert isinstance(model, ReadsCodeVectors)
    assert model.code_vector_size == 4
    model.load_code_vectors(torch.eye(NUM_CODES, 4))


def test_what_training_tells_a_model_replaces_its_own_weights() -> None:
    model = tiny_model()
    model.trained = {"cross_entropy": 0.5}
    assert (model.trained, model.weights) == ({"cross_entropy": 0.5}, {"cross_entropy": 1.0})


def test_a_model_that_says_nothing_of_itself_is_a_causal_model_of_tokens() -> None:
    model = Stub()
    assert (model.additions, model.label_smoothing, model.causal, model.head_dim) == ((), 0.0, True, None)
    assert (model.claims, dict(model.weights), model.trained) == ("tokens", {"cross_entropy": 1.0}, model.weights)


def test_a_model_without_a_member_of_the_contract_cannot_be_built() -> None:
    class Incomplete(Stub, Classifies):
        pass

    with pytest.raises(TypeError, match="classify"):
        Incomplete()  # type: ignore[abstract]
