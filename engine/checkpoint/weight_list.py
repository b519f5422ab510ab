"""The weights of a model as its files list them, with the bytes that each takes when it is loaded.

Names and shapes come from the headers of the files, so no weight is read, and neither torch nor
numpy is needed: the coordinator accounts for a model's memory before it starts a node. Tensors that
are not loaded (scales of activations, other modalities, layers for multi-token prediction) are left
out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.checkpoint.files import COMPUTED, LAYER_COUNTS, parts, weight_files
from engine.checkpoint.gguf_list import Gguf, read_gguf
from engine.checkpoint.stated_text import stored_text
from engine.checkpoint.tensor_list import Listed, tensors_in
from engine.quantised.formats import Awq, Format, GgufFile, Gptq, Mxfp4, Nf4, Nvfp4, PackQuantized

HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
# What belongs to a packed weight, or is not read at all.
_BESIDE = re.compile(
    r"\.(weight_(scale(_inv|_2)?|global_scale|zero_point|g_idx|shape)|qzeros|scales|g_idx"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)"
    r"|(input|output|activation|prob|[qkv]|kv)_scale(_ub)?|input_global_scale)$"
)
_SCALE_BYTES = 4  # of a scale or an offset that is kept beside integer codes
# Type of a GGUF tensor -> bits of the codes that it becomes, bits of scales and units of a weight.
_GGUF_BITS = {
    "Q8_0": (8, 0.5),
    "Q4_0": (4, 0.5),
    "Q5_0": (8, 0.5),
    "Q4_1": (4, 1.0),
    "Q5_1": (8, 1.0),
    "Q6_K": (8, 0.75),
    "Q4_K": (4, 0.75),
    "Q5_K": (8, 0.75),
}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a model.

    name   its name in the model
    shape  of the plain weight; of one whose files do not tell it, the number of its numbers
    kept   bytes that it takes in its own few bits; None: it can only be dequantised
    """

    name: str
    shape: tuple[int, ...]
    kept: int | None = None

    @property
    def count(self) -> int:
        """Return how many numbers it has."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True if it is a linear layer's."""
        is_weight = len(self.shape) == 2 and self.name.endswith(".weight")
        return is_weight and not self.name.endswith(EMBEDDINGS)


def weights_in(
    folder: Path, stated: Mapping[str, Any], form: Format | None, *, is_wrapped: bool
) -> list[Weight]:
    """Return the weights of a model, in the order of its files.

    stated      the content of config.json
    form        how the weights are quantised; None: they are plain
    is_wrapped  True: the language model in a model of several modalities

    Raises:
        ModelError: a file is missing or damaged.
    """
    if isinstance(form, GgufFile):
        return list(_of_gguf(read_gguf(form.path)))
    listed = {one.name: one for path in weight_files(folder) for one in tensors_in(path)}
    if is_wrapped:
        listed = {own: listed[there.name] for own, there in stored_text(listed).items()}
    number = _num_layers(stated)
    is_tied = any(part.get("tie_word_embeddings") is True for part in parts(dict(stated)))
    found = []
    for name, one in listed.items():
        layer = _LAYER.search(name)
        is_further = name.startswith("mtp.") or (layer and number and int(layer[1]) >= number)
        is_left_out = is_further or COMPUTED.search(name) or _BESIDE.search(name)
        if is_left_out or (is_tied and name == HEAD) or _is_scale(name, form):
            continue
        found.append(_weight(name, one, listed, form, stated))
    return found


def is_tied(weights: list[Weight]) -> bool:
    """True if the output matrix is that of the embeddings."""
    return not any(weight.name.endswith(HEAD) for weight in weights)


def _num_layers(stated: Mapping[str, Any]) -> int:
    """Return the number of layers that config.json states; 0: it does not."""
    of_parts = [part.get(field) for part in parts(dict(stated)) for field in LAYER_COUNTS]
    return max((count for count in of_parts if type(count) is int), default=0)


def _is_scale(name: str, form: Format | None) -> bool:
    return isinstance(form, Mxfp4) and name.endswith("_scales")


def _weight(
    name: str,
    one: Listed,
    listed: Mapping[str, Listed],
    form: Format | None,
    stated: Mapping[str, Any],
) -> Weight:
    """Return the weight that a tensor of the files is, or is the main part of."""
    shape, (base, _, end) = one.shape, name.rpartition(".")
    match form:
        case PackQuantized() if end == "weight_packed":
            rows, columns = shape[0], shape[-1] * 32 // form.bits
            parts_of = [listed.get(f"{base}.weight_{part}") for part in ("scale", "zero_point")]
            kept = _codes(rows * columns, form.bits, parts_of[0], has_offsets=bool(parts_of[1]))
            has_order = f"{base}.weight_g_idx" in listed
            return Weight(f"{base}.weight", (rows, columns), None if has_order else kept)
        case Gptq() if end == "qweight":
            columns, rows = shape[0] * 32 // form.bits, shape[-1]
            of = next(part["quantization_config"] for part in parts(dict(stated)) if _packs(part))
            scales, has_offsets = listed.get(f"{base}.scales"), of.get("sym") is not True
            kept = _codes(rows * columns, form.bits, scales, has_offsets=has_offsets)
            return Weight(f"{base}.weight", (rows, columns), None if of.get("desc_act") else kept)
        case Awq() if end == "qweight":
            columns, rows = shape[0], shape[-1] * 8
            kept = _codes(rows * columns, 4, listed.get(f"{base}.scales"), has_offsets=True)
            return Weight(f"{base}.weight", (rows, columns), kept)
        case Nvfp4() if end == form.weight and one.kind == "U8":
            rows, columns = shape[0], shape[-1] * 2
            return Weight(f"{base}.weight", (rows, columns), rows * columns * 5 // 4)
        case Nf4() if f"{name}.absmax" in listed:
            return Weight(name, (prod(shape) * 2,))
        case Mxfp4() if name.endswith("_blocks"):
            return Weight(name.removesuffix("_blocks"), (shape[0], shape[1], prod(shape[2:]) * 2))
    return Weight(name, shape)


def _packs(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("quantization_config"), dict)


def _codes(count: int, bits: int, scales: Listed | None, *, has_offsets: bool) -> int:
    """Return the bytes of so many integer codes with their scales, and offsets if they have any."""
    groups = 0 if scales is None else prod(scales.shape)
    return count * bits // 8 + groups * _SCALE_BYTES * (1 + has_offsets)


def _of_gguf(gguf: Gguf) -> Iterator[Weight]:
    """Yield the weights of a GGUF file; where codes of tied embeddings are kept, both uses."""
    for name, entry in gguf.tensors.items():
        bits, beside = _GGUF_BITS.get(entry.kind, (0, 0.0))
        kept = round(prod(entry.shape) * (bits + beside) / 8) if bits else None
        yield Weight(name, entry.shape, kept if not name.endswith(EMBEDDINGS) else None)
        if name.endswith(EMBEDDINGS) and gguf.is_tied and kept is not None:
            yield Weight(HEAD, entry.shape, kept)
