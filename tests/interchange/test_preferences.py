"""Loss and gradient of pairs are those of TRL's DPOTrainer, on its own batches of the same model."""

import copy
import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.evaluation.family import per_sequence
from unpad.interchange.families import FAMILIES
from unpad.interchange.folder import CONFIG, load_model, their_tensors
from unpad.models.decoder import Decoder
from unpad.models.objective import Objective
from unpad.nn.preference import Pairs
from unpad.training.step import accumulate

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    trl = pytest.importorskip("trl")
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers

pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs

VOCAB, BETA, NUM_PAIRS = 60, 0.3, 12
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def model_of(seed: int, **fields: object) -> Any:
    torch.manual_seed(seed)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SIZES, **fields}))
    for parameter in theirs.parameters():  # away from the start, where all tokens are alike
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return theirs.eval()


def pairs() -> Any:
    draw = random.Random(5)

    def words(most: int) -> str:
        return " ".join(f"w{draw.randrange(VOCAB - 3)}" for _ in range(draw.randint(1, most)))

    rows = [{"prompt": words(12), "chosen": " " + words(20), "rejected": " " + words(20)} for _ in range(NUM_PAIRS)]
    return datasets.Dataset.from_list(rows)


def tokenizer() -> Any:
    names = ["<pad>", "<bos>", "<eos>", *(f"w{index}" for index in range(VOCAB - 3))]
    made = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def trainer_of(theirs: Any, reference: Any, folder: Path, rows: Any = None, words: Any = None) -> Any:
    arguments = trl.DPOConfig(
        str(folder), beta=BETA, per_device_train_batch_size=NUM_PAIRS, report_to=[], use_cpu=True, bf16=False,
        activation_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    return trl.DPOTrainer(
        theirs, reference, args=arguments, train_dataset=rows or pairs(), processing_class=words or tokenizer()
    )


def ours(theirs: Any, folder: Path) -> tuple[Decoder, dict[str, Any]]:
    theirs.save_pretrained(folder)
    given = json.loads((folder / CONFIG).read_text())
    return load_model(folder, FAMILIES["llama"], given), given


def flat(batch: dict[str, Tensor], reference: Decoder) -> RaggedBatch:
    """The rows of their batch as a flat run: its first half are the chosen replies, its second the rejected ones."""
    real = batch["attention_mask"].bool()
    sequences = [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], real, strict=True)]
    masks = [mask[own].bool().tolist() for mask, own in zip(batch["completion_mask"], real, strict=True)]
    made = from_sequences(sequences, masks)
    log_p = -torch.from_numpy(per_sequence(reference.token_nll(made), made)[0])
    number = torch.arange(NUM_PAIRS).repeat(2)
    order = torch.arange(2 * NUM_PAIRS).view(2, -1).t().flatten().tolist()
    return made.with_part(Pairs(number, torch.arange(2 * NUM_PAIRS) < NUM_PAIRS, log_p)).select(order)


@pytest.mark.promise("pairs.gradient")
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradient_equal_those_of_trl(tmp_path, tied):
    theirs, reference = model_of(0, tie_word_embeddings=tied), model_of(1, tie_word_embeddings=tied)
    model, given = ours(theirs, tmp_path / "model")
    start, _ = ours(reference, tmp_path / "reference")
    trainer = trainer_of(theirs, reference, tmp_path / "run")
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.train().zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}

    batch = flat(inputs, start)
    model.learn(BETA)
    weights = Objective.of(model).final(model)
    thirds = [list(range(0, 10)), list(range(10, 16)), list(range(16, 24))]
    sums, counts = accumulate(model, [batch.select(part) for part in thirds], weights, "fp32")
    means = {name: float(sums[name]) / counts[name] for name in sums}
    assert means["preference"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert abs(means["margin"]) > 0.1
    assert means["margin"] == pytest.approx(logged["rewards/margins"], rel=1e-4)
    assert means["accuracy"] == pytest.approx(logged["rewards/accuracies"])
    assert 0 < means["accuracy"] < 1

    gradients = copy.deepcopy(model)
    for parameter, own in zip(gradients.parameters(), model.parameters(), strict=True):
        parameter.data = own.grad
    found = their_tensors(gradients, FAMILIES["llama"], given)
    wanted = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    assert wanted.keys() == found.keys()
    difference = torch.cat([(found[name] - grad).flatten() for name, grad in wanted.items()])
    assert float(difference.norm() / torch.cat([grad.flatten() for grad in wanted.values()]).norm()) < 1e-5
