"""Inflate a trained Llama checkpoint to any larger Llama shape without changing its function.

    python -m lab.testbeds.inflate SOURCE DESTINATION --hidden-size 4096 ...

It makes a pair with the costs of large models and the agreement of small trained ones, where no
large model is at hand: timings are those of the shape, texts and acceptance those of the source.

Theory of operation. The old function lives in a corner of the new one. Lower case is the source's
size, upper case the destination's.

    width      The residual stream is zero in its new columns: the embeddings have zeros there, and
               o_proj and down_proj write none. The mean square over D is d / D of that over d, so
               norm weights times sqrt(d / D) and epsilon times d / D leave every norm as it was.
    MLP        New columns compute something random, which down_proj ignores.
    heads      Query head b of key head a moves to the same place in a group of G: a * G + b. What
               new heads attend to is random, and o_proj ignores it.
    head_dim   It grows r-fold. Rotary pair i (dims i and i + dim / 2) turns at theta^(-2i / dim),
               which is what pair r * i of r * dim turns at, so it moves there. In a real head the
               queries are zero in all other pairs, which leaves the scores; they are divided by
               sqrt(r * dim) instead of sqrt(dim), so q_proj is multiplied by sqrt(r). New value
               dims are ignored by o_proj.
    layers     New layers come last; o_proj and down_proj are zero, so they add nothing.

Everything else is drawn from a normal distribution, so that the hardware multiplies real data: new
heads, columns and layers, and whatever reads only zeros. In float32 the logits are the source's
but for the order of summation; in half precision scaled weights round anew, and the two differ as
two roundings of one model do. Memory holds a few layers at a time, and never the model.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

SPREAD = 0.02  # standard deviation of random weights
LAYERS_PER_SHARD = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CARRIED_OVER = ("*.json", "*.txt", "*.model", "*.jinja")  # the tokenizer and generation defaults
NOT_CARRIED_OVER = {"config.json", "model.safetensors.index.json"}
Q, K, V, O = (f"self_attn.{name}_proj.weight" for name in "qkvo")  # noqa: E741
GATE, UP, DOWN = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
EMBEDDINGS, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama model that can grow; `num_heads` is a multiple of `num_kv_heads`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Return the number of query heads for each key head."""
        return self.num_heads // self.num_kv_heads


def inflate(
    source_folder: Path,
    target_folder: Path,
    shape: Shape,
    *,
    device: str = "cpu",
    seed: int = 0,
    dtype: str = "",
) -> None:
    """Write the model of `source_folder` in another shape, and its tokenizer, to `target_folder`.

    device  where random numbers are drawn and tensors put together
    seed    of the random weights; they also depend on the kind of device
    dtype   of what is written, by its name in torch; empty: the source's

    config.json comes last: a folder that has it is complete.

    Raises:
        ValueError: one line; this model or this shape is not supported, or the destination is not
            empty.
    """
    config = read_config(source_folder)
    old = shape_of(config)
    check_growth(old, shape)
    if (target_folder / "config.json").exists():
        raise ValueError(f"{target_folder}: there is a model already; remove it, or name another")
    source = _Source(source_folder, dtype)
    new_config = _grown_config(config, old, shape)
    new_config.dtype = source.dtype
    inflation = _Inflation(source, old, shape, _generator(device, seed))
    target_folder.mkdir(parents=True, exist_ok=True)
    _write_shards(inflation, target_folder, is_tied=config.tie_word_embeddings)
    for pattern in CARRIED_OVER:
        for path in source_folder.glob(pattern):
            if path.name not in NOT_CARRIED_OVER:
                shutil.copyfile(path, target_folder / path.name)
    new_config.save_pretrained(target_folder)


def shape_of(config: LlamaConfig) -> Shape:
    """Return the shape of a model from its configuration."""
    return Shape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
    )


def check_growth(old: Shape, new: Shape) -> None:
    """Raise ValueError unless a model of shape `old` can become one of shape `new`."""
    for field in fields(Shape):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if after < before:
            raise ValueError(f"{field.name} is {after}, but the source has {before}: models grow")
    if new.num_heads % new.num_kv_heads:
        raise ValueError(
            f"num_heads is {new.num_heads}, which is no multiple of num_kv_heads, "
            f"{new.num_kv_heads}"
        )
    if new.hidden_size % new.num_heads:  # transformers asks for it, whatever head_dim is
        raise ValueError(
            f"hidden_size is {new.hidden_size}, which is no multiple of num_heads, {new.num_heads}"
        )
    if new.group < old.group:
        raise ValueError(
            f"{new.group} query heads per key head, but the source has {old.group}; raise "
            "num_heads, or lower num_kv_heads"
        )
    if new.head_dim % old.head_dim:
        raise ValueError(
            f"head_dim is {new.head_dim}, which is no multiple of the source's {old.head_dim}: "
            "rotary frequencies would not fit"
        )


def read_config(folder: Path) -> LlamaConfig:
    """Return the configuration of a model that can grow. Raises ValueError if it cannot."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; give the folder of a model")
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the configuration of a model") from error
    if kind != "llama":
        raise ValueError(f"{folder}: {kind} is not supported, only llama")
    try:
        config = LlamaConfig.from_pretrained(folder)
    except StrictDataclassError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{folder}: only default rope is supported, not {rope.get('rope_type')}")
    if config.attention_bias or config.mlp_bias:
        raise ValueError(f"{folder}: biases are not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder}: quantized weights are not supported")
    return config


def stored_dtype(folder: Path) -> str:
    """Return the number type in which a model's weights are stored, by its name in torch.

    The model may be computed in another one, which its config.json names.

    Raises ValueError: there are none, or they have a type that cannot be read.
    """
    return str(_Source(folder, "").dtype).removeprefix("torch.")


def _grown_config(config: LlamaConfig, old: Shape, new: Shape) -> LlamaConfig:
    """Return the configuration of the new model."""
    sizes = {
        "hidden_size": new.hidden_size,
        "intermediate_size": new.intermediate_size,
        "num_hidden_layers": new.num_layers,
        "num_attention_heads": new.num_heads,
        "num_key_value_heads": new.num_kv_heads,
        "head_dim": new.head_dim,
        "rms_norm_eps": config.rms_norm_eps * old.hidden_size / new.hidden_size,
    }
    return LlamaConfig(**config.to_dict() | sizes)


def _generator(device: str, seed: int) -> torch.Generator:
    """Return a seeded random generator on the device.

    Raises ValueError if there is no such device.
    """
    try:
        return torch.Generator(device).manual_seed(seed)
    except RuntimeError as error:
        raise ValueError(f"device {device}: {str(error).splitlines()[0]}") from error


class _Source:
    """The tensors of a checkpoint folder, read one at a time."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # for each tensor's name, the open file that holds it
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: cannot be read: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        self.dtype = getattr(torch, dtype) if dtype else self.read(EMBEDDINGS).dtype
        if self.dtype not in DTYPES:
            raise ValueError(f"{folder}: weights in {self.dtype} are not supported")

    def read(self, name: str) -> Tensor:
        """Return a tensor, on the CPU. Raises ValueError if the checkpoint lacks it."""
        if name not in self._files:
            raise ValueError(f"{self._folder}: the weights lack {name}; is the folder complete?")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows or columns of an old tensor are in the new one: int64 indices on the device.

    width      columns of the residual stream
    mlp        columns of the MLP
    queries    rows of q_proj, moved with their rotary pairs
    keys       rows of k_proj, moved in the same way
    values     rows of v_proj
    attended   columns of o_proj
    real_rows  all rows of q_proj in heads that the source has, also those that are not in `queries`
    """

    width: Tensor
    mlp: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    attended: Tensor
    real_rows: Tensor

    @classmethod
    def of(cls, old: Shape, new: Shape, device: torch.device) -> "_Places":
        """Return the places for growing from the old shape to the new one."""
        kv_heads = torch.arange(old.num_kv_heads)
        heads = (kv_heads[:, None] * new.group + torch.arange(old.group)).flatten()
        half = torch.arange(old.head_dim // 2) * (new.head_dim // old.head_dim)
        turned = torch.cat((half, half + new.head_dim // 2))
        straight = torch.arange(old.head_dim)

        def dims(of_heads: Tensor, within: Tensor) -> Tensor:
            """Return the rows of these heads at these dimensions."""
            return (of_heads[:, None] * new.head_dim + within).flatten().to(device)

        return cls(
            width=torch.arange(old.hidden_size, device=device),
            mlp=torch.arange(old.intermediate_size, device=device),
            queries=dims(heads, turned),
            keys=dims(kv_heads, turned),
            values=dims(kv_heads, straight),
            attended=dims(heads, straight),
            real_rows=dims(heads, torch.arange(new.head_dim)),
        )


class _Inflation:
    """Makes the new tensors, layer by layer."""

    def __init__(self, source: _Source, old: Shape, new: Shape, generator: torch.Generator) -> None:
        self._source = source
        self._old, self.new = old, new
        self._device = generator.device
        self._places = _Places.of(old, new, generator.device)
        self._generator = generator
        self._sizes = _layer_sizes(new)

    def ends(self, *, is_tied: bool) -> dict[str, Tensor]:
        """Return the tensors around the layers: embeddings, last norm, and head if not tied."""
        width = self._places.width
        old = self._source.read(EMBEDDINGS)
        rows, size = torch.arange(len(old), device=self._device), (len(old), self.new.hidden_size)
        found = {
            EMBEDDINGS: self._put(self._zeros(size), old, rows, width),
            LAST_NORM: self._norm(self._source.read(LAST_NORM)),
        }
        if not is_tied:
            found[HEAD] = self._put(self._random(size), self._source.read(HEAD), rows, width)
        return {name: tensor.cpu() for name, tensor in found.items()}

    def layer(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of one layer by full name: grown, or new and without any effect."""
        prefix = f"model.layers.{number}."
        found = {
            name: self._zeros(size) if name in (O, DOWN) else self._random(size)
            for name, size in self._sizes.items()
        }
        if number < self._old.num_layers:
            self._grow(found, {name: self._source.read(prefix + name) for name in found})
        return {prefix + name: tensor.cpu() for name, tensor in found.items()}

    def _grow(self, new: dict[str, Tensor], old: dict[str, Tensor]) -> None:
        """Write the weights of an old layer into a new random one, so that it computes the same."""
        places = self._places
        width, mlp = places.width, places.mlp
        new[Q][places.real_rows[:, None], width] = 0.0
        longer = math.sqrt(self.new.head_dim / self._old.head_dim)
        self._put(new[Q], old[Q], places.queries, width, factor=longer)
        self._put(new[K], old[K], places.keys, width)
        self._put(new[V], old[V], places.values, width)
        self._put(new[O], old[O], width, places.attended)
        self._put(new[GATE], old[GATE], mlp, width)
        self._put(new[UP], old[UP], mlp, width)
        self._put(new[DOWN], old[DOWN], width, mlp)
        for name in NORMS:
            new[name] = self._norm(old[name])

    def _norm(self, old: Tensor) -> Tensor:
        """Return the weights of a norm in the new width."""
        factor = math.sqrt(self._old.hidden_size / self.new.hidden_size)
        weight = self._random((self.new.hidden_size,))
        weight[: len(old)] = (old.to(self._device).float() * factor).to(weight.dtype)
        return weight

    def _put(
        self, new: Tensor, old: Tensor, rows: Tensor, columns: Tensor, *, factor: float = 1.0
    ) -> Tensor:
        """Write an old matrix, times `factor`, into a new one at these rows and columns.

        Returns the new matrix.
        """
        new[rows[:, None], columns] = (old.to(self._device).float() * factor).to(new.dtype)
        return new

    def _zeros(self, size: tuple[int, ...]) -> Tensor:
        """Return a tensor of zeros on the device."""
        return torch.zeros(size, dtype=self._source.dtype, device=self._device)

    def _random(self, size: tuple[int, ...]) -> Tensor:
        """Return a tensor of random weights on the device."""
        empty = torch.empty(size, dtype=self._source.dtype, device=self._device)
        return empty.normal_(0.0, SPREAD, generator=self._generator)


def _layer_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the size of each tensor of a layer, by its name."""
    width, mlp = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        Q: (queries, width),
        K: (keys, width),
        V: (keys, width),
        O: (width, queries),
        GATE: (mlp, width),
        UP: (mlp, width),
        DOWN: (width, mlp),
    } | dict.fromkeys(NORMS, (width,))


def _write_shards(inflation: _Inflation, folder: Path, *, is_tied: bool) -> None:
    """Write the weights, in shards of a few layers, and their index."""
    layers = range(inflation.new.num_layers)
    groups = [layers[first : first + LAYERS_PER_SHARD] for first in layers[::LAYERS_PER_SHARD]]

    def shards() -> Iterator[dict[str, Tensor]]:
        yield inflation.ends(is_tied=is_tied)
        for group in groups:
            yield {name: w for number in group for name, w in inflation.layer(number).items()}

    files: dict[str, str] = {}
    num_bytes = 0
    for number, tensors in enumerate(shards(), start=1):
        file = f"model-{number:05}-of-{len(groups) + 1:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main(arguments: list[str] | None = None) -> int:
    """Inflate a model from the command line; return the exit status.

    Sizes that are not given stay the same.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lab.testbeds.inflate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of the small model")
    parser.add_argument(
        "destination", type=Path, metavar="DESTINATION", help="folder for the large model"
    )
    for field in fields(Shape):
        words = field.name.replace("num_", "number of ").replace("_", " ")
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=int,
            metavar="N",
            help=f"{words} of the large model (default: as the small one)",
        )
    parser.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="where random numbers are drawn"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the weights that have no effect"
    )
    options = parser.parse_args(arguments)
    sizes = {field.name: getattr(options, field.name) for field in fields(Shape)}
    given = {name: size for name, size in sizes.items() if size is not None}
    try:
        shape = replace(shape_of(read_config(options.source)), **given)
        inflate(
            options.source, options.destination, shape, device=options.device, seed=options.seed
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
