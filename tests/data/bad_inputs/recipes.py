"""K: recipes that cannot be meant."""

from tests.data.bad_inputs.case import Bad

TOP = "data: {text: a.jsonl}\noptim:\n  lr: 0.01\ntrain: {max_steps: 1}\n"


def recipe(kind: str, text: str | bytes, what: str, line: int | None, place: str = "r.yaml") -> Bad:
    """A recipe that is refused before it reads data, with exit code 2."""
    place += f":{line}" if line else ""
    return Bad(
        kind, {"r.yaml": text.encode() if isinstance(text, str) else text, "a.jsonl": b""}, "train", what, place,
        exit_code=2,
    )  # fmt: skip


def rate(kind: str, value: str, what: str) -> Bad:
    return recipe(kind, TOP.replace("0.01", value), what, 3)


nested = "".join(f"{name}: &{name} [{', '.join([f'*{one}'] * 9)}]\n" for one, name in ("ab", "bc", "cd", "de", "ef"))
RECIPES = [
    recipe("K-01", TOP + "trian: {}\n", 'unknown key "trian"', 5),
    recipe("K-02", TOP + "optim: {lr: 1}\n", "occurs twice", 5),
    rate("K-03", "abc", "is not a number"),
    rate("K-04", ".nan", "finite number"),
    rate("K-04 negative", "-1", "greater than 0"),
    rate("K-04 zero", "0", "greater than 0"),
    rate("K-04 truth", "true", "true is not a number"),
    rate("K-04 list", "[1]", "is not a number"),
    rate("K-04 null", "null", "is not a number"),
    rate("K-04 large", "1e400", "finite number"),
    recipe(
        "K-04 blocks", TOP + "model: {kind: decoder, blocks: 100000000}\n", "less than or equal to 1000", None,
        "model.blocks",
    ),
    recipe("K-05", TOP + "on: {}\n", 'unknown key "on"', 5),
    recipe("K-06", f"a: &a [x]\n{nested}", "too large or too deeply nested", 1),
    recipe("K-06 size", "a: " + "x" * (2 << 20), "larger than 1 MB", None),
    recipe("K-07", TOP + "x: !!python/object/apply:os.system ['touch made']\n", "constructor for the tag", 5),
    rate("K-07 tag", '!!int ""', "is no int"),
    rate("K-07 truth", "!!bool maybe", "is no bool"),
    rate("K-07 date", "!!timestamp abc", "is no timestamp"),
    recipe("K-07 key", TOP + "? !!str [a]\n: 1\n", "a key is not a name", 5),
    recipe("K-08", TOP.replace("a.jsonl", "~nosuchuser/a.jsonl"), "there is no user", None, "~nosuchuser/a.jsonl"),
    recipe("K-08 empty", TOP.replace("a.jsonl", "''"), "the path is empty", 1),
    recipe("K-08 NUL", TOP.replace("a.jsonl", '"a\\0b"'), "NUL", 1),
    recipe("K-08 long", TOP.replace("a.jsonl", "a" * 5000), "more than 4,095", 1),
    recipe("K-09", TOP + "tokenizer: {kind: bpe, path: t.json}\n", "tokenizer.path needs", 5),
    recipe("K-09 bytes", TOP.encode() + b"\xff", "can't decode byte 0xff", None),
]  # fmt: skip
