"""Read a quantised (packed) checkpoint as if its weights were plain.

Owns which tensors make up a packed layer, and what happens to tensors for which a plain model has
no place. Its user sees a mapping of names to tensors, with the names and shapes of the plain
checkpoint. A weight is dequantised when it is read, one at a time, so that the memory holds the
plain model and one matrix in both forms. If several ranks share the model (tensor parallelism),
each reads and dequantises only its own rows and columns (`Stretch`).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.files import Names, Shapes, weight_files
from engine.checkpoint.parts import Cuts, Files, Lazy
from engine.errors import GET_AGAIN, ModelError
from engine.quantised import awq, fp8, gptq, mxfp4, nf4, nvfp4, pack_quantized
from engine.quantised.formats import Awq, Fp8, Gptq, Mxfp4, Nf4, Nvfp4, Packing, PackQuantized
from engine.quantised.matrix import QuantisedMatrix
from engine.quantised.packed import BadTensors, Sizes, Stretch, Tensors
from engine.tensor_parallel.split import Cut
from proto.system import cannot_read

# Scales for quantising activations, keys and values. They are not read: here none is quantised.
_OF_ACTIVATIONS = re.compile(
    r"\.((input|output|activation|prob|[qkv]|kv)_scale(_ub)?|input_global_scale)$"
)
_INT32, _BYTES, _E4M3 = {"I32"}, {"U8"}, {"F8_E4M3"}
_FP8 = {*_E4M3, "F8_E5M2"}
_FLOATS = {"F32", "F16", "BF16"}
_PLAIN = {*_FLOATS, "F64"}
_FP8_SCALES = {*_FLOATS, "F8_E8M0", *_BYTES}

_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
_CPU = torch.device("cpu")

_Form = Fp8 | Nvfp4 | PackQuantized | Gptq | Awq | nf4.State | Mxfp4


@dataclass(frozen=True, slots=True)
class _Kind:
    """Which tensors make up a packed layer in one format.

    types    end of the tensor's name -> the number types that it may have
    telling  name ends of tensors that only a packed layer has
    joint    stands between the layer's name and the end
    weight   stands behind the layer's name in a plain checkpoint
    """

    types: Mapping[str, set[str]]
    telling: tuple[str, ...]
    joint: str = "."
    weight: str = ".weight"


_INTEGERS = {"qweight": _INT32, "qzeros": _INT32, "scales": _FLOATS}
_WHOLE = {*_INT32, "I64"}
_KINDS: Mapping[type[Packing], _Kind] = {
    Fp8: _Kind({"weight": _FP8} | dict.fromkeys(fp8.SCALES, _FP8_SCALES), fp8.SCALES),
    Gptq: _Kind(_INTEGERS | {"g_idx": _WHOLE}, ("qweight", "qzeros", "g_idx")),
    PackQuantized: _Kind(
        {pack_quantized.PACKED: _INT32, pack_quantized.SCALES: _FLOATS}
        | {pack_quantized.ZEROS: _INT32, pack_quantized.ORDER: _WHOLE}
        | {pack_quantized.SHAPE: _WHOLE},
        (pack_quantized.PACKED, pack_quantized.ZEROS, pack_quantized.SHAPE),
    ),
    Awq: _Kind(_INTEGERS, ("qweight", "qzeros")),
    Nf4: _Kind(
        {"weight": _BYTES, "weight.absmax": {*_FLOATS, *_BYTES}, nf4.STATE: _BYTES}
        | dict.fromkeys(("weight.quant_map", *nf4.NESTED), _FLOATS),
        ("weight.absmax", nf4.STATE),
    ),
    Mxfp4: _Kind({"blocks": _BYTES, "scales": _BYTES}, ("blocks", "scales"), "_", ""),
}


def _kind_of(form: Packing) -> _Kind:
    """Return which tensors make up a layer that is packed in this format."""
    if isinstance(form, Nvfp4):
        types = {form.weight: _BYTES, nvfp4.SCALES: _E4M3, form.of_tensor: _FLOATS}
        return _Kind(types, (nvfp4.SCALES, form.of_tensor))
    return _KINDS[type(form)]


@dataclass(frozen=True, slots=True)
class _Head:
    """A tensor's entry in the header of a file, and its name there (`stored`)."""

    file: Path
    stored: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A packed layer.

    parts  end of a tensor's name -> the full name
    form   its format
    """

    parts: Mapping[str, str]
    form: _Form


class PackedCheckpoint:
    """A folder's quantised weights, which can be read as the tensors of a plain checkpoint.

    form    the quantisation format that config.json names
    shapes  name -> shape of every tensor of the corresponding plain checkpoint
    """

    def __init__(self, folder: Path, form: Packing, names: Names | None = None) -> None:
        """Read the headers of the files, and no weight.

        names  which tensors of the folder; None: all, by their names in the files

        Raises:
            ModelError: a layer lacks a tensor, or its tensors' shapes do not fit together.
        """
        self.form = form
        heads = dict(_heads(folder))
        wanted = heads if names is None else {n: heads[one.name] for n, one in names.items()}
        self._heads: Mapping[str, _Head] = wanted
        self._files: dict[Path, Any] = {}
        self._sliced = Files()
        self._device = _CPU  # where weights are dequantised
        self._one_at_a_time = Lock()
        kind = _kind_of(form)
        self._layers = {
            f"{name}{kind.weight}": self._layer(name, parts, form, kind)
            for name, parts in _packed_layers(self._heads, kind).items()
        }
        used = {name for layer in self._layers.values() for name in layer.parts.values()}
        rest = [n for n in self._heads if n not in used and not _OF_ACTIVATIONS.search(n)]
        self._plain = {name: self._heads[name] for name in rest}
        _refuse_unread(self._plain)
        shapes: dict[str, tuple[int, ...]] = {name: self._heads[name].shape for name in rest}
        for name, layer in self._layers.items():
            with self._blamed(name, layer.parts):
                shapes[name] = _weight_shape(layer.form, self._sizes(layer.parts))
        self.shapes: Shapes = shapes

    def tensors(
        self, model: Any, cuts: Cuts | None = None, device: torch.device = _CPU
    ) -> dict[str, Lazy]:
        """Return the plain checkpoint's tensors by name, read when used.

        Weights become float32, or bfloat16 if that holds the same numbers.

        model  the model made from config.json, on `meta` (without memory). Tensors that it lacks
               are returned too, except all-zero biases, which some libraries write for every layer
        cuts   name -> the part to read (one rank's); others are read whole; None: all are
        device  device on which weights are dequantised

        Raises:
            ModelError: a packed tensor belongs to something other than a linear layer, an
                embedding or experts. Also later, when a tensor is read and its values are invalid.
        """
        self._device, cuts = device, cuts or {}
        found = {name: Lazy(partial(self._read, name, cuts.get(name))) for name in self._plain}
        own = set(model.state_dict())
        for name, layer in self._layers.items():
            full = name if name in own else f"{model.base_model_prefix}.{name}"
            if full in own:
                self._refuse_odd_module(model, full, layer)
                if full.removesuffix("weight") + "bias" not in own:
                    self._drop_empty_bias(found, name.removesuffix("weight") + "bias")
            found[name] = Lazy(partial(self._weight, name, cuts.get(name)))
        return {name: lazy for name, lazy in found.items() if name not in cuts or cuts[name].runs}

    def whole(self) -> dict[str, Lazy]:
        """Return all tensors as `tensors` does, of a checkpoint that is no model (a head)."""
        self._device = _CPU
        plain = {name: Lazy(partial(self._read, name)) for name in self._plain}
        return plain | {name: Lazy(partial(self._weight, name, None)) for name in self._layers}

    @property
    def num_bytes(self) -> int:
        """Return about how many bytes the packed layers take as they are stored, or in codes."""
        return sum(self._bytes_of(layer) for layer in self._layers.values())

    def _bytes_of(self, layer: _Layer) -> int:
        if isinstance(layer.form, Nvfp4):
            rows, columns = nvfp4.weight_shape(layer.form, self._sizes(layer.parts))
            return rows * columns + 4 * rows * columns // nvfp4.GROUP
        heads = [self._heads[name] for name in layer.parts.values()]
        return sum(prod(head.shape) * _ITEM_BYTES.get(head.dtype, 1) for head in heads)

    def matrices(
        self, model: Any, *, with_floats: bool = False
    ) -> Iterator[tuple[str, QuantisedMatrix]]:
        """Yield (path in the model, weight as it is stored) of the linear layers, read one by one.

        Layers that can only be dequantised are left out: `tensors` has them.

        model  as for `tensors`
        with_floats  True: also codes that are floats, for GPUs

        Raises:
            ModelError: a packed tensor's values are invalid.
        """
        own = set(model.state_dict())
        for name, layer in self._layers.items():
            full = name if name in own else f"{model.base_model_prefix}.{name}"
            path = full.removesuffix(".weight")
            if full not in own or not isinstance(model.get_submodule(path), torch.nn.Linear):
                continue
            with self._one_at_a_time, self._blamed(name, layer.parts):
                read = {part: self._read(tensor) for part, tensor in layer.parts.items()}
                matrix = _floats(layer.form, read) if with_floats else None
                matrix = matrix or _codes(layer.form, read)
            if matrix is not None:
                yield path, matrix

    def _layer(self, name: str, parts: Mapping[str, str], form: Packing, kind: _Kind) -> _Layer:
        """Return a packed layer. Raises ModelError if a tensor has a wrong number type."""
        for part, tensor in parts.items():
            head = self._heads[tensor]
            if head.dtype not in kind.types[part]:
                types = " or ".join(sorted(kind.types[part]))
                raise ModelError(f"{head.file}: {tensor} is {head.dtype}, it must be {types}")
        if not isinstance(form, Nf4):
            return _Layer(parts, form)
        with self._blamed(name, parts):
            if nf4.STATE not in parts:
                raise BadTensors(f"{nf4.STATE} is missing")
            nested = any(part in parts for part in nf4.NESTED)
            return _Layer(parts, nf4.read_state(self._read(parts[nf4.STATE]), nested=nested))

    def _sizes(self, parts: Mapping[str, str]) -> Sizes:
        """Return the shapes of a layer's tensors, by the ends of their names."""
        return {part: self._heads[name].shape for part, name in parts.items()}

    def _weight(self, name: str, cut: Cut | None) -> torch.Tensor:
        """Return a layer's weight, or the cut of it, dequantised."""
        layer = self._layers[name]
        with self._one_at_a_time, self._blamed(name, layer.parts):
            if cut is None:
                read = {part: self._read(tensor) for part, tensor in layer.parts.items()}
                tensors = {part: tensor.to(self._device) for part, tensor in read.items()}
                return _weight(layer.form, tensors).contiguous()
            runs = [self._run(layer, cut.dim, run) for run in cut.runs]
            return runs[0].contiguous() if len(runs) == 1 else torch.cat(runs, cut.dim)

    def _run(self, layer: _Layer, dim: int, run: range) -> torch.Tensor:
        """Return the part `run` along `dim` (0: outputs, 1: inputs) of a layer's weight."""
        stretch = _stretch(layer.form, self._sizes(layer.parts), dim, run)
        tensors = {}
        for part, tensor in layer.parts.items():
            head = self._heads[tensor]
            sliced = self._sliced.slices(head.file, head.stored)
            tensors[part] = sliced[stretch.slices.get(part, ...)].to(self._device)
        return _weight(stretch.form, tensors).narrow(dim, stretch.start, len(run))

    def _read(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """Return a tensor of the files as it is stored, or the cut of it."""
        file, name = self._heads[name].file, self._heads[name].stored
        if cut is not None:
            return cut.of(self._sliced.slices(file, name))
        if file not in self._files:
            # Read without mapping: mapped pages of packed weights would stay in memory.
            self._files[file] = safe_open(file, framework="pt", backend="pread")
        tensor: torch.Tensor = self._files[file].get_tensor(name)
        return tensor

    @contextmanager
    def _blamed(self, name: str, parts: Mapping[str, str]) -> Iterator[None]:
        """While inside, turn BadTensors into a ModelError that names the file and the layer."""
        try:
            yield
        except BadTensors as error:
            file = self._heads[next(iter(parts.values()))].file
            layer = name.removesuffix(".weight")
            raise ModelError(f"{file}: {layer}: {error}; get the checkpoint again") from error

    def _refuse_odd_module(self, model: Any, name: str, layer: _Layer) -> None:
        """Raise ModelError if a packed weight belongs to no layer that can be read packed."""
        if isinstance(layer.form, Mxfp4):
            return  # its shape alone tells that it is experts'
        module = model.get_submodule(name.removesuffix(".weight"))
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            file = self._heads[next(iter(layer.parts.values()))].file
            raise ModelError(
                f"{file}: {name} is packed, and belongs to a {type(module).__name__}; only linear "
                "layers and embeddings are read: use a plain one"
            )

    def _drop_empty_bias(self, found: dict[str, Lazy], bias: str) -> None:
        """Remove the bias from `found` if all its numbers are zero."""
        if bias in found and not self._read(bias).any():
            del found[bias]


def _heads(folder: Path) -> Iterator[tuple[str, _Head]]:
    """Yield (name, entry) of every tensor in a folder's files."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    part = tensors.get_slice(name)
                    yield name, _Head(file, name, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read: {cannot_read(error, GET_AGAIN)}") from error


def _packed_layers(heads: Mapping[str, _Head], kind: _Kind) -> dict[str, dict[str, str]]:
    """Return, per packed layer, its tensors: end of the name -> full name."""
    found: dict[str, dict[str, str]] = {}
    for name in heads:
        for part in kind.types:
            if name.endswith(end := f"{kind.joint}{part}"):
                found.setdefault(name.removesuffix(end), {})[part] = name
    return {layer: parts for layer, parts in found.items() if any(t in parts for t in kind.telling)}


def _refuse_unread(plain: Mapping[str, _Head]) -> None:
    """Raise ModelError if a tensor is packed but has no scales with which to dequantise it."""
    for name, head in plain.items():
        is_number = head.dtype in _PLAIN or not name.endswith(".weight")
        if not is_number or head.dtype.startswith(("F8", "F4", "F6")):
            raise ModelError(
                f"{head.file}: {name} is {head.dtype} and has no scales by which it can be read; "
                "get the checkpoint again, or a plain one"
            )


def _weight_shape(form: _Form, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of a packed layer's weight. Raises BadTensors."""
    match form:
        case Fp8():
            return fp8.weight_shape(form, sizes)
        case Nvfp4():
            return nvfp4.weight_shape(form, sizes)
        case PackQuantized():
            return pack_quantized.weight_shape(form, sizes)
        case Gptq():
            return gptq.weight_shape(form, sizes)
        case Awq():
            return awq.weight_shape(form, sizes)
        case nf4.State():
            return nf4.weight_shape(form, sizes)
        case Mxfp4():
            return mxfp4.weight_shape(sizes)


def _stretch(form: _Form, sizes: Sizes, dim: int, run: range) -> Stretch[Any]:
    """Return what to read for a part of a packed layer's weight, `run` along its `dim`."""
    match form:
        case Fp8():
            return fp8.stretch(form, sizes, dim, run)
        case Nvfp4():
            return nvfp4.stretch(form, sizes, dim, run)
        case PackQuantized():
            return pack_quantized.stretch(form, sizes, dim, run)
        case Gptq():
            return gptq.stretch(form, sizes, dim, run)
        case Awq():
            return awq.stretch(form, sizes, dim, run)
        case nf4.State():
            return nf4.stretch(form, sizes, dim, run)
        case Mxfp4():
            return mxfp4.stretch(form, sizes, dim, run)


def _weight(form: _Form, tensors: Tensors) -> torch.Tensor:
    """Return the dequantised weight of a packed layer. Raises BadTensors."""
    match form:
        case Fp8():
            return fp8.weight(form, tensors)
        case Nvfp4():
            return nvfp4.weight(form, tensors)
        case PackQuantized():
            return pack_quantized.weight(form, tensors)
        case Gptq():
            return gptq.weight(form, tensors)
        case Awq():
            return awq.weight(tensors)
        case nf4.State():
            return nf4.weight(form, tensors)
        case Mxfp4():
            return mxfp4.weight(tensors)


def _codes(form: _Form, tensors: Tensors) -> QuantisedMatrix | None:
    """Return a packed layer's weight as it is stored; None if it can only be dequantised."""
    match form:
        case Nvfp4():
            return nvfp4.codes(form, tensors)
        case PackQuantized():
            return pack_quantized.codes(form, tensors)
        case Gptq():
            return gptq.codes(form, tensors)
        case Awq():
            return awq.codes(tensors)
        case _:
            return None


def _floats(form: _Form, tensors: Tensors) -> QuantisedMatrix | None:
    """Return a packed layer's weight as it is stored if its codes are floats; else None."""
    match form:
        case Fp8():
            return fp8.floats(form, tensors)
        case Nvfp4():
            return nvfp4.floats(form, tensors)
        case _:
            return None
