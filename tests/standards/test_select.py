from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from spool.errors import ConfigError
from spool.standards import Route, Standard, route_of, standard_of
from spool.standards.select import families
from spool.standards.thresholds import (
    BenchmarkLimits,
    constants_of,
    limits_of,
    validate_overrides,
)

PUBLISHED = {
    "absolute": """
        mul mul_ __mul__ __imul__ __rmul__ add add_ __add__ __iadd__ __radd__ div div_ __div__
        __idiv__ divide divide_ leaky_relu leaky_relu_ prelu reciprocal reciprocal_ rsqrt rsqrt_
        square square_ sub sub_ rsub __isub__ __sub__""",
    "binary": """
        abs abs_ absolute absolute_ argmin bitwise_and bitwise_and_ broadcast_to ceil ceil_ equal
        fill_ flatten floor floor_ gather greater greater_ greater_equal greater_equal_ histc
        isfinite isnan less less_ less_equal less_equal_ logical_and logical_and_ logical_not
        logical_not_ logical_or logical_or_ masked_fill masked_fill_ max_pool3d maximum minimum neg
        neg_ nonzero not_equal not_equal_ one_hot pad relu reshape round round_ select sign sign_
        sort tile topk transpose transpose_ tril tril_ triu triu_ type_as""",
    "thousandth": "conv1d conv2d",
    "ulp": """
        __matmul__ addbmm addbmm_ addmm addmm_ baddbmm baddbmm_ bilinear bmm chain_matmul hspmm
        linear matmul mm mv smm sspaddmm""",
}
ADDED = {
    "absolute": "__truediv__ __itruediv__ __rtruediv__ __rdiv__ __rsub__ multiply multiply_ "
    "true_divide true_divide_ subtract subtract_",
    "binary": "gt gt_ __gt__ ge ge_ __ge__ lt lt_ __lt__ le le_ __le__ ne ne_ __ne__ eq eq_ __eq__ "
    "negative negative_ __neg__ __abs__ __and__ __iand__ __rand__ relu_ special.round swapaxes "
    "swapaxes_ swapdims swapdims_",
    "ulp": "__rmatmul__ linalg.matmul",
}


def test_table_is_the_published_one_and_its_families() -> None:
    want = {name: kind for kind, names in PUBLISHED.items() for name in names.split()}
    want |= {name: kind for kind, names in ADDED.items() for name in names.split()}
    assert {name: standard.value for name, standard in families().items()} == want


def test_every_added_name_is_one_of_torch() -> None:
    for names in ADDED.values():
        for name in names.split():
            # Python has no division operator `/` named so since 3.0; torch kept part of it.
            owners: list[Any] = [torch, torch.Tensor, F]
            if "." in name:
                module, name = name.split(".")
                owners = [getattr(torch, module)]
            assert any(hasattr(owner, name) for owner in owners), name


def test_no_alias_that_torch_documents_is_forgotten() -> None:
    alias = re.compile(r"[Aa]lias (?:for|of) :(?:func|meth|attr):`~?(?:torch\.)?([\w.]+)")
    owners = [(torch, ""), (torch.Tensor, ""), (torch.special, "special."), (F, "")]
    owners.append((torch.linalg, "linalg."))
    table, missing = families(), []
    for owner, prefix in owners:
        for name in dir(owner):
            doc = getattr(getattr(owner, name, None), "__doc__", None)
            found = alias.search(doc) if isinstance(doc, str) else None
            if found is None:
                continue
            target = found[1].removeprefix("Tensor.")
            if target in table and table.get(prefix + name) != table[target]:
                missing.append((prefix + name, target))
    assert missing == []


@pytest.mark.parametrize(
    ("api", "standard", "route"),
    [
        ("Functional.linear.3", Standard.ULP, Route.THREE_WAY),
        ("Torch.linalg.matmul.0", Standard.ULP, Route.THREE_WAY),
        ("Torch.linalg.inv.0", Standard.BENCHMARK, Route.THREE_WAY),
        ("Tensor.__iadd__", Standard.ABSOLUTE, Route.TWO_WAY),
        ("gt", Standard.BINARY, Route.TWO_WAY),
        ("conv2d", Standard.THOUSANDTH, Route.TWO_WAY),
        ("softmax", Standard.BENCHMARK, Route.THREE_WAY),
        ("NPU.npu_rms_norm.1", Standard.BENCHMARK, Route.THREE_WAY),
    ],
)
def test_standard_and_route(api: str, standard: Standard, route: Route) -> None:
    assert standard_of(api) is standard
    assert route_of(api) is route


def test_overrides() -> None:
    overrides = {"softmax": {"benchmark": {"mean_rel": 3}}, "linear": "absolute"}
    assert standard_of("Functional.linear.3", overrides) is Standard.ABSOLUTE
    assert route_of("linear", overrides) is Route.TWO_WAY
    assert limits_of("softmax", Standard.BENCHMARK, overrides) == BenchmarkLimits(mean_rel=3)
    assert limits_of("gelu", Standard.BENCHMARK, overrides) == BenchmarkLimits()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "standards: [] is not a mapping"),
        ({1: "ulp"}, "standards: 1 is not an API name"),
        ({"Functional.linear": "ulp"}, "standards.Functional.linear: name the API alone; write l"),
        ({"a": "exact"}, "standards.a: unknown standard 'exact'; use one of absolute, binary"),
        ({"a": 3}, "standards.a: 3 is neither a standard nor one standard with limits"),
        ({"a": {}}, "standards.a: {} is neither"),
        ({"a": {"ulp": {}, "binary": {}}}, "is neither a standard nor one standard"),
        ({"a": {"nope": {}}}, "standards.a: unknown standard 'nope'"),
        ({"a": {"ulp": 3}}, "standards.a.ulp: 3 is not a mapping of limits"),
        ({"a": {"ulp": {"mean": 3}}}, "standards.a.ulp: unknown limit 'mean'; use one of half_s"),
        ({"a": {"benchmark": {"rmse": "2"}}}, "standards.a.benchmark.rmse: '2' is not a finite"),
        ({"a": {"benchmark": {"rmse": True}}}, "is not a finite number of at least 0"),
        ({"a": {"benchmark": {"rmse": -1}}}, "is not a finite number of at least 0"),
        ({"a": {"benchmark": {"rmse": float("nan")}}}, "is not a finite number"),
    ],
)
def test_bad_overrides_are_named(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_overrides(overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_good_overrides() -> None:
    for overrides in (None, {}, {"a": "ulp"}, {"a": {"ulp": None}}, {"a": {"ulp": {}}}):
        validate_overrides(overrides)


def test_constants() -> None:
    assert constants_of("float16").atol_abs == 2**-16
    assert constants_of("bfloat16").rtol == 2**-8
    assert constants_of("float8_e5m2") == constants_of("float16")
    assert constants_of("int64") == constants_of("float32")


@pytest.mark.parametrize(
    "modules",
    ["spool.standards", "spool.standards.two_way, spool.standards.three_way"],
)
def test_judging_does_not_import_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
