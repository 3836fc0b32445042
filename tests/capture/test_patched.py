"""Functions of torch that the program has replaced run once, as without capture."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from spool.apinames import function_of, names
from spool.tensors import thaw

X = torch.linspace(-2.0, 2.0, 12).reshape(1, 3, 4)

# Where, under which name, and a use of it: in Python and in C, of one name and of several,
# functions, methods, operators and a property.
REPLACED = {
    "Functional.silu": (F, "silu", lambda: F.silu(X)),
    "Functional.softmax": (F, "softmax", lambda: F.softmax(X, dim=-1)),
    "Functional.gelu": (F, "gelu", lambda: F.gelu(X)),
    "Functional.max_pool1d": (F, "max_pool1d", lambda: F.max_pool1d(X, 2)),
    "Torch.einsum": (torch.functional, "einsum", lambda: torch.functional.einsum("bij->bj", X)),
    "Torch.unique": (torch.functional, "unique", lambda: torch.functional.unique(X)),
    "Torch.exp": (torch, "exp", lambda: torch.exp(X)),
    "Torch.linalg.det": (torch.linalg, "det", lambda: torch.linalg.det(X[:, :, :3])),
    "Tensor.relu": (torch.Tensor, "relu", lambda: X.relu()),
    "Tensor.norm": (torch.Tensor, "norm", lambda: X.norm()),
    "Tensor.add": (torch.Tensor, "add", lambda: X.add(X)),
    "Tensor.add by +": (torch.Tensor, "add", lambda: 1 + X),
    "Tensor.__rsub__": (torch.Tensor, "__rsub__", lambda: 1 - X),
}


def as_lambda(real):
    return lambda *arguments, **keywords: real(*arguments, **keywords) * 1.01


def as_wrapper(real):
    return functools.wraps(real)(as_lambda(real))


class Replacement:
    """A callable object: torch asks for no function."""

    def __init__(self, real):
        self.real = real
        functools.update_wrapper(self, real)

    def __call__(self, *arguments, **keywords):
        return self.real(*arguments, **keywords) * 1.01


def by_torch(real):
    """One of torch's own decorators."""
    return torch.no_grad()(as_lambda(real))


@pytest.mark.parametrize("replace", [as_lambda, as_wrapper, Replacement, by_torch])
@pytest.mark.parametrize("api", REPLACED)
def test_a_replaced_function_runs_once(spooled, monkeypatch, said, api, replace):
    home, name, use = REPLACED[api]
    if home is torch.Tensor and replace is Replacement:
        replace = as_lambda  # an object is no method
    plain = use()
    monkeypatch.setattr(home, name, replace(getattr(home, name)))
    expected = use()
    with spooled.enable() as session:
        got = use()
        session.stop()
        idle = use()
    assert torch.equal(got, expected)
    assert torch.equal(idle, expected)
    call = next(call for call in spooled.calls() if call.name == f"{api.split()[0]}.0")
    assert torch.equal(thaw(call.outputs, call.regions), plain)
    assert "failed" not in said()
    assert "twice" not in said()


def test_one_of_torchs_functions_in_the_place_of_another(spooled, monkeypatch):
    silu = F.silu
    expected = silu(X)
    monkeypatch.setattr(F, "silu", F.relu)
    with spooled.enable():
        assert torch.equal(silu(X), expected)
        assert torch.equal(F.silu(X), X.relu())
    assert spooled.names()[0] == "Functional.silu.0"
    assert "Functional.relu.0" in spooled.names()


def test_a_replaced_property(spooled, monkeypatch):
    real = torch.Tensor.T
    monkeypatch.setattr(torch.Tensor, "T", property(lambda x: real.__get__(x) * 2), raising=False)
    with spooled.enable():
        assert torch.equal(X[0].T, X[0].mT * 2)


def test_a_replaced_backward_starts_the_engine_once(spooled, monkeypatch):
    real = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda x: real(x * 3))
    x = X.clone().requires_grad_()
    with spooled.enable():
        x.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    assert [name for name in spooled.names() if name.startswith("Aten.")]


def test_a_function_that_is_nowhere_any_more_is_told(spooled, monkeypatch, said):
    """Both places of a function in C are taken before anybody looked: once, and out loud."""
    module = torch._C._nn
    real = module.softplus
    monkeypatch.setattr(module, "softplus", as_lambda(real))
    with spooled.enable():
        assert torch.equal(real(X), function_of("Functional.softplus")(X))
    assert "twice" not in said()
    script = """
        import torch, tempfile, spool
        real = torch._C._nn.softplus
        mine = lambda x: real(x) * 2
        torch._C._nn.softplus = torch.nn.functional.softplus = mine
        with spool.enable(spool_dir=tempfile.mkdtemp()):
            mine(torch.ones(2)), mine(torch.ones(2))
    """
    run = _python(script)
    assert (
        run.stderr.count("torch._C._nn.softplus is not torch's, and torch's own is found nowhere")
        == 1
    )


def test_replaced_before_spool_is_imported(tmp_path):
    script = f"""
        import functools, torch, torch.nn.functional as F
        x = torch.linspace(-2, 2, 12).reshape(1, 3, 4)

        def replace(home, *names):
            real = getattr(home, names[0])
            for name in names:
                setattr(home, name, functools.wraps(real)(lambda *a, **k: real(*a, **k) * 1.01))

        for name in ("silu", "gelu", "max_pool1d", "logsigmoid", "softmax"):
            replace(F, name)
        for name in ("relu", "norm", "add", "__rsub__"):
            replace(torch.Tensor, name)
        replace(torch, "exp")
        replace(torch.functional, "einsum")
        replace(torch, "unique")
        replace(torch.functional, "unique")

        def use():
            return [
                F.silu(x), F.gelu(x), F.max_pool1d(x, 2), F.logsigmoid(x), F.softmax(x, -1),
                x.relu(), x.norm(), x.add(x), 1 - x, x + x, torch.exp(x),
                torch.functional.einsum("bij->bj", x), torch.unique(x),
            ]

        expected = use()
        import spool
        from spool.store import Store
        with spool.enable(spool_dir={str(tmp_path)!r}):
            got = use()
        assert all(map(torch.equal, got, expected)), (got, expected)
        names = [e.name for e in Store.open({str(tmp_path)!r}).shards(0, 0)]
        print(*[name for name in names if not name.startswith("Tensor.mul.")])
    """
    run = _python(script)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [
        *("Functional.silu.0", "Functional.gelu.0", "Functional.max_pool1d.0"),
        *("Functional.logsigmoid.0", "Functional.softmax.0", "Tensor.relu.0", "Tensor.norm.0"),
        *("Tensor.add.0", "Tensor.__rsub__.0", "Tensor.add.1", "Torch.exp.0", "Torch.einsum.0"),
        "Torch.unique.0",
    ]


@pytest.mark.parametrize(
    "use",
    [
        lambda: F.l1_loss(X, X * 2, weight=X.abs()),
        lambda: torch.chain_matmul(X[0, :, :3], X[0, :, :3], out=torch.empty(3, 3)),
        lambda: X.mT.dim_order(ambiguity_check=[torch.contiguous_format]),
    ],
    ids=["l1_loss", "chain_matmul", "dim_order"],
)
@pytest.mark.filterwarnings("ignore:torch.chain_matmul")
def test_what_torch_does_not_report_is_not_lost(spooled, use):
    """Some functions leave arguments out when a mode is there."""

    def result():
        try:
            return use()
        except RuntimeError as error:
            return str(error)

    expected = result()
    with spooled.enable():
        got = result()
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert got == expected


def test_a_library_with_functions_of_its_own(spooled):
    """Its decorators run once; what reports under another name gets what it reports."""
    runs = []

    def counted(function):
        @functools.wraps(function)
        def run(*arguments):
            runs.append(function.__name__)
            return function(*arguments)

        return run

    module: dict = {"counted": counted, "has": has_torch_function, "handle": handle_torch_function}
    exec(
        textwrap.dedent(
            """
            @counted
            def public(x):
                if has((x,)):
                    return handle(public, (x,), x)
                return x + 1

            def outer(x, by):
                return _inner(x, by, None)

            def _inner(x, by, unused):
                if has((x,)):
                    return handle(outer, (x,), x, by)
                return x * by
            """
        ),
        module,
    )
    with spooled.enable():
        assert torch.equal(module["public"](X), X + 1)
        assert torch.equal(module["outer"](X, 3), X * 3)
    assert runs == ["public"]


def test_torch_reports_functions_by_their_own_names():
    """What `spool.capture.patched` builds on, in the source of this torch."""
    home = Path(torch.__file__).parent
    others = {}
    for path in [*home.glob("*.py"), *home.glob("nn/*.py"), *home.glob("autograd/*.py")]:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(
                    "handle_torch_function"
                ):
                    reported = ast.unparse(call.args[0]).rpartition(".")[2]
                    if reported != function.name:
                        others[function.name] = reported
    assert len(others) > 10
    # A property reports its own getter; those that wrap a function report what wraps it.
    makers = {
        "__cuda_array_interface__",
        "__call__",
        "_get_sym_math_fn",
        "_handle_torch_function_and_wrap_type_error_to_not_implemented",
        "inner",
        "wrapped",
        "wrap_torch_function",
    }
    assert {
        name: reported
        for name, reported in others.items()
        if name not in makers and not name.startswith(f"_{reported}")
    } == {}


def test_every_function_in_python_is_told_from_a_replacement(spooled):
    """None of torch's own is taken for somebody's, called as torch's own code calls it."""
    from spool.apinames import is_torchs_own

    functions = [function_of(name) for name in names()]
    assert sum(isinstance(function, FunctionType) for function in functions) > 100
    assert all(is_torchs_own(function) for function in functions)


def _python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
