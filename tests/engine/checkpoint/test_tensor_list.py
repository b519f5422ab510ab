"""The list in a safetensors file, held to the library: what it reads and what it refuses."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from engine.checkpoint.tensor_list import tensors_in
from engine.errors import ModelError

ROOT = Path(__file__).resolve().parents[3]
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def file_of(stated: object, numbers: bytes = b"") -> bytes:
    text = stated if isinstance(stated, bytes) else json.dumps(stated).encode()
    return struct.pack("<Q", len(text)) + text + numbers


SOUND = {
    "empty": file_of({}),
    "with metadata": file_of({"__metadata__": {"format": "pt"}, "a": ONE}, b"1234"),
    "padded": file_of(json.dumps({"a": ONE}).encode() + b"   ", b"1234"),
    "half bytes": file_of({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"12"),
    "a scalar and nothing": file_of(
        {
            "a": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
            "b": {"dtype": "BF16", "shape": [3, 0], "data_offsets": [8, 8]},
        },
        b"12345678",
    ),
}
TORN = {
    "nothing": b"",
    "too short": b"1234",
    "a pointer of Git's": b"version https://git-lfs.github.com/spec/v1\noid",
    "longer than the file": struct.pack("<Q", 200) + b"{}",
    "longer than may be": struct.pack("<Q", 1 << 40) + b"{}",
    "cut off": file_of({"a": ONE}, b"123"),
    "more behind it": file_of({"a": ONE}, b"12345"),
    "no JSON": file_of(b"x"),
    "no text": file_of(b"\xff\xff"),
    "a list": file_of([]),
    "nested": file_of(b"[" * 100_000),
    "a number": file_of({"a": 3}),
    "no place": file_of({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
    "another type": file_of({"a": {**ONE, "dtype": "F99"}}, b"1234"),
    "another shape": file_of({"a": {**ONE, "shape": [2]}}, b"1234"),
    "a shape below zero": file_of({"a": {**ONE, "shape": [-1]}}, b"1234"),
    "a shape of texts": file_of({"a": {**ONE, "shape": ["1"]}}, b"1234"),
    "a gap": file_of({"a": {**ONE, "data_offsets": [1, 5]}}, b"12345"),
    "backwards": file_of({"a": {**ONE, "data_offsets": [4, 0]}}, b"1234"),
    "one above another": file_of({"a": ONE, "b": ONE}, b"1234"),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_the_library_reads_is_read_as_it_reads_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(SOUND[name])
    check_against_the_library(path)


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_the_embedded_models_are_read_as_the_library_reads_them(model: str) -> None:
    check_against_the_library(ROOT / "models" / model / "model.safetensors")


def check_against_the_library(path: Path) -> None:
    with safe_open(path, framework="np") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        wanted = {n: (one.get_dtype(), tuple(one.get_shape())) for n, one in slices.items()}
    assert {one.name: (one.kind, one.shape) for one in tensors_in(path)} == wanted


@pytest.mark.parametrize("name", TORN)
def test_what_the_library_refuses_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(TORN[name])
    with pytest.raises(SafetensorError):
        safe_open(path, framework="np").__enter__()
    with pytest.raises(ModelError, match=r"x\.safetensors: cannot be read: .*; get it again$"):
        tensors_in(path)


def test_a_missing_file_is_refused_in_the_systems_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        tensors_in(tmp_path / "none")


def test_whoever_looks_at_a_models_files_loads_no_numpy() -> None:
    program = (
        "import sys; from coordinator.api.config import PairConfig; "
        "from coordinator.api.models.preflight import look_at; look_at(PairConfig(), drafts=True); "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "engine" in loaded
    assert not loaded & {"torch", "numpy"}
