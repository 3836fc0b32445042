"""The end of a run: what was found, what could not be checked, and the exit status.

Errors found in the model are findings, not failures of the check. The status says
whether the check itself can be trusted: something was compared, and nothing that was
captured is missing, unreadable or refused to run. ``fail_on: error`` makes findings
count too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spool.close import BY_HAND, KILLED
from spool.coverage import read_totals, total_of
from spool.names import base_name, spellings
from spool.settings import JudgeSettings
from spool.standards.rows import Route, Status
from spool.tables import RankTables, read_table
from spool.workdir import RankEnd, WorkDir

FAIL_ON = ("nothing", "error")
_MOST_UNCHECKED = 5


@dataclass
class Report:
    """What to print at the end, and with which status to end.

    Parameters
    ----------
    lines : list of str
        For people: counts by verdict, the first failing call, paths of the tables.
    warnings : list of str
        What a reader should know and what does not fail the run.
    problems : list of str
        One line each: why the run fails.
    """

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0 if all was checked, else 1."""
        return 1 if self.problems else 0

    def text(self) -> str:
        """Everything, as it is printed."""
        notes = [f"warning: {line}" for line in self.warnings]
        return "\n".join([*self.lines, *notes, *(f"error: {line}" for line in self.problems)])


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A failing call as the summary shows it; errors come first, then by execution."""

    warning: bool
    step: int
    order: int
    rank: int
    text: str = field(compare=False)


def verdict(
    work_dir: Path, results_dir: Path, ranks: Sequence[int], fail_on: str = "nothing"
) -> Report:
    """Judge a run by its merged tables.

    Parameters
    ----------
    work_dir, results_dir : Path
    ranks : sequence of int
        Every rank that had to be checked; each has its tables.
    fail_on : str
        ``nothing``, or ``error``: a call with an error is a problem.

    Returns
    -------
    Report

    Raises
    ------
    SpoolError
        If a rank's end or a table is missing or unusable.
    """
    work = WorkDir(work_dir)
    report = Report()
    findings: list[Finding] = []
    paths: list[Path] = []
    judging = work.settings("judging")
    unmet = set(JudgeSettings.load(judging).white_list) if judging.exists() else set()
    for rank in ranks:
        end = RankEnd.load(work.end(rank))
        tables = RankTables(results_dir, end.timestamp, rank)
        totals = read_totals(tables.coverage)
        _count_lines(report, rank, totals, end)
        _problems(report, rank, totals, end, tables)
        first, errors, unchecked, names = _scan(tables, rank, work.root)
        unmet -= {spelling for name in names for spelling in spellings(name)}
        findings.extend(first)
        report.warnings += _unchecked_lines(rank, unchecked)
        if errors and fail_on == "error":
            report.problems.append(
                f"rank {rank}: {_calls(errors)} with errors; see {tables.summary}"
            )
        paths.extend(tables.all)
    if unmet and ranks:
        report.warnings.append(
            f"white_list: no call was found of {', '.join(sorted(unmet))}; names are those of the "
            "summary's api column without prefix and counter"
        )
    if not ranks:
        report.problems.append("nothing was compared: rank_list is empty; name the ranks to check")
    if findings:
        report.lines += ["", "first failing call: " + min(findings).text]
    elif not report.problems:
        report.lines += ["", "no failing call"]
    report.lines += ["", "tables:", *(f"  {path}" for path in paths)]
    return report


def show(path: Path) -> None:
    """Print the verdict that the last job wrote, if it came so far."""
    with contextlib.suppress(FileNotFoundError):
        print(path.read_text(encoding="utf-8"), end="", file=sys.stderr, flush=True)


def _count_lines(
    report: Report, rank: int, totals: dict[tuple[str, str], int], end: RankEnd
) -> None:
    captured = None if _closed_by_hand(end) else totals.get(("captured", ""))
    parts = [f"captured {'unknown' if captured is None else captured}"]
    for what in ("found", "compared", "skipped", "replay_failed", "quarantined", "not_selected"):
        calls = total_of(totals, [what])
        if calls or what in ("found", "compared"):
            parts.append(f"{what.replace('_', ' ')} {calls}")
    report.lines.append(f"rank {rank}: {', '.join(parts)}")
    report.lines.append(f"  {'':11}{'pass':>9}{'Warning':>9}{'error':>9}")
    for route in Route:
        counts = [totals.get((what, route.value), 0) for what in ("pass", "warning", "error")]
        report.lines.append(f"  {route.value:11}" + "".join(f"{count:9}" for count in counts))
    own = [total_of(totals, [what]) for what in ("standard_warning", "standard_error")]
    if any(own):
        report.lines.append(
            f"  two-way calls by their own standard: {own[0]} Warning, {own[1]} error"
        )
    kept, lost = total_of(totals, ["kept"]), total_of(totals, ["not_kept"])
    if kept or lost:
        report.lines.append(f"  shards of calls that did not pass: kept {kept}, not kept {lost}")


def _problems(
    report: Report,
    rank: int,
    totals: dict[tuple[str, str], int],
    end: RankEnd,
    tables: RankTables,
) -> None:
    found = total_of(totals, ["found"])
    if not total_of(totals, ["compared"]):
        report.problems.append(
            f"rank {rank}: nothing was compared: {_calls(found)} found, none with a verdict; "
            f"see {tables.coverage}"
        )
    missing = total_of(totals, ["missing"])
    if missing:
        counted = total_of(totals, ["captured"])
        report.problems.append(
            f"rank {rank}: {_shards(missing)} missing: captured {counted}, found {found}; "
            f"a check with work_dir {end.retired_by} has deleted or moved them (retain): "
            "use that work_dir, or capture again"
            if end.retired_by
            else f"rank {rank}: {_shards(missing)} missing: captured {counted}, found {found}; "
            "look whether the spool is whole, and run the same command again when they are there"
        )
    for number, captured, there in _surplus(end):
        report.problems.append(
            f"rank {rank} step {number}: {there} shards found, but only {captured} captured; "
            "shards of another capture are among them: clear the spool before each capture"
        )
    for what, text, way_out in (
        ("quarantined", "unusable and set aside", "reasons"),
        ("replay_failed", "could not be replayed", "reasons"),
        ("unjudged", "measured for another standard than now asked for", "names"),
    ):
        calls = total_of(totals, [what])
        if calls:
            many = _shards(calls) if what == "quarantined" else _calls(calls)
            report.problems.append(f"rank {rank}: {many} {text}; {way_out} in {tables.summary}")
    dropped = total_of(totals, ["dropped"])
    if dropped:
        report.problems.append(
            f"rank {rank}: {_calls(dropped)} dropped during capture and not checked; "
            f"the reasons are the not_captured rows of {tables.coverage}"
        )
    reason = (end.expected or {}).get("reason")
    if reason == BY_HAND:
        report.warnings.append(
            f"rank {rank} was closed by hand: what its trainer had captured but not written is not "
            "among these calls"
        )
    if reason == KILLED:
        report.warnings.append(
            f"rank {rank}: its training process was killed, or ended without a word: its last step "
            "may not be whole; go on with resume=True, which captures that step anew"
        )
    if end.expected is None:
        why = f" ({end.note})" if end.note else ""
        report.warnings.append(
            f"rank {rank} was never closed{why}: whether all its calls were found is not known"
        )


def _surplus(end: RankEnd) -> Iterator[tuple[int, int, int]]:
    """Steps with more shards than were captured: step, captured, found.

    `spool close` counts only what lies in the spool, which may be less than was there.
    """
    if _closed_by_hand(end):
        return
    steps = (end.expected or {}).get("steps", {})
    for step, there in sorted(end.found.items()):
        counted = steps.get(str(step), {}).get("shards", 0)
        if end.expected is not None and there > counted:
            yield step, counted, there


def _closed_by_hand(end: RankEnd) -> bool:
    return (end.expected or {}).get("reason") == BY_HAND


def _scan(
    tables: RankTables, rank: int, work: Path
) -> tuple[list[Finding], int, dict[str, tuple[int, str]], set[str]]:
    """Read the summary once.

    Returns
    -------
    list of Finding
        The first error and the first warning by either verdict.
    int
        How many calls have an error.
    dict of str to (int, str)
        APIs of which no call has a verdict: how many calls, and the first one's reason.
    set of str
        Base names of all APIs.
    """
    first: dict[bool, Finding] = {}
    errors = 0
    skipped: dict[str, tuple[int, str]] = {}
    judged: set[str] = set()
    for row in read_table(tables.summary):
        api = row["api"].rpartition(".")[0]
        if row["verdict"] == Status.SKIP.value:
            calls, reason = skipped.get(api, (0, row["reason"]))
            skipped[api] = (calls + 1, reason)
        else:
            judged.add(api)
        verdicts = (row["verdict"], row["standard_verdict"])
        error = Status.ERROR.value in verdicts
        errors += error
        if (error or Status.WARNING.value in verdicts) and (not error) not in first:
            first[not error] = Finding(
                not error, int(row["step"]), int(row["order"]), rank, _finding(row, rank, work)
            )
    unchecked = {api: entry for api, entry in skipped.items() if api not in judged}
    return (
        list(first.values()),
        errors,
        unchecked,
        {base_name(api) for api in judged | set(skipped)},
    )


def _unchecked_lines(rank: int, unchecked: dict[str, tuple[int, str]]) -> list[str]:
    """One line per API that went unchecked as a whole: a fault in it would not be seen."""
    most = sorted(unchecked, key=lambda api: (-unchecked[api][0], api))
    lines = [
        f"rank {rank}: {api} is not checked at all: {_calls(unchecked[api][0])}, "
        f"{unchecked[api][1] or 'nothing to compare'}"
        for api in most[:_MOST_UNCHECKED]
    ]
    if len(most) > _MOST_UNCHECKED:
        rest = len(most) - _MOST_UNCHECKED
        lines.append(f"rank {rank}: {rest} more APIs are not checked at all")
    return lines


def _finding(row: dict[str, str], rank: int, work: Path) -> str:
    verdicts = f"{row['route']} {row['verdict']}"
    if row["standard_verdict"] != row["verdict"]:
        verdicts += f", {row['standard_verdict']} by the {row['standard']} standard"
    else:
        verdicts += f", {row['standard']} standard"
    parts = [f"{row['api']} (rank {rank}, step {row['step']}, order {row['order']}): {verdicts}"]
    if row["worst_metric"]:
        at = f" at {row['worst_index']}" if row["worst_index"] else ""
        parts.append(
            f"  output {row['worst_output']}: {row['worst_metric']} {row['value']}, "
            f"limit {row['limit']}{at}"
        )
    elif row["reason"]:
        parts.append(f"  {row['reason']}")
    where = [word for word in (row["module"], row["location"]) if word]
    if where:
        parts.append(f"  in {', '.join(where)}")
    if row["shard"]:
        # Where all shards are retained they are in the spool, below its rank.
        is_moved = not row["shard"].startswith("rank")
        parts.append(f"  shard {work / row['shard'] if is_moved else row['shard']}")
    return "\n".join(parts)


def _calls(number: int) -> str:
    return f"{number} call{'' if number == 1 else 's'}"


def _shards(number: int) -> str:
    return f"{number} shard{' is' if number == 1 else 's are'}"
