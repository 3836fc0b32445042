"""The stand-in for torch_npu, under a name that no library takes for the real one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import torch_npu

__all__ = ["torch_npu"]
