"""Chat templates in the forms that those of reasoning models have: they rewrite replies with thoughts."""

import importlib.util
from pathlib import Path

import pytest

OPEN_TURN = "'<|im_start|>assistant\\n'"
PARTS = """\
    {%- set thoughts, answer = '', message.content %}
    {%- if message.reasoning_content is string %}{% set thoughts = message.reasoning_content %}
    {%- elif '</think>' in message.content %}
        {%- set thoughts = message.content.split('</think>')[0].split('<think>')[-1] %}
        {%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}"""
OTHERS = """\
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% continue %}
    {%- endif %}"""
LOOP = "{%- for message in messages %}"
# Qwen3: thoughts of the last reply alone, empty ones if it has none; a prompt does not open them.
LATE = f"""{LOOP}{OTHERS}{PARTS}
    {{{{- {OPEN_TURN} }}}}
    {{%- if loop.last %}}{{{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}}}{{% endif %}}
    {{{{- answer + '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {OPEN_TURN} }}}}
    {{%- if enable_thinking is defined and not enable_thinking %}}{{{{- '<think>\\n\\n</think>\\n\\n' }}}}{{% endif %}}
{{%- endif %}}"""
# Qwen3.5: the same, and a prompt opens thoughts.
OPENED = LATE.replace(
    "</think>\\n\\n' }}{% endif %}\n{%- endif", "</think>\\n\\n' }}{% else %}{{- '<think>\\n' }}{% endif %}\n{%- endif"
)
# DeepSeek-R1: no reply has its thoughts, and a prompt opens them.
DROPPED = f"""{{{{- bos_token }}}}{LOOP}
    {{%- if message.role == 'assistant' %}}{{{{- 'A:' + message.content.split('</think>')[-1] + '<|im_end|>' }}}}
    {{%- else %}}{{{{- 'U:' + message.content }}}}{{% endif %}}
{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{- 'A:<think>\\n' }}}}{{% endif %}}"""
# Nemotron 3: empty thoughts before every reply that has none, or has lost them.
EMPTY = f"""{LOOP}{OTHERS}
    {{%- set content = message.content if '</think>' in message.content else '<think></think>' + message.content %}}
    {{%- if not loop.last %}}{{% set content = '<think></think>' + content.split('</think>')[-1] | trim %}}{{% endif %}}
    {{{{- {OPEN_TURN} + content | trim + '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {OPEN_TURN} }}}}
    {{%- if enable_thinking is defined and not enable_thinking %}}{{{{- '<think></think>' }}}}
    {{%- else %}}{{{{- '<think>\\n' }}}}{{% endif %}}
{{%- endif %}}"""
DROPPED_MARKED = DROPPED.replace("{{- 'A:' + ", "{{- 'A:' }}{% generation %}{{ ").replace(
    "'<|im_end|>' }}", "'<|im_end|>' }}{% endgeneration %}"
)
FAMILIES = {"late": LATE, "opened": OPENED, "dropped": DROPPED, "empty": EMPTY}


def trl_template(name: str) -> str:
    """A template that TRL ships."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
