"""What replay found out about one call, and its way through the journal; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, repeat
from typing import Any

from spool.call import Call, CallContext
from spool.names import split_name
from spool.records import CallHeader, MeasuredRow, Outcome
from spool.standards.rows import RECORD_FIELDS, OutputMeasurement
from spool.standards.select import route_of, standard_of
from spool.workdir import Manifest, ShardRef

# It is repeated in every row of a call, and a shard may hold megabytes of it.
_MAX_FRAMES = 10
_MAX_PLACE = 1000


@dataclass(frozen=True)
class CallResult:
    """The measured rows of one call, before they are spread over a table.

    Parameters
    ----------
    header : CallHeader
    outcome : Outcome
    reason : str
        Why nothing was measured, "" if something was.
    outputs : list of OutputMeasurement
    inputs : str
        JSON array of facts about the arguments.
    """

    header: CallHeader
    outcome: Outcome
    reason: str = ""
    outputs: list[OutputMeasurement] = field(default_factory=list)
    inputs: str = "[]"

    def rows(self) -> list[MeasuredRow]:
        """One row per output; one in all if there is none. The first one has the inputs."""
        outputs: list[OutputMeasurement | None] = [*self.outputs] or [None]
        return [
            MeasuredRow(self.header, self.outcome, self.reason, output, inputs)
            for output, inputs in zip(outputs, chain([self.inputs], repeat("[]")), strict=False)
        ]

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values; blank fields of outputs are left out."""
        return {
            "header": asdict(self.header),
            "outcome": self.outcome.value,
            "reason": self.reason,
            "inputs": self.inputs,
            "outputs": [
                {key: value for key, value in output.to_record().items() if value is not None}
                for output in self.outputs
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CallResult:
        """Rebuild what `to_json` gave.

        Raises
        ------
        ValueError
            If it is something else.
        """
        blank = dict.fromkeys(RECORD_FIELDS)
        try:
            outputs = [{**blank, **output} for output in data["outputs"]]
            for output in outputs:
                _require(output, RECORD_FIELDS)
            own = {name: data[name] for name in ("reason", "inputs")}
            _require(own, {"reason": "str", "inputs": "str"})
            return cls(
                header=header_from_json(data["header"]),
                outcome=Outcome(data["outcome"]),
                outputs=[OutputMeasurement.from_record(output) for output in outputs],
                **own,
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a result is malformed: {error}") from None


def header_from_json(data: dict[str, Any]) -> CallHeader:
    """The header of a call from what `dataclasses.asdict` gave.

    Raises
    ------
    ValueError
        If it is something else.
    """
    kinds = {item.name: str(item.type) for item in fields(CallHeader)}
    if data.keys() != kinds.keys():
        raise ValueError("a header has missing or unknown members")
    _require(data, kinds)
    return CallHeader(**data)


def is_same_call(one: CallHeader, other: CallHeader) -> bool:
    """Whether two headers are of one shard."""
    return (one.rank, one.key, one.api, one.shard, one.nbytes) == (
        other.rank,
        other.key,
        other.api,
        other.shard,
        other.nbytes,
    )


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "str": (str,),
}


# No column of a table holds larger integers exactly.
_MOST = {"int": 1 << 63, "float": 1 << 53}


def _require(record: dict[str, Any], kinds: Mapping[str, str]) -> None:
    """Make sure that every member is of its kind; None is a blank."""
    for name, value in record.items():
        kind = kinds[name]
        if value is None and kinds is RECORD_FIELDS:
            continue
        items, item = ([value], kind) if kind in _KINDS else (value, kind[:-1])
        if type(items) is not list or not all(_is_of(part, item) for part in items):
            raise ValueError(f"{name} is not {kind}")


def _is_of(value: Any, kind: str) -> bool:
    return type(value) in _KINDS[kind] and (type(value) is not int or abs(value) < _MOST[kind])


def header_of_file(manifest: Manifest, shard: ShardRef) -> CallHeader:
    """What the manifest alone says about a call whose shard could not be read."""
    api, index = split_name(shard.name)
    return CallHeader(
        rank=manifest.rank,
        step=manifest.step,
        order=shard.order,
        index=index,
        name=shard.name,
        api=api,
        direction="forward",
        route="",
        standard="",
        module="",
        stack="",
        shard=shard.file,
        nbytes=shard.nbytes,
        device="",
        bench_device="",
        golden="",
        random=False,
    )


def header_of_call(
    blank: CallHeader, call: Call, overrides: dict[str, Any], bench_device: str
) -> CallHeader:
    """The header of a call whose shard was read."""
    return replace(
        blank,
        direction=call.direction,
        route=route_of(call.api, overrides).value,
        standard=standard_of(call.api, overrides).value,
        module=call.context.module[:_MAX_PLACE],
        stack="\n".join(line[:_MAX_PLACE] for line in _stack(call.context)[:_MAX_FRAMES]),
        device=call.context.device,
        bench_device=bench_device,
    )


def _stack(context: CallContext) -> tuple[str, ...]:
    """The stack, whose innermost frame says so if it is that of a gradient's forward call."""
    if not context.forward or not context.stack:
        return context.stack
    return (f"{context.stack[0]} (gradient of {context.forward})", *context.stack[1:])
