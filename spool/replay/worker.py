"""The child process of a replay job: one call after the other, each noted in the journal.

Started by `spool.replay.batch` as ``python -m spool.replay.worker``. Its standard
input gives one line, the job as JSON, and then stays open: its end means that the
supervisor is gone. Its standard output carries one line per event:

``ready``, ``start N``, ``done N``
    The device is set up; shard N of the manifest begins and ends.
``fatal TEXT``
    The job cannot be done here (no such device, the spool is not mounted).

The exit status `RESTART` asks for a fresh process, because the device is unusable.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spool import shard as shards
from spool.call import Call
from spool.errors import BadShard, ConfigError, SpoolError, StoreError, explain
from spool.records import CallHeader, Outcome
from spool.replay import registry
from spool.replay.again import KeptShards
from spool.replay.calls import Poisoned, replay_call
from spool.replay.estimate import limit_process, memory_of
from spool.replay.execute import Bench
from spool.replay.journal import Journal
from spool.replay.result import CallResult, header_of_call, header_of_file
from spool.settings import ReplaySettings
from spool.workdir import Manifest, ShardRef

RESTART = 75
# Of a device's memory; the rest is for what is not counted.
_USABLE = 0.8
_READ_ATTEMPTS = (0.0, 0.2, 1.0)
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Do the job that standard input describes; return the process's exit status."""
    # Whoever interrupts a single worker gets no traceback: the supervisor says what it means.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job = json.loads(sys.stdin.buffer.readline())
    _die_with(job["parent"])
    # Libraries may print; the events must stay clean.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(text: str) -> None:
        events.write(text + "\n")

    try:
        worker = Worker(job, say)
        say("ready")
        with Journal(Path(job["journal"])) as journal:
            return worker.work(journal)
    except SpoolError as error:
        say(f"fatal {' '.join(str(error).split())}")
    except OSError as error:
        say(f"fatal {job['manifest']}: {explain(error)}; rerun when that is mended")
    return 1


def _die_with(parent: int) -> None:
    """End this process when its supervisor ends, however that happens.

    The kernel counts the end of the thread that started this process; where there is
    no such signal, standard input ends all the same.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    threading.Thread(target=_watch_input, daemon=True).start()


def _watch_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def open_bench(settings: ReplaySettings) -> Bench:
    """Choose the devices that the settings name, and set torch up for equal results.

    Raises
    ------
    ConfigError
        If the bench device is not there.
    """
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # What a call leaves unwritten is nobody's business, and filling it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    name = settings.bench_device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "bench_device: 'cuda': torch sees no GPU on this host; set bench_device=cpu or auto"
        )
    device = torch.device(name)
    golden = device if settings.golden == "bench" else torch.device("cpu")
    return Bench(device, golden, settings.allow_tf32)


class Worker:
    """One worker's share of a job.

    Parameters
    ----------
    job : dict
        ``manifest`` (path), ``settings`` (JSON of `ReplaySettings`), ``todo`` (numbers
        of shards), ``again`` (whether they may lie where kept ones do), and what `main`
        uses.
    say : callable
        Reports an event to the supervisor.
    """

    def __init__(self, job: dict[str, Any], say: Callable[[str], None]) -> None:
        self.manifest = Manifest.find(Path(job["manifest"]))
        self.settings = ReplaySettings.from_json(job["settings"])
        self.todo: list[int] = job["todo"]
        self.kept = KeptShards(Path(job["manifest"]), self.manifest) if job["again"] else None
        self.say = say
        registry.load(self.settings.fused)
        self.bench = open_bench(self.settings)
        host = torch.device("cpu")
        devices = {self.bench.device, self.bench.golden}
        self.limit = int(min(memory_of(device) for device in devices) * _USABLE)
        self.readable = shards.Limits(region_bytes=int(memory_of(host) * _USABLE))
        if self.bench.device.type == "cpu":
            limit_process(self.limit)

    def work(self, journal: Journal) -> int:
        """Replay what is to do; return the exit status."""
        for number in self.todo:
            journal.add({"start": number}, time.monotonic())
            self.say(f"start {number}")
            poisoned = False
            try:
                result = self.replay(number, journal)
            except Poisoned as error:
                result, poisoned = error.result, True
            journal.add({"done": number, "result": result.to_json()}, time.monotonic())
            self.say(f"done {number}")
            if poisoned:
                return RESTART
        return 0

    def replay(self, number: int, journal: Journal) -> CallResult:
        """Read and replay one shard of the manifest."""
        shard = self.manifest.shards[number]
        header = header_of_file(self.manifest, shard)
        try:
            call = self._read(shard)
            _same_call(call, header)
            header = header_of_call(header, call, self.settings.standards, self.bench.device.type)
            # Should the process die now, the supervisor knows which call that was.
            journal.add({"start": number, "header": asdict(header)}, time.monotonic())
            return replay_call(call, header, self.bench, self.limit)
        except BadShard as bad:
            return CallResult(header, Outcome.QUARANTINED, bad.reason)
        except MemoryError as error:
            why = str(error) or "the shard does not fit into memory"
            return CallResult(header, Outcome.REPLAY_FAILED, f"MemoryError: {why}")

    def _read(self, shard: ShardRef) -> Call:
        for wait in _READ_ATTEMPTS:
            time.sleep(wait)  # a network mount may be a moment behind
            try:
                if self.kept is not None and self.kept.has(shard.file):
                    return shards.read(self.kept.path(shard.file), self.readable)
                with self.manifest.opened() as here:
                    return shards.read(here / shard.file, self.readable)
            except OSError as error:
                reason = error.strerror or type(error).__name__
        if not self.manifest.step_dir.is_dir():
            raise StoreError(f"{self.manifest.step_dir}: {reason}; mount the spool again and rerun")
        raise BadShard(f"cannot be read: {reason}")


def _same_call(call: Call, header: CallHeader) -> None:
    """Refuse a shard that is not the call that its place and file name say.

    Raises
    ------
    BadShard
    """
    inside = (call.rank, call.step, call.order, call.name)
    outside = (header.rank, header.step, header.order, header.name)
    if inside != outside:
        raise BadShard(f"holds call {inside}, but lies where {outside} belongs")


if __name__ == "__main__":
    sys.exit(main())
