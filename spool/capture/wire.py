"""What the training process and its writer process say to each other.

Frames of a length and marshalled plain values, over two pipes: tasks one way, what became
of them the other. Both ends are one program, started by one user on one machine.
"""

from __future__ import annotations

import marshal
import struct
from typing import Any

from spool.capture.writers import Closing, Done, Shard, Task
from spool.store import StepCounts

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 30
END = "end"
"""The last message to the writer process: the rank is closed by whom it belongs to."""


def frame(message: Any) -> bytes:
    """A message as it is sent."""
    data = marshal.dumps(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Makes messages again of bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now."""
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > _LONGEST:
                raise ValueError("what comes is no message of a writer process")
            stop = start + _LENGTH.size + length
            if len(buffer) < stop:
                break
            messages.append(marshal.loads(bytes(buffer[start + _LENGTH.size : stop])))
            start = stop
        del buffer[:start]
        return messages


def task_message(number: int, task: Task) -> tuple[Any, ...]:
    """A task as plain values."""
    if isinstance(task, Shard):
        return number, task.identity, task.body, task.spans
    return number, task.rank, task.step, plain_counts(task.counts)


def task_of(message: tuple[Any, ...]) -> tuple[int, Task]:
    """The task of `task_message`, with its number."""
    number, first, second, third = message
    if isinstance(first, tuple):
        return number, Shard(first, second, third)
    return number, Closing(first, second, counts_of(third))


def plain_counts(counts: StepCounts | None) -> tuple[Any, ...] | None:
    """Counts as plain values."""
    if counts is None:
        return None
    return counts.shards, counts.bytes, counts.dropped, counts.skipped, counts.blocked_seconds


def counts_of(values: tuple[Any, ...] | None) -> StepCounts | None:
    """The counts of `plain_counts`."""
    return None if values is None else StepCounts(*values)


def done_message(done: Done) -> tuple[int, int, str]:
    """What became of a task, as plain values."""
    return done.number, done.stored, done.error
