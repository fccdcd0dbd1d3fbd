"""Plant faults in copies of the package, and show which lines of `unpad prove` fail for them.

    python benchmarks/planted.py            # all faults, some eight minutes of one core
    python benchmarks/planted.py mask left  # those whose name has one of these words

Exit code 1 if a fault with an effect passes. The faults are edits of one place; a copy of the package has one fault.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from unpad.errors import NOT_PROVED

PACKAGE = Path(__file__).parents[1] / "unpad"
TEXT = ["model.width=16", "model.heads=2", "model.hidden=24", "model.blocks=1", "precision=fp32", "train.threads=1"]
WORDS = [*TEXT, "tokenizer.vocab_size=600"]
SIGHT = [
    "model.vision.width=16", "model.vision.heads=2", "model.vision.hidden=24", "model.vision.blocks=1",
    "model.language.width=16", "model.language.heads=2", "model.language.hidden=24", "model.language.blocks=2",
    "precision=fp32", "train.threads=1",
]  # fmt: skip
MERGES = {"variant": "simple", "ratio": 0.5, "inner": 8}
COMMANDS = {
    "zh_chat": ["zh_chat", *WORDS],
    "bf16": ["zh_chat", *WORDS, "precision=bf16"],
    "rotary": ["zh_chat", *WORDS, "model.positions=rotary"],
    "dropout": ["zh_chat", *WORDS, "model.dropout=0.1", "model.attention_dropout=0.1"],
    "smoothing": ["zh_chat", *WORDS, "train.label_smoothing=0.1"],
    "windows": ["llm", *WORDS, "plan.max_tokens=24", "plan.stride=16"],
    "images": ["images", *TEXT, "model.stem=[4,4,4,4]"],
    "vqa": ["vqa", *SIGHT],
    "vqa_merge": ["vqa", *SIGHT, f"model.merge={json.dumps(MERGES)}"],
    "vqa_prune": ["vqa_prune", *SIGHT, "model.prune.inner=8"],
    "events": [
        "events", "model.width=16", "model.heads=2", "model.hidden=16", "model.latent=4", "model.levels=1",
        "model.inducing=2", "model.blocks=1", "model.decoder_layers=1", "precision=fp32", "train.threads=1",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """An edit of one place of the package.

    Args:
        command: one of COMMANDS, to prove with it.
        file: under unpad/.
        effect: False if results are the same.
    """

    name: str
    command: str
    file: str
    old: str
    new: str
    effect: bool = True


BATCH, FIELDS, LAYOUT, LOADER = "batching/batch.py", "batching/fields.py", "batching/layout.py", "batching/loader.py"
STEP, ATTENTION, NORM, LOSSES = "training/step.py", "nn/attention.py", "nn/norm.py", "nn/losses.py"
BLOCK, DECODER, SEGMENTS = "nn/block.py", "models/decoder.py", "nn/segments.py"
VISION = "models/vision_language/"
TRAINED = "parts = [weight * terms[name][0] / totals[name]"
PADDED = "return replace(fields.pad(self, rectangle), layout=PaddedLayout(mask, keys=self.layout.keys))"
SOME = "value.index_select(0, choices[self.level].entries)"
FAULTS = [
    Fault("positions not reset", "windows", BATCH, "np.arange(input_ids.size) - first", "np.arange(input_ids.size)"),
    Fault("labels cross boundaries", "zh_chat", LOADER, "flat[is_label], micro", "np.roll(flat[is_input], -1), micro"),
    Fault("filler learned", "zh_chat", LOADER, "np.zeros(filler, np.bool_)", "np.ones(filler, np.bool_)"),
    Fault("first fresh target lost", "windows", LOADER, "loss_mask &= column >= ", "loss_mask &= column > "),
    Fault("context of windows learned", "windows", LOADER, "np.any(micro.first_target > micro.starts)", "False"),
    Fault(
        "mean of micro-batch means", "zh_chat", STEP, TRAINED,
        "parts = [weight * terms[name][0] / max(terms[name][1], 1) / len(micros)",
    ),
    Fault(
        "counts of the last micro-batch", "zh_chat", STEP,
        "share.total(name) for name in weights", "share.counts[-1].terms[name] for name in weights",
    ),
    Fault("weights of terms ignored", "vqa_prune", STEP, TRAINED, TRAINED.replace("weight * ", "")),
    Fault("loss mask ignored", "zh_chat", LOADER, "= counts_loss[is_label]", "= np.ones_like(counts_loss[is_label])"),
    Fault("left padding off by one", "zh_chat", BATCH, ">= columns - lengths", "> columns - lengths"),
    Fault(
        "loss of padding counts", "zh_chat", BATCH, PADDED,
        "padded = fields.pad(self, rectangle)\n"
        "        counted = (padded.loss_mask | ~mask.flatten()).nonzero().flatten()\n"
        "        return replace(padded, layout=PaddedLayout(mask, keys=self.layout.keys), target_index=counted)",
    ),
    Fault(
        "padding shifts positions", "zh_chat", BATCH, PADDED,
        "columns = torch.arange(mask.shape[1]).repeat(mask.shape[0])\n"
        "        " + PADDED.replace("layout.keys)", "layout.keys), position_ids=columns"),
    ),
    Fault("undo of the order of lengths", "zh_chat", LAYOUT, "undo[flat] = np.arange(flat.size)", "undo[:] = flat"),
    Fault("mask of a group one cell long", "images", LAYOUT, "mask = column[None] <", "mask = column[None] <="),
    Fault(
        "keys past the end visible", "images", ATTENTION,
        "seen = partial(_real_keys, group.key_mask)", "seen = None",
    ),
    Fault("causal mask open", "zh_chat", ATTENTION, "is_causal=how.causal", "is_causal=False"),
    Fault(
        "scale of scores off by 0.1 %", "zh_chat", ATTENTION,
        "is_causal=how.causal, scale=how.scale)", "is_causal=how.causal, scale=1.001 * q.shape[-1] ** -0.5)",
    ),
    Fault("bf16 sees one future token", "bf16", ATTENTION, "triu_(rows.start + 1)", "triu_(rows.start + 2)"),
    Fault(
        "rectangle without mask", "images", ATTENTION,
        "seen = attention_mask[:, None, None, :]", "seen = torch.ones_like(attention_mask)[:, None, None, :]",
    ),
    Fault(
        "rotary by place in the run, in turns of 64", "rotary", DECODER,
        "self._rotary(batch.position_ids, x.dtype)", "self._rotary(torch.arange(len(x)) % 64, x.dtype)",
    ),
    Fault(
        "sinusoids by place in the run", "zh_chat", DECODER,
        "table.index_select(0, positions)",
        "position_table(1 << 14, self.config.width, factor, x.dtype, x.device)[: len(x)]",
    ),
    Fault("norm of the whole batch", "zh_chat", NORM, "wide = widened(res", "wide = residual.mean(0) + widened(res"),
    Fault(
        "smoothing over the chunk", "smoothing", LOSSES,
        "smoothing * (log_z - wide.mean(-1))", "smoothing * (log_z - wide.mean())", effect=False,
    ),
    Fault(
        "mean in place of a sum", "zh_chat", DECODER,
        '{"cross_entropy": (loss, batch', '{"cross_entropy": (loss / max(batch.num_targets, 1), batch',
    ),
    Fault("dropout left on", "dropout", NORM, "self.dropout if self.training and delta", "self.dropout if delta"),
    Fault("attention dropout left on", "dropout", BLOCK, "self.dropout if self.training else 0.0", "self.dropout"),
    Fault(
        "targets of the last block off by one", "vqa", DECODER,
        "keep_index=between.places(wanted)", "keep_index=between.places(wanted).add(1).clamp_max(len(stream.x) - 1)",
    ),
    Fault(
        "images of other rows", "vqa", "data/pictures/album.py",
        "np.repeat(np.arange(len(counts)), ", "np.repeat(np.arange(len(counts))[::-1], ",
    ),
    Fault(
        "places of images not moved by padding", "vqa", BATCH, PADDED,
        PADDED.replace("layout.keys)", "layout.keys), media_index=self.media_index"),
    ),
    Fault(
        "joined places not shifted", "vqa", FIELDS,
        "value + first for value, first in zip(values, firsts[TOKEN]",
        "value for value, _ in zip(values, firsts[TOKEN]",
    ),
    Fault(
        "grids of the first images", "images", BATCH,
        "return fields.take(self, {SEQUENCE: fields.Selection(index, self.num_seqs)})",
        "chosen = fields.take(self, {SEQUENCE: fields.Selection(index, self.num_seqs)})\n"
        "        return chosen if self.grid is None else replace(chosen, grid=self.grid[: len(seqs)])",
    ),
    Fault(
        "budget of the mean sample", "vqa_prune", f"{VISION}prune_pass.py",
        "config.keep * self._lengths.double()",
        "config.keep * self._lengths.double().mean().expand(len(self._lengths))",
    ),
    Fault(
        "draw by place in the run", "vqa_prune", f"{VISION}prune_pass.py",
        "drawn_noise(index, self._place,", "drawn_noise(index, torch.arange(len(self._place)),",
    ),
    Fault(
        "key bias not in the order of lengths", "vqa_prune", ATTENTION,
        "how = how.moved(run.ordered)", "how = replace(how.moved(run.ordered), key_bias=how.key_bias)",
    ),
    Fault(
        "key bias dropped", "vqa_prune", ATTENTION,
        "scores + how.key_bias[:, :num_keys]", "scores + 0 * how.key_bias[:, :num_keys]",
    ),
    Fault(
        "centres of longer samples take shares", "vqa_merge", f"{VISION}merge.py",
        "scores.masked_fill(~centres.mask[:, :, None], nothing)", "scores",
    ),
    Fault(
        "padding in merged means", "vqa_merge", f"{VISION}merge.py",
        "shares.masked_fill(~tokens.mask[:, None], -math.inf)", "shares",
    ),
    Fault(
        "values of the first events", "events", FIELDS,
        f"return {SOME}", f'return value[: len(choices["event"][0])] if self.level == "event" in choices else {SOME}',
    ),
    Fault(
        "sets of the first patients", "events", FIELDS, "Selection(entries, int(value.cu_seqlens[-1]))",
        'Selection(torch.arange(len(entries)) if self.counted == "set" else entries, int(value.cu_seqlens[-1]))',
    ),
    Fault(
        "censoring of the first patients", "events", FIELDS, f"return {SOME}",
        "first = self.level == SEQUENCE in choices and value.dtype == torch.bool\n"
        f"        return value[: len(choices[SEQUENCE].entries)] if first else {SOME}",
    ),
    Fault(
        "segment mean over the longest", "events", SEGMENTS,
        "layout.lengths().clamp_min(1).view(", "layout.lengths().max().clamp_min(1).view(",
    ),
    Fault(
        "plan loses a piece", "zh_chat", "batching/strategies/dynamic.py",
        "len(order), settings.batch_size), len(order))", "len(order), settings.batch_size), len(order) - 1)",
    ),
]  # fmt: skip


def prove(fault: Fault, folder: Path) -> tuple[int, list[str], str]:
    """Exit code, names of failed lines, and other output of the proof of a copy with this fault."""
    copy = folder / "unpad"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1, f"{fault.name}: {fault.file} has this {source.count(fault.old)} times"
    (copy / fault.file).write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    command = ["-c", "from unpad.cli import app; app()", "prove", *COMMANDS[fault.command], "--json"]
    # Native kernels off: the faults in attention are in torch's.
    environment = {**os.environ, "PYTHONPATH": str(folder), "UNPAD_NATIVE": "0", "UNPAD_CACHE": str(folder / "cache")}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    try:
        lines = json.loads(done.stdout)["lines"]
    except ValueError:
        return done.returncode, [], (done.stdout + done.stderr)[-300:]
    return done.returncode, [line["name"] for line in lines if line["passed"] is False], ""


def main(words: list[str]) -> int:
    """Print the table; return the number of faults with an effect for which no line fails."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            if words and not any(word in fault.name for word in words):
                continue
            code, failed, output = prove(fault, Path(folder))
            caught = code == NOT_PROVED and bool(failed)
            missed += caught != fault.effect
            verdict = f"{len(failed)} FAIL: {'; '.join(failed[:3])}" if caught else f"exit code {code} {output}".strip()
            print(f"{fault.name} ({fault.command}) | {verdict}" + ("" if fault.effect else " | no effect"), flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
