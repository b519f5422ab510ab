"""A program that one start has compiled is found by the next, with the weights of this one."""

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.forward.compiled
from engine.checkpoint.model import load_model
from engine.executor import ModelExecutor
from engine.forward.kept_programs import (
    Call,
    Constant,
    Program,
    blocked,
    forget,
    keep,
    kept,
)
from tests.engine.forward.test_compiled import needs_compiler
from tests.engine.forward.test_fused import TOLERANCES, session_differences
from tests.tiny_models import make_model

# As torch writes one: it gets its constants as attributes, and hands all to its library.
SOURCE = """
from pathlib import Path
from engine.forward.kept_programs import _opened
inductor_entry = _opened(Path(__file__).with_name("made.main.so"))
def _wrap_func(f):
    def g(args):
        return f([*args, *[bias, packed]])
    return g
call = _wrap_func(inductor_entry)
"""
# As the library of a program, for torch's loader and ours: it returns what it is given.
LIBRARY = r"""
#include <Python.h>
static PyObject *entry(PyObject *self, PyObject *args) {
    PyObject *given = PyTuple_GET_ITEM(args, 0);
    Py_INCREF(given);
    return given;
}
static PyMethodDef methods[] = {{"inductor_entry_cpp", entry, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "inductor_entry_cpp", 0, -1, methods};
PyMODINIT_FUNC PyInit_inductor_entry_cpp(void) { return PyModule_Create(&module); }
"""
KEY = "some"
Make = Callable[..., Any]


class Layer(torch.nn.Module):
    """Two matrices and a vector."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(10, 8, generator=generator))
        self.second = torch.nn.Parameter(torch.randn(10, 8, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(8, generator=generator))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    from torch._inductor.codecache import PyCodeCache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(PyCodeCache, "modules", [])
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that torch's compiler has made."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "made.c").write_text(LIBRARY)
    headers = sysconfig.get_path("include")
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-xc", "-shared", "-fPIC", f"-I{headers}", "made.c", "-o", "made.main.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "made.main.so"


@pytest.fixture
def made(folder: Path, library: Path) -> Make:
    """Function: constants by name -> a program that torch has just made."""
    from torch._inductor.codecache import PyCodeCache

    (folder / "ab").mkdir()
    shutil.copy(library, folder / "ab")

    def make(**constants: torch.Tensor) -> Any:
        path = folder / "ab" / "cabc.py"
        path.write_text(SOURCE)
        return PyCodeCache.load_by_key_path("cabc", str(path), attrs=constants)

    return make


def kept_of(made: Make, layer: Layer, **constants: torch.Tensor) -> Program | None:
    """What is kept of a program of `layer` that was called with five slots."""
    ones = torch.ones(5)
    call = Call(made(**constants).call, (5, ones))
    return keep(KEY, layer, call, (torch.zeros(5), ones), 5, looked_up=("second",))


def test_matrices_lie_in_blocks_as_a_dumb_loop_lays_them() -> None:
    weight = torch.randn(10, 8)
    for interleaved in (1, 2, 4):
        got = blocked(weight, (3, 8, 4), interleaved).reshape(3, 8 // interleaved, 4, interleaved)
        for row in range(12):
            for k in range(8):
                there = got[row // 4, k // interleaved, row % 4, k % interleaved]
                assert there == (weight[row, k] if row < 10 else 0)


@pytest.mark.parametrize("interleaved", [1, 2, 4])
def test_another_model_of_the_shape_has_its_own_weights_in_it(interleaved: int, made: Make) -> None:
    layer, other = Layer(0), Layer(1)
    packed = blocked(layer.first, (3, 8, 4), interleaved)
    program = kept_of(made, layer, bias=layer.bias, packed=packed)
    found = kept(KEY, other)
    assert program is not None
    assert found is not None
    assert found.inputs == program.inputs == ("length", 1)
    x = torch.randn(8)
    length, given, bias, blocks = found((torch.zeros(5), x), 8)
    assert length == 8
    assert torch.equal(given, x)
    assert torch.equal(bias, other.bias)
    assert torch.equal(blocks, blocked(other.first, (3, 8, 4), interleaved))
    forget(KEY)
    assert kept(KEY, other) is None


def test_a_matrix_that_onednn_has_laid_out_is_laid_out_anew(made: Make) -> None:
    reorder = torch.ops.mkldnn._reorder_linear_weight
    layer, other = Layer(0), Layer(1)
    packed = reorder(layer.first.detach(), 2)
    assert kept_of(made, layer, bias=layer.bias, packed=packed) is not None
    found = kept(KEY, other)
    assert found is not None
    blocks = found((torch.zeros(5), torch.ones(5)), 5)[-1]
    assert blocks.is_mkldnn
    assert torch.equal(blocks.to_dense(), other.first)
    changed = reorder(layer.first.detach() + 1, 2)
    assert kept_of(made, layer, bias=layer.bias, packed=changed) is None


def test_of_what_a_constant_is_made_must_be_certain(made: Make) -> None:
    layer = Layer(0)
    packed = blocked(layer.first, (3, 8, 4))
    assert kept_of(made, layer, bias=layer.bias.clone(), packed=packed) is None
    assert kept_of(made, layer, bias=layer.bias, packed=packed + 1) is None
    assert kept_of(made, layer, bias=layer.bias, packed=blocked(layer.second, (3, 8, 4))) is None
    twins = Layer(0)
    twins.third = torch.nn.Parameter(twins.first.detach().clone())
    assert kept_of(made, twins, bias=twins.bias, packed=packed) is None
    assert kept(KEY, layer) is None
    # What is only looked up does not count.
    twins = Layer(0)
    twins.second = torch.nn.Parameter(twins.first.detach().clone())
    assert kept_of(made, twins, bias=twins.bias, packed=packed) is not None


def test_which_input_is_which_must_be_certain(made: Make) -> None:
    layer = Layer(0)
    raw = made(bias=layer.bias, packed=blocked(layer.first, (3, 8, 4))).call
    x = torch.ones(5)
    assert keep(KEY, layer, Call(raw, (5, x)), (x,), 5) is not None
    for inputs, tensors in (((6, x), (x,)), ((5, x), (x, x)), ((5, x), (torch.ones(5),))):
        assert keep(KEY, layer, Call(raw, inputs), tensors, 5) is None
    assert keep(KEY, layer, Call(lambda _: [], (5, x)), (x,), 5) is None, "not torch's"


def test_what_cannot_be_used_is_none_and_one_line_says_why(
    folder: Path, made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    layer = Layer(0)
    assert kept_of(made, layer, bias=layer.bias, packed=blocked(layer.first, (3, 8, 4)))
    (file,) = folder.glob("*.json")
    note = json.loads(file.read_text())
    assert kept(KEY, layer) is not None
    assert not caplog.messages
    without = Layer(0)
    del without.first
    assert kept(KEY, without) is None
    for content in ("{", "[]", "{}", "\udcff", json.dumps(note | {"library": "gone.so"})):
        file.write_text(content, errors="surrogateescape")
        caplog.clear()
        assert kept(KEY, layer) is None
        (line,) = caplog.messages
        assert line.startswith("a kept program is not used (")
    caplog.clear()
    file.unlink()
    assert kept(KEY, layer) is None
    assert not caplog.messages, "nothing was kept"
    file.mkdir()
    assert not kept_of(made, layer, bias=layer.bias, packed=blocked(layer.first, (3, 8, 4)))


def test_a_damaged_library_is_not_opened(
    folder: Path, made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    layer = Layer(0)
    assert kept_of(made, layer, bias=layer.bias, packed=blocked(layer.first, (3, 8, 4)))
    (library,) = folder.rglob("*.so")
    content = library.read_bytes()
    library.unlink()  # a file that is in use must not be shortened
    library.write_bytes(content[:5000])
    assert kept(KEY, layer) is None
    assert caplog.messages == ["a kept program is not used (ValueError: its library is damaged)"]


def test_a_constant_is_a_weight_or_a_matrix_in_blocks() -> None:
    weight = torch.randn(4, 2)
    assert Constant("weight").made_of(weight) is weight
    assert Constant("weight", (2, 2, 2)).made_of(weight).shape == (2, 2, 2)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_second_start_traces_nothing(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = (make_model(family, tmp_path / str(seed), seed, scale=0.5) for seed in (1, 2))

    def executor(folder: Path, backend: str) -> ModelExecutor:
        loaded = load_model(str(folder), dtype=dtype)
        return ModelExecutor(loaded, 320, backend=backend, row_counts=(1, 4))

    cold = executor(first, "compiled")
    before = list(session_differences(executor(first, "reference"), cold, seed=3, num_rounds=10))
    assert cold._backend._direct.keys() == {1, 4}  # type: ignore[union-attr]

    def refuse(*_: object) -> None:
        raise AssertionError("compiled anew")

    monkeypatch.setattr(engine.forward.compiled, "_compiled", refuse)
    for folder in (first, other):
        warm = executor(folder, "compiled")
        reference = executor(folder, "reference")
        after = list(session_differences(reference, warm, seed=3, num_rounds=10))
        assert all(error < TOLERANCES[dtype] for error in after)
        if folder == first:
            assert after == before, "other numbers than the program had at first"
