"""Read the JSON files of a model's folder and check what every model must have.

Every error is one line that names the file and, where there is one, the field. Knows no
architecture: what a configuration means is left to transformers, afterwards.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf_list import gguf_in, read_gguf, refuse_other_config
from engine.checkpoint.long_texts import LONG_ROPES
from engine.checkpoint.tensor_list import tensors_in
from engine.errors import GET_AGAIN, ModelError
from proto.system import cannot_read

# -- model files -----------------------------------------------------------------------------------

MAX_JSON_BYTES = 1 << 26
MAX_EOS_IDS = 128  # half of what a message can hold: a request may name as many again
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
# Fields that must be positive whole numbers, in the spellings of all architectures; transformers
# divides by some of them.
_COUNTS = (
    *("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "head_dim"),
    *LAYER_COUNTS,
    *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads"),
    *("intermediate_size", "ffn_dim", "n_inner", "vocab_size"),
    *("max_position_embeddings", "n_positions", "n_ctx"),
)
_LARGEST_COUNT = (1 << 31) - 1
# Ranges of normal values; transformers accepts others, and computes NaN or nonsense with them.
EPSILONS = (0.0, 0.1)
THETAS = (1.0, 1e12)
_EPSILON_FIELDS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")

_KIND_OF_ERROR = re.compile(r"^\w+(Error|Exception): ")

Object = dict[str, Any]


def read_object(path: Path) -> Object:
    """Return the JSON object that a file holds.

    Raises:
        ModelError: the file cannot be read, or holds something other than a JSON object.
    """
    refuse_odd_file(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: it is longer than {MAX_JSON_BYTES} bytes; get it again")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if text.strip() else None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {cannot_read(error, GET_AGAIN)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: it is no JSON ({one_line(error)}); get it again") from error
    if not text.strip():
        raise ModelError(f"{path}: it is empty; get it again")
    if not isinstance(content, dict):
        raise ModelError(f"{path}: it holds no JSON object but {as_json(content)}; get it again")
    return content


def read_config(folder: Path) -> Object:
    """Return the content of a folder's config.json, after checking its numbers.

    Raises:
        ModelError: the file cannot be read, a number is out of its range, or the number of
            attention heads is no multiple of the number of key-value heads.
    """
    path = folder / "config.json"
    stated = read_object(path)
    for part in parts(stated):
        for field in _COUNTS:
            value = part.get(field)
            if value is None:
                continue
            # Some models state a width for each layer.
            numbers = value if field == "intermediate_size" and type(value) is list else [value]
            if not numbers or not all(
                type(one) is int and 1 <= one <= _LARGEST_COUNT for one in numbers
            ):
                raise ModelError(
                    f"{path}: {field} is {as_json(value)}; it must be a whole number from 1 on"
                )
        for field in _EPSILON_FIELDS:
            refuse_number(path, part, field, EPSILONS)
        refuse_number(path, part, "rope_theta", THETAS)
        for field in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := part.get(field), dict):
                refuse_number(path, rope, "rope_theta", THETAS)
                _refuse_odd_factors(path, field, rope)
        refuse_odd_dim(path, "head_dim", part.get("head_dim") or 2)
        packing = part.get("quantization_config")
        if packing is not None and not isinstance(packing, dict):
            raise ModelError(
                f"{path}: quantization_config is {as_json(packing)}; it must be an object"
            )
        heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if heads and groups and heads % groups:
            raise ModelError(
                f"{path}: num_attention_heads is {heads}, which num_key_value_heads, {groups}, "
                "does not divide; one of them is wrong"
            )
    return stated


def refuse_number(path: Path, part: Object, field: str, between: tuple[float, float]) -> None:
    """Raise ModelError if a field is present and is not a number in the range `between`."""
    found, (least, most) = part.get(field), between
    if found is None:
        return
    if type(found) not in (int, float) or not least <= found <= most:
        raise ModelError(
            f"{path}: {field} is {as_json(found)}; it must be a number from {least:g} to {most:g}"
        )


def _refuse_odd_factors(path: Path, field: str, rope: Object) -> None:
    """Raise ModelError if a longrope in config.json lacks one of its two lists of factors."""
    if rope.get("rope_type", rope.get("type")) not in LONG_ROPES:
        return
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        numbers = factors if isinstance(factors, list) else []
        if not numbers or not all(type(one) in (int, float) and one > 0 for one in numbers):
            raise ModelError(
                f"{path}: {field}.{name} is {as_json(factors)}; a longrope needs it, as a list of "
                "numbers above 0"
            )


def refuse_odd_dim(path: Path, field: str, dim: int) -> None:
    """Raise ModelError if `dim`, the size of an attention head, is odd."""
    if dim % 2:
        raise ModelError(
            f"{path}: {field} is {dim}; it must be even, for a rotary embedding turns pairs of "
            "numbers"
        )


def refuse_odd_file(path: Path) -> None:
    """Raise ModelError if `path` exists and is neither a file nor a link to one."""
    if path.is_symlink() and not path.exists():
        raise ModelError(f"{path}: this link leads nowhere; get the file again")
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: it is not a file; put the model's own there, or remove it")


def stated_eos_ids(folder: Path, config: Object) -> tuple[int, ...]:
    """Return the ids that end a text, ascending; may be ().

    As in transformers, generation_config.json alone counts where there is one, else config.json:
    its own field, or that of the language model in it. An architecture has no default.

    Raises:
        ModelError: eos_token_id is not a token id or a list of them, or there are more than
            `MAX_EOS_IDS`.
    """
    of_parts = [_eos_ids(folder / "config.json", part) for part in parts(config)]
    found = next((ids for ids in of_parts if ids is not None), None)
    generation = folder / "generation_config.json"
    if generation.exists() or generation.is_symlink():
        found = _eos_ids(generation, read_object(generation))
    return tuple(sorted(set(found or ())))


def _eos_ids(path: Path, part: Object) -> list[int] | None:
    """Return the eos_token_id of a file as a list; None if it states none. Raises ModelError."""
    value = part.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise ModelError(
            f"{path}: eos_token_id is {as_json(value)}; it must be a token id or a list of them"
        )
    if len(set(ids)) > MAX_EOS_IDS:
        raise ModelError(
            f"{path}: eos_token_id names {len(set(ids))} ids; at most {MAX_EOS_IDS} can end a text"
        )
    return None if value is None else ids


def fields_with(stated: Object, value: object) -> list[str]:
    """Return the names of the fields, nested ones too, whose value equals `value` in type too."""
    return [field for field, held in _leaves(stated) if type(held) is type(value) and held == value]


def blamed(stated: Object, error: BaseException) -> str:
    """Return an error's text as one line, and name the configuration field it complains about.

    The field is named if the error quotes the field's value and does not name the field itself.
    """
    line = one_line(error)
    for field, value in _leaves(stated):
        if isinstance(value, str) and value and f"'{value}'" in line and field not in line:
            return f"{field} is {as_json(value)} ({line})"
    return line


def as_json(value: object) -> str:
    """Return a value as a JSON file spells it, cut to 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def one_line(error: BaseException) -> str:
    """Return the line of an error's text that gives the reason, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    text = lines[0].strip() if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:  # the reason is on the next line
        text = _KIND_OF_ERROR.sub("", lines[1].strip()).partition(". Errors: ")[0]
    return text if len(text) <= 200 else text[:197] + "..."


def parts(stated: Object) -> Iterator[Object]:
    """Yield a configuration, and its `text_config` (the language model of a multimodal one)."""
    yield stated
    if isinstance(stated.get("text_config"), dict):
        yield stated["text_config"]


def _leaves(stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (field, value) of every field that holds no object, nested ones too."""
    for field, value in stated.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield field, value


# -- shards ----------------------------------------------------------------------------------------

# The files of a checkpoint's weights: which they are, whether they are complete, what they hold.
#
# Reads the tensor lists in the files' headers (`tensor_list.py`) and no weight. Uses neither torch
# nor numpy, because the coordinator checks the files too, before it starts a node.

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor of a model is in the files.

    name        its name there
    is_swapped  its last two dimensions are the other way round there
    """

    name: str
    is_swapped: bool = False


Names = Mapping[str, Stored]
"""The tensors of a model that is read out of a larger one, by their names in the model."""

# Masks and rotary frequencies: older checkpoints store them, newer models compute them.
COMPUTED = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|(inv_freq|position_ids)$")
_PLAIN_TYPES = ("F32", "BF16", "F16", "F64")
_WHOLE_TYPES = ("I16", "I32", "I64")


def read_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor of a checkpoint, by name (of a GGUF file: by ours).

    Raises:
        ModelError: a file is missing or damaged, or is no safetensors file.
    """
    gguf = gguf_in(folder)
    if gguf is not None:
        return {name: entry.shape for name, entry in read_gguf(gguf).tensors.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        shapes |= shapes_in(path)
    return shapes


def shapes_in(path: Path) -> Shapes:
    """Return the shape of every tensor in a file, by name.

    Raises:
        ModelError: the file is missing or damaged, or is no safetensors file.
    """
    refuse_odd_file(path)
    return {one.name: one.shape for one in tensors_in(path)}


def refuse_odd_weights(folder: Path, *, is_packed: bool) -> None:
    """Raise ModelError if a tensor in any file of a model has a wrong type (`refuse_odd_types`)."""
    if gguf_in(folder) is not None:
        return  # only known types are read
    for path in weight_files(folder):
        refuse_odd_types(path, is_packed=is_packed)


def refuse_odd_types(path: Path, *, is_packed: bool = False, whole: Collection[str] = ()) -> None:
    """Raise ModelError if a weight, bias or norm in a file has a number type that is not allowed.

    is_packed  True: the matrices are packed (quantised), so only norms and biases must be floats
    whole      endings of the names of tensors that must hold integers
    """
    wanted: tuple[str, ...]
    for one in tensors_in(path):
        name, kind = one.name, one.kind
        is_plain_one = name.endswith((".weight", ".bias")) and not COMPUTED.search(name)
        if name.endswith(tuple(whole)):
            wanted, words = _WHOLE_TYPES, "whole numbers (int64, int32 or int16)"
        elif is_plain_one and (len(one.shape) < 2 or not is_packed):
            wanted, words = _PLAIN_TYPES, "float32, bfloat16 or float16"
        else:
            continue
        if kind not in wanted:
            raise ModelError(
                f"{path}: {name} holds numbers of type {kind}, and they must be {words}; get a "
                "checkpoint with plain weights"
            )


def check_layers(path: Path, stated: Object, shapes: Shapes) -> None:
    """Raise ModelError if config.json names more layers than the checkpoint has tensors.

    A wrong, huge number of layers would otherwise take for ever to construct. A GGUF file is also
    compared with config.json by its own fields.

    path    path of config.json, for messages
    stated  the content of config.json
    shapes  name -> shape of the checkpoint's tensors
    """
    gguf = gguf_in(path.parent)
    if gguf is not None:
        refuse_other_config(read_gguf(gguf), path, stated)
    for part in parts(stated):
        for field in LAYER_COUNTS:
            count = part.get(field) or 0
            if count > len(shapes):
                raise ModelError(
                    f"{path}: {field} is {count}, but the checkpoint has {len(shapes)} tensors; "
                    "config.json is of another model"
                )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model: model.safetensors, or those that its index names.

    Raises:
        ModelError: there is neither the file nor an index, or the index names a missing file.
    """
    whole, index = folder / _WHOLE, folder / _INDEX
    if whole.exists() or whole.is_symlink():
        return [whole]
    if not (index.exists() or index.is_symlink()):
        raise ModelError(f"{folder}: it has neither {_WHOLE} nor {_INDEX}; name its weights so")
    content = read_object(index)
    named = content.get("weight_map")
    if not isinstance(named, dict) or not named or not all(map(_is_name, named.values())):
        raise ModelError(f"{index}: weight_map must name a file for each tensor; get it again")
    if not isinstance(content.get("metadata"), dict):
        raise ModelError(f"{index}: metadata must be an object, if an empty one; get it again")
    files = [folder / name for name in sorted(set(named.values()))]
    for path in files:
        if not path.exists():
            raise ModelError(f"{index}: it names {path.name}, which is not there; get it again")
    return files


def _is_name(value: object) -> bool:
    """True if the value is the name of a safetensors file, without a folder."""
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value
