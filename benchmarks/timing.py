"""Interleaved timing: what is compared runs in turn, round after round, and disturbed rounds do not count."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: torch's threads spin for a moment after each parallel region: without a pause they would run into the next candidate
SETTLE_S = 0.01
#: with fewer clean rounds than this a comparison is called disturbed
ENOUGH = 3


@dataclass
class Timings:
    """Seconds per call of each candidate over the rounds that count, and how clean those were."""

    seconds: dict[str, list[float]]
    clean_rounds: int
    disturbed_rounds: int
    foreign_cores: float  # the most that other processes used in a round that counts

    @property
    def is_clean(self) -> bool:
        """Whether enough rounds ran on a machine that did nothing else."""
        return self.clean_rounds >= ENOUGH

    def median(self, name: str) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, fast: str) -> float:
        """Median over rounds of slow / fast: both of a round ran within moments of each other."""
        return statistics.median(s / f for s, f in zip(self.seconds[slow], self.seconds[fast]))


def _machine_busy_seconds() -> float | None:
    """CPU seconds that all processes have used since boot, or None where the system does not say."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(x) for x in file.readline().split()[1:9]]
    except OSError:
        return None
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    limit_s: float = 30.0,
    max_foreign_cores: float = 0.15,
    prepare: Callable[[str], object] | None = None,
) -> Timings:
    """Time the candidates in turn until `rounds` clean rounds are in, or `limit_s` has passed.

    A round in which other processes used more than `max_foreign_cores` is set aside. Where the limit
    passes with fewer than three clean rounds, the least disturbed three count, `is_clean` is false and
    `foreign_cores` says how disturbed they were. `prepare(name)` runs before each call, outside its time; one call of
    each, uncounted, comes first (compilation, page faults).
    """
    prepare = prepare or (lambda name: None)
    for name, call in candidates.items():
        prepare(name)
        call()
    clean: list[tuple[float, dict[str, float]]] = []
    disturbed: list[tuple[float, dict[str, float]]] = []
    start = time.perf_counter()
    while len(clean) < rounds and (time.perf_counter() - start < limit_s or len(clean) + len(disturbed) < ENOUGH):
        busy, own, wall = _machine_busy_seconds(), _own_seconds(), time.perf_counter()
        row = {}
        for name, call in candidates.items():
            prepare(name)
            time.sleep(SETTLE_S)
            begin = time.perf_counter()
            call()
            row[name] = time.perf_counter() - begin
        wall = time.perf_counter() - wall
        foreign = 0.0
        if busy is not None:
            foreign = max(0.0, (_machine_busy_seconds() - busy) - (_own_seconds() - own)) / wall
        (clean if foreign <= max_foreign_cores else disturbed).append((foreign, row))
    used = clean if len(clean) >= ENOUGH else sorted([*clean, *disturbed], key=lambda item: item[0])[:ENOUGH]
    return Timings(
        seconds={name: [row[name] for _, row in used] for name in candidates},
        clean_rounds=len(clean),
        disturbed_rounds=len(disturbed),
        foreign_cores=max(foreign for foreign, _ in used),
    )
