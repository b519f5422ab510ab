"""Checks of what a model's files state, made before any weight is read.

Needs no torch and no numpy, because the coordinator makes these checks before it starts a node; the
node makes them again, on its own host.
"""

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint import families
from engine.checkpoint.checkpoint import refuse_no_safetensors
from engine.checkpoint.files import (
    Object,
    Shapes,
    check_layers,
    read_config,
    read_shapes,
    refuse_odd_weights,
    stated_eos_ids,
)
from engine.quantised.formats import Format, read_format
from proto.head_kinds import head_kind, refuse_head


@dataclass(frozen=True, slots=True)
class Stated:
    """What the JSON files in a model's folder state, checked.

    name     the model's name as the user gave it, for messages
    config   the content of config.json
    form     how the weights are quantised; None: they are plain
    eos_ids  the ids that end a text
    """

    name: str
    folder: Path
    config: Object
    form: Format | None
    eos_ids: tuple[int, ...]

    def check_weights(self) -> Shapes:
        """Return the shape of each tensor in the files, by its name there.

        Raises:
            ModelError: weights are missing, incomplete, of a wrong type, or fewer than stated.
        """
        refuse_no_safetensors(self.name, self.folder)
        shapes = read_shapes(self.folder)
        refuse_odd_weights(self.folder, is_packed=self.form is not None)
        check_layers(self.folder / "config.json", self.config, shapes)
        return shapes


def read_stated(name: str, folder: Path) -> Stated:
    """Return what the JSON files in the folder of a whole model state.

    Raises:
        ModelError: a file cannot be read, a field is wrong, it is a head, or such models are not
            run here.
    """
    config = read_config(folder)
    refuse_head(name, head_kind(config))
    path = folder / "config.json"
    stated = Stated(name, folder, config, read_format(path, config), stated_eos_ids(folder, config))
    families.refuse(name, path, config)
    return stated
