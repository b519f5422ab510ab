"""The list of tensors at the beginning of a safetensors file: names, number types and shapes.

The safetensors library loads numpy even to read this list, and numpy's OpenBLAS kills a process
that has little memory with a signal and messages of its own. The coordinator reads only the lists,
so it uses this module instead. This module accepts nothing that the library would refuse.

A file is 8 bytes (the length of the list), the list as a JSON object, and the numbers of all
tensors without gaps: https://github.com/huggingface/safetensors#format
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import GET_AGAIN, ModelError
from proto.system import cannot_read

MAX_LIST_BYTES = 100_000_000  # the library's own limit
_METADATA = "__metadata__"
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A tensor's entry in the list of a file.

    name        the tensor's name
    kind        its number type in safetensors' spelling, such as "BF16"
    shape       its shape
    start, end  its bytes are [start, end), counted from the end of the list
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def tensors_in(path: Path) -> list[Listed]:
    """Return the list of tensors of a safetensors file; reads no weight.

    Raises:
        ModelError: the file is missing, damaged, or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            file.seek(0)
            return _read(file, num_bytes)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {cannot_read(error, GET_AGAIN)}") from error


def _read(file: BinaryIO, num_bytes: int) -> list[Listed]:
    """Return the list of a file of `num_bytes` bytes. Raises ValueError if it is no valid list."""
    first = file.read(8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if not 0 < length <= min(num_bytes - 8, MAX_LIST_BYTES):
        raise ValueError("it does not begin with a list of tensors")
    record = json.loads(file.read(length).decode())
    if not isinstance(record, dict):
        raise ValueError("its list of tensors is no JSON object")
    record.pop(_METADATA, None)
    found = [_listed(name, stated) for name, stated in record.items()]
    _check_places(found, num_bytes - 8 - length)
    return found


def _listed(name: str, stated: Any) -> Listed:
    """Return a tensor's entry made of its JSON. Raises ValueError if a field is wrong."""
    match stated:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, end]}:
            numbers = (*shape, start, end)
            if kind in _BITS and all(type(one) is int and one >= 0 for one in numbers):
                return Listed(name, kind, tuple(shape), start, end)
    raise ValueError(f"its list of tensors has an entry that is none: {name[:80]!r}")


def _check_places(found: list[Listed], num_bytes: int) -> None:
    """Raise ValueError unless the tensors' bytes fill `num_bytes` exactly and fit their shapes."""
    at = 0
    for one in sorted(found, key=lambda one: (one.start, one.end)):
        num_bits = prod(one.shape) * _BITS[one.kind]
        if one.start != at or 8 * (one.end - one.start) != num_bits:
            raise ValueError(f"the place of the numbers of {one.name[:80]!r} is wrong")
        at = one.end
    if at != num_bytes:
        raise ValueError(f"it should hold {at} bytes of numbers, and holds {num_bytes}")
