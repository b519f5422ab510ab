"""Compiled programs are found again by later starts, which need not trace the model anew.

torch keeps what the C++ compiler has made, but no graph whose weights are constants that are packed
for its kernels: it would have to store the weights. So a later start traces, lowers and writes the
same source once more, which is half of the work. We keep what is missing: where the source lies,
which input is which, and for each constant of what weight it is made, and how. Another model of
the same shape uses the same program with its own weights.

A program is kept only if all of this is certain: each constant is a weight, or one weight alone in
blocks, to the bit; the program takes every length; called directly it says what it says through
torch. Else torch's own cache has to do. It reaches into torch, whose version is pinned; where that
has changed, nothing is kept.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

LENGTH = "length"  # the input that is no tensor: the visible slots
_FEWEST_SLOTS = 2  # of one slot, and of all, a compiler makes another program
_INTERLEAVED = (1, 2, 4)  # rows of a block that lie in each other, as vector instructions want them
# What is raised where torch is not as we know it, or a file is not as we wrote it.
_UNLIKE = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError)
_Raw = Callable[[list[Any]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Constant:
    """How a constant of a program is made.

    weight  name of a parameter or buffer of the module
    shape   empty: as the weight is; else [blocks, K, width] of a matrix [N, K]
    interleaved  rows of K that lie in each other
    """

    weight: str
    shape: tuple[int, ...] = ()
    interleaved: int = 1

    def made_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The constant, of a weight."""
        return blocked(weight, self.shape, self.interleaved) if self.shape else weight


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is called directly.

    raw      takes its inputs as a list, which it empties
    inputs   for each of them its place among the tensors of a call, or LENGTH
    """

    raw: _Raw
    inputs: tuple[int | str, ...]

    def __call__(self, tensors: Sequence[torch.Tensor], num_visible: int) -> list[torch.Tensor]:
        """Run it; `tensors` in the order of `keep`."""
        return self.raw(
            [num_visible if isinstance(one, str) else tensors[one] for one in self.inputs]
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a program of torch's: what it runs, with what."""

    raw: Any
    inputs: tuple[Any, ...]


def blocked(weight: torch.Tensor, shape: Sequence[int], interleaved: int = 1) -> torch.Tensor:
    """A matrix [N, K] as inductor's kernels read it: [blocks, K, width], filled up with zeros."""
    num_blocks, depth, width = shape
    padded = F.pad(weight.detach().T, (0, num_blocks * width - len(weight)))
    made = padded.reshape(depth, num_blocks, width).transpose(0, 1).contiguous()
    if interleaved > 1:
        made = made.view(num_blocks, depth // interleaved, interleaved, width).transpose(2, 3)
    return made.reshape(num_blocks, depth, width)


def program_key(*about: object) -> str:
    """A name for a program: a hash of all that it was made of, but the numbers in the weights."""
    about = torch.__version__, torch.backends.cpu.get_cpu_capability(), *about
    return hashlib.sha256(repr(about).encode()).hexdigest()


@contextlib.contextmanager
def calls() -> Iterator[list[Call]]:
    """Collect what torch's programs are called with in here."""
    from torch._inductor.output_code import CompiledFxGraph

    found: list[Call] = []
    patched: Any = CompiledFxGraph
    plain = patched.__call__

    def call(graph: Any, inputs: Sequence[Any]) -> Any:
        found.append(Call(graph.current_callable, tuple(inputs)))
        return plain(graph, inputs)

    patched.__call__ = call
    try:
        yield found
    finally:
        patched.__call__ = plain


class Lengths:
    """A compiler for `torch.compile`: inductor, and whether its last program takes every length.

    all     numbers of visible slots
    is_any  whether the program that was made last takes all of them
    """

    def __init__(self, num_slots: int) -> None:
        """num_slots  of a lane"""
        self.all = range(_FEWEST_SLOTS, num_slots)
        self.is_any = False

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Compile a graph."""
        from torch._inductor.compile_fx import compile_fx

        self.is_any = False
        made = compile_fx(graph, inputs)
        with contextlib.suppress(*_UNLIKE):
            self.is_any = self._holds(inputs)
        return made

    def _holds(self, inputs: Sequence[Any]) -> bool:
        """Whether nothing is demanded of the one number that changes."""
        (number,) = (one for one in inputs if isinstance(one, torch.SymInt))
        env = number.node.shape_env
        demanded = env.produce_guards_expression([number]) or "True"
        return all(env.evaluate_guards_expression(demanded, [length]) for length in self.all)


def keep(
    key: str,
    module: torch.nn.Module,
    call: Call,
    tensors: Sequence[torch.Tensor],
    num_visible: int,
    *,
    looked_up: Collection[str] = (),
) -> Program | None:
    """Note a program that torch has just made and called; returns it, or None: it is not certain.

    module     what was compiled
    tensors    that it was called with, in the caller's order
    looked_up  names of weights that are in no matrix product, and so never in blocks
    """
    try:
        loaded = _module_of(call.raw)
        inputs = tuple(_place(one, tensors, num_visible) for one in call.inputs)
        weights = _weights(module)
        constants = {
            name: _constant(getattr(loaded, name), weights, looked_up) for name in _names(loaded)
        }
        path = Path(loaded.__file__).relative_to(_folder())
        note = {
            "source": str(path),
            "inputs": inputs,
            "constants": {name: asdict(constant) for name, constant in constants.items()},
        }
        unfinished = _path(key).with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(note))
        unfinished.replace(_path(key))
    except _UNLIKE:
        return None
    return Program(call.raw, inputs)


def kept(key: str, module: torch.nn.Module) -> Program | None:
    """The program that an earlier start has kept, with the weights of `module`; None: there is
    none.
    """
    try:
        note = json.loads(_path(key).read_text())
        weights = _weights(module)
        constants = {
            name: Constant(**about | {"shape": tuple(about["shape"])})
            for name, about in note["constants"].items()
        }
        made = {name: one.made_of(weights[one.weight]) for name, one in constants.items()}
        from torch._inductor.codecache import PyCodeCache

        path = _folder() / note["source"]
        loaded = PyCodeCache.load_by_key_path(path.stem, str(path), attrs=made)
        return Program(loaded.call, tuple(note["inputs"]))
    except _UNLIKE:
        return None


def forget(key: str) -> None:
    """Let nobody find this program, if it is there."""
    with contextlib.suppress(OSError):
        _path(key).unlink()


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _path(key: str) -> Path:
    return _folder() / f"slipstream-program-{key}.json"


def _weights(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def _module_of(raw: Any) -> Any:
    """The Python module that torch has written around a program."""
    from torch._inductor.codecache import PyCodeCache

    (found,) = (one for one in PyCodeCache.modules if getattr(one, "call", None) is raw)
    return found


def _names(loaded: Any) -> list[str]:
    """The constants of a program, as torch's own module hands them to it."""
    tensors = {name for name, value in vars(loaded).items() if isinstance(value, torch.Tensor)}
    used = _code_names(loaded.call.__code__)
    return sorted(tensors & used)


def _code_names(code: Any) -> set[str]:
    return set(code.co_names).union(
        *(_code_names(one) for one in code.co_consts if hasattr(one, "co_names"))
    )


def _place(one: Any, tensors: Sequence[torch.Tensor], num_visible: int) -> int | str:
    """Which of the caller's inputs this is. Raises ValueError: it is none, or two of them."""
    if not isinstance(one, torch.Tensor):
        if one != num_visible:
            raise ValueError("an input that we do not know")
        return LENGTH
    (place,) = (number for number, tensor in enumerate(tensors) if _is_same(one, tensor))
    return place


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _constant(
    value: torch.Tensor, weights: Mapping[str, torch.Tensor], looked_up: Collection[str]
) -> Constant:
    """Of what a constant is made. Raises ValueError: of nothing that we know, or it is open.

    Weights that are equal to the bit would be open: another model may have others there.
    """
    for name, weight in weights.items():
        if _is_same(value, weight):
            return Constant(name)
    found = [
        Constant(name, tuple(value.shape), interleaved)
        for name, weight in weights.items()
        if name not in looked_up and _may_be(value, weight)
        for interleaved in _INTERLEAVED
        if value.shape[1] % interleaved == 0
        and _begins_alike(value, weight, interleaved)
        and torch.equal(value, blocked(weight, value.shape, interleaved))
    ]
    (constant,) = found
    return constant


def _may_be(value: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a matrix [N, K] fills these blocks [blocks, K, width], the last one in part."""
    if (value.dim(), weight.dim()) != (3, 2):
        return False
    num_blocks, depth, width = value.shape
    is_filled = (num_blocks - 1) * width < len(weight) <= num_blocks * width
    return weight.shape[1] == depth and is_filled and weight.dtype == value.dtype


def _begins_alike(value: torch.Tensor, weight: torch.Tensor, interleaved: int) -> bool:
    """Whether the first block may be made of this matrix: most others differ there."""
    first = (1, *value.shape[1:])
    return torch.equal(value[:1], blocked(weight[: first[2]], first, interleaved))
