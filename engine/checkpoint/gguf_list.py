"""What a GGUF file holds: its fields and the list of its tensors, read without torch and numpy.

The coordinator reads files before it starts a node, so this module needs no library. A file is

    "GGUF", version, number of tensors, number of fields
    fields: name, type, value          of the model and of its tokenizer
    tensors: name, dimensions (the fastest first), type, place
    the tensors' numbers, each at a multiple of `general.alignment`

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Files of the llama family alone are read
(`FAMILIES`), with tensors of the types in `BLOCKS`.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from engine.errors import GET_AGAIN, ModelError
from proto.system import cannot_read

# The architecture that a file names -> the types of models (config.json) that it may hold.
FAMILIES = {"llama": ("llama", "mistral"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
# Number of a tensor's type -> (name, numbers of a block, bytes of a block): the types that the
# package `gguf` dequantises, and the plain ones.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# Type of a tensor -> (numbers of a block, bytes of a block).
BLOCKS = {name: (numbers, num_bytes) for name, numbers, num_bytes in _TYPES.values()}
PLAIN = ("F32", "F16", "BF16")
# Name in the file -> name in transformers' models; in a layer, behind its number.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NAMES_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # by what each rotary frequency is divided (Llama 3)
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,4})\.)?(?P<what>\w+)\.(?P<part>weight|bias)")
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MOST_TENSORS, _MOST_FIELDS, _MOST_DIMS = 1 << 20, 1 << 16, 4
_AGAIN = "get the file again"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file.

    name       its name in the file
    kind       its type, such as "Q4_K"
    shape      its shape, the slowest dimension first, as in torch
    start      where its bytes begin in the file; there are `num_bytes`
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """What a file holds.

    fields   name -> value; of an array of texts only the number of texts
    tensors  name in transformers' models -> entry
    factors  the entry of `ROPE_FACTORS`; None: there is none
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    factors: Entry | None

    @property
    def architecture(self) -> str:
        """Return the architecture that the file names: a key of `FAMILIES`."""
        return str(self.fields["general.architecture"])

    def stated(self, field: str) -> Any:
        """Return a field of the architecture, such as "block_count"; None if it is absent."""
        return self.fields.get(f"{self.architecture}.{field}")

    @property
    def is_tied(self) -> bool:
        """True if the output matrix is that of the embeddings."""
        return "lm_head.weight" not in self.tensors


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file with a folder's weights; None: it has none, or has safetensors.

    Raises:
        ModelError: there are several.
    """
    found = sorted(folder.glob("*.gguf"))
    if not found or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ModelError(f"{folder}: it has {len(found)} GGUF files; give the path of one of them")
    return found[0]


def read_gguf(path: Path) -> Gguf:
    """Return what a GGUF file holds; reads no weight.

    Raises:
        ModelError: the file is missing, damaged or cut off, or holds what is not read here.
    """
    try:
        facts = path.stat()
        return _read_once(path, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {cannot_read(error, GET_AGAIN)}") from error


@lru_cache(maxsize=8)
def _read_once(path: Path, size: int, _changed_ns: int) -> Gguf:
    """Return what a file of `size` bytes holds. Raises ModelError and OSError."""
    if not path.is_file() or size < 24:
        raise ModelError(f"{path}: it is no GGUF file; {_AGAIN}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(path, data).read()
        except (struct.error, UnicodeDecodeError, RecursionError, MemoryError) as error:
            raise ModelError(f"{path}: it is cut off or damaged; {_AGAIN}") from error


class _Reader:
    """Reads a file's fields and tensors from the beginning on; `_at` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> Gguf:
        """Return what the file holds. Raises ModelError, and struct.error where it is cut off."""
        magic, version, num_tensors, num_fields = self._numbers("4sIQQ")
        if magic != b"GGUF":
            raise ModelError(f"{self._path}: it is no GGUF file; {_AGAIN}")
        if version not in _VERSIONS:
            raise ModelError(f"{self._path}: GGUF of version {version} is not read, only 2 and 3")
        if num_tensors > _MOST_TENSORS or num_fields > _MOST_FIELDS:
            raise ModelError(f"{self._path}: it is damaged; {_AGAIN}")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            (kind,) = self._numbers("I")
            fields[name] = self._value(kind)
        self._check(fields)
        listed = [self._entry() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise ModelError(f"{self._path}: general.alignment is {alignment!r}; {_AGAIN}")
        begin = -(-self._at // alignment) * alignment
        return self._placed(fields, listed, begin)

    def _numbers(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers, in the spelling of `struct`."""
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        if length > len(self._data):
            raise ModelError(f"{self._path}: it is damaged; {_AGAIN}")
        (text,) = self._numbers(f"{length}s")
        return bytes(text).decode()

    def _value(self, kind: int) -> Any:
        """Return the next value of a type; of an array of texts only the number of texts."""
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelError(f"{self._path}: it has a field of type {kind}; {_AGAIN}")
        inner, count = self._numbers("IQ")
        if count > len(self._data):
            raise ModelError(f"{self._path}: it is damaged; {_AGAIN}")
        if inner in _SCALARS:
            return self._numbers(f"{count}{_SCALARS[inner]}")
        if inner == _STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self._value(inner)
        return count

    def _skip_strings(self, count: int) -> None:
        """Go past so many texts: a tokenizer's tokens and merges are a hundred thousand."""
        data, at, length_at = self._data, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
            if at > len(data):
                raise ModelError(f"{self._path}: it is damaged; {_AGAIN}")
        self._at = at

    def _check(self, fields: Mapping[str, Any]) -> None:
        """Raise ModelError if the file is of another family, or one of several."""
        kind = fields.get("general.architecture")
        if kind not in FAMILIES:
            raise ModelError(
                f"{self._path}: it holds a model of the kind {str(kind)[:40]!r}; only "
                f"{', '.join(FAMILIES)} are read as GGUF"
            )
        if fields.get("split.count", 0) not in (0, 1):
            raise ModelError(
                f"{self._path}: it is one of several files; join them (llama-gguf-split --merge)"
            )

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        """Return name, number of the type, shape and place of the next tensor."""
        name = self._string()
        (num_dims,) = self._numbers("I")
        if num_dims > _MOST_DIMS:
            raise ModelError(f"{self._path}: {name[:80]!r} has {num_dims} dimensions; {_AGAIN}")
        dims = self._numbers(f"{num_dims}Q")
        kind, place = self._numbers("IQ")
        return name, kind, tuple(reversed(dims)), place

    def _placed(
        self,
        fields: Mapping[str, Any],
        listed: list[tuple[str, int, tuple[int, ...], int]],
        begin: int,
    ) -> Gguf:
        """Return the file's tensors by our names. Raises ModelError if one is not read here."""
        found: dict[str, Entry] = {}
        for name, number, shape, place in listed:
            if number not in _TYPES:
                raise ModelError(
                    f"{self._path}: {name[:80]} has the type number {number}, which is none of "
                    f"{', '.join(BLOCKS)}: use a Q8_0 or Q4_K_M file"
                )
            kind, each, num_bytes = _TYPES[number]
            if not shape or shape[-1] % each:
                raise ModelError(f"{self._path}: {name[:80]} has no whole blocks; {_AGAIN}")
            entry = Entry(name, kind, shape, begin + place, prod(shape) // each * num_bytes)
            if entry.start + entry.num_bytes > len(self._data):
                raise ModelError(f"{self._path}: it is cut off in {name[:80]}; {_AGAIN}")
            ours = name if name == ROPE_FACTORS else _our_name(name)
            if ours is None or ours in found:
                raise ModelError(
                    f"{self._path}: its tensor {name[:80]!r} is not one of a model of the kind "
                    f"{fields['general.architecture']}; use another file"
                )
            found[ours] = entry
        factors = found.pop(ROPE_FACTORS, None)
        return Gguf(self._path, fields, found, factors)


def _our_name(name: str) -> str | None:
    """Return the name in transformers' models of a tensor in a file; None: it is not known."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, what, part = match["layer"], match["what"], match["part"]
    ours = (_NAMES if layer is None else _NAMES_IN_LAYERS).get(what)
    if ours is None:
        return None
    return f"{ours}.{part}" if layer is None else f"model.layers.{int(layer)}.{ours}.{part}"


def refuse_other_config(gguf: Gguf, path: Path, stated: Mapping[str, Any]) -> None:
    """Raise ModelError if a file is not of the model that config.json describes.

    path    path of config.json, for messages
    stated  the content of config.json
    """
    kind = stated.get("model_type")
    if kind not in FAMILIES[gguf.architecture]:
        raise ModelError(
            f"{path}: model_type is {str(kind)[:40]!r}, and {gguf.path.name} holds a model of the "
            f"kind {gguf.architecture}; one of the two is of another model"
        )
    heads = {"num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv"}
    for ours, theirs in heads.items():
        count, found = stated.get(ours), gguf.stated(f"attention.{theirs}")
        if None not in (count, found) and count != found:
            raise ModelError(
                f"{path}: {ours} is {count}, and {gguf.path.name} has {found}; one of the two is "
                "of another model"
            )
