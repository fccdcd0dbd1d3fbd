"""`unpad prove --hf`: soundness of every way to make batches, for the architecture in a config.json."""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from torch import nn

from unpad.errors import ProofError, SourceError, UnpadError, is_memory_error
from unpad.interchange.hub import Snapshot, is_hub_name
from unpad.proof.foreign import shrink, small_model
from unpad.proof.foreign.certificate import ForeignCertificate, Kind
from unpad.proof.foreign.collators import Batching, collators
from unpad.proof.foreign.judge import raise_memory
from unpad.proof.foreign.measure import OTHER_LOSS, error_of_loss
from unpad.proof.foreign.pairs import prove_callable
from unpad.proof.foreign.update import labelled
from unpad.storage.paths import user_path
from unpad.terminal.progress import progress
from unpad.terminal.table import columns, text_table, wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROW_TOKENS = 64  # length of packed rows: above the longest sequence, so that packing need not cut
QUIET = ("sound", "refused", "not proven")  # verdicts of batches not proven to train anything wrong
HEAD = ("batches", "verdict", "gradient", "loss", "others move", "cut")
UNSHIFTED = (
    "the model's own loss of a sequence alone is not the mean cross-entropy of the next tokens, as where it does not "
    "shift the labels. Its batches are judged by the loss of the logits"
)
PACKAGES = ("transformers", "trl", "torch")


@dataclass(frozen=True)
class Way:
    """A way to make batches, and its certificate; None if its modules are not installed."""

    collator: Batching
    certificate: ForeignCertificate | None

    @property
    def verdict(self) -> str:
        return "not installed" if self.certificate is None else self.certificate.verdict

    @property
    def is_harmless(self) -> bool:
        """True unless batches of a way that promises isolation are silently wrong."""
        return not self.collator.promises or self.certificate is None or self.certificate.verdict in QUIET

    def measured(self, kind: Kind) -> float | None:
        finding = None if self.certificate is None else self.certificate.finding(kind)
        return None if finding is None else finding.measured

    def failed(self, kind: Kind) -> bool:
        finding = None if self.certificate is None else self.certificate.finding(kind)
        return finding is not None and not finding.passed

    @property
    def reason(self) -> str:
        """The cause of the verdict, and a fix; empty for a sound way."""
        if self.certificate is None:
            return f"pip install {' '.join(self.collator.needs)}"
        return self.certificate.cause if self.certificate.refused is None else self.certificate.refused

    def cells(self) -> list[str]:
        """The way's row of the table."""
        moves, cut = self.measured("isolation"), self.measured("cut")
        return [
            self.collator.name,
            self.verdict.upper() if self.verdict == "leaking" else self.verdict,
            _error(self.measured("gradient")),
            _error(self.measured("loss")),
            "-" if moves is None else _error(moves) if self.failed("isolation") else "no",
            "-" if cut is None else f"{cut:.0f}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "batches": self.collator.name,
            "promises": self.collator.promises,
            "verdict": self.verdict,
            "gradient": self.measured("gradient"),
            "loss": self.measured("loss"),
            "others_move": self.failed("isolation"),
            "tokens_cut": self.measured("cut"),
            "reason": self.reason,
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
        }


@dataclass(frozen=True)
class FolderProof:
    """Certificates of every way to make batches, for a small model of one architecture."""

    small: small_model.SmallModel
    where: str
    ways: tuple[Way, ...]

    @property
    def passed(self) -> bool | None:
        """True if each way that promises isolation keeps it, or raises an error; None if none is proven wrong but
        something was not proven."""
        if not all(way.is_harmless for way in self.ways):
            return False
        verdicts = {way.verdict for way in self.ways if way.collator.promises}
        return None if "not proven" in verdicts or verdicts <= {"not installed"} else True

    def lines(self) -> list[str]:
        """The table as lines for a terminal of 80 columns, with advice below it."""
        lines = [part for line in self._head() for part in wrapped(line, columns())]
        lines += ["", *text_table(HEAD, [way.cells() for way in self.ways], left=(0, 1)), ""]
        reasons: dict[str, list[str]] = {}
        for way in self.ways:
            if way.reason:
                reasons.setdefault(way.reason, []).append(way.collator.name)
        for reason, names in reasons.items():
            lines += wrapped(f"{', '.join(names)}: {reason}", columns())
        return [*lines, "", *wrapped(self.advice(), columns())]

    def _head(self) -> list[str]:
        model = self.small.model
        num = sum(parameter.numel() for parameter in model.parameters())
        what = (
            f"{type(model).__name__} of {self.where}, made small: {describe_blocks(self.small)}, {num:,} random weights"
        )
        precision = ", ".join(sorted({way.certificate.precision for way in self.ways if way.certificate is not None}))
        sample = small_model.sample()
        size = f"{len(sample)} sequences, {sum(map(len, sample))} tokens"
        conditions = [f"{self.small.attention} attention", precision, size]
        conditions += [f"{name} {number}" for name, number in versions().items()]
        return [what, "; ".join(conditions), *(f"note: {note}" for note in self.notes)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the configuration, and of the certificates."""
        found = [note for way in self.ways if way.certificate is not None for note in way.certificate.notes]
        return tuple(dict.fromkeys([*self.small.notes, *found]))

    def advice(self) -> str:
        """Recommended ways to train, and ways to avoid."""
        sound = [way.collator.instead for way in self.ways if way.verdict == "sound" and way.collator.instead]
        unsafe = [way.collator.name for way in self.ways if way.collator.promises and not way.is_harmless]
        if not sound:
            return "do: train with one sequence per batch; no way to batch this architecture is sound here"
        given = f"do: train with one of: {'; '.join(sound)}"
        return f"{given}. Do not use: {', '.join(unsafe)}" if unsafe else given

    def to_json(self) -> dict[str, Any]:
        model = self.small.model
        return {
            "passed": self.passed,
            "where": self.where,
            "class": type(model).__name__,
            "model_type": self.small.whole.model_type,
            "blocks": describe_blocks(self.small),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "attention": self.small.attention,
            "versions": versions(),
            "notes": list(self.notes),
            "advice": self.advice(),
            "ways": [way.to_json() for way in self.ways],
        }


def prove_folder(name: str, more: Sequence[Batching] = ()) -> FolderProof:
    """Prove every way to make batches on a small random model of an architecture; no weights are read.

    Args:
        name: a config.json, a folder with one, or OWNER/MODEL of a hub, from which only this file is downloaded.
        more: ways besides those of transformers and TRL.

    Raises:
        SourceError: there is no such file, or it is not a configuration.
        RecipeError: transformers or huggingface_hub is not installed, or transformers has no causal model of that type.
        ProofError: the architecture cannot be made small.
    """
    if is_hub_name(name):
        small_model.causal_types()  # a missing extra is reported before any download
        snapshot = Snapshot(name, SourceError)
        config, notes = small_model.read_config(snapshot.folder)
        return prove_small(small_model.build_small(config, notes), f"{snapshot.name}@{snapshot.commit[:12]}", more)
    path = user_path(name)
    config, notes = small_model.read_config(path)
    return prove_small(small_model.build_small(config, notes), str(path), more)


def prove_small(small: small_model.SmallModel, where: str, more: Sequence[Batching] = ()) -> FolderProof:
    """Prove every way to make batches on a small model.

    Raises:
        ProofError: the model does not compute a sequence alone.
    """
    ways = []
    known = [*collators(ROW_TOKENS), *more]
    with small_model.quiet(), progress("proving", len(known), "ways to make batches") as bar:
        try:
            fault = fault_of_loss(small.model)
            for collator in known:
                certificate = _prove(small.model, collator, has_loss=not fault) if collator.is_installed else None
                ways.append(Way(collator, certificate))
                bar.advance()
        except Exception as error:
            if isinstance(error, UnpadError) or is_memory_error(error):
                raise
            what = f"{type(small.model).__name__} does not compute a sequence alone: {small_model.message_of(error)}"
            raise ProofError(what, fix="call unpad.prove_callable with a model that does") from None
    return FolderProof(replace(small, notes=(*small.notes, *filter(None, [fault]))), where, tuple(ways))


def _prove(model: nn.Module, collator: Batching, *, has_loss: bool) -> ForeignCertificate:
    if collator.prepare is not None:
        try:
            model = collator.prepare(copy.deepcopy(model))
        except UnpadError as error:
            return ForeignCertificate((), "fp32", refused=error.what)
    certificate = prove_callable(model if has_loss else OnlyLogits(model), collator.collate, small_model.sample())
    if collator.proves and not certificate.passed:
        refused = certificate.refused or f"{collator.instead} proves the model first: {certificate.cause}"
        return replace(certificate, findings=(), refused=refused)
    return certificate


class OnlyLogits(nn.Module):
    """A model that is never asked for its loss, which is computed from the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: object) -> object:
        return self.model(**inputs)


def fault_of_loss(model: "PreTrainedModel") -> str:
    """A note if a model's own loss of a sequence alone differs from next-token cross-entropy; else empty."""
    try:
        error = error_of_loss(model, labelled(small_model.sample()[:1], None))
    except Exception as error_of_model:
        raise_memory(error_of_model)
        return UNSHIFTED
    return UNSHIFTED if error is not None and error > OTHER_LOSS else ""


def describe_blocks(small: small_model.SmallModel) -> str:
    """Number and types of the blocks of a small model, such as `2 blocks (sliding_attention, full_attention)`."""
    fields = small.model.config.get_text_config(decoder=True).to_dict()
    kinds = next(
        (value for name in (*shrink.BLOCK_TYPES, *shrink.CYCLES) if isinstance(value := fields.get(name), list)), []
    )
    num = next((value for name in shrink.STACKS if isinstance(value := fields.get(name), int)), len(kinds))
    return f"{num} block{'s' * (num != 1)}" + (f" ({', '.join(map(str, kinds))})" if len(Counter(kinds)) > 1 else "")


def versions() -> dict[str, str]:
    """Versions of the installed packages that determine a verdict."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _error(measured: float | None) -> str:
    return "-" if measured is None else "0" if measured == 0 else f"{measured:.0e}"
