"""The folder of a model: found, and held to what it states, before a node is started.

What a folder must be is known to the engine alone (`checkpoint.py` and `files.py` in
`engine/checkpoint`): its checks that need no torch are made here as well, so both say the same of
it. They are loaded when the first folder is looked at.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coordinator.api.models.fetching import Download, Say
from proto.errors import ModelError, did_you_mean, shown
from proto.head_kinds import HeadKind
from proto.system import is_folder, path_of

# -- architectures ---------------------------------------------------------------------------------

# Which architectures are refused by config.json alone; of the rest the engine says more.
#
# What transformers knows is read from its source, which takes milliseconds: to import it takes
# seconds. Where that source is not as expected, nothing is refused here.

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
    from engine.checkpoint import families

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


# -- folders ---------------------------------------------------------------------------------------

TOKENIZER = "tokenizer.json"
# Without the weights: those are large, and fetched when all else is known to fit.
HEAD_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
ANY_HEAD_FILES = (
    *("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder on this machine; of one on the hub it may lack the weights as yet.

    name     as the user gave it
    stated   what config.json holds
    is_head  whether it is to be read as a head
    """

    name: str
    revision: str | None
    folder: Path
    stated: Mapping[str, Any]
    is_head: bool

    @property
    def config(self) -> Path:
        """Of which messages speak."""
        return self.folder / "config.json"

    @property
    def text_config(self) -> Mapping[str, Any]:
        """What describes the language model."""
        inner = self.stated.get("text_config")
        return inner if isinstance(inner, dict) else self.stated

    def number(self, field: str) -> int | None:
        """A number that its config.json states of the language model."""
        found = self.text_config.get(field)
        return found if type(found) is int else None

    @property
    def is_on_hub(self) -> bool:
        """Whether its files were fetched, or are to be."""
        return not is_folder(self.name)

    def fetch_weights(self, say: Say | None) -> None:
        """Fetch what is not here yet. Raises ModelError."""
        from engine.checkpoint.checkpoint import WANTED, WANTED_OF_HEADS

        if self.is_on_hub:
            wanted = WANTED_OF_HEADS if self.is_head else WANTED
            _fetch(self.name, self.revision, wanted, say)

    def check_weights(self) -> None:
        """Raises ModelError if a file of weights is missing or torn, or there are too few."""
        from engine.checkpoint import files as shards
        from engine.checkpoint.checkpoint import refuse_no_safetensors
        from engine.quantised.formats import read_format

        with _as_ours():
            if self.is_head:
                self._check_head_files()
                return
            refuse_no_safetensors(self.name, self.folder)
            shapes = shards.read_shapes(self.folder)
            form = read_format(self.config, dict(self.stated))
            shards.refuse_odd_weights(self.folder, is_packed=form is not None)
            shards.check_layers(self.config, dict(self.stated), shapes)

    def _check_head_files(self) -> None:
        if not any((self.folder / name).exists() for name in ANY_HEAD_FILES):
            names = " or ".join(("model.safetensors", "pytorch_model.bin"))
            raise ModelError(
                f"{self.folder}: no weights of a head; name them {names}, of Medusa "
                f"{ANY_HEAD_FILES[0]} or {ANY_HEAD_FILES[1]}"
            )
        from engine.checkpoint import files as shards

        for path in self._head_files():
            shards.refuse_odd_types(path, whole=("d2t",))

    def check_head_config(self, kind: HeadKind) -> None:
        """Raises ModelError if its config.json lacks what a head of this kind needs."""
        from engine.heads.head_tensors import refuse_odd_config

        with _as_ours():
            refuse_odd_config(self.config, dict(self.stated), kind)

    def _head_files(self) -> list[Path]:
        """The file of a head that can be read here; of a head on the hub it may be missing yet."""
        return [self.folder / n for n in HEAD_FILES if (self.folder / n).is_file()][:1]

    def head_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of a head's tensors, where they stand in a file that can be read here."""
        from engine.checkpoint import files as shards

        with _as_ours():
            for path in self._head_files():
                return shards.shapes_in(path)
        return {}


def find(name: str, revision: str | None, *, is_head: bool = False) -> Checkpoint:
    """The model's folder, of one on the hub without weights; its config.json is as it must be.

    Raises ModelError.
    """
    from engine.checkpoint.checkpoint import SMALL, find_folder
    from engine.checkpoint.files import read_config, stated_eos_ids
    from engine.quantised.formats import read_format

    try:
        with _as_ours():
            folder = find_folder(name, revision, SMALL, fetch=_fetch_silently)
    except ModelError as error:
        raise ModelError(f"{error}{_near(name)}") from error
    with _as_ours():
        stated = read_config(folder)
        checkpoint = Checkpoint(name, revision, folder, stated, is_head)
        if not is_head:
            stated_eos_ids(folder, stated)
            read_format(checkpoint.config, stated)
            refuse(name, checkpoint.config, stated)
    return checkpoint


def _near(name: str) -> str:
    """Which folder was probably meant, if there is one beside it."""
    path = path_of(name)
    if is_folder(name) or not path.name or not is_folder(str(path.parent)):
        return ""
    beside = {str(one.parent): one.parent.name for one in path.parent.glob("*/config.json")}
    meant = did_you_mean(path.name, beside.values())
    return next((meant.replace(n, f) for f, n in beside.items() if f" {n}?" in meant), "")


def _fetch_silently(name: str, revision: str | None, wanted: Sequence[str]) -> Path:
    return _fetch(name, revision, wanted, lambda _: None)


def _fetch(name: str, revision: str | None, wanted: Sequence[str], say: Say | None) -> Path:
    from engine.checkpoint.checkpoint import NOT_WANTED, hub_errors

    with _as_ours(), hub_errors(name, revision):
        return Download(name, revision, wanted, NOT_WANTED).run(say)


@contextmanager
def _as_ours() -> Iterator[None]:
    """The engine's refusal as the project's."""
    from engine.errors import EngineError

    try:
        yield
    except EngineError as error:
        raise ModelError(str(error)) from error
