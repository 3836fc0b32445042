"""What replay found out about one call, and its way through the journal; no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spool.call import Call, CallContext
from spool.names import split_name
from spool.records import CallHeader, MeasuredRow, Outcome
from spool.standards.rows import RECORD_FIELDS, OutputMeasurement
from spool.standards.select import route_of, standard_of
from spool.workdir import Manifest, ShardRef


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
        """One row per output; one in all if there is none."""
        outputs: list[OutputMeasurement | None] = [*self.outputs] or [None]
        return [
            MeasuredRow(self.header, self.outcome, self.reason, output, self.inputs)
            for output in outputs
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
        """Rebuild what `to_json` gave."""
        blank = dict.fromkeys(RECORD_FIELDS)
        return cls(
            header=CallHeader(**data["header"]),
            outcome=Outcome(data["outcome"]),
            reason=data["reason"],
            outputs=[OutputMeasurement.from_record({**blank, **o}) for o in data["outputs"]],
            inputs=data["inputs"],
        )


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
        module=call.context.module,
        stack="\n".join(_stack(call.context)),
        device=call.context.device,
        bench_device=bench_device,
    )


def _stack(context: CallContext) -> tuple[str, ...]:
    """The stack, whose innermost frame says so if it is that of a gradient's forward call."""
    if not context.forward or not context.stack:
        return context.stack
    return (f"{context.stack[0]} (gradient of {context.forward})", *context.stack[1:])
