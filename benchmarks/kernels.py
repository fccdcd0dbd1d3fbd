"""Contribution of each native kernel to training, one at a time, and of the tokens that the last block leaves out.

    python benchmarks/kernels.py                      about six minutes on 2 quiet cores
    python benchmarks/kernels.py W1 --rounds 3 --seconds 1 --out /tmp/kernels.md

Every side trains with all kernels but the one it is named after, whose part torch computes, or with a last block that
computes all tokens; all sides take turns in one process. The gain is how much faster the full path is than the side
without: the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from measure import Contender, Work, describe_machine, measure_rounds, spread
from workloads import Ours, workload

import unpad.models.decoder
import unpad.nn.activation
import unpad.nn.kernel
import unpad.nn.losses
import unpad.nn.norm
from unpad.nn.native import library
from unpad.storage import write_atomic

HERE = Path(__file__).parent
FULL = "all"


class Off:
    """Replacement for `unpad/nn/native/library.py` where a part is to go through torch."""

    @staticmethod
    def runs(*_: Any) -> bool:
        return False

    @staticmethod
    def computes(*_: Any) -> bool:
        return False


def without(*modules: ModuleType) -> Callable[[], Any]:
    """These modules find no kernels."""

    @contextmanager
    def switched() -> Iterator[None]:
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(patch.object(module, "library", Off))
            yield

    return switched


def without_attention() -> Any:
    """Attention through torch."""
    return patch.object(unpad.nn.kernel, "supports", lambda *_: False)


@contextmanager
def without_any() -> Iterator[None]:
    """Every kernel of training through torch."""
    with without_attention(), without(unpad.nn.norm, unpad.nn.activation, unpad.nn.losses)():
        yield


PARTS: dict[str, Callable[[], Any]] = {
    FULL: nullcontext,
    "attention": without_attention,
    "residual add + norm": without(unpad.nn.norm),
    "activation": without(unpad.nn.activation),
    "cross-entropy": without(unpad.nn.losses),
    "a short last block": lambda: patch.object(unpad.models.decoder, "MOST_WANTED", 0),
    "every one of them": without_any,
}


def side(name: str, data: Path, part: Callable[[], Any]) -> Contender:
    """One way to train; its own model, optimizer and loader."""
    ours = Ours(workload(name, data))

    def step() -> Work:
        with part():
            return ours.step()

    return Contender(step)


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """The table of one workload."""
    parts = [FULL, *(part for part in PARTS if part != FULL and (not options.parts or part in options.parts))]
    sides = {part: side(name, options.data, PARTS[part]) for part in parts}
    result = measure_rounds(sides, options.rounds, options.seconds, warm_seconds=2 * options.seconds)
    rows = [
        f"## {name}",
        "",
        "| without | tokens/s | quartiles | gain of having it | quartiles |",
        "|---|---|---|---|---|",
    ]
    for part in parts:
        rate, gain = spread(result.rates(part)), spread(result.ratios(FULL, part))
        gains = (
            ["", ""] if part == FULL else [f"{gain.median - 1:+.1%}", f"{gain.low - 1:+.1%} to {gain.high - 1:+.1%}"]
        )
        shown = "nothing" if part == FULL else part
        cells = [shown, f"{rate.median:,.0f}", f"{rate.low:,.0f} to {rate.high:,.0f}", *gains]
        rows.append(f"| {' | '.join(cells)} |")
    return [*rows, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["W1", "W2", "W3"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--parts", nargs="+", default=[], choices=[*PARTS][1:], help="default all")
    parser.add_argument("--data", type=Path, default=HERE / "../../shared/data", help="folder with zh/, for corpora")
    parser.add_argument("--out", type=Path, default=HERE / "kernels.md")
    options = parser.parse_args()
    machine = describe_machine()
    lines = [
        "# What each kernel contributes",
        "",
        f"    python benchmarks/kernels.py {' '.join(options.names)} --rounds {options.rounds} "
        f"--seconds {options.seconds:g}",
        "",
        f"Machine: {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, load "
        f"{machine['load']:.1f} before; {machine['threads']} threads; {library.describe()}; torch {machine['torch']}.",
        "",
    ]
    for name in options.names:
        lines += measure(name, options)
    write_atomic(options.out, "\n".join(lines))
    print("\n".join(lines), end="")


if __name__ == "__main__":
    main()
