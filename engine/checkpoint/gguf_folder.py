"""Make the folder of a model out of a GGUF file that is given by its path.

The folder has a config.json made of the file's fields, a tokenizer made by transformers, and a link
to the file. It is made once and kept, in $XDG_CACHE_HOME/slipstream/gguf (~/.cache/slipstream/gguf)
under a hash of the file's path, size and time of change, and of the way in which it is made. A
folder that somebody has made, with the file beside the config.json and tokenizer.json of the
original model, needs none of this.

Needs no torch: transformers runs in a process of its own.
"""

import hashlib
import json
import math
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf_list import Entry, Gguf, read_gguf
from engine.errors import ModelError
from proto.system import cache_folder, cannot_write

SUFFIX = ".gguf"
_OTHERWISE = "put it into a folder beside the config.json and tokenizer.json of the original model"
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOKENS = "tokenizer.ggml.tokens"
_TOKENIZER_LIMIT_S = 300.0
_FORM = 2  # one more where a folder is made in another way: kept ones are made again
_ROOT = Path(__file__).parents[2]
# Llama 3's rule for rotary frequencies: which are divided, and by how much (transformers' names).
_LOW, _HIGH, _ORIGINAL_LEN = 1.0, 4.0, 8192
_TOLERANCE = 1e-3
_MOST_FACTOR_BYTES = 1 << 16


def is_gguf_file(path: Path) -> bool:
    """True if the path is that of a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def folder_of(path: Path) -> Path:
    """Return the folder of the model in a GGUF file, made if it is not there yet.

    Raises:
        ModelError: the file cannot be read or used alone, or the folder cannot be made.
    """
    gguf = read_gguf(path)
    try:
        folder = _place(path)
        if not folder.is_dir():
            _make(gguf, folder)
    except OSError as error:
        raise ModelError(
            f"{path}: a folder for it cannot be made: {cannot_write(error)}"
        ) from error
    return folder


def _place(path: Path) -> Path:
    """Return where the folder of a file lies. Raises OSError."""
    facts = path.stat()
    said = _FORM, str(path.resolve()), facts.st_size, facts.st_mtime_ns
    digest = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    return cache_folder("gguf") / digest / path.stem


def _make(gguf: Gguf, folder: Path) -> None:
    """Make the folder of a file, all at once. Raises ModelError and OSError."""
    config = config_of(gguf)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / folder.name
        made.mkdir()
        if _TOKENS in gguf.fields:
            _make_tokenizer(gguf, made)
        (made / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        (made / f"model{SUFFIX}").symlink_to(gguf.path.resolve())
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise
            shutil.rmtree(made)


def _make_tokenizer(gguf: Gguf, folder: Path) -> None:
    """Write the file's tokenizer into a folder. Raises ModelError if it cannot be converted."""
    command = [sys.executable, "-m", "engine.checkpoint.gguf_tokenizer"]
    try:
        run = subprocess.run(
            [*command, str(gguf.path.resolve()), str(folder)],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=_TOKENIZER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"{gguf.path}: its tokenizer takes too long; {_OTHERWISE}") from error
    if run.returncode != 0 or not (folder / "tokenizer.json").exists():
        lines = run.stderr.strip().splitlines() or ["no reason is given"]
        raise ModelError(
            f"{gguf.path}: its tokenizer cannot be converted ({lines[-1][:120]}); {_OTHERWISE}"
        )


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Return the content of a config.json for the model in a file.

    Raises:
        ModelError: a field is missing, or describes what config.json cannot.
    """
    kind = gguf.architecture
    window = gguf.stated("attention.sliding_window")
    if kind == "llama" and window:
        kind = "mistral"
    heads = _number(gguf, "attention.head_count")
    width = _number(gguf, "embedding_length")
    ids = [gguf.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    embeddings = gguf.tensors.get("model.embed_tokens.weight")
    if embeddings is None:
        raise ModelError(f"{gguf.path}: it has no token_embd; get the file again")
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": _number(gguf, "feed_forward_length"),
        "num_hidden_layers": _number(gguf, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.stated("attention.head_count_kv") or heads,
        "head_dim": gguf.stated("attention.key_length") or width // heads,
        "vocab_size": embeddings.shape[0],
        "max_position_embeddings": _number(gguf, "context_length"),
        "rms_norm_eps": round(_number(gguf, "attention.layer_norm_rms_epsilon"), 12),
        "rope_parameters": _rope(gguf),
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in gguf.tensors,
        "sliding_window": window or None,
        "tie_word_embeddings": gguf.is_tied,
        "bos_token_id": gguf.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(one for one in ids if one is not None)) or None,
        "dtype": _dtype(gguf),
    }


def _number(gguf: Gguf, field: str) -> Any:
    """Return a number among a file's fields. Raises ModelError if it is not there."""
    value = gguf.stated(field)
    if type(value) not in (int, float) or not value > 0:
        raise ModelError(f"{gguf.path}: its field {field} is {str(value)[:40]}; {_OTHERWISE}")
    return value


def _dtype(gguf: Gguf) -> str:
    """Return the number type for activations: that of plain weights, else bfloat16."""
    kinds = {entry.kind for entry in gguf.tensors.values() if len(entry.shape) > 1}
    only = kinds.pop() if len(kinds) == 1 else ""
    return {"F32": "float32", "F16": "float16"}.get(only, "bfloat16")


def _rope(gguf: Gguf) -> dict[str, Any]:
    """Return `rope_parameters` of a config.json. Raises ModelError for kinds that are not read."""
    base = _number(gguf, "rope.freq_base") if gguf.stated("rope.freq_base") else 10_000.0
    scaling = gguf.stated("rope.scaling.type") or "none"
    if scaling != "none":
        raise ModelError(f"{gguf.path}: its rotary scaling is {str(scaling)[:40]!r}; {_OTHERWISE}")
    if gguf.factors is None:
        return {"rope_type": "default", "rope_theta": base}
    found = _factors(gguf.path, gguf.factors)
    factor = max(found)
    wanted = [_divisor(base ** (-i / len(found)), factor) for i in range(len(found))]
    if not all(abs(a - b) <= _TOLERANCE * b for a, b in zip(found, wanted, strict=True)):
        raise ModelError(f"{gguf.path}: its rope_freqs are not those of Llama 3; {_OTHERWISE}")
    return {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_LEN,
    }


def _factors(path: Path, entry: Entry) -> tuple[float, ...]:
    """Return the numbers of the tensor `ROPE_FACTORS`. Raises ModelError if one is no divisor."""
    found: tuple[float, ...] = ()
    if entry.kind == "F32" and entry.num_bytes <= _MOST_FACTOR_BYTES:
        with path.open("rb") as file:
            file.seek(entry.start)
            data = file.read(entry.num_bytes)
        found = struct.unpack(f"<{entry.num_bytes // 4}f", data)
    if not found or not all(0 < one < math.inf for one in found):
        raise ModelError(f"{path}: its {entry.name} are no numbers above 0; {_OTHERWISE}")
    return found


def _divisor(frequency: float, factor: float) -> float:
    """Return by what Llama 3 divides a rotary frequency; `factor` is the most."""
    turns = _ORIGINAL_LEN * frequency / (2 * math.pi)  # in the original length
    if turns < _LOW:
        return factor
    share = min(1.0, (turns - _LOW) / (_HIGH - _LOW))
    return 1 / ((1 - share) / factor + share)
