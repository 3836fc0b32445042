"""The queue that Snakemake reads its targets from.

Snakemake parses the Snakefile in its main process, in every job's process, and for
commands that only look (``-n --lint --dag --unlock --report --summary``). The intake
must run in the first alone, and what tells them apart is settled only after parsing:
so the feed decides when Snakemake takes the first item.
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

from spool.errors import ConfigError, SpoolError, StoreError, explain
from spool.intake.calm import quieten, share_timer
from spool.intake.follow import Intake
from spool.intake.lock import WorkLock
from spool.intake.remind import say
from spool.intake.targets import existing_targets
from spool.settings import ReceiverSettings, Settings
from spool.transport.receiver import Receiver


class Feed(queue.Queue[Any]):
    """A queue that starts the intake when Snakemake first looks into it.

    Parameters
    ----------
    settings : Settings
        Of this run.
    workflow : snakemake.workflow.Workflow
        Tells what this process is for.
    """

    END = "end of targets"

    def __init__(self, settings: Settings, workflow: Any) -> None:
        super().__init__()
        self._settings = settings
        self._workflow = workflow
        self._intake: Intake | None = None
        self._is_begun = False
        self._is_calm = False

    def get_nowait(self) -> Any:
        """Return the next target, or raise `queue.Empty`.

        Raises
        ------
        SystemExit
            If the intake cannot begin or has failed; the reason is on stderr.
        """
        if not self._is_begun:
            self._is_begun = True
            try:
                self._begin()
            except (SpoolError, OSError) as error:
                _give_up(error)
        if self._intake is not None and self._intake.error is not None:
            _give_up(self._intake.error)
        if not self._is_calm and self._workflow.scheduler is not None:
            self._is_calm = True
            share_timer(self._workflow.scheduler)
        return super().get_nowait()

    def _begin(self) -> None:
        if not is_live(self._workflow):
            for target in existing_targets(self._settings):
                self._put_path(target)
            self._finish()
            return
        for key in ("work_dir", "results_dir"):
            _require_writable(key, getattr(self._settings, key))
        lock = WorkLock(self._settings.work.lock)
        lock.acquire()
        atexit.register(lock.release)
        self._settings.save()
        # It is shown when the run fails, and must be this run's.
        (self._settings.work.root / "logs" / "verdict.log").unlink(missing_ok=True)
        if not self._workflow.output_settings.verbose:
            quieten(logging.getLogger("snakemake.logging"))
        if self._settings.receiver is not None:
            self._listen(self._settings.receiver)
        self._intake = Intake(self._settings, self._put_path, self._finish)
        self._intake.prepare()
        self._intake.start()
        atexit.register(self._intake.stop)

    def _listen(self, where: ReceiverSettings) -> None:
        receiver = Receiver(self._settings.spool_dir, where.host, where.port, where.tls_dir, say)
        receiver.start()
        atexit.register(receiver.stop)
        say(f"receiving at port {receiver.port} into {receiver.root}")

    def _put_path(self, path: Path) -> None:
        self.put(str(path))

    def _finish(self) -> None:
        self.put(self.END)


def is_live(workflow: Any) -> bool:
    """Whether this process will really run jobs of its own choice.

    False in a job's process, in a dry run, while touching files, and for every
    command that builds the graph without executing it.
    """
    return (
        workflow.is_main_process
        and workflow.execution_settings is not None
        and workflow.executor_plugin is not None
        and not workflow.dryrun
        and not workflow.touch
    )


def _require_writable(key: str, directory: Path) -> None:
    """Make sure that a directory can be written, or made; hours later is too late."""
    there = directory.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        # Rights do not tell all: a read-only mount, a quota.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"config: {key}: {str(directory)!r} cannot be written: {there}: {error.strerror}; "
            "name another directory"
        ) from None


def _give_up(error: BaseException) -> NoReturn:
    """End Snakemake: one line for what a user can mend, a traceback for a fault of ours."""
    if isinstance(error, OSError):
        error = StoreError(f"{explain(error)}; mend that and run the same command again")
    if isinstance(error, SpoolError):
        print(f"spool: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    raise SystemExit(1)
