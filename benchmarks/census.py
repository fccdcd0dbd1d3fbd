"""Census of the causal language models of transformers: which ways to make batches keep sequences apart.

    make census
    python benchmarks/census.py gpt_oss qwen3_5_text     # these again
    python benchmarks/census.py --page                   # the page from the saved results alone

A process per class, two at a time. Results are saved in benchmarks/census.json after every class: a run that was
stopped goes on, and a complete one, or one of other versions, begins anew. The page is docs/internals/census.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import textwrap
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from census_configs import RELEASED

from unpad.errors import UnpadError
from unpad.hf.prepare import UNPAD
from unpad.proof.foreign.collators import collators
from unpad.proof.foreign.folder import QUIET, ROW_TOKENS, UNSHIFTED, describe_blocks, prove_small, versions
from unpad.proof.foreign.small_model import build_config, build_small, causal_types, sample
from unpad.storage import write_atomic

ROOT = Path(__file__).parents[1]
SAVED, PAGE = ROOT / "benchmarks" / "census.json", ROOT / "docs" / "internals" / "census.md"
AT_A_TIME = 2
SECONDS = 240  # of a class
WAYS = [way.name for way in (*collators(ROW_TOKENS), UNPAD)]
PACKED = ("flattening", "TRL padding_free", "TRL packing bfd")  # what people train with, one row for many sequences
SHOWN = (*PACKED, UNPAD.name)

# Causes of what is not sound even when padded on the right, found by looking.
REMARKS = {
    "cpmant": "its attention sees later tokens, and masked padding among them",
    "doge": "attention keeps the keys of highest score; equal tokens have equal scores, and which are kept depends on "
    "the length of the row. Only sequences longer than `keep_window_size` (2,048 tokens) show it",
    "prophetnet": "its logits depend on the length of the padding, though not on its content",
}

PAGE_TEXT = """# Census: which causal models keep packed sequences apart

Every causal language model of transformers, and every way to make batches, measured on {date} with {versions}, on a \
processor, with the attention that transformers chooses there.

**{headline}**

Each model is made small from its configuration, with one block of each type and random weights, as [`unpad prove \
--hf`](../hf_prove.md#prove-an-architecture-by-its-configjson) does; fields that released models have and the \
defaults of their class lack are in `benchmarks/census_configs.py`. {sequences} are computed one at a time, then in \
the batches of each collator. Logits, loss and gradient must agree, no target may be predicted from another sequence \
or from padding, and changing one sequence must not move the logits of another. {precision} Kernels that read the \
boundaries of sequences (FlashAttention, causal-conv1d, mamba-ssm) are not installed: with them a model may isolate \
where it leaks or is refused here. Random small weights show structure, not numerics. Lengths above which a model \
computes otherwise (windows, `longrope`, `dynamic`, `floor_scale`) are lowered to 8 tokens, so that a verdict is of \
sequences below and above them, up to 31 tokens; `longrope` and `dynamic` are settings of any type, whose batches \
then are wrong, and refused by `unpad`, where a sequence is above the limit. `benchmarks/census.json` has every verdict.

Repeat it with `make census`, some ten minutes of two cores, or prove your own: `unpad prove --hf config.json`.

## Summary

Model types by verdict:

{summary}

*sound*: equal to one sequence at a time. *leaking*: a sequence sees another one or padding, without a message. \
*wrong loss*: sequences stay apart, and targets, positions or logits differ. *refused*: an exception.

`padded left` predicts each sequence's first token from padding, since its label is the token, as \
`DataCollatorForLanguageModeling` has it. `flattening` is `DataCollatorWithFlattening`, and `+ seq_idx` its option \
`return_seq_idx`. `+ cache` is a loop of one's own that leaves the models' default `use_cache=True`; Trainer turns \
it off. `TRL packing wrapped` ignores boundaries by design. `unpad` is `unpad.hf.attach`, which proves a model before \
it trains it, and refuses where the proof fails.

## Silent leaks

{leaks}

## Not sound even when padded on the right

{padded}

## Labels that are not shifted

The own loss of these model types takes the label at each position for that position's target: with the labels of \
any of these collators it teaches a model to repeat each token. Their batches are judged by the loss of the logits.

{unshifted}

## Not measured

{stopped}
"""


def measure(kind: str) -> dict[str, Any]:
    """Verdicts of every way to make batches for one class, or the reason why there are none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found: dict[str, Any] = {"class": NAMES[kind]}
    begun = time.process_time()
    try:
        whole = build_config(kind, RELEASED.get(kind, {}), kind)
        fields = whole.to_dict()
        found["packs"] = not (
            fields.get("is_encoder_decoder")
            or "encoder_layers" in fields
            or "decoder_layers" in fields
            or (fields.get("is_decoder") is False and "attention_probs_dropout_prob" in fields)
        )
        small = build_small(whole)
        proof = prove_small(small, kind, [UNPAD])
    except UnpadError as error:
        return {**found, "stopped": error.what}
    certificates = [way.certificate for way in proof.ways if way.certificate is not None]
    return {
        **found,
        "blocks": describe_blocks(small),
        "parameters": sum(parameter.numel() for parameter in small.model.parameters()),
        "attention": small.attention,
        "precision": certificates[0].precision,
        "shifts_labels": UNSHIFTED not in proof.notes,
        "seconds": round(time.process_time() - begun, 1),
        "ways": {
            way.collator.name: {
                "verdict": way.verdict,
                "gradient": _short(way.measured("gradient")),
                "loss": _short(way.measured("loss")),
                "others_move": way.failed("isolation"),
                "cut": way.measured("cut"),
                "reason": way.reason,
            }
            for way in proof.ways
        },
    }


def _short(error: float | None) -> float | None:
    return None if error is None else float(f"{error:.2g}")


class Work(NamedTuple):
    """A process that measures one class."""

    kind: str
    process: BaseProcess
    answer: Connection
    begun: float


def start(kind: str) -> Work:
    """Fork a process, which has the libraries of this one."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(kind, send))
    process.start()
    send.close()
    return Work(kind, process, receive, time.monotonic())


def _answer(kind: str, send: Connection) -> None:
    try:
        send.send(measure(kind))
    except Exception as error:  # a fault of ours or of the class, which the page shows
        send.send({"stopped": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def finish(work: Work) -> dict[str, Any] | None:
    """The result of a process that has ended or taken too long, else None."""
    if not work.answer.poll() and work.process.is_alive() and time.monotonic() - work.begun < SECONDS:
        return None
    try:
        found: dict[str, Any] = work.answer.recv() if work.answer.poll() else {"stopped": f"no end after {SECONDS} s"}
    except EOFError:
        found = {"stopped": f"the process ended with code {work.process.exitcode}"}
    work.process.kill()
    work.process.join()
    return found


def run(kinds: list[str], results: dict[str, Any]) -> None:
    """Measure classes, and save the results after each."""
    import transformers  # so that the processes have it
    from datasets import Dataset  # noqa: F401
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: F401

    assert transformers.__version__ == results["versions"]["transformers"]
    waiting, working = list(kinds), list[Work]()
    while waiting or working:
        while waiting and len(working) < AT_A_TIME:
            working.append(start(waiting.pop(0)))
        wait_for([work.answer for work in working], timeout=1)
        for work in list(working):
            if (found := finish(work)) is not None:
                working.remove(work)
                results["classes"][work.kind] = found
                save(results)
                verdicts = Counter(way["verdict"] for way in found.get("ways", {}).values())
                print(
                    f"{len(results['classes']):4} {work.kind:28} {found.get('stopped') or dict(verdicts)}", flush=True
                )


def save(results: dict[str, Any]) -> None:
    """Write the results, a class on each line."""
    lines = [f"{json.dumps(kind)}: {json.dumps(results['classes'][kind])}" for kind in sorted(results["classes"])]
    head = f'"date": {json.dumps(results["date"])}, "versions": {json.dumps(results["versions"])}'
    write_atomic(SAVED, f'{{{head}, "classes": {{\n' + ",\n".join(lines) + "\n}}\n")


def fresh() -> dict[str, Any]:
    return {"date": datetime.date.today().isoformat(), "versions": versions(), "classes": {}}


# --------------------------------------------------------------------------- the page


def page(results: dict[str, Any]) -> str:
    """The page of saved results."""
    classes: dict[str, Any] = dict(sorted(results["classes"].items()))
    made = {kind: found for kind, found in classes.items() if "ways" in found}
    lengths = [len(one) for one in sample()]
    text = PAGE_TEXT.format(
        date=results["date"],
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
        headline=f"{len(made)} of {len(classes)} model types could be measured. {_headline(made)}",
        sequences=f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens",
        precision=_precision(made),
        summary="\n".join(_summary(made)),
        leaks="\n".join(_leaks(made)),
        padded="\n".join(_padded(made)),
        unshifted=", ".join(f"`{kind}`" for kind, found in made.items() if not found["shifts_labels"]),
        stopped="\n".join(_stopped(classes)),
    )
    return "".join(f"{_wrapped(line)}\n" for line in text.splitlines())


def _wrapped(line: str) -> str:
    """A paragraph in lines of the pages' width; rows of tables stay whole."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 150, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _precision(made: dict[str, Any]) -> str:
    coarse = [kind for kind, found in made.items() if found["precision"] != "fp64"]
    exact = "Computation is in fp64, with bounds of 1e-10"
    return (
        f"{exact}; in fp32, with bounds from the model's own rounding, for {', '.join(coarse)}."
        if coarse
        else f"{exact}."
    )


def _padded(made: dict[str, Any]) -> list[str]:
    found = {kind: way for kind, one in made.items() if (way := one["ways"]["padded right"])["verdict"] != "sound"}
    return [f"- `{kind}` ({way['verdict']}): {REMARKS.get(kind, way['reason'])}" for kind, way in found.items()]


def _leaks_in(found: dict[str, Any], names: tuple[str, ...] = PACKED) -> bool:
    return any(found["ways"][name]["verdict"] == "leaking" for name in names)


def _headline(made: dict[str, Any]) -> str:
    packs = [found for found in made.values() if found["packs"]]
    trl = sum(_leaks_in(found, PACKED[1:]) for found in packs)
    flat = sum(_leaks_in(found, PACKED[:1]) for found in packs)
    right = sum(found["ways"]["padded right"]["verdict"] == "sound" for found in made.values())
    ours = sum(found["ways"][UNPAD.name]["verdict"] == "sound" for found in made.values())
    assert all(found["ways"][UNPAD.name]["verdict"] in QUIET for found in made.values())
    return (
        f"Of {len(packs)} decoders, {trl} leak without a word under TRL's packing, "
        f"and {flat} under transformers' flattening. Padding on the right is sound for {right} of {len(made)} model "
        f"types; unpad's flat batches are sound for {ours}, and refused for the others."
    )


def _summary(made: dict[str, Any]) -> list[str]:
    verdicts = ("sound", "leaking", "wrong loss", "cut", "refused")
    lines = [f"| batches | {' | '.join(verdicts)} |", "|---|" + "---:|" * len(verdicts)]
    for name in WAYS:
        counts = Counter(found["ways"][name]["verdict"] for found in made.values())
        lines.append(f"| {name} | {' | '.join(str(counts[verdict]) for verdict in verdicts)} |")
    return lines


def _leaks(made: dict[str, Any]) -> list[str]:
    lines = [
        "Relative error of the gradient, and of the loss in brackets: the loss hardly shows what the gradient does.",
        "",
    ]
    for packs, title in (
        (True, "Decoders:"),
        (False, "Decoders of encoder-decoders, and encoders with a causal head, which hardly anybody packs:"),
    ):
        rows = [
            f"| {kind} | {' | '.join(_leak(found['ways'][name]) for name in SHOWN)} |"
            for kind, found in made.items()
            if found["packs"] == packs and _leaks_in(found)
        ]
        lines += [f"{title} {len(rows)}.", "", f"| model_type | {' | '.join(SHOWN)} |", "|---" * 5 + "|", *rows, ""]
    return lines[:-1]


def _leak(way: dict[str, Any]) -> str:
    if way["verdict"] != "leaking":
        return str(way["verdict"])
    return f"**{way['gradient']:.2g}** ({way['loss']:.1g})"


def _stopped(classes: dict[str, Any]) -> list[str]:
    return [
        f"- `{kind}` ({found.get('class', '')}): {found['stopped']}"
        for kind, found in classes.items()
        if "stopped" in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="values of model_type; default those without a result")
    parser.add_argument("--again", action="store_true", help="discard saved results")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(SAVED.read_text(encoding="utf-8")) if SAVED.exists() and not given.again else fresh()
    if not given.page:
        left = [kind for kind in causal_types() if kind not in results["classes"]]
        if results["versions"] != versions() or not (left or given.kinds):
            results, left = fresh(), causal_types()
        run(given.kinds or left, results)
    write_atomic(PAGE, page(results))
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
