"""A GPU that is played on the CPU: it counts what it is asked for, and its graphs are recordings.

`torch.cuda` is replaced as far as the engine needs it for CUDA graphs. A capture keeps the
operators that ran, with the tensors that they read and wrote; to replay it is to run the same
operators on the same tensors, and no Python of ours. As on a GPU, what a capture has not seen it
does not do again.

What happens outside of graphs is noted, operator by operator, while somebody watches. What would
make the host wait for the device raises in a capture, and wherever torch is told to refuse it.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import engine.choice.coupling
import engine.choice.logprobs
import engine.device
import engine.forward.graphs
import engine.forward.operators
import target_node.worker

UPLOAD, DOWNLOAD = "upload", "download"  # through memory that is pinned; the host goes on
LAUNCH, KERNEL = "launch", "kernel"  # of a graph, of an operator by itself
WAIT = "wait for an event"
BLOCKING, CAPTURE = "blocking call", "capture"


_aten = torch.ops.aten
# Operators whose outcome, or its shape, the host must know before it goes on.
_WAITING = {
    *(_aten._local_scalar_dense, _aten.item, _aten.is_nonzero, _aten.nonzero),
    *(_aten.nonzero_numpy, _aten.argwhere, _aten.masked_select),
    *(_aten.equal, _aten._unique, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive),
    *(_aten.bincount, _aten.allclose, _aten._assert_async),
}
_HALF_BYTES = (torch.bool, torch.uint8)


def _waits(func: Any, args: Any) -> bool:
    """Whether an operator would make the host wait on a GPU."""
    packet = func.overloadpacket
    if packet in (_aten.index, _aten.index_put, _aten.index_put_):
        return any(index is not None and index.dtype in _HALF_BYTES for index in args[1])
    if packet is _aten.repeat_interleave:
        return func is _aten.repeat_interleave.Tensor
    if packet is _aten.where:
        return func is _aten.where.default  # of a condition alone
    if packet is _aten._grouped_mm:  # in other types, torch fetches where each group ends
        return bool(args[0].dtype != torch.bfloat16)
    return packet in _WAITING or func.namespace == "transformers"  # a loop over the groups


class _FromHost(TorchFunctionMode):
    """Raises where numbers of the host become a tensor of the device."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.tensor and (kwargs or {}).get("device") is not None:
            raise RuntimeError("called a synchronizing CUDA operation (a copy from the host)")
        return func(*args, **(kwargs or {}))


class _Refusing(TorchDispatchMode):
    """Raises where the host would wait, as torch does where it is told to."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if _waits(func, args):
            raise RuntimeError(f"called a synchronizing CUDA operation ({func})")
        return func(*args, **(kwargs or {}))


class Stream:
    """Stands for a stream: which one is current is remembered."""

    def wait_stream(self, other: "Stream") -> None:
        """Nothing to wait for."""


class StandIn:
    """The device.

    noted     what it was asked for while somebody watched (`watch`), in order
    num_captures, streams  so far
    locked    bytes that were newly pinned so far: torch keeps what is given back, of each power of
              two by itself, until something is captured
    raises    whether the next captures fail, as torch says it at their end
    holds     whether it is still at work on all that it is asked for from now on
    pools     memory pool of each graph that was captured
    spoilt    pools in which a capture has failed: nothing can be captured in them any more
    """

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.num_captures = 0
        self.streams: list[Stream] = []
        self.usual = self.current = Stream()
        self.captured_on: Stream | None = None
        self.raises = False
        self.holds = False
        self.pools: list[int] = []
        self.spoilt: set[int] = set()
        self.num_pools = 0
        self.is_busy = False  # with a graph: what it does is not noted
        self.is_capturing = False
        self.refusing: contextlib.ExitStack | None = None  # what would make the host wait
        self.kept: list[torch.Tensor] = []  # so that no other tensor gets their memory
        self.there: set[int] = set()  # memory of the device, by address
        self.pinned: set[int] = set()
        self.locked: list[int] = []
        self.given_back: Counter[int] = Counter()  # pinned memory that nobody has, by its bytes

    def note(self, what: str) -> None:
        """Something was asked for."""
        self.noted.append(what)

    def new_pool(self) -> int:
        """In place of `torch.cuda.graph_pool_handle`."""
        self.num_pools += 1
        return self.num_pools

    def keep(self, place: set[int], *tensors: torch.Tensor) -> None:
        """From now on this memory belongs to a place."""
        for tensor in tensors:
            if (address := _address(tensor)) not in place:
                place.add(address)
                self.kept.append(tensor)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as if its memory were pinned."""
        size = 1 << max(tensor.nbytes - 1, 0).bit_length()
        if self.given_back[size]:
            self.given_back[size] -= 1
        else:
            self.locked.append(size)
        self.keep(self.pinned, tensor)
        given = tensor.view_as(tensor)
        weakref.finalize(given, self.given_back.update, (size,))
        return given

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[str]]:
        """What is asked for in here, in order."""
        self.noted = []
        with _Notes(self):
            yield self.noted


class Graph:
    """A CUDA graph.

    calls  what was captured, in order: operator, arguments, and of what it made the tensors that
           are not the memory of its arguments, each with its place among all that it made
    """

    def __init__(self, device: StandIn) -> None:
        self.device = device
        self.calls: list[tuple[Any, Any, Any, list[tuple[int, torch.Tensor]]]] = []

    def add(self, func: Any, args: Any, kwargs: Any, made: object) -> None:
        """Capture an operator; all of its tensors are memory of the device."""
        read, outputs = _tensors(args, kwargs), _tensors(made)
        inputs = {_address(tensor) for tensor in read}
        new = [each for each in enumerate(outputs) if _address(each[1]) not in inputs]
        self.calls.append((func, args, kwargs, new))
        self.device.keep(self.device.there, *read, *outputs)

    def replay(self) -> None:
        """Run what was captured again."""
        self.device.note(LAUNCH)
        self.device.is_busy = True
        try:
            for func, args, kwargs, new in self.calls:
                again = func(*args, **kwargs)
                if new:
                    made = _tensors(again)
                    for place, old in new:
                        old.copy_(made[place])
        finally:
            self.device.is_busy = False


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if _waits(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing ({func})")
        made = func(*args, **(kwargs or {}))
        self.graph.add(func, args, kwargs or {}, made)
        return made


class _Notes(TorchDispatchMode):
    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        device = self.device
        inputs = _tensors(args, kwargs)
        is_there = [_address(tensor) in device.there for tensor in inputs]
        if device.is_busy or not any(is_there):
            return made
        if func is torch.ops.aten.copy_.default and is_there[0] != is_there[1]:
            device.note(self._copy(inputs, is_from=is_there[1], is_free=bool(args[2:] and args[2])))
        elif _waits(func, args):
            device.note(BLOCKING)
        elif func._schema.is_mutable or not {*map(_address, _tensors(made))} <= {
            *map(_address, inputs)
        }:
            device.note(KERNEL)
            device.keep(device.there, *_tensors(made))
        return made

    def _copy(self, tensors: list[torch.Tensor], *, is_from: bool, is_free: bool) -> str:
        """What a copy between host and device is; `is_from` the device."""
        here = tensors[0 if is_from else 1]
        if not is_free or _address(here) not in self.device.pinned:
            return BLOCKING
        return DOWNLOAD if is_from else UPLOAD


class _Capturing:
    """In place of `torch.cuda.graph`."""

    def __init__(self, graph: Graph, *, pool: int, stream: Stream, **_: object) -> None:
        self.graph, self.pool, self.stream = graph, pool, stream
        self.modes = _Capture(graph), _FromHost()

    def __enter__(self) -> None:
        device = self.graph.device
        device.num_captures += 1
        device.given_back.clear()
        device.note(CAPTURE)
        device.captured_on = device.current = self.stream
        if self.pool in device.spoilt:
            raise RuntimeError("a capture that has failed still uses this pool")
        device.is_busy = device.is_capturing = True
        for mode in self.modes:
            mode.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        device = self.graph.device
        for mode in reversed(self.modes):
            mode.__exit__(kind, error, at)
        device.is_busy = device.is_capturing = False
        if device.raises or kind is not None:
            device.spoilt.add(self.pool)
        else:
            device.pools.append(self.pool)
        if device.raises:
            raise RuntimeError("operation failed due to a previous error during capture")
        if kind is None:
            device.current = device.usual


class _Event:
    def __init__(self, device: StandIn) -> None:
        self.device = device
        self.is_behind = False  # what the device may still hold back

    def record(self, stream: Stream) -> None:
        """Every event says on which stream: the current device may be another one."""
        self.is_behind = self.device.holds

    def query(self) -> bool:
        return not (self.is_behind and self.device.holds)

    def synchronize(self) -> None:
        self.device.note(WAIT)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let whatever runs on the CPU be on a GPU as the engine sees it."""
    made = StandIn()
    # On a GPU no weight is laid out anew: products are operators of torch, which recordings see.
    monkeypatch.setattr(engine.forward.operators, "tiled_product", lambda *_: None)
    monkeypatch.setattr(engine.forward.operators, "packed_product", lambda *_: None)

    def new_stream(*_: object) -> Stream:
        made.streams.append(Stream())
        return made.streams[-1]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, made.current, made.is_busy = made.current, stream, True
        yield
        made.current, made.is_busy = before, False

    def set_stream(stream: Stream) -> None:
        made.current = stream

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        return made.pin(tensor.clone())

    def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return made.pin(torch.empty(*shape, dtype=dtype))

    def blocking(method: Callable[..., object]) -> Callable[..., object]:
        def call(tensor: torch.Tensor, *args: object, **options: object) -> object:
            if made.is_capturing or made.refusing is not None:
                raise RuntimeError("called a synchronizing CUDA operation (a copy to the host)")
            if _address(tensor) in made.there:
                made.note(BLOCKING)
            return method(tensor, *args, **options)

        return call

    def refuse(mode: str | int) -> None:
        if made.refusing is not None:
            made.refusing.close()
        made.refusing = contextlib.ExitStack() if mode in ("error", 2) else None
        if made.refusing is not None:
            made.refusing.enter_context(_Refusing())
            made.refusing.enter_context(_FromHost())

    for name, value in {
        "get_sync_debug_mode": lambda: 0 if made.refusing is None else 2,
        "set_sync_debug_mode": refuse,
        "graph_pool_handle": made.new_pool,
        "Stream": new_stream,
        "current_stream": lambda _: made.current,
        "set_stream": set_stream,
        "stream": on,
        "graph": _Capturing,
        "CUDAGraph": lambda: Graph(made),
        "Event": lambda: _Event(made),
        "synchronize": lambda *_: made.note(BLOCKING),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(engine.device, "pinned", pinned)
    for name in ("tolist", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, blocking(getattr(torch.Tensor, name)))
    monkeypatch.setattr(engine.forward.graphs, "RECORDED_DEVICES", ("cpu",))
    for module in WITH_IS_HOST:
        monkeypatch.setattr(module, "is_host", lambda _: False)
    return made


WITH_IS_HOST = engine.device, engine.choice.coupling, engine.choice.logprobs, target_node.worker


def _tensors(*trees: object) -> list[torch.Tensor]:
    """All tensors in the arguments or the results of an operator, in order.

    Torch's `tree_leaves` finds the same, and takes most of the time of a replay.
    """
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, list | tuple):
            found += _tensors(*tree)
        elif isinstance(tree, dict):
            found += _tensors(*tree.values())
    return found


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
