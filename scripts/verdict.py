"""Say how the run ended, and set the exit status."""

# ruff: noqa: F821 -- Snakemake defines `snakemake` in its scripts.

import sys
from pathlib import Path

from spool.files import atomic_write
from spool.job import job
from spool.verdict import verdict

with job(snakemake.log[0]):
    report = verdict(
        Path(snakemake.params.work_dir),
        Path(snakemake.params.results_dir),
        snakemake.params.ranks,
        snakemake.params.fail_on,
    )
    print(report.text(), file=sys.stderr)
    if report.status == 0:
        atomic_write(Path(snakemake.output[0]), report.text().encode() + b"\n")
    sys.exit(report.status)
