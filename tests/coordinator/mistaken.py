"""Folders and files as newcomers have them: of each kind of mistake one."""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from proto.installation import MODELS
from tests.tiny_tokenizer import save_bytewise_tokenizer

SOUND = MODELS / "drafter"
HIDDEN_SIZE = 128  # of that model
EAGLE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 4096}


def make_all(folder: Path) -> None:
    """Make everything that the mistakes of the tests refer to."""
    _models(folder)
    _heads(folder)
    _files(folder)


def model(folder: Path, *without: str, **fields: Any) -> Path:
    """A sound model but for files that are left out and fields of its config.json."""
    folder.mkdir(parents=True)
    for file in SOUND.iterdir():
        if file.name not in without and file.name != "config.json":
            os.symlink(file, folder / file.name)
    if "config.json" not in without:
        stated = json.loads((SOUND / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(stated))
    return folder


def _models(folder: Path) -> None:
    model(folder / "sound")
    model(folder / "no-config", "config.json")
    (model(folder / "garbled", "config.json") / "config.json").write_text('{"model_type": ')
    (model(folder / "listed", "config.json") / "config.json").write_text("[]")
    model(folder / "no-heads", num_attention_heads=0)
    model(folder / "typo", model_type="lama")
    model(folder / "no-type", model_type=None)
    model(folder / "recurrent", model_type="rwkv")
    model(folder / "t5", model_type="t5", is_encoder_decoder=True)
    model(folder / "sliding", model_type="moshi", sliding_window=4096)
    model(folder / "vision", model_type="clip")
    model(folder / "packed", quantization_config={"quant_method": "hqq"})
    model(
        folder / "gptq", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}
    )
    model(folder / "small", vocab_size=100)
    _, pickled = model(folder / "no-weights", "model.safetensors"), folder / "pickled"
    (model(pickled, "model.safetensors") / "pytorch_model.bin").write_bytes(b"")
    torn = model(folder / "torn", "model.safetensors") / "model.safetensors"
    torn.write_bytes((SOUND / "model.safetensors").read_bytes()[:100_000])
    pointer = model(folder / "pointer", "model.safetensors") / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    sharded = model(folder / "sharded", "model.safetensors")
    shutil.copy(SOUND / "model.safetensors", sharded / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": names}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = model(folder / "adapter", "model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    # Another family's tokenizer; none; a torn one.
    save_bytewise_tokenizer(model(folder / "bytewise", "tokenizer.json", "tokenizer_config.json"))
    model(folder / "wordless", "tokenizer.json")
    torn_words = model(folder / "torn-words", "tokenizer.json") / "tokenizer.json"
    torn_words.write_text('{"version": "1.0", ')
    (model(folder / "no-template") / "chat_template.jinja").write_text("{% for message in %}")
    (folder / "model.gguf").write_bytes(b"GGUF")


def _heads(folder: Path) -> None:
    head(folder / "eagle", **EAGLE, hidden_size=4096)
    head(folder / "eagle-words", **EAGLE, hidden_size=HIDDEN_SIZE, vocab_size=128_256)
    medusa = head(folder / "medusa", medusa_num_heads=1, medusa_num_layers=1)
    _write_zeros(medusa / "medusa_lm_head.safetensors", "0.0.linear.weight", (4096, 4096))
    (medusa / "model.safetensors").unlink()
    empty = head(folder / "empty-head", **EAGLE, hidden_size=HIDDEN_SIZE, num_hidden_layers=1)
    (empty / "model.safetensors").unlink()


def head(folder: Path, **fields: Any) -> Path:
    """A head by its config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    _write_zeros(folder / "model.safetensors", "fc.weight", (1, 1))
    return folder


def _write_zeros(path: Path, name: str, shape: tuple[int, int]) -> None:
    size = 2 * shape[0] * shape[1]
    about = {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({name: about}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


def _files(folder: Path) -> None:
    (folder / "empty.txt").write_text("\n\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{prompt: b}\n')
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "long.txt").write_text("word " * 4096)
    (folder / "keys").mkdir()
    (folder / "garbled.toml").write_text("arms = [")
    (folder / "no-trace.json").write_text("{}")
