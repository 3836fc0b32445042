"""The spool directory of one training run: paths, atomic publishing, markers.

::

    <spool>/run.json                                  written once; the first rank wins
    <spool>/rank0/heartbeat.json                      rewritten while the rank trains
    <spool>/rank0/step0/000017.Functional.linear.2.h5
    <spool>/rank0/step0/.000018.Tensor.add.4.h5.<host>-<pid>-<token>.partial
    <spool>/rank0/step0/closed.json                   how many shards the step has
    <spool>/rank0/step0/retired.json                  who checked it and took shards away
    <spool>/rank0/closed.json                         the same of all steps, and why it ended
    <spool>/rank0.takes.json                          how often steps were deleted and captured anew

A shard appears whole or not at all and is never modified. A marker is written
only after everything it counts is durable, so whoever finds one may rely on it.
Numbers and names are checked before they become paths. The directory itself may be
reached over links; whoever reads or deletes follows none below it (`spool.beneath`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spool import shard
from spool.beneath import beneath
from spool.call import Call
from spool.errors import StoreError, is_of_system
from spool.files import (
    DIRECTORY_MODE,
    atomic_write,
    delete,
    exclusive_write,
    fsync_dir,
    is_abandoned,
    is_partial,
    make_dirs,
    partial_path,
)
from spool.markers import (
    RETIRED,
    Heartbeat,
    RankCounts,
    Retired,
    RunInfo,
    StepCounts,
    load,
    load_rank,
    load_run,
    load_takes,
    new_run,
    takes_path,
    takes_to_json,
    to_json,
)
from spool.names import parse_shard_name, split_name
from spool.shard import Draft

__all__ = [
    "Heartbeat",
    "RankCounts",
    "RunInfo",
    "ShardEntry",
    "StepCounts",
    "Store",
    "atomic_write",
    "fsync_dir",
    "parse_shard_name",
]

MAX_RANK = 10**6 - 1
MAX_STEP = 10**12 - 1
MAX_ORDER = 10**12 - 1

_RUN, _CLOSED, _HEARTBEAT = "run.json", "closed.json", "heartbeat.json"
_NUMBER = "(0|[1-9][0-9]{0,11})"
_RANK_DIR = re.compile(f"rank{_NUMBER}")
_STEP_DIR = re.compile(f"step{_NUMBER}")
_TAKES = re.compile(f"rank{_NUMBER}\\.takes\\.json")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One published shard; `name` is the call's name with its counter."""

    rank: int
    step: int
    order: int
    name: str
    path: Path
    nbytes: int

    @property
    def index(self) -> int:
        """The call's counter."""
        return split_name(self.name)[1]

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Execution order within a rank: step, order, counter."""
        return self.step, self.order, self.index


class Store:
    """A spool directory. Made by `Store.create` or `Store.open`.

    Safe to use from several threads, and from several processes as long as each
    rank has one writer.
    """

    def __init__(self, root: Path, run: RunInfo) -> None:
        self.root = root
        self.run = run
        self._lock = threading.Lock()
        self._made: set[Path] = set()
        self._touched: set[Path] = set()

    @classmethod
    def create(cls, root: Path, versions: dict[str, str], run: RunInfo | None = None) -> Store:
        """Make the spool at `root`, or adopt the one that is there.

        Parameters
        ----------
        root : Path
        versions : dict of str to str
            Of the programs that write it.
        run : RunInfo, optional
            What a new one says, if it is a part of a run that began elsewhere.

        Raises
        ------
        StoreError
            If the directory cannot be made or written, or is of a newer format.
        """
        root = Path(root).absolute()
        try:
            make_dirs(root)
            if not os.path.lexists(root / _RUN):
                exclusive_write(root / _RUN, to_json(run or new_run(versions)))
        except FileExistsError:
            raise StoreError(f"{root} is a file, not a directory: name another spool") from None
        except OSError as error:
            if not is_of_system(error):
                raise
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                problem = "its file system has no hard links: use a directory on NFS or a disk"
            else:
                problem = f"{error.strerror or error}: name a directory that can be written"
            raise StoreError(f"cannot make the spool {root}: {problem}") from error
        return cls.open(root)

    @classmethod
    def open(cls, root: Path) -> Store:
        """Open the spool at `root`.

        Raises
        ------
        StoreError
            If there is none, or it is of a newer format.
        """
        root = Path(root).absolute()
        if not root.is_dir():
            raise StoreError(f"spool directory {root} does not exist: check the path or the mount")
        run = load_run(root / _RUN)
        if run is None:
            raise StoreError(f"{root} is not a spool (it has no {_RUN}): check the path")
        return cls(root, run)

    # Writing

    def publish(self, call: Call | Draft) -> ShardEntry:
        """Write one shard so that readers see it whole or not at all.

        The file is durable when this returns; its directory entry is after the next
        `sync` or `close_step`.

        Raises
        ------
        StoreError
            If a shard of that name exists.
        ValueError
            If the call cannot be a shard (see `spool.shard.encode`).
        OSError
            As the system reports it; no partial file is left.
        """
        path = self.shard_path(call.rank, call.step, call.order, call.name)
        self._make_dir(path.parent)
        partial = partial_path(path)
        try:
            nbytes = shard.write(call, partial)
            # A shard is never modified; with one writer per rank nobody gets between.
            if os.path.lexists(path):
                raise StoreError(
                    f"{path} exists already: two writers share rank {call.rank}; "
                    "give each process its own RANK or spool_dir"
                )
            os.rename(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        with self._lock:
            self._touched.add(path.parent)
        return ShardEntry(call.rank, call.step, call.order, call.name, path, nbytes)

    def sync(self) -> None:
        """Make the directory entries of all shards published so far durable."""
        with self._lock:
            touched, self._touched = self._touched, set()
        for directory in sorted(touched):
            with contextlib.suppress(FileNotFoundError):
                fsync_dir(directory)

    def close_step(self, rank: int, step: int, counts: StepCounts) -> None:
        """Mark a step as complete, after its shards are durable."""
        self._close(self.step_dir(rank, step), counts)

    def close_rank(self, rank: int, counts: RankCounts) -> None:
        """Mark a rank as complete, after its shards are durable."""
        self._close(self.rank_dir(rank), counts)

    def reopen_rank(self, rank: int) -> None:
        """Take a rank's mark of completion away: a training run resumes."""
        with (
            contextlib.suppress(FileNotFoundError),
            beneath(self.root, self.rank_dir(rank)) as here,
        ):
            os.unlink(here / _CLOSED)
            fsync_dir(here)

    def heartbeat(self, rank: int, beat: Heartbeat) -> None:
        """Leave a sign of life. Not durable: a stale one says the same as none."""
        directory = self.rank_dir(rank)
        self._make_dir(directory)
        atomic_write(directory / _HEARTBEAT, to_json(beat), durable=False)

    # Reading

    def step_closed(self, rank: int, step: int) -> StepCounts | None:
        """Return the counts of a complete step, or None while it is open."""
        return load(StepCounts, self.root, self.step_dir(rank, step) / _CLOSED)

    def retired_by(self, rank: int, step: int) -> str:
        """Return who took shards of a step away: ``<host>:<work directory>``, or ""."""
        marker = load(Retired, self.root, self.step_dir(rank, step) / RETIRED)
        return marker.by if marker else ""

    def rank_closed(self, rank: int) -> RankCounts | None:
        """Return the counts of a complete rank, or None while it is open."""
        return load_rank(self.root, self.rank_dir(rank) / _CLOSED)

    def takes(self, rank: int) -> dict[int, int]:
        """Return how often steps of a rank were deleted to be captured anew; 0 where absent.

        Shards of one name are of one call only if they are of one take of their step.
        """
        return load_takes(self.root, rank)

    def read_heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last sign of life of a rank, or None if it left none."""
        return load(Heartbeat, self.root, self.rank_dir(rank) / _HEARTBEAT)

    def ranks(self) -> list[int]:
        """Return the ranks that have a directory, in order."""
        with self._scan(self.root) as items:
            names = [item.name for item in items if item.is_dir(follow_symlinks=False)]
        return _numbers(names, _RANK_DIR, MAX_RANK)

    def steps(self, rank: int) -> list[int]:
        """Return the steps of a rank that have a directory, in order.

        A link of such a name is listed, so that its reader can refuse it.
        """
        with self._scan(self.rank_dir(rank)) as items:
            names = [
                item.name
                for item in items
                if item.is_dir(follow_symlinks=False) or item.is_symlink()
            ]
        return _numbers(names, _STEP_DIR, MAX_STEP)

    def unclosed_steps(self, rank: int) -> list[int]:
        """Return the steps of a rank that are not marked as complete, in order."""
        return [step for step in self.steps(rank) if not self._is_closed(rank, step)]

    def shards(self, rank: int, step: int, known: Container[str] = ()) -> list[ShardEntry]:
        """List the published shards of a step in execution order.

        Parameters
        ----------
        rank, step : int
        known : container of str
            File names to leave out. They cost nothing, so a rescan costs what is new.

        Notes
        -----
        Dot files and names that no shard can have are ignored. What has a shard's
        name but is no file is listed, so that its reader can refuse it.
        """
        with self._scan(self.step_dir(rank, step)) as items:
            names = [item.name for item in items if item.name not in known]
        return self.look_up(rank, step, names)

    def look_up(self, rank: int, step: int, names: Iterable[str]) -> list[ShardEntry]:
        """As `shards`, of file names that are known already; some may be gone."""
        entries = []
        directory = self.step_dir(rank, step)
        with contextlib.suppress(FileNotFoundError), beneath(self.root, directory) as here:
            for name in names:
                parsed = parse_shard_name(name)
                if parsed is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    nbytes = os.lstat(here / name).st_size
                    entries.append(ShardEntry(rank, step, *parsed, directory / name, nbytes))
        entries.sort(key=lambda entry: (entry.sort_key, entry.name))
        return entries

    def usage(self, rank: int | None = None) -> int:
        """Return the bytes of all files of the spool, or of one rank."""
        return _usage(self.root if rank is None else self.rank_dir(rank))

    # Paths

    def rank_dir(self, rank: int) -> Path:
        """Return a rank's directory."""
        return self.root / f"rank{_checked(rank, MAX_RANK, 'rank')}"

    def step_dir(self, rank: int, step: int) -> Path:
        """Return a step's directory."""
        return self.rank_dir(rank) / f"step{_checked(step, MAX_STEP, 'step')}"

    def shard_path(self, rank: int, step: int, order: int, name: str) -> Path:
        """Return the path of a shard, after checking every part of it.

        Raises
        ------
        StoreError
            If a number is out of range or the name is not a call's.
        """
        try:
            split_name(name)
        except ValueError as error:
            raise StoreError(str(error)) from None
        order = _checked(order, MAX_ORDER, "order")
        return self.step_dir(rank, step) / f"{order:06d}.{name}.h5"

    # Removing

    def remove_partials(self, rank: int, *, foreign: bool = False) -> int:
        """Delete what writers of this rank that are gone left half written.

        Parameters
        ----------
        rank : int
        foreign : bool
            Also delete partial files of other hosts, whose writers cannot be looked
            up from here. Only for who knows that no other process writes this rank.

        Returns
        -------
        int
            How many were deleted.
        """
        count = 0
        directories = [self.rank_dir(rank)]
        directories += [self.step_dir(rank, step) for step in self.steps(rank)]
        for directory in directories:
            with (
                contextlib.suppress(FileNotFoundError),
                beneath(self.root, directory) as here,
            ):
                for name in filter(is_partial, os.listdir(here)):
                    gone = is_abandoned(name)
                    if gone or (gone is None and foreign):
                        with contextlib.suppress(FileNotFoundError):
                            delete(here / name)
                            count += 1
        return count

    def drop_step(self, rank: int, step: int) -> None:
        """Delete an incomplete step, so that it can be captured anew.

        Raises
        ------
        StoreError
            If the step is complete.
        """
        directory = self.step_dir(rank, step)
        if self._is_closed(rank, step):
            raise StoreError(f"{directory} is complete and stays: capture other steps")
        if directory.is_dir():
            self._count_takes(rank, [step])
        self._remove(directory)

    def clear(self, rank: int | None = None) -> None:
        """Delete one rank, or everything that is the spool's, its ranks first.

        Other files in the directory are left alone.
        """
        if rank is not None:
            # The run goes on, and the checking host may know shards of these names.
            self._count_takes(rank, self.steps(rank))
            self._remove(self.rank_dir(rank))
            return
        for number in self.ranks():
            self._remove(self.rank_dir(number))
        with self._scan(self.root) as items:
            takes = [item.name for item in items if _TAKES.fullmatch(item.name)]
        for name in (_RUN, *takes):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.root / name)
        fsync_dir(self.root)

    def _count_takes(self, rank: int, steps: list[int]) -> None:
        """Note, before they are deleted, that what comes next under these steps is another take."""
        if steps:
            takes = self.takes(rank)
            takes.update({step: takes.get(step, 0) + 1 for step in steps})
            atomic_write(takes_path(self.root, rank), takes_to_json(takes))

    def _remove(self, directory: Path) -> None:
        # Under a name that is not a rank's or step's first: a kill in between must
        # not leave half of one that looks whole.
        with (
            contextlib.suppress(FileNotFoundError),
            beneath(self.root, directory.parent) as here,
        ):
            doomed = partial_path(here / directory.name)
            os.rename(here / directory.name, doomed)
            with self._lock:
                self._made.clear()
            delete(doomed)
            fsync_dir(here)

    def _close(self, directory: Path, counts: StepCounts | RankCounts) -> None:
        self._make_dir(directory)
        self.sync()
        with beneath(self.root, directory) as here:
            atomic_write(here / _CLOSED, to_json(counts))

    def _is_closed(self, rank: int, step: int) -> bool:
        with (
            contextlib.suppress(FileNotFoundError),
            beneath(self.root, self.step_dir(rank, step)) as here,
        ):
            return os.path.lexists(here / _CLOSED)
        return False

    @contextlib.contextmanager
    def _scan(self, directory: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        """`os.scandir`, with nothing in it if the directory is not there."""
        with contextlib.ExitStack() as stack:
            try:
                items = os.scandir(stack.enter_context(beneath(self.root, directory)))
            except (FileNotFoundError, NotADirectoryError):
                yield iter(())
                return
            yield stack.enter_context(items)

    def _make_dir(self, directory: Path) -> None:
        if directory in self._made:
            return
        missing = [directory]
        while missing[-1].parent != self.root and missing[-1] != self.root:
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, DIRECTORY_MODE)
                fsync_dir(path.parent)
        with self._lock:
            self._made.add(directory)


def _checked(number: int, most: int, what: str) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise StoreError(f"{what} {number!r:.40} is not a number from 0 to {most}")
    return number


def _numbers(names: Iterable[str], pattern: re.Pattern[str], most: int) -> list[int]:
    matches = map(pattern.fullmatch, names)
    numbers = [int(match[1]) for match in matches if match is not None]
    return sorted(number for number in numbers if number <= most)


def _usage(directory: Path) -> int:
    """Bytes of all files in a directory; none if it goes away meanwhile."""
    total = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                total += _usage(Path(item.path))
            else:
                with contextlib.suppress(FileNotFoundError):
                    total += item.stat(follow_symlinks=False).st_size
    return total
