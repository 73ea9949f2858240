"""How evenly the slots of a table are read: counters, and a report with the slots that nothing reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import cuda_kernels, torch_bridge_arrays
from ..errors import SlotError, ValueRangeError, message
from ..torch_bridge_arrays import borrowed, view


class UsageReport(NamedTuple):
    """Statistics of a window of R reads of S slots (docs/memory-layers.md); all depend on R: compare at equal R only.

    Attributes
    ----------
    reads : int
        R.
    collision : float
        Share of the reads that fall on a slot read more than once.
    coverage : float
        Share of the slots that are read at all.
    divergence : float
        Kullback-Leibler divergence of the reads from the uniform distribution over all slots, in nats.
    dead : Tensor int64
        The slots that nothing read.
    """

    reads: int
    collision: float
    coverage: float
    divergence: float
    dead: Tensor


class SlotUsage:
    """Counts the reads of each slot of a table.

    Parameters
    ----------
    num_slots : int

    Attributes
    ----------
    counts : Tensor int64 [num_slots]
        On the device of the slots that were counted last.

    Examples
    --------
    >>> usage = SlotUsage(4)
    >>> usage.add(torch.tensor([[0, 1], [0, 2]]))
    >>> report = usage.report()
    >>> report.reads, report.collision, report.coverage, round(report.divergence, 4), report.dead.tolist()
    (4, 0.5, 0.75, 0.3466, [3])
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueRangeError(message("SlotUsage", "num_slots", "at least 1", str(num_slots), "pass the table's"))
        self.counts = torch.zeros(num_slots, dtype=torch.int64)

    def add(self, slots: Tensor) -> None:
        """Count the reads `slots`, integers of any shape.

        Nothing is counted while a backward runs: there activation checkpointing repeats reads that were counted.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        flat = slots.detach().reshape(-1)
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < len(self.counts):
            expected, got = f"slots in [0, {len(self.counts)})", f"{int(flat.min())} to {int(flat.max())}"
            raise SlotError(message("SlotUsage.add", "slots", expected, got, "check the table's size"))
        self.counts = self.counts.to(flat.device)
        if torch_bridge_arrays.on_gpu(flat):
            _count_on_gpu(flat.int(), self.counts)
        else:
            self.counts += torch.bincount(flat, minlength=len(self.counts))

    def reset(self) -> None:
        """Begin a new window."""
        self.counts.zero_()

    def report(self) -> UsageReport:
        """Return the statistics since the start or the last reset; without reads the shares are 0.

        The divergence is the sum over slots that were read of p ln(S p), p their share of the reads.
        """
        reads, slots = int(self.counts.sum()), len(self.counts)
        read = self.counts[self.counts > 0].double()
        shares = read / max(reads, 1)
        return UsageReport(
            reads,
            float(read[read > 1].sum() / max(reads, 1)),
            len(read) / slots,
            float((shares * (slots * shares).log()).sum()),
            (self.counts == 0).nonzero()[:, 0],
        )


@borrowed
def _count_on_gpu(slots: Tensor, counts: Tensor) -> None:
    cuda_kernels.count_accesses(view(slots), view(counts))
