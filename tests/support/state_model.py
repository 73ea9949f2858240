"""What a `MemoryState` must do, in a few lines: one dense array per sequence, copied whenever anything could share it.

The arithmetic is that of `sdm_lite.sparse_delta_rule`, whose bits a state promises; marks are copies of everything.
"""

from __future__ import annotations

import numpy as np

import sdm_lite


class StateModel:
    """Sequences as a list of dictionaries: memory [H, N, D] and tokens seen."""

    def __init__(self, initial: np.ndarray, batch: int, rule: str = "shared"):
        self.initial, self.rule = initial, rule
        self.sequences = [self._fresh() for _ in range(batch)]
        self.marks: list[tuple[object, list[dict]]] = []

    def _fresh(self) -> dict:
        return {"memory": self.initial.copy(), "tokens": 0}

    def _copies(self, indices) -> list[dict]:
        return [{**self.sequences[i], "memory": self.sequences[i]["memory"].copy()} for i in indices]

    @property
    def batch(self) -> int:
        return len(self.sequences)

    def dense(self) -> np.ndarray:
        memories = [sequence["memory"] for sequence in self.sequences]
        return np.stack(memories) if memories else np.empty((0, *self.initial.shape), self.initial.dtype)

    def tokens(self) -> list[int]:
        return [sequence["tokens"] for sequence in self.sequences]

    def extend(self, *call: np.ndarray) -> np.ndarray:
        """Run each sequence's tokens that are not padding, alone and one at a time."""
        readings = np.zeros_like(call[0])
        for b, sequence in enumerate(self.sequences):
            for t in range(call[0].shape[1]):
                if (call[1][b, t] == -1).all() and (call[5][b, t] == -1).all():
                    continue
                token = [x[b : b + 1, t : t + 1] for x in call]
                state = sequence["memory"][None]
                readings[b, t] = sdm_lite.sparse_delta_rule_(*token, state, rule=self.rule, check=False)[0, 0]
                sequence["tokens"] += 1
        return readings

    def fork(self, indices) -> StateModel:
        new = StateModel(self.initial, 0, self.rule)
        new.sequences = self._copies(indices)
        return new

    def reorder(self, indices) -> None:
        self.sequences = self._copies(indices)

    def reset(self, i: int) -> None:
        self.sequences[i] = self._fresh()

    def append(self, n: int) -> None:
        self.sequences += [self._fresh() for _ in range(n)]

    def evict(self, indices) -> None:
        self.sequences = [sequence for i, sequence in enumerate(self.sequences) if i not in set(indices)]

    def mark(self, mark: object) -> None:
        self.marks.append((mark, self._copies(range(self.batch))))

    def rollback(self, place: int) -> None:
        """Return to live mark number `place`."""
        now, self.sequences = self.sequences, self.marks[place][1]
        self.sequences = self._copies(range(self.batch))
        del now, self.marks[place + 1 :]

    def release(self, place: int) -> None:
        del self.marks[place]
