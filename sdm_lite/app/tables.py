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
    if len(accounts) > 1:
        console.print(equal_note(accounts, steps), style="dim")


def equal_note(accounts: dict[str, dict[str, Any]], steps: dict[str, int | None]) -> str:
    """Return what is equal between runs side by side, and what is not."""
    flops = [account["flops_per_token"] for account in accounts.values()]
    apart = 100 * (max(flops) / min(flops) - 1)
    counts = set(steps.values())
    if counts == {None}:
        return f"Equal: data, seed and seconds. FLOPs per token differ by {apart:.1f} %, steps by each one's speed."
    if len(counts) == 1:
        return f"Equal: data and its order, seed, steps; FLOPs within {apart:.1f} %. State and parameters: as above."
    return "Equal: training FLOPs, by the number of steps; data in the same order, as far as each gets; seed."


def show_text(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Print bits per byte on held-out windows, and beside it, of other bytes, by position in long files."""
    first = next(iter(results.values()))
    table = Table(title=f"Held-out bytes, windows of {first['settings']['length']}", title_justify="left")
    for head in ("mixer", "steps", "train s", "bits per byte"):
        table.add_column(head, justify="left" if head == "mixer" else "right")
    for name, result in results.items():
        seconds, bits = f"{result['seconds']['training']:.0f}", f"{result['bits_per_byte']:.3f}"
        table.add_row(name, str(result["steps"]), seconds, bits)
    console.print(table)
    title = f"Bits per byte by position, {first['long_files']} long held-out files"
    table = Table(title=title, title_justify="left")
    table.add_column("positions")
    for name in results:
        table.add_column(name, justify="right")
    for rows in zip(*(result["by_position"] for result in results.values())):
        numbers = (f"{row['bits_per_byte']:.3f}" for row in rows)
        table.add_row(f"{rows[0]['from']:,} to {rows[0]['to']:,}", *numbers)
    console.print(table)


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
