"""Check that a model's files fit each other, before any weight is read.

Owns the facts about a model's folder (`Checked`). Knows no device and reads no weight.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from engine.checkpoint import families
from engine.checkpoint.checkpoint import find_checkpoint
from engine.checkpoint.files import Names, Object, Shapes, blamed
from engine.checkpoint.parts import Lazy, plain_parts
from engine.checkpoint.stated import read_stated
from engine.checkpoint.stated_text import stored_text
from engine.checkpoint.tensors import check_shapes
from engine.checkpoint.wrapped import as_in_model, language_model
from engine.errors import ModelError
from engine.quantised.formats import Format, GgufFile, stated_fields
from engine.quantised.gguf_checkpoint import GgufCheckpoint
from engine.quantised.packed_checkpoint import PackedCheckpoint


@dataclass(frozen=True, slots=True)
class Checked:
    """A model's folder whose tensors' sizes fit its config.json; no weight has been read yet.

    config  transformers' configuration of the model; of a wrapper, that of its language model
    plain   the same without its fields about quantisation
    packed  reads the weights if they are packed (quantised); None: they are plain
    empty   the model on `meta`, without memory
    shapes  shape of each tensor, by its name, as in a plain checkpoint
    names   where the files have the tensors of a wrapper's language model; None: it is no wrapper
    stated_eos  the end-of-text ids that the folder's files name
    """

    folder: Path
    config: Any
    plain: Any
    packed: PackedCheckpoint | GgufCheckpoint | None
    empty: Any
    shapes: Shapes
    names: Names | None
    stated_eos: tuple[int, ...]

    def tensors(self) -> dict[str, Lazy] | None:
        """Return the model's plain tensors, read when used; None: the folder's are just these."""
        if self.packed is not None:
            return self.packed.tensors(self.empty)
        return None if self.names is None else plain_parts(self.folder, {}, self.names)

    @property
    def text_config(self) -> Any:
        """Return the part of the configuration that describes the language model."""
        return self.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        """Return V, the number of logits of a row."""
        return _vocab_size(self.empty, self.text_config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the token ids that end a text (`LoadedModel.eos_token_ids`)."""
        return tuple(token for token in self.stated_eos if 0 <= token < self.vocab_size)


def check_checkpoint(name: str, revision: str | None) -> Checked:
    """Check a model's tensors' sizes against config.json; return the facts; reads no weight.

    Sets transformers' own logging to errors only, and its progress bars off.

    Raises:
        ModelError: with one line that says what is wrong and what to do.
    """
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = find_checkpoint(name, revision)
    path = folder / "config.json"
    files = read_stated(name, folder)
    stated, form, shapes = files.config, files.form, files.check_weights()
    names = stored_text(shapes) if stated["model_type"] in families.WRAPPERS else None
    packed = None if form is None else _packed(folder, form, names)
    config = _read_config(path, stated)
    families.refuse(name, path, config.to_dict(), config.get_text_config(decoder=True).to_dict())
    if packed is not None:
        shapes = packed.shapes
    elif names is not None:
        shapes = {own: shapes[there.name] for own, there in names.items()}
    if names is not None:
        config = _language_model(path, stated, config, names)
    plain = _without_packing(config)
    empty = _check_sizes(path, stated, plain, shapes)
    if packed is None and names is not None:
        names = as_in_model(names, shapes, empty)
    return Checked(folder, config, plain, packed, empty, shapes, names, files.eos_ids)


def _packed(folder: Path, form: Format, names: Names | None) -> PackedCheckpoint | GgufCheckpoint:
    """Return what reads a folder's quantised weights. Raises ModelError if they are damaged."""
    if isinstance(form, GgufFile):
        return GgufCheckpoint(form)
    return PackedCheckpoint(folder, form, names)


def _read_config(path: Path, stated: Object) -> Any:
    """Return transformers' configuration made of config.json. Raises ModelError if it cannot."""
    try:
        return AutoConfig.from_pretrained(
            path.parent, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers computes with what it reads: any error is possible
        raise ModelError(f"{path}: it cannot be used: {blamed(stated, error)}") from error


def _language_model(path: Path, stated: Object, config: Any, names: Names) -> Any:
    """Return the configuration of a wrapper's language model. Raises ModelError if it is odd."""
    try:
        return language_model(config, stated, names)
    except Exception as error:  # as above
        raise ModelError(f"{path}: it cannot be used: {blamed(stated, error)}") from error


def _without_packing(config: Any) -> Any:
    """Return a copy of a transformers configuration without its fields about quantisation."""
    plain = deepcopy(config)
    for part, field in stated_fields(plain):
        delattr(part, field)
    return plain


def _check_sizes(path: Path, stated: Object, config: Any, shapes: Shapes) -> Any:
    """Return the model on `meta` (without memory), after checking its sizes against the checkpoint.

    Raises ModelError if they do not fit.
    """
    loader: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = loader.from_config(config, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(f"{path}: no model can be made of it: {blamed(stated, error)}") from error
    check_shapes(path, stated, model, shapes)
    return model


def _vocab_size(model: Any, config: Any) -> int:
    """Return V, the rows of the output embedding; without one config.json's vocab_size."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(config.vocab_size if weight is None else weight.shape[0])
