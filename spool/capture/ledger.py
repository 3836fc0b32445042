"""Counts of one step: what was accepted, published, dropped and left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spool.store import StepCounts


@dataclass
class Ledger:
    """Changed under the sink's lock only.

    Parameters
    ----------
    step : int
    accepted, accepted_bytes : int
        Calls handed to the writers, and their tensor bytes.
    pending : int
        Of them, not yet published.
    shards, bytes : int
        Published; bytes as stored.
    dropped : int
        Calls that were lost although they were wanted: no room, or a failed write.
    skipped : Counter of str
        Calls that were left alone, by reason; reasons of drops too.
    blocked : float
        Seconds that the trainer was made to wait.
    in_vain : float
        Of them, those after which there was no room: at most `max_wait` in a step.
    said_waiting : bool
        It was said that training waits.
    sealed : bool
        No further call of this step will come.
    whole : bool
        The step ended where the program said so; an interrupted one gets no marker.
    closed : bool
        The marker is written, or nothing more will be.
    """

    step: int
    accepted: int = 0
    accepted_bytes: int = 0
    pending: int = 0
    shards: int = 0
    bytes: int = 0
    dropped: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    blocked: float = 0.0
    in_vain: float = 0.0
    said_waiting: bool = False
    sealed: bool = False
    whole: bool = True
    closing: bool = False
    closed: bool = False

    @property
    def untouched(self) -> bool:
        """Whether nothing was counted at all."""
        return not (self.accepted or self.dropped or self.skipped)

    def counts(self) -> StepCounts:
        """The step's counts as the store keeps them."""
        return StepCounts(
            shards=self.shards,
            bytes=self.bytes,
            dropped=self.dropped,
            skipped=dict(sorted(self.skipped.items())),
            blocked_seconds=round(self.blocked, 3),
        )

    def line(self, more: int = 0, more_bytes: int = 0) -> str:
        """What `step` says about the step, in one line.

        Parameters
        ----------
        more, more_bytes : int
            Accepted calls that are not counted yet, and their tensor bytes.
        """
        skipped = ", ".join(f"{reason} {n}" for reason, n in sorted(self.skipped.items()))
        return (
            f"step {self.step}: {self.accepted + more} calls captured, "
            f"{amount(self.accepted_bytes + more_bytes)} of tensors, dropped {self.dropped}, "
            f"skipped {skipped or 'none'}, blocked {self.blocked:.2f} s"
        )


def amount(nbytes: float) -> str:
    """Bytes for people, e.g. ``140.0 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
