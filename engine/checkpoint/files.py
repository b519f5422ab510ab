"""What the JSON files of a model's folder state, held to what any model must state.

Everything here is refused with a line that names the file and, where there is one, the field. Knows
no architecture: what a configuration means is asked of transformers, afterwards.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.tensor_list import tensors_in
from engine.errors import ModelError, remedy

# -- model files -----------------------------------------------------------------------------------

MAX_JSON_BYTES = 1 << 26
MAX_EOS_IDS = 128  # half of what a message has room for: a request may name as many again
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
# As architectures name what must be a count: none may be zero, and transformers divides by some.
_COUNTS = (
    *("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "head_dim"),
    *LAYER_COUNTS,
    *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads"),
    *("intermediate_size", "ffn_dim", "n_inner", "vocab_size"),
    *("max_position_embeddings", "n_positions", "n_ctx"),
)
_LARGEST_COUNT = (1 << 31) - 1
# Within these numbers are finite; transformers takes others, and computes NaN or nonsense.
EPSILONS = (0.0, 0.1)
THETAS = (1.0, 1e12)
_EPSILON_FIELDS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")

_KIND_OF_ERROR = re.compile(r"^\w+(Error|Exception): ")

Object = dict[str, Any]


def read_object(path: Path) -> Object:
    """Return the JSON object in a file.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    refuse_odd_file(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: it is longer than {MAX_JSON_BYTES} bytes; get it again")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if text.strip() else None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {remedy(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: it is no JSON ({one_line(error)}); get it again") from error
    if not text.strip():
        raise ModelError(f"{path}: it is empty; get it again")
    if not isinstance(content, dict):
        raise ModelError(f"{path}: it holds no JSON object but {shown(content)}; get it again")
    return content


def read_config(folder: Path) -> Object:
    """Return config.json.

    Raises:
        ModelError: it cannot be read, or states a count that is none, or heads that do not divide.
    """
    path = folder / "config.json"
    stated = read_object(path)
    for part in parts(stated):
        for field in _COUNTS:
            value = part.get(field)
            if value is None:
                continue
            if type(value) is not int or not 1 <= value <= _LARGEST_COUNT:
                raise ModelError(
                    f"{path}: {field} is {shown(value)}; it must be a whole number from 1 on"
                )
        for field in _EPSILON_FIELDS:
            refuse_number(path, part, field, EPSILONS)
        refuse_number(path, part, "rope_theta", THETAS)
        for field in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := part.get(field), dict):
                refuse_number(path, rope, "rope_theta", THETAS)
        refuse_odd_dim(path, "head_dim", part.get("head_dim") or 2)
        packing = part.get("quantization_config")
        if packing is not None and not isinstance(packing, dict):
            raise ModelError(
                f"{path}: quantization_config is {shown(packing)}; it must be an object"
            )
        heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if heads and groups and heads % groups:
            raise ModelError(
                f"{path}: num_attention_heads is {heads}, which num_key_value_heads, {groups}, "
                "does not divide; one of them is wrong"
            )
    return stated


def refuse_number(path: Path, part: Object, field: str, between: tuple[float, float]) -> None:
    """Raise ModelError if a number that is stated lies outside of a range, or is none."""
    found, (least, most) = part.get(field), between
    if found is None:
        return
    if type(found) not in (int, float) or not least <= found <= most:
        raise ModelError(
            f"{path}: {field} is {shown(found)}; it must be a number from {least:g} to {most:g}"
        )


def refuse_odd_dim(path: Path, field: str, dim: int) -> None:
    """Raise ModelError if heads of attention have an odd number of numbers."""
    if dim % 2:
        raise ModelError(
            f"{path}: {field} is {dim}; it must be even, for a rotary embedding turns pairs of "
            "numbers"
        )


def refuse_odd_file(path: Path) -> None:
    """Raise ModelError if something other than a file, or than a link to one, has this name."""
    if path.is_symlink() and not path.exists():
        raise ModelError(f"{path}: this link leads nowhere; get the file again")
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: it is not a file; put the model's own there, or remove it")


def stated_eos_ids(folder: Path, config: Object) -> tuple[int, ...] | None:
    """Return the end-of-text ids that generation_config.json and config.json name; None if none do.

    Raises:
        ModelError: one of the two states no ids there, or more than a text can be ended by.
    """
    files = [("config.json", config)]
    generation = folder / "generation_config.json"
    if generation.exists() or generation.is_symlink():
        files.append((generation.name, read_object(generation)))
    found: set[int] = set()
    is_stated = False
    for name, content in files:
        for part in parts(content):
            value = part.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(token) is not int for token in ids):
                raise ModelError(
                    f"{folder / name}: eos_token_id is {shown(value)}; it must be a token id or a "
                    "list of them"
                )
            found.update(ids)
            is_stated = is_stated or value is not None
            if len(found) > MAX_EOS_IDS:
                raise ModelError(
                    f"{folder / name}: eos_token_id names {len(found)} ids; at most {MAX_EOS_IDS} "
                    "can end a text"
                )
    return tuple(sorted(found)) if is_stated else None


def fields_with(stated: Object, value: object) -> list[str]:
    """Return the fields of a configuration, also of objects in it, that hold just this value."""
    return [field for field, held in _leaves(stated) if type(held) is type(value) and held == value]


def blamed(stated: Object, error: BaseException) -> str:
    """Return the error's line, and with it the field that holds the word which it complains of."""
    line = one_line(error)
    for field, value in _leaves(stated):
        if isinstance(value, str) and value and f"'{value}'" in line and field not in line:
            return f"{field} is {shown(value)} ({line})"
    return line


def shown(value: object) -> str:
    """Return a value as JSON has it, cut to a readable length."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text that says why, cut to a readable length."""
    lines = str(error).strip().splitlines()
    text = lines[0].strip() if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:  # of which what follows is the reason
        text = _KIND_OF_ERROR.sub("", lines[1].strip()).partition(". Errors: ")[0]
    return text if len(text) <= 200 else text[:197] + "..."


def parts(stated: Object) -> Iterator[Object]:
    """Yield the object, and the part of it that describes the text model of several."""
    yield stated
    if isinstance(stated.get("text_config"), dict):
        yield stated["text_config"]


def _leaves(stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field, value in stated.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield field, value


# -- shards ----------------------------------------------------------------------------------------

# The files of a checkpoint's weights: which they are, whether they are whole, what is in them.
#
# Reads the lists in the files (`tensor_list.py`) and no number, without torch and numpy: also
# whoever starts a node looks at them, before it does.

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = Mapping[str, tuple[int, ...]]

# Masks and frequencies that older checkpoints hold and newer models compute.
COMPUTED = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$|(inv_freq|position_ids)$")
_PLAIN_TYPES = ("F32", "BF16", "F16", "F64")
_WHOLE_TYPES = ("I16", "I32", "I64")


def read_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor of a checkpoint, by name.

    Raises:
        ModelError: a file of it is missing, or torn, or is not what its name says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        shapes |= shapes_in(path)
    return shapes


def shapes_in(path: Path) -> Shapes:
    """Return the shape of every tensor in a file, by name.

    Raises:
        ModelError: the file is missing, or torn, or is not what its name says.
    """
    refuse_odd_file(path)
    return {one.name: one.shape for one in tensors_in(path)}


def refuse_odd_weights(folder: Path, *, is_packed: bool) -> None:
    """As `refuse_odd_types`, of all files of a model. Raises ModelError."""
    for path in weight_files(folder):
        refuse_odd_types(path, is_packed=is_packed)


def refuse_odd_types(path: Path, *, is_packed: bool = False, whole: Collection[str] = ()) -> None:
    """Raise ModelError if a weight, bias or norm in a file is of a type that none can have.

    is_packed  the model's matrices are: then only norms and biases have to be plain
    whole      the ends of tensors' names that must be whole numbers
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
    """Raise ModelError if there are more layers than tensors: to lay those out takes for ever."""
    for part in parts(stated):
        for field in LAYER_COUNTS:
            count = part.get(field) or 0
            if count > len(shapes):
                raise ModelError(
                    f"{path}: {field} is {count}, but the checkpoint has {len(shapes)} tensors; "
                    "config.json is of another model"
                )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads: one, or those that the index names.

    Raises:
        ModelError: there is none, or the index names what is not there.
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
    """Whether this is the name of a file in the folder itself."""
    return isinstance(value, str) and value.endswith(".safetensors") and Path(value).name == value
