"""Verbs that use the model of a run: measures, answers, vectors and conversations."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from unpad.cli import options
from unpad.cli.serving import require_serve
from unpad.errors import RecipeError
from unpad.storage.paths import new_path, refuse_format, user_path
from unpad.storage.remote import data_path
from unpad.terminal.printing import print_lines, print_text
from unpad.terminal.progress import progress

verbs = typer.Typer()


@verbs.command(name="import", epilog="Example: unpad import ./Qwen3-0.6B --out runs/qwen3")
def import_(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|NAME", help="A folder with config.json and safetensors, or OWNER/MODEL[@REVISION] of a hub."
        ),
    ],
    out: Annotated[Path, typer.Option(parser=new_path, help="Directory of the new run.")],
    debug: options.Debug = False,
) -> None:
    """Read a model of Hugging Face into a run, with its tokenizer and its chat template."""
    from unpad.run.folder import refuse_run

    refuse_run(out)
    if user_path(folder).is_dir():
        options.load_torch()
    from unpad.interchange.runs import import_folder

    with progress(f"importing {folder}"):
        lines = import_folder(folder, out)
    print_lines(lines)


@verbs.command(epilog="Example: unpad export runs/tuned ./tuned    or    zh_chat-1 runs/small --int8")
def export(
    run: options.RunArgument,
    folder: Annotated[
        Path,
        typer.Argument(
            parser=new_path, metavar="FOLDER", help="The folder to write, new or empty; or FILE.gguf, or FILE.onnx."
        ),
    ],
    family: Annotated[
        str | None, typer.Option(help="model_type to write, such as llama; default that of the imported folder.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapters of a run alone, for peft.")] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write a run without adapters, which needs neither peft nor its base.")
    ] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Write a run with weights of 8 bits.")] = False,
    precision: Annotated[
        str, typer.Option("--type", help="Of matrices in a GGUF file: f32, f16, q8_0 or q4_0.")
    ] = "f16",
    debug: options.Debug = False,
) -> None:
    """Write a run as a Hugging Face folder, which transformers opens with equal logits, as a GGUF file, or, one of
    pictures or patients, as an ONNX file.

    With --merge or --int8: as another run, for all verbs but training it on.
    """
    from unpad.run.folder import refuse_run

    if merge + int8 + adapter > 1 or ((merge or int8) and family is not None):
        fix = "give one of them, and no --family"
        raise RecipeError("--merge, --int8 and --adapter write one thing each", where="unpad export", fix=fix)
    if merge or int8:
        refuse_run(folder, "choose another FOLDER")
    options.check_run(run)
    from unpad.inference.onnx_file import export_onnx
    from unpad.interchange.runs import export_adapter, export_gguf, export_run
    from unpad.run.base import merge_run, quantize_run
    from unpad.run.kept import what_next

    with progress(f"writing {folder}"):
        if merge:
            lines = what_next(merge_run(run, folder))
        elif int8:
            lines = [*quantize_run(run, folder), f"next:  unpad eval {folder}"]
        elif adapter:
            lines = export_adapter(run, folder, family)
        elif folder.suffix == ".gguf":
            lines = export_gguf(run, folder, family, precision)
        elif folder.suffix == ".onnx":
            lines = export_onnx(run, folder, family)
        else:
            lines = export_run(run, folder, family)
    print_lines(lines)


@verbs.command(name="eval", epilog="Example: unpad eval zh_chat-1 --json")
def evaluate(
    run: options.RunArgument,
    as_json: options.Json = False,
    replies: Annotated[
        int, typer.Option(help="Also show this many questions with replies, misread images or misjudged patients.")
    ] = 0,
    cost: Annotated[
        bool, typer.Option("--cost", help="Also measure the time, memory and work that fewer visual tokens save.")
    ] = False,
    part: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option("--split", help="Part to evaluate; default test if there is one, else valid."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(parser=data_path, help="New labelled data in the form of the run's, a file or a folder, instead."),
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            parser=new_path, help="Also write a row per example here: parquet, or JSON lines if it ends in .jsonl."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also show measures of single codes of patients.")] = False,
    settings: options.Overrides = None,
    debug: options.Debug = False,
) -> None:
    """Evaluate a run on data it was not trained on, with 95 % confidence intervals.

    The default is the test part of the run's own data if there is one, otherwise the valid part, by which training
    chose the weights.
    """
    fields = settings or []
    if fields and data is None:
        raise RecipeError("fields are of new data", where=fields[0], fix="name it with --data")
    options.check_run(run, fields, places=[data] if data is not None else [])
    from unpad.evaluation.metrics import metric_lines
    from unpad.evaluation.run import evaluate_new, evaluate_own
    from unpad.storage.parquet import check_file
    from unpad.terminal.table import number_of, wrapped

    if rows is not None:
        check_file(rows, ".parquet", ".jsonl")
    with progress("evaluating"):
        if data is None:
            found = evaluate_own(run, replies, part, rows)
        else:
            found = evaluate_new(run, replies, part, data, rows, fields)
        metrics, shown = found.metrics, found.lines
        if cost:
            from unpad.evaluation.vqa_cost import evaluate_cost

            metrics |= evaluate_cost(run)
    if as_json:
        print_lines(shown if data is not None else (), to_errors=True)  # such as rows of unknown classes
        options.print_json(found.to_json() | found.facts)
    else:
        briefly = {name: one for name, one in metrics.items() if everything or not name.startswith("made_code: ")}
        few = number_of(len(metrics) - len(briefly), "single codes")
        shown += [*metric_lines(briefly), *([f"and of {few}: --all"] if len(briefly) < len(metrics) else [])]
        judged = [line for one in found.simple.values() for line in wrapped(one["sentence"])]
        print_lines([*shown, *judged])


@verbs.command(epilog="Example: unpad predict images-1 photos --out classes.csv    or    events-1 new.parquet")
def predict(
    run: options.RunArgument,
    data: Annotated[
        Path | None,
        typer.Argument(
            parser=data_path, metavar="DATA", help="Pictures, tables of patients, or questions or prompts, a row each."
        ),
    ] = None,
    settings: options.Sampling = None,
    out: Annotated[
        Path | None, typer.Option(parser=new_path, help="Write all rows: a .csv, .jsonl or .parquet file.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Predict each row of new data: class, answer, reply or risk.

    A row that cannot be used stops it; data.on_bad_row=quarantine goes on, with exit code 3."""
    fields = [_generate_field(text) for text in settings or []]
    options.check_run(run, fields, places=[] if data is None else [data])
    from unpad.inference.loaded import load
    from unpad.inference.predict import predict as predict_rows
    from unpad.inference.prompts import gives_seed

    loaded = load(run, fields)
    found = predict_rows(loaded, data, out, same_seed=gives_seed(fields))
    print_lines([*loaded.notes, *found.lines], to_errors=True)
    options.print_found(as_json, lambda: found.rows, lambda: found.table() if out is None else [found.summary(out)])
    raise typer.Exit(3 if found.faults else 0)


@verbs.command(
    hidden=True, epilog="Example: unpad infer images-1 --image cat.jpg    or    vqa-1 --file in.csv --out answers.jsonl"
)
def infer(
    run: options.RunArgument,
    image: Annotated[
        list[Path] | None, typer.Option(parser=data_path, help="An image file, or a folder of them; may be repeated.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Question about each image, for a run that answers.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Most classes to show per image.")] = 5,
    table: Annotated[
        Path | None, typer.Option("--csv", parser=new_path, help="Write image, class, probability and fault here.")
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(parser=new_path, help="Draw the patches that a pruned model kept for its answer, as SVG."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(parser=data_path, help="Answer a table of images and questions: JSON lines or CSV.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=new_path, help="With --file: JSON lines, continued where they stop.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Classify images, or answer a question about them; `predict` reads any data. Exit code 3 when a file cannot be
    used."""
    if image is None and file is None:
        fix = "name it with --image FILE, or predict any data: unpad predict RUN DATA"
        raise RecipeError("no image is named", fix=fix)
    beside = question is not None or table is not None or show is not None or as_json or image is not None
    _check_file(file, out, "images and questions", "--image, --question, --csv, --show and --json", alone=not beside)
    if table is not None:
        refuse_format(table, ".csv", ".txt")
    options.check_run(run, places=[*(image or []), *([] if file is None else [file])])
    from unpad.inference.loaded import load

    if file is not None and out is not None:
        from unpad.inference.bulk import answer_questions

        written = answer_questions(load(run), file, out)
        print_lines([*written.unread, written.summary])
        raise typer.Exit(3 if written.faults else 0)
    assert image is not None, "options were checked"
    from unpad.inference.images import ask, classify, ledger, list_images, to_csv
    from unpad.inference.prompts import lost_of, prompt_warning
    from unpad.run.report.vqa import check_request, write_pictures
    from unpad.storage import write_atomic

    if show is not None:
        check_request(show, question)
    loaded, paths = load(run), list_images(image)
    if question is None:
        answers = classify(loaded, paths, top)
    else:
        answers = ask(loaded, paths, question, show=show is not None)
        if warning := prompt_warning(lost_of(loaded.tokenizer, [question])):
            print_lines([warning], to_errors=True)
    print_lines(ledger(loaded, answers), to_errors=True)
    drawn = [] if show is None else write_pictures([answer.shown for answer in answers if answer.shown], show)
    if table is not None:
        write_atomic(table, to_csv(answers), private=True)
    lines = [*(answer.line() for answer in answers), *drawn]
    options.print_found(as_json, lambda: [answer.to_json() for answer in answers], lambda: lines)
    raise typer.Exit(3 if any(answer.fault for answer in answers) else 0)


@verbs.command(epilog="Example: unpad embed events-1 --data new_patients --level set --out sets.parquet")
def embed(
    run: options.RunArgument,
    out: Annotated[Path, typer.Option(parser=new_path, help="The parquet file to write.")],
    data: Annotated[
        Path | None, typer.Option(parser=data_path, help="Patients, as in the run's data; default the run's own.")
    ] = None,
    level: Annotated[Literal["patient", "set"], typer.Option(help="One row per patient, or per set.")] = "patient",
    settings: options.Overrides = None,
    debug: options.Debug = False,
) -> None:
    """Write vectors of patients, or of the sets of their events, to a parquet file with the patients' ids; their risks
    alone, as a table: `predict`."""
    options.check_run(run, settings or [], places=[data] if data is not None else [])
    from unpad.inference.embed import embed_file
    from unpad.inference.loaded import load

    with progress("embedding"):
        lines = embed_file(load(run, settings or []), data, level, out)
    print_lines(lines)


@verbs.command(epilog="Example: unpad generate zh_chat-1 --prompt 你好 temperature=0.8")
def generate(
    run: options.RunArgument,
    settings: options.Sampling = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue, or a question; may be repeated.")] = None,
    heldout: Annotated[int, typer.Option(help="Continue the openings of this many held-out documents instead.")] = 0,
    file: Annotated[
        Path | None, typer.Option(parser=data_path, help="Answer the prompts of JSON lines; --out gets the answers.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=new_path, help="With --file: JSON lines, continued where they stop.")
    ] = None,
    system: options.System = "",
    schema: Annotated[
        Path | None, typer.Option(parser=user_path, help="Reply in JSON of the JSON Schema in this file.")
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Continue texts, or answer questions; without --prompt, read one prompt per line of standard input.

    Each prompt draws with the next seed, unless seed= is given."""
    fields = [_generate_field(text) for text in settings or []]
    beside = bool(prompt or heldout or system or as_json)
    _check_file(file, out, "prompts and system texts", "--prompt, --heldout, --system and --json", alone=not beside)
    options.check_run(run, fields, places=[place for place in (file, schema) if place is not None])
    from unpad.inference.loaded import load
    from unpad.inference.prompts import NO_PICTURE, gives_seed, prompt_warning, system_note

    loaded = load(run, fields)
    if schema is not None:
        from unpad.inference.generate import with_schema

        shaped = with_schema(loaded.recipe.generate, schema, loaded.tokenizer, loaded.generator.vocab_size)
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"generate": shaped}))
    remarks = NO_PICTURE if loaded.recipe.data.vqa else "", system_note(loaded.num_system) if system else ""
    print_lines([f"note: {remark}" for remark in remarks if remark], to_errors=True)
    if file is not None and out is not None:
        from unpad.inference.bulk import answer_prompts

        written = answer_prompts(loaded, file, out, same_seed=gives_seed(fields))
        print_lines([*written.unread, written.summary])
        return
    if heldout:
        from unpad.evaluation.text import heldout_openings

        texts = heldout_openings(loaded, heldout)
    else:
        texts = prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    prompts = [loaded.prompt(text, system) for text in texts]
    for one in prompts:
        if warning := prompt_warning(one.lost):
            print_lines([warning], to_errors=True)
    is_asked = any(field.startswith("generate.max_new_tokens=") for field in fields)
    asked = {"max_new_tokens": loaded.recipe.generate.max_new_tokens} if is_asked else {}
    if len(prompts) == 1 and not as_json:
        for piece in loaded.stream(texts[0], system=system, **asked):
            print_text(piece)
        print_text("\n")
        return
    seed = loaded.recipe.generate.seed
    seeds = [seed + (0 if gives_seed(fields) else index) for index in range(len(prompts))]
    replies = loaded.replies(prompts, seeds, **asked)
    if as_json:
        options.print_json([reply.to_json() for reply in replies])
        return
    for reply in replies:
        print_text(f"{reply.prompt.text} -> {reply.text}\n\n")


def _check_file(file: Path | None, out: Path | None, holds: str, replaces: str, *, alone: bool) -> None:
    """Refuse a file to be answered without one for its answers, and beside options that it replaces."""
    if (file is None) != (out is None):
        raise RecipeError("--file and --out go together", fix=f"name a file of {holds}, and one for the answers")
    if file is not None and not alone:
        raise RecipeError(f"--file has {holds}", fix=f"leave out {replaces}")
    if out is not None:
        refuse_format(out, ".jsonl", ".txt")


@verbs.command(epilog="Example: unpad chat zh_chat-1    or    echo 你好 | unpad chat zh_chat-1")
def chat(
    run: options.RunArgument,
    settings: options.Sampling = None,
    system: options.System = "",
    engine: options.Engine = "unpad",
    debug: options.Debug = False,
) -> None:
    """Talk to a run. /help lists its commands; without a terminal, print one reply per line of standard input, its line
    breaks as \\n."""
    fields = [_generate_field(text) for text in settings or []]
    options.check_run(run, fields)
    from unpad.inference.chat import chat_with_run
    from unpad.inference.loaded import load
    from unpad.inference.prompts import gives_seed

    loaded, advances = load(run, fields), not gives_seed(fields)
    if engine == "unpad":
        chat_with_run(loaded, advances, system)
        return
    require_serve()
    from unpad.serving.llama import Llama

    with Llama(engine).conversing(loaded) as answer:
        chat_with_run(loaded, advances, system, answer)


def _generate_field(text: str) -> str:
    """Put a field without a section into `generate`: `temperature=0.8` is short for generate.temperature=0.8."""
    return text if "." in text.partition("=")[0] else f"generate.{text}"
