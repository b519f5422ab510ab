"""Which architectures are refused by config.json alone; of the rest the engine says more.

What transformers knows is read from its source, which takes milliseconds: to import it takes
seconds. Where that source is not as expected, nothing is refused here.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proto.errors import ModelError, did_you_mean, shown

Config = Mapping[str, Any]

_CONFIGS, _CAUSAL = "CONFIG_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
# Every model of these has layers with a state that cannot be rolled back.
_RECURRENT = {
    *("bamba", "bailing_hybrid", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_next"),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
}
# Whose `sliding_window` is that of every layer, where it is a number.
_WINDOWED = {"mistral", "mixtral", "phi3", "starcoder2"}
_PLAIN = {"full_attention"}
USE_ANOTHER = "use a model with plain full attention"


def refuse(name: str, path: Path, stated: Config) -> None:
    """Raise ModelError if it is certain that the engine does not run this model.

    name    of the model, as the user gave it
    path    of its config.json, for messages
    stated  what that holds
    """
    kind = stated.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(
            f"{path}: model_type is {shown(kind)}, and it must name the architecture; is it the "
            "folder of a model for transformers?"
        )
    known, causal = _known()
    if known and kind not in known:
        raise ModelError(
            f"{path}: model_type is {kind!r}, which transformers does not know here; use a model "
            f"that needs no code of its own{did_you_mean(kind, known)}"
        )
    if stated.get("is_encoder_decoder") is True:
        raise ModelError(f"{name}: {kind} is an encoder-decoder model; use a decoder-only one")
    if causal and known[kind] not in {known.get(one) for one in causal}:
        raise ModelError(f"{name}: {kind} is not a causal language model for transformers; use one")
    if why := _why_not_rolled_back(kind, stated):
        raise ModelError(f"{name}: {kind} has {why}; {USE_ANOTHER}")


def _why_not_rolled_back(kind: str, stated: Config) -> str | None:
    if kind == "bloom" or any(part.get("alibi") is True for part in _parts(stated, "attn_config")):
        return "ALiBi position biases, which go by the slot of a token and not by its position"
    if kind in _RECURRENT:
        return "recurrent layers, whose state cannot be rolled back"
    window = stated.get("sliding_window")
    types = next(
        (part["layer_types"] for part in _parts(stated, "text_config") if "layer_types" in part), ()
    )
    of_all = kind in _WINDOWED and type(window) is int and not types
    if of_all or (isinstance(types, list) and "sliding_attention" in types):
        return f"sliding-window attention ({window} tokens), which a rolled-back tree would break"
    return None


def _parts(stated: Config, inner: str) -> Iterator[Config]:
    yield stated
    if isinstance(stated.get(inner), dict):
        yield stated[inner]


@cache
def _known() -> tuple[Mapping[str, str], frozenset[str]]:
    """The class of each model type's configuration, and the types of causal language models."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}, frozenset()
    auto = Path(spec.submodule_search_locations[0]) / "models" / "auto"
    types = dict(_listed(auto / "auto_mappings.py", _CONFIGS))
    if not types:
        return {}, frozenset()
    types |= dict(_listed(auto / "configuration_auto.py", _CONFIGS))
    causal = dict(_listed(auto / "modeling_auto.py", _CAUSAL))
    return types, frozenset(causal)


def _listed(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """The pairs of words in what is assigned to a name at the top of a file, or updates it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=found)))) if (
                found == name
            ):
                pass
            case _:
                continue
        yield from _pairs(statement)


def _pairs(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Tuple(elts=[ast.Constant(value=str(key)), ast.Constant(value=str(value))]):
                yield key, value
            case ast.Tuple(elts=[ast.Constant(value=str(key)), ast.Tuple(elts=[first, *_])]):
                yield key, ast.unparse(first)
            case ast.Dict(keys=keys, values=values):
                for one, other in zip(keys, values, strict=True):
                    if isinstance(one, ast.Constant) and isinstance(other, ast.Constant):
                        yield str(one.value), str(other.value)
            case _:
                pass
