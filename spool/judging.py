"""From measured rows to verdict rows: pure functions of the rows and the judging keys.

A segment is judged twice, once for each route, by `check_segment` and `compare_segment`;
each call lands in exactly one of the two files. Nothing here needs the shards, so a run
whose shards are long gone can be judged again under other limits and name lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from spool.names import canonical_name
from spool.records import (
    CallHeader,
    CallVerdict,
    Cell,
    MeasuredRow,
    Outcome,
    OutputVerdict,
)
from spool.settings import JudgeSettings
from spool.standards import columns, three_way, two_way
from spool.standards.rows import Judged, Kind, OutputMeasurement, Route, Standard, Status, Worst
from spool.standards.select import standard_of
from spool.tables import (
    TableError,
    VerdictInfo,
    detail_columns,
    read_measured,
    write_verdicts,
)
from spool.workdir import Segment


class Selection:
    """Which calls the name lists let through: white ones that are not black.

    Parameters
    ----------
    white_list, black_list : sequence of str
        Names, with or without prefix, in any spelling. An empty white list lets every
        call through.
    """

    def __init__(self, white_list: Sequence[str] = (), black_list: Sequence[str] = ()) -> None:
        self._white = frozenset(map(canonical_name, white_list))
        self._black = frozenset(map(canonical_name, black_list))

    def __contains__(self, name: str) -> bool:
        name = canonical_name(name)
        return (not self._white or name in self._white) and name not in self._black


def check_segment(
    segment: Path, measured: Sequence[Path], out: Path, settings: JudgeSettings
) -> None:
    """Judge a segment's two-way calls: pre-check status and the standard's own verdict.

    Parameters
    ----------
    segment : Path
        The segment's record.
    measured : sequence of Path
        Measured rows of each of its batches.
    out : Path
        The verdict file to write.
    settings : JudgeSettings

    Raises
    ------
    TableError
        If a file is unusable or does not belong to the segment.
    """
    _judge_segment(Route.TWO_WAY, segment, measured, out, settings)


def compare_segment(
    segment: Path, measured: Sequence[Path], out: Path, settings: JudgeSettings
) -> None:
    """Judge a segment's three-way calls; see `check_segment`."""
    _judge_segment(Route.THREE_WAY, segment, measured, out, settings)


def judge_call(rows: Sequence[MeasuredRow], settings: JudgeSettings) -> CallVerdict:
    """Judge one call.

    Parameters
    ----------
    rows : sequence of MeasuredRow
        All rows of the call, at least one, by output.
    settings : JudgeSettings

    Returns
    -------
    CallVerdict
        With at least one row for the details table, unless the call is quarantined.
    """
    header, outcome, reason = rows[0].header, rows[0].outcome, rows[0].reason
    standard = standard_of(header.name, settings.standards)
    if outcome is Outcome.QUARANTINED:
        return _verdict(header, standard, outcome, (None, None), reason)
    outputs = [row.output for row in rows if row.output is not None]
    if outcome is Outcome.MEASURED:
        if not outputs:
            reason = reason or "no output to compare"
        elif _lacks_pairs(outputs, standard.route):
            outcome = Outcome.UNJUDGED
            reason = (
                f"measured for the {header.route} route; "
                f"the {standard} standard needs the shard to be replayed"
            )
        else:
            judge = two_way.judge if standard.route is Route.TWO_WAY else three_way.judge
            return _judged(header, judge(header.name, outputs, settings.standards), outputs)
    skipped = (OutputVerdict(0, _skip_cells(standard, reason)),)
    return _verdict(header, standard, outcome, (Status.SKIP, Status.SKIP), reason, skipped)


def _judge_segment(
    route: Route,
    segment: Path,
    measured: Sequence[Path],
    out: Path,
    settings: JudgeSettings,
) -> None:
    record = Segment.load(segment)
    selection = Selection(settings.white_list, settings.black_list)

    def on_route(name: str) -> bool:
        return standard_of(name, settings.standards).route is route

    verdicts: list[CallVerdict] = []
    not_selected = 0
    for path in measured:
        for rows in _calls(path, read_measured(path, on_route)):
            header = rows[0].header
            if (header.rank, header.step) != (record.rank, record.step):
                raise TableError(
                    f"{path}: holds rank {header.rank} step {header.step}, not those of "
                    f"{segment}; remove it and rerun"
                )
            if header.name in selection:
                verdicts.append(judge_call(rows, settings))
            else:
                not_selected += 1
    verdicts.sort(key=lambda verdict: verdict.key)
    for before, after in pairwise(verdicts):
        if before.key == after.key:
            raise TableError(
                f"{segment}: call {after.name} is in two of its batches; "
                "start again with another work_dir"
            )
    info = VerdictInfo(
        route=route,
        rank=record.rank,
        step=record.step,
        segment=record.segment,
        calls=len(verdicts),
        not_selected=not_selected,
        first=verdicts[0].key if verdicts else None,
        last=verdicts[-1].key if verdicts else None,
    )
    write_verdicts(out, verdicts, detail_columns(route), info)


def _calls(path: Path, rows: list[MeasuredRow]) -> Iterator[list[MeasuredRow]]:
    seen = set()
    for key, group in groupby(rows, key=lambda row: row.header.key):
        if key in seen:
            raise TableError(f"{path}: call {key.name} is in it twice; remove it and rerun")
        seen.add(key)
        yield list(group)


def _lacks_pairs(outputs: Sequence[OutputMeasurement], route: Route) -> bool:
    """Whether a tensor was measured for the other route only."""
    tensors = [output for output in outputs if output.kind is Kind.TENSOR]
    if route is Route.TWO_WAY:
        return any(output.two_way is None for output in tensors)
    return any(output.npu is None or output.gpu is None for output in tensors)


def _judged(
    header: CallHeader, judged: Judged, outputs: Sequence[OutputMeasurement]
) -> CallVerdict:
    aligned = len(judged.rows) == len(outputs)
    rows = tuple(
        OutputVerdict(outputs[place].index if aligned else place, dict(cells))
        for place, cells in enumerate(judged.rows)
    )
    own = judged.standard.route is Route.TWO_WAY
    standard_verdict = judged.standard_verdict if own else judged.status
    return _verdict(
        header,
        judged.standard,
        Outcome.MEASURED,
        (judged.status, standard_verdict),
        judged.message,
        rows,
        judged.worst,
    )


def _verdict(
    header: CallHeader,
    standard: Standard,
    outcome: Outcome,
    statuses: tuple[Status | None, Status | None],
    message: str,
    rows: tuple[OutputVerdict, ...] = (),
    worst: Worst | None = None,
) -> CallVerdict:
    return CallVerdict(
        rank=header.rank,
        step=header.step,
        order=header.order,
        index=header.index,
        name=header.name,
        direction=header.direction,
        module=header.module,
        location=header.stack.split("\n", 1)[0],
        shard=header.shard,
        nbytes=header.nbytes,
        route=standard.route,
        standard=standard.value,
        outcome=outcome,
        status=statuses[0],
        standard_verdict=statuses[1],
        message=message,
        worst_output=None if worst is None else worst.output,
        worst_metric="" if worst is None else worst.metric,
        worst_value=None if worst is None else float(worst.value),
        worst_limit=None if worst is None else float(worst.limit),
        worst_index="" if worst is None or worst.index is None else str(tuple(worst.index)),
        rows=rows,
    )


def _skip_cells(standard: Standard, reason: str) -> dict[str, Cell]:
    status = Status.SKIP.value
    if standard.route is Route.TWO_WAY:
        return {columns.STATUS: status, columns.MESSAGE: reason}
    return {
        columns.COMPARE_RESULT: status,
        columns.ALGORITHM: columns.ALGORITHMS[standard],
        columns.MESSAGE: reason,
    }
