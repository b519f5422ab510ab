"""Finds a model's folder and checks its files before a node is started.

The rules for a folder are in the engine alone (`checkpoint.py` and `files.py` in
`engine/checkpoint`). Its checks that need no torch are called here as well, so that coordinator and
node give the same answer. They are imported when the first folder is checked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from coordinator.api.config_base import called
from coordinator.api.models.fetching import Download, Say
from coordinator.launching.devices import num_ranks
from proto.errors import ConfigurationError, ModelError, did_you_mean
from proto.head_kinds import HeadKind
from proto.installation import another_package
from proto.node_config import NodeConfig
from proto.system import is_folder, path_of

if TYPE_CHECKING:
    from engine.checkpoint.stated import Stated
    from engine.checkpoint.tokenizer_files import ReadTokenizer

TOKENIZER, SAFETENSORS = "tokenizer.json", ".safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder on this machine; that of a model on the hub may still lack the weights.

    name     the name as the user gave it
    stated   the content of config.json
    model    what its files state; None: it is read as a head (a small model that drafts from the
             target's hidden states)
    """

    name: str
    revision: str | None
    folder: Path
    stated: Mapping[str, Any]
    model: "Stated | None"

    @property
    def config(self) -> Path:
        """Return the path of config.json, for messages."""
        return self.folder / "config.json"

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Return the part of config.json that describes the language model."""
        return text_part(self.stated)

    @property
    def is_head(self) -> bool:
        """True if it is read as a head."""
        return self.model is None

    def number(self, field: str) -> int | None:
        """Return an integer field of the language model's config; None if it has none."""
        found = self.text_config.get(field)
        return found if type(found) is int else None

    @property
    def is_on_hub(self) -> bool:
        """True if the model is on the hub: its files were downloaded or are still to be."""
        return not is_folder(self.name)

    @property
    def is_wrapped(self) -> bool:
        """True if it is the language model in a model of several modalities."""
        from engine.checkpoint.families import WRAPPERS

        return self.stated.get("model_type") in WRAPPERS

    def tensor_names(self) -> list[str]:
        """Return the names of its tensors; none if its weights are not here yet. Raises ModelError.

        Of a model on the hub those in the index of its files, if it has one.
        """
        from engine.heads.stated import INDEX

        if self.is_on_hub and (index := self.folder / INDEX).exists():
            listed = read_object(index).get("weight_map")
            return list(listed) if isinstance(listed, dict) else []
        files = sorted(self.folder.glob(f"*{SAFETENSORS}"))
        return [name for file in files for name in tensor_names(file)]

    def fetch_weights(self, say: Say | None) -> None:
        """Download the weights that are missing here. Raises ModelError."""
        from engine.checkpoint.checkpoint import WANTED, WANTED_OF_HEADS

        if self.is_on_hub:
            wanted = WANTED_OF_HEADS if self.is_head else WANTED
            _fetch(self.name, self.revision, wanted, say)

    def check_weights(self) -> None:
        """Raise ModelError if weights are missing, incomplete, or fewer than stated."""
        if self.model is None:
            self._check_head_files()
        else:
            self.model.check_weights()

    def check_quantization(self, node: NodeConfig) -> None:
        """Raise ModelError if the node could not round this model's weights as it is asked."""
        from engine.checkpoint.families import text_kind
        from engine.quantised.asked import refuse_elsewhere, refuse_rounding

        if not node.quantization or self.model is None:
            return
        ranks = num_ranks(node.device, node.tensor_parallel_size)
        refuse_elsewhere(self.name, node.quantization, backend=node.backend, num_ranks=ranks)
        refuse_rounding(
            self.name,
            node.quantization,
            device=node.device,
            kind=text_kind(str(self.stated.get("model_type")), self.text_config),
            is_quantised=self.model.form is not None,
        )

    def check_reproducible(self, node: NodeConfig) -> None:
        """Raise ModelError if the node could not run this model in reproducible mode as asked."""
        from engine.checkpoint.families import family, text_kind

        kind = text_kind(str(self.stated.get("model_type")), self.text_config)
        if node.fixed_rows and family(kind).has_states:
            raise ModelError(
                f"{self.name}: {called('reproducible')} is not for layers with a running state; "
                "leave it out"
            )

    def _check_head_files(self) -> None:
        from engine.checkpoint import files as shards
        from engine.heads.stated import head_file
        from engine.quantised.formats import read_format

        path = head_file(self.folder)
        is_packed = read_format(self.folder / "config.json", dict(self.stated)) is not None
        if path.suffix == SAFETENSORS:
            shards.refuse_odd_types(path, is_packed=is_packed, whole=("d2t",))

    def check_head_config(self, kind: HeadKind | None, target: "Checkpoint") -> None:
        """Raise ModelError if config.json lacks what a head needs or is for another target.

        kind  the kind of head, as its files say; None: they name no kind
        """
        from engine.heads import stated

        if kind is None:
            raise ModelError(f"{self.config}: {stated.NO_HEAD}")
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers")
        if kind is not HeadKind.MEDUSA:
            of_target = stated.TargetSizes(target.name, *map(target.number, sizes))
            stated.refuse_other_target(self.config, dict(self.stated), kind, of_target)
        stated.refuse_odd_config(self.config, dict(self.stated), kind)

    def head_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a head's tensors by name, read from its safetensors file.

        Empty if there is no such file, or if it is not downloaded yet.

        Raises ModelError if the file cannot be read.
        """
        from engine.checkpoint import files as shards
        from engine.heads.stated import find_head_file

        path = find_head_file(self.folder)
        if path is None or path.suffix != SAFETENSORS:
            return {}
        return shards.shapes_in(path)


WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")  # each only if there are none of those before


def weight_bytes(folder: Path) -> int:
    """Return the size of the weights in a model's folder; 0: there are none. Raises OSError."""
    files = next((found for one in WEIGHTS if (found := list(folder.glob(one)))), [])
    return sum(file.stat().st_size for file in files)


def find(name: str, revision: str | None, *, is_head: bool = False) -> Checkpoint:
    """Find a model's folder and check its config.json; return it as Checkpoint; fetches no weights.

    Raises ModelError; ConfigurationError where the program has an `engine` of its own.
    """
    _refuse_other_engine()
    from engine.checkpoint.checkpoint import SMALL, find_folder
    from engine.checkpoint.files import read_config
    from engine.checkpoint.stated import read_stated

    try:
        folder = find_folder(name, revision, SMALL, fetch=_fetch_silently)
    except ModelError as error:
        raise ModelError(f"{error}{_near(name)}") from error
    if is_head:
        return Checkpoint(name, revision, folder, read_config(folder), None)
    model = read_stated(name, folder)
    return Checkpoint(name, revision, folder, model.config, model)


def text_part(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    inner = stated.get("text_config")
    return inner if isinstance(inner, dict) else stated


def read_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a model's file. Raises ModelError.

    Raises ConfigurationError too where the program has an `engine` of its own.
    """
    _refuse_other_engine()
    from engine.checkpoint.files import read_object as read

    return read(path)


def head_kind_in(
    config: Mapping[str, object], find: Callable[[str], Path | None]
) -> HeadKind | None:
    """Return the kind of the head in a checkpoint, as nodes recognise it; None: a whole model.

    config  the content of config.json
    find    returns the path of another file of it by its name; None: there is none

    Raises ConfigurationError where the program has an `engine` of its own.
    """
    _refuse_other_engine()
    from engine.heads.recognised import kind_in

    return kind_in(config, find)


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file. Raises ModelError."""
    return list(tensor_bytes(path))


def tensor_bytes(path: Path) -> dict[str, int]:
    """Return the size of each tensor in a safetensors file, by its name. Raises ModelError."""
    from engine.checkpoint.tensor_list import tensors_in

    return {one.name: one.end - one.start for one in tensors_in(path)}


def folder_of_file(name: str) -> Path:
    """Return the folder of the model in a GGUF file. Raises ModelError if it cannot be used."""
    _refuse_other_engine()
    from engine.checkpoint.gguf_folder import folder_of

    path = path_of(name)
    if not path.is_file():
        raise ModelError(f"{name}: no such file; give a GGUF file or a model's folder")
    return folder_of(path)


def read_tokenizer(folder: Path) -> "ReadTokenizer":
    """Return the tokenizer in a model's folder, cached until its files change.

    Nobody may change it, because other threads use it too.

    Raises ModelError; ConfigurationError where the program has an `engine` of its own.
    """
    _refuse_other_engine()
    from engine.checkpoint.tokenizer_files import changed_ns

    return _read_tokenizer(folder, changed_ns(folder))


@lru_cache(maxsize=4)
def _read_tokenizer(folder: Path, _changed_ns: tuple[int, ...]) -> "ReadTokenizer":
    from engine.checkpoint.tokenizer_files import read_tokenizer as read

    return read(folder)


def check_beside_tokenizer(folder: Path) -> None:
    """Raise ModelError if a file that adds tokens to a tokenizer.json cannot be read."""
    from engine.checkpoint.tokenizer_files import read_stated

    read_stated(folder)


def named_tokens(folder: Path) -> dict[str, str | None]:
    """Return the special tokens that the files beside a tokenizer.json name, by their names.

    None: a file says that there is none. Raises ModelError; ConfigurationError where the program
    has an `engine` of its own.
    """
    _refuse_other_engine()
    from engine.checkpoint.tokenizer_files import read_stated

    stated = read_stated(folder)
    found = {**stated.names, **stated.own}
    return {name: None if token is None else str(token) for name, token in found.items()}


def packed(tokenizer: Tokenizer) -> bytes:
    """Return a tokenizer as bytes, for drafters that have another one."""
    from engine import words

    return words.packed(tokenizer)


def unpacked(data: bytes) -> Tokenizer:
    """Return the tokenizer that `packed` has made these bytes of."""
    from engine import words

    return words.unpacked(data)


def limited(config: Mapping[str, Any], limit: int, asked: int) -> int:
    """Return how many tokens a text of a model may have so that all of it is read in one way.

    config  the content of the model's config.json
    limit, asked  as for `engine.checkpoint.long_texts.limited`
    """
    from engine.checkpoint import families, long_texts

    text = text_part(config)
    kind = families.text_kind(str(config.get("model_type")), text)
    return long_texts.limited(kind, text, limit, asked)


def _refuse_other_engine() -> None:
    """Raise ConfigurationError where the program has an `engine` of its own."""
    if other := another_package("engine"):
        raise ConfigurationError(
            f"another package `engine` is loaded, {other}; use the two in processes of their own"
        )


def _near(name: str) -> str:
    """Return a suggestion of a folder with a similar name beside it; "": there is none."""
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

    with hub_errors(name, revision):
        return Download(name, revision, wanted, NOT_WANTED).run(say)
