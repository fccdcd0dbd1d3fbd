"""A recipe's template of conversations as a chat template in Jinja."""

from __future__ import annotations

import json

from unpad.recipes.data import Template


def prefix_template(template: Template, marks: bool = True) -> str:
    """The text that `data/tokens/encode.py` encodes piece by piece: BOS, and a prefix before each message.

    Args:
        marks: mark which part of the text is a reply, for training; other readers may not know these marks.
    """
    begin, end = ("{%- generation %}", "{%- endgeneration %}") if marks else ("", "")
    roles = {"system": template.system, "user": template.user, "assistant": template.assistant}
    separator = json.dumps(template.separator, ensure_ascii=False)
    prefixes = json.dumps(roles, ensure_ascii=False)
    return (
        f"{{%- set prefixes = {prefixes} %}}{{{{- bos_token }}}}"
        f"{{%- for message in messages %}}{{%- if not loop.first %}}{{{{- {separator} }}}}{{%- endif %}}"
        "{{- prefixes[message.role] }}"
        f"{{%- if message.role == 'assistant' %}}{begin}{{{{- message.content + eos_token }}}}"
        f"{end}"
        "{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- {separator} + prefixes['assistant'] }}}}{{%- endif %}}"
    )
