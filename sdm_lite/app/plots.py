"""The pictures of a run: the loss, perplexity by position, accuracy by number of pairs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ..whole_files import write_whole

_MARKS = "osD^v"


def loss_picture(path: Path, runs: dict[str, list[dict[str, Any]]], unit: str, caption: str) -> None:
    """Draw the smoothed training loss of `runs` (name to metrics) over the steps."""

    def draw(axes: Any) -> None:
        for index, (name, metrics) in enumerate(runs.items()):
            steps = [line["step"] for line in metrics]
            losses = np.array([line["loss"] for line in metrics], dtype=np.float64)
            color = f"C{index}"
            axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
            axes.plot(steps, _smooth(losses), color=color, label=name)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(f"training loss ({unit})")

    _picture(path, draw, "Training loss", caption)


def position_picture(path: Path, runs: dict[str, list[dict[str, Any]]], trained: int, caption: str) -> None:
    """Draw perplexity per byte of `runs` (name to position ranges) over the position, on a log axis."""

    def draw(axes: Any) -> None:
        for index, (name, rows) in enumerate(runs.items()):
            edges = [max(row["from"], 1) for row in rows] + [rows[-1]["to"]]
            middle = np.sqrt(np.array(edges[:-1], dtype=np.float64) * np.array(edges[1:]))
            mark = _MARKS[index % len(_MARKS)]
            axes.plot(middle, [row["perplexity"] for row in rows], marker=mark, label=name)
        axes.axvline(trained, color="gray", linestyle="--", linewidth=1)
        axes.annotate(" trained up to here", (trained, axes.get_ylim()[1]), color="gray", va="top", fontsize=8)
        _doubling(axes)
        axes.set_xlabel("position in the file (bytes)")
        axes.set_ylabel("perplexity per byte")

    _picture(path, draw, "Perplexity by position, held-out files", caption)


def recall_picture(path: Path, runs: dict[str, dict[str, float]], trained: int, chance: float, caption: str) -> None:
    """Draw the accuracy of `runs` (label to accuracy by number of pairs)."""

    def draw(axes: Any) -> None:
        for index, (name, accuracy) in enumerate(runs.items()):
            pairs = [int(key) for key in accuracy]
            axes.plot(pairs, list(accuracy.values()), marker=_MARKS[index % len(_MARKS)], label=name)
        axes.axhline(chance, color="gray", linestyle=":", linewidth=1)
        axes.axvline(trained, color="gray", linestyle="--", linewidth=1)
        axes.annotate(" trained up to here", (trained, 0.03), color="gray", fontsize=8)
        _doubling(axes)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("pairs to remember")
        axes.set_ylabel("queries answered right")

    _picture(path, draw, "Recall of key-value pairs", caption)


def slots_picture(path: Path, memories: dict[str, tuple[np.ndarray, np.ndarray]], caption: str) -> None:
    """Draw the rows that `memories` (label to slots and lengths of rows) own, by slot."""

    def draw(axes: Any) -> None:
        for index, (name, (slots, lengths)) in enumerate(memories.items()):
            mark = _MARKS[index % len(_MARKS)]
            axes.plot(slots, lengths, linestyle="", marker=mark, markersize=3, label=f"{name}: {len(slots):,} rows")
        axes.set_xlabel("slot")
        axes.set_ylabel("length of the row")

    _picture(path, draw, "Slots in use", caption)


def needle_picture(
    path: Path,
    runs: dict[str, list[float]],
    ranges: dict[str, list[tuple[float, float]]],
    chance: float,
    caption: str,
) -> None:
    """Draw the accuracy of `runs` (label to accuracy by number of readings, from 0), and its ranges over seeds."""

    def draw(axes: Any) -> None:
        for index, (name, shares) in enumerate(runs.items()):
            axes.plot(range(len(shares)), shares, marker=_MARKS[index % len(_MARKS)], label=name)
            axes.fill_between(range(len(shares)), *zip(*ranges[name]), color=f"C{index}", alpha=0.2, linewidth=0)
        axes.axhline(chance, color="gray", linestyle=":", linewidth=1)
        axes.set_xticks(range(max(len(shares) for shares in runs.values())))
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("readings of the haystack, each followed by one write")
        axes.set_ylabel("questions answered right")

    _picture(path, draw, "Needles found by re-reading", caption)


def _picture(path: Path, draw: Callable[[Any], None], title: str, caption: str) -> None:
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.supxlabel(textwrap.fill(caption, 100), fontsize=8, color="dimgray")
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=120, format="png"))


def _doubling(axes: Any) -> None:
    """Scale the x axis by powers of two, written as numbers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _smooth(losses: np.ndarray) -> np.ndarray:
    """Return the mean of a window around each step, shorter at the ends."""
    width = max(1, len(losses) // 40)
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    at = np.arange(len(losses))
    low, high = np.maximum(at - width, 0), np.minimum(at + width + 1, len(losses))
    return (sums[high] - sums[low]) / (high - low)
