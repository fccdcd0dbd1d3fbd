"""The set decoder makes as many events as a set has, from its latent alone."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.samples import CONFIG, WIDTH, members_of, moved
from unpad.models.set_sequence.belief import SetDecoder, slot_table
from unpad.nn.block import BlockConfig

LATENT = 5


def decoder(**fields: Any) -> SetDecoder:
    return moved(SetDecoder(CONFIG, LATENT, **{"layers": 2, "noise": 0.1, "history": False, **fields}))


def random(num: int, width: int) -> Tensor:
    return torch.randn(num, width, dtype=torch.float64, generator=torch.Generator().manual_seed(num))


def test_slots_are_told_apart_whatever_their_number():
    table = slot_table(2000, WIDTH)
    assert table.shape == (2000, WIDTH)
    assert table.abs().max() <= 1
    distances = torch.cdist(table, table) + 10 * torch.eye(2000, dtype=torch.float64)
    assert distances.min() > 0.05
    assert torch.pdist(decoder()(random(1, LATENT), members_of([5])).detach()).min() > 1e-3


def test_nothing_is_drawn_in_eval_and_noise_is_of_training():
    module, latents, members = decoder(), random(2, LATENT), members_of([3, 4])
    assert torch.equal(module(latents, members), module(latents, members))
    module.train()
    assert not torch.equal(module(latents, members), module(latents, members))
    torch.manual_seed(7)
    noisy = module(latents, members)
    torch.manual_seed(7)
    assert torch.equal(module(latents, members), noisy)
    quiet = decoder(noise=0.0)
    assert torch.equal(quiet.train()(latents, members), quiet.eval()(latents, members))


def test_events_come_out_about_as_long_as_embeddings():
    torch.manual_seed(0)
    config = BlockConfig(width=96, heads=2, hidden=192, norm="layernorm", activation="gelu", bias=True)
    module = SetDecoder(config, 64, layers=2, noise=0.0, history=False)
    module.reset()
    made = module(torch.randn(50, 64), members_of([4] * 50))
    assert 0.5 < made.norm(dim=1).mean() < 2
