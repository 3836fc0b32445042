"""What somebody removed of a work directory: put back, or one line that names it.

Manifests and measured rows are the two kinds of file that the workflow cannot make
again once the shards are retired.
"""

from __future__ import annotations

from spool.files import atomic_write, make_dirs
from spool.workdir import Manifest, Segment, WorkDir, WorkDirError


def mend(work: WorkDir, rank: int) -> None:
    """Put measured rows back that are gone, and make sure that no manifest is.

    Snakemake deletes an output before its job runs again, so published rows must not
    be the only ones. A number whose manifest is gone must not be given to other shards.

    Raises
    ------
    WorkDirError
        If a manifest is gone whose batch was measured, or is in a segment.
    """
    measured = set(work.measured_batches(rank))
    for number in work.replayed_batches(rank):
        if number not in measured:
            path = work.measured(rank, number)
            make_dirs(path.parent)
            atomic_write(path, work.replay(rank, number).read_bytes())
            measured.add(number)
    for number in work.segments(rank):
        measured.update(Segment.load(work.segment(rank, number)).batches)
    for number in sorted(measured.difference(work.batches(rank))):
        path = work.batch(rank, number)
        raise WorkDirError(f"{path}: the manifest is gone; {Manifest.WAY_OUT}")
