"""The peer `one_process` (`sync` in one process) with the synthetic models.

    python -m lab.synthetic.one_process TARGET_MS DRAFT_MS

answers requests as `lab/experiments/peers/one_process.py` does. `started_in_one_process` starts it,
and generates texts with it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coordinator.api.params import SamplingParams
from coordinator.launching.groups import has_ended, kill
from lab.experiments.peers.one_process import Model, OneProcess, devices_of, serve
from lab.synthetic import model
from lab.synthetic.executor import SyntheticExecutor
from lab.synthetic.host_time import Launch
from lab.synthetic.running import AskedText, Costs, cpu_s_of, speculation_of
from lab.synthetic.summary import Made
from proto.errors import NodeError
from proto.installation import ROOT

PROCESS = "one process"


def of_synthetic_models(target_ms: str, draft_ms: str) -> OneProcess:
    """Return both synthetic models and their loop, with simulated devices of these costs."""
    target, drafter = (
        Model(SyntheticExecutor(num_lanes=1), device, num_ids=model.VOCAB_SIZE)
        for device in devices_of((target_ms, "0", draft_ms, "0"))
    )
    return OneProcess(
        target,
        drafter,
        num_valid=model.VOCAB_SIZE,
        choose=model.choose,
        rank=model.rank_scored,
    )


class InOneProcess:
    """A running process with both models, to which requests are sent."""

    def __init__(self, process: "subprocess.Popen[str]", costs: Costs) -> None:
        """Take a running process; callers use `started_in_one_process`."""
        self._process, self._costs = process, costs
        self._is_ready = False

    def write(self, policy: str, prompt: tuple[int, ...], request: SamplingParams) -> Made:
        """Generate and return a text. Asserts that it is what the target alone would write.

        Raises NodeError.
        """
        speculation = speculation_of(policy)
        asked = {
            "mode": "assisted" if speculation.drafts else "plain",
            "prompt": prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "setting": speculation.num_speculative_tokens,
            "seed": request.seed,
        }
        if not self._is_ready:  # waited for only here, so that it starts at the same time as others
            self._answer()
            self._is_ready = True
        spent, started = cpu_s_of(self._process.pid), time.perf_counter()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        elapsed_s = time.perf_counter() - started
        tokens, times = answer["tokens"], answer["times"]
        AskedText(policy, prompt, request).check(tokens)
        per_second = sum(answer["counts"][1:]) / (times[-1] - times[0])
        return Made(
            policy=policy,
            num_tokens=len(tokens),
            elapsed_s=elapsed_s,
            speed=per_second * self._costs.target_ms / 1e3,
            num_passes=answer["num_passes"],
            num_accepted=answer["num_accepted"],
            late_share=min(1.0, answer["late_s"] / elapsed_s),
            cpu_s={PROCESS: cpu_s_of(self._process.pid) - spent},
            launches={PROCESS: [Launch(*one) for one in answer["launches"]]},
        )

    def _answer(self) -> dict[str, Any]:
        """Read and return one line of JSON from the process. Raises NodeError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NodeError("the process that runs both models has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started_in_one_process(costs: Costs) -> Iterator[InOneProcess]:
    """Start the process, yield it, and end it. Raises NodeError."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(costs.target_ms), str(costs.draft_ms)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield InOneProcess(process, costs)
    finally:
        process.stdin.close()
        if not has_ended(process):
            kill(process)
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    serve(of_synthetic_models(*sys.argv[1:3]), "synthetic")
