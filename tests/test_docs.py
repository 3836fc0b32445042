"""The documents agree with the program: messages, keys, links, examples."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from shardmaker import make_call

from spool import shard
from spool._json import dump_call
from spool._json_read import _TAGS, CallReader
from spool.config import CHECKS, CaptureConfig

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
HOLE = "\0"
PRINTF = re.compile(r"%(?:\.\d+)?[sdrfg]")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+) ?(.+?) ?\1(?!`)")
PLACEHOLDER = re.compile(r"<[^<>]+>|\.\.\.")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table, as lists of cells."""
    found: list[tuple[list[str], list[list[str]]]] = []
    blocks = re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text), re.MULTILINE)
    for head, _, *rows in (block.splitlines() for block in blocks):
        found.append((cells(head), [cells(row) for row in rows]))
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def codes(cell: str) -> list[str]:
    """What stands in backticks."""
    return [match[2] for match in CODE.finditer(cell)]


def first_column(name: str, header: str) -> list[str]:
    """Code in the first cells of all rows below a header."""
    rows = [row for head, body in tables(text_of(name)) if head[0] == header for row in body]
    return [code for row in rows for code in codes(row[0])]


@cache
def literals() -> tuple[str, ...]:
    """Every text in the sources."""
    return texts((ROOT / "spool").rglob("*.py"))


def texts(paths: Iterable[Path]) -> tuple[str, ...]:
    """Every text in Python files: f-strings joined, with holes for what is put in."""
    found: set[str] = set()
    for path in sorted(paths):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else HOLE for part in node.values
                ]
                inside.update(id(part) for part in node.values)
                found.add("".join(map(str, parts)))
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in inside
            ):
                found.add(PRINTF.sub(HOLE, node.value))
    return tuple(sorted(found))


def pattern_of(message: str) -> re.Pattern[str]:
    """A documented message as a pattern of a source text."""
    parts, end = [], 0
    for match in PLACEHOLDER.finditer(message):
        parts += [re.escape(message[end : match.start()]), ".*" if match[0] == "..." else ".+?"]
        end = match.end()
    parts.append(re.escape(message[end:]))
    # A leading part that names the place may be a hole of its own, or missing.
    return re.compile(f"{HOLE}?" + "".join(parts) + HOLE + "*", re.DOTALL)


def is_printed(message: str) -> bool:
    pattern, words = pattern_of(message), max(PLACEHOLDER.split(message), key=len)
    return any(words in literal and pattern.fullmatch(literal) for literal in literals())


# So many words in a row, or all if there are fewer, tell a message from others.
_TELLING = 4


def runs(text: str) -> set[tuple[str, ...]]:
    """Up to `_TELLING` words of a text that stand in a row, with nothing put in between."""
    found = set()
    for part in re.split(f"{PLACEHOLDER.pattern}|{HOLE}", text):
        words = re.findall(r"\w+", part)
        for size in range(1, _TELLING + 1):
            found |= {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
    return found


@cache
def expected() -> frozenset[tuple[str, ...]]:
    """The runs of words in all texts of the tests, which are what they expect to be said."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return frozenset().union(*(runs(text.replace("\\", "")) for text in texts(paths)))


def is_expected(message: str) -> bool:
    found = runs(message)
    longest = max(map(len, found))
    return any(len(run) == longest and run in expected() for run in found)


MESSAGES = first_column("docs/troubleshooting.md", "message")
REASONS = first_column("docs/troubleshooting.md", "reason")


def test_the_check_of_messages_can_fail() -> None:
    assert is_printed("waiting for a spool in <dir>")
    assert not is_printed("waiting for the spool in <dir>")
    assert not is_printed("waiting for a spool")
    assert not is_printed("<dir>: nothing like this is said; <what>")


def test_the_tables_are_read() -> None:
    assert len(MESSAGES) > 80
    assert len(REASONS) > 30
    assert not [message for message in MESSAGES if len(PLACEHOLDER.sub("", message)) < 10]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_documents_is_one_that_is_printed(message: str) -> None:
    assert is_printed(message), f"no text under spool/ is like {message!r}"


@pytest.mark.parametrize("reason", [reason for reason in REASONS if reason != "<class>"])
def test_a_reason_of_the_documents_is_one_that_is_given(reason: str) -> None:
    assert is_printed(reason), f"no text under spool/ is like {reason!r}"


def test_the_check_of_expectations_can_fail() -> None:
    assert is_expected("cannot make the spool <dir>: <why>")
    assert not is_expected("<dir>: nobody ever " + "expects this to be said; <what>")
    assert not is_expected("<dir>: unheard" + "of")


@pytest.mark.parametrize("message", [text for text in [*MESSAGES, *REASONS] if text != "<class>"])
def test_a_message_of_the_documents_is_one_that_a_test_expects(message: str) -> None:
    assert is_expected(message), f"no test expects words of {message!r}"


def section(text: str, start: str, stop: str) -> str:
    return text[text.index(start) : text.index(stop)]


def test_the_guide_has_every_key_of_a_capture() -> None:
    assert set(CHECKS) == {field.name for field in fields(CaptureConfig)} - {"ignored"}
    part = section(text_of("docs/guide.md"), "## On the training host", "## On the checking host")
    keys = [
        code
        for head, body in tables(part)
        if head[0] == "key"
        for r in body
        for code in codes(r[0])
    ]
    assert sorted(keys) == sorted([*CHECKS, "nfs_path"])


def test_the_guide_has_every_key_of_the_workflow_with_its_default() -> None:
    part = section(text_of("docs/guide.md"), "## On the checking host", "### Asking again")
    rows = [row for head, body in tables(part) if head[0] == "key" for row in body]
    told = {codes(row[0])[0]: yaml.safe_load(codes(row[2])[0]) for row in rows}
    config = yaml.safe_load(text_of("config/config.yaml"))
    wanted = {key: value for key, value in config.items() if key != "batch"}
    wanted |= {f"batch.{key}": value for key, value in config["batch"].items()}
    assert told == wanted
    assert "nfs_path" in codes(rows[0][0])


def test_both_languages_of_the_readme_have_the_same_code() -> None:
    english, chinese = text_of("README.md"), text_of("README.zh-CN.md")
    assert FENCE.findall(english)
    assert FENCE.findall(english) == FENCE.findall(chinese)
    english, chinese = FENCE.sub("", english), FENCE.sub("", chinese)
    assert sorted(codes(english)) == sorted(codes(chinese))
    targets = re.compile(r"\]\(([^)]+)\)")
    swap = {"README.md": "README.zh-CN.md"}
    assert sorted(targets.findall(english)) == sorted(
        swap.get(target, target) for target in targets.findall(chinese)
    )


def anchors(path: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{path.name}: {target}"


def test_every_document_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", text_of("README.md")))
    there = {str(path.relative_to(ROOT)) for path in DOCS} - {"README.md"}
    assert there <= linked


def test_the_example_of_a_shard_is_one() -> None:
    blocks = [text for kind, text in FENCE.findall(text_of("docs/format.md")) if kind == "json"]
    (example,) = [text for text in blocks if '"regions"' in text]
    call = CallReader(json.dumps(json.loads(example)).encode(), 10).call()
    assert call.name == "Functional.softmax.0"


def test_the_format_has_every_tag() -> None:
    rows = [
        row for head, body in tables(text_of("docs/format.md")) if head[0] == "tag" for row in body
    ]
    assert [codes(row[0])[0] for row in rows] == list(_TAGS)
    for tag, example in ((codes(row[0])[0], codes(row[1])) for row in rows):
        if tag != "tensor":
            (value,) = [json.loads(text) for text in example]
            assert list(value) == [tag]
            record = json.loads(dump_call(make_call(args=(), kwargs={}, outputs=None), []))
            CallReader(json.dumps({**record, "args": [value]}).encode(), 10).call()


def test_the_lines_that_open_a_shard_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = [text for kind, text in FENCE.findall(text_of("docs/format.md")) if kind == "python"]
    code, then = blocks
    path = tmp_path / re.findall(r'File\("([^"]+)"', code)[0]
    path.parent.mkdir(parents=True)
    call = make_call()
    shard.write(call, path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert capsys.readouterr().out == "Functional.linear torch.float32 [2] [1.5 nan]\n"
    import torch

    exec(then, names | {"torch": torch}, names)
    assert np.array_equal(names["tensor"], call.regions[2], equal_nan=True)  # type: ignore[arg-type]
