"""Find compiled programs of earlier starts again, so that the model need not be traced anew.

Torch's cache keeps what the C++ compiler has made, but no graph whose constants are weights packed
for its kernels, because it would have to store the weights. So a later start traces, lowers and
writes the same source again, which is half of the work. This module keeps what is missing: where
the program's library is (a shared object, made by the C++ compiler), which input is which, and for
each constant from which weight it is made, and how. Another model of the same shapes uses the same
program with its own weights. A later start opens the library itself, in milliseconds: to import
torch's compiler takes a second.

A program is kept only if all of this is certain: each constant is bit by bit a weight, or a single
weight packed into blocks, by inductor or by oneDNN; the program takes every length; and called
directly it gives the same result as called through torch. Otherwise only torch's own cache is used.
The module relies on internals of torch, whose version is pinned; with another torch nothing is
kept. A library is opened only if it has the bytes that it was kept with: to run a
damaged one may end the process.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint.files import one_line

LENGTH = "length"  # stands for the input that is no tensor: the number of visible slots
_FEWEST_SLOTS = 2  # for one visible slot, and for all, the compiler would make another program
_INTERLEAVED = (1, 2, 4)  # numbers of interleaved rows in a block, as vector instructions need them
# Errors if torch's internals differ, or a file is not as this module writes it.
_UNLIKE = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError)
# Name of a library's function; it takes and returns lists of pointers to tensors.
_ENTRY = "inductor_entry_cpp"
_Entry = Callable[[list[Any]], list[Any]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Constant:
    """How a constant of a program is made from a weight.

    weight  name of a parameter or buffer of the module
    shape   (): the constant is the weight itself; else the shape [blocks, K, width] of the blocks
            into which the matrix [N, K] is packed
    interleaved  number of consecutive rows of K that are interleaved in a block
    num_rows  0, or for products of how many rows oneDNN lays the matrix out, in a way of its own
    """

    weight: str
    shape: tuple[int, ...] = ()
    interleaved: int = 1
    num_rows: int = 0

    def made_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the constant made from `weight`."""
        if self.num_rows:
            reorder = torch.ops.mkldnn._reorder_linear_weight
            made: torch.Tensor = reorder(weight.detach(), self.num_rows)
            return made
        return blocked(weight, self.shape, self.interleaved) if self.shape else weight


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program that is called directly, without torch's checks.

    entry      the function of the program's library
    inputs     per input, its index among the tensors of a call, or LENGTH
    constants  the tensors that follow the inputs
    """

    entry: _Entry
    inputs: tuple[int | str, ...]
    constants: tuple[torch.Tensor, ...]

    def __call__(self, tensors: Sequence[torch.Tensor], num_visible: int) -> list[torch.Tensor]:
        """Run the program; return its outputs. `tensors` in the order that `keep` was given."""
        length = torch.tensor(num_visible)
        given = [length if isinstance(one, str) else tensors[one] for one in self.inputs]
        pointers = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([*given, *self.constants])
        made: list[torch.Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(
            self.entry(pointers)
        )
        return made


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call of a compiled program: its function and its inputs."""

    raw: Any
    inputs: tuple[Any, ...]


def blocked(weight: torch.Tensor, shape: Sequence[int], interleaved: int = 1) -> torch.Tensor:
    """Return a matrix [N, K] packed as inductor's kernels read it: [blocks, K, width], zero-padded.

    shape        (blocks, K, width)
    interleaved  number of consecutive rows of K that are interleaved in a block
    """
    num_blocks, depth, width = shape
    padded = F.pad(weight.detach().T, (0, num_blocks * width - len(weight)))
    made = padded.reshape(depth, num_blocks, width).transpose(0, 1).contiguous()
    if interleaved > 1:
        made = made.view(num_blocks, depth // interleaved, interleaved, width).transpose(2, 3)
    return made.reshape(num_blocks, depth, width)


def program_key(*about: object) -> str:
    """Return a name for a program: a hash of all it depends on, except the weights' numbers."""
    made_for = torch.__version__, sys.implementation.cache_tag, os.uname().machine
    about = *made_for, torch.backends.cpu.get_cpu_capability(), *about
    return hashlib.sha256(repr(about).encode()).hexdigest()


@contextlib.contextmanager
def calls() -> Iterator[list[Call]]:
    """While inside, collect all calls of torch's compiled programs in the list that is yielded."""
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
    """Backend for `torch.compile`: inductor, noting whether its program takes every length.

    all     the numbers of visible slots that a program should take
    is_any  True if the program compiled last takes all of them
    """

    def __init__(self, num_slots: int) -> None:
        """Make the backend for lanes of `num_slots` slots."""
        self.all = range(_FEWEST_SLOTS, num_slots)
        self.is_any = False

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Compile a graph with inductor; return the compiled function."""
        from torch._inductor.compile_fx import compile_fx

        self.is_any = False
        made = compile_fx(graph, inputs)
        with contextlib.suppress(*_UNLIKE):
            self.is_any = self._holds(inputs)
        return made

    def _holds(self, inputs: Sequence[Any]) -> bool:
        """Return True if the program's conditions on the number of slots hold for every length."""
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
    """Write a note about a program that torch has just made, for later starts; return the program.

    Returns None, and writes nothing, if not everything about it is certain.

    key        the program's name (`program_key`)
    module     the module that was compiled
    call       the program's first call
    tensors    the tensors of that call, in the caller's order; the first has an element per row
    num_visible  the number of visible slots of that call
    looked_up  names of weights that are in no matrix product, and so never packed
    """
    try:
        loaded = _module_of(call.raw)
        inputs = tuple(_place(one, tensors, num_visible) for one in call.inputs)
        weights = _weights(module)
        constants = [
            _constant(getattr(loaded, name), weights, looked_up, len(tensors[0]))
            for name in _names(loaded)
        ]
        library = Path(loaded.inductor_entry.__self__.__file__)
        note = {
            "library": str(library.relative_to(_folder())),
            "sha256": _sha256(library),
            "inputs": inputs,
            "constants": [asdict(constant) for constant in constants],
        }
        unfinished = _path(key).with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(note))
        unfinished.replace(_path(key))
    except _UNLIKE:
        return None
    return kept(key, module)


def kept(key: str, module: torch.nn.Module) -> Program | None:
    """Return the program that an earlier start has kept, with the weights of `module`, or None.

    If there is a note and the program cannot be used, a line in the log says why.
    """
    try:
        written = _path(key).read_bytes()
    except OSError:
        return None
    try:
        note = json.loads(written)
        weights = _weights(module)
        library = _folder() / note["library"]
        if _sha256(library) != note["sha256"]:
            raise ValueError("its library is damaged")
        constants = [Constant(**one | {"shape": tuple(one["shape"])}) for one in note["constants"]]
        made = tuple(one.made_of(weights[one.weight]) for one in constants)
        return Program(_opened(library), tuple(note["inputs"]), made)
    except _UNLIKE as error:
        logger.warning("a kept program is not used (%s: %s)", type(error).__name__, one_line(error))
        return None


def _opened(library: Path) -> _Entry:
    """Return the function of a program's library, as torch's own loader would."""
    # The library asks for this address when it is opened.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    # By the last part of this name the function is found that Python calls first.
    name = f"{library.stem}.{_ENTRY}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    opened = importlib.util.module_from_spec(spec)
    loader.exec_module(opened)
    entry: _Entry = getattr(opened, _ENTRY)
    return entry


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forget(key: str) -> None:
    """Delete the note about a program, so that later starts do not find it."""
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
    """Return the Python module that torch wrote for a program."""
    from torch._inductor.codecache import PyCodeCache

    (found,) = (one for one in PyCodeCache.modules if getattr(one, "call", None) is raw)
    return found


def _names(loaded: Any) -> list[str]:
    """Return the names of a program's constants, in the order in which its library takes them.

    They are the tensors of its module that its function names, in the order of its code. If torch
    wrote another order, the program would give other results than through torch, and not be kept.
    """
    names = loaded.call.__code__.co_names
    return [name for name in names if isinstance(getattr(loaded, name, None), torch.Tensor)]


def _place(one: Any, tensors: Sequence[torch.Tensor], num_visible: int) -> int | str:
    """Return which input of the caller this is: its index, or LENGTH for the number of slots.

    Raises ValueError if it is none of them, or two.
    """
    if not isinstance(one, torch.Tensor):
        if one != num_visible:
            raise ValueError("an input that we do not know")
        return LENGTH
    (place,) = (number for number, tensor in enumerate(tensors) if _is_same(one, tensor))
    return place


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if both tensors are the same memory, with equal dtype, shape and strides."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _constant(
    value: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    looked_up: Collection[str],
    num_rows: int,
) -> Constant:
    """Return how a constant of a program of `num_rows` rows is made from a weight.

    Raises ValueError if no weight gives it, or several do: these may differ in another model.
    """
    if value.is_mkldnn:
        plain = value.to_dense()
        (constant,) = (
            Constant(name, num_rows=num_rows)
            for name, weight in weights.items()
            if name not in looked_up and weight.dtype == plain.dtype and torch.equal(weight, plain)
        )
        return constant
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
    """True if a matrix [N, K] could be packed into `value` [blocks, K, width], by its shape."""
    if (value.dim(), weight.dim()) != (3, 2):
        return False
    num_blocks, depth, width = value.shape
    is_filled = (num_blocks - 1) * width < len(weight) <= num_blocks * width
    return weight.shape[1] == depth and is_filled and weight.dtype == value.dtype


def _begins_alike(value: torch.Tensor, weight: torch.Tensor, interleaved: int) -> bool:
    """True if the first block of `value` equals that of the packed matrix: a quick first test."""
    first = (1, *value.shape[1:])
    return torch.equal(value[:1], blocked(weight[: first[2]], first, interleaved))
