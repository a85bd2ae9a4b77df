"""megatron-core without a GPU: every place where its code says "cuda", answered for the CPU.

Two layers, because the second costs time in hot loops:

* ``install()`` replaces a dozen names for as long as it is in force: the current device, streams, events, the random
  number tracker. Free at run time.
* ``device_backend("cpu")`` also turns the literal ``"cuda"`` in factory calls into ``"cpu"`` (schedules, optimizer and
  rotary code name it), through a ``TorchFunctionMode`` that sees every torch call. Enter it around model building, the
  forward-backward schedules, the optimizer step and checkpoints; generation can run outside.

Nothing is replaced when the device is a GPU. ``uninstall()`` puts every name back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from p3o_launch.runtime.mcore.compat import quiet_import

_CPU = torch.device("cpu")
_ABSENT = object()


class _Depth(threading.local):
    """How many ``cpu_backend`` blocks enclose the calling code; torch's modes belong to a thread, so this does."""

    blocks = 0


_DEPTH = _Depth()


class NullStream:
    """Stands in for ``torch.cuda.Stream``: a CPU has one stream, and it is always synchronous.

    A class and not a lambda, because annotations such as ``torch.cuda.Stream | None`` are evaluated.
    """

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _stream: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> object:
        return event if event is not None else NullEvent()


class NullEvent:
    """Stands in for ``torch.cuda.Event``."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, _stream: object = None) -> None: ...

    def wait(self, _stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: object) -> float:
        return 0.0


def _is_accelerator(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites the device arguments of every torch call made while it is active."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _type_name(args[0])
        if "device" in kwargs and _is_accelerator(kwargs["device"]):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda_name(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda_name(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and _is_accelerator(value)


def _type_name(tensor: torch.Tensor) -> str:
    """The answer Megatron's gradient clipping and optimizers assert on.

    float64 counts as their full-precision type too: the assertion only tells main gradients from half-precision ones.
    """
    names = {
        torch.float64: "torch.cuda.FloatTensor",
        torch.float32: "torch.cuda.FloatTensor",
        torch.float16: "torch.cuda.HalfTensor",
        torch.bfloat16: "torch.cuda.BFloat16Tensor",
    }
    if tensor.device.type == "cpu" and tensor.dtype in names:
        return names[tensor.dtype]
    with torch._C.DisableTorchFunction():
        return str(tensor.type())


@dataclass
class _Installed:
    """What ``install`` replaced, in order."""

    undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.undo.append((owner, name, getattr(owner, name, _ABSENT)))
        setattr(owner, name, value)


_INSTALLED: _Installed | None = None


def is_installed() -> bool:
    """Whether ``install`` is in force."""
    return _INSTALLED is not None


def is_active() -> bool:
    """Whether the calling code runs inside ``device_backend("cpu")``."""
    return _DEPTH.blocks > 0


def install() -> None:
    """Answer for the CPU where megatron-core asks CUDA. Idempotent."""
    global _INSTALLED
    if _INSTALLED is not None:
        return
    done = _Installed()
    for name in ("current_stream", "default_stream"):
        done.replace(torch.cuda, name, lambda *_, **__: NullStream())
    done.replace(torch.cuda, "current_device", lambda: _CPU)
    done.replace(torch.cuda, "synchronize", lambda *_, **__: None)
    done.replace(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    done.replace(torch.cuda, "Stream", NullStream)
    done.replace(torch.cuda, "Event", NullEvent)
    done.replace(torch.cuda, "manual_seed", torch.manual_seed)
    done.replace(torch.Tensor, "cuda", lambda self, *_, **__: self)
    random = quiet_import("megatron.core.tensor_parallel.random")
    done.replace(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    done.replace(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    done.replace(random, "_CUDA_RNG_STATE_TRACKER", _cpu_tracker_class()())
    done.replace(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    done.replace(quiet_import("megatron.core.optimizer.clip_grads"), "l2_norm_impl", _l2_norm)
    experts = quiet_import("megatron.core.transformer.moe.moe_utils")
    if not hasattr(experts, "te_general_gemm"):
        # The router asks for this name even when Transformer Engine, which would bring it, is absent.
        done.replace(experts, "te_general_gemm", None)
    dispatcher = quiet_import("megatron.core.transformer.moe.token_dispatcher")
    done.replace(dispatcher, "maybe_move_tensor_to_cpu", _on_host)
    _INSTALLED = done


def uninstall() -> None:
    """Put back every name ``install`` replaced. Idempotent."""
    global _INSTALLED
    if _INSTALLED is None:
        return
    for owner, name, value in reversed(_INSTALLED.undo):
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    _INSTALLED = None


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Token counts for an exchange between experts. Megatron converts them on their way from the GPU only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _l2_norm(
    _chunk: int, _overflow: object, tensor_lists: Sequence[Sequence[torch.Tensor]], *_: object
) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, shape [1]. Megatron's fallback rounds it to float32 whatever the gradients are."""
    norms = [torch.linalg.vector_norm(tensor) for tensors in tensor_lists for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _cpu_tracker_class() -> type:
    """Megatron's random number tracker with the CPU generator in the place of the GPU's."""
    base = quiet_import("megatron.core.tensor_parallel.random").CudaRNGStatesTracker

    class CpuRNGStatesTracker(base):  # type: ignore[misc, valid-type]
        """Same interface and names; one generator, the CPU's, is swapped in and out."""

        def add(self, name: str, seed: int) -> None:
            if name in self.states_ or seed in self.seeds_:
                raise ValueError(f"random state {name!r} or its seed {seed} is tracked already")
            self._is_initialized = True
            self.seeds_.add(seed)
            before = torch.get_rng_state()
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            if name not in self.states_:
                raise ValueError(f"random state {name!r} is not tracked; seed the rank first")
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    return CpuRNGStatesTracker


@contextlib.contextmanager
def cpu_backend() -> Iterator[None]:
    """``install`` if need be, and read ``"cuda"`` as ``"cpu"`` in every torch call of the block. May be nested."""
    fresh = not is_installed()
    install()
    outermost = not is_active()
    _DEPTH.blocks += 1
    try:
        # One mode is enough however deep the nesting: each further one would cost its time on every call.
        with _CudaMeansCpu() if outermost else contextlib.nullcontext():
            yield
    finally:
        _DEPTH.blocks -= 1
        if fresh:
            uninstall()


def device_backend(device: str) -> contextlib.AbstractContextManager[None]:
    """``cpu_backend()`` when ``device`` is ``"cpu"``; nothing at all on a GPU."""
    return cpu_backend() if device == "cpu" else contextlib.nullcontext()
