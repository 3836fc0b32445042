"""A rank's tables: the four published ones, the summary, and the coverage.

Rows are merged from the segments' verdict files in the order of execution, which does
not depend on how calls were cut into batches and segments, so the same calls give the
same bytes. Only segments that overlap in that order are open at once, a row group each:
memory does not grow with the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spool.coverage import Coverage
from spool.errors import SpoolError
from spool.ledger import kept_shards
from spool.records import CallKey, CallVerdict, Outcome
from spool.standards.rows import Route
from spool.tables import (
    CHECK_DETAILS,
    CHECK_RESULT,
    COMPARE_DETAILS,
    COMPARE_RESULT,
    COVERAGE,
    OURS,
    PRECISION,
    SUMMARY,
    CsvTable,
    RankTables,
    TableError,
    VerdictInfo,
    open_table,
    read_verdict_info,
    read_verdicts,
)
from spool.workdir import Manifest, RankEnd, Segment, WorkDir, read_json


class MergeError(SpoolError):
    """The tables of a rank do not add up."""


def merge_rank(
    work_dir: Path, rank: int, results_dir: Path, precision: int = PRECISION
) -> RankTables:
    """Write all tables of a rank that is complete and judged.

    Parameters
    ----------
    work_dir : Path
        Has the rank's end, verdict files and, if its shards were retired, the ledger
        of kept ones: the summary says where each kept shard lies.
    rank : int
    results_dir : Path
        Created if need be; existing tables of the same run are replaced, each at once.
    precision : int
        Decimals of floats.

    Returns
    -------
    RankTables
        Paths of what was written.

    Raises
    ------
    MergeError
        If the verdict files hold more or fewer calls than the batches have shards.
    TableError
        If a verdict file is unusable.
    """
    work = WorkDir(work_dir)
    end = RankEnd.load(work.end(rank))
    tables = RankTables(results_dir, end.timestamp, rank)
    paths = [
        path(rank, number) for number in end.segments for path in (work.two_way, work.three_way)
    ]
    infos = [(read_verdict_info(path), path) for path in paths]
    coverage = Coverage()
    if end.expected is not None:
        coverage.add_closed(end.expected)
    _count_left_out(coverage, infos, end)
    with ExitStack() as stack:
        writer = _RankWriter(stack, tables, precision)
        shards = _Shards(work, rank, end.segments)
        for call in ordered_calls(infos):
            shard = shards.path(call)
            coverage.add_verdict(call, shards.kept(call))
            writer.write(call, shard)
        _check_complete(rank, coverage, end)
        columns = stack.enter_context(open_table(tables.coverage, COVERAGE, precision, True))
        for count in coverage.rows():
            columns.write(
                {
                    "what": count.what,
                    "reason": count.reason,
                    "step": count.step,
                    "calls": count.calls,
                }
            )
    return tables


def ordered_calls(infos: Iterable[tuple[VerdictInfo, Path]]) -> Iterator[CallVerdict]:
    """Calls of several verdict files in the order of execution.

    A file is opened when the order reaches its first call.

    Raises
    ------
    TableError
        If a call is in two files.
    """
    waiting = sorted(
        ((info.first, path) for info, path in infos if info.first is not None), reverse=True
    )
    open_files: list[tuple[CallKey, int, CallVerdict, Iterator[CallVerdict]]] = []
    opened = 0
    previous: CallKey | None = None
    while waiting or open_files:
        while waiting and (not open_files or waiting[-1][0] <= open_files[0][0]):
            _, path = waiting.pop()
            opened += 1
            calls = read_verdicts(path)
            call = next(calls)
            heapq.heappush(open_files, (call.key, opened, call, calls))
        key, number, call, calls = open_files[0]
        if key == previous:
            raise TableError(
                f"call {key.name} of step {key.step} is in two verdict tables; "
                "start again with another work_dir"
            )
        previous = key
        yield call
        following = next(calls, None)
        if following is None:
            heapq.heappop(open_files)
        else:
            heapq.heapreplace(open_files, (following.key, number, following, calls))


class _RankWriter:
    """The five tables that have a row per call or output."""

    def __init__(self, stack: ExitStack, tables: RankTables, precision: int) -> None:
        def table(path: Path, columns: Sequence[str], significant: bool = False) -> CsvTable:
            return stack.enter_context(open_table(path, columns, precision, significant))

        self._result = {
            Route.TWO_WAY: table(tables.check_result, CHECK_RESULT + OURS),
            Route.THREE_WAY: table(tables.compare_result, COMPARE_RESULT + OURS),
        }
        self._details = {
            Route.TWO_WAY: table(tables.check_details, CHECK_DETAILS + OURS),
            Route.THREE_WAY: table(tables.compare_details, COMPARE_DETAILS + OURS),
        }
        self._name = {Route.TWO_WAY: CHECK_RESULT[0], Route.THREE_WAY: COMPARE_RESULT[0]}
        self._summary = table(tables.summary, SUMMARY, significant=True)

    def write(self, call: CallVerdict, shard: str) -> None:
        """Write one call into every table that has it.

        A call without verdict (quarantined) is in the summary only. The column of the
        direction that a call does not have is blank.
        """
        self._summary.write(_summary_cells(call, shard))
        if call.status is None:
            return
        ours: dict[str, Any] = {"Step": call.step, "Order": call.order}
        tested = "Backward" if call.direction == "backward" else "Forward"
        self._result[call.route].write(
            {
                self._name[call.route]: call.name,
                f"{tested} Test Success": call.status.value,
                "Message": call.message,
                **ours,
            }
        )
        for row in call.rows:
            name = f"{call.name}.{call.direction}.output.{row.output}"
            self._details[call.route].write({"API Name": name, **row.cells, **ours})


def _summary_cells(call: CallVerdict, shard: str) -> dict[str, Any]:
    reason = call.message
    if call.outcome is Outcome.QUARANTINED:
        reason = f"quarantined: {reason}"
    standard_verdict = call.standard_verdict
    return {
        "api": call.name,
        "step": call.step,
        "order": call.order,
        "direction": call.direction,
        "route": call.route.value,
        "standard": call.standard,
        "verdict": None if call.status is None else call.status.value,
        "reason": reason,
        "worst_output": call.worst_output,
        "worst_metric": call.worst_metric,
        "value": call.worst_value,
        "limit": call.worst_limit,
        "worst_index": call.worst_index,
        "shard": shard,
        "standard_verdict": None if standard_verdict is None else standard_verdict.value,
        "module": call.module,
        "location": call.location,
    }


class _Shards:
    """Where the shards of a rank lie now."""

    def __init__(self, work: WorkDir, rank: int, segments: Sequence[int]) -> None:
        self._rank = rank
        self._kept = kept_shards(work, rank)
        retained = {n for n in segments if _retains_all(work.retired(rank, n))}
        self._all = bool(retained)
        # Empty unless `retain` was changed during the run.
        others = set(segments) - retained if retained else ()
        self._gone = {key for number in others for key in _shards_of(work, rank, number)}

    def kept(self, call: CallVerdict) -> bool:
        """Whether the call's shard was kept for what became of it."""
        return (call.step, call.shard) in self._kept or (
            self._is_in_spool(call) and call.is_worth_keeping
        )

    def path(self, call: CallVerdict) -> str:
        """Path of the call's shard, "" if it is gone.

        Relative to the work directory (``failed/``, ``quarantine/``), or to the spool
        (``rank0/``) where all shards are retained.
        """
        place = f"rank{self._rank}/step{call.step}/{call.shard}"
        if call.outcome is Outcome.QUARANTINED:
            return f"quarantine/{place}"
        kept = self._kept.get((call.step, call.shard))
        if kept is not None:
            return kept
        return place if self._is_in_spool(call) else ""

    def _is_in_spool(self, call: CallVerdict) -> bool:
        return self._all and (call.step, call.shard) not in self._gone


def _shards_of(work: WorkDir, rank: int, number: int) -> Iterator[tuple[int, str]]:
    """Step and file name of a segment's shards."""
    for batch in Segment.load(work.segment(rank, number)).batches:
        manifest = Manifest.load(work.batch(rank, batch))
        yield from ((manifest.step, shard.file) for shard in manifest.shards)


def _retains_all(retired: Path) -> bool:
    return retired.exists() and read_json(retired, "retired segment").get("retain") == "all"


def _count_left_out(
    coverage: Coverage, infos: Iterable[tuple[VerdictInfo, Path]], end: RankEnd
) -> None:
    for info, _ in infos:
        if info.not_selected:
            coverage.add(info.step, "found", info.not_selected)
            coverage.add(info.step, "not_selected", info.not_selected)
    for step, calls in sorted(end.missing.items()):
        if calls:
            coverage.add(step, "missing", calls)


def _check_complete(rank: int, coverage: Coverage, end: RankEnd) -> None:
    for step in sorted({*coverage.steps, *end.found}):
        found, named = coverage.found(step), end.found.get(step, 0)
        if found != named:
            raise MergeError(
                f"rank {rank} step {step}: its batches have {named} shards, its verdict tables "
                f"{found} calls; remove the tables of rank {rank} in the work directory and rerun"
            )
