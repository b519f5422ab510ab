"""vLLM as a peer, where it is installed: JSON lines in, JSON lines out, as `huggingface` does.

    python -m lab.experiments.peers.vllm TARGET DRAFTER DTYPE DEVICE MODE K

A vLLM engine cannot change how it drafts, so MODE (plain, assisted or lookup) and K, the drafts of
a pass (0: DEFAULT_K), are fixed when the process starts. DEVICE is a GPU, such as cuda:0.
"""

import json
import os
import sys
import time
from typing import Any

DEFAULT_K = 5
MAX_NGRAM = 4
MEMORY_SHARE = 0.3  # of the GPU's memory, because other engines use the same GPU
MAX_LEN = 4096


class Peer:
    """Target and drafter under vLLM."""

    def __init__(self, target: str, drafter: str, dtype: str, mode: str, k: int) -> None:
        from vllm import LLM

        speculation: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "assisted": {"model": drafter, "num_speculative_tokens": k},
            "lookup": {
                "method": "ngram",
                "num_speculative_tokens": k,
                "prompt_lookup_max": MAX_NGRAM,
            },
        }
        llm: Any = LLM(
            model=target,
            dtype=dtype,
            max_model_len=MAX_LEN,
            max_num_seqs=1,
            gpu_memory_utilization=MEMORY_SHARE,
            speculative_config=speculation[mode],
        )
        self._engine = llm.llm_engine
        self._number = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate exactly `max_tokens` tokens for a request; return tokens, times and counts."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=request["temperature"],
            top_k=request["top_k"] or -1,  # 0 is off as well, but not in older versions
            top_p=request["top_p"],
            min_p=request["min_p"],
            max_tokens=request["max_tokens"],
            seed=request["seed"],
            ignore_eos=True,
            detokenize=False,
        )
        self._number += 1
        started = time.perf_counter()
        prompt = {"prompt_token_ids": request["prompt"]}
        self._engine.add_request(str(self._number), prompt, params)
        tokens: list[int] = []
        times: list[float] = []
        counts: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                ids = list(output.outputs[0].token_ids)
                if len(ids) > len(tokens):
                    times.append(time.perf_counter() - started)
                    counts.append(len(ids) - len(tokens))
                    tokens = ids
        return {"tokens": tokens, "times": times, "counts": counts}


def main() -> None:
    """Load the models, say that they are ready, and answer requests until standard input ends."""
    target, drafter, dtype, device, mode, k = sys.argv[1:7]
    if not device.startswith("cuda"):
        raise SystemExit("vLLM is run on a GPU here: give the target one")
    os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2] or "0"
    # What vLLM prints goes to standard error, so that standard output has only the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm

    peer = Peer(target, drafter, dtype, mode, int(k) or DEFAULT_K)
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
