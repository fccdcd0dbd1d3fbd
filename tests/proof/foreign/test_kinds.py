"""What is no causal language model, and trainers that do not train by the next token, are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
import transformers
import trl
from peft import LoraConfig, get_peft_model
from torch import nn

import unpad
from tests.proof.foreign.hugging_face import COMMON, build, dataset, quiet, sequences, tokenizer, trainer
from unpad.errors import ProofError

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and TRL
quiet()

BERT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
MASKED = transformers.AutoModelForMaskedLM
ROWS = dataset(sequences()).remove_columns("labels")


def model(kind: str, maker: type, **fields: object) -> nn.Module:
    made: nn.Module = maker.from_config(
        transformers.AutoConfig.for_model(kind, **{**(T5 if kind == "t5" else BERT), **fields})
    )
    return made


def words() -> object:
    made = tokenizer()
    made.mask_token = "t5"
    return made


class MyBert(transformers.BertForMaskedLM):
    """A class of a user's own."""


class MyGRPOTrainer(trl.GRPOTrainer):
    """A trainer of a user's own."""


def masked(folder: Path, net: nn.Module) -> transformers.Trainer:
    return trainer(net, folder, ROWS, collator=transformers.DataCollatorForLanguageModeling(words(), mlm=True))  # type: ignore[arg-type]


def labelled(folder: Path, net: nn.Module, labels: list[object], collator: object) -> transformers.Trainer:
    return trainer(net, folder, ROWS.add_column("labels", labels), collator=collator)  # type: ignore[arg-type]


def seq2seq(folder: Path) -> transformers.Trainer:
    net = model("t5", transformers.AutoModelForSeq2SeqLM, decoder_start_token_id=0)
    args = transformers.Seq2SeqTrainingArguments(output_dir=str(folder), **COMMON)
    data = ROWS.add_column("labels", [one[:3] for one in ROWS["input_ids"]])
    collator = transformers.DataCollatorForSeq2Seq(tokenizer(), net)
    return transformers.Seq2SeqTrainer(model=net, args=args, train_dataset=data, data_collator=collator)


PROMPTS = datasets.Dataset.from_list([{"prompt": "t4 t5"}] * 4)
OFF = {"bf16": False, "gradient_checkpointing": False}


def adapted() -> nn.Module:
    made: nn.Module = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    return made


def generating(folder: Path, kind: type[transformers.Trainer] = trl.GRPOTrainer) -> transformers.Trainer:
    args = trl.GRPOConfig(output_dir=str(folder), num_generations=2, **COMMON, **OFF)
    given = {"reward_funcs": lambda completions, **rest: [0.0] * len(completions), "processing_class": tokenizer()}
    return kind(model=adapted(), args=args, train_dataset=PROMPTS, **given)  # type: ignore[arg-type]


def lengths(value: int) -> list[object]:
    return [[value] * len(one) for one in ROWS["input_ids"]]


REFUSED: dict[str, tuple[Callable[[Path], transformers.Trainer], str]] = {
    "masked": (
        lambda folder: masked(folder, model("bert", MASKED)),
        "ProofError: BertForMaskedLM is no causal language model: it predicts",
    ),
    "ModernBERT": (
        lambda folder: masked(folder, model("modernbert", MASKED, cls_token_id=1, sep_token_id=2)),
        "ProofError: ModernBertForMaskedLM is no causal language model: it predicts",
    ),
    "a class of one's own": (
        lambda folder: masked(folder, MyBert(transformers.AutoConfig.for_model("bert", **BERT))),
        "ProofError: MyBert is no causal language model: it predicts",
    ),
    "adapters": (
        lambda folder: masked(
            folder, get_peft_model(model("bert", MASKED), LoraConfig(target_modules=["query"]))
        ),
        "ProofError: BertForMaskedLM is no causal language model: it predicts",
    ),
    "compiled": (
        lambda folder: masked(folder, torch.compile(model("bert", MASKED))),  # type: ignore[arg-type]
        "ProofError: BertForMaskedLM is no causal language model: it predicts",
    ),
    "tokens": (
        lambda folder: labelled(
            folder, model("bert", transformers.AutoModelForTokenClassification), lengths(1),
            transformers.DataCollatorForTokenClassification(tokenizer()),
        ),
        "ProofError: BertForTokenClassification is no causal language model: it predicts",
    ),
    "sequences": (
        lambda folder: labelled(
            folder, model("llama", transformers.AutoModelForSequenceClassification), [0, 1] * 4,
            transformers.DataCollatorWithPadding(tokenizer()),
        ),
        "ProofError: LlamaForSequenceClassification is no causal language model: it predicts",
    ),
    "answers": (
        lambda folder: trainer(model("bert", transformers.AutoModelForQuestionAnswering), folder, ROWS),
        "ProofError: BertForQuestionAnswering is no causal language model: it predicts",
    ),
    "T5": (seq2seq, "ProofError: T5ForConditionalGeneration is no causal language model: it predicts"),
    "a causal model whose collator hides tokens": (
        lambda folder: masked(folder, build("gpt2")), "ProofError: DataCollatorForLanguageModeling has mlm=True",
    ),
    "GRPO": (generating, "ProofError: GRPOTrainer of TRL: it generates the rows of a step"),
    "a trainer of one's own from GRPO": (
        lambda folder: generating(folder, MyGRPOTrainer), "ProofError: MyGRPOTrainer is a GRPOTrainer of TRL",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_trains_by_something_else_is_refused_by_name(name, tmp_path):
    make, sentence = REFUSED[name]
    with pytest.raises(ProofError, match=sentence) as refused:
        unpad.prove_trainer(make(tmp_path))
    assert refused.value.fix
    assert "labels" not in refused.value.fix
    assert "other weights" not in refused.value.fix


OTHER = "is no causal language model: it predicts something else than the next token"
NAMED = {
    "BertForMaskedLM": ("bert", OTHER),
    "ModernBertForMaskedLM": ("modernbert", OTHER),
    "LlamaForSequenceClassification": ("llama", OTHER),
    "RobertaForTokenClassification": ("roberta", OTHER),
    "T5ForConditionalGeneration": ("t5", OTHER),
    "BartForConditionalGeneration": ("bart", OTHER),
    "BertModel": ("bert", OTHER),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_folder_of_another_model_is_refused_by_its_name(name, unpad, tmp_path):
    kind, sentence = NAMED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [name]}))
    found = unpad("prove", "--hf", "config.json")
    assert found.code == 2
    assert f"{name} {sentence}" in " ".join(found.err.split())
    assert "attach" not in found.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {"model_type": "llama", "architectures": ["LlamaModel"]},
        {"model_type": "llama", "architectures": ["MyOwnModel"]},
        {"model_type": "gpt2", "architectures": []},
    ],
)
def test_a_folder_of_a_causal_model_is_judged(config, unpad, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "padded right" in unpad("prove", "--hf", "config.json").out
