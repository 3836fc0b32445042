"""Judge the two-way calls of one segment."""

# ruff: noqa: F821 -- Snakemake defines `snakemake` in its scripts.

from pathlib import Path

from spool.job import job
from spool.judging import check_segment
from spool.settings import JudgeSettings

with job(snakemake.log[0]):
    check_segment(
        Path(snakemake.input.segment),
        [Path(path) for path in snakemake.input.measured],
        Path(snakemake.output[0]),
        JudgeSettings.load(Path(snakemake.input.settings)),
    )
