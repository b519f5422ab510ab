"""Read the weights of a GGUF file, as they are stored or dequantised.

Its user sees the names and shapes of a plain checkpoint, as with `PackedCheckpoint`. Rows of query
and key matrices lie in another order in files of the architecture `llama`: there a rotary embedding
turns neighbours, in transformers' models the two halves of a head.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from engine.checkpoint.files import Shapes
from engine.checkpoint.gguf_list import BLOCKS, PLAIN, Entry, Gguf, read_gguf
from engine.checkpoint.parts import Cuts, Lazy
from engine.errors import GET_AGAIN, ModelError
from engine.quantised import gguf_blocks
from engine.quantised.formats import GgufFile
from engine.quantised.matrix import QuantisedMatrix
from engine.tensor_parallel.split import Cut
from proto.system import cannot_read

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TURNED = (".q_proj.", ".k_proj.")
_CPU = torch.device("cpu")


class GgufCheckpoint:
    """A GGUF file's weights, which can be read as the tensors of a plain checkpoint.

    form    the file
    shapes  name -> shape of every tensor of the corresponding plain checkpoint
    """

    def __init__(self, form: GgufFile) -> None:
        """Read the file's list of tensors, and no weight. Raises ModelError if it is damaged."""
        self.form = form
        self._gguf: Gguf = read_gguf(form.path)
        self.shapes: Shapes = {name: one.shape for name, one in self._gguf.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Return the bytes in the file of the tensors that can stay as they are stored."""
        entries = self._gguf.tensors.values()
        return sum(entry.num_bytes for entry in entries if entry.kind in gguf_blocks.KEPT)

    def tensors(
        self, model: Any, cuts: Cuts | None = None, device: torch.device = _CPU
    ) -> dict[str, Lazy]:
        """Return the plain tensors by name, read and dequantised to float32 when used.

        cuts    name -> the part to return (one rank's); others are whole; None: all are
        device  device on which weights are dequantised

        Raises ModelError when a tensor is read and its values are invalid.
        """
        del model
        cuts = cuts or {}
        return {
            name: Lazy(partial(self._weight, name, cuts.get(name), device))
            for name in self._gguf.tensors
            if name not in cuts or cuts[name].runs
        }

    def matrices(self, model: Any) -> Iterator[tuple[str, QuantisedMatrix]]:
        """Yield (path in the model, weight as it is stored) of the linear layers, read one by one.

        Layers whose weights are plain, or of a type that can only be dequantised, are left out. If
        the output matrix is that of the embeddings, both are read.

        model  the model on `meta` (without memory)
        """
        for path, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            name = f"{path}.weight"
            if name == "lm_head.weight" and self._gguf.is_tied:
                name = "model.embed_tokens.weight"
            entry = self._gguf.tensors.get(name)
            if entry is not None and entry.kind in gguf_blocks.KEPT:
                yield path, self._codes(name)

    def _codes(self, name: str) -> QuantisedMatrix:
        """Return a quantised weight as it is stored. Raises ModelError if it is not finite."""
        entry = self._gguf.tensors[name]
        matrix = gguf_blocks.codes(entry.kind, self._blocks(entry, _CPU))
        for numbers in (matrix.scales, matrix.offsets, matrix.units):
            if numbers is not None and numbers.is_floating_point():
                self._refuse_not_finite(entry, numbers.sum(dtype=torch.float32))
        rows = self._order(name, _CPU)
        if rows is None:
            return matrix
        offsets = None if matrix.offsets is None else matrix.offsets[rows]
        units = None if matrix.units is None else matrix.units[:, rows]
        return QuantisedMatrix(matrix.bits, matrix.codes[rows], matrix.scales[rows], offsets, units)

    def _weight(self, name: str, cut: Cut | None, device: torch.device) -> torch.Tensor:
        """Return a tensor, or the cut of it, dequantised to float32."""
        entry = self._gguf.tensors[name]
        if entry.kind in PLAIN:
            found = self._bytes(entry).view(_TYPES[entry.kind]).view(entry.shape).to(device)
        else:
            where = device if entry.kind in gguf_blocks.KEPT else _CPU
            found = gguf_blocks.weight(entry.kind, self._blocks(entry, where)).to(device)
            found = found.view(entry.shape)
            self._refuse_not_finite(entry, found.sum())
        rows = self._order(name, device)
        whole = found if rows is None else found[rows]
        return whole if cut is None else cut.of(whole).contiguous()

    def _blocks(self, entry: Entry, device: torch.device) -> torch.Tensor:
        """Return a tensor's blocks, uint8 [rows, blocks of a row, bytes of a block]."""
        numbers, num_bytes = BLOCKS[entry.kind]
        of_row = entry.shape[-1] // numbers
        return self._bytes(entry).view(-1, of_row, num_bytes).to(device)

    def _bytes(self, entry: Entry) -> torch.Tensor:
        """Return a tensor's bytes, uint8 [n]. Raises ModelError if they cannot be read."""
        found = bytearray(entry.num_bytes)
        try:
            # Read without mapping: mapped pages of packed weights would stay in memory.
            with self.form.path.open("rb") as file:
                file.seek(entry.start)
                length = file.readinto(found)
        except OSError as error:
            raise ModelError(
                f"{self.form.path}: cannot be read: {cannot_read(error, GET_AGAIN)}"
            ) from error
        if length != len(found):
            raise ModelError(f"{self.form.path}: it is cut off in {entry.name}; get it again")
        return torch.frombuffer(found, dtype=torch.uint8)

    def _order(self, name: str, device: torch.device) -> torch.Tensor | None:
        """Return the row in the file of each row, int64 [out]; None: they are in our order."""
        gguf = self._gguf
        if gguf.architecture != "llama" or not any(part in name for part in _TURNED):
            return None
        heads = gguf.stated("attention.head_count")
        if ".k_proj." in name:
            heads = gguf.stated("attention.head_count_kv") or heads
        count = gguf.tensors[name].shape[0]
        if type(heads) is not int or heads < 1 or count % (2 * heads):
            raise ModelError(
                f"{gguf.path}: its head_count is {heads!r}, which does not divide {name}; get it "
                "again"
            )
        rows = torch.arange(count, device=device).view(heads, -1, 2)
        return rows.transpose(1, 2).flatten()

    def _refuse_not_finite(self, entry: Entry, total: torch.Tensor) -> None:
        """Raise ModelError if a sum of a tensor's numbers is NaN or infinite."""
        if not torch.isfinite(total):
            raise ModelError(
                f"{self.form.path}: {entry.name} holds NaN or infinity; get the file again"
            )
