"""The tokenizer of a Hugging Face folder: its special tokens, its chat template and the ids that stop."""

import json
from pathlib import Path
from typing import Any

from unpad import storage
from unpad.data.tokens.tokenizer import MAX_TOKENIZER_BYTES, with_import
from unpad.errors import SourceError
from unpad.storage.reading import read_file
from unpad.storage.strict_json import refuse_many

TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE, OLDER_TEMPLATE = "chat_template.jinja", "chat_template.json"
MOST_BYTES = 1 << 26  # of any other file; indexes of weights and lists of tokens have up to some 15 MB
ANOTHER_COPY = "use another copy"
MODEL_CONFIGS = ("generation_config.json", "config.json")  # the first that names stops counts
SAVE = "save it there with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER), or set tokenizer.path to another"
# Tokens that stand between documents, for models that know no BOS.
BETWEEN = ("<|endoftext|>", "<|end_of_text|>")


def folder_tokenizer(folder: Path, *, chat: bool = True) -> bytes:
    """The tokenizer.json of a folder, with what its other files say of special tokens, for `load_tokenizer`.

    Args:
        chat: whether the chat template comes along.

    Raises:
        SourceError: a file is missing, damaged or says nothing of the token that ends a text.
    """
    where = str(folder / TOKENIZER)
    data = _read(folder / TOKENIZER)
    if data is None:
        raise SourceError(f"there is no {TOKENIZER}", where=str(folder), fix=SAVE)
    try:
        refuse_many(data)
        ids = _token_ids(json.loads(data))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"not a tokenizer.json: {error}"[:200], where=where, fix=SAVE) from None
    names = _names(folder)
    texts = {id: text for text, id in ids.items()}
    stops = [texts[id] for id in _stop_ids(folder) if id in texts]
    eos = names.get("eos_token") or next(iter(stops), None)
    if eos is None or eos not in ids:
        what = f"no token ends a text: eos_token is {eos!r:.200}"
        raise SourceError(what, where=str(folder / TOKENIZER_CONFIG), fix="name eos_token in tokenizer_config.json")
    between = [name for name in BETWEEN if name in ids]
    bos = names.get("bos_token") or next(iter(between), eos)
    pad = names.get("pad_token") or next(iter(between), eos)
    for name, value in (("bos_token", bos), ("pad_token", pad)):
        if value not in ids:
            what = f"{name} is {value!r:.200}, which the tokenizer does not have"
            raise SourceError(what, where=str(folder / TOKENIZER_CONFIG), fix=f"correct {name}")
    imported = {
        "pad": pad,
        "bos": bos,
        "eos": eos,
        "stops": list(dict.fromkeys([eos, *stops])),
        "chat_template": _chat_template(folder) if chat else None,
        "names": names,
    }
    try:
        return with_import(data, imported)
    except UnicodeEncodeError as error:
        what = f"a special token or the chat template holds half of a character, U+{ord(error.object[error.start]):04X}"
        raise SourceError(what, where=str(folder), fix="write it as valid UTF-8") from None


def most_bytes(name: str) -> int:
    """The size up to which a file of such a folder is read."""
    return MAX_TOKENIZER_BYTES if name == TOKENIZER else MOST_BYTES


def _read(path: Path) -> bytes | None:
    """Contents of a file of the folder; None if it does not exist."""
    return read_file(path, SourceError, most_bytes(path.name), ANOTHER_COPY) if path.exists() else None


def _fields(path: Path) -> dict[str, Any]:
    """A JSON object of the folder; {} if there is no such file."""
    data = _read(path)
    fields = {} if data is None else storage.parse_json(data, path)
    if not isinstance(fields, dict):
        raise SourceError("not a JSON object", where=str(path), fix=ANOTHER_COPY)
    return fields


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """All tokens of a tokenizer.json."""
    vocabulary = fields["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model: token and score
        vocabulary = {entry[0]: id for id, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in fields.get("added_tokens") or []}
    ids: dict[str, int] = {**vocabulary, **added}
    if not all(isinstance(text, str) and type(id) is int for text, id in ids.items()):
        raise TypeError("its vocabulary is not of texts and numbers")
    return ids


def _names(folder: Path) -> dict[str, str]:
    """Special tokens by the names of transformers, such as bos_token."""
    names: dict[str, str] = {}
    for fields in (_fields(folder / SPECIAL_TOKENS), _fields(folder / TOKENIZER_CONFIG)):
        for name, value in fields.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                names[name] = text
    return names


def _stop_ids(folder: Path) -> list[int]:
    """Ids that end a reply, by the configuration of generation or else of the model."""
    for name in MODEL_CONFIGS:
        ids = _fields(folder / name).get("eos_token_id")
        if ids is not None:
            return [id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int)]
    return []


def _chat_template(folder: Path) -> str | None:
    """The chat template; the one called "default" of several, or one that refuses conversations where none is."""
    data = _read(folder / CHAT_TEMPLATE)
    template: Any = None if data is None else data.decode(errors="replace")
    for name in (OLDER_TEMPLATE, TOKENIZER_CONFIG):
        template = template or _fields(folder / name).get("chat_template")
    if isinstance(template, list) and template:
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        what = f"the folder names its templates {', '.join(map(str, named))}, and none of them default"
        template = named.get("default", f"{{{{ raise_exception({json.dumps(what)}) }}}}")
    return template if isinstance(template, str) else None
