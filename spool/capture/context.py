"""Settings under which a call runs, and where in the program and the model it is."""

from __future__ import annotations

import sys
import weakref
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from spool._torch import DTYPE_NAMES
from spool.capture.origins import Place, origin_of_node

STACK_FRAMES = 5
_CALL_IMPL = torch.nn.Module._call_impl.__code__
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_TORCH = str(Path(torch.__file__).parent) + "/"
_SPOOL = str(Path(__file__).parent.parent) + "/"


class _Origin(IntEnum):
    """Whose code a frame runs."""

    USER = 0
    LIBRARY = 1
    COMPILED = 2
    DYNAMO = 3


def _classify(filename: str) -> _Origin:
    if filename.startswith("<eval_with_key>") or "torchinductor_" in filename:
        return _Origin.COMPILED
    if "codegen(runtime_wrapper" in filename:
        return _Origin.COMPILED
    if filename.startswith(_TORCH):
        inside = filename[len(_TORCH) :]
        if inside.startswith(("_functorch/_aot_autograd", "_inductor/")):
            return _Origin.COMPILED
        if inside == "_dynamo/eval_frame.py":
            return _Origin.DYNAMO
        return _Origin.LIBRARY
    if filename.startswith(_SPOOL) and not filename.startswith(_SPOOL + "demo/"):
        return _Origin.LIBRARY
    return _Origin.USER


class Places:
    """Looks at the stack above a call; remembers what file names and modules are."""

    def __init__(self) -> None:
        self._origins: dict[str, _Origin] = {}
        self._paths: weakref.WeakKeyDictionary[torch.nn.Module, _Paths] = (
            weakref.WeakKeyDictionary()
        )

    def of_call(self, *, in_engine: bool) -> Place | None:
        """The place of the call that is being made.

        For an operator of the autograd engine it is that of the forward call it belongs to,
        if that is known; the user's own code inside the engine, a hook or a custom
        ``backward``, comes first on the stack.

        Returns
        -------
        Place or None
            None if the call comes out of a graph that torch.compile made, at run time. It
            has generated code between itself and dynamo, or the autograd engine, and no code
            of the user. What runs eagerly after a graph break comes from the user's code.
        """
        forward = origin_of_node() if in_engine else None
        origins = self._origins
        stack: list[str] = []
        innermost: FrameType | None = None
        outermost: FrameType | None = None
        is_close, is_generated = True, False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            name = code.co_filename
            origin = origins.get(name)
            if origin is None:
                origin = origins[name] = _classify(name)
            if origin is _Origin.USER:
                is_close = False
                if len(stack) < STACK_FRAMES:
                    stack.append(_line(frame))
            elif origin is _Origin.LIBRARY:
                if code is _CALL_IMPL:
                    innermost = innermost or frame
                    outermost = frame
                elif code is _RUN_BACKWARD:
                    is_close = False
                    if forward is not None:
                        break
            elif is_close:
                is_generated = is_generated or origin is _Origin.COMPILED
                if is_generated and (in_engine or origin is _Origin.DYNAMO):
                    return None
            frame = frame.f_back
        if forward is not None:
            lines = (*stack, *forward.stack)[:STACK_FRAMES]
            return Place(forward.module, lines, forward.forward)
        return Place(self._module(innermost, outermost), tuple(stack))

    def _module(self, inner: FrameType | None, outer: FrameType | None) -> str:
        if inner is None or outer is None:
            return ""
        module, root = inner.f_locals.get("self"), outer.f_locals.get("self")
        if not isinstance(module, torch.nn.Module) or not isinstance(root, torch.nn.Module):
            return ""
        paths = self._paths.get(root)
        if paths is None:
            paths = self._paths[root] = _Paths()
        name = type(root).__name__
        path = paths.of(root, module)
        return f"{name}.{path}" if path else name


class _Paths:
    """Dotted paths of the modules below one root."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}

    def of(self, root: torch.nn.Module, module: torch.nn.Module) -> str:
        """Path of `module` below `root`; its class name if it is not below it."""
        path = self._look(module)
        if path is None:  # a new module, or one whose id belonged to another
            self._known = {
                id(child): (weakref.ref(child), name) for name, child in root.named_modules()
            }
            path = self._look(module)
        if path is None:
            path = type(module).__name__
            self._known[id(module)] = (weakref.ref(module), path)
        return path

    def _look(self, module: torch.nn.Module) -> str | None:
        entry = self._known.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Settings:
    """Reads torch's settings at a call; knows once which devices and versions there are."""

    def __init__(self) -> None:
        self._device_types = ["cpu", *(kind for kind in ("cuda", "npu", "xpu") if _has(kind))]
        self._torch_version = str(torch.__version__)
        self._npu_version = npu_version()

    def context(self, place: Place, device: str) -> dict[str, Any]:
        """Members of the `CallContext` of a call at `place` whose first tensor is on `device`."""
        return {
            "autocast": self._autocast(),
            "grad_enabled": torch.is_grad_enabled(),
            "inference_mode": torch.is_inference_mode_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "allow_tf32": _allow_tf32(device.partition(":")[0]),
            "default_dtype": DTYPE_NAMES[torch.get_default_dtype()],
            "device": device,
            "torch_version": self._torch_version,
            "torch_npu_version": self._npu_version,
            "module": place.module,
            "stack": place.stack,
            "forward": place.forward,
        }

    def _autocast(self) -> dict[str, str]:
        return {
            kind: DTYPE_NAMES[torch.get_autocast_dtype(kind)]
            for kind in self._device_types
            if torch.is_autocast_enabled(kind)
        }


def npu_version() -> str:
    """Version of torch_npu if the program has imported it, else ""."""
    return str(getattr(sys.modules.get("torch_npu"), "__version__", ""))


def _has(kind: str) -> bool:
    module: Any = getattr(torch, kind, None)
    try:
        return module is not None and bool(module.is_available())
    except Exception:  # a backend that is half there is not used
        return False


def _allow_tf32(kind: str) -> bool:
    """Whether fp32 products of this device may run at reduced precision (TF32, HF32)."""
    try:
        if kind == "cuda":
            backends = torch.backends
            return bool(backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32)
        if kind == "npu":
            npu: Any = torch.npu  # type: ignore[attr-defined]
            return bool(npu.matmul.allow_hf32 or npu.conv.allow_hf32)
        return torch.get_float32_matmul_precision() != "highest"
    except (AttributeError, RuntimeError):  # an older or mixed way of setting it
        return False
