"""`python -m lab.pictures.fits`: write the table of docs/choosing.md on what fits on which GPUs.

What fits comes from the account of memory that `--dry-run` shows, for files that state the
published shapes and hold no number (`coordinator/api/models/account.py`). Speeds are estimates by
bytes:

    pass    bytes of the weights that it reads on a GPU / (0.6 x the maker's bandwidth), and
            10 us for each of two sums a layer where GPUs share the model
    alone   1 / pass
    drafts  (1 - a^(K+1)) / (1 - a) tokens in (pass + K steps), for the best K up to 8, where a
            step is a pass of the drafter and a = 0.7 the chance that its next token is right

0.6 is what a pass of 8 billion parameters reached on an H200 (docs/LOG.md). Nothing else is
measured.
"""

import argparse
import json
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from coordinator.api.config import PairConfig
from coordinator.api.models.account import Item, devices_of, why_not
from lab.testbeds.shapes import LIKE, Sizes
from proto.messages import Role

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"
BEGIN, END = "<!-- lab.pictures.fits: begin -->\n", "<!-- lab.pictures.fits: end -->\n"
REACHED, SUM_S, RIGHT, MOST_DRAFTS = 0.6, 10e-6, 0.7, 8
_FAR_TOO_MUCH = 3  # times the memory
_ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I32": 4}


@dataclass(frozen=True, slots=True)
class Model:
    """A published model.

    form  how its files store the matrices: bfloat16, FP8, 4 bits (W4A16) or MXFP4
    """

    name: str
    family: str
    sizes: Sizes
    form: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Machine:
    """So many GPUs of a kind: what each has, in bytes and bytes a second."""

    name: str
    count: int
    memory: int
    bandwidth: float


MACHINES = (
    Machine("1 x 24 GB (RTX 4090)", 1, 24 << 30, 1.01e12),
    Machine("1 x 80 GB (H100)", 1, 80 << 30, 3.35e12),
    Machine("2 x 80 GB (H100)", 2, 80 << 30, 3.35e12),
)
_QWEN_8B = Sizes(4096, 36, 12288, 32, 8, 128, 151_936, tie_word_embeddings=False)
_QWEN_14B = Sizes(5120, 40, 17408, 40, 8, 128, 151_936, tie_word_embeddings=False)
_OSS_120B = Sizes(2880, 36, 2880, 64, 8, 64, 201_088, tie_word_embeddings=False)
SMALL_LLAMA = Model("Llama 3.2 1B", "llama", LIKE["llama-3.2-1b"])
SMALL_QWEN = Model("Qwen 3 0.6B", "qwen3", LIKE["qwen3-0.6b"])
LLAMA_8B = Model("Llama 3.1 8B", "llama", LIKE["llama-3.1-8b"])
LLAMA_70B = Model("Llama 3.3 70B", "llama", LIKE["llama-3.1-70b"])
QWEN_8B, QWEN_14B = Model("Qwen 3 8B", "qwen3", _QWEN_8B), Model("Qwen 3 14B", "qwen3", _QWEN_14B)
QWEN_32B = Model("Qwen 3 32B", "qwen3", LIKE["qwen3-32b"])
OSS_120B = Model("gpt-oss-120b", "gpt_oss", _OSS_120B, "MXFP4")
_EXPERTS = 128
_LENGTHS = {"qwen3": 40_960}  # tokens that a model takes; others 131,072
PAIRS: tuple[tuple[Model, Model | None], ...] = (
    (LLAMA_8B, SMALL_LLAMA),
    (replace(LLAMA_8B, form="FP8"), SMALL_LLAMA),
    (QWEN_8B, SMALL_QWEN),
    (replace(QWEN_14B, form="FP8"), SMALL_QWEN),
    (replace(QWEN_14B, form="4 bits"), SMALL_QWEN),
    (QWEN_32B, SMALL_QWEN),
    (replace(QWEN_32B, form="FP8"), SMALL_QWEN),
    (replace(QWEN_32B, form="4 bits"), SMALL_QWEN),
    (LLAMA_70B, SMALL_LLAMA),
    (replace(LLAMA_70B, form="FP8"), SMALL_LLAMA),
    (replace(LLAMA_70B, form="4 bits"), SMALL_LLAMA),
    (OSS_120B, None),
)


def save(out: Path, model: Model) -> Path:
    """Write a model's config.json and the list of its tensors, without numbers; return the folder.

    The file has its full length, but takes no place where the system knows sparse files.
    """
    out.mkdir()
    sizes = model.sizes
    fields: dict[str, object] = {
        "model_type": model.family,
        "hidden_size": sizes.hidden_size,
        "dtype": "bfloat16",
        "num_hidden_layers": sizes.num_hidden_layers,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "vocab_size": sizes.vocab_size,
        "num_attention_heads": sizes.num_attention_heads,
        "max_position_embeddings": _LENGTHS.get(model.family, 131_072),
        "num_key_value_heads": sizes.num_key_value_heads,
        "tie_word_embeddings": sizes.tie_word_embeddings,
    }
    stated: dict[str, dict[str, object]] = {
        "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "4 bits": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "MXFP4": {"quant_method": "mxfp4"},
    }
    if model.form in stated:
        weights = {"num_bits": 4, "strategy": "group", "group_size": 128}
        groups = {"config_groups": {"group_0": {"weights": weights}}}
        fields["quantization_config"] = {**stated[model.form], **groups}
    (out / "config.json").write_text(json.dumps(fields))
    header, at = {}, 0
    for name, (kind, shape) in dict(_tensors(model)).items():
        end = at + prod(shape) * _ITEM_BYTES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return out


def _tensors(model: Model) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield (name, (number type, shape)) of each matrix of a model; small tensors are left out."""
    match model.sizes:
        case Sizes(int(width), int(layers), int(inner), int(heads), int(keys), int(dim), int(size)):
            pass
        case _:
            raise AssertionError(f"{model.name} lacks a size")
    yield "model.embed_tokens.weight", ("BF16", [size, width])
    if not model.sizes.tie_word_embeddings:
        yield "lm_head.weight", ("BF16", [size, width])
    attention = {
        "q_proj": [heads * dim, width],
        "k_proj": [keys * dim, width],
        "v_proj": [keys * dim, width],
        "o_proj": [width, heads * dim],
    }
    mlp = {"gate_proj": [inner, width], "up_proj": [inner, width], "down_proj": [width, inner]}
    for layer in range(layers):
        base = f"model.layers.{layer}."
        for name, shape in attention.items():
            form = "bfloat16" if model.form == "MXFP4" else model.form
            yield from _stored(f"{base}self_attn.{name}", shape, form)
        if model.form != "MXFP4":
            for name, shape in mlp.items():
                yield from _stored(f"{base}mlp.{name}", shape, model.form)
            continue
        for name, columns in (("gate_up_proj", 2 * inner), ("down_proj", width)):
            shape = [_EXPERTS, columns, width // 32]
            yield f"{base}mlp.experts.{name}_blocks", ("U8", [*shape, 16])
            yield f"{base}mlp.experts.{name}_scales", ("U8", shape)


def _stored(name: str, shape: list[int], form: str) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield the tensors in which a matrix is stored."""
    rows, columns = shape
    if form == "FP8":
        yield f"{name}.weight", ("F8_E4M3", shape)
        yield f"{name}.weight_scale_inv", ("F32", [-(-rows // 128), -(-columns // 128)])
    elif form == "4 bits":
        yield f"{name}.weight_packed", ("I32", [rows, columns // 8])
        yield f"{name}.weight_scale", ("BF16", [rows, columns // 128])
    else:
        yield f"{name}.weight", ("BF16", shape)


def table() -> str:
    """Return the table, in Markdown."""
    columns = "GPUs", "target, stored in", "drafter", "weights on a GPU", "texts of up to"
    rows = [f"| {' | '.join((*columns, 'alone', 'drafts'))} |", "|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        places: dict[Model, Path] = {}
        for model in {one for pair in PAIRS for one in pair if one is not None}:
            places[model] = save(Path(folder) / str(len(places)), model)
        for machine in MACHINES:
            for target, drafter in PAIRS:
                place = None if drafter is None else places[drafter]
                if machine.count == 1 or target.form != "MXFP4":  # gpt-oss cannot be divided
                    rows.append(_row(machine, target, drafter, places[target], place))
    return "\n".join(filter(None, rows)) + "\n"


def _row(
    machine: Machine, target: Model, drafter: Model | None, at: Path, beside: Path | None
) -> str:
    """Return the row of a pair: both on the only GPU, or the target divided among all.

    "": it is far too large for these.
    """
    last = machine.count - 1
    config = PairConfig(
        target=str(at),
        drafter="ngram" if beside is None else str(beside),
        target_device="cuda:0" if machine.count == 1 else f"cuda:0-{last}",
        drafter_device=f"cuda:{last}",
    )
    devices = devices_of(config, lambda _: machine.memory, drafts=True)
    names = f"{target.name}, {target.form}", "`ngram`" if drafter is None else drafter.name
    of_gpu = devices[-1]
    weights = sum(item.stated.sizes.weights for item in of_gpu.items) / 1e9
    is_refused = any(map(why_not, devices))
    if is_refused and weights > _FAR_TOO_MUCH * machine.memory / 1e9:
        return ""
    if is_refused:
        return f"| {machine.name} | {' | '.join(names)} | {weights:.1f} GB: too much | | | |"
    items = {item.role: item for item in of_gpu.items}
    texts = items[Role.TARGET]
    held = f"{texts.num_lanes} of {texts.max_len:,}"
    seconds = _seconds(items[Role.TARGET], target, machine)
    cells = [*names, f"{weights:.1f} GB", held, f"{1 / seconds:.0f}", "-"]
    if drafter is not None:
        step = _seconds(items[Role.DRAFTER], drafter, machine, alone=True)
        cells[-1] = f"{_drafted(seconds, step):.0f}"
    return f"| {machine.name} | {' | '.join(cells)} |"


def _seconds(item: Item, model: Model, machine: Machine, *, alone: bool = False) -> float:
    """Return the estimated seconds of a pass; `alone`: its GPU does not share it with another."""
    sizes = model.sizes
    read = item.stated.sizes.weights
    if not sizes.tie_word_embeddings:  # of the embeddings a pass reads one row
        read -= 2 * (sizes.vocab_size or 0) * (sizes.hidden_size or 0)
    if model.form == "MXFP4":  # 4 experts of all
        matrices = (sizes.num_hidden_layers or 0) * 3 * (sizes.hidden_size or 0) ** 2
        read -= 2 * matrices * (_EXPERTS - 4)
    sums = 0 if alone or machine.count == 1 else 2 * (sizes.num_hidden_layers or 0)
    return read / (REACHED * machine.bandwidth) + sums * SUM_S


def _drafted(seconds: float, step: float) -> float:
    """Return the estimated tokens a second with the best number of drafts."""
    return max(
        (1 - RIGHT ** (count + 1)) / (1 - RIGHT) / (seconds + count * step)
        for count in range(1, MOST_DRAFTS + 1)
    )


def page(text: str) -> str:
    """Return the page with the table as it is today. `text` is the page as it is."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    """Write the table into the page."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
