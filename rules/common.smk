from spool.intake.targets import run_tables, segment_batches
from spool.tables import RankTables
from spool.verdict import show
from spool.workdir import RankEnd


wildcard_constraints:
    rank="0|[1-9][0-9]*",
    number="[0-9]{6,9}",
    timestamp="[0-9]{14}",


# The start of patterns; the settings allow no braces in them.
WORK = str(SETTINGS.work_dir)
RESULTS = str(SETTINGS.results_dir)


def get_work_dir(wildcards):
    """The work directory, for functions that find their files in it themselves."""
    return str(SETTINGS.work_dir)


def get_segment_input(wildcards):
    """Measured rows of the segment's batches."""
    return segment_batches(SETTINGS.work, int(wildcards.rank), int(wildcards.number))


def get_merge_input(kind):
    """One kind of table of every segment of the rank."""

    def get(wildcards):
        rank = int(wildcards.rank)
        segments = RankEnd.load(SETTINGS.work.end(rank)).segments
        return [getattr(SETTINGS.work, kind)(rank, number) for number in segments]

    return get


def get_verdict_input(wildcards):
    """The tables of every rank of the run."""
    return run_tables(SETTINGS)
