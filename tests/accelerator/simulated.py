"""A device `gpu` made of Python alone, to run what was written for an accelerator where there is none.

Its memory is the host's and its numbers are those of the CPU, but it refuses to be mixed with the host, it counts what
an accelerator would be given (`COUNTS`), and copies to pinned memory arrive only when the host has waited for them.
torch calls it PrivateUse1. Registration cannot be undone: import this only in a process of its own
(tests/test_accelerator.py starts one).

Not modelled: time, memory that runs out, NCCL, autograd's own thread of a device, and how kernels round.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.accelerator.order import ORDER, rows_in
from tests.accelerator.streams import ALLOCATED, SimulatedModule, is_pinned

aten = torch.ops.aten
_setup_privateuseone_for_python_backend("gpu", backend_module=SimulatedModule())
GPU = torch.device("gpu", 0)

COUNTS: Counter[str] = Counter()  # sync, upload, download, launch, and each with the name of the op
SEQUENCE: list[str] = []  # names of launches, uploads and downloads since `counted` began

VIEWS = {
    *("view", "select", "slice", "unsqueeze", "squeeze", "t", "transpose", "permute", "expand", "as_strided", "detach"),
    *("alias", "split", "split_with_sizes", "unbind", "_unsafe_view", "_reshape_alias", "chunk", "diagonal", "unfold"),
    "view_as",
}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
SYNCS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "equal"),
    *("is_nonzero", "bincount"),
}
MOVES = {"copy_", "_to_copy", "_copy_from"}
INDEXED = {"index_select", "index_copy_", "index", "gather", "cat", "stack"}  # take no scalar of the host either


class GpuTensor(torch.Tensor):
    """A tensor of the device; `raw` has its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls: type["GpuTensor"], raw: Tensor) -> "GpuTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=GPU
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw
        ALLOCATED[raw.untyped_storage().data_ptr()] = raw.untyped_storage().nbytes()
        ORDER.made(self, raw)

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GpuTensor({self.raw!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch.no_grad():
            copied: Tensor = self.detach().clone(memory_format=torch.preserve_format)
        if getattr(self, "_is_param", False):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # a view has to be of the kind of its base
            if _is_composite(func):  # autograd would have decomposed it
                return func.decompose(*args, **(kwargs or {}))
            return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    _refuse_strays(name, args, kwargs)
    if name == "copy_" and not isinstance(args[0], GpuTensor):
        GRAPH.refuse(name)
        return _copy_to_host(args[0], args[1], non_blocking=bool((args[2:] or [kwargs.get("non_blocking")])[0]))
    target = kwargs.get("device")
    if target is not None and torch.device(target).type == "cpu":
        GRAPH.refuse(name)
        copied = _host_copy(func, name, args, kwargs)
        return copied
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kind = _kind(name, args, kwargs)
    if kind in ("sync", "upload"):
        GRAPH.refuse(name)
    GRAPH.before(func, args, kwargs)
    _count(kind, name)
    raw_args, raw_kwargs = tree_map(_unwrap, (args, kwargs))
    out = KERNELS.get(name, func)(*raw_args, **raw_kwargs)
    if GRAPH.recording is None:
        _note(func, name, args, kwargs, out)
    elif kind == "launch":
        GRAPH.recording.append(Kernel(func, name, args, kwargs, out))
    if not isinstance(out, Tensor | tuple | list):
        return out
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_wrap, out))


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _refuse_strays(name: str, args: Any, kwargs: Any) -> None:
    """Raise what an accelerator would: tensors of the host are no operands, except scalars."""
    host = [
        each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and not isinstance(each, GpuTensor)
    ]
    strays = [tuple(each.shape) for each in host if each.dim() or name in INDEXED]
    if strays and name not in MOVES:
        raise RuntimeError(f"{name}: tensors of the host {strays} among those of the device")


def _kind(name: str, args: Any, kwargs: Any) -> str:
    if name in SYNCS or (name == "index" and any(_is_mask(each) for each in args[1])):
        return "sync"
    if name in MOVES and any(not isinstance(each, GpuTensor) for each in tree_leaves(args) if isinstance(each, Tensor)):
        return "upload"
    return "view" if name in VIEWS else "allocation" if name in ALLOCATIONS else "launch"


def _is_mask(index: Any) -> bool:
    return isinstance(index, GpuTensor) and index.dtype in (torch.bool, torch.uint8)


def _copy_to_host(target: Tensor, source: GpuTensor, non_blocking: bool) -> Tensor:
    ORDER.kernel("download", [source.raw], [], [])
    if not (non_blocking and is_pinned(target)):
        _count("sync", "copy to host")
        target.copy_(source.raw)
        return target
    _count("download", "copy_")
    value = source.raw.clone()
    target.view(torch.uint8).fill_(0xA5)  # until it arrives

    def land() -> None:
        with torch.inference_mode():  # the host may ask from anywhere
            target.copy_(value)

    ORDER.arrives_later(land)
    return target


def _host_copy(func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
    """`.cpu()` and the like, for which the host waits."""
    _count("sync", f"{name} to host")
    raw_args, raw_kwargs = tree_map(_unwrap, (args, kwargs))
    ORDER.kernel("download", [raw_args[0]], [], [])
    ORDER.host_waits(ORDER.clock(ORDER.stream))
    out: Tensor = func(*raw_args, **raw_kwargs)
    return out.clone() if out is raw_args[0] else out


def _note(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
    """Tell the order of things which memory a kernel reads and writes."""
    if name in VIEWS:
        return
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for argument, value in _named(func, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(each.raw for each in tree_leaves(value) if isinstance(each, GpuTensor))
        for each in tree_leaves(value):
            if isinstance(each, Tensor) and not isinstance(each, GpuTensor) and is_pinned(each):
                ORDER.host_writes(each)
                reads.append(each)
    known = {each.untyped_storage().data_ptr() for each in (*reads, *writes)}
    results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    fresh = [each for each in results if each.untyped_storage().data_ptr() not in known]
    rows_read = rows_in(reads[1]) if name == "index_select" and len(reads) == 2 else None
    rows_written = rows_in(reads[0]) if name == "index_copy_" and len(reads) == 2 else None
    ORDER.kernel(name, [] if name in ALLOCATIONS else reads, writes, fresh, rows_read, rows_written)
    if name in SYNCS:
        ORDER.host_waits(ORDER.clock(ORDER.stream))


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an op with what its schema says of them."""
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    by_name = {argument.name: argument for argument in declared}
    yield from ((by_name[name], value) for name, value in kwargs.items())


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


def _count(kind: str, name: str) -> None:
    COUNTS[kind] += 1
    COUNTS[f"{kind} {name}"] += 1
    if kind in ("sync", "upload", "download", "launch"):
        SEQUENCE.append(name)


def _unwrap(value: Any) -> Any:
    return value.raw if isinstance(value, GpuTensor) else value


def _wrap(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) and not isinstance(value, GpuTensor) else value


class Kernel(NamedTuple):
    """A kernel of a graph, with the memory that it always uses."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    out: Any


class Capture:
    """The graph that is being recorded, if any. Nothing is computed meanwhile: memory is as before at the end."""

    def __init__(self) -> None:
        self.recording: list[Kernel] | None = None
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def refuse(self, name: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what a kernel is about to overwrite."""
        if self.recording is None:
            return
        for argument, value in _named(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for each in tree_leaves(value):
                    if isinstance(each, GpuTensor):
                        whole = torch.empty(0, dtype=torch.uint8).set_(each.raw.untyped_storage())
                        self._before.setdefault(whole.data_ptr(), (whole, whole.clone()))

    def end(self) -> list[Kernel]:
        for memory, before in self._before.values():
            memory.copy_(before)
        self._before.clear()
        recorded, self.recording = self.recording or [], None
        for kernel in recorded:
            for each in _fresh(kernel):
                each.fill_(torch.nan) if each.is_floating_point() else None
        return recorded


def _fresh(kernel: Kernel) -> list[Tensor]:
    """Return the results of a kernel that it does not share with its arguments."""
    known = {each.raw.untyped_storage().data_ptr() for each in tree_leaves(kernel.args) if isinstance(each, GpuTensor)}
    results = [each for each in tree_leaves(kernel.out) if isinstance(each, Tensor)]
    return [each for each in results if each.untyped_storage().data_ptr() not in known]


GRAPH = Capture()


class CUDAGraph:
    """Replays kernels on the memory that they were recorded with, whatever the host has done since."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "another thread uses the device, too"
        GRAPH.recording = []

    def capture_end(self) -> None:
        self.kernels = GRAPH.end()

    def replay(self) -> None:
        _count("launch", "graph")
        with torch.inference_mode(False), torch.no_grad():
            for kernel in self.kernels:
                args, kwargs = tree_map(_unwrap, (kernel.args, kernel.kwargs))
                out = KERNELS.get(kernel.name, kernel.func)(*args, **kwargs)
                results = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
                places = [each for each in tree_leaves(kernel.out) if isinstance(each, Tensor)]
                fresh = {id(each) for each in _fresh(kernel)}
                for place, result in zip(places, results, strict=True):
                    if id(place) in fresh:
                        place.copy_(result)
                _note(kernel.func, kernel.name, kernel.args, kernel.kwargs, kernel.out)


SimulatedModule.CUDAGraph = CUDAGraph  # type: ignore[attr-defined]
SimulatedModule.graph_pool_handle = lambda module: None  # type: ignore[attr-defined]


def counted(function: Callable[[], object]) -> Counter[str]:
    """Return what a call costs."""
    COUNTS.clear()
    SEQUENCE.clear()
    function()
    return Counter(COUNTS)


# Ops for which the CPU has no kernel, because torch takes another way there.


def _lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates + sum(biases)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - tanh * tanh)
    grad_c = grad_c if grad_cy is None else grad_c + grad_cy
    parts = [
        grad_c * g * i * (1 - i),
        grad_c * cx * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_hy * tanh * o * (1 - o),
    ]
    gates = torch.cat(parts, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, b_ih: Tensor, b_hh: Tensor
) -> tuple[Tensor, Tensor]:
    ir, iz, in_ = (input_gates + b_ih).chunk(3, 1)
    hr, hz, hn = (hidden_gates + b_hh).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_r = grad_n * hn * r * (1 - r)
    of_inputs = torch.cat([grad_r, grad_z, grad_n], 1)
    of_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (of_inputs.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_inputs, of_hidden, grad_hy * z, *biases


KERNELS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


# Factories have no tensor that would dispatch them.

SKIPPED = ("sparse", "quantized", "cudnn", "mkldnn", "nested", "from_file", "_dep_token", "_pin")


def _factories() -> Iterator[tuple[str, Any]]:
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if not full.startswith("aten::") or any(word in full for word in SKIPPED):
            continue
        op = getattr(getattr(aten, name, None), overload or "default", None)
        if op is not None and _is_factory(op._schema.arguments):
            yield full.removeprefix("aten::"), op


def _is_factory(arguments: Sequence[Any]) -> bool:
    return any(each.name == "device" for each in arguments) and not any(
        "Tensor" in str(each.type) for each in arguments
    )


def _factory(op: Any) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        _count("allocation" if _name(op) in ALLOCATIONS else "launch", _name(op))
        with torch.inference_mode(False):
            host = {**kwargs, "device": torch.device("cpu"), "pin_memory": None}
            raw: Tensor = op(*args, **host)
            if GRAPH.recording is not None:
                GRAPH.recording.append(Kernel(op, _name(op), args, host, raw))
            ORDER.kernel(_name(op), [], [], [raw])
            return GpuTensor(raw)

    return make


LIBRARY = torch.library.Library("aten", "IMPL")
for _op_name, _op in _factories():
    LIBRARY.impl(_op_name, _factory(_op), "PrivateUse1")


class Generator(torch.Generator):
    """Draws on the host and says that it is wherever it was asked to be."""

    _device: torch.device

    def __new__(cls, device: torch.device | str = "cpu") -> "Generator":
        made = super().__new__(cls, "cpu")
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


torch.Generator = Generator  # type: ignore[misc]
torch.autograd.set_multithreading_enabled(False)  # backward runs in the thread that calls it
