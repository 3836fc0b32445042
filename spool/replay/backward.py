"""What the kernels of `spool.atennames.TRUSTING` trust: sizes, and the values of indices.

These operators belong to the autograd engine, which gives them what the forward pass
made. A shard may give them anything, so each is checked here before it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from spool.errors import BadShard
from spool.replay.kernels import places_fit
from spool.replay.nest import Arguments

Given = Mapping[str, Any]


def check_operator(operator: OpOverload, arguments: Arguments) -> None:
    """Refuse arguments that send an operator of the autograd engine out of bounds.

    Parameters
    ----------
    operator : OpOverload
    arguments : tuple of args and kwargs
        Live.

    Raises
    ------
    BadShard
    """
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    check = CHECKS.get(name)
    if check is None:
        return
    args, kwargs = arguments
    given: dict[str, Any] = {argument.name: None for argument in schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    try:
        fits = check(given)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        fits = False  # of other kinds than the operator takes
    if not fits:
        raise BadShard(f"the arguments of {name} do not fit together")


def _same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape


def _sized(tensor: torch.Tensor | None, numel: int) -> bool:
    """Whether a tensor, if it is given, has so many elements, one after the other."""
    return tensor is None or (tensor.numel() == numel and tensor.is_contiguous())


def _dense(*tensors: torch.Tensor) -> bool:
    """Whether the elements of each fill a block of memory, in whatever order."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default
    return all(dense(tensor) for tensor in tensors)


def _within(index: torch.Tensor, low: int, high: int) -> bool:
    """Whether every index is at least `low` and below `high`."""
    if index.numel() == 0:
        return True
    return int(index.min()) >= low and int(index.max()) < high


def _layer_norm(given: Given) -> bool:
    source, shape = given["input"], tuple(given["normalized_shape"])
    rows = math.prod(source.shape[: source.dim() - len(shape)])
    width = math.prod(shape)
    return (
        len(shape) > 0
        and tuple(source.shape[source.dim() - len(shape) :]) == shape
        and _same_shape(given["grad_out"], source)
        and all(_sized(given.get(name), rows) for name in ("mean", "rstd"))
        and all(_sized(given.get(name), width) for name in ("weight", "bias"))
    )


def _group_norm(given: Given) -> bool:
    batch, channels, rest, groups = (given[name] for name in ("N", "C", "HxW", "group"))
    return bool(
        min(batch, channels, rest) >= 0
        and groups > 0
        and channels % groups == 0
        and given["input"].numel() == batch * channels * rest
        and given["grad_out"].numel() == batch * channels * rest
        and _dense(given["input"], given["grad_out"])
        and _sized(given["mean"], batch * groups)
        and _sized(given["rstd"], batch * groups)
        and _sized(given["weight"], channels)
    )


def _batch_norm(given: Given) -> bool:
    source = given["input"]
    statistics = ("save_mean", "save_invstd") if given.get("train") else ()
    kept = () if given.get("train") else ("running_mean", "running_var")
    if "grad_out" in given:
        if not _same_shape(given["grad_out"], source):
            return False
        if any(given[name] is None for name in (*statistics, *kept)):
            return False
    parts = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")
    return source.dim() >= 2 and all(
        _sized(given.get(name), source.shape[1])
        for name in parts
        # Empty where the operator did not keep any.
        if not (name.startswith("save_") and name not in statistics)
    )


def _convolution(given: Given) -> bool:
    """The gradient has the shape of the forward call's result."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    source, weight = (given[name].to("meta") for name in ("input", "weight"))
    result = torch.ops.aten.convolution.default(
        source, weight, None, *(given[name] for name in names)
    )
    bias = given["bias_sizes"]
    channels = result.shape[source.dim() - weight.dim() + 1]
    return result.shape == given["grad_output"].shape and (
        bias is None or math.prod(bias) in (0, channels)
    )


def _embedding(given: Given) -> bool:
    indices, grad = given["indices"], given["grad_output"]
    return grad.shape[:-1] == indices.shape and _within(indices, 0, given["num_weights"])


def _nll_loss(given: Given) -> bool:
    """Classes are the second axis, or the only one."""
    source, target, weight = given["self"], given["target"], given["weight"]
    axis = 0 if source.dim() == 1 else 1
    classes = source.shape[axis]
    places = source.shape[:axis] + source.shape[axis + 1 :]
    grad = given["grad_output"]
    ignored = target == given["ignore_index"]
    return (
        (target.shape == places or (source.dim() == 1 and target.numel() == 1))
        and _within(target[~ignored], 0, classes)
        and _sized(weight, classes)
        and given["total_weight"].numel() == 1
        and (grad.numel() == 1 if given["reduction"] != 0 else grad.shape == target.shape)
    )


def _max_pool(axes: int) -> Callable[[Given], bool]:
    """Indices of the maxima lie in the plane that was pooled."""

    def check(given: Given) -> bool:
        source, indices, grad = given["self"], given["indices"], given["grad_output"]
        return (
            source.dim() in (axes + 1, axes + 2)
            and _same_shape(indices, grad)
            and _dense(indices)
            and grad.shape[:-axes] == source.shape[:-axes]
            and _within(indices, 0, math.prod(source.shape[-axes:]))
        )

    return check


def _planes(axes: int) -> Callable[[Given], bool]:
    """Batch and channels of the gradient are those of the input."""

    def check(given: Given) -> bool:
        source, grad = given["self"], given["grad_output"]
        return (
            source.dim() in (axes + 1, axes + 2)
            and source.dim() == grad.dim()
            and grad.shape[:-axes] == source.shape[:-axes]
            and min(source.shape[-axes:]) > 0
        )

    return check


def _average_pool(axes: int) -> Callable[[Given], bool]:
    """The gradient has the shape of the forward call's result."""
    forward = {2: torch.ops.aten.avg_pool2d.default, 3: torch.ops.aten.avg_pool3d.default}[axes]
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")

    def check(given: Given) -> bool:
        result = forward(
            given["self"].to("meta"),
            *(given[name] for name in names),
            divisor_override=given["divisor_override"],
        )
        return bool(result.shape == given["grad_output"].shape)

    return check


def _padding(axes: int, *, reflect: bool) -> Callable[[Given], bool]:
    """Nothing is reflected beyond the far side, and no more cut off than there is."""
    planes = _planes(axes)

    def check(given: Given) -> bool:
        source, grad, padding = given["self"], given["grad_output"], given["padding"]
        if not planes(given) or len(padding) != 2 * axes:
            return False
        for axis in range(axes):
            size, pads = source.shape[-1 - axis], padding[2 * axis : 2 * axis + 2]
            if min(pads) <= -size or (reflect and max(pads) >= size):
                return False
            if grad.shape[-1 - axis] != size + sum(pads):
                return False
        return True

    return check


def _grid_sampler(given: Given) -> bool:
    source, grid, grad = given["input"], given["grid"], given["grad_output"]
    axes = source.dim() - 2
    return (
        axes in (2, 3)
        and grid.dim() == source.dim()
        and grid.shape[0] == source.shape[0]
        and grid.shape[-1] == axes
        and tuple(grad.shape) == (*source.shape[:2], *grid.shape[1:-1])
        and places_fit(grid)
    )


def _attention(given: Given) -> bool:
    query, key, value = given["query"], given["key"], given["value"]
    mask = given["attn_mask"]
    batch, heads, rows, width = query.shape
    columns = key.shape[2]
    return (
        key.dim() == value.dim() == 4
        and key.shape[0] == value.shape[0] == batch
        and key.shape[1] == value.shape[1]
        and heads % key.shape[1] == 0
        and value.shape[2] == columns
        and key.shape[3] == value.shape[3] == width
        and given["grad_out"].shape == given["out"].shape == query.shape
        and tuple(given["logsumexp"].shape) == (batch, heads, rows)
        and all(
            given[name].stride(3) == 1 or width == 1 for name in ("query", "key", "value", "out")
        )
        and (mask is None or _expands(mask.shape, (batch, heads, rows, columns)))
    )


def _expands(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(shape) > len(target):
        return False
    tail = target[len(target) - len(shape) :]
    return all(have in (1, want) for have, want in zip(shape, tail, strict=True))


def _cdist(given: Given) -> bool:
    one, two = given["x1"], given["x2"]
    batch = torch.broadcast_shapes(one.shape[:-2], two.shape[:-2])  # type: ignore[no-untyped-call]
    distances = (*batch, one.shape[-2], two.shape[-2])
    return (
        min(one.dim(), two.dim()) >= 2
        and one.shape[-1] == two.shape[-1]
        and tuple(given["grad"].shape) == tuple(given["cdist"].shape) == distances
    )


def _fft(given: Given) -> bool:
    axes = given["dim"]
    count = given["self"].dim()
    return len(set(axes)) == len(axes) > 0 and min(axes) >= 0 and max(axes) < count


def _fft_c2r(given: Given) -> bool:
    last = given["last_dim_size"]
    return _fft(given) and bool(given["self"].shape[given["dim"][-1]] == last // 2 + 1)


def _index(given: Given) -> bool:
    """Every index lies in the axis it selects from; a mask has the size of its axes."""
    source, axis = given["self"], 0
    for index in given["indices"]:
        if index is None:
            axis += 1
        elif index.dtype in (torch.bool, torch.uint8):
            if index.shape != source.shape[axis : axis + index.dim()]:
                return False
            axis += index.dim()
        else:
            size = source.shape[axis]
            if not _within(index, -size, size):
                return False
            axis += 1
    return bool(axis <= source.dim())


def _weight_norm(given: Given) -> bool:
    direction = given["v"] if "v" in given else given["saved_v"]
    length = given["g"] if "g" in given else given["saved_g"]
    axis = given["dim"] or 0
    parts = [length] if "v" in given else [length, given["saved_norms"]]
    return bool(
        axis in (0, direction.dim() - 1)
        and direction.is_contiguous()
        and all(_sized(part, direction.shape[axis]) for part in parts)
        and (
            "grad_w" not in given
            or (_same_shape(given["grad_w"], direction) and given["grad_w"].is_contiguous())
        )
    )


def _unfold(given: Given) -> bool:
    whole = torch.empty(list(given["input_sizes"]), device="meta")
    parts = whole.unfold(given["dim"], given["size"], given["step"])
    return bool(parts.shape == given["grad_in"].shape)


CHECKS: dict[str, Callable[[Given], bool]] = {
    "_adaptive_avg_pool2d_backward": _planes(2),
    "_adaptive_avg_pool3d_backward": _planes(3),
    "_cdist_backward": _cdist,
    "_fft_c2c": _fft,
    "_fft_c2r": _fft_c2r,
    "_fft_r2c": _fft,
    "_fused_rms_norm_backward": _layer_norm,
    "_index_put_impl_": _index,
    "_native_batch_norm_legit": _batch_norm,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "_unsafe_index": _index,
    "_unsafe_index_put": _index,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm,
    "adaptive_max_pool2d_backward": _max_pool(2),
    "adaptive_max_pool3d_backward": _max_pool(3),
    "avg_pool2d_backward": _average_pool(2),
    "avg_pool3d_backward": _average_pool(3),
    "convolution_backward": _convolution,
    "embedding_dense_backward": _embedding,
    "fractional_max_pool2d_backward": _max_pool(2),
    "fractional_max_pool3d_backward": _max_pool(3),
    "grid_sampler_2d_backward": _grid_sampler,
    "grid_sampler_3d_backward": _grid_sampler,
    "index": _index,
    "max_pool2d_with_indices_backward": _max_pool(2),
    "max_pool3d_with_indices_backward": _max_pool(3),
    "native_batch_norm_backward": _batch_norm,
    "native_group_norm_backward": _group_norm,
    "native_layer_norm_backward": _layer_norm,
    "nll_loss_backward": _nll_loss,
    "nll_loss2d_backward": _nll_loss,
    "reflection_pad1d_backward": _padding(1, reflect=True),
    "reflection_pad2d_backward": _padding(2, reflect=True),
    "reflection_pad3d_backward": _padding(3, reflect=True),
    "replication_pad1d_backward": _padding(1, reflect=False),
    "replication_pad2d_backward": _padding(2, reflect=False),
    "replication_pad3d_backward": _padding(3, reflect=False),
    "unfold_backward": _unfold,
}
