"""Write all tables of one rank."""

# ruff: noqa: F821 -- Snakemake defines `snakemake` in its scripts.

from pathlib import Path

from spool.job import job
from spool.merge import merge_rank

with job(snakemake.log[0]):
    merge_rank(
        Path(snakemake.params.work_dir),
        int(snakemake.wildcards.rank),
        Path(snakemake.output[0]).parent,
        snakemake.params.precision,
    )
