"""The reference of fused attention: every layout, mode and mask, and memory that is bounded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import torch_npu

from spool.replay.fused import npu_fusion_attention as attention
from spool.replay.fused import npu_fusion_attention_grad as attention_grad
from spool.replay.fused.attention_problem import results_of_backward
from spool.replay.fused.reference import Unsupported

D = torch.float64
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def randn(*shape: int, dtype: torch.dtype = D) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(B, N, S, D) as a layout; in TND the batches follow each other."""
    rows = x.transpose(1, 2)
    if layout == "BSH":
        return rows.flatten(2)
    if layout == "SBH":
        return rows.flatten(2).transpose(0, 1)
    if layout == "TND":
        return rows.flatten(0, 1)
    return rows if layout == "BSND" else x


def both(q: Any, k: Any, v: Any, heads: int, layout: str, **more: Any) -> torch.Tensor:
    """Forward and backward by the reference, held against the stand-in."""
    ours = attention(q, k, v, heads, layout, **more)
    theirs = torch_npu.kernels.npu_fusion_attention(q, k, v, heads, layout, **more)
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        same(one, other)
    dy = torch.randn_like(ours[0])
    scale = more.pop("scale", 1.0)
    known = {"softmax_max": ours[1], "softmax_sum": ours[2], "attention_in": ours[0]}
    given = (q, k, v, dy, heads, layout)
    theirs = torch_npu.kernels.npu_fusion_attention_grad(*given, **more, **known, scale_value=scale)
    for more_known in (known, {}):
        gradients = attention_grad(*given, **more, **more_known, scale_value=scale)
        for one, other in zip(gradients, theirs, strict=True):
            same(one, other)
    return ours[0]


MODES: dict[str, dict[str, Any]] = {
    "open": {},
    "mode without a mask": {"sparse_mode": 3},
    "causal": {"atten_mask": TRIANGLE, "sparse_mode": 2},
    "causal to the right": {"atten_mask": TRIANGLE, "sparse_mode": 3},
    "band": {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1},
    "prefix": {"atten_mask": TRIANGLE, "sparse_mode": 6, "prefix": [1, 4]},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("few", [1, 2, 4])
def test_layouts_modes_and_groups(layout: str, mode: str, few: int) -> None:
    torch.manual_seed(3)
    q, k, v = randn(2, 4, 5, 6), randn(2, few, 7, 6), randn(2, few, 7, 6)
    both(*(in_layout(x, layout) for x in (q, k, v)), 4, layout, scale=0.4, **MODES[mode])


@pytest.mark.parametrize("mode", [0, 1, 5])
@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 1, 5, 7), (1, 1, 5, 7), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_that_are_given(mode: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    q, k, v = randn(2, 4, 5, 6), randn(2, 4, 7, 6), randn(2, 4, 7, 6)
    mask = (torch.rand(shape) > 0.6).to(dtype)
    limits = {"pre_tockens": 3, "next_tockens": 2} if mode == 0 else {}
    both(q, k, v, 4, "BNSD", atten_mask=mask, sparse_mode=mode, **limits)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (2, 4, 1, 7)])
def test_shifts_of_the_scores(shape: tuple[int, ...]) -> None:
    q, k, v = randn(2, 4, 5, 6), randn(2, 4, 7, 6), randn(2, 4, 7, 6)
    out = both(q, k, v, 4, "BNSD", pse=(pse := randn(*shape)), scale=0.3)
    same(out, F.scaled_dot_product_attention(q, k, v, attn_mask=pse * 0.3, scale=0.3))


@pytest.mark.parametrize(
    "more",
    [
        {"sparse_mode": 2},
        {"sparse_mode": 3},
        {"sparse_mode": 7, "pre_tockens": 9, "next_tockens": -1},
        {"sparse_mode": 8, "pre_tockens": 9, "next_tockens": 1},
    ],
)
def test_sequences_of_any_length(more: dict[str, Any]) -> None:
    q, k, v = randn(11, 4, 6), randn(12, 2, 6), randn(12, 2, 6)
    ends = {"actual_seq_qlen": [4, 4, 9, 11], "actual_seq_kvlen": [5, 5, 9, 12]}
    both(q, k, v, 4, "TND", atten_mask=TRIANGLE, **ends, **more)


def test_each_sequence_is_computed_alone() -> None:
    q, k, v = randn(9, 2, 4), randn(10, 2, 4), randn(10, 2, 4)
    ends = {"actual_seq_qlen": [3, 7, 0, 0], "actual_seq_kvlen": [4, 8, 0, 0]}
    out, peak, total = attention(q, k, v, 2, "TND", atten_mask=TRIANGLE, sparse_mode=3, **ends)[:3]
    for rows, columns in ((slice(0, 3), slice(0, 4)), (slice(3, 7), slice(4, 8))):
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns])]
        alone = attention(*one, 2, "BNSD", atten_mask=TRIANGLE, sparse_mode=3)
        same(out[rows], alone[0][0].transpose(0, 1))
        same(peak[rows], alone[1][0].transpose(0, 1))
        same(total[rows], alone[2][0].transpose(0, 1))
    assert not out[7:].any(), "batches at the end that take no part"


def test_a_sink_takes_its_share() -> None:
    q, k, v, sink = randn(2, 4, 5, 6), randn(2, 2, 7, 6), randn(2, 2, 7, 6), randn(4)
    out = both(q, k, v, 4, "BNSD", sink=sink, atten_mask=TRIANGLE, sparse_mode=3)
    scores = torch.einsum("bnsd,bntd->bnst", q, k.repeat_interleave(2, 1))
    hidden = torch.ones(5, 7).triu(3).bool()
    with_sink = torch.cat(
        (scores.masked_fill(hidden, -torch.inf), sink[None, :, None, None].expand(2, 4, 5, 1)), -1
    )
    same(out, with_sink.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1))


def test_it_is_torchs_attention() -> None:
    q, k, v = randn(2, 4, 6, 8), randn(2, 2, 6, 8), randn(2, 2, 6, 8)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ours = attention(q, k, v, 4, "BNSD", atten_mask=TRIANGLE, scale=8**-0.5, sparse_mode=2)
    same(ours[0], theirs)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    band = (j >= i - 2) & (j <= i + 1)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=True)
    ours = attention(
        q, k, v, 4, "BNSD", atten_mask=TRIANGLE, scale=8**-0.5, sparse_mode=4, pre_tockens=2,
        next_tockens=1,
    )  # fmt: skip
    same(ours[0], theirs)


def test_rows_that_see_nothing_are_zero() -> None:
    q, k, v = randn(1, 2, 6, 4), randn(1, 2, 3, 4), randn(1, 2, 3, 4)
    out, peak, total = attention(q, k, v, 2, "BNSD", atten_mask=TRIANGLE, sparse_mode=3)[:3]
    assert not out[:, :, :3].any()
    assert out[:, :, 3:].all()
    assert (peak[:, :, :3] < -3e38).all()
    assert total[:, :, :3].isinf().all()
    gradients = attention_grad(
        *(q, k, v, torch.ones_like(out), 2, "BNSD"),
        atten_mask=TRIANGLE,
        sparse_mode=3,
        attention_in=out,
        softmax_max=peak,
        softmax_sum=total,
    )
    assert not gradients[0][:, :, :3].any()
    assert all(g.isfinite().all() for g in gradients)


def test_statistics_have_eight_equal_columns() -> None:
    q = randn(2, 4, 5, 6, dtype=torch.float16)
    out, peak, total, empty, seed, offset, count = attention(q, q, q, 4, "BNSD")
    assert (out.dtype, peak.dtype, total.dtype) == (torch.float16, torch.float32, torch.float32)
    assert peak.shape == total.shape == (2, 4, 5, 8)
    assert (peak == peak[..., :1]).all()
    assert empty.numel() == 0
    assert (seed, offset, count) == (0, 0, 0)
    flat = in_layout(q, "TND")
    ends = {"actual_seq_qlen": [5, 10], "actual_seq_kvlen": [5, 10]}
    assert attention(flat, flat, flat, 4, "TND", **ends)[1].shape == (10, 4, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_beyond_half_precision(dtype: torch.dtype) -> None:
    q = torch.full((1, 1, 4, 64), 200.0, dtype=dtype)
    v = torch.arange(4.0).to(dtype)[None, None, :, None].expand(1, 1, 4, 64)
    out, peak, _ = attention(q, q, v, 1, "BNSD")[:3]
    assert peak[0, 0, 0, 0] == 64 * 200.0**2
    assert (out == 1.5).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    few=st.integers(1, 2),
    group=st.integers(1, 3),
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    layout=st.sampled_from(["BSH", "SBH", "BSND", "BNSD"]),
    mode=st.sampled_from([0, 2, 3, 4]),
    before=st.integers(-2, 5),
    after=st.integers(-2, 5),
)
def test_any_problem(
    batch: int, few: int, group: int, rows: int, columns: int, layout: str, mode: int,
    before: int, after: int,
) -> None:  # fmt: skip
    torch.manual_seed(rows * 7 + columns)
    q = randn(batch, few * group, rows, 4)
    k, v = randn(batch, few, columns, 4), randn(batch, few, columns, 4)
    mask = torch.rand(rows, columns) > 0.8 if mode == 0 else TRIANGLE
    both(
        *(in_layout(x, layout) for x in (q, k, v)), few * group, layout, atten_mask=mask,
        sparse_mode=mode, pre_tockens=before, next_tockens=after,
    )  # fmt: skip


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, pse = randn(2, 4, 9, 6), randn(2, 2, 7, 6), randn(2, 2, 7, 6), randn(1, 4, 9, 7)
    more: dict[str, Any] = {"atten_mask": TRIANGLE, "sparse_mode": 3, "pse": pse}
    whole = attention(q, k, v, 4, "BNSD", **more)
    grads = attention_grad(q, k, v, torch.ones_like(q), 4, "BNSD", **more)
    monkeypatch.setattr("spool.replay.fused.attention_tiles.TILE", 2 * 4 * 7 * 2)
    for one, other in zip(attention(q, k, v, 4, "BNSD", **more)[:3], whole[:3], strict=True):
        same(one, other)
    again = attention_grad(q, k, v, torch.ones_like(q), 4, "BNSD", **more)
    for one, other in zip(again, grads, strict=True):
        same(one, other)


LONG = """
import resource, torch
from spool.replay.fused import npu_fusion_attention, npu_fusion_attention_grad
torch.set_num_threads(1)
q, k, v = torch.randn(3, 1, 2, 8192, 16).unbind(0)
mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
# One matrix of queries by keys for all heads would take 537 MB.
resource.setrlimit(resource.RLIMIT_DATA, (used + 400_000_000,) * 2)
more = {"atten_mask": mask, "sparse_mode": 2}
out, peak, total = npu_fusion_attention(q, k, v, 2, "BNSD", scale=0.25, **more)[:3]
grads = npu_fusion_attention_grad(
    q, k, v, q, 2, "BNSD", scale_value=0.25, softmax_max=peak, softmax_sum=total,
    attention_in=out, **more)
theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
print(float((out - theirs).abs().max()) < 1e-5, all(g.isfinite().all() for g in grads))
"""


def test_long_sequences_take_bounded_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr


def test_torchs_fused_attention_stands_in_where_it_can() -> None:
    """What a GPU runs, called here on the CPU."""
    from spool.replay.fused.attention_problem import Mask
    from spool.replay.fused.npu_fusion_attention import _attend_by_kernel, by_kernel

    q, k, v = randn(2, 4, 6, 8), randn(2, 2, 6, 8), randn(2, 2, 6, 8)
    for mode, mask in ((0, Mask((6, 6))), (2, Mask((6, 6), after=0))):
        out = torch.empty_like(q)
        _attend_by_kernel((q, k, v), mask, 0.3, out)
        given = TRIANGLE if mode else None
        same(out, attention(q, k, v, 4, "BNSD", atten_mask=given, scale=0.3, sparse_mode=mode)[0])
    kept = torch.full_like(q, 7.0)
    _attend_by_kernel((q, k, v), Mask((6, 6), after=1), 0.3, kept)
    assert (kept == 7).all(), "no such mask there"
    assert by_kernel(torch.float16, torch.device("cuda"))
    assert not by_kernel(torch.float32, torch.device("cuda"))
    assert not by_kernel(torch.float16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"input_layout": "NTD"}, Unsupported, "input_layout='NTD'"),
        ({"sparse_mode": 9}, Unsupported, "sparse_mode=9"),
        ({"keep_prob": 0.9}, Unsupported, "keep_prob=0.9"),
        ({"padding_mask": torch.ones(1)}, Unsupported, "padding_mask"),
        ({"softmax_layout": "NTD"}, Unsupported, "softmax_layout='NTD'"),
        ({"pse": torch.ones(1, 4, 1024, 5)}, Unsupported, "pse of shape"),
        ({"head_num": 3}, ValueError, "3 heads of queries, 4 of keys"),
        ({"key": torch.ones(2, 4, 5, 3)}, ValueError, "do not fit together"),
        ({"input_layout": "BSH"}, ValueError, "is not BSH"),
        ({"atten_mask": torch.ones(4, 5)}, ValueError, "a mask of shape"),
        ({"atten_mask": TRIANGLE, "sparse_mode": 6}, ValueError, "one prefix per sequence"),
    ],
)
def test_what_does_not_fit_is_one_line(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    x = torch.ones(2, 4, 5, 6)
    call = {"query": x, "key": x, "value": x, "head_num": 4, "input_layout": "BNSD"}
    with pytest.raises(error, match=words) as caught:
        attention(**(call | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ends", [None, [3, 2], [4, 9]])
def test_lengths_that_do_not_fit(ends: list[int] | None) -> None:
    x = torch.ones(6, 4, 5)
    with pytest.raises(ValueError, match="npu_fusion_attention: "):
        attention(x, x, x, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)


def test_gradients_of_what_is_not_given_are_not_compared() -> None:
    """The operator leaves them undefined: None, or an empty tensor."""
    one = torch.ones(1)
    assert results_of_backward((), {}) == (0, 1, 2)
    assert results_of_backward((), {"pse": one, "sink": None}) == (0, 1, 2, 3)
    assert results_of_backward((), {"sink": one}) == (0, 1, 2, 4)
    assert results_of_backward((), {"pse": one, "sink": one}) == (0, 1, 2, 3, 4)
