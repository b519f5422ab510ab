"""llama.cpp as a peer for the benchmark, where `llama-cpp-python` and `gguf` are installed.

    pip install llama-cpp-python gguf
    python -m deploy.experiments.peers.llamacpp TARGET DRAFTER DTYPE DEVICE

It speaks as `huggingface` does. Modes: plain, and lookup (its prompt lookup decoding).
The target is converted to GGUF in DTYPE, so that both compute with the same weights.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from deploy.experiments.peers import gguf_file

MAX_LEN = 1024


class Peer:
    """The target under llama.cpp, on a GPU or on all cores that it is given."""

    def __init__(self, target: str, dtype: str, device: str) -> None:
        self.num_gpu_layers = -1 if device.startswith("cuda") else 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "target.gguf"
            gguf_file.write(target, dtype, path)
            self.models = {
                "plain": self._model(path, None),
                "lookup": self._model(path, LlamaPromptLookupDecoding(num_pred_tokens=10)),
            }

    def _model(self, path: Path, draft: Any) -> Any:
        cores = len(os.sched_getaffinity(0))
        return llama_cpp.Llama(
            str(path),
            n_ctx=MAX_LEN,
            n_gpu_layers=self.num_gpu_layers,
            n_threads=cores,
            n_threads_batch=cores,
            flash_attn=True,
            use_mmap=False,
            draft_model=draft,
            verbose=False,
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate exactly `max_tokens` tokens."""
        model = self.models[request["mode"]]
        model.reset()
        model.set_seed(request.get("seed", 0) & 0x7FFFFFFF)
        started = time.perf_counter()
        tokens: list[int] = []
        times: list[float] = []
        made = model.generate(
            request["prompt"], temp=request["temperature"], top_k=0, top_p=1.0, min_p=0.0
        )
        for token in made:
            tokens.append(int(token))
            times.append(time.perf_counter() - started)
            if len(tokens) == request["max_tokens"]:
                break
        return {"tokens": tokens, "times": times, "counts": [1] * len(times)}


def main() -> None:
    """Serve until standard input ends."""
    target, _, dtype, device = sys.argv[1:5]
    peer = Peer(target, dtype, device)
    peer.answer({"mode": "plain", "prompt": [1, 2], "max_tokens": 8, "temperature": 0})
    print(json.dumps({"ready": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
