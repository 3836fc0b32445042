"""Replay and measure one batch."""

# ruff: noqa: F821 -- Snakemake defines `snakemake` in its scripts.

from pathlib import Path

from spool.gpus import claimed_gpu
from spool.job import job
from spool.replay.batch import replay_batch
from spool.settings import load_replay_settings

with job(snakemake.log[0]):
    work_dir = Path(snakemake.params.work_dir)
    with claimed_gpu(work_dir / "gpus", snakemake.params.gpus) as gpu:
        replay_batch(
            Path(snakemake.input.manifest),
            work_dir,
            Path(snakemake.output[0]),
            load_replay_settings(work_dir, gpu),
        )
