"""Runs texts on a synthetic pair, and holds each to what its target alone would write."""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching.launcher import Launcher
from engine.choice.sampling import sampling_of
from lab.synthetic.host_time import Launch
from lab.synthetic.model import text_after
from lab.synthetic.summary import Made
from proto.errors import NodeError
from proto.messages import Role

MODULES = dict.fromkeys(Role, "lab.synthetic.node")
NOTES_LIMIT_S = 5.0  # within which a node writes its notes after a text
OURS = "coordinator"


@dataclass(frozen=True, slots=True)
class Costs:
    """What a target pass and a draft step take on the simulated devices, milliseconds."""

    target_ms: float
    draft_ms: float


def speculation_of(name: str) -> SpeculationConfig:
    """The policy of a name such as `tree` or `tree:16` (with K). Raises ConfigurationError."""
    policy, _, k = name.partition(":")
    settings: dict[str, str | int] = {"policy": policy}
    if k:
        settings["num_speculative_tokens"] = int(k) if k.isdecimal() else k
    return SpeculationConfig(**settings)  # type: ignore[arg-type]


class SyntheticPair:
    """Two synthetic nodes and a coordinator that run."""

    def __init__(self, pair: Pair, folder: Path, costs: Costs) -> None:
        """Use `started`."""
        self._pair, self._folder, self._costs = pair, folder, costs
        self._num_read = dict.fromkeys(map(str, Role), 0)

    def write(self, policy: str, prompt: tuple[int, ...], request: SamplingParams) -> Made:
        """Write a text. Asserts that it is what the target alone would write."""
        assert request.seed is not None
        speculation = speculation_of(policy)
        before, spent = self._pair.simulated(), self._cpu_s()
        started = time.perf_counter()
        stream, _ = self._pair.generate(prompt, speculation, request)
        tokens = tuple(token for emit in stream for token in emit.tokens)
        elapsed_s = time.perf_counter() - started
        cpu_s = {name: now - spent[name] for name, now in self._cpu_s().items()}
        sampling = sampling_of(request.temperature, request.top_k, request.top_p, request.min_p)
        alone = text_after(prompt, request.max_tokens, sampling, request.seed)
        assert tokens == alone, f"{policy} has written another text than the target alone"
        assert stream.result is not None
        metrics = self._pair.marked(stream.result.metrics, before)
        simulated = metrics.simulated
        assert simulated is not None
        return Made(
            policy=policy,
            num_tokens=len(tokens),
            elapsed_s=elapsed_s,
            speed=metrics.writing_tokens_per_second * self._costs.target_ms / 1e3,
            num_passes=metrics.num_target_passes,
            num_accepted=metrics.num_accepted_tokens,
            late_share=simulated.late_share,
            cpu_s=cpu_s,
            launches={
                str(role): self._launches(role)
                for role in Role
                if role is Role.TARGET or speculation.drafts
            },
        )

    def _cpu_s(self) -> dict[str, float]:
        """Processor seconds so far; ours are those of the coordinator and of whoever reads."""
        nodes = self._pair.pids().items()
        return {OURS: time.process_time(), **{role: _cpu_s_of(pid) for role, pid in nodes}}

    def _launches(self, role: Role) -> list[Launch]:
        """What a node has noted of the latest text. Raises NodeError if that does not come."""
        path, deadline = self._folder / f"{role}.jsonl", time.monotonic() + NOTES_LIMIT_S
        while time.monotonic() < deadline:
            notes = path.read_text() if path.exists() else ""
            whole = notes[: notes.rfind("\n") + 1].splitlines()
            if len(whole) > self._num_read[role]:
                new = whole[self._num_read[role] :]
                self._num_read[role] = len(whole)
                return [Launch(*one) for line in new for one in json.loads(line)["launches"]]
            time.sleep(0.01)
        raise NodeError(f"the {role} has noted nothing of its launches")


def _cpu_s_of(pid: int) -> float:
    """Processor seconds of a process: its clock on Linux, by its number (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def started(costs: Costs) -> Iterator[SyntheticPair]:
    """A pair that runs until the block ends. Raises what starting a pair may raise."""
    with tempfile.TemporaryDirectory(prefix="synthetic-") as name:
        config = PairConfig(
            target=name,
            drafter=name,
            target_device="cpu",
            drafter_device="cpu",
            simulate_target_ms=costs.target_ms,
            simulate_draft_ms=costs.draft_ms,
        )
        with Pair(config, make_launcher=partial(Launcher, modules=MODULES)) as pair:
            yield SyntheticPair(pair, Path(name), costs)
