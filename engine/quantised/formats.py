"""Read the quantisation format of a checkpoint from quantization_config in config.json.

Formats that are not covered are refused.

    quant_method         stored as                                          description
    fp8                  8-bit floats, a scale for each block or tensor     Fp8
    compressed-tensors   the same (float-quantized), or a scale per row     Fp8
                         4- or 8-bit integers (pack-quantized)              PackQuantized
                         4-bit floats in two scales (nvfp4-pack-quantized)  Nvfp4
    modelopt             8-bit floats (FP8 ...), 4-bit floats (NVFP4)       Fp8, Nvfp4
    gptq                 4- or 8-bit integers, scales and zeros by group    Gptq
    awq                  4-bit integers, likewise (gemm)                    Awq
    bitsandbytes         4-bit indices (nf4), a scale for each block        Nf4
    mxfp4                4-bit floats, a power of two for each 32; experts  Mxfp4
    (a GGUF file)        8 to 4 bits with scales in blocks                  GgufFile

Which layers are quantised is read from the tensors, not from config.json's lists of excluded
layers: libraries match the names in such lists differently, but store the same tensors.

Older checkpoints of modelopt say what they are in hf_quant_config.json alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.files import Object, as_json, parts, read_object
from engine.checkpoint.gguf_list import gguf_in
from engine.errors import ModelError

_FIELDS = ("quantization_config", "compression_config")
_COVERED = "fp8, compressed-tensors, modelopt, gptq, awq, mxfp4 and bitsandbytes (nf4) are covered"
_OF_MODELOPT = "hf_quant_config.json"
_LARGEST_GROUP = 1 << 24
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_PACKED_FORMAT, _NVFP4_FORMAT = "pack-quantized", "nvfp4-pack-quantized"
_COMPRESSED_FORMATS = (None, *_FP8_FORMATS, _PACKED_FORMAT, _NVFP4_FORMAT)
# Algorithm of modelopt -> the blocks that share a scale; (): rows, or the whole weight.
_BLOCKS_OF_MODELOPT: Mapping[str, tuple[tuple[int, int], ...]] = {
    "FP8": (),
    "FP8_PER_CHANNEL_PER_TOKEN": (),
    "FP8_PB_WO": ((128, 128),),
    "MXFP8": ((1, 32),),
}
# Version of GPTQ's format -> the number to add to a stored zero point.
_GPTQ_ZEROS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Fp8:
    """Format of weights in 8-bit floating point.

    blocks   sizes (rows, columns) of blocks that may share a scale; a weight without such blocks
             has a scale for each row, or one for all
    library  the library whose kernels can use the weights directly; None: there is none
    """

    blocks: tuple[tuple[int, int], ...]
    library: str | None = None


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Format of weights as 4-bit floats with a scale for 16 inputs and one for the tensor.

    weight      end of the name of the tensor with the 4-bit floats
    of_tensor   end of the name of the tensor's scale
    is_divisor  True: what the scale of the tensor says is divided by, not multiplied with
    """

    weight: str = "weight"
    of_tensor: str = "weight_scale_2"
    is_divisor: bool = False


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """Format of weights as integers packed along the inputs, as compressed-tensors stores them.

    bits         bits of an integer: 4 or 8
    group_sizes  the numbers of inputs that may share a scale; -1: all inputs
    has_zeros    True: every layer has zero points; False: some or all have none
    """

    bits: int
    group_sizes: tuple[int, ...]
    has_zeros: bool


@dataclass(frozen=True, slots=True)
class Gptq:
    """Format of weights as integers packed along the inputs of a layer (GPTQ).

    bits          bits of an integer: 4 or 8
    group_size    number of inputs that share a scale and a zero point; -1: all inputs
    zero_is_less  number (0 or 1) that was subtracted from each zero point before it was stored
    """

    bits: int
    group_size: int
    zero_is_less: int


@dataclass(frozen=True, slots=True)
class Awq:
    """Format of weights as 4-bit integers packed along the outputs; `group_size` as in `Gptq`."""

    group_size: int


@dataclass(frozen=True, slots=True)
class Nf4:
    """Format of weights as 4-bit indices into a table; each weight stores its own parameters."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Format of experts' weights as 4-bit floats, of which 32 share a power of two."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Format of weights in a GGUF file, each tensor with a type of its own (`gguf_list.py`)."""

    path: Path


Packing = Fp8 | Nvfp4 | PackQuantized | Gptq | Awq | Nf4 | Mxfp4
Format = Packing | GgufFile


def read_format(path: Path, stated: Object) -> Format | None:
    """Return the quantisation format of a checkpoint's weights; None if they are not quantised.

    A GGUF file beside config.json counts as a format, also if its tensors are plain.

    path    path of config.json, for messages
    stated  the content of config.json

    Raises:
        ModelError: the format is not covered, or one of its fields is missing or wrong.
    """
    gguf = gguf_in(path.parent)
    if gguf is not None:
        return GgufFile(gguf)
    for part in parts(stated):
        for field in _FIELDS:
            content = part.get(field)
            if isinstance(content, dict) and content:
                return _read(_Fields(path, field, content))
    beside = path.parent / _OF_MODELOPT
    if beside.exists() or beside.is_symlink():
        return _modelopt(_Fields(beside, "it", read_object(beside)).inside("quantization"))
    return None


def stated_fields(config: Any) -> Iterator[tuple[Any, str]]:
    """Yield (configuration, field name) of each field that describes quantisation.

    config  a transformers configuration; its text part is searched too
    """
    for part in (config, config.get_text_config(decoder=True)):
        for field in _FIELDS:
            if hasattr(part, field):
                yield part, field


@dataclass(frozen=True, slots=True)
class _Fields:
    """An object in config.json, with checked access to its fields.

    path     path of config.json, for messages
    name     the object's name in messages
    content  its fields
    """

    path: Path
    name: str
    content: Object

    def refusal(self, field: str, want: str) -> ModelError:
        """Return the error for a wrong field; `want` says what it should be."""
        value = as_json(self.content.get(field))
        return ModelError(f"{self.path}: {self.name}.{field} is {value}; {want}")

    def choice(self, field: str, default: object, choices: tuple[object, ...]) -> Any:
        """Return a field, or `default` if it is absent. Raises ModelError if not in `choices`."""
        value = self.content.get(field)
        value = default if value is None else value
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            options = " or ".join(as_json(choice) for choice in choices if choice is not None)
            raise self.refusal(field, f"only {options} is covered: use another checkpoint")
        return value

    def group_size(self, *names: str) -> int:
        """Return a group size (1 or more, or -1) from the first field of `names` that is present.

        Raises ModelError if it is missing or wrong.
        """
        field = next((name for name in names if name in self.content), names[0])
        value = self.content.get(field)
        if type(value) is not int or not (value == -1 or 1 <= value <= _LARGEST_GROUP):
            raise self.refusal(field, "it must be a whole number from 1 on, or -1 (no groups)")
        return value

    def inside(self, field: str) -> "_Fields":
        """Return the object in a field. Raises ModelError if it is none."""
        value = self.content.get(field)
        if not isinstance(value, dict):
            raise self.refusal(field, "it must be an object: get the file again")
        return _Fields(self.path, f"{self.name}.{field}", value)

    def block(self, field: str) -> tuple[int, int]:
        """Return the block size (rows, columns) in a field. Raises ModelError if it is wrong."""
        value = self.content.get(field)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or any(type(size) is not int or not 1 <= size <= _LARGEST_GROUP for size in value)
        ):
            raise self.refusal(field, "it must be two whole numbers from 1 on, rows and columns")
        return value[0], value[1]


def _read(fields: _Fields) -> Format | None:
    """Return the format that a quantisation object describes. Raises ModelError."""
    if fields.content.get("load_in_8bit"):
        raise fields.refusal("load_in_8bit", f"{_COVERED}: use one of these")
    match fields.content.get("quant_method"):
        case "fp8":
            return _fp8(fields)
        case "compressed-tensors":
            return _compressed(fields)
        case "modelopt" | "modelopt_fp4":
            nested = isinstance(fields.content.get("quantization"), dict)
            return _modelopt(fields.inside("quantization") if nested else fields)
        case "gptq":
            return _gptq(fields)
        case "awq":
            return _awq(fields)
        case "bitsandbytes":
            return _nf4(fields)
        case "mxfp4":
            return Mxfp4()
    if fields.content.get("quant_method") is None and fields.content.get("load_in_4bit"):
        return _nf4(fields)  # as older versions wrote it
    raise fields.refusal("quant_method", f"{_COVERED}: use one of these, or plain weights")


def _fp8(fields: _Fields) -> Fp8:
    fields.choice("fmt", "e4m3", ("e4m3", "float8_e4m3fn", "e5m2"))
    fields.choice("scale_fmt", None, (None, "float", "ue8m0"))
    if fields.content.get("weight_block_size") is None:
        return Fp8(())
    return Fp8((fields.block("weight_block_size"),))


def _compressed(fields: _Fields) -> Packing:
    """Return the format of a checkpoint of compressed-tensors, whose groups must all have one."""
    stated = fields.choice("format", None, _COMPRESSED_FORMATS)
    if isinstance(fields.content.get("sparsity_config"), dict):
        fields.inside("sparsity_config").choice("format", "dense", ("dense",))
    named = fields.inside("config_groups")
    groups = [named.inside(name) for name in named.content]
    for group in groups:
        own = group.choice("format", stated, _COMPRESSED_FORMATS)
        stated = own if stated is None else stated
        if own != stated and not {own, stated} <= set(_FP8_FORMATS):
            raise group.refusal("format", f"the others are {stated}: use another checkpoint")
    weights = [group.inside("weights") for group in groups]
    if stated == _PACKED_FORMAT:
        return _pack_quantized(fields, weights)
    if stated == _NVFP4_FORMAT:
        for one in weights:
            one.choice("group_size", 16, (16,))
        return Nvfp4("weight_packed", "weight_global_scale", is_divisor=True)
    found = (_block_of(one) for one in weights)
    return Fp8(tuple(dict.fromkeys(b for b in found if b is not None)), "compressed-tensors")


def _block_of(weights: _Fields) -> tuple[int, int] | None:
    """Return the (rows, columns) that share a scale; None: whole rows, or the whole weight."""
    weights.choice("num_bits", None, (8,))
    weights.choice("type", None, ("float",))
    strategies = ("tensor", "channel", "block", "group")
    match weights.choice("strategy", "tensor", strategies):
        case "block":
            return weights.block("block_structure")
        case "group":
            size = weights.group_size("group_size")
            return None if size == -1 else (1, size)
    return None


def _pack_quantized(fields: _Fields, weights: list[_Fields]) -> PackQuantized:
    """Return the format of packed integers; `weights` says how those of each group are stored."""
    if not weights:
        raise fields.refusal("config_groups", "it must name a group: get the file again")
    sizes = []
    for one in weights:
        one.choice("num_bits", None, (4, 8))
        one.choice("type", "int", ("int",))
        by_group = one.choice("strategy", "group", ("channel", "group")) == "group"
        sizes.append(one.group_size("group_size") if by_group else -1)
    bits = weights[0].content["num_bits"]
    for one in weights:
        one.choice("num_bits", None, (bits,))
    has_zeros = not any(one.choice("symmetric", True, (True, False)) for one in weights)
    return PackQuantized(bits, tuple(dict.fromkeys(sizes)), has_zeros)


def _modelopt(fields: _Fields) -> Packing | None:
    """Return the format of a checkpoint of NVIDIA's modelopt; None: no weights are quantised."""
    algorithm = fields.content.get("quant_algo")
    if algorithm is None and fields.path.name == _OF_MODELOPT:
        return None  # keys and values alone are
    known = algorithm.upper() if isinstance(algorithm, str) else ""
    if known in ("NVFP4", "W4A16_NVFP4"):
        fields.choice("group_size", 16, (16,))
        return Nvfp4()
    if known not in _BLOCKS_OF_MODELOPT:
        names = ", ".join(_BLOCKS_OF_MODELOPT)
        raise fields.refusal("quant_algo", f"only {names} and NVFP4 are covered: use one of these")
    return Fp8(_BLOCKS_OF_MODELOPT[known])


def _gptq(fields: _Fields) -> Gptq:
    bits = fields.choice("bits", None, (4, 8))
    if fields.content.get("is_marlin_format"):
        raise fields.refusal("is_marlin_format", "use the checkpoint in its first format")
    field = "checkpoint_format" if "checkpoint_format" in fields.content else "format"
    version = fields.choice(field, "gptq", tuple(_GPTQ_ZEROS))
    rules = fields.content.get("dynamic") or {}
    if not isinstance(rules, dict) or any(not name.startswith("-:") for name in rules):
        raise fields.refusal("dynamic", "layers of other bits or groups are not covered")
    return Gptq(bits, fields.group_size("group_size"), _GPTQ_ZEROS[version])


def _awq(fields: _Fields) -> Awq:
    fields.choice("w_bit" if "w_bit" in fields.content else "bits", None, (4,))
    field = "version" if "version" in fields.content else "format"
    fields.choice(field, "gemm", ("gemm", "GEMM"))
    if fields.content.get("zero_point") is False:
        raise fields.refusal("zero_point", "only true is covered: use another checkpoint")
    return Awq(fields.group_size("group_size", "q_group_size"))


def _nf4(fields: _Fields) -> Nf4:
    if fields.content.get("load_in_4bit") is not True:
        raise fields.refusal("load_in_4bit", f"{_COVERED}: use one of these")
    fields.choice("bnb_4bit_quant_type", None, ("nf4",))
    fields.choice("bnb_4bit_quant_storage", "uint8", ("uint8",))
    return Nf4()
