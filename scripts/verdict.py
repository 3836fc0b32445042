"""Say how the run ended, and set the exit status."""

# ruff: noqa: F821 -- Snakemake defines `snakemake` in its scripts.

import sys
from pathlib import Path

from spool.files import atomic_write, make_dirs
from spool.job import job
from spool.verdict import verdict

with job(snakemake.log[0]):
    report = verdict(
        Path(snakemake.params.work_dir),
        Path(snakemake.params.results_dir),
        snakemake.params.ranks,
        snakemake.params.fail_on,
    )
    # Printed at the end of the run, see rules/verdict.smk. The output says that all is
    # well; Snakemake refers to the log if it is not.
    target = Path(snakemake.log[0] if report.status else snakemake.output[0])
    make_dirs(target.parent)
    atomic_write(target, report.text().encode() + b"\n")
    sys.exit(report.status)
