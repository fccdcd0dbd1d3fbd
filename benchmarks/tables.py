"""Tables of `speed.py` as Markdown."""

from __future__ import annotations

from typing import Any

import time_to_loss
from gates import OURS, interval
from measure import spread

MIB = 2**20
OVER_CEILING = 1.1  # share that no product reaches if the ceiling is right


def markdown(result: dict[str, Any]) -> str:
    machine, load = result["machine"], [result["machine"]["load"], result["load_after"]]
    versions = ", ".join(f"{key} {value}" for key, value in machine["packages"].items() if value)
    forced = result["forced"]
    lines = [
        "# Training speed beside what people use today" + (f", forced to {forced['to'].upper()}" if forced else ""),
        "",
        f"    {result['command']}",
        "",
        f"Machine: {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, load "
        f"{' before and '.join(f'{value:.1f}' for value in load if value is not None)} after; "
        f"{machine['threads']} threads; {result['kernels']}. Measured in {result['minutes']:.1f} minutes.",
        f"Python {machine['python']}, torch {machine['torch']}, {versions}.",
        *([f"Forced to {forced['to'].upper()}, as is seen: {forced['seen']}."] if forced else []),
        "",
    ]
    if result["workloads"]:
        lines += how_measured(result)
    for name, parts in result["workloads"].items():
        lines += workload_table(name, parts, result["quick"])
    if result["time_to_loss"]:
        lines += ["## Time to the same held-out loss", "", *time_to_loss.markdown(result["time_to_loss"])]
    return "\n".join(lines)


def how_measured(result: dict[str, Any]) -> list[str]:
    """Contents of the tables of workloads."""
    if result["quick"]:
        rounds = [
            f"Quick: at most {result['rounds']} rounds, as many as fit into the time, of {result['seconds']:g} s for "
            "every side, in turn in processes of their own.",
            "Intervals hold the typical round with 95 %: Student's t of the rounds' logarithms. A gate inside its "
            "interval is not resolved. Padded sides",
            "take fewer batches in a turn where a cycle through all lengths is long.",
        ]
    else:
        rounds = [
            f"{result['rounds']} rounds of {result['seconds']:g} s and {result['min_steps']} steps for every side, in "
            "turn in processes of their own. Medians and quartiles of the rounds.",
        ]
    return [
        *rounds,
        "Tokens are real ones, counted alike for all. Every side first works untimed. Ratios are those of the rounds. "
        "The ceiling is the best square product",
        "between the rounds, in the precision that our side computes in; the share counts operations that the real "
        "tokens need.",
        "Our products alone are the matrix products of our updates with nothing in between: what no way of doing the "
        "rest could pass.",
        "The peer is the Trainer of transformers, in W3 torch.nn.TransformerEncoder. Its best: batches of like "
        "lengths, the fastest precision and",
        f"batch size of those tried on this machine, for {result['tune_seconds']:g} s at most. Memory: of the whole "
        "process, and in brackets what training added.",
        "",
    ]


def workload_table(name: str, parts: dict[str, Any], quick: bool) -> list[str]:
    lines = [f"## {name}", ""]
    for allocator in ("default", "kept"):
        part = parts.get(allocator)
        if part is None:
            continue
        title = {"default": "As it is", "kept": "With an allocator that keeps memory in everybody's turns"}[allocator]
        low, high = min(part["ceilings"]) / 1e9, max(part["ceilings"]) / 1e9
        about = part["ceiling"]
        lines += [
            f"### {title}",
            "",
            f"Ceiling: a product of {about['size']:,} cubed in {about['precision']}, {high:,.0f} GFLOP/s, lowest "
            f"{low:,.0f}.",
            "",
            *group_lines(part["groups"]),
            *side_table(part["sides"], quick, num_groups=len(part["groups"])),
            *notes(part),
            *gate_table(part),
        ]
    memory = parts.get("memory_gate")
    if memory:
        lines += [
            f"Peak memory at equal tokens per step: {memory['whole']:.2f} of the peer's ({memory['added']:.2f} of what "
            f"training adds); gate {memory['gate']}: {'met' if memory['met'] else 'NOT met'}.",
            "",
        ]
    return lines


def group_lines(groups: list[dict[str, Any]]) -> list[str]:
    """What was measured together, where not all sides share the machine's memory."""
    if len(groups) == 1:
        return []
    lines = [
        "Not all sides fit into memory together. Each group was measured in rounds of its own, with our side in all of "
        "them; ratios are those within",
        "a group. Rates of our side:",
        "",
        "| group | our tokens/s | quartiles | rounds |",
        "|---|---|---|---|",
    ]
    for number, group in enumerate(groups, 1):
        rate = spread(group["anchor_rates"])
        cells = f"{rate.median:,.0f} | {rate.low:,.0f} to {rate.high:,.0f} | {len(group['anchor_rates'])}"
        lines.append(f"| {number} | {cells} |")
    return [*lines, ""]


def side_table(sides: dict[str, Any], quick: bool, num_groups: int) -> list[str]:
    head = ["side", "precision", "batch", "tokens per step", "tokens/s", "95 %" if quick else "quartiles"]
    head += ["ours is times as fast", "share of ceiling", "steps", "loss, first to last", "peak memory"]
    head += ["group"] if num_groups > 1 else []
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, side in sides.items():
        rate, share = interval(side["rates"]) if quick else spread(side["rates"]), spread(side["shares"])
        cells = [
            name,
            side["precision"],
            str(side["batch_size"] or ""),
            f"{side['tokens_per_step']:,.0f}",
            f"{rate.median:,.0f}",
            f"{rate.low:,.0f} to {rate.high:,.0f}",
            times(side, quick),
            f"{share.median:.1%}",
            f"{side['steps']:,}",
            learning(side, quick),
            memory(side),
            *([] if num_groups == 1 else ["all" if name == OURS else str(side["group"])]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def times(side: dict[str, Any], quick: bool) -> str:
    ratios = side["times"].get(OURS)
    if not ratios:
        return ""
    found = (interval if quick else spread)([1 / value for value in ratios])
    return f"{found.median:.2f}" + (f" ({found.low:.2f} to {found.high:.2f})" if quick and found.high > 0 else "")


def learning(side: dict[str, Any], quick: bool) -> str:
    first, last = side["loss_first"], side["loss_last"]
    if first is None:
        return ""
    # Few short sequences tell nothing, so a quick table does not judge.
    return f"{first:.2f} to {last:.2f}" + (" DOES NOT LEARN" if not quick and last >= first else "")


def memory(side: dict[str, Any]) -> str:
    if "peak_bytes" not in side:
        return ""
    peak, base = side["peak_bytes"], side["base_bytes"]
    return f"{peak / MIB:,.0f} MiB ({(peak - base) / MIB:,.0f})"


def notes(part: dict[str, Any]) -> list[str]:
    """Sides that are missing, what the peer's best was chosen from, and how complete our products are."""
    lines = [f"Left out: {name} {reason}." for name, reason in part["left_out"].items()]
    if max(value for side in part["sides"].values() for value in side["shares"]) > OVER_CEILING:
        lines.append(
            "Sides were faster than the ceiling: others used the machine while it was measured. Shares are void."
        )
    for name, side in part["sides"].items():
        if side["tuned"]:
            tried = ", ".join(
                f"{setting}: {'slow or not tried' if rate is None else f'{rate:,.0f}'}"
                for setting, rate in side["tuned"].items()
            )
            lines.append(f"Tokens/s of {name} while it was tuned, by precision and batch size: {tried}.")
        if side["of_needed"] is not None:
            lines.append(f"{name[0].upper()}{name[1:]} make {side['of_needed']:.0%} of the operations that are needed.")
    return [*lines, ""] if lines else []


def gate_table(part: dict[str, Any]) -> list[str]:
    judged, kind = part["gates"], part["kind"]
    if kind is None:
        return ["No gates were set for these kernels in this precision.", ""]
    lines = []
    if judged:
        bound = "95 %" if part["quick"] else "quartile"
        head = ["gate", "compared with", bound, "gate", "met", "median", "goal", "median of goal"]
        head += ["our products alone", "every round"]
        lines = [f"Gates of {kind}:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in judged:
        show = "{:.1%}" if row["other"] is None else "{:.2f}"
        low, high = show.format(row["low"]), show.format(row["high"])
        decisive = f"{low} to {high}" if part["quick"] else high if row["at_most"] else low
        cells = [
            row["what"],
            row["other"] or "",
            decisive,
            ("at most " if row["at_most"] else "") + show.format(row["gate"]),
            "not resolved" if not row["resolved"] else "yes" if row["met"] else "NO",
            show.format(row["median"]),
            "" if row["goal"] is None else show.format(row["goal"]),
            "" if row["of_goal"] is None else f"{row['of_goal']:.0%}",
            "" if row["products_alone"] is None else show.format(row["products_alone"]),
            " ".join(show.format(value) for value in row["values"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if part["not_judged"]:
        lines += ["", f"Not judged, as their sides were not measured together: {', '.join(part['not_judged'])}."]
    return [*lines, ""]
