"""How many calls of a rank became what: the coverage table.

One row per count: ``what, reason, step, calls``, first for the whole rank (blank step),
then step by step. ``captured`` is what the training side closed the rank with,
``found`` what the tables hold; the rest divides the found ones. What cannot be checked
for want of a reference comes first of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spool.records import NO_REFERENCE, CallVerdict, Outcome
from spool.standards.rows import Route, Status
from spool.tables import TableError, read_table

MAX_REASONS = 100
OTHER = "other reasons"

WHAT = (
    "captured",
    "found",
    "missing",
    "not_selected",
    "replayed",
    "compared",
    "pass",
    "warning",
    "error",
    "standard_warning",
    "standard_error",
    "skipped",
    "replay_failed",
    "unjudged",
    "quarantined",
    "kept",
    "not_kept",
    "dropped",
    "not_captured",
)
"""Kinds of counts, in the table's order.

captured
    Shards that the training side published.
found
    Of these, the ones that were checked or set aside; ``missing`` are the others.
not_selected
    Left out by the name lists.
replayed
    Run on the bench device and measured.
compared
    Have a verdict other than SKIP; divided into ``pass``, ``warning`` and ``error`` by
    route.
standard_warning, standard_error
    Two-way calls by their standard's own verdict.
skipped, replay_failed, unjudged, quarantined
    Could not be compared, by reason.
kept, not_kept
    Shards worth keeping that were kept, and that exceeded the limits.
dropped, not_captured
    Calls that never became a shard: lost to a full spool, and by reason.
"""

_ALWAYS = ("found", "replayed", "compared", "replay_failed", "quarantined", "missing")
_STATUS = {Status.PASS: "pass", Status.WARNING: "warning", Status.ERROR: "error"}


@dataclass(frozen=True, slots=True)
class Count:
    """One row of the table; `step` is None for the whole rank."""

    what: str
    reason: str
    step: int | None
    calls: int


class Coverage:
    """Counts of one rank, by step.

    At most `MAX_REASONS` different reasons of a kind are held apart, the first ones in
    the order of execution; the rest is counted under `OTHER`.
    """

    def __init__(self) -> None:
        self._counts: dict[int, dict[tuple[str, str], int]] = {}
        self._reasons: dict[str, set[str]] = {}

    def add(self, step: int, what: str, calls: int, reason: str = "") -> None:
        """Count `calls` calls of a step."""
        if reason:
            known = self._reasons.setdefault(what, set())
            if reason not in known:
                if len(known) >= MAX_REASONS:
                    reason = OTHER
                else:
                    known.add(reason)
        counts = self._counts.setdefault(step, {})
        counts[what, reason] = counts.get((what, reason), 0) + calls

    def add_closed(self, closed: dict[str, Any]) -> None:
        """Take in what the training side closed the rank with."""
        for step, counts in sorted(closed.get("steps", {}).items(), key=lambda item: int(item[0])):
            self.add(int(step), "captured", int(counts.get("shards", 0)))
            if counts.get("dropped"):
                self.add(int(step), "dropped", int(counts["dropped"]))
            for reason, calls in sorted(counts.get("skipped", {}).items()):
                self.add(int(step), "not_captured", int(calls), str(reason))

    def add_verdict(self, call: CallVerdict, kept: bool) -> None:
        """Count one call of the tables.

        Parameters
        ----------
        call : CallVerdict
        kept : bool
            Whether its shard was kept.
        """
        step = call.step
        self.add(step, "found", 1)
        if call.is_worth_keeping or kept:
            self.add(step, "kept" if kept else "not_kept", 1)
        if call.outcome is Outcome.REPLAY_FAILED:
            # The class alone: the texts of exceptions hold addresses and sizes.
            self.add(step, "replay_failed", 1, call.message.split(":", 1)[0])
            return
        if call.outcome in (Outcome.QUARANTINED, Outcome.UNJUDGED):
            self.add(step, call.outcome.value, 1, call.message)
            return
        if call.outcome is Outcome.MEASURED:
            self.add(step, "replayed", 1)
        if call.status is Status.SKIP or call.status is None:
            self.add(step, "skipped", 1, call.message or "nothing to compare")
            return
        self.add(step, "compared", 1)
        self.add(step, _STATUS[call.status], 1, call.route.value)
        if call.route is Route.TWO_WAY and call.standard_verdict in (Status.WARNING, Status.ERROR):
            self.add(step, f"standard_{_STATUS[call.standard_verdict]}", 1)

    def found(self, step: int) -> int:
        """Calls of a step that the tables hold or leave out by name."""
        counts = self._counts.get(step, {})
        return counts.get(("found", ""), 0)

    @property
    def steps(self) -> list[int]:
        """Steps with a count, ascending."""
        return sorted(self._counts)

    def rows(self) -> Iterator[Count]:
        """The table's rows, in order."""
        total: dict[tuple[str, str], int] = {}
        for counts in self._counts.values():
            for key, calls in counts.items():
                total[key] = total.get(key, 0) + calls
        for what in _ALWAYS:
            if not any(key[0] == what for key in total):
                total[what, ""] = 0
        ordered = sorted(total, key=_place)
        first = [key for key in ordered if _unreferenced(key)]
        for key in first + [key for key in ordered if not _unreferenced(key)]:
            yield Count(*key, None, total[key])
        for step in self.steps:
            for key in sorted(self._counts[step], key=_place):
                yield Count(*key, step, self._counts[step][key])


def _place(key: tuple[str, str]) -> tuple[int, str]:
    return WHAT.index(key[0]), key[1]


def _unreferenced(key: tuple[str, str]) -> bool:
    return key[0] == "skipped" and key[1].startswith(NO_REFERENCE)


def read_totals(path: Path) -> dict[tuple[str, str], int]:
    """Counts of the whole rank from a written table, by what and reason.

    Raises
    ------
    TableError
        If the table is not there or is not one of coverage.
    """
    try:
        return {
            (row["what"], row["reason"]): int(row["calls"])
            for row in read_table(path)
            if not row["step"]
        }
    except (KeyError, ValueError):
        raise TableError(f"{path}: not a coverage table; remove it and rerun") from None


def total_of(totals: dict[tuple[str, str], int], whats: Iterable[str]) -> int:
    """Sum over all reasons of some kinds of counts."""
    wanted = set(whats)
    return sum(calls for (what, _), calls in totals.items() if what in wanted)
