"""How a rule's script ends when something is wrong."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from spool.errors import StoreError
from spool.job import job


def fail(log: Path, error: BaseException) -> int:
    with pytest.raises(SystemExit) as caught, job(str(log)):
        raise error
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (StoreError("x: y; z"), "spool: x: y; z"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/w/a"),
            "spool: /w/a: No space left on device; mend that and run the same command again",
        ),
        (OSError("two\nlines"), "spool: two lines; mend that and run the same command again"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    tmp_path: Path, error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "deep" / "job.log"
    assert fail(log, error) == 1
    assert capsys.readouterr().err == line + "\n"
    assert log.read_text() == line + "\n"


def test_ctrl_c_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(tmp_path / "job.log", KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "job.log").exists()


def test_a_log_that_cannot_be_written_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert fail(tmp_path / "file" / "job.log", StoreError("x: y")) == 1
    assert capsys.readouterr().err == "spool: x: y\n"


def test_a_fault_keeps_its_traceback(tmp_path: Path) -> None:
    assert fail(tmp_path / "job.log", ZeroDivisionError("odd")) == 1
    assert "Traceback" in (tmp_path / "job.log").read_text()


def test_a_name_that_is_not_utf8_hides_nothing(tmp_path: Path) -> None:
    assert fail(tmp_path / "job.log", StoreError("/x\udcff: y")) == 1
    assert (tmp_path / "job.log").read_text() == "spool: /x\\udcff: y\n"
