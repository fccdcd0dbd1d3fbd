"""A byte-level tokenizer and chat templates in the forms that released models have."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from unpad.data.sources.example import Turn

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
# The last reply has empty thoughts before it, which a prompt does not have.
THINKING = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.strip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content.strip('\\n') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content | trim + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}"""


def byte_level(texts: list[str], vocab_size: int = 300) -> tokenizers.Tokenizer:
    """A byte-level BPE with the special tokens of ChatML."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return library


def turns_of(talk: Sequence[tuple[str, str]]) -> tuple[Turn, ...]:
    return tuple(Turn(role, content) for role, content in talk)
