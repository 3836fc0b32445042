"""Whether the references of a configuration can be loaded, asked before the first job needs them.

Imports no torch: a user's module is imported in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from spool.errors import ConfigError

_LOADER = "spool.replay.registry"


def check_references(fused: Mapping[str, str]) -> dict[str, str]:
    """Load the references that a configuration names, in a process of its own.

    Parameters
    ----------
    fused : mapping
        Name of an operator to ``package.module:function``.

    Returns
    -------
    dict of str to str
        Digest of the source of each module.

    Raises
    ------
    ConfigError
        In one line: which of them cannot be loaded, and why.
    """
    if not fused:
        return {}
    child = subprocess.run(
        [sys.executable, "-m", _LOADER],
        input=json.dumps(dict(fused)),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        said = child.stderr.strip().splitlines() or [f"fused: exit status {child.returncode}"]
        raise ConfigError(said[-1])
    try:
        digests: dict[str, str] = json.loads((child.stdout.splitlines() or [""])[-1])
    except ValueError:  # it never came to its end
        raise ConfigError(
            f"fused: {', '.join(fused.values())}: a module ends the process while it is imported; "
            'keep what it does below `if __name__ == "__main__"`'
        ) from None
    return digests
