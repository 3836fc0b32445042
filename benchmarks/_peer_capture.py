"""What the peer's L1 tensor dump costs the same training step; run by the peer's own Python.

    VENV/bin/python benchmarks/_peer_capture.py MODEL STEPS DIRECTORY

where VENV holds the pinned torch and mindstudio-probe. Prints JSON: seconds of a step
without the tool, of the first and of the median dumped step, and what the first one wrote.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _training import Training


def measure(model: str, steps: int, directory: Path) -> dict[str, Any]:
    """Times of one model."""
    training = Training(model)
    training.median(5)
    off = training.median(20)
    config = {
        "task": "tensor",
        "dump_path": str(directory),
        "rank": [],
        "step": [],
        "level": "L1",
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    }
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=str(file))
    seconds = []
    for _ in range(steps):
        debugger.start(model=training.model)
        seconds.append(training.step())
        debugger.stop()
        debugger.step()
    files = [path for path in (directory / "step0").rglob("*.pt") if path.is_file()]
    return {
        "version": version("mindstudio-probe"),
        "off": off,
        "first": seconds[0],
        "sustained": statistics.median(seconds),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }


def main() -> None:
    """Measure and print."""
    model, steps, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    with contextlib.redirect_stdout(sys.stderr):
        result = measure(model, steps, directory)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
