"""What a node's process holds at most while it loads and lays out a model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

PROBE = """
import re, sys, torch
from pathlib import Path
from engine.checkpoint.model import load_model
from engine.loading import make_executor

def mib(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

torch.set_num_threads(1)
make_executor(load_model("models/target", dtype=sys.argv[2]), 128)  # libraries, kernels
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = mib("VmRSS")
loaded = load_model(sys.argv[1], dtype=sys.argv[2])
weights = sum(w.nbytes for w in loaded.model.parameters()) / 2**20
executor = make_executor(loaded, 1024, backend="fused")
cache = executor._backend.cache.nbytes / 2**20
print((mib("VmHWM") - before - cache) / weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's counters")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_node_holds_at_most_1_6_times_its_weights_and_the_cache(
    dtype: str, tmp_path: Path
) -> None:
    config = hf.LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=8,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=8192,
    )
    hf.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", PROBE, str(tmp_path), dtype]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True, timeout=300
    )
    assert float(done.stdout) <= 1.6
