"""Quantised copies of small models, written straight from the published formats.

Nothing here is shared with the code that reads them: numbers are numpy's, bits are put together
one integer at a time. Beside each packed folder lies a plain one, whose weights are what the packed
ones stand for, by the formula of their format.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, Array]
"""A layer's tensors by the rest of their name, and the weight [out, in] that they stand for."""

# The 16 quantiles of a normal distribution that QLoRA (Dettmers et al. 2023) rounds to.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=np.float32,
)

# E2M1 of the OCP Microscaling Formats: sign, two bits of exponent (bias 1), one of mantissa.
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def pack_rows(numbers: Array, bits: int, order: tuple[int, ...] = ()) -> Array:
    """Put so many rows into one of int32, the first (or `order[0]`-th) into the lowest bits."""
    per = 32 // bits
    packed = np.zeros((len(numbers) // per, numbers.shape[1]), dtype=np.uint32)
    for row in range(len(packed)):
        for place in range(per):
            source = order[place] if order else place
            packed[row] |= numbers[row * per + source].astype(np.uint32) << np.uint32(bits * place)
    return packed.view(np.int32)


def rounded(weight: Array, groups: Array, bits: int, *, sym: bool) -> tuple[Array, Array, Array]:
    """Return integers [in, out], zero points [groups, out] and scales [groups, out] (float16)."""
    most = 2**bits - 1
    count = int(groups.max()) + 1
    zeros = np.zeros((count, len(weight)), dtype=np.int64)
    scales = np.zeros((count, len(weight)), dtype=np.float16)
    integers = np.zeros((weight.shape[1], len(weight)), dtype=np.int64)
    for group in range(count):
        part = weight[:, groups == group]
        if sym:
            spread = 2 * np.abs(part).max(1)
        else:
            spread = np.maximum(part.max(1), 0) - np.minimum(part.min(1), 0)
        scales[group] = spread / most
        scale = scales[group].astype(np.float32)
        low = np.round(-np.minimum(part.min(1), 0) / scale)
        zeros[group] = (most + 1) // 2 if sym else np.clip(low, 0, most)
        numbers = np.round(part / scale[:, None]) + zeros[group][:, None]
        integers[groups == group] = np.clip(numbers, 0, most).T
    return integers, zeros, scales


def by_integers(integers: Array, zeros: Array, scales: Array, groups: Array) -> Array:
    """The weight [out, in] that integers stand for."""
    steps = (integers - zeros[groups]).astype(np.float32)
    return (steps * scales[groups].astype(np.float32)).T


def gptq(
    weight: Array,
    bits: int = 4,
    group_size: int = 32,
    *,
    sym: bool = False,
    act_order: bool = False,
    version: int = 1,
    with_g_idx: bool = True,
) -> Packed:
    """GPTQ: version 1 stores zero points less one."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = np.arange(weight.shape[1]) // size
    if act_order:
        groups = np.random.default_rng(weight.size).permutation(groups)
    integers, zeros, scales = rounded(weight, groups, bits, sym=sym)
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    tensors = {
        "qweight": torch.from_numpy(pack_rows(integers, bits)),
        "qzeros": torch.from_numpy(pack_rows(stored.T, bits).T.copy()),
        "scales": torch.from_numpy(scales),
    }
    if with_g_idx:
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, by_integers(integers, zeros, scales, groups)


def awq(weight: Array, group_size: int = 32) -> Packed:
    """AWQ, gemm: eight outputs side by side, the even ones first."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = np.arange(weight.shape[1]) // size
    integers, zeros, scales = rounded(weight, groups, 4, sym=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": torch.from_numpy(pack_rows(integers.T, 4, order).T.copy()),
        "qzeros": torch.from_numpy(pack_rows(zeros.T, 4, order).T.copy()),
        "scales": torch.from_numpy(scales),
    }
    return tensors, by_integers(integers, zeros, scales, groups)


def pack_quantized(
    weight: Array, bits: int, group_size: int, *, sym: bool, act_order: bool = False
) -> Packed:
    """What compressed-tensors calls pack-quantized: inputs side by side, zero points by outputs."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = np.arange(weight.shape[1]) // size
    if act_order:
        groups = np.random.default_rng(weight.size).permutation(groups)
    integers, zeros, scales = rounded(weight, groups, bits, sym=sym)
    tensors = {
        "weight_packed": torch.from_numpy(pack_rows(integers, bits).T.copy()),
        "weight_scale": torch.from_numpy(scales.T.copy()),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = torch.from_numpy(pack_rows(zeros.T, bits))
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, by_integers(integers, zeros, scales, groups)


def nvfp4(weight: Array, *, compressed: bool) -> Packed:
    """NVFP4: scales of 16 in e4m3, and one for all, which compressed-tensors stores inverted."""
    whole = np.float32(np.abs(weight).max() / (6 * 448))
    stored = np.float32(1) / whole if compressed else whole
    numbers = np.empty(weight.shape, np.int64)
    scales = torch.empty(len(weight), weight.shape[1] // 16, dtype=torch.float8_e4m3fn)
    stands_for = np.empty_like(weight)
    for row, start in np.ndindex(len(weight), weight.shape[1] // 16):
        at = np.s_[row, 16 * start : 16 * start + 16]
        scales[row, start] = float(np.abs(weight[at]).max() / 6 / whole)
        of_block = np.float32(scales[row, start].float().item())
        scale = of_block / stored if compressed else of_block * stored
        nearest = np.abs(np.abs(weight[at] / scale)[:, None] - FP4).argmin(-1)
        numbers[at] = nearest + 8 * (weight[at] < 0)
        stands_for[at] = np.where(weight[at] < 0, -FP4[nearest], FP4[nearest]) * scale
    pairs = torch.from_numpy((numbers[:, ::2] + 16 * numbers[:, 1::2]).astype(np.uint8))
    first, of_all = "weight", "weight_scale_2"
    if compressed:
        first, of_all = "weight_packed", "weight_global_scale"
    others = {"input_global_scale" if compressed else "input_scale": torch.tensor(0.5)}
    all_of_it = torch.tensor([stored]) if compressed else torch.tensor(stored)
    return {first: pairs, "weight_scale": scales, of_all: all_of_it} | others, stands_for


def fp8(
    weight: Array,
    block: tuple[int, int] | None,
    name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    extra: tuple[str, ...] = (),
) -> Packed:
    """FP8: a scale for each block, or one. The last blocks may be smaller."""
    out, inputs = weight.shape
    rows, columns = block or weight.shape
    grid = -(-out // rows), -(-inputs // columns)
    scales = torch.empty(grid, dtype=dtype)
    numbers = torch.empty(out, inputs, dtype=torch.float8_e4m3fn)
    stands_for = np.empty_like(weight)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = float(np.abs(weight[at]).max() / 448)
            scale = scales[i, j].float()
            numbers[at] = (torch.from_numpy(weight[at].copy()) / scale).to(torch.float8_e4m3fn)
            stands_for[at] = numbers[at].float().numpy() * scale.numpy()
    if block is None:
        scales = scales.reshape(())
    more = {part: torch.tensor(0.037) for part in extra}
    return {"weight": numbers, name: scales} | more, stands_for


def nf4(weight: Array, blocksize: int = 64, *, double: bool = False) -> Packed:
    """NF4: two indices in a byte; with `double` the scales are 8-bit indices too."""
    flat = weight.reshape(-1)
    blocks = [flat[i : i + blocksize] for i in range(0, len(flat), blocksize)]
    scales = np.array([np.abs(part).max() for part in blocks], dtype=np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "float16"}
    state["shape"] = list(weight.shape)
    tensors: Tensors = {}
    if double:
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = np.float32(scales.mean())
        nested = [scales[i : i + 256] - offset for i in range(0, len(scales), 256)]
        tops = np.array([np.abs(part).max() or 1 for part in nested], dtype=np.float32)
        indices = [_nearest(table, part / top) for part, top in zip(nested, tops, strict=True)]
        stored = [table[index] * top for index, top in zip(indices, tops, strict=True)]
        scales = np.concatenate(stored) + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = float(offset)
        tensors["weight.absmax"] = torch.from_numpy(np.concatenate(indices).astype(np.uint8))
        tensors["weight.nested_absmax"] = torch.from_numpy(tops)
        tensors["weight.nested_quant_map"] = torch.from_numpy(table)
    else:
        tensors["weight.absmax"] = torch.from_numpy(scales)
    found = [_nearest(NF4, part / np.abs(part).max()) for part in blocks]
    numbers = np.concatenate([NF4[i] * scale for i, scale in zip(found, scales, strict=True)])
    codes = np.concatenate(found).astype(np.uint8)
    codes = np.append(codes, np.zeros(len(codes) % 2, np.uint8))
    tensors["weight"] = torch.from_numpy((codes[0::2] << 4 | codes[1::2])[:, None].copy())
    tensors["weight.quant_map"] = torch.from_numpy(NF4.copy())
    content = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(content)
    return tensors, numbers.reshape(weight.shape)


def _nearest(table: Array, numbers: Array) -> Array:
    found: Array = np.abs(table[:, None] - numbers[None]).argmin(0)
    return found


@dataclass(frozen=True)
class Recipe:
    """How the layers of a model are packed, and what config.json says of it.

    others   tensors that a checkpoint of this kind has besides, by the name of their layer
    """

    config: Mapping[str, object]
    pack: Callable[[Array], Packed]
    others: Mapping[str, torch.Tensor] = field(default_factory=dict)


def _gptq(bits: int = 4, group_size: int = 32, **options: Any) -> Recipe:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
    config |= {"desc_act": options.get("act_order", False), "sym": options.get("sym", False)}
    config["checkpoint_format"] = "gptq_v2" if options.get("version") == 2 else "gptq"
    return Recipe(config, lambda weight: gptq(weight, bits, group_size, **options))


def _awq(group_size: int = 32) -> Recipe:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    config |= {"zero_point": True, "modules_to_not_convert": ["lm_head"]}
    return Recipe(config, lambda weight: awq(weight, group_size))


def _fp8(block: tuple[int, int] | None) -> Recipe:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["weight_block_size"] = None if block is None else list(block)  # type: ignore[assignment]
    return Recipe(config, lambda weight: fp8(weight, block))


def _fp8_static() -> Recipe:
    """As AutoFP8 writes it, with scales of activations, keys and values."""
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    extra = ("input_scale",)
    others = {"self_attn.k_scale": torch.tensor(0.02), "self_attn.v_scale": torch.tensor(0.03)}
    return Recipe(config, lambda weight: fp8(weight, None, "weight_scale", extra=extra), others)


def _compressed(strategy: str, block: tuple[int, int] | None = None) -> Recipe:
    weights: dict[str, object] = {"num_bits": 8, "type": "float", "symmetric": True}
    weights |= {"strategy": strategy, "group_size": block[1] if strategy == "group" else None}
    weights["block_structure"] = list(block) if strategy == "block" else None
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
    config["config_groups"] = {"group_0": group}

    def pack(weight: Array) -> Packed:
        by = (1, weight.shape[1]) if strategy == "channel" else block
        return fp8(weight, by, "weight_scale", torch.bfloat16)

    return Recipe(config, pack)


def _pack_quantized(
    bits: int = 4, group_size: int = 32, *, sym: bool = True, act_order: bool = False
) -> Recipe:
    weights: dict[str, object] = {"num_bits": bits, "type": "int", "symmetric": sym}
    weights["strategy"] = "channel" if group_size == -1 else "group"
    weights["group_size"] = None if group_size == -1 else group_size
    weights["actorder"] = "group" if act_order else None
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config |= {"ignore": ["lm_head"], "config_groups": {"group_0": {"weights": weights}}}  # type: ignore[dict-item]
    return Recipe(
        config, lambda w: pack_quantized(w, bits, group_size, sym=sym, act_order=act_order)
    )


def _nvfp4(*, compressed: bool = False) -> Recipe:
    if not compressed:
        config: dict[str, object] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        config |= {"ignore": ["lm_head"], "group_size": 16}
        return Recipe(config, lambda weight: nvfp4(weight, compressed=False))
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    config["config_groups"] = {"group_0": {"weights": weights, "format": "nvfp4-pack-quantized"}}
    return Recipe(config, lambda weight: nvfp4(weight, compressed=True))


def _modelopt(algorithm: str) -> Recipe:
    """FP8 as modelopt writes it."""
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}

    def pack(weight: Array) -> Packed:
        match algorithm:
            case "FP8":
                return fp8(weight, None, "weight_scale", extra=("input_scale",))
            case "FP8_PER_CHANNEL_PER_TOKEN":
                tensors, stands_for = fp8(weight, (1, weight.shape[1]), "weight_scale")
                return tensors | {"weight_scale": tensors["weight_scale"][:, 0]}, stands_for
            case "FP8_PB_WO":
                tensors, stands_for = fp8(weight, (128, 128), "weight_scale")
                grid = tensors["weight_scale"][:, None, :, None]
                return tensors | {"weight_scale": grid}, stands_for
        tensors, stands_for = fp8(weight, (1, 32), "weight_scale", torch.float8_e8m0fnu)
        return tensors | {"weight_scale": tensors["weight_scale"].view(torch.uint8)}, stands_for

    return Recipe(config, pack)


def _nf4(*, double: bool = False, blocksize: int = 64) -> Recipe:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    config |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    config["llm_int8_skip_modules"] = ["lm_head"]
    return Recipe(config, lambda weight: nf4(weight, blocksize, double=double))


RECIPES: Mapping[str, Recipe] = {
    "gptq": _gptq(),
    "gptq-sym": _gptq(sym=True),
    "gptq-8": _gptq(8),
    "gptq-act-order": _gptq(act_order=True),
    "gptq-8-act-order-sym": _gptq(8, 64, sym=True, act_order=True),
    "gptq-column": _gptq(group_size=-1),
    "gptq-v2": _gptq(version=2),
    "gptq-without-g_idx": _gptq(with_g_idx=False),
    "awq": _awq(),
    "awq-column": _awq(-1),
    "fp8-block": _fp8((32, 32)),
    "fp8-block-with-rest": _fp8((48, 40)),
    "fp8-large-block": _fp8((256, 256)),
    "fp8-tensor": _fp8(None),
    "fp8-static": _fp8_static(),
    "compressed-tensor": _compressed("tensor"),
    "compressed-channel": _compressed("channel"),
    "compressed-block": _compressed("block", (16, 32)),
    "compressed-group": _compressed("group", (1, 32)),
    "pack": _pack_quantized(),
    "pack-zeros": _pack_quantized(sym=False),
    "pack-channel-zeros": _pack_quantized(group_size=-1, sym=False),
    "pack-8": _pack_quantized(8, 64),
    "pack-act-order": _pack_quantized(sym=False, act_order=True),
    "nvfp4": _nvfp4(),
    "nvfp4-compressed": _nvfp4(compressed=True),
    **{
        f"modelopt-{name}": _modelopt(algorithm)
        for name, algorithm in (
            *(("tensor", "FP8"), ("row", "FP8_PER_CHANNEL_PER_TOKEN")),
            *(("block", "FP8_PB_WO"), ("mx", "MXFP8")),
        )
    },
    "nf4": _nf4(),
    "nf4-double": _nf4(double=True),
    "nf4-with-rest": _nf4(blocksize=4096 - 64),
}


def mxfp4(weight: Array) -> Packed:
    """Experts' weights [experts, in, out] as gpt-oss stores them, and what they stand for."""
    rows = weight.transpose(0, 2, 1).reshape(len(weight), weight.shape[2], -1, 32)
    exponents = np.floor(np.log2(np.abs(rows).max(-1))).astype(np.int64) - 2
    scaled = rows / np.exp2(exponents.astype(np.float32))[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - FP4).argmin(-1)
    numbers = nearest + 8 * (scaled < 0)
    blocks = numbers[..., ::2] + 16 * numbers[..., 1::2]
    tensors = {
        "blocks": torch.from_numpy(np.ascontiguousarray(blocks.astype(np.uint8))),
        "scales": torch.from_numpy(np.ascontiguousarray((exponents + 127).astype(np.uint8))),
    }
    signed = np.where(numbers < 8, FP4[nearest], -FP4[nearest])
    stands_for = signed * np.exp2(exponents.astype(np.float32))[..., None]
    shape = len(weight), weight.shape[2], weight.shape[1]
    return tensors, np.ascontiguousarray(stands_for.reshape(shape).transpose(0, 2, 1))


def save_mxfp4(source: Path, out: Path) -> tuple[Path, Path]:
    """Pack the experts of the gpt-oss in `source`; return the packed folder and the plain one."""
    plain = load_file(source / "model.safetensors")
    packed = dict(plain)
    for name, weight in plain.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors, stands_for = mxfp4(packed.pop(name).float().numpy())
            packed |= {f"{name}_{part}": tensor for part, tensor in tensors.items()}
            plain[name] = torch.from_numpy(stands_for).to(weight.dtype)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    _save(source, out / "plain", plain, {}, 1)
    _save(source, out / "packed", packed, {"quantization_config": config}, 1)
    return out / "packed", out / "plain"


def save_packed(
    source: Path,
    out: Path,
    recipe: Recipe,
    *,
    plainly: tuple[str, ...] = ("lm_head",),
    num_files: int = 1,
) -> tuple[Path, Path]:
    """Quantise the model in `source`; return the packed folder and the plain one.

    plainly    layers whose name contains one of these stay as they are
    num_files  into which the packed tensors are dealt, so that a layer's lie apart
    """
    packed: Tensors = {}
    plain = load_file(source / "model.safetensors")
    for name, weight in list(plain.items()):
        layer = name.removesuffix(".weight")
        if weight.dim() != 2 or "embed" in name or any(part in name for part in plainly):
            packed[name] = weight
            continue
        tensors, stands_for = recipe.pack(weight.float().numpy())
        packed |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
        plain[name] = torch.from_numpy(np.ascontiguousarray(stands_for))
    layers = {name.partition(".self_attn")[0] for name in plain if ".self_attn" in name}
    for part, tensor in recipe.others.items():
        packed |= {f"{layer}.{part}": tensor.clone() for layer in layers}
    _save(source, out / "plain", plain, {}, 1)
    _save(source, out / "packed", packed, {"quantization_config": recipe.config}, num_files)
    return out / "packed", out / "plain"


def _save(
    source: Path, out: Path, tensors: Tensors, fields: Mapping[str, object], num_files: int
) -> None:
    out.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, out)
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | fields))
    if num_files == 1:
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    where = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        part = {name: tensors[name] for name in names if where[name] == file}
        save_file(part, out / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
