"""The README's table: the packaged model and data trained one example at a time, padded, bucketed and packed.

    python benchmarks/strategies.py                     about five minutes on 2 cores, best with nothing else running
    python benchmarks/strategies.py --rounds 3 --seconds 1 --out /tmp/try
    python benchmarks/strategies.py --recipe llm data.text=my.txt

Prints the table as Markdown and writes it, with every number and the machine, as strategies.md and strategies.json.
What is timed, and how, stands in `unpad/trials/bench/bench.py` and `unpad/trials/bench/speed.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from unpad.storage import write_atomic
from unpad.trials.bench.bench import Bench, bench
from unpad.trials.bench.speed import MIB, Effort, SpeedRow

HEAD = ["real tokens/s", "quartiles", "times as fast", "padding", "tokens per pass", "tokens per update", "memory"]


def markdown(result: Bench, command: str) -> str:
    machine, data = result.machine, result.data
    processor = " with ".join(filter(None, [f"{machine['cores']} cores of {machine['processor']}", machine["gpu"]]))
    tokens_per_step = result.strategies[-1].plan["tokens_per_step"]
    return "\n".join(
        [
            "# Ways to batch, on one machine in one run",
            "",
            f"    {command}",
            "",
            f"Recipe {result.recipe}: {data['parameters']:,} parameters; {data['sequences']:,} training sequences of "
            f"{data['mean_tokens']:.1f} tokens,",
            f"the longest {data['longest']}. Medians and quartiles of {result.rounds} rounds of {result.seconds:g} s: "
            "all rows take turns in one process with one",
            'model at rate 0, and waiting for the loader is part of the time. "times as fast" is the median of the',
            "rounds' own ratios. Tokens are real ones; a pass is one forward and backward. Memory is what training",
            "adds to the process: a model copy, gradients, optimizer state, and the activations of the largest pass.",
            "The recipe's batch size makes small passes; plan.batch_size=N gives padded strategies larger ones.",
            "",
            f"Machine: {processor}, load {machine['load']:.1f} before from other work; threads {machine['threads']};",
            f"{machine['precision']} ({machine['precision_reason']}); torch {machine['torch']}, "
            f"Python {machine['python']}.",
            "",
            f"## Strategies, about {tokens_per_step:,} real tokens per update but for the first row",
            "",
            *_table("strategy", result.strategies),
            "",
            "## Padded batches, one update each",
            "",
            *_table("batch size", result.batch_sizes),
            "",
        ]
    )


def _table(title: str, rows: list[SpeedRow]) -> list[str]:
    lines = [f"| {' | '.join([title, *HEAD])} |", "|---" * (len(HEAD) + 1) + "|"]
    for row in rows:
        rate = row.rate()
        cells = [
            row.name,
            f"{rate.median:,.0f}",
            f"{rate.low:,.0f} to {rate.high:,.0f}",
            f"{row.times(rows[0]).median:.1f}",
            f"{row.pad_share:.1%}",
            f"{row.tokens_per_pass:,.0f}",
            f"{row.tokens_per_update:,.0f}",
            f"{row.memory_bytes / MIB:,.0f} MiB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="zh_chat")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of strategies.md and .json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe fields to change")
    chosen = parser.parse_args()
    result = bench(chosen.recipe, chosen.overrides, Effort(rounds=chosen.rounds, seconds=chosen.seconds))
    text = markdown(result, " ".join(["python benchmarks/strategies.py", *sys.argv[1:]]))
    write_atomic(chosen.out / "strategies.md", text)
    write_atomic(chosen.out / "strategies.json", json.dumps(result.to_json(), ensure_ascii=False, indent=1) + "\n")
    print(text, end="")


if __name__ == "__main__":
    main()
