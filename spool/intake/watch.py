"""Hints of new shards, from an observer chosen by file system.

Events are only hints: they make a shard known earlier than the next listing.
Nothing is lost when they never come (a network file system carries no events of
other hosts), come twice, or stop.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from watchdog.events import (
    DirCreatedEvent,
    DirModifiedEvent,
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserverVFS

# File systems whose every change passes through this host's kernel.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"}
LOCAL |= {"tmpfs", "ramfs", "overlay"}
_STEP = re.compile(r"rank(0|[1-9][0-9]{0,11})/step(0|[1-9][0-9]{0,11})")
_OCTAL = re.compile(r"\\([0-7]{3})")
# More hints than this say only that a listing is due.
MAX_HINTS = 100_000

Hints = dict[tuple[int, int], set[str] | None]


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Type of the file system that holds `path`, e.g. ``ext4`` or ``nfs4``; "" if unknown."""
    target = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), left.split(" ")[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one is seen.
        if inside and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind


class Watch:
    """Collects hints about one spool until they are taken.

    Parameters
    ----------
    root : Path
        An existing spool directory.
    wake : threading.Event
        Set whenever there is a new hint.
    seconds : float
        Period of polling, where polling is used.
    """

    def __init__(self, root: Path, wake: threading.Event, seconds: float) -> None:
        # Observers report real paths.
        self._root = Path(os.path.realpath(root))
        self._wake = wake
        self._seconds = seconds
        self._queue: deque[tuple[int, int, str | None]] = deque(maxlen=MAX_HINTS)
        self._observer = self._start(file_system(root) in LOCAL)

    @property
    def is_polling(self) -> bool:
        """Whether directories are polled instead of reported by the kernel."""
        return isinstance(self._observer, PollingObserverVFS)

    def take(self) -> tuple[Hints, bool]:
        """Return the hints since the last call, and whether some may have been lost.

        Returns
        -------
        dict of (rank, step) to set of file names or None
            None: something changed in that step's directory.
        bool
            True if a listing is due because hints overflowed or the observer died.
        """
        lost = len(self._queue) == MAX_HINTS
        hints: Hints = defaultdict(set)
        while self._queue:
            rank, step, name = self._queue.popleft()
            names = hints[rank, step]
            if name is None:
                hints[rank, step] = None
            elif names is not None:
                names.add(name)
        if not self._observer.is_alive():
            print("spool: the file observer ended; polling instead", file=sys.stderr)
            self._observer = self._start(inotify=False)
            lost = True
        return hints, lost

    def stop(self) -> None:
        """End the observer."""
        self._observer.stop()
        self._observer.join(timeout=5)

    def _start(self, inotify: bool) -> BaseObserver:
        handler = _Handler(self._root, self._queue, self._wake)
        if inotify:
            try:
                from watchdog.observers.inotify import InotifyObserver

                observer: BaseObserver = InotifyObserver()
                # Shards and markers are published by a rename.
                kinds: list[type[FileSystemEvent]]
                kinds = [FileCreatedEvent, FileMovedEvent, DirCreatedEvent]
                observer.schedule(handler, str(self._root), recursive=True, event_filter=kinds)
                observer.start()
                return observer
            except (ImportError, OSError) as error:
                print(f"spool: no file events ({error}); polling instead", file=sys.stderr)
        observer = PollingObserverVFS(os.stat, _directories, polling_interval=self._seconds)
        observer.schedule(handler, str(self._root), recursive=True)
        observer.start()
        return observer


def _directories(path: str | None) -> Iterator[os.DirEntry[str]]:
    # Polling looks at the times of directories only: as many as steps, not as many as shards.
    with os.scandir(path) as entries:
        yield from [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


class _Handler(FileSystemEventHandler):
    def __init__(
        self, root: Path, queue: deque[tuple[int, int, str | None]], wake: threading.Event
    ) -> None:
        self._root = str(root) + os.sep
        self._queue = queue
        self._wake = wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Note what changed, if it is in a step's directory."""
        is_file = isinstance(event, (FileCreatedEvent, FileMovedEvent))
        if not is_file and not isinstance(event, (DirCreatedEvent, DirModifiedEvent)):
            return
        moved = isinstance(event, FileMovedEvent)
        path = os.fsdecode(event.dest_path if moved else event.src_path)
        if not path.startswith(self._root):
            return
        directory, name = os.path.split(path) if is_file else (path, None)
        match = _STEP.fullmatch(directory[len(self._root) :])
        if match is None:
            if name == "closed.json":
                self._wake.set()
        elif name is None or not name.startswith("."):
            self._queue.append((int(match[1]), int(match[2]), name))
            self._wake.set()
