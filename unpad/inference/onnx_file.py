"""`unpad export RUN FILE.onnx`: a model of pictures or patients in an ONNX file, for one example of any size.

Models run over many sequences in one flat run, with sizes that no exporter can follow. Here the one example is stated
densely, by the model's own layers; before the file is written, onnxruntime's answers are compared with the model's.
"""

import io
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad import storage
from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.data.histories.assemble import CODES
from unpad.data.rows import read_classes
from unpad.data.sources.split import Split
from unpad.errors import CheckpointError, RecipeError
from unpad.inference.embed import predicts
from unpad.inference.loaded import LoadedRun, load
from unpad.inference.patients import class_names, outcomes, predictions
from unpad.interchange.runs import COPY
from unpad.models.cnn import Cnn
from unpad.models.set_sequence.encoder import Latent, SetEncoder
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.history import SetLayout
from unpad.models.set_sequence.linear_path import CHANGE_UNIT, COLUMNS, FARTHEST, LinearPath
from unpad.models.set_sequence.model import SetSequence
from unpad.models.vit import ConvolutionalStem, Vit
from unpad.nn.activation import activate
from unpad.nn.attend import Attend
from unpad.nn.block import Stream
from unpad.nn.cross_attention import CrossAttention
from unpad.nn.native import library
from unpad.nn.norm import Norm
from unpad.nn.precision import CPU
from unpad.nn.rope import rotate
from unpad.nn.segments import AttentionPool
from unpad.terminal.table import number_of

FORMAT = 1  # of the metadata
OPSET = 18
MOST_ROWS, TOLERANCE = 50, 1e-4
ALONE = build_layout(np.zeros(0))  # of a stream whose attention is dense, so that nobody reads it


# --------------------------------------------------------------------------- one example, densely


@dataclass(frozen=True)
class _Dense:
    """`nn.block.Cache` of one sequence that is read in one pass: attention by matrix products.

    Args:
        seen: (num_tokens, num_tokens) bool, the keys that every query sees; None: all.
    """

    kv_heads: int
    seen: Tensor | None = None

    def attend(self, index: int, qkv: Tensor, layout: Layout | PaddedLayout, heads: int, how: Attend) -> Tensor:
        q, k, v = qkv.split([heads, self.kv_heads, self.kv_heads], 1)
        if how.rotary is not None:
            q, k = rotate(q, *how.rotary), rotate(k, *how.rotary)
        k, v = (x.repeat_interleave(heads // self.kv_heads, 1) for x in (k, v))
        return _attention(q, k, v, self.seen)


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of (..., num_queries, heads, head_dim) to keys and values of the same form; `seen` (..., 1, num_queries
    or 1, num_keys). No size is asked for: exporters take those of the example."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(-3, -2)


def _through(blocks: nn.ModuleList, norm: Norm, x: Tensor, dense: _Dense) -> Tensor:
    """Hidden states of one sequence after blocks and a last norm, (num_tokens, width)."""
    stream = Stream(x, None, ALONE)
    for block in blocks:
        stream = block(stream, dense)
    return norm(stream.x, stream.delta)[1]


def _pooled(pool: AttentionPool, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """`AttentionPool` of sets, (num_sets, longest, width) to (num_sets, width); mask (num_sets, longest)."""
    scores = pool.query(x) / math.sqrt(pool.query.in_features)  # (num_sets, longest, heads)
    scores = scores if mask is None else scores.masked_fill(~mask[..., None], -math.inf)
    values = pool.to_value(x).unflatten(-1, (pool.heads, -1))
    return (scores.softmax(1)[..., None] * values).sum(1).flatten(1)


class _Picture(nn.Module):
    """A model of pictures, of one.

    Attributes:
        axes: name of every input -> names of its axes of any size, by their places.
        about: metadata.
    """

    def __init__(self, run: LoadedRun, model: Vit | Cnn) -> None:
        super().__init__()
        self.model = model
        self.axes = {"pixels": {1: "height", 2: "width"} if isinstance(model, Vit) else {}}
        self.axes |= {"size": {}} if isinstance(model, Vit) and model.size_embed is not None else {}
        read = run.recipe.images.model_dump(include={"size", "square", "min_tokens", "max_tokens", "mean", "std"})
        read |= {"patch": model.config.patch, "channels": model.config.channels}
        self.about = {"classes": read_classes(run.files), "images": read}

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Arguments of `forward` of a batch of one picture."""
        patches = batch.inputs_embeds.T.unflatten(1, tuple(batch.grid[0].tolist()))
        given = F.pixel_shuffle(patches, self.model.config.patch), batch.image_sizes[0]
        return given[: len(self.axes)]

    def answers(self, batch: RaggedBatch) -> dict[str, np.ndarray]:
        """What the model itself answers, by the names of outputs."""
        return {"log_p": self.model.classify(batch).log_softmax(1)[0].numpy()}

    def forward(self, pixels: Tensor, size: Tensor | None = None) -> Tensor:
        """Logarithms of the probabilities of the classes, (num_classes,).

        Args:
            pixels: (channels, height, width), normalised; size: (2,) int64, height and width before resizing.
        """
        if isinstance(self.model, Vit):
            features = _features(self.model, pixels, size)
        else:
            x = pixels[None]
            for convolution in self.model.convolutions:
                x = F.max_pool2d(F.relu(convolution(x)), 2)
            features = x.mean((2, 3))[0]
        return self.model.head(features[None])[0].log_softmax(0)


def _features(model: Vit, pixels: Tensor, size: Tensor | None) -> Tensor:
    """Vector of a picture, (width,)."""
    to_width, positions, patch = model.patch_embed, model.positions, model.config.patch
    if isinstance(to_width, ConvolutionalStem):
        patches, to_width = _convolved(to_width, pixels[None]), to_width.project
    else:
        patches = F.pixel_unshuffle(pixels[None], patch)
    rows, columns = (torch.arange(pixels.shape[axis] // patch) for axis in (1, 2))
    sides = (positions.row, rows), (positions.column, columns)
    row, column = (linear(positions.waves(place, place.max() + 1)) for linear, place in sides)
    x = to_width(patches[0].flatten(1).T) + (row[:, None] + column).flatten(0, 1)  # (rows * columns, width)
    if model.size_embed is not None and size is not None:
        x = x + model.size_embed(size[None])
    place = (rows[:, None] * (columns.max() + 1) + columns).flatten()
    seen = place[:, None] >= place if model.causal else None
    hidden = _through(model.blocks, model.norm, x, _Dense(model.config.num_kv_heads, seen))
    return hidden.mean(0) if model.pool is None else _pooled(model.pool, hidden[None])[0]


def _convolved(stem: ConvolutionalStem, x: Tensor) -> Tensor:
    """Cells of every patch of one picture (1, channels, height, width) after the stem, (1, values of a patch, rows,
    columns)."""
    for place, (weight, norm) in enumerate(zip(stem.convolutions.parameters(), stem.norms, strict=True)):
        halves = not place % (1 + stem.residual)
        cells = F.conv2d(x, weight, padding=1)
        cells = F.max_pool2d(cells, 2) if halves else cells
        changed = activate("gelu", norm(cells.permute(0, 2, 3, 1))[1]).permute(0, 3, 1, 2)
        x = changed if halves else x + changed
    side = stem.patch >> (len(stem.convolutions) // (1 + stem.residual))
    cut = F.pixel_unshuffle(x, side).unflatten(1, (-1, side * side))
    return cut.transpose(1, 2).flatten(1, 2)  # channels last within a patch, as `project` reads it


# --------------------------------------------------------------------------- one patient


def _crossed(layer: CrossAttention, x: Tensor, context: Tensor, seen: Tensor) -> Tensor:
    """`CrossAttention` of sets side by side: (num_sets, num_queries, width) to (num_sets, num_keys, width), of which
    `seen`, (num_sets, num_keys), are real."""
    q = layer.to_q(x).unflatten(-1, (layer.heads, -1))
    k, v = layer.to_kv(context).unflatten(-1, (2, layer.heads, -1)).unbind(2)
    return layer.to_out(_attention(q, k, v, seen[:, None, None]).flatten(2))


def _encoded(encoder: SetEncoder, x: Tensor, sizes: Tensor, mask: Tensor) -> Latent:
    """Deepest latent of all sets but the last, of embedded events (num_sets, longest, width), of which `mask` are
    real."""
    mean = log_var = x  # until the first block
    levels: Any = zip(encoder.blocks, encoder.heads, [None, *encoder.tell], strict=True)
    has_point = torch.arange(encoder.num_points) < sizes[:, None]  # (num_sets, num_points)
    for block, head, tell in levels:
        x = x if tell is None else x + tell(mean)[:, None]
        x, events = block.norm_events(x)
        gathered = _crossed(block.gather, block.norm_points(block.points)[1][None], events, mask)
        points, y = block.norm_gathered(block.points[None], gathered)
        summary = block.norm_summary(points, block.feed_points(y))[1]
        x, y = block.norm_spread(x, _crossed(block.spread, events, summary, has_point))
        x, y = head.norm(x, block.feed_events(y))
        mean, log_var = head.gaussian(_pooled(head.pool, y, mask), sizes)
    return Latent(mean[:-1], log_var[:-1], mean[:-1])


def _shifts(path: LinearPath, codes: Tensor, values: Tensor, in_set: Tensor) -> Tensor:
    """`LinearPath` of one patient, (1, causes).

    Args:
        codes: (num_events,) int64; values: (num_events,), nan without a value.
        in_set: (num_events, num_sets) bool.
    """
    has_value, known = ~values.isnan(), codes.unique()  # (num_events,), (num_known,)
    value = torch.where(has_value, values.clamp(-FARTHEST, FARTHEST), 0)
    is_code, of_set = codes[:, None] == known, in_set.to(value.dtype).T
    num = of_set @ (is_code & has_value[:, None]).to(value.dtype)  # (num_sets, num_known)
    mean, held = of_set @ (is_code * value[:, None]) / num.clamp_min(1), num > 0
    place = torch.arange(in_set.shape[1])[:, None]
    last = mean.gather(0, torch.where(held, place, 0).amax(0, keepdim=True))[0]
    sets = held.sum(0)
    before = (mean.sum(0) - last) / (sets - 1).clamp_min(1)
    change = torch.where(sets > 1, last - before, 0) / CHANGE_UNIT
    columns = torch.stack([last, change, torch.ones_like(last)], 1) * (known > 0)[:, None]
    weight = path.weight.unflatten(1, (-1, COLUMNS))[known]  # (num_known, causes, COLUMNS)
    return (weight * columns[:, None]).sum((0, 2))[None]


class _Patient(nn.Module):
    """A model of patients, of one; attributes as those of `_Picture`.

    Raises:
        RecipeError: the run predicts no outcome.
    """

    def __init__(self, run: LoadedRun, model: SetSequence) -> None:
        super().__init__()
        labels, known = run.recipe.events.labels, json.loads(run.files[CODES])
        classifies, has_hazards = predicts(run)
        if labels is None or not (classifies or has_hazards):
            fix = "train with events.labels, or use `unpad embed` for its vectors"
            raise RecipeError("this run predicts no outcome", where=str(run.folder), fix=fix)
        wanted = {"log_p": classifies, "competing": classifies and bool(labels.competing), "risk": has_hazards}
        self.model, self.names = model, [name for name, is_wanted in wanted.items() if is_wanted]
        self.axes = {"codes": {0: "events"}, "values": {0: "events"}, "sizes": {0: "sets"}, "days": {0: "sets"}}
        scales = {name: known[name] for name in ("codes", "mean", "std", "log", "rank") if name in known}
        self.about = {"classes": class_names(run) or ("0", "1"), "competing": labels.competing, "events": scales}

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        sets = batch.require(EventSets)
        return batch.input_ids, sets.values.masked_fill(~sets.has_value, math.nan), sets.members.lengths(), sets.times

    def answers(self, batch: RaggedBatch) -> dict[str, np.ndarray]:
        found = outcomes(self.model, batch)
        return {name: found[name][0] for name in self.names}

    def forward(self, codes: Tensor, values: Tensor, sizes: Tensor, days: Tensor) -> tuple[Tensor, ...]:
        """Those of `patients.outcomes` that `names` has, of events in order of time.

        Args:
            codes: (num_events,) int64; values: (num_events,) float32 as the model reads them, nan without a value.
            sizes: (num_sets,) int64, events of each set, at least one; days: (num_sets,) float32, as in `EventSets`.
        """
        model, place, now = self.model, torch.arange(days.shape[0] + 1), days.new_zeros(1)
        days = torch.cat([days, now])
        gaps = torch.cat([now, days[1:] - days[:-1]]).clamp_min(0)
        dense = _Dense(model.config.num_kv_heads, place[:, None] >= place)
        course = SetLayout(ALONE, place[:-1], place[-1:], place, days, gaps, dense)
        # One more set, of an event that says nothing, as not all operators take a patient without any; it is cut off.
        codes, sizes = F.pad(codes, (0, 1)), F.pad(sizes, (0, 1), value=1)
        values = F.pad(values, (0, 1), value=math.nan)
        event, first = torch.arange(codes.shape[0]), sizes.cumsum(0) - sizes
        column = event[(event[:, None] < sizes).any(1)]  # of a rectangle of sets: 0 to the size of the largest
        mask = column < sizes[:, None]  # (num_sets, longest)
        embedded = model.embedding(codes, values.nan_to_num(), ~values.isnan())
        cells = F.embedding((first[:, None] + column).masked_fill(~mask, 0), embedded)
        seen, shift = _encoded(model.encoder, cells, sizes, mask), None
        if model.last_values is not None:
            in_set = (event[:, None] >= first) & (event[:, None] < first + sizes)
            shift = _shifts(model.last_values, codes, values, in_set)
        # Wide, as the logarithm of a small probability needs it.
        readout = model.history(model.belief(seen, model.history, course)[0].mean, course)[-1:].double()
        found = predictions(model, model.patient.scores(readout, shift), model.patient.hazards(readout, shift))
        return tuple(found[name][0].float() for name in self.names)


# --------------------------------------------------------------------------- the file


@torch.no_grad()
def export_onnx(name: str, out: Path, kind: str | None = None) -> list[str]:
    """Write a run as an ONNX file of one example, after a comparison in onnxruntime on rows that training held out, as
    far as there are any.

    Args:
        kind: must be None: the model decides the form.

    Returns:
        Lines on what was compared and written.

    Raises:
        RecipeError: there is no such run, it is of another family, `kind` is given, or the extra is not installed.
        SourceError: the run's data is not there, or changed.
        CheckpointError: the weights have 8 bits, or the answers differ by more than TOLERANCE.
        DiskError: the file cannot be written.
    """
    if kind is not None:
        what = "an ONNX file has no family: the model decides its form"
        raise RecipeError(what, where="--family", fix="leave --family out")
    try:
        import onnx
        import onnxruntime
    except ImportError:
        what = "ONNX files need the packages onnx and onnxruntime, which are not installed"
        raise RecipeError(what, where=str(out), fix="pip install 'unpad[onnx]'") from None
    run = load(name, device=CPU)
    form = _form(run)
    data = run.data()
    chosen = np.argsort(data.table.split == Split.TRAIN, kind="stable")[:MOST_ROWS]  # held-out ones first
    rows = [data.alone(row, 0, int(data.table.positions[row]), 0) for row in chosen.tolist()]
    rows.sort(key=lambda batch: batch.total_tokens)
    model = onnx.load_from_string(_traced(form, rows[0]))
    about = {"format": FORMAT, "family": data.family, **form.about}
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in about.items()})
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    differences = [_difference(session, form, batch) for batch in rows]
    if not max(differences) <= TOLERANCE:
        what = f"answers in onnxruntime differ by {max(differences):.1e}, more than {TOLERANCE:.0e}; nothing is written"
        raise CheckpointError(what, where=str(out), fix=f"report this with the run's recipe; until then {COPY}")
    storage.make_folder(out.parent)
    storage.write_atomic(out, content, private=data.private)
    num_held_out = int((data.table.split[chosen] != Split.TRAIN).sum())
    return [
        f"{run.model.config.kind}: {len(content):,} bytes; it reads {', '.join(form.axes)}",
        f"compared in onnxruntime {onnxruntime.__version__} on {number_of(len(rows), 'rows')}, {num_held_out:,} of "
        f"them held out: largest difference {max(differences):.1e}",
        f"written to {out}",
    ]


def _form(run: LoadedRun) -> _Picture | _Patient:
    """The dense form of a run's model.

    Raises:
        RecipeError: there is none of its family.
        CheckpointError: its weights have 8 bits.
    """
    model, where = run.model, str(run.folder)
    if run.quantized is not None:
        fix = f"export the run that it was made of: {run.quantized.original}"
        raise CheckpointError("weights of 8 bits have no form in ONNX files", where=where, fix=fix)
    if isinstance(model, Vit | Cnn):
        return _Picture(run, model)
    if isinstance(model, SetSequence):
        return _Patient(run, model)
    what = f"an ONNX file holds a model of pictures or patients, and this one is of kind {model.config.kind}"
    raise RecipeError(what, where=where, fix="export DIR or FILE.gguf" if model.config.kind == "decoder" else COPY)


def _traced(form: _Picture | _Patient, batch: RaggedBatch) -> bytes:
    """The dense form as torch exports it by tracing one example; the newer exporter needs another package, and ten
    times as long."""
    buffer, outputs = io.BytesIO(), list(form.answers(batch))
    for name, symbol in SYMBOLS.items():
        torch.onnx.register_custom_op_symbolic(f"aten::{name}", symbol, OPSET)
    names: dict[str, Any] = {"input_names": list(form.axes), "output_names": outputs, "dynamic_axes": form.axes}
    with warnings.catch_warnings(), library.switched_off():
        warnings.simplefilter("ignore")  # that there is a newer exporter, and that some sizes are constants
        torch.onnx.export(form.eval(), form.inputs(batch), buffer, dynamo=False, opset_version=OPSET, **names)
    return buffer.getvalue()


def _rms_norm(g: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    mean = g.op("ReduceMean", g.op("Mul", x, x), _constant(g, [-1]), keepdims_i=1)
    root = g.op("Sqrt", g.op("Add", mean, _constant(g, eps.node().t("value").float())))
    return g.op("Mul", g.op("Div", x, root), weight)


def _constant(g: Any, value: Any) -> Any:
    return g.op("Constant", value_t=torch.as_tensor(value))


# Operators of torch that its exporter does not know.
SYMBOLS: dict[str, Callable[..., Any]] = {
    "asinh": lambda g, x: g.op("Asinh", x),
    "expm1": lambda g, x: g.op("Sub", g.op("Exp", x), _constant(g, np.float64(1))),
    "logaddexp": lambda g, a, b: g.op(
        "Add", g.op("Max", a, b), g.op("Softplus", g.op("Neg", g.op("Abs", g.op("Sub", a, b))))
    ),
    "rms_norm": _rms_norm,
}


def _difference(session: Any, form: _Picture | _Patient, batch: RaggedBatch) -> float:
    """Largest difference of an answer of one example, divided by the number itself where that is above 1."""
    given = {name: x.numpy() for name, x in zip(form.axes, form.inputs(batch), strict=True)}
    mine = form.answers(batch)
    theirs = dict(zip(mine, session.run(list(mine), given), strict=True))
    return max(float((abs(theirs[name] - mine[name]) / np.maximum(abs(mine[name]), 1)).max()) for name in mine)
