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
    from engine import families  # which is loaded with the first folder that is looked at

    known, causal = _known()
    if known and kind not in known:
        raise ModelError(
            f"{path}: model_type is {kind!r}, which transformers does not know here; use a model "
            f"that needs no code of its own{did_you_mean(kind, known)}"
        )
    if families.has_encoder(kind, stated):
        raise ModelError(f"{name}: {kind} is an encoder-decoder model; use a decoder-only one")
    if causal and known[kind] not in {known.get(one) for one in causal}:
        raise ModelError(f"{name}: {kind} is not a causal language model for transformers; use one")
    inner = stated.get("text_config")
    if why := families.why_not(kind, inner if isinstance(inner, dict) else stated):
        raise ModelError(f"{name}: {kind} has {why}; {families.USE_ANOTHER}")


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
