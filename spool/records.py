"""The rows that pass between replay, judging and the merged tables.

Three kinds, each flat: a `MeasuredRow` is what replay found out about one output
of one call; a `CallVerdict` is what judging makes of a call, with one `OutputVerdict`
for each row of the details table. None of them knows a file format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from spool.names import base_name
from spool.standards.rows import OutputMeasurement, Route, Status

Cell = str | float | int | None


NO_REFERENCE = "no reference for "
"""How the reason begins for which a fused operator's call is skipped, see `no_reference`."""


def no_reference(name: str, argument: str = "") -> str:
    """Why a call of a fused operator is skipped: it has no reference, or none for an argument."""
    return f"no reference for {name} with {argument}" if argument else f"no reference for {name}"


class Outcome(str, Enum):
    """What became of a call on the bench device.

    Replay gives the first four. A call is `UNJUDGED` when its rows were measured for
    another route than the configuration now asks for.
    """

    MEASURED = "measured"
    SKIPPED = "skipped"
    REPLAY_FAILED = "replay_failed"
    QUARANTINED = "quarantined"
    UNJUDGED = "unjudged"

    def __str__(self) -> str:
        return self.value


class CallKey(NamedTuple):
    """A call's place in the order of execution; rows of a rank are sorted by it.

    `element` tells apart the elements of one list-of-tensors call, which share `order`;
    `name` only makes the order total.
    """

    step: int
    order: int
    element: int
    name: str


@dataclass(frozen=True, slots=True)
class CallHeader:
    """Who a call is, where it ran, and under what it was replayed.

    Parameters
    ----------
    rank, step, order, index : int
        As in `spool.call.Call`.
    name : str
        With counter, e.g. ``Functional.linear.2``.
    api : str
        With prefix and without counter, e.g. ``Functional.linear``.
    direction : str
        ``forward`` or ``backward``.
    route, standard : str
        Those it was *measured* for; "" if the shard could not be read. Judging
        decides anew by name and configuration.
    module, stack : str
        Dotted path of the module around the call; frames, innermost first, joined
        by newlines. "" when unknown.
    shard : str
        File name of the shard.
    nbytes : int
        Size of the shard file.
    device, bench_device : str
        Where it ran in training, and where it was replayed.
    golden : str
        Device of the golden, "" if there was none.
    random : bool
        Whether the call draws random numbers.
    """

    rank: int
    step: int
    order: int
    index: int
    name: str
    api: str
    direction: str
    route: str
    standard: str
    module: str
    stack: str
    shard: str
    nbytes: int
    device: str
    bench_device: str
    golden: str
    random: bool

    @property
    def key(self) -> CallKey:
        """Place in the order of execution."""
        return CallKey(self.step, self.order, self.index, self.name)


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One output of one call, as replay measured it.

    Parameters
    ----------
    header : CallHeader
    outcome : Outcome
    reason : str
        Why there is no measurement, or "". A `REPLAY_FAILED` reason starts with the
        exception's class and a colon.
    output : OutputMeasurement or None
        None for a call without outputs or without a measurement; such a call has
        exactly one row.
    inputs : str
        JSON array of facts about the arguments; of a call's first row only.
    """

    header: CallHeader
    outcome: Outcome
    reason: str
    output: OutputMeasurement | None
    inputs: str = "[]"


@dataclass(frozen=True, slots=True)
class OutputVerdict:
    """One row of a details table: the output's number and its cells by CSV header."""

    output: int
    cells: dict[str, Cell]


@dataclass(frozen=True, slots=True)
class CallVerdict:
    """One call's verdict, with the facts that the summary shows.

    Parameters
    ----------
    rank, step, order, index, name, direction, module, shard, nbytes
        From the call's header.
    location : str
        Innermost frame of the user's stack, ``file:line in function``.
    route : Route
        By which the call was judged.
    standard : str
        The published standard that applies to the API.
    outcome : Outcome
    status : Status or None
        The status that the result table shows; None for a quarantined call, which
        has no verdict.
    standard_verdict : Status or None
        The standard's own verdict; the same as `status` on the three-way route.
    message : str
        The result table's message: why it is not a pass.
    worst_output : int or None
    worst_metric : str
    worst_value, worst_limit : float or None
    worst_index : str
        Position of the worst element, e.g. ``(3, 5)``, or "".
    rows : tuple of OutputVerdict
        Ordered by output; empty for a quarantined call.
    """

    rank: int
    step: int
    order: int
    index: int
    name: str
    direction: str
    module: str
    location: str
    shard: str
    nbytes: int
    route: Route
    standard: str
    outcome: Outcome
    status: Status | None
    standard_verdict: Status | None
    message: str
    worst_output: int | None = None
    worst_metric: str = ""
    worst_value: float | None = None
    worst_limit: float | None = None
    worst_index: str = ""
    rows: tuple[OutputVerdict, ...] = field(default=())

    @property
    def key(self) -> CallKey:
        """Place in the order of execution."""
        return CallKey(self.step, self.order, self.index, self.name)

    @property
    def api(self) -> str:
        """Name without counter."""
        return self.name.rsplit(".", 1)[0]

    @property
    def base(self) -> str:
        """Name without prefix and counter."""
        return base_name(self.name)

    @property
    def failed(self) -> bool:
        """Whether the status or the standard's verdict is a warning or an error.

        Also when the call could not be replayed or judged.
        """
        bad = (Status.WARNING, Status.ERROR)
        return (
            self.outcome in (Outcome.REPLAY_FAILED, Outcome.UNJUDGED)
            or self.status in bad
            or self.standard_verdict in bad
        )

    @property
    def is_worth_keeping(self) -> bool:
        """Whether the shard is kept: the call failed, or there is no reference for it yet."""
        is_open = self.outcome is Outcome.SKIPPED and self.message.startswith(NO_REFERENCE)
        return self.failed or is_open
