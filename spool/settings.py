"""Settings of the checking host: a configuration as validated, typed values.

Nothing here imports torch or Snakemake: the short jobs import it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from spool.errors import ConfigError
from spool.normalise import normalise
from spool.workdir import WorkDir, read_json, write_if_changed

_PROGRAM = "spool"

_S = TypeVar("_S", bound="_Json")


@dataclass(frozen=True)
class _Json:
    """A settings dataclass that goes through JSON and comes back equal."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    @classmethod
    def load(cls: type[_S], path: Path) -> _S:
        """Read the settings from a file of the work directory."""
        data = read_json(path, "settings file")
        data.pop(_PROGRAM, None)
        return cls.from_json(data)

    @classmethod
    def from_json(cls: type[_S], data: Mapping[str, Any]) -> _S:
        """Build the settings from what `to_json` gave.

        Raises
        ------
        ConfigError
            If a key is unknown or missing.
        """
        known = {item.name for item in fields(cls)}
        if set(data) != known:
            odd = sorted(set(data) ^ known)
            raise ConfigError(f"{cls.__name__}: {odd[0]}: unknown or missing; rerun the workflow")
        values = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        for item in fields(cls):
            if not _is_of(values[item.name], str(item.type), item.metadata.get("choices")):
                raise ConfigError(
                    f"{cls.__name__}: {item.name}: {values[item.name]!r:.80} is not allowed; "
                    "rerun the workflow"
                )
        return cls(**values)


@dataclass(frozen=True)
class JudgeSettings(_Json):
    """What acts when measured rows are judged; a changed key judges a whole run again.

    Parameters
    ----------
    white_list, black_list : tuple of str
        Base names of APIs; an empty white list is all, black is taken off white.
    standards : dict
        Overrides of standards and limits by API name.
    """

    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    standards: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplaySettings(_Json):
    """How a batch is replayed and measured.

    Parameters
    ----------
    bench_device : str
        ``auto``, ``cuda`` or ``cpu``.
    golden : str
        ``cpu`` or ``bench``.
    threads : int
        CPU threads of a replay job.
    gpu : int or None
        The GPU given to this job; None leaves the choice to torch.
    allow_tf32 : bool
        TF32 on the bench device where the training device used its like.
    standards : dict
        Overrides of standards, because they decide a call's route.
    call_timeout : float
        Seconds after which one call is given up.
    fused : dict
        References of fused operators by name, as ``package.module:function``.
    references : dict
        Digests of their modules.
    """

    bench_device: str = field(default="auto", metadata={"choices": ("auto", "cuda", "cpu")})
    golden: str = field(default="cpu", metadata={"choices": ("cpu", "bench")})
    threads: int = 2
    gpu: int | None = None
    allow_tf32: bool = False
    standards: dict[str, Any] = field(default_factory=dict)
    call_timeout: float = 600.0
    fused: dict[str, Any] = field(default_factory=dict)
    references: dict[str, Any] = field(default_factory=dict)

    def measuring(self) -> dict[str, Any]:
        """The keys that decide what is measured, as they are stored with the rows."""
        return {
            "bench_device": self.bench_device,
            "golden": self.golden,
            "allow_tf32": self.allow_tf32,
            "fused": self.fused,
            "references": self.references,
        }


@dataclass(frozen=True)
class RetireSettings(_Json):
    """What becomes of shards after their verdict.

    Parameters
    ----------
    retain : str
        ``failed``, ``all`` or ``none``.
    keep_per_api : int
        Most failed shards kept of one API.
    max_failed_bytes : int
        Most bytes of failed shards kept in all.
    failed_dir : str
        Absolute directory for them; "" is ``<work>/failed``.
    """

    retain: str = field(default="failed", metadata={"choices": ("failed", "all", "none")})
    keep_per_api: int = 20
    max_failed_bytes: int = 20 * 10**9
    failed_dir: str = ""


@dataclass(frozen=True)
class BatchLimits:
    """A batch is cut at whichever of these comes first."""

    calls: int = 1000
    nbytes: int = 2 * 10**9
    seconds: float = 20.0


@dataclass(frozen=True)
class ReceiverSettings:
    """Where training hosts without shared storage send to.

    Parameters
    ----------
    host : str
        Address of this host; "" for all.
    port : int
    tls_dir : Path or None
        Of certificates and keys; None listens without TLS.
    """

    host: str
    port: int
    tls_dir: Path | None


@dataclass(frozen=True)
class Settings:
    """The whole configuration of the checking host, validated.

    Parameters
    ----------
    spool_dir, work_dir, results_dir : Path
        As given; `spool_dir` need not exist yet.
    rank_list : tuple of int
        Ascending, without repeats.
    idle_timeout, rescan_seconds, missing_seconds : float
        In seconds.
    gpus : tuple of int
        Empty for all visible ones.
    """

    spool_dir: Path
    work_dir: Path
    results_dir: Path
    rank_list: tuple[int, ...] = (0,)
    watch: bool = True
    idle_timeout: float = 0.0
    rescan_seconds: float = 5.0
    missing_seconds: float = 30.0
    batch: BatchLimits = field(default_factory=BatchLimits)
    gpus: tuple[int, ...] = ()
    precision: int = 14
    fail_on: str = "nothing"
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    retire: RetireSettings = field(default_factory=RetireSettings)
    receiver: ReceiverSettings | None = None

    @property
    def work(self) -> WorkDir:
        """The work directory's paths."""
        return WorkDir(self.work_dir)

    def save(self) -> None:
        """Write the settings files that jobs read and depend on.

        Each is rewritten only when its content changes, so a changed key reruns
        exactly the jobs that take its file as input. Another Spool judges and merges
        again; what is measured stays.
        """
        program = {_PROGRAM: _version()}
        verdict = {"fail_on": self.fail_on, "rank_list": list(self.rank_list)}
        for name, values, made in (
            ("judging", self.judge.to_json() | program, ("two_way/*/*", "three_way/*/*")),
            ("measuring", self.replay.measuring(), ("replay/*/*",)),
            ("replay", self.replay.to_json(), ()),
            ("retiring", self.retire.to_json(), ("retired/*/*",)),
            ("tables", {"precision": self.precision} | program, ()),
            ("verdict", verdict | program, ("verdict.txt",)),
        ):
            outputs = chain.from_iterable(map(self.work_dir.glob, made))
            if name == "tables":
                outputs = chain(self.results_dir.glob("*.csv"))
            write_if_changed(self.work.settings(name), values, outputs)


def _version() -> str:
    try:
        return importlib.metadata.version("precision-spool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that was not installed


def load_replay_settings(work_dir: Path, gpu: int | None) -> ReplaySettings:
    """Settings of one replay job: those of the run, and the GPU that it was given."""
    return replace(ReplaySettings.load(WorkDir(work_dir).settings("replay")), gpu=gpu)


def load_schema(path: Path) -> dict[str, Any]:
    """Read the schema of the configuration (YAML)."""
    import yaml

    schema: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return schema


def load_settings(config: Mapping[str, Any], schema: Mapping[str, Any]) -> Settings:
    """Validate a configuration and build the settings from it.

    Parameters
    ----------
    config : mapping
        As Snakemake gives it; may use aliases and hold text in place of numbers.
    schema : mapping
        What `load_schema` returns.

    Raises
    ------
    ConfigError
        In one line: the key, its value, and what is allowed.
    """
    values = normalise(config, schema)
    batch = values.get("batch", {})
    limits = BatchLimits(
        calls=batch.get("calls", BatchLimits.calls),
        nbytes=batch.get("bytes", BatchLimits.nbytes),
        seconds=float(batch.get("seconds", BatchLimits.seconds)),
    )
    standards = values.get("standards", {})
    if standards:
        from spool.standards.thresholds import validate_overrides

        validate_overrides(standards)
    references = {}
    if fused := values.get("fused", {}):
        from spool.userreferences import check_references

        references = check_references(fused)
    for key in ("work_dir", "results_dir"):
        if re.search("[{}]", str(values.get(key, ""))):
            # They are parts of the workflow's patterns, where braces mean something.
            raise ConfigError(
                f"config: {key}: {values[key]!r} is not allowed; it must be a path without braces"
            )
    results = Path(values.get("results_dir", "results"))
    failed = values.get("error_data_path") or ""
    return Settings(
        spool_dir=Path(values.get("spool_dir", "spool-data")),
        work_dir=Path(values.get("work_dir", "work")),
        results_dir=results,
        rank_list=tuple(sorted(set(values.get("rank_list", [0])))),
        batch=limits,
        gpus=tuple(values.get("gpus", ())),
        judge=JudgeSettings(
            white_list=tuple(sorted(set(values.get("white_list", ())))),
            black_list=tuple(sorted(set(values.get("black_list", ())))),
            standards=standards,
        ),
        replay=ReplaySettings(
            standards=standards,
            fused=fused,
            references=references,
            **_given(values, ReplaySettings),
        ),
        retire=RetireSettings(
            failed_dir=str(Path(failed).absolute()) if failed else "",
            **_given(values, RetireSettings),
        ),
        receiver=_receiver(values),
        **_given(values, Settings, skip=("spool_dir", "work_dir", "results_dir")),
    )


def _receiver(values: Mapping[str, Any]) -> ReceiverSettings | None:
    port, directory = values.get("port"), values.get("tls_path")
    if port in (None, -1):
        return None
    if directory is None:
        raise ConfigError(
            f"config: port={port}: tls_path is missing: name the directory of certificates, or say "
            "tls_path='' to listen without TLS, where everybody on the way can read and change it"
        )
    return ReceiverSettings(
        values.get("host") or "", int(str(port)), Path(directory) if directory else None
    )


def _given(values: Mapping[str, Any], cls: type[Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The scalar values among `values` that are fields of `cls`."""
    taken = {"batch", "gpus", "rank_list", "white_list", "black_list", "standards", "fused"}
    taken |= {*skip}
    floats = {item.name for item in fields(cls) if item.type == "float"}
    return {
        item.name: float(values[item.name]) if item.name in floats else values[item.name]
        for item in fields(cls)
        if item.name in values and item.name not in taken
    }


_KINDS: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "int | None": (int, type(None)),
    "float": (int, float),
    "str": str,
    "tuple[str, ...]": tuple,
    "dict[str, Any]": dict,
}


def _is_of(value: Any, kind: str, choices: Sequence[str] | None) -> bool:
    """Whether a value from a settings file is of a field's type, and one of its choices."""
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        return False
    if isinstance(value, tuple):
        return all(isinstance(item, str) for item in value)
    if isinstance(value, (int, float)):
        return 0 <= value < 1 << 63
    return choices is None or value in choices


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
