"""Files that unpad exports for llama.cpp, opened by its library: tokens, logits and next tokens beside the run's own.

    make llama                                              # builds the library, and writes the table of
                                                            # docs/internals/llama_cpp.md
    make llama LLAMA_ARGUMENTS="--models GPT-2 --out t.md"  # one model
    make llama EXACT_GELU=1 LLAMA_ARGUMENTS="--out t.md"    # without the library's table of GELU, which is of fp16

Models have random weights, but for that of the packaged recipe `chat`, which is trained. Every model is written in
every type, and the library reads it on the processor, with keys and values in fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn

from unpad.batching.batch import from_sequences
from unpad.data.tokens.tokenizer import LibraryTokenizer, load_tokenizer, with_import
from unpad.inference.loaded import load
from unpad.interchange.gguf_file import DIGITS, PATTERNS, TYPES, save_gguf
from unpad.interchange.runs import export_gguf
from unpad.models import build_model, model_config
from unpad.models.decoder import Decoder

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "llama_cpp.md"
EXAMPLES = PAGE.parents[1] / "unpad" / "examples" / "en" / "chat.jsonl"
BEGIN, END = "<!-- llama: begin -->\n", "<!-- llama: end -->\n"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROWS, SPARE = 600, 13  # ids of a tokenizer, and rows of a model that no token has
ASKED = 40  # questions to the trained model
# Largest relative error of logits by type; that of f32 holds the table of GELU. Those of q4_0 are compared with a model
# of the same 4 bits, whose activations llama.cpp rounds to 8.
BOUNDS = {"f32": 1e-3, "f16": 5e-3, "q8_0": 1e-1, "q4_0": 1e-1}
NEXT = 12  # tokens that are compared after every text
TEXTS = (
    "The quick brown fox didn't jump over 13 lazy dogs; it's 2024, isn't it?",
    "你好，世界！今天天气很好，我们去公园散步吧。",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "吾輩は猫である。名前はまだ無い。どこで生れたか、とんと見当がつかぬ。",
    "안녕하세요 세계, 오늘은 날씨가 참 좋네요.",
    "thumbs 👍🏽 family 👩‍👩‍👧‍👦 flag 🇩🇪 done",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != 'a'}\n\n\nprint(f(1e-3))",
    "a\tb\t\tc  d   e\r\n\r\n  end of tabs \t",
    "full width １２３４５６７８９ and ﬁne ﬂuﬃ ligatures, Å = Å",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 64}
GPT2 = {"norm": "layernorm", "positions": "learned", "bias": True, "activation": "gelu_tanh", "eps": 1e-5}
GEMMA = {"activation": "geglu_tanh", "embed_scale": 8.0, "head_width": 32, "heads": 4}
GEMMA3 = {
    **GEMMA, "qk_norm": True, "branch_norms": True, "kv_heads": 2, "blocks": 6, "sliding_window": 16,
    "sliding_blocks": [0, 1, 2, 3, 4], "sliding_rope_theta": 10000.0, "rope_theta": 1e6,
}  # fmt: skip
# Name -> fields of a model, besides sizes.
MODELS: dict[str, dict[str, Any]] = {
    "Llama 2": {"tied": False},
    "Llama, groups": {"kv_heads": 1},
    "Llama, heads of 24": {"heads": 4, "head_width": 24, "kv_heads": 2, "bias": True},
    "Llama 3.1": {"kv_heads": 2, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "Llama, linear": {"context_method": "linear", "context_factor": 4.0},
    "Llama, ntk": {"context_method": "ntk", "context_factor": 4.0},
    "Mistral": {"kv_heads": 1, "tied": False},
    "Granite": {"embed_scale": 12.0},
    "Qwen2": {"qkv_bias": True, "kv_heads": 2},
    "Qwen3": {"qk_norm": True, "head_width": 128, "heads": 2, "kv_heads": 1},
    "SmolLM3": {"blocks": 5, "no_rope_blocks": [3], "kv_heads": 2},
    "Gemma": {**GEMMA, "kv_heads": 1},
    "Gemma 3": GEMMA3,
    "Gemma 3, linear": {**GEMMA3, "context_method": "linear", "context_factor": 8.0},
    "GPT-2": GPT2,
    "GPT-2, no biases": {**GPT2, "bias": False, "positions": "sinusoidal", "tied": False},
    "recipe `small`": {"preset": "llm", "width": 320, "heads": 5, "kv_heads": 5, "hidden": 896, "blocks": 6},
    "recipe `llm`": {"preset": "llm"},
    "zh_gpt with GELU": {"preset": "zh_gpt", "activation": "gelu", "context": 512},
}
TRAINED = "recipe `chat`, trained"


@dataclass(frozen=True)
class Found:
    """What one file gave.

    Args:
        ids: texts whose tokens differ.
        logits: largest relative error of a text.
        equal: texts whose next tokens are equal.
    """

    architecture: str
    ids: int
    logits: float
    equal: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS, TRAINED], metavar="NAME", help="default all")
    parser.add_argument("--out", type=Path, help="write the table here instead of the page")
    arguments = parser.parse_args()
    names = arguments.models
    torch.set_grad_enabled(False)
    rows, said = {}, ""
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            model, tokenizer = trained(Path(folder)) if name == TRAINED else made(name, number)
            rows[name] = {kind: compared(model, tokenizer, Path(folder) / "m.gguf", kind) for kind in TYPES}
            print(name, rows[name], flush=True)
        if TRAINED in names:
            said = replies(Path(folder))
            print(said)
    write(table(rows, said), arguments.out)
    wrong = [
        f"{name}, {kind}: {found}"
        for name, row in rows.items()
        for kind, found in row.items()
        if found.ids or not found.logits <= BOUNDS[kind]
    ]
    if wrong:
        sys.exit("\n".join(["tokens or logits differ:", *wrong]))


def made(name: str, number: int) -> tuple[Decoder, LibraryTokenizer]:
    """A model with random weights, and a tokenizer of one of the patterns in turn."""
    torch.manual_seed(number)
    sizes = {"width": 64, "blocks": 3, "heads": 4, "hidden": 160, "context": 512, "vocab_size": ROWS + SPARE}
    given = MODELS[name]
    fields = {**sizes, **given} if "preset" not in given else {**given, "vocab_size": ROWS + SPARE}
    model = build_model(model_config(fields), ROWS)
    assert isinstance(model, Decoder)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() < 2 else parameter.shape[1] ** -0.5 / 2))
    return model.eval(), byte_level(list(PATTERNS)[number % len(PATTERNS)])


def byte_level(pattern: str) -> LibraryTokenizer:
    """A tokenizer that cuts texts by a pattern; those of Qwen2 normalise as well."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == DIGITS:
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), library.pre_tokenizer])
    elif pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    if PATTERNS[pattern] == "qwen2":
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=ROWS, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([*TEXTS[:-1]] * 5, trainer)
    own = {"pad": SPECIALS[0], "bos": SPECIALS[0], "eos": SPECIALS[2], "stops": [SPECIALS[2]]}
    data = with_import(library.to_str().encode(), {**own, "chat_template": None, "names": {}})
    return opened(data)


def opened(data: bytes) -> LibraryTokenizer:
    tokenizer = load_tokenizer(data)
    assert isinstance(tokenizer, LibraryTokenizer)
    return tokenizer


def trained(folder: Path) -> tuple[Decoder, LibraryTokenizer]:
    """The model of the packaged recipe `chat`, after its training."""
    run = folder / "chat"
    if not run.exists():
        subprocess.run(
            [sys.executable, "-m", "unpad", "train", "chat", "--out", str(run)], check=True, stdout=subprocess.DEVNULL
        )
    loaded = load(run)
    assert isinstance(loaded.model, Decoder)
    assert isinstance(loaded.tokenizer, LibraryTokenizer)
    return loaded.model.eval(), loaded.tokenizer


def compared(model: Decoder, tokenizer: LibraryTokenizer, path: Path, kind: str) -> Found:
    """Write a model in a type, and compare what the library makes of it."""
    said = save_gguf(model, tokenizer, path, kind)
    model = rounded(model) if kind == "q4_0" else model
    # Attention over keys and values in fp32 (type 0).
    theirs = llama_cpp.Llama(
        str(path), n_ctx=512, logits_all=True, type_k=0, type_v=0, n_threads=1, n_threads_batch=1, verbose=False
    )
    library = Tokenizer.from_str(tokenizer.plain_bytes().decode())
    library.encode_special_tokens = False  # special tokens in texts are read as such
    different, worst, equal = 0, 0.0, 0
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        plain = tokenizer.encode_batch([text])[0]
        same = theirs.tokenize(text.encode(), add_bos=False, special=True) == ids
        same &= theirs.tokenize(text.encode(), add_bos=False, special=False) == plain
        different += not same
        theirs.reset()
        theirs.eval(ids)
        got = theirs.scores[: len(ids)].copy()
        worst = max(worst, error(got, logits(model, ids)))
        equal += next_tokens(model, ids) == their_next(theirs)
    theirs.close()
    return Found(said[0].partition(",")[0], different, worst, equal)


def rounded(model: Decoder) -> Decoder:
    """A copy with the weights that a file of q4_0 has."""
    copy = deepcopy(model)
    for name, layer in copy.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            stored = GGMLQuantizationType.Q4_0 if "blocks" in name.split(".") else GGMLQuantizationType.Q8_0
            layer.weight.copy_(
                torch.from_numpy(quants.dequantize(quants.quantize(layer.weight.numpy(), stored), stored))
            )
    return copy


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def replies(folder: Path) -> str:
    """A sentence on the replies of the recipe `chat`, asked by its chat template."""
    run, path = load(folder / "chat"), folder / "chat.gguf"
    export_gguf(str(folder / "chat"), path, None, "f16")
    theirs = llama_cpp.Llama(str(path), n_ctx=512, verbose=False)
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()[:ASKED]
    questions = [next(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user") for line in lines]
    equal = 0
    for question, own in zip(questions, run.generate(questions, temperature=0, max_new_tokens=64), strict=True):
        asked = [{"role": "user", "content": question}]
        answer = theirs.create_chat_completion(asked, temperature=0, max_tokens=64, repeat_penalty=1.0)
        equal += answer["choices"][0]["message"]["content"].strip() == own.strip()
    return f"Of {ASKED} questions to the trained recipe `chat` in f16, {equal} have the run's replies."


def logits(model: Decoder, ids: list[int]) -> np.ndarray:
    """Logits after every token, (len(ids), vocabulary)."""
    scores: np.ndarray = model.logits(model(from_sequences([[*ids, 0]]))).numpy()
    return scores


def next_tokens(model: Decoder, ids: list[int]) -> list[int]:
    """The likeliest continuation, token after token."""
    grown = list(ids)
    for _ in range(NEXT):
        grown.append(int(logits(model, grown)[-1].argmax()))
    return grown[len(ids) :]


def their_next(theirs: Any) -> list[int]:
    """The same of the library, after what it has read."""
    found = []
    for _ in range(NEXT):
        found.append(int(theirs.scores[theirs.n_tokens - 1].argmax()))
        theirs.eval(found[-1:])
    return found


def table(rows: dict[str, dict[str, Found]], said: str) -> str:
    heads = "".join(f" {kind}: logits | next {NEXT} |" for kind in TYPES)
    lines = [
        f"llama-cpp-python {llama_cpp.__version__}, {len(TEXTS)} texts for every file. {said}".rstrip(),
        "",
        f"| model | architecture | texts with other tokens |{heads}",
        "|---" * (3 + 2 * len(TYPES)) + "|",
    ]
    for name, row in rows.items():
        first = row[TYPES[0]]
        cells = [name, first.architecture, str(max(found.ids for found in row.values()))]
        for kind in TYPES:
            cells += [f"{row[kind].logits:.0e}", f"{row[kind].equal} of {len(TEXTS)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def write(text: str, out: Path | None) -> None:
    if out is not None:
        out.write_text(text, encoding="utf-8")
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
