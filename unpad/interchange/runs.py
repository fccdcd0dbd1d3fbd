"""`unpad import` and `unpad export`: a folder of Hugging Face as a run, and a run as a folder."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from unpad import storage
from unpad.data.family import family_of as data_family
from unpad.data.tokens.folder_tokenizer import folder_tokenizer
from unpad.data.tokens.tokenizer import LibraryTokenizer, Tokenizer, kept_tokenizer, load_tokenizer
from unpad.errors import CheckpointError, RecipeError, SourceError, nearest
from unpad.interchange.families import FAMILIES, family_of
from unpad.interchange.folder import CONFIG, Architecture, Fields, Table, load_model, read_json_files, save_model
from unpad.interchange.gguf_file import missing_bos, save_gguf
from unpad.interchange.hub import download_model, is_hub_name
from unpad.interchange.origin import TOKENIZER, folder_of, folder_recipe, origin_files
from unpad.models import build_model, model_config
from unpad.models.adapters import DOWN, NORM, UP, peft_files
from unpad.models.contract import Model
from unpad.recipes.data import Template, TokenizerSettings
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import LoraSettings, OptimSettings, TrainSettings
from unpad.run import checkpoint
from unpad.run import folder as run_folder
from unpad.run.base import KEY, read_base, run_weights
from unpad.run.kept import open_files
from unpad.run.report.history import LOG
from unpad.storage.paths import refuse_format
from unpad.storage.reading import shaped


def adapter_files(kept: Mapping[str, Tensor], settings: LoraSettings, table: Table, base: str) -> dict[str, bytes]:
    """Files of adapters; a layer here that stacks several layers there becomes one adapter for each.

    Args:
        kept: `kept_weights` of an adapted decoder.
        table: of the decoder's family.
        base: place of the model there.
    """
    theirs: dict[str, Tensor] = {}
    transposed = False
    for layer in (name.removesuffix(UP) for name in kept if name.endswith(UP)):
        parts = table[f"{layer}.weight"]
        heights = [part.rows for part in parts]
        ups, norm = kept[layer + UP].split(heights), kept.get(layer + NORM)
        norms = [None] * len(parts) if norm is None else norm.split(heights)
        for part, up, own_norm in zip(parts, ups, norms, strict=True):
            there = part.name.removesuffix(".weight")
            theirs[there + DOWN] = kept[layer + DOWN].clone()  # the format refuses two names for one memory
            theirs[there + UP] = up / part.change.scale
            if own_norm is not None:
                theirs[there + NORM] = own_norm / part.change.scale
            transposed |= part.change.transposed
    return peft_files(theirs, settings, base, {"task_type": "CAUSAL_LM", "fan_in_fan_out": transposed})


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


# Learning rate and epochs in the recipe of an imported run, for fine-tuning: a rate far below that from scratch.
TUNING_LR, TUNING_EPOCHS = 2e-5, 3

COPY = "copy the run's folder, which is all that `unpad predict` and `unpad serve` need"
# Families to try, in order, for a model that was not imported.
TRIED = ("llama", "qwen3", "qwen2", "mistral", "gpt2", "opt", "smollm3", "granite", "gemma", "gemma3_text", "llava")


def import_folder(name: str, out: Path) -> list[str]:
    """Write a run directory from a Hugging Face folder; all verbs that read runs can use it.

    Args:
        name: folder, or OWNER/MODEL or OWNER/MODEL@REVISION on a hub; a path that exists comes first.

    Returns:
        Lines on what was read, and the commands that use it.

    Raises:
        CheckpointError: the folder holds no model, or an unsupported one; names the field or tensor.
        SourceError: its tokenizer cannot be used.
        RecipeError: `out` holds a run, or the extra for names of a hub is not installed.
        DiskError: it cannot be written.
    """
    run_folder.refuse_run(out)
    snapshot = download_model(name) if is_hub_name(name) else None
    folder = folder_of(name) if snapshot is None else snapshot.folder
    origin = {} if snapshot is None else {"repository": snapshot.name, "commit": snapshot.commit}
    source = str(folder) if snapshot is None else f"{snapshot.name}@{snapshot.commit}"
    given = read_json_files(folder)[CONFIG]
    family = family_of(given, folder / CONFIG)
    model = load_model(folder, family, given)
    reads_images = model.config.kind != "decoder"
    tokenizer = load_tokenizer(folder_tokenizer(folder, chat=not reads_images))
    rows = model.config.model_dump().get("vocab_size")
    if rows is not None and rows < tokenizer.vocab_size:
        what = f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows}"
        raise CheckpointError(what, where=str(folder / TOKENIZER), fix="use the tokenizer of the model")
    remark = _tried(tokenizer, folder)
    recipe = folder_recipe(folder).model_copy(
        update={
            "tokenizer": TokenizerSettings(kind="file", path=str((out / TOKENIZER).resolve())),
            "optim": OptimSettings(lr=TUNING_LR),
            "train": TrainSettings(init_from=str(out), max_epochs=TUNING_EPOCHS),
        }
    )
    about = {run_folder.MADE_BY: f"{run_folder.IMPORT} {source}", run_folder.FAMILY: family.architecture, **origin}
    with _made(out, recipe, about, f"imported from {source}"):
        values = {"data": "", "imported": origin.get("repository", str(folder))}
        state = checkpoint.State(0, checkpoint.model_tensors(model.state_dict()), values)
        checkpoint.save_named(out / run_folder.CHECKPOINTS, "best", state)
        storage.write_folder(out / run_folder.KEPT, origin_files(str(folder)))
        storage.write_atomic(out / TOKENIZER, tokenizer.to_bytes())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    chat = "with its chat template" if tokenizer.chat is not None else "without a chat template"
    data = "data.vqa" if reads_images else "data.chat" if tokenizer.chat is not None else "data.text"
    use = f"unpad chat {out}" if tokenizer.chat is not None else f"unpad generate {out} --prompt TEXT"
    return [
        *([] if snapshot is None else [f"{snapshot.name} at commit {snapshot.commit}"]),
        f"{family.architecture}: {parameters:,} parameters, context {model.config.longest:,}",
        f"vocabulary {tokenizer.vocab_size:,}, {chat}",
        *([f"note: {remark}"] if remark else []),
        "",
        *([] if reads_images else [f"next:  {use}"]),
        f"       unpad train {out / run_folder.RECIPE} {data}=FILE --out runs/tuned",
    ]


@contextmanager
def _made(out: Path, recipe: Recipe, about: Mapping[str, str], message: str) -> Iterator[None]:
    """Create and lock the directory of a new run; the file that makes it a run is written last."""
    storage.make_folder(out.parent)
    storage.make_folder(out)
    with storage.RunLock(out):
        yield
        command = {"recipe": str(out / run_folder.RECIPE), "overrides": [], "precision": "fp32", **about}
        storage.write_atomic(out / run_folder.COMMAND, json.dumps(command, ensure_ascii=False, indent=1) + "\n")
        log = storage.LineLog(out / LOG)
        time = datetime.now().astimezone().isoformat(timespec="milliseconds")
        log.append({"time": time, "kind": "finished", "step": 0, "heldout_loss": None, "message": message})
        log.close()
        storage.write_atomic(out / run_folder.RECIPE, recipe.to_yaml())


def _tried(tokenizer: Tokenizer, folder: Path) -> str:
    """Reason why the chat template cannot write a test conversation; "" if it can, or without a template.

    Raises:
        SourceError: it can write no conversation.
    """
    if tokenizer.chat is None:
        return ""
    try:
        return tokenizer.chat.trial()
    except RecipeError as error:
        return f"{error.what}; {error.fix}"
    except SourceError as error:
        raise SourceError(error.what, where=str(folder), fix=error.fix) from None


# --------------------------------------------------------------------------- out


def export_run(name: str, out: Path, kind: str | None = None) -> list[str]:
    """Write a run as a folder that transformers opens.

    Args:
        kind: `model_type` of the family to write; None: the family of the run's original folder, or else the first that
            can hold the model.

    Returns:
        Lines on what was written, and on what the folder cannot represent.

    Raises:
        CheckpointError: no family holds the model; names the field of each.
        RecipeError: there is no such run or family.
        DiskError: the folder holds other contents.
    """
    refuse_format(out)
    run = _open_run(name)
    family = _family(run.model, run.given, kind, name)
    contents: dict[str, Any] = {**run.kept, **({CONFIG: run.given} if run.given else {})}
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    lines = [f"{family.architecture}: {parameters:,} parameters"]
    if not run.kept and run.tokenizer is not None:
        made, line = _tokenizer_files(run.tokenizer, run.recipe)
        contents, lines = contents | made, [*lines, line]
    save_model(run.model, out, family, contents)
    return [*lines, f"written to {out}"]


def export_gguf(name: str, out: Path, kind: str | None, precision: str) -> list[str]:
    """Write a run as a GGUF file, with the template of its conversations; errors as of `save_gguf`.

    Args:
        kind: must be None: the model decides the architecture.

    Raises:
        RecipeError: there is no such run, its model reads no texts, or `kind` is given.
    """
    if kind is not None:
        what = "a GGUF file has no family: the model decides the architecture"
        raise RecipeError(what, where="--family", fix="leave --family out")
    run = _open_run(name)
    if run.tokenizer is None or run.model.config.kind != "decoder":
        what = f"a GGUF file holds a model of texts, and this one is of kind {run.model.config.kind}"
        raise RecipeError(what, where=name, fix=COPY)
    made_here = not run.kept and run.recipe.data.converses
    template = prefix_template(run.recipe.data.template, marks=False) if made_here else None
    said = save_gguf(run.model, run.tokenizer, out, precision, template)
    described = out.with_suffix(".Modelfile")
    storage.write_atomic(described, _modelfile(out.name, run.recipe, run.model.config.longest, run.tokenizer, template))
    return [*said, f"for Ollama: ollama create {out.stem} -f {described}"]


# Ollama's form of conversations by prefixes, in Go's templates: texts take the places of names in capitals.
CONVERSATION = (
    "{{ BOS }}{{ range $place, $_ := .Messages }}{{ if $place }}{{ SEPARATOR }}{{ end }}"
    '{{ if eq .Role "system" }}{{ SYSTEM }}{{ .Content }}{{ else if eq .Role "user" }}{{ USER }}{{ .Content }}'
    "{{ else }}{{ ASSISTANT }}{{ .Content }}{{ EOS }}{{ end }}{{ end }}{{ SEPARATOR }}{{ ASSISTANT }}"
)


def _modelfile(file: str, recipe: Recipe, longest: int, tokenizer: Tokenizer, template: str | None) -> str:
    """Ollama's description of a file: settings of the run, and the form of texts where the file does not say it.

    Args:
        longest: tokens that the model reads at most.
        template: of conversations by prefixes; None: Ollama takes what the file has.
    """
    settings, names = recipe.generate, tokenizer.special_names() if isinstance(tokenizer, LibraryTokenizer) else {}
    form = CONVERSATION if template else "{{ BOS }}{{ .Prompt }}" if missing_bos(tokenizer, converses=False) else ""
    texts = {"BOS": names.get("bos_token"), "EOS": names.get("eos_token"), **recipe.data.template.model_dump()}
    for name, text in texts.items():
        form = form.replace(f"{{{{ {name.upper()} }}}}", f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}")
    parameters = {
        "num_ctx": longest, "num_predict": settings.max_new_tokens, "temperature": settings.temperature,
        "top_k": settings.top_k, "top_p": settings.top_p, "repeat_penalty": settings.repetition_penalty,
    }  # fmt: skip
    lines = [f"FROM ./{file}", *(f"PARAMETER {name} {value}" for name, value in parameters.items())]
    return "\n".join([*lines, *([f'TEMPLATE """{form}"""'] if form else []), ""])


def export_adapter(name: str, out: Path, kind: str | None = None) -> list[str]:
    """Write the adapters of a run as a folder that peft opens with the transformers model that the run's base was
    imported from or is exported to.

    Raises:
        RecipeError: the run has no adapters, its model is no decoder, or there is no such family.
        CheckpointError: no family holds the model; names the field of each.
        DiskError: the folder holds other contents.
    """
    folder = run_folder.find_run(name)
    refuse_format(out)
    run = _open_run(name)
    family = _family(run.model, run.given, kind, name)
    kept, state = checkpoint.newest_weights(folder)
    if run.recipe.lora is None or KEY not in state.values:
        raise RecipeError("this run has no adapters", where=str(folder), fix="export it without --adapter")
    if run.model.config.kind != "decoder":
        what = f"adapters of a model of kind {run.model.config.kind} have no names there"
        raise RecipeError(what, where=str(folder), fix="export it without --adapter, which merges them")
    fields = family.fields(run.model, run.given)
    table = family.table(*family.config(fields), fields)
    base = read_base(state, folder)
    imported = checkpoint.newest_weights(Path(base.run))[1].values.get("imported", base.run)
    files = adapter_files(kept, run.recipe.lora, table, imported)
    storage.make_folder(out.parent)
    storage.write_folder(out, files)
    return [f"adapters for a {family.architecture}, of {imported}", f"written to {out}"]


@dataclass(frozen=True)
class _Run:
    """A run to export.

    Args:
        kept: small files of its original folder; given: its config.json; {} for a run without one.
    """

    recipe: Recipe
    model: Model
    tokenizer: Tokenizer | None
    kept: dict[str, bytes]
    given: Fields


def _open_run(name: str) -> _Run:
    folder = run_folder.find_run(name)
    recipe = run_folder.run_recipe(folder)
    files = open_files(recipe, folder)
    model = build_model(model_config(recipe.model), data_family(recipe).num_outputs(files))
    checkpoint.put_weights(model, run_weights(folder)[0], str(folder))
    kept = origin_files(name)
    given: Fields = shaped(kept[CONFIG], Fields, folder / run_folder.KEPT / CONFIG) if CONFIG in kept else {}
    return _Run(recipe, model, kept_tokenizer(files) if TOKENIZER in files else None, kept, given)


def _family(model: Model, given: dict[str, Any], kind: str | None, name: str) -> Architecture:
    """The family to write.

    Raises:
        CheckpointError: none holds the model; names the field of each.
        RecipeError: there is no such family.
    """
    if kind is not None and kind not in FAMILIES:
        raise RecipeError(f'there is no family "{kind}"', where="--family", fix=nearest(kind, list(FAMILIES)))
    if kind is None and given:
        kind = str(given.get("model_type"))
        if kind not in FAMILIES:
            what = f'{CONFIG} that the run keeps names the family "{kind[:40]}", which is unknown'
            raise CheckpointError(what, where=f"{name}, {run_folder.KEPT}/{CONFIG}", fix="name a family with --family")
    able = [one for one in FAMILIES if FAMILIES[one].kind == model.config.kind]
    if not able or kind not in (None, *able):
        what = f"{kind or 'transformers'} has no form of a model of kind {model.config.kind}"
        raise RecipeError(what, where=name, fix=f"use --family {' or '.join(able)}" if able else COPY)
    reasons: dict[str, str] = {}
    for one in [kind] if kind is not None else [one for one in TRIED if one in able]:
        try:
            FAMILIES[one].fields(model, given)
            return FAMILIES[one]
        except CheckpointError as error:
            reasons[one] = error.what
    what = "no family holds this model: " + "; ".join(f"{one}: {reason}" for one, reason in reasons.items())
    fix = f"change the field that a family names, and train again; or {COPY}"
    raise CheckpointError(what, where=name, fix=fix)


def _tokenizer_files(tokenizer: Tokenizer, recipe: Recipe) -> tuple[dict[str, Any], str]:
    """Files of a tokenizer that was trained here, and a line on them."""
    if not isinstance(tokenizer, LibraryTokenizer):
        return {}, (
            "no tokenizer: its words are cut as earlier versions did, and no tokenizer.json says that; "
            "train again for one that does"
        )
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_names()}
    if recipe.data.converses:
        config["chat_template"] = prefix_template(recipe.data.template)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {
        TOKENIZER: tokenizer.plain_bytes(),
        "tokenizer_config.json": config,
        "generation_config.json": ids,
    }, f"its tokenizer, of {tokenizer.vocab_size:,} ids" + (", and a chat template" if recipe.data.converses else "")
