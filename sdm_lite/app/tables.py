"""The tables that a command ends with."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show_accounts(console: Console, accounts: dict[str, dict[str, Any]], steps: dict[str, int | None]) -> None:
    """Print what each model costs and holds; memories and n-gram tables stand apart from the parameters."""
    table = Table(title="What is compared", title_justify="left")
    table.add_column("mixer")
    for head in ("MFLOPs per token", "parameters", "memory tables", "n-gram tables", "state elements", "steps"):
        table.add_column(head, justify="right")
    for name, account in accounts.items():
        table.add_row(
            name,
            f"{account['flops_per_token'] / 1e6:.3f}",
            f"{account['parameters']:,}",
            f"{account['memory_parameters']:,}",
            f"{account['ngram_parameters']:,}",
            f"{account['state_elements']:,}",
            "by the clock" if steps[name] is None else f"{steps[name]}",
        )
    console.print(table)
    console.print(
        "FLOPs of one token's forward pass; state: what the global mixer and fast weights keep. Memory and n-gram"
        " tables are looked up, not multiplied: they add parameters, hardly FLOPs.",
        style="dim",
    )


def show_text(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Print bits per byte on held-out text, and by position."""
    table = Table(title="Held-out text", title_justify="left")
    table.add_column("mixer")
    table.add_column("steps", justify="right")
    table.add_column("train s", justify="right")
    table.add_column("bits per byte", justify="right")
    for row in _spread(next(iter(results.values()))["by_position"]):
        table.add_column(f"at {row['from']} to {row['to']}", justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            str(result["steps"]),
            f"{result['seconds']['training']:.0f}",
            f"{result['bits_per_byte']:.3f}",
            *(f"{row['bits_per_byte']:.3f}" for row in _spread(result["by_position"])),
        )
    console.print(table)


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first, the last and two ranges in between: a table for 80 columns."""
    chosen = sorted({0, len(rows) // 3, 2 * len(rows) // 3, len(rows) - 1})
    return [rows[index] for index in chosen]


def show_recall(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Print the accuracy by number of pairs, the state sizes beside."""
    first = next(iter(results.values()))
    table = Table(title="Recall: share of queries answered right, by number of pairs", title_justify="left")
    table.add_column("mixer")
    table.add_column("state", justify="right")
    table.add_column("train s", justify="right")
    for pairs in first["accuracy"]:
        longer = int(pairs) > max(first["settings"]["pairs"])
        table.add_column(f"{pairs}{'*' if longer else ''}", justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['account']['state_elements']:,}",
            f"{result['seconds']['training']:.0f}",
            *(f"{share:.3f}" for share in result["accuracy"].values()),
        )
    console.print(table)
    console.print(f"* more pairs than any training row had. Chance is {first['chance']:.3f}.", style="dim")


def show_demo(console: Console, text: dict[str, dict[str, Any]], recall: dict[str, dict[str, Any]]) -> None:
    """Print one table of both parts of the demo, and what it shows."""
    first = next(iter(recall.values()))
    pairs = [key for key in first["accuracy"] if int(key) in (64, 256, 512)] or list(first["accuracy"])[-3:]
    table = Table(title="Equal FLOPs, equal data, one thread each", title_justify="left")
    table.add_column("mixer")
    table.add_column("state", justify="right")
    table.add_column("code: bits per byte", justify="right")
    for key in pairs:
        table.add_column(f"recall of {key}", justify="right")
    for name in recall:
        table.add_row(
            name,
            f"{recall[name]['account']['state_elements']:,}",
            f"{text[name]['bits_per_byte']:.3f}",
            *(f"{recall[name]['accuracy'][key]:.3f}" for key in pairs),
        )
    console.print(table)
    for note in demo_notes(text, recall):
        console.print(note, highlight=False)


#: bits per byte by which seeds of one mixer differed at the demo's size and 250 steps: over seeds 0, 1, 2 sdm gave
#: 1.962 1.980 1.981 and gdn 1.973 1.983 1.987
SEED_NOISE = 0.02


def demo_notes(text: dict[str, dict[str, Any]], recall: dict[str, dict[str, Any]]) -> list[str]:
    """Return what the demo's results say, and what they do not."""
    bits = {name: result["bits_per_byte"] for name, result in text.items()}
    best, worst = min(bits, key=bits.__getitem__), max(bits, key=bits.__getitem__)
    apart = bits[worst] - bits[best]
    if apart < SEED_NOISE:
        on_text = f"On code the mixers lie {apart:.3f} bits per byte apart, within what another seed changes:"
        on_text += " text does not separate them at this budget."
    else:
        on_text = f"On code {best} is ahead by {apart:.3f} bits per byte, with one seed."
    share = {name: result["accuracy"] for name, result in recall.items()}
    pairs = max((key for key in next(iter(share.values())) if int(key) <= 256), key=int)
    first, *others = sorted(share, key=lambda name: -share[name][pairs])
    rest = ", ".join(f"{name} {100 * share[name][pairs]:.1f} %" for name in others)
    states = {name: result["account"]["state_elements"] for name, result in recall.items()}
    most = max(states, key=states.__getitem__)
    on_recall = f"Of {pairs} pairs {first} answers {100 * share[first][pairs]:.1f} %, {rest}: at equal FLOPs, but"
    on_recall += f" {most}'s state is {states[most] / max(min(states.values()), 1):.3g} times larger."
    return [on_text, on_recall]
