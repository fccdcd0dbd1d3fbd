"""The run of a patient's sets and readout, and what is predicted of a set from those before it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.samples import WIDTH, moved
from unpad.batching.layout import build_layout
from unpad.models.set_sequence.belief import Belief, Prior, Update, states_before
from unpad.models.set_sequence.encoder import Latent
from unpad.models.set_sequence.history import HistoryEncoder, SetLayout, TimeEncoding, lay_out_course
from unpad.nn.block import BlockConfig

LATENT = 5
CONFIG = BlockConfig(width=WIDTH, heads=2, hidden=24, norm="layernorm", activation="gelu", bias=True)
SETS = [3, 0, 1, 2]
TIMES = [-9.0, -9.0, -2.5, 4.0, -7.0, -1.0]


def course_of(sets: list[int] = SETS, times: list[float] = TIMES) -> SetLayout:
    return lay_out_course(build_layout(np.array(sets, int)), torch.tensor(times, dtype=torch.float64))


def random_latents(num: int = len(TIMES)) -> Latent:
    mean, log_var = torch.randn(2, num, LATENT, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Latent(mean, log_var, mean)


def test_a_readout_stands_behind_the_sets_of_every_patient_at_day_0():
    course = course_of()
    assert course.layout.cu_seqlens.tolist() == [0, 4, 5, 7, 10]
    assert course.layout.cu_seqlens.dtype == torch.int32
    assert course.layout.max_seqlen == 4
    assert course.sets.tolist() == [0, 1, 2, 5, 7, 8]
    assert course.readouts.tolist() == [3, 4, 6, 9]
    assert course.position_ids.tolist() == [0, 1, 2, 3, 0, 0, 1, 0, 1, 2]
    assert course.days.tolist() == [-9, -9, -2.5, 0, 0, 4, 0, -7, -1, 0]
    assert course.gaps.tolist() == [0, 0, 6.5, 2.5, 0, 0, 0, 0, 6, 1]  # neither across patients nor backwards
    assert course.is_first.tolist() == [True, False, False, True, True, False]
    for sets in ([], [0], [2], [1, 0], [0, 0, 5]):
        lengths = course_of(sets, [-1.0] * sum(sets)).layout.lengths().tolist()
        assert lengths == [num + 1 for num in sets]
        assert course_of(sets, [-1.0] * sum(sets)).layout.max_seqlen == max(lengths, default=0)
    nobody = course_of([], [])
    assert (nobody.layout.num_seqs, nobody.layout.max_seqlen, len(nobody.days)) == (0, 0, 0)


def test_the_state_before_a_set_is_that_of_the_patients_own_set_before():
    course = course_of()
    states = torch.arange(10.0)[:, None].requires_grad_()
    before = states_before(states, torch.tensor([-1.0]), course)
    assert before[:, 0].tolist() == [-1, 0, 1, -1, -1, 7]
    before.sum().backward()
    assert states.grad[:, 0].tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 0, 0]


def test_times_are_told_apart_and_the_far_past_stays_in_range():
    encode = moved(TimeEncoding(WIDTH))
    near, far = (encode(course_of([1], [days])) for days in (-1.0, -36_500.0))
    assert (near[0] - far[0]).norm() > 0.1
    assert torch.equal(encode(course_of([2], [-5.0, -1.0]))[2], encode(course_of([2], [-9.0, -1.0]))[2])
    assert not torch.equal(encode(course_of([2], [-5.0, -1.0]))[1], encode(course_of([2], [-9.0, -1.0]))[1])
    assert torch.isfinite(encode(course_of([1], [-1e30]))).all()


def belief(prior: Prior, update: Update) -> Belief:
    return moved(Belief(CONFIG, LATENT, prior, update, sample=True))


def prior_of(module: Belief, history: HistoryEncoder, latent: Latent) -> Tensor:
    """Mean of the prior of every set: with a posterior of no information the product is the prior."""
    vague = Latent(latent.mean, torch.full_like(latent.log_var, 60.0), latent.z)
    return module(vague, history, course_of())[0].mean


def test_a_prior_knows_the_sets_before_and_not_its_own():
    module, history = belief("history", "product"), moved(HistoryEncoder(CONFIG, LATENT, rotary=True))
    latent = random_latents()
    before = prior_of(module, history, latent)
    changed = latent.mean.clone()
    changed[1] += 1
    after = prior_of(module, history, Latent(changed, latent.log_var, changed))
    same = [0, 1, 3, 4, 5]
    torch.testing.assert_close(before[same], after[same], rtol=1e-12, atol=1e-12)
    assert (before[2] - after[2]).abs().max() > 1e-3


@pytest.mark.parametrize("prior", ["standard", "history"])
def test_without_an_update_the_posterior_is_what_was_seen(prior):
    latent, history = random_latents(), moved(HistoryEncoder(CONFIG, LATENT, rotary=False))
    posterior, divergence = belief(prior, "none")(latent, history, course_of())
    assert posterior is latent
    assert (divergence >= 0).all()
    if prior == "standard":
        closed = (latent.log_var.exp() + latent.mean.square() - 1 - latent.log_var) / 2
        torch.testing.assert_close(divergence, closed, rtol=1e-12, atol=1e-12)


def test_an_updated_posterior_is_drawn_in_training_alone():
    latent, history = random_latents(), moved(HistoryEncoder(CONFIG, LATENT, rotary=False))
    module = belief("history", "product")
    assert torch.equal((found := module(latent, history, course_of())[0]).z, found.mean)
    module.train()
    assert not torch.equal((found := module(latent, history, course_of())[0]).z, found.mean)
