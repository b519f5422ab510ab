"""Read from the target's checkpoint what a head shares with it: sizes and a few tensors.

No other weight of the target is read. Knows no kind of head.
"""

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.checked import Checked, check_checkpoint
from engine.checkpoint.files import one_line, weight_files
from engine.checkpoint.model import max_model_len
from engine.errors import ModelError
from engine.heads.head_tensors import linear

_LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class Target:
    """Sizes of a target, and access to the tensors that a head may share with it.

    vocab_size  V, the number of logits of a row
    checked     what its files hold
    """

    def __init__(self, name: str, revision: str | None, max_len: int = 0) -> None:
        """Read the target's config.json and the headers of its weight files.

        max_len  maximum length of a text that was asked for, as for `load_model`

        Raises:
            ModelError: the model cannot be used as a target.
        """
        self.checked: Checked = check_checkpoint(name, revision)
        config = self.checked.text_config
        self.name = name
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.vocab_size = self.checked.vocab_size
        self.max_model_len = max_model_len(name, config, max_len)
        self.eos_token_ids = self.checked.eos_token_ids

    def embedding(self) -> torch.Tensor:
        """Return the target's token embeddings [at least vocab_size, hidden_size].

        Raises:
            ModelError: the tensor is missing or cannot be read.
        """
        return self._read(self._names(self.checked.empty.get_input_embeddings(), "weight"))

    def output(self) -> torch.nn.Linear:
        """Return the target's output matrix: hidden state after the last norm -> logits.

        Raises:
            ModelError: the target has none, or it cannot be read.
        """
        empty = self.checked.empty
        module = empty.get_output_embeddings()
        if module is None:
            raise ModelError(f"{self.name}: it has no output matrix that a head could use")
        names = self._names(module, "weight")
        inputs = empty.get_input_embeddings()
        if module.weight is inputs.weight or self.checked.text_config.tie_word_embeddings:
            names += self._names(inputs, "weight")
        bias = getattr(module, "bias", None)
        return linear(
            self._read(names), None if bias is None else self._read(self._names(module, "bias"))
        )

    def last_norm(self) -> torch.Tensor:
        """Return the weight [hidden_size] of the target's last norm.

        Raises:
            ModelError: the target has none, or it cannot be read.
        """
        base = self.checked.empty.get_decoder()
        norm = next((getattr(base, name) for name in _LAST_NORMS if hasattr(base, name)), None)
        if norm is None:
            raise ModelError(f"{self.name}: it has no last norm that a head could use")
        return self._read(self._names(norm, "weight"))

    def _names(self, module: Any, part: str) -> list[str]:
        """Return the names that a module's weight or bias (`part`) may have in the files."""
        empty = self.checked.empty
        full = next(name for name, found in empty.named_modules() if found is module) + f".{part}"
        return [full, full.removeprefix(f"{empty.base_model_prefix}.")]

    def _read(self, names: list[str]) -> torch.Tensor:
        """Return the first tensor of `names` that the checkpoint has. Raises ModelError if none."""
        packed, folder = self.checked.packed, self.checked.folder
        if packed is not None:
            lazy = packed.tensors(self.checked.empty)
            found = [name for name in names if name in lazy]
            if found:
                return lazy[found[0]][...]
        else:
            for tensor in _tensors(self.checked, names):
                return tensor
        raise ModelError(
            f"{folder}: it lacks the tensor {names[0]}, which the head needs; get it again"
        )


def _tensors(checked: Checked, names: list[str]) -> Iterator[torch.Tensor]:
    """Yield the tensors of `names` that the checkpoint has, in that order."""
    if checked.names is not None:
        names = [checked.names[name].name for name in names if name in checked.names]
    for name in names:
        for file in weight_files(checked.folder):
            try:
                with safe_open(file, framework="pt") as tensors:
                    if name in tensors.keys():  # noqa: SIM118 (not a mapping)
                        yield tensors.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: cannot be read: {one_line(error)}") from error
