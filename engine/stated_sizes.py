"""What a model will take on its device, by its files alone (config.json and the lists of tensors).

It is what `memory.py` measures of a model that is loaded, computed before anything is loaded and
without torch, for the coordinator's account of memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.families import FUSED, WRAPPERS, layer_kinds, text_kind
from engine.checkpoint.files import weight_files
from engine.checkpoint.long_texts import limited
from engine.checkpoint.stated import Stated
from engine.checkpoint.stated_cache import ESTIMATED, group_of, kept_of, key_heads
from engine.checkpoint.tensor_list import tensors_in
from engine.checkpoint.weight_list import Weight, is_tied, weights_in
from engine.host import CPU_FLAGS, cpu_flags
from engine.quantised.asked import KEEPING
from engine.quantised.formats import GgufFile
from engine.room import LONGEST, Sizes, mask_bytes, scored_bytes
from engine.tensor_parallel.layout import UNIT, shares
from proto.head_kinds import num_mtp_layers

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length")
_IN_FILES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# How many numbers one stored number of a head holds: quantised matrices are dequantised.
_HOLDS = {**dict.fromkeys(_IN_FILES, 1), "F8_E4M3": 1, "F8_E5M2": 1, "I32": 8}
# How `--quantization` rounds (`quantised/rounding.py`): bits, and the sizes of groups by bits.
_ROUNDED_BITS = {"int8": 8, "int4": 4}
_GROUPS = {8: (128, 64, 32), 4: (64, 32)}
_SCALE_BYTES = 2
_OF_HEADS, _INTO, _OUT_OF = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    ("down_proj", "w2"),
)


@dataclass(frozen=True, slots=True)
class How:
    """How a node will load a model.

    kind          of its device: "cuda" or "cpu"
    device_bytes  memory of the device
    dtype         float32, bfloat16, float16, auto or fastest (the larger of those that are timed)
    num_ranks     processes that share the model
    asked         maximum length of a text that was asked for; 0: none
    """

    kind: str
    device_bytes: int
    dtype: str = "auto"
    num_ranks: int = 1
    quantization: str = ""
    backend: str = "auto"
    asked: int = 0


@dataclass(frozen=True, slots=True)
class StatedSizes:
    """What one process of a model will take.

    sizes   in bytes, for `room.py`
    dtype   number type of its activations and of what it keeps of tokens
    weights  how the weights will lie in memory, for people
    is_estimate  True: this family's cache is estimated
    """

    sizes: Sizes
    dtype: str
    weights: str
    is_estimate: bool


def stated_sizes(of: Stated, how: How) -> StatedSizes:
    """Return what the first process of a model will take on its device.

    Raises:
        ModelError: the weights are not here, or a file is damaged.
    """
    model_type = str(of.config.get("model_type"))
    inner = of.config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else of.config
    kind = text_kind(model_type, text)
    weights = weights_in(of.folder, of.config, of.form, is_wrapped=model_type in WRAPPERS)
    dtype = _dtype(of, text, how)
    itemsize = ITEM_BYTES[dtype]
    stays = _stays(kind, dtype, how)
    num_bytes = [_bytes(one, text, itemsize, how, stays=stays) for one in weights]
    if how.quantization and is_tied(weights):  # the output matrix has codes of its own
        embeddings = max(weights, key=lambda one: one.count)
        num_bytes.append(_rounded(embeddings, 8))
    device = how.device_bytes // (how.num_ranks if how.kind == "cpu" else 1)
    num_layers = len(layer_kinds(kind, text, _number(text, "num_hidden_layers")).seen)
    kept = kept_of(kind, text, how.num_ranks)
    limit = next((text[field] for field in _LENGTHS if type(text.get(field)) is int), LONGEST)
    sizes = Sizes(
        how.kind,
        device=device,
        weights=sum(num_bytes),
        slot=max(1, kept.slot_bytes(itemsize)),
        state=kept.state,
        mask=mask_bytes(
            how.kind, itemsize, num_kinds=num_layers, group=group_of(text), is_head=False
        ),
        scored=scored_bytes(how.kind, itemsize, _number(text, "vocab_size")),
        most_len=limited(kind, text, limit, how.asked),
    )
    few = any(one.kept is not None for one in weights) and stays
    form = how.quantization or ("their own few bits" if few else dtype)
    return StatedSizes(sizes, dtype, form, kind in ESTIMATED)


def head_sizes(folder: Path, config: Mapping[str, Any], dtype: str, how: How) -> StatedSizes:
    """Return what a head will take: its files, and keys, values and a state of each token.

    config  the content of its config.json
    dtype   number type of its target, which a head has unless it is asked for another

    Raises ModelError as `stated_sizes` does.
    """
    dtype = dtype if how.dtype in ("auto", "fastest") else how.dtype
    itemsize = ITEM_BYTES[dtype]
    layer = config.get("transformer_layer_config")
    text = layer if isinstance(layer, dict) else config
    listed = [one for path in weight_files(folder) for one in tensors_in(path)]
    count = sum(Weight(one.name, one.shape).count * _HOLDS.get(one.kind, 0) for one in listed)
    kept, width = kept_of("", {**text, "num_hidden_layers": 1}), _number(text, "hidden_size")
    mask = mask_bytes(how.kind, itemsize, num_kinds=1, group=group_of(text), is_head=True)
    slot = (kept.numbers + width) * itemsize
    sizes = Sizes(how.kind, how.device_bytes, count * itemsize, slot, 0, mask, 0, LONGEST)
    return StatedSizes(sizes, dtype, dtype, is_estimate=True)


def mtp_sizes(
    text: Mapping[str, Any], num_bytes: int, target: StatedSizes, how: How
) -> StatedSizes:
    """Return what a target's own layers for drafting will take in a process of their own.

    text       the part of the target's config.json that describes the language model
    num_bytes  of the tensors in the files that it reads
    target     what the target will take
    """
    number = max(1, num_mtp_layers(text))
    types = ["full_attention"] * number
    kept = kept_of("", {**text, "num_hidden_layers": number, "layer_types": types})
    itemsize = ITEM_BYTES[target.dtype]
    slot = (kept.numbers + number * _number(text, "hidden_size")) * itemsize
    mask = mask_bytes(how.kind, itemsize, num_kinds=1, group=group_of(text), is_head=True)
    most_len = target.sizes.most_len
    sizes = Sizes(how.kind, how.device_bytes, num_bytes, slot, 0, mask, 0, most_len)
    return StatedSizes(sizes, target.dtype, target.dtype, is_estimate=True)


def _dtype(of: Stated, text: Mapping[str, Any], how: How) -> str:
    """Return the number type in which a model will be loaded (as `_choose_dtype` in `model.py`)."""
    if how.dtype in ITEM_BYTES:
        return how.dtype
    if how.dtype == "fastest":
        return "float32"
    named = [part.get(field) for part in (of.config, text) for field in ("dtype", "torch_dtype")]
    found = next((one for one in named if one in ITEM_BYTES), None)
    found = found or ("bfloat16" if isinstance(of.form, GgufFile) else _first_dtype(of.folder))
    is_emulated = how.kind == "cpu" and not CPU_FLAGS.get(found, {""}) & {"", *cpu_flags()}
    return "float32" if is_emulated else found


def _first_dtype(folder: Path) -> str:
    """Return the number type of the first plain tensor of a folder."""
    kinds = (one.kind for path in weight_files(folder) for one in tensors_in(path))
    return next((_IN_FILES[kind] for kind in kinds if kind in _IN_FILES), "float32")


def _stays(kind: str, dtype: str, how: How) -> bool:
    """True if quantised weights of a model stay in their few bits where they can."""
    is_alone = how.kind == "cpu" and how.num_ranks == 1 and how.backend in KEEPING
    return is_alone and kind in FUSED and dtype != "float16"


def _bytes(weight: Weight, text: Mapping[str, Any], itemsize: int, how: How, *, stays: bool) -> int:
    """Return the bytes of a weight, or of the first rank's part of it."""
    if how.quantization and weight.is_matrix:
        bits = 8 if weight.name == "lm_head.weight" else _ROUNDED_BITS[how.quantization]
        return _rounded(weight, bits)
    if stays and weight.kept is not None:
        return weight.kept
    own, whole = _share(weight, text, how.num_ranks)
    return weight.count * own // whole * itemsize


def _rounded(weight: Weight, bits: int) -> int:
    """Return the bytes of a matrix rounded to so many bits, with its scales."""
    group = next((one for one in _GROUPS[bits] if weight.shape[1] % one == 0), 32)
    return weight.count * bits // 8 + weight.count // group * _SCALE_BYTES


def _share(weight: Weight, text: Mapping[str, Any], num_ranks: int) -> tuple[int, int]:
    """Return how much of a weight the first rank has: so many of so many parts.

    The rule is that of `tensor_parallel/split.py`.
    """
    *_, layer, _ = ("", "", *weight.name.split("."))
    if layer not in (*_OF_HEADS, *_INTO, *_OUT_OF) and weight.shape[1:]:
        layer = weight.name.rpartition(".")[2]  # experts in one tensor
    if num_ranks == 1:
        return 1, 1
    if layer in _OF_HEADS:
        return _first(key_heads(text), num_ranks, 1)
    if layer in _INTO:
        return _first(_columns(weight.shape, text, 0), num_ranks, UNIT)
    if layer in _OUT_OF and len(weight.shape) > 1:
        return _first(_columns(weight.shape, text, -1), num_ranks, UNIT)
    if weight.name == "lm_head.weight":
        return _first(weight.shape[0], num_ranks, UNIT)
    return 1, 1


def _columns(shape: Sequence[int], text: Mapping[str, Any], dim: int) -> int:
    """Return how many columns a feed-forward block has, by the shape of one of its weights."""
    if len(shape) <= 2:
        return shape[dim]
    return _number(text, "moe_intermediate_size", "intermediate_size")


def _first(count: int, num_ranks: int, unit: int) -> tuple[int, int]:
    """Return the first rank's share of `count`, and `count`; all of it if it cannot be divided."""
    return (len(shares(count, num_ranks, unit)[0]), count) if num_ranks <= count else (1, 1)


def _number(text: Mapping[str, Any], *fields: str) -> int:
    return next((text[field] for field in fields if type(text.get(field)) is int), 1)
