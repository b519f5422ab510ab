"""The engines that write the texts of an experiment: our warm pairs, and peers (other engines)."""

import contextlib
import dataclasses
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coordinator.api.config import PairConfig
from coordinator.api.launch import LaunchConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.launching.groups import has_ended, kill
from coordinator.launching.launcher import ConnectRay, Launcher, Wanted
from coordinator.text.metrics import TOO_LATE, late_share, origins
from coordinator.text.session_events import Emit
from coordinator.text.stream import Reader, TokenStream
from lab.experiments.description import Arm
from lab.experiments.peers import llamacpp_programs
from proto.errors import ConfigurationError, NodeError
from proto.installation import ROOT, program
from proto.messages import Role

PEER_LIMIT_S = 600.0  # most seconds for a peer to start, or to generate a text
# The module of each peer, and the packages that it needs.
PEERS = {
    "huggingface": ("lab.experiments.peers.huggingface", ("transformers",)),
    "one_process": ("lab.experiments.peers.one_process", ("torch",)),
    "llamacpp": ("lab.experiments.peers.llamacpp", ("gguf",)),
    "vllm": ("lab.experiments.peers.vllm", ("vllm",)),
}
OF_ONE_MODE = {"vllm"}  # peers whose mode and K are fixed when their process starts
OF_FILES = {"llamacpp"}  # peers whose mode and file are: with one failing, others are measured
ACCEPTED = "draft:"  # prefix of a token's origin if it is an accepted draft


@dataclass(frozen=True, slots=True)
class Written:
    """A generated text with the times at which its reader received the tokens.

    tokens              token ids, without the prompt
    emitted             for each arrival: (seconds since the request, number of tokens)
    accepted_by_source  number of accepted drafts by who drafted them
    figures             the fields of `Metrics`; None for a peer
    void                why the times must not be used; empty: they are good
    """

    tokens: tuple[int, ...]
    emitted: tuple[tuple[float, int], ...]
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] | None = None
    void: str = ""


class Engine(Protocol):
    """An engine that generates texts: a pair of target and drafter, or a peer.

    hosts  where each of its processes runs, by role
    """

    hosts: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes in its messages so far."""

    def write(
        self, arm: Arm, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]
    ) -> list[Written]:
        """Generate a text for each prompt (token ids), all at once, and return them in order.

        Raises NodeError and other SlipstreamErrors.
        """

    def close(self) -> None:
        """End the processes of the engine."""


def host_of(arm: Arm) -> Hashable:
    """Return the key of the engine that an arm needs: arms with equal keys share one engine."""
    if arm.work.peer:
        config, work = arm.pair, arm.work
        way: tuple[object, ...] = ()
        if work.peer in OF_ONE_MODE:
            way = work.mode, work.peer_k
        elif work.peer in OF_FILES:
            way = work.mode, work.peer_file
        models = config.target, config.drafter, config.dtype, config.target_device
        return work.peer, *models, *way, _simulated(config)
    return arm.pair, arm.launch


def _simulated(config: PairConfig) -> tuple[float, ...]:
    """Return the four times (ms) of the devices that a peer simulates; () if it simulates none."""
    milliseconds = (
        *(config.simulate_target_ms, config.simulate_target_ms_per_row),
        *(config.simulate_draft_ms, config.simulate_draft_ms_per_row),
    )
    return milliseconds if any(milliseconds) else ()


def what_is_missing(arm: Arm) -> str:
    """Return which package or program of the arm's peer is missing, and what to do; "": none."""
    peer = arm.work.peer
    for name in PEERS[peer][1] if peer else ():
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed (`pip install {name}`)"
    return llamacpp_programs.what_is_missing() if peer == "llamacpp" else ""


class Warm:
    """Keeps at most `most` engines running; to make room, ends the least recently used one."""

    def __init__(self, most: int, connect_ray: ConnectRay | None) -> None:
        self._most = most
        self._connect_ray = connect_ray
        self._engines: OrderedDict[Hashable, Engine] = OrderedDict()

    def of(self, arm: Arm) -> tuple[Engine, bool]:
        """Return the engine of an arm, started if need be, and True if it was started now.

        Raises what starting an engine raises.
        """
        key = host_of(arm)
        is_new = key not in self._engines
        if is_new:
            while len(self._engines) >= self._most:
                self._engines.popitem(last=False)[1].close()
            self._engines[key] = self._started(arm)
        self._engines.move_to_end(key)
        return self._engines[key], is_new

    def drop(self, arm: Arm) -> None:
        """End the engine of an arm, for example after a failure; `of` will start a new one."""
        engine = self._engines.pop(host_of(arm), None)
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """End the processes of all engines."""
        with contextlib.ExitStack() as stack:
            for engine in self._engines.values():
                stack.callback(engine.close)
        self._engines.clear()

    def _started(self, arm: Arm) -> Engine:
        """Start the engine of an arm and return it."""
        if arm.work.peer:
            return PeerEngine(arm)
        return PairEngine(arm.pair, arm.launch, self._connect_ray)


class PairEngine:
    """An engine of ours: a target and a drafter, started for the experiment.

    The constructor raises ConfigurationError and other SlipstreamErrors.
    """

    def __init__(
        self,
        config: PairConfig,
        launch: LaunchConfig,
        connect_ray: ConnectRay | None,
        *,
        traced: bool = False,
    ) -> None:
        if launch.ray:
            if connect_ray is None:
                raise ConfigurationError(f"ray works with `{program()}` only")
            devices = {Role.TARGET: config.target_device}
            if config.has_draft_process:
                devices[Role.DRAFTER] = config.drafter_device
            wanted = Wanted(launch.ray, devices, is_packed=launch.ray_pack, ranks=config.ranks)
            make = partial(connect_ray, wanted)
            self._pair = Pair(config, make_launcher=make, traced=traced)
        else:
            self._pair = Pair(config, make_launcher=Launcher, traced=traced)
        roles = [role for role in Role if self._pair.service.registry.ready(role)]
        hellos = {role: self._pair.hello(role) for role in roles}
        self.hosts: Mapping[str, str] = {
            role.value: f"{hello.host} {hello.device} {hello.backend}"
            for role, hello in hellos.items()
        }

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all messages so far, without heartbeats."""
        return self._pair.service.num_bytes

    def write(
        self, arm: Arm, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]
    ) -> list[Written]:
        """Generate a text for each prompt (token ids), all at once, and return them in order.

        Raises NodeError, also if the drafter was lost during a text.
        """
        before = self._pair.simulated()
        started = time.monotonic()
        came: dict[TokenStream, list[float]] = {}
        lock = threading.Lock()

        def notify(stream: TokenStream) -> None:
            now = time.monotonic()
            with lock:
                came.setdefault(stream, []).append(now - started)

        reader = Reader(started, notify)
        streams = [
            self._pair.generate(
                prompt,
                arm.speculation,
                arm.sampling.model_copy(update={"seed": seed}),
                reader=reader,
            )[0]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        written = []
        for stream in streams:
            emits = list(stream)
            written.append(self._written(stream, emits, came[stream], before))
        return written

    def _written(
        self, stream: TokenStream, emits: Sequence[Emit], came: Sequence[float], before: Any
    ) -> Written:
        """Return the text of a finished stream with its times and metrics. Raises NodeError."""
        assert stream.result is not None
        metrics = self._pair.marked(stream.result.metrics, before)
        if metrics.drafter_lost_at is not None:
            raise NodeError("the drafter was lost during a text")
        sources = Counter(
            origin.removeprefix(ACCEPTED)
            for emit in emits
            for origin in origins(emit)
            if origin.startswith(ACCEPTED)
        )
        return Written(
            tuple(token for emit in emits for token in emit.tokens),
            tuple((at, len(emit.tokens)) for at, emit in zip(came, emits, strict=False)),
            dict(sources),
            dataclasses.asdict(metrics),
        )

    def write_trace(self, path: Path) -> None:
        """Write the trace of everything since the last trace; the pair must be traced.

        Raises OutputError.
        """
        self._pair.write_trace(path)

    def close(self) -> None:
        """End the processes of target and drafter."""
        self._pair.close()


class PeerEngine:
    """An engine of others in a process of its own, which runs a module of `peers`."""

    num_bytes = 0  # a peer does not report the bytes of its messages

    def __init__(self, arm: Arm) -> None:
        """Start the peer, on the target's GPU or else on all CPU cores, and wait until it is ready.

        Raises NodeError, ConfigurationError.
        """
        config = arm.pair
        device = config.target_device if config.target_device.startswith("cuda") else "cpu"
        self._name = arm.work.peer
        module = PEERS[self._name][0]
        self._command = [
            *(sys.executable, "-m", module),
            *(config.target, config.drafter, config.dtype, device),
        ]
        if self._name in OF_ONE_MODE:
            self._command += [arm.work.mode, str(arm.work.peer_k or 0)]
        elif self._name in OF_FILES:
            self._command += [arm.work.mode, arm.work.peer_file]
        self._command += map(str, _simulated(config))
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        self.hosts: Mapping[str, str] = {"peer": f"{self._name} {self._answer('ready')['ready']}"}

    def _answer(self, *fields: str) -> dict[str, Any]:
        """Read and return a line of the peer: a JSON object with these fields, in PEER_LIMIT_S.

        Raises NodeError, or ConfigurationError with the reason if the peer says that it would fail
        again; then its process has ended.
        """
        assert self._process.stdout is not None
        too_late = threading.Timer(PEER_LIMIT_S, kill, (self._process,))
        too_late.start()
        try:
            line = self._process.stdout.readline()
            record = json.loads(line) if line else None
        except (
            ValueError
        ) as error:  # no JSON, or no UTF-8: a library may print something of its own
            self.close()
            raise NodeError(f"{self._name} wrote a line that is no JSON; {self._hint}") from error
        finally:
            too_late.cancel()
        if isinstance(record, dict) and all(field in record for field in fields):
            return record
        self.close()
        if isinstance(record, dict) and isinstance(reason := record.get("error"), str):
            raise ConfigurationError(reason)
        what = "wrote a line that is no answer" if line else "ended"
        raise NodeError(f"{self._name} {what}; {self._hint}")

    @property
    def _hint(self) -> str:
        """Return how a user sees what the peer writes."""
        return f"`{' '.join(self._command[1:])}` says why"

    def write(
        self, arm: Arm, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]
    ) -> list[Written]:
        """Generate the prompts' texts one after the other and return them.

        Raises NodeError, ConfigurationError.
        """
        return [
            self._one(arm.sampling, arm.work.mode, arm.work.peer_k, prompt, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def _one(
        self,
        sampling: SamplingParams,
        mode: str,
        setting: int | None,
        prompt: tuple[int, ...],
        seed: int,
    ) -> Written:
        """Send one request to the peer and return the text of its answer.

        Raises NodeError, ConfigurationError.
        """
        assert self._process.stdin is not None
        request = {
            "mode": mode,
            "prompt": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "setting": setting,
            "seed": seed,
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise NodeError(f"{self._name} has ended") from error
        return written_by_a_peer(self._answer("tokens", "times", "counts"))

    def close(self) -> None:
        """End the peer's process: close its input, and kill it if it has not ended after 5 s."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        deadline = time.monotonic() + 5.0
        while not has_ended(self._process):
            if time.monotonic() > deadline:
                kill(self._process)
            time.sleep(0.01)
        if self._process.stdout is not None:
            self._process.stdout.close()


def written_by_a_peer(answer: Mapping[str, Any]) -> Written:
    """Return the text in a peer's answer; it is void if simulated forwards ended too late.

    `late_s` of the answer, where it is given, is the time in seconds by which forwards ended late.
    """
    emitted = tuple(zip(answer["times"], answer["counts"], strict=True))
    late = late_share([(answer.get("late_s", 0.0), emitted[-1][0])])
    void = f"its forwards were late by {late:.0%} of the time" if late > TOO_LATE else ""
    return Written(tuple(answer["tokens"]), emitted, void=void)
