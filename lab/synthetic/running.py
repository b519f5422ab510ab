"""Generates texts on a synthetic pair; checks that each is what its target alone would write."""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
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
from lab.synthetic.shared_device import WAY, Sharing
from lab.synthetic.summary import Made
from proto.errors import ConfigurationError, NodeError
from proto.messages import Role
from proto.policies import POLICIES

MODULES = dict.fromkeys(Role, "lab.synthetic.node")
NOTES_LIMIT_S = 5.0  # most seconds until a node has written its launches after a text
OURS = "coordinator"
BEST = ":best"  # end of a policy's name: find the fastest K
IN_ONE_PROCESS = ", one process"
AT_HOME = ", at home"  # end of a policy's name: the drafter runs in the target's process


@dataclass(frozen=True, slots=True)
class Costs:
    """The time of a target pass and of a draft step on the simulated devices, in milliseconds."""

    target_ms: float
    draft_ms: float


def speculation_of(name: str) -> SpeculationConfig:
    """Return the configuration of a policy such as `tree`, `tree:16` (K) or `sync, one process:4`.

    Raises ConfigurationError, also for a policy that does not run in one process.
    """
    policy, _, k = name.removesuffix(BEST).partition(":")
    bare = policy.removesuffix(IN_ONE_PROCESS).removesuffix(AT_HOME)
    settings: dict[str, str | int] = {"policy": bare}
    if k:
        settings["num_speculative_tokens"] = int(k) if k.isdecimal() else k
    found = SpeculationConfig(**settings)  # type: ignore[arg-type]
    row = POLICIES[found.policy]
    if is_in_one_process(name) and (row.runs_ahead or row.is_tree):
        raise ConfigurationError(
            f"{row.name} does not run in one process: both models work at once"
        )
    return found


def is_in_one_process(name: str) -> bool:
    """True if this is the name of a policy that runs in the process with both models."""
    return name.partition(":")[0].endswith(IN_ONE_PROCESS)


def is_at_home(name: str) -> bool:
    """True if this is the name of a policy whose drafter runs in the target's process."""
    return name.partition(":")[0].endswith(AT_HOME)


@dataclass(frozen=True, slots=True)
class AskedText:
    """What is asked for: policy, prompt and sampling parameters."""

    policy: str
    prompt: tuple[int, ...]
    request: SamplingParams

    def check(self, tokens: Sequence[int]) -> None:
        """Assert that these tokens are what the target alone writes."""
        asked = self.request
        assert asked.seed is not None
        sampling = sampling_of(asked.temperature, asked.top_k, asked.top_p, asked.min_p)
        alone = text_after(self.prompt, asked.max_tokens, sampling, asked.seed)
        assert tuple(tokens) == alone, f"{self.policy} has not written what the target alone would"


class SyntheticPair:
    """A running coordinator with two synthetic nodes."""

    def __init__(self, pair: Pair, folder: Path, costs: Costs) -> None:
        """Take a running pair; callers use `started`."""
        self._pair, self._folder, self._costs = pair, folder, costs
        self._num_read = dict.fromkeys(map(str, Role), 0)

    def write(self, policy: str, prompt: tuple[int, ...], request: SamplingParams) -> Made:
        """Generate and return a text. Asserts that it is what the target alone would write.

        Raises NodeError.
        """
        speculation = speculation_of(policy)
        before, spent = self._pair.simulated(), self._cpu_s()
        started = time.perf_counter()
        stream, _ = self._pair.generate(prompt, speculation, request)
        tokens = tuple(token for emit in stream for token in emit.tokens)
        elapsed_s = time.perf_counter() - started
        cpu_s = {name: now - spent[name] for name, now in self._cpu_s().items()}
        AskedText(policy, prompt, request).check(tokens)
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
                if not is_at_home(policy) and (role is Role.TARGET or speculation.drafts)
            },
        )

    def _cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far of each node and of this process (coordinator, reader)."""
        nodes = self._pair.pids().items()
        return {OURS: time.process_time(), **{role: cpu_s_of(pid) for role, pid in nodes}}

    def _launches(self, role: Role) -> list[Launch]:
        """Wait for and return the launches that a node has noted during the latest text.

        Raises NodeError after a wait.
        """
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


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of a process, from its clock on Linux (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def started(
    costs: Costs, *, at_home: bool = False, sharing: Sharing = ""
) -> Iterator[SyntheticPair]:
    """Start a synthetic pair, yield it, and end it. Raises what starting a pair may raise.

    at_home  the drafter runs in the target's process
    sharing  how two processes share one device; "": each has its own
    """
    with tempfile.TemporaryDirectory(prefix="synthetic-") as name:
        (Path(name) / WAY).write_text(sharing)
        config = PairConfig(
            target=name,
            drafter=name,
            target_device="cpu",
            drafter_device="" if at_home else "cpu",
            drafter_home="target" if at_home else "",
            simulate_target_ms=costs.target_ms,
            simulate_draft_ms=costs.draft_ms,
        )
        launcher = partial(Launcher, modules=MODULES)
        with Pair(config, make_launcher=launcher) as pair:
            yield SyntheticPair(pair, Path(name), costs)
