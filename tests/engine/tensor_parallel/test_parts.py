"""What a rank reads of a checkpoint: its own slices, plain or packed, and room for no more."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import engine.checkpoint.model
from engine.checkpoint.model import load_model
from engine.errors import OutOfMemory
from engine.quantised import packed_checkpoint
from engine.tensor_parallel.group import Rank
from engine.tensor_parallel.layout import UNIT
from engine.tensor_parallel.split import cuts_of
from tests.engine.conftest import Folder
from tests.engine.forward.test_fused import save
from tests.engine.tensor_parallel.test_split import DIVIDED
from tests.packed_models import RECIPES, save_packed

MODEL = engine.checkpoint.model
BIASES = {"attention_bias": True, "mlp_bias": True}
SLOW = pytest.mark.slow
OF_EXPERTS = ("qwen3_moe", "mixtral")

PROBE = """
import re, sys, torch
from pathlib import Path
from engine.checkpoint.model import load_model
from engine.tensor_parallel.group import Rank

def mib(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

torch.set_num_threads(1)
load = lambda path, rank: load_model(path, dtype="bfloat16", rank=rank)
load("models/target", Rank(1, 2, print))  # libraries
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = mib("VmRSS")
loaded = load(sys.argv[1], Rank(1, 3, print))
sizes = [weight.nbytes / 2**20 for weight in loaded.model.parameters()]
print(mib("VmHWM") - before, sum(sizes), loaded.num_parameters * 2 / 2**20)
"""


def rank_of(index: int, count: int = 2) -> Rank:
    """One that nobody adds up with."""
    return Rank(index, count, lambda _: None)


def check_parts(folder: Path, count: int = 2) -> None:
    """Every rank has of every weight what is cut out of the whole, to the bit."""
    whole = load_model(str(folder), dtype="float32").model
    weights = dict(whole.named_parameters())
    kept = 0
    for index in range(count):
        rank = rank_of(index, count)
        cuts = cuts_of("model", whole, rank)
        part = load_model(str(folder), dtype="float32", rank=rank).model
        names = {name for name, cut in cuts.items() if not cut.runs}
        parts = dict(part.named_parameters())
        if "lm_head.weight" not in weights:  # it shares its matrix with the embeddings
            words = rank.share(len(weights["model.embed_tokens.weight"]), UNIT)
            want = weights["model.embed_tokens.weight"][words.start : words.stop]
            assert torch.equal(parts.pop("lm_head.weight"), want)
        assert parts.keys() == weights.keys() - names
        for name, weight in parts.items():
            want = cuts[name].of(weights[name]) if name in cuts else weights[name]
            assert torch.equal(weight, want), name
            assert weight.is_contiguous()
            kept += weight.numel() if name in cuts else 0
    assert kept == sum(weights[name].numel() for name in cuts if cuts[name].runs)


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be read whole and divided then."""
    monkeypatch.setattr(MODEL, "split", lambda *_: pytest.fail("the whole was read"))


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize("architecture", DIVIDED)
def test_a_rank_reads_the_slices_that_it_keeps(architecture: str, tmp_path: Path) -> None:
    check_parts(save(architecture, tmp_path, {}))


@pytest.mark.usefixtures("sliced")
def test_biases_are_cut_too_or_left_to_the_first_rank(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, BIASES)
    check_parts(folder)
    first, second = (
        {name for name, _ in load_model(str(folder), rank=rank_of(i)).model.named_parameters()}
        for i in range(2)
    )
    assert {name.split(".")[-2] for name in first - second} == {"o_proj", "down_proj"}


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize("kind", RECIPES)
def test_a_rank_of_a_packed_model_dequantises_the_slices_that_it_keeps(
    kind: str, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = save_packed(folder("llama"), tmp_path, RECIPES[kind])
    check_parts(packed)
    made = [0]
    dequantised = packed_checkpoint._weight

    def counted(form: Any, tensors: Any) -> torch.Tensor:
        weight = dequantised(form, tensors)
        made[0] += weight.numel()
        return weight

    monkeypatch.setattr(packed_checkpoint, "_weight", counted)
    load_model(str(packed))
    whole, made[0] = made[0], 0
    load_model(str(packed), rank=rank_of(0))
    # Half of each, and what shares a scale or an element with it. Columns of nf4 have all rows.
    most = {"nf4": 0.67, "fp8-block-with-rest": 0.7}
    most |= dict.fromkeys(("fp8-large-block", "nf4-double", "nf4-with-rest"), 1.0)
    assert made[0] <= most.get(kind, 0.5) * whole


@pytest.mark.usefixtures("sliced")
@pytest.mark.parametrize("architecture", OF_EXPERTS)
def test_experts_that_are_packed_are_sliced_one_by_one(
    architecture: str, folder: Folder, tmp_path: Path
) -> None:
    left = ("lm_head", "mlp.gate.", "block_sparse_moe.gate.")
    packed, _ = save_packed(folder(architecture), tmp_path, RECIPES["gptq"], plainly=left)
    check_parts(packed)


def test_what_slices_cannot_follow_is_read_whole_and_divided_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODEL, "cuts_in_files", lambda *_: None)
    monkeypatch.setattr(MODEL, "plain_parts", lambda *_: pytest.fail("slices were read"))
    check_parts(save("llama", tmp_path, BIASES))


def test_the_memory_that_is_asked_for_is_that_of_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save("llama", tmp_path, {}))
    part = load_model(folder, dtype="float32", rank=rank_of(1)).model
    needed = sum(weight.nbytes for weight in part.parameters())
    assert needed < 0.8 * 4 * load_model(folder, dtype="float32").num_parameters
    load = partial(load_model, folder, dtype="float32")
    monkeypatch.setattr(MODEL, "free_bytes", lambda _: needed)
    load(rank=rank_of(1))
    with pytest.raises(OutOfMemory, match="its weights take"):
        load(rank=rank_of(0))  # on CPUs it asks for all
    monkeypatch.setattr(MODEL, "free_bytes", lambda _: needed - 1)
    with pytest.raises(OutOfMemory, match="its weights take"):
        load(rank=rank_of(1))


def test_slices_are_read_straight_onto_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def read(*_: Any, **given: Any) -> Any:
        asked.update(given)
        raise OutOfMemory("far enough")

    gpu = torch.device("cuda:1")
    monkeypatch.setattr(MODEL, "read_weights", read)
    monkeypatch.setattr(MODEL, "claim", lambda _: gpu)
    monkeypatch.setattr(MODEL, "free_bytes", lambda _: 1 << 40)
    with pytest.raises(OutOfMemory, match="far enough"):
        load_model(str(save("llama", tmp_path, {})), device="cuda:1", rank=rank_of(1))
    assert asked["options"] == {"device_map": {"": gpu}}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's counters")
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=SLOW) for kind in ("experts", "gptq", "nf4"))]
)
def test_a_rank_holds_at_most_1_3_times_its_share_and_one_tensor(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 1536,
        "num_hidden_layers": 12 if kind in ("plain", "experts") else 4,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 128,
        "vocab_size": 2048,
    }
    config: Any = hf.LlamaConfig(**sizes)
    if kind == "experts":
        config = hf.MixtralConfig(**sizes, num_local_experts=4, sliding_window=None)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01)
    folder = tmp_path / "plain"
    model.save_pretrained(folder)
    largest = max(weight.nbytes for weight in model.parameters()) / 2**20
    del model
    if kind in ("gptq", "nf4"):
        folder, _ = save_packed(folder, tmp_path / "packed", RECIPES[kind])
        largest *= 4  # a whole matrix: dequantised in float32, packed, and what lies between
    command = [sys.executable, "-c", PROBE, str(folder)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True, timeout=300
    )
    peak, share, whole = map(float, done.stdout.split())
    assert share < 0.4 * whole
    assert peak <= 1.3 * share + largest
