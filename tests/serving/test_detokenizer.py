"""Text of an answer while its tokens come."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.tokenizers import words
from unpad.inference.engine import NewToken
from unpad.inference.generate import until
from unpad.serving.protocol import Spelled
from unpad.serving.worker import Detokenizer

TOKENIZER = words(["你好，世界。hello"], reserved=["用户："])
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20)
STOPS = st.lists(st.sampled_from(["你", "好，", "世界。h", "l", "\ufffd", "用户：", "\n用户："]), max_size=3)


def spoken(ids: list[int], stops: list[str], *, reports: bool = True) -> tuple[str, list[Spelled], bool]:
    """Text and tokens of an answer by pieces, up to a stop text."""
    detokenizer = Detokenizer(TOKENIZER, stops, reports=reports)
    said, tokens = "", []
    for place, id in enumerate(ids):
        text, ready = detokenizer.push(NewToken(0, id, -float(place), ()))
        said += text
        tokens += ready
        assert all(token.offset < len(said) for token in ready), "a token comes with the text that it begins in"
        if detokenizer.is_over:
            break
    text, ready = detokenizer.rest()
    return said + text, tokens + list(ready), detokenizer.is_over


@given(IDS, STOPS)
@settings(deadline=None, max_examples=200)
def test_the_text_is_that_of_all_tokens_up_to_the_first_stop(ids, stops):
    whole = TOKENIZER.decode(ids)
    ends = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    said, tokens, is_over = spoken(ids, stops)
    assert said == whole[: min(ends)] if ends else said == whole
    assert spoken(ids, stops, reports=False)[:2] == (said, [])
    assert [token.logprob for token in tokens] == [-float(place) for place in range(len(tokens))]
    if not is_over:
        assert len(tokens) == len(ids)
        assert b"".join(token.spelling for token in tokens).decode("utf-8", "replace") == said
    else:
        assert all(token.offset < len(said) for token in tokens)
    assert [token.offset for token in tokens] == sorted(token.offset for token in tokens)


@given(
    st.text(alphabet="ab用", max_size=12),
    st.lists(st.integers(1, 3), max_size=12),
    st.lists(st.text(alphabet="ab用", min_size=1, max_size=3), max_size=3),
)
@example("baa", [2], ["a", "baa"])  # the longer one begins first, and ends last
@settings(deadline=None, max_examples=200)
def test_a_stop_is_found_wherever_pieces_are_cut(text, cuts, stops):
    pieces, at = [], 0
    for cut in [*cuts, len(text)]:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]  # the first complete one
    wanted = text[: min(ends)[1]] if ends else text
    assert "".join(until(pieces, stops)) == wanted


def test_tokens_of_a_prompt_begin_the_answer_with_their_places():
    ids = TOKENIZER.encode_batch(["你好，x"])[0]
    detokenizer = Detokenizer(TOKENIZER, ["好"], reports=True)
    text, tokens = detokenizer.echo(
        [NewToken(0, TOKENIZER.bos_id), *(NewToken(0, id, -1.0, ((id, -1.0),)) for id in ids)]
    )
    assert text == "你好，x"
    assert (tokens[0].name, tokens[0].spelling, tokens[0].logprob) == ("<|bos|>", b"", None)
    assert [text[token.offset :].startswith(token.spelling.decode()) for token in tokens] == [True] * len(tokens)
    assert not detokenizer.is_over
    said, (token,) = detokenizer.push(NewToken(0, ids[0], -1.0, ()))
    assert (said, token.spelling.decode(), token.offset) == ("你", "你好", len(text))
    assert detokenizer.is_over
