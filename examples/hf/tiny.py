"""Make a folder for the examples: a tiny random model, a tokenizer with a chat template, and conversations.

python examples/hf/tiny.py FOLDER [MODEL_TYPE]
"""

import json
import random
import sys
from pathlib import Path

try:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is missing; install what this needs: pip install 'unpad[hf]'")

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<a> {% generation %}{{ message.content }} <end> "
    "{% endgeneration %}{% else %}<u> {{ message.content }} {% endif %}{% endfor %}"
)
ONE_SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 16}


def make(folder: Path, model_type: str = "llama", conversations: int = 200) -> None:
    """Write the folder; the conversations have one question and one answer each, of very different lengths."""
    numbers = [str(number) for number in range(100)]
    words = ["<pad>", "<end>", "<u>", "<a>", "<unk>", "sort", *numbers]
    model = WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    special = {
        "vocab_size": len(words),
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    own = {**EXPERTS, "router_aux_loss_coef": 0.0} if model_type == "gpt_oss" else {}
    config = AutoConfig.for_model(model_type, **{**ONE_SIZE, **special, **own})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    draw = random.Random(0)
    with (folder / "conversations.jsonl").open("w") as file:
        for _ in range(conversations):
            chosen = draw.choices(range(100), k=min(2 + int(draw.expovariate(1 / 15)), 120))
            question, answer = " ".join(map(str, chosen)), " ".join(map(str, sorted(chosen)))
            messages = [{"role": "user", "content": f"sort {question}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    make(Path(sys.argv[1]), *sys.argv[2:3])
