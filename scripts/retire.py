"""Keep or delete the shards of one judged segment."""

# ruff: noqa: F821 -- Snakemake defines `snakemake` in its scripts.

from pathlib import Path

from spool.job import job
from spool.retire import retire_segment
from spool.settings import RetireSettings

with job(snakemake.log[0]):
    retire_segment(
        Path(snakemake.input.segment),
        Path(snakemake.input.two_way),
        Path(snakemake.input.three_way),
        Path(snakemake.output[0]),
        RetireSettings.load(Path(snakemake.input.settings)),
        ranks=snakemake.params.ranks,
    )
