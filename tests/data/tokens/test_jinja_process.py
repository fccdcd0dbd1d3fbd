"""Chat templates that would take hours or fill the memory are ended; those of released models are not."""

import pytest

from tests.helpers.chat_folder import CHATML
from unpad.data.sources.example import Turn
from unpad.data.tokens.chat_template import MOST_SOURCE, ChatTemplate, UnusableTemplateError
from unpad.errors import SourceError

pytestmark = pytest.mark.promise("models.template-bounds")

jinja_process = pytest.importorskip("unpad.data.tokens.jinja_process")

TALK = [Turn("user", "hello"), Turn("assistant", "you")]
LOOP = "{% for a in range(99999) %}"


def grown(start: str, following: str, times: int = 60) -> str:
    """A template that puts `following` into the place of n.x so many times."""
    after = f"{{% for i in range({times}) %}}{{% set n.x = {following} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{after}"


WITHOUT_END = {
    "empty loops": LOOP * 3 + "{% endfor %}" * 3,
    "text in loops": LOOP + "x" * 100_000 + "{% endfor %}",
    "doubling": grown("'ab'", "n.x + n.x"),
    "one list in itself twice, shown": grown("[1]", "[n.x, n.x]") + "{{ n.x }}",
    "a macro that calls itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "list times": "{{ ([0] * 10**9) | length }}",
    "a large power": "{{ 7**(10**9) % 3 }}",
    "a width": "{{ '%1000000000d' % 5 }}",
    "a long text": "{{ 'a' * 300000 }}",
}
REFUSED = {
    "the class of a text": "{{ ''.__class__.__mro__ }}",
    "a method that changes": "{{ messages.append(1) }}",
    "a template that refuses": "{{ raise_exception('no') }}",
    "chance": "{{ [1, 2] | random }}",
    "lipsum": "{{ lipsum(n=1) }}",
    "another file": "{% include '/dev/zero' %}",
    "brackets": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "ifs": "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "its length": " " * (MOST_SOURCE + 1),
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|im_end|>"}, ["<|im_end|>"])


@pytest.mark.parametrize("name", WITHOUT_END)
def test_a_template_that_goes_on_without_end_is_stopped(name, monkeypatch):
    monkeypatch.setattr(jinja_process, "MOST_SECONDS", 0.3)
    with pytest.raises(UnusableTemplateError, match="not usable: it") as caught:
        template(WITHOUT_END[name]).prompted(TALK)
    assert "import it again" in caught.value.fix
    assert template(CHATML).prompted(TALK).text


@pytest.mark.parametrize("name", REFUSED)
def test_what_leaves_the_sandbox_or_nests_is_refused(name):
    with pytest.raises(SourceError) as caught:
        template(REFUSED[name]).prompted(TALK)
    assert caught.value.fix


def test_long_conversations_and_long_messages_are_within_the_bounds():
    turns = [Turn("user", "word " * 40), Turn("assistant", "answer " * 40)] * 300
    assert len(template(CHATML).prompted([*turns, Turn("user", "?")]).replies) == 300
    assert len(template(CHATML).prompted([Turn("user", "a b " * 500_000)]).text) > 2_000_000


FEATURES = {
    "{{ messages | map(attribute='role') | join(',') }}": "user,assistant",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
    "{{ (messages | first).content | upper | trim }}": "HELLO",
    "{{ {'b': 1, 'a': [True, 'ü']} | tojson }}": '{"b": 1, "a": [true, "ü"]}',
    "{{ {'b': 1} | tojson(indent=1, ensure_ascii=False) }}": '{\n "b": 1\n}',
    "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}": "a=1",
    "{% for k, v in {'a': 1} | items %}{{ k }}={{ v }}{% endfor %}": "a=1",
    "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ loop.last }}{% else %}no{% endfor %}": "1True",
    "{% for m in [] %}{% else %}none{% endfor %}": "none",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% break %}{% endfor %}": "2",
    "{% macro a(x, y=2) %}{{ x }}{{ y }}{{ caller() if caller else '' }}{% endmacro %}{{ a(1) }}": "12",
    "{% macro a(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call a(1) %}in{% endcall %}": "1in",
    "{% filter upper %}a{% endfilter %}{% with x = 1 %}{{ x }}{% endwith %}": "A1",
    "{% set x %}a{{ 1 }}{% endset %}{{ x ~ x }}{{ x[::-1] }}": "a1a11a",
    "{{ 7 // 2 + 2 ** 3 - 7 % 4 * 1.5 }}{{ -3 }}{{ 1 < 2 < 3 }}{{ 1 in [1] and 'r' not in 'a' }}": "6.5-3TrueTrue",
    "{{ 'a' * 3 }}{{ [1] * 2 + [3] }}{{ 'a,b'.split(',')[-1] }}{{ ' a '.strip() }}": "aaa[1, 1, 3]ba",
    "{{ 'x'.startswith('x') }}{{ 'abc'.replace('b', 'd') }}{{ 'a\nb' | indent(2) }}": "Trueadca\n  b",
    "{{ none }}{{ undefined_name }}{{ x is defined }}{{ 'a' is string }}{{ {} is mapping }}": "NoneFalseTrueTrue",
    "{{ [3, 1, 3] | unique | sort | list }}{{ [1, 2] | sum }}{{ 2.345 | round(1) }}{{ [1, 2] | max }}": "[1, 3]32.32",
    "{{ ('<b>' | safe) + '<' }}{{ '<' | e }}": "<b>&lt;&lt;",
}


@pytest.mark.parametrize("source", FEATURES)
def test_what_templates_use_gives_what_transformers_gives(source):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    messages = [{"role": turn.role, "content": turn.content} for turn in TALK]
    theirs = utils.render_jinja_template([messages], chat_template=source)[0][0]
    assert template(source)._render(TALK, prompt=False)[0] == theirs
    if "tojson" not in source:
        assert theirs.replace(" ", "") == FEATURES[source].replace(" ", "")
