"""A recipe's template of conversations as a chat template in Jinja."""

from __future__ import annotations

import json

from unpad.recipes.data import Template


def prefix_template(template: Template) -> str:
    """The text that `data/tokens/encode.py` encodes piece by piece: BOS, and a prefix before each message."""
    roles = {"system": template.system, "user": template.user, "assistant": template.assistant}
    separator = json.dumps(template.separator, ensure_ascii=False)
    prefixes = json.dumps(roles, ensure_ascii=False)
    return (
        f"{{%- set prefixes = {prefixes} %}}{{{{- bos_token }}}}"
        f"{{%- for message in messages %}}{{%- if not loop.first %}}{{{{- {separator} }}}}{{%- endif %}}"
        "{{- prefixes[message.role] }}"
        "{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + eos_token }}"
        "{%- endgeneration %}{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- {separator} + prefixes['assistant'] }}}}{{%- endif %}}"
    )
