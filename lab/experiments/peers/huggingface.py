"""Hugging Face `generate` as a peer (engine to compare with): JSON lines in, JSON lines out.

    python -m lab.experiments.peers.huggingface TARGET DRAFTER DTYPE DEVICE

DEVICE is a GPU, or cpu for all CPU cores that the process may use. Each request line {"mode":
"plain" | "assisted" | "lookup", "prompt": [ids], "max_tokens": n, "temperature": t, "top_k": n,
"top_p": p, "min_p": p, "setting": k or null, "seed": n} is answered by {"tokens": [...], "times":
[seconds since the request, per call of the streamer], "counts": [...]}.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers as hf
from transformers.generation.streamers import BaseStreamer

WARM_UP: dict[str, Any] = {
    "mode": "assisted",
    "prompt": [1, 2],
    "max_tokens": 8,
    "temperature": 0,
    "setting": None,
    "seed": 0,
}


class Clock(BaseStreamer):
    """A streamer that notes at which time (seconds since its creation) how many tokens came."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        """Note how many tokens came; the first call, which brings the prompt, is ignored."""
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self.times.append(time.perf_counter() - self.started)
        self.counts.append(int(value.numel()))

    def end(self) -> None:
        """Do nothing: no token is held back."""


class Peer:
    """Target and drafter, loaded with transformers."""

    def __init__(self, target: str, drafter: str, dtype: str, device: str) -> None:
        self.device = device
        kind: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
        self.target: Any = hf.AutoModelForCausalLM.from_pretrained(target, dtype=kind)
        self.drafter: Any = hf.AutoModelForCausalLM.from_pretrained(drafter, dtype=kind)
        for model in (self.target, self.drafter):
            model.eval().to(device)  # type: ignore[no-untyped-call]
        self._default = self.drafter.generation_config.num_assistant_tokens
        self._schedule = self.drafter.generation_config.num_assistant_tokens_schedule

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate exactly `max_tokens` tokens for a request; return tokens, times and counts."""
        more: dict[str, Any] = {}
        if request["mode"] == "assisted":
            more["assistant_model"] = self.drafter
            config = self.drafter.generation_config
            config.num_assistant_tokens = request["setting"] or self._default
            config.num_assistant_tokens_schedule = (
                "constant" if request["setting"] else self._schedule
            )
        elif request["mode"] == "lookup":
            more["prompt_lookup_num_tokens"] = request["setting"] or 10
        if request["temperature"] > 0:
            # All are given, because `generate` takes others from the model's own configuration.
            more |= {name: request[name] for name in ("temperature", "top_k", "top_p")}
            more |= {"do_sample": True, "min_p": request["min_p"] or None}  # None: no work for it
        else:
            more["do_sample"] = False
        torch.manual_seed(request["seed"])
        clock = Clock()
        with torch.inference_mode():
            text = self.target.generate(
                torch.tensor([request["prompt"]], device=self.device),
                max_new_tokens=request["max_tokens"],
                eos_token_id=None,
                pad_token_id=0,
                streamer=clock,
                **more,
            )
        tokens = text[0, len(request["prompt"]) :].tolist()
        return {"tokens": tokens, "times": clock.times, "counts": clock.counts}


def main() -> None:
    """Load the models, say that they are ready, and answer requests until standard input ends."""
    hf.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    peer = Peer(*sys.argv[1:5])
    peer.answer(WARM_UP)
    print(json.dumps({"ready": hf.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
