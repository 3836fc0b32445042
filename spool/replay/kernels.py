"""Values that kernels trust: indices, lengths and statistics that nobody below checks.

Most of torch's public functions check what they hand down. These do not, and read or
write out of bounds if their arguments do not fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spool.errors import BadShard
from spool.names import base_name
from spool.replay.nest import Arguments

_FAR = 1e6


def check_values(api: str, arguments: Arguments) -> None:
    """Refuse arguments that send a kernel out of bounds.

    Parameters
    ----------
    api : str
        Prefixed or base name.
    arguments : tuple of args and kwargs
        Live.

    Raises
    ------
    BadShard
    """
    check = _CHECKS.get(base_name(api))
    if check is not None and not check(*arguments):
        raise BadShard(f"the arguments of {base_name(api)} do not fit together")


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[at] if at < len(args) else None


def _ctc_loss(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Labels are classes; what follows a target's length is padding, and may be anything."""
    log_probs = _argument(args, kwargs, 0, "log_probs")
    targets = _argument(args, kwargs, 1, "targets")
    lengths = _argument(args, kwargs, 3, "target_lengths")
    if not isinstance(log_probs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return False
    if targets.dim() == 2 and lengths is not None:
        lengths = torch.as_tensor(lengths, device=targets.device).reshape(-1, 1)
        if lengths.shape[0] != targets.shape[0]:
            return False
        targets = targets[torch.arange(targets.shape[1], device=targets.device) < lengths]
    if log_probs.dim() == 0 or targets.numel() == 0:
        return True  # the call will say so itself
    return int(targets.min()) >= 0 and int(targets.max()) < log_probs.shape[-1]


def _batch_norm(names: Mapping[str, int]) -> Callable[..., bool]:
    """Weights and statistics have one element per channel."""

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        source = _argument(args, kwargs, 0, "input")
        if not isinstance(source, torch.Tensor) or source.dim() < 2:
            return False
        parts = [_argument(args, kwargs, at, name) for name, at in names.items()]
        return all(
            part.numel() == source.shape[1] for part in parts if isinstance(part, torch.Tensor)
        )

    return check


def _recurrent(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The form for packed sequences has the batch sizes in second place, largest first."""
    if not isinstance(sizes := _argument(args, kwargs, 1, "batch_sizes"), torch.Tensor):
        return True
    packed = "batch_sizes" in kwargs or (
        # The other form goes on with the parameters, this one with the state.
        sizes.dim() == 1 and not sizes.is_floating_point()
    )
    if not packed:
        return True
    if sizes.dim() != 1 or sizes.numel() == 0 or int(sizes.min()) < 1:
        return False
    return bool((sizes[1:] <= sizes[:-1]).all())


def _grouped_mm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """One end for each group, in ascending order, within the axis that is divided."""
    left, right = _argument(args, kwargs, 0, "self"), _argument(args, kwargs, 1, "mat2")
    ends = _argument(args, kwargs, 2, "offs")
    if not isinstance(ends, torch.Tensor):
        return True
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    if ends.dim() != 1 or ends.is_floating_point() or not 2 <= left.dim() <= 3:
        return False
    if left.dim() == right.dim():  # two stacks have no groups; two matrices are summed over
        divided, groups = left.shape[-1], ends.numel()
        fits = left.dim() == 2 and left.shape[1] == right.shape[0]
    elif left.dim() == 2:
        divided, groups, fits = left.shape[0], right.shape[0], True
    else:
        divided, groups, fits = right.shape[-1], left.shape[0], True
    if not fits or ends.numel() != groups or groups == 0:
        return False
    ascending = bool((ends[1:] >= ends[:-1]).all())
    return ascending and int(ends[0]) >= 0 and int(ends[-1]) <= divided


def places_fit(grid: torch.Tensor) -> bool:
    """Whether a sampling grid has no numbers that overflow when turned into an index."""
    finite = grid[grid.isfinite()]
    return finite.numel() == 0 or float(finite.abs().max()) < _FAR


def _grid_sampler(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    grid = _argument(args, kwargs, 1, "grid")
    return not isinstance(grid, torch.Tensor) or places_fit(grid)


_CHECKS: dict[str, Callable[..., bool]] = {
    "ctc_loss": _ctc_loss,
    "native_batch_norm": _batch_norm({"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4}),
    "batch_norm_update_stats": _batch_norm({"running_mean": 1, "running_var": 2}),
    "_grouped_mm": _grouped_mm,
    "grid_sample": _grid_sampler,
    "grid_sampler": _grid_sampler,
    "grid_sampler_2d": _grid_sampler,
    "grid_sampler_3d": _grid_sampler,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
}
