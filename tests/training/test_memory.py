"""Memory that ends in the middle of a micro-batch costs time and no result: it is cut, and the gradient is the same."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import random_batch, tiny_model
from tests.helpers.faults import NO_MEMORY
from tests.helpers.image_models import random_images, random_squares, small_cnn, tiny_vit
from tests.helpers.paths import PATHS, on
from tests.helpers.patients import random_patients, tiny_patients_model
from tests.helpers.toy import LOOP, events, rows, run, same_tensors, weights, write_toy
from tests.helpers.vision import GRIDS, prepare, tiny
from unpad.batching.batch import RaggedBatch
from unpad.errors import OutOfMemoryError
from unpad.models.adapters import adapt, adapter_names
from unpad.models.contract import Model
from unpad.models.decoder import Decoder
from unpad.processes.sums import ExactSum
from unpad.recipes.training import LoraSettings
from unpad.training.memory import Room
from unpad.training.parallel.share import Share, whole_share
from unpad.training.passes import visual_figures
from unpad.training.step import accumulate

DROPS: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.3}
HEADS: dict[str, Any] = {"width": 32, "heads": 2}  # of 16 channels, as native attention asks in fp32
LEARNED = {"layers": [0], "inner": 8, "heads": 2, "discriminator": {"layers": [-1], "inner": 8}}
MERGE = {"variant": "question", "inner": 8, "heads": 2, "ratio": 0.5}
LANGUAGE = {"language": {"width": 32, "heads": 2, **DROPS}, "vision": {"width": 32, "heads": 2, **DROPS}}


def adapted(model: Model) -> Model:
    adapt(model, LoraSettings(r=2, dropout=0.3, targets=["*"]))
    for name in adapter_names(model):
        torch.nn.init.normal_(model.get_parameter(name).data, std=0.1)
    return model.double()


MODELS: dict[str, tuple[Callable[[], Model], Callable[[], RaggedBatch]]] = {
    "text": (lambda: tiny_model(**HEADS, **DROPS, embed_dropout=0.1), lambda: random_batch([9, 1, 20, 3, 3, 12])),
    "seeds alone": (lambda: tiny_model(**HEADS, **DROPS, kv_heads=1), lambda: random_batch([9, 1, 20, 3, 3, 12])),
    "adapters": (lambda: adapted(tiny_model(**HEADS)), lambda: random_batch([9, 1, 20, 3, 3, 12])),
    "adapters of patients": (lambda: adapted(tiny_patients_model(sample=False)), lambda: random_patients([7, 0, 30])),
    "no draws": (lambda: tiny_model(**HEADS), lambda: random_batch([9, 1, 20, 3, 3, 12])),
    "rectangle": (lambda: tiny_model(**HEADS, **DROPS), lambda: random_batch([9, 1, 7, 3, 3]).pad()),
    "images": (lambda: tiny_vit(**HEADS, **DROPS, token_drop=0.3), random_images),
    "squares": (small_cnn, random_squares),
    "questions": (lambda: tiny(**LANGUAGE, prune=LEARNED), lambda: prepare(GRIDS).batch),
    "merged": (lambda: tiny(**LANGUAGE, merge=MERGE), lambda: prepare(GRIDS).batch),
    "patients": (
        lambda: tiny_patients_model(**HEADS, **DROPS, levels=3, update="product", decoder_history=True),
        lambda: random_patients([7, 0, 30, 2, 11]),
    ),
}  # fmt: skip
ALL = pytest.mark.parametrize("kind", MODELS)


class Memory(TorchDispatchMode):
    """Memory that ends at the operation of this number, once; None: never."""

    def __init__(self, ends: int | None = None) -> None:
        super().__init__()
        self.ends, self.num = ends, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        if self.num == self.ends:
            raise RuntimeError(NO_MEMORY)
        return func(*args, **(kwargs or {}))


def share_of(model: Model, micros: Sequence[RaggedBatch], room: Room | None, *, exact: bool = False) -> Share:
    sums = ExactSum(list(model.parameters())) if exact else None
    return replace(whole_share(model, micros), seed=(3, 4), sums=sums, room=room)


def gradients(
    model: Model, micros: Sequence[RaggedBatch], room: Room | None, *, exact: bool = False, memory: Memory | None = None
) -> dict[str, Tensor]:
    """Gradients of an update and all that it reports, by name."""
    model.train()
    model.zero_grad()
    weights = {name: 1.0 for name in model.weights}
    torch.manual_seed(5)
    model.begin_step(0, 10, weights)
    visual, share = dict[str, Tensor](), share_of(model, micros, room, exact=exact)
    with memory or Memory():
        sums, counts = accumulate(model, micros, weights, "fp32", 1.0, visual, share)
    found = {f"sum {name}": total for name, total in sums.items()}
    found |= {f"count {name}": torch.tensor(float(count)) for name, count in counts.items()}
    found |= {f"visual {name}": torch.tensor(value) for name, value in visual_figures(visual).items()}
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = max(float(value.abs().max()), 1.0)
        assert float((found[name] - value).abs().max()) <= 1e-12 * scale, name


@pytest.mark.slow
@pytest.mark.promise("memory.cut")
@pytest.mark.parametrize(
    ("kind", "path"),
    [*((kind, PATHS[-1]) for kind in MODELS), *((kind, path) for path in PATHS[:-1] for kind in ("text", "questions"))],
)
def test_a_micro_batch_without_memory_is_cut_and_has_the_same_gradient(kind, path):
    """Memory ends early in the forward pass, late in it, and in the backward pass; dropout and noise are on."""
    make, batch = MODELS[kind][0], MODELS[kind][1]()
    with on(path):
        model, counted = make(), Memory()
        wanted = gradients(model, [batch], None, memory=counted)
        for part in (0.2, 0.9):
            room = Room()
            found = gradients(model, [batch], room, memory=Memory(int(counted.num * part) + 1))
            assert room.most < batch.total_tokens
            assert len(room.messages) == 1
            assert_same(found, wanted)


@pytest.mark.promise("memory.cut")
@ALL
def test_parts_and_micro_batches_of_single_sequences_have_the_same_gradient(kind):
    make, batch = MODELS[kind][0], MODELS[kind][1]()
    model, singles = make(), [batch.select([i]) for i in range(batch.num_seqs)]
    whole = gradients(model, [batch], None)
    assert_same(gradients(model, [batch], Room(most=1)), whole)
    assert_same(gradients(model, singles, None), whole)


@pytest.mark.promise("memory.cut")
def test_a_run_with_dropout_does_not_depend_on_the_size_of_micro_batches(tmp_path):
    recipe = write_toy(tmp_path / "toy", precision="fp32", model={"dropout": 0.1, "embed_dropout": 0.1})
    for size in (4096, 64, 1):
        run(recipe, tmp_path / str(size), f"plan.tokens_per_micro={size}", "train.max_steps=6", "precision=fp32")
    whole = weights(tmp_path / "4096")
    for size in ("64", "1"):
        for name, tensor in weights(tmp_path / size).items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.promise("memory.cut")
@pytest.mark.parametrize("exact", [True, False])
def test_an_update_of_several_micro_batches_begins_again_with_the_first(exact):
    """Memory ends in a backward pass, when later layers have their gradients: that pass, and those before it, leave
    nothing."""
    model = MODELS["text"][0]()
    micros = [random_batch([9, 1, 20], seed) for seed in (1, 2, 3)]
    wanted = gradients(model, micros, None, exact=exact)
    for failing in (1, 2, 3):
        passes: list[int] = []

        def ends(gradient: Tensor, failing: int = failing, passes: list[int] = passes) -> Tensor:
            passes.append(1)
            if len(passes) == failing:
                raise RuntimeError(NO_MEMORY)
            return gradient

        hook = next(model.parameters()).register_hook(ends)
        assert_same(gradients(model, micros, Room(), exact=exact), wanted)
        hook.remove()
        assert len(passes) > failing + len(micros)


@pytest.mark.promise("memory.cut")
def test_the_parts_of_a_micro_batch_are_added_before_they_are_rounded():
    """A sum of rounded parts is another number: parts far below the quantum would be lost."""
    model = tiny_model(torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.embed.weight)
    micros = [random_batch([9, 1, 20, 3, 3, 12], seed) for seed in (1, 2)]
    taken: list[int] = []

    class Counting(ExactSum):
        def take(self, scale: float = 1.0) -> None:
            taken.append(1)
            super().take(scale)

    share = replace(share_of(model, micros, Room(most=10)), sums=Counting(list(model.parameters())))
    model.train()
    accumulate(model, micros, {"cross_entropy": 1.0}, "fp32", 1.0, None, share)
    assert len(taken) == 2


def test_what_was_learnt_holds_for_later_updates_and_without_an_error_bits_stay():
    model, batch = tiny_model(**HEADS, **DROPS), random_batch([9, 1, 20, 3, 3, 12])
    room = Room()
    whole = gradients(model, [batch], None)
    assert all(torch.equal(value, whole[name]) for name, value in gradients(model, [batch], room).items())
    assert room.most is None
    gradients(model, [batch], room, memory=Memory(40))
    learnt, largest = room.most, [0]
    told = model.losses

    def measured(part: RaggedBatch) -> Any:
        largest.append(part.total_tokens)
        return told(part)

    model.losses = measured
    again = gradients(model, [batch], room)
    assert_same(again, whole)
    assert max(largest) == learnt == room.most
    assert all(torch.equal(value, again[name]) for name, value in gradients(model, [batch], Room(learnt)).items())


def test_a_sequence_that_does_not_fit_by_itself_is_named():
    model = tiny_model()
    batch = replace(random_batch([9, 30, 3]), seq_ids=torch.tensor([5, 7, 8]))
    told = model.losses

    def fails(part: RaggedBatch) -> Any:
        if part.layout.max_seqlen >= 20:
            raise RuntimeError(NO_MEMORY)
        return told(part)

    model.losses = fails
    with pytest.raises(OutOfMemoryError, match="a sequence of 29 tokens does not fit by itself") as caught:
        gradients(model, [batch], Room())
    assert caught.value.seq_ids == [7]
    assert caught.value.exit_code == 8


def test_all_processes_adopt_the_least_bound():
    room = Room(200, messages=["own"])
    room.agree([(None, []), (100, ["other"]), (200, ["own"])])
    assert (room.most, room.messages) == (100, ["process 1: other", "process 2: own"])


WHOLE_LOSSES = Decoder.losses


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory for passes of 50 tokens in training; the tokens of those that did not fit."""
    failed: list[int] = []

    def losses(self: Decoder, batch: RaggedBatch, *given: Any) -> Any:
        if self.training and batch.total_tokens > 50:
            failed.append(batch.total_tokens)
            raise RuntimeError(NO_MEMORY)
        return WHOLE_LOSSES(self, batch, *given)

    monkeypatch.setattr(Decoder, "losses", losses)
    return failed


@pytest.mark.promise("memory.cut")
def test_a_run_learns_what_fits_says_so_and_goes_on_as_it_would_have(tmp_path, small_machine):
    """Dropout is on; a resumed run knows the bound, and ends with the bytes of one that was not interrupted."""
    recipe = write_toy(tmp_path)
    run(recipe, tmp_path / "whole", "train.max_steps=9")
    found = events(tmp_path / "whole", "out_of_memory")
    assert 1 <= len(found) == len(small_machine) <= 4, "later steps do not fail again"
    assert found[-1]["tokens"] <= 50
    assert found[0]["step"] == 1
    assert "the last bits of gradients may differ" in found[0]["message"]
    with pytest.MonkeyPatch.context() as patch:
        steps, step = iter(range(5)), LOOP._one_step
        patch.setattr(LOOP, "_one_step", lambda *given: (next(steps), step(*given)))
        with pytest.raises(StopIteration):
            run(recipe, tmp_path / "parts", "train.max_steps=9")
    small_machine.clear()
    run(recipe, tmp_path / "parts", "train.max_steps=9", resume=True)
    assert not small_machine, "the bound is in the checkpoint"
    assert same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert rows(tmp_path / "whole", "step") == rows(tmp_path / "parts", "step")
