"""Runs a pair as `generate` would, and measures it while it writes texts."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.text.metrics import Metrics
from coordinator.tracing.timeline import timeline_of
from lab.pair.record import Curve, Hosts, Kind, MeasuredNode, SeenText, kind_of
from lab.pair.requests import Judged, Request, Said
from lab.pair.timing import Samples, curve, samples_of, share_beside, share_stalled, ways_of
from lab.records import from_json
from proto.errors import NodeError
from proto.installation import ROOT
from proto.messages import Role
from proto.policies import POLICIES, PolicyName
from rehearsal.setting import Forwards

TEMPERATURES = (0.0, 0.7, 0.8, 1.0)
FIRST_SEED = 1000
# The policies whose speed is compared with what `plan` expects, on the same texts.
COMPARED: tuple[PolicyName, ...] = ("ar", "sync", "pipelined", "tree", "auto")
COMPARED_AT = (0.0, 0.8)  # temperatures, which are some of TEMPERATURES
NUM_COMPARED = 2  # texts at each of these temperatures
# A pass of this length: the texts are compared once; of half of it: twice; and so on.
REPEATS_BELOW_S, MOST_REPEATS = 0.02, 4
# Values of K of further texts, so that passes have few and many rows.
ROWS_BESIDE, ROWS_APART = (2, 6, 15), (1, 8, 15)
# For a first guess of how long everything takes: tokens of a pass with drafts, seconds of a text
# besides its passes, seconds of what is computed after the texts.
USUAL_GAIN, JOB_S, AFTERWARDS_S = 2.0, 0.3, 35.0
NO_ANSWER = "no answer came in time; give fewer or shorter texts"
NUM_WARM = 16  # tokens that do not count, before everything else
ANSWER_LIMIT_S = 1800.0  # for the process that computes chances to load, or to answer


@dataclass(frozen=True, slots=True)
class Job:
    """A text to write. `name` is the policy's, if its speed is compared with `plan`."""

    prompt: tuple[int, ...]
    speculation: SpeculationConfig
    temperature: float
    seed: int
    name: str = ""


@dataclass(slots=True)
class Run:
    """What was measured while texts were written.

    said     each text once, by temperature, and then in the order of the prompts
    metrics  of the texts that were written to be compared
    samples  of both nodes by the kind of policy, one for each text
    ways_s   seconds of drafts from drafter to target by the kind of policy
    """

    said: list[Said] = field(default_factory=list)
    metrics: list[tuple[Job, Metrics]] = field(default_factory=list)
    samples: dict[tuple[Role, Kind], list[Samples]] = field(
        default_factory=lambda: {(role, kind): [] for role in Role for kind in Kind}
    )
    ways_s: dict[Kind, list[float]] = field(default_factory=lambda: {kind: [] for kind in Kind})

    @property
    def way_s(self) -> float:
        """Return the median seconds of a draft, where the target waits for drafts, if there is one.

        Where it does not wait, it reads drafts late. On a machine that is busy with other things it
        may have stopped waiting before any came. Raises NodeError if no draft came at all.
        """
        for kind in (Kind.APART, Kind.BESIDE):
            if self.ways_s[kind]:
                return median(self.ways_s[kind])
        raise NodeError(
            "no draft reached the target: end what else uses the machine, measure again"
        )


def jobs_of(prompts: Sequence[tuple[int, ...]], plain_s: float) -> list[Job]:
    """Return the texts to write: by policies that are compared, and with many numbers of rows.

    Both kinds alternate: so a machine that is busy for a while makes the costs and the speeds that
    are compared with them worse alike.

    plain_s  seconds of a pass. Short texts are compared several times, as a busy moment of the
             machine changes a short time much
    """
    number = max(1, min(MOST_REPEATS, int(REPEATS_BELOW_S / plain_s)))
    compared = [
        [
            Job(prompt, SpeculationConfig(policy=name), temperature, FIRST_SEED + index, name)
            for name in COMPARED
            # Without drafts a pass takes as long in any text: one is enough.
            if POLICIES[name].drafts or index == 0
        ]
        for index, prompt in [*enumerate(prompts[:NUM_COMPARED])] * number
        for temperature in COMPARED_AT
    ]
    others = [*_apart(prompts[0]), *_beside(prompts)]
    return [
        job
        for turn, policies in enumerate(compared)
        for job in (*policies, *others[turn :: len(compared)])
    ]


def _apart(prompt: tuple[int, ...]) -> Iterator[Job]:
    """Yield texts in which both models take turns, with few and many rows in a pass."""
    for k in ROWS_APART:
        waits = SpeculationConfig(policy="sync", num_speculative_tokens=k)
        yield Job(prompt, waits, 0.0, FIRST_SEED)


def _beside(prompts: Sequence[tuple[int, ...]]) -> Iterator[Job]:
    """Yield all texts of which the chances are wanted and that are not written to be compared."""
    numbers = cycle(ROWS_BESIDE)
    for temperature in TEMPERATURES:
        first = NUM_COMPARED if temperature in COMPARED_AT else 0
        for index, prompt in enumerate(prompts[first:], first):
            # A pass starts with the drafts that are there: so some passes have few rows.
            runs = SpeculationConfig(
                policy="tree",
                num_speculative_tokens=next(numbers),
                policy_option={"launch_min": 0},
            )
            yield Job(prompt, runs, temperature, FIRST_SEED + index)


def pass_s(pair: Pair, prompt: tuple[int, ...]) -> float:
    """Return the seconds of a pass of the target alone, of a short text."""
    plain = Job(prompt, SpeculationConfig(policy="ar"), 0.0, FIRST_SEED)
    _, metrics = _write(pair, plain, NUM_WARM)
    num_passes = max(1, metrics.num_target_passes - 1)
    return (metrics.elapsed_s - metrics.time_to_first_token_s) / num_passes


def expected_s(jobs: Sequence[Job], max_tokens: int, plain_s: float) -> float:
    """Return about how long all texts take, and what is computed of them; `plain_s` of a pass."""
    num_passes = [max_tokens / USUAL_GAIN if job.speculation.drafts else max_tokens for job in jobs]
    return sum(num_passes) * plain_s + JOB_S * len(jobs) + AFTERWARDS_S


def run(pair: Pair, jobs: Sequence[Job], max_tokens: int, say: Callable[[int, float], None]) -> Run:
    """Write the texts of all jobs; return what was measured.

    say  is called after each text with how many are written, and the seconds that are left, about

    Raises NodeError and other SlipstreamErrors.
    """
    assert pair.service.tape is not None, "the pair must be traced"
    done = Run()
    _write(pair, jobs[-1], NUM_WARM)
    _forget(pair)
    known: set[tuple[tuple[int, ...], float, int]] = set()
    started = time.monotonic()
    for number, job in enumerate(jobs, 1):
        tokens, metrics = _write(pair, job, max_tokens)
        _note(pair, done, job, metrics)
        if tokens and (text := (job.prompt, job.temperature, job.seed)) not in known:
            known.add(text)
            done.said.append(Said(job.prompt, tokens, job.temperature, job.seed))
        say(number, (time.monotonic() - started) / number * (len(jobs) - number))
    done.said.sort(key=lambda said: (said.temperature, said.seed))
    return done


def _write(pair: Pair, job: Job, max_tokens: int) -> tuple[tuple[int, ...], Metrics]:
    """Write one text and return its tokens and metrics. Raises NodeError."""
    request = SamplingParams(temperature=job.temperature, max_tokens=max_tokens, seed=job.seed)
    stream, _ = pair.generate(job.prompt, job.speculation, request)
    tokens = tuple(token for emit in stream for token in emit.tokens)
    assert stream.result is not None
    metrics = stream.result.metrics
    if metrics.drafter_lost_at is not None:
        raise NodeError("the drafter was lost during a text; see its log, and measure again")
    return tokens, metrics


def _forget(pair: Pair) -> None:
    """Throw away what was recorded so far."""
    assert pair.service.tape is not None
    pair.service.wait_for_traces()
    pair.service.tape.take()


def _note(pair: Pair, done: Run, job: Job, metrics: Metrics) -> None:
    """Add what was recorded of one text."""
    assert pair.service.tape is not None
    pair.service.wait_for_traces()
    timeline = timeline_of(pair.service.tape.take(), socket.gethostname())
    for role in Role:
        done.samples[role, kind_of(job.speculation.policy)].append(samples_of(timeline, role))
    if job.name:
        done.metrics.append((job, metrics))
    done.ways_s[kind_of(job.speculation.policy)] += ways_of(timeline.hops)


def node_of(pair: Pair, role: Role, run: Run) -> MeasuredNode:
    """Return what was measured of one node. Raises NodeError if it was too little."""
    hello = pair.hello(role)
    by_kind = {kind: run.samples[role, kind] for kind in Kind}
    forwards = {kind: [sample for one in by_kind[kind] for sample in one.forwards] for kind in Kind}
    stalled = share_stalled(forwards.values())
    plain, apart, beside = (_as_ms(curve(forwards[kind], stalled)) for kind in Kind)
    if not (apart or beside):
        raise NodeError(f"too few passes of the {role} were timed: give more or longer texts")
    return MeasuredNode(
        hello.model,
        hello.dtype,
        hello.device,
        hello.backend,
        hello.num_parameters,
        plain=plain,
        apart=apart,
        beside=beside,
        overlap=round(share_beside(forwards[Kind.BESIDE]), 3),
        stalled=round(stalled, 3),
        host_us=Hosts(*(_host_us(by_kind[kind]) for kind in Kind)),
        memory_mib=_memory_mib(pair.pids().get(role.value)),
    )


def _host_us(samples: Sequence[Samples]) -> float:
    """Return the microseconds of a host for each forward; 0: there was none.

    It is the median of the texts' means, so that a text in which the machine stalls does not count.
    """
    means = [one.host_s / one.num_forwards for one in samples if one.num_forwards]
    return round(median(means) * 1e6, 1) if means else 0.0


def _as_ms(found: Forwards | None) -> Curve:
    """Return a curve in milliseconds; empty: there is none."""
    known = () if found is None else found.known
    return tuple((rows, round(seconds * 1e3, 4)) for rows, seconds in known)


def _memory_mib(pid: int | None) -> float | None:
    """Return the largest resident memory of a process so far; None where that is not told."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if peak is None else round(int(peak) / 1024, 1)


def request_of(pair: Pair, said: Sequence[Said]) -> Request:
    """Return what the process that computes chances is asked."""
    config: PairConfig = pair.config
    target, drafter = pair.hello(Role.TARGET), pair.hello(Role.DRAFTER)
    device = target.device if target.device.startswith("cuda") else "cpu"
    return Request(
        *(config.target, config.target_revision, target.dtype),
        *(config.drafter, config.drafter_revision, drafter.dtype),
        device=device,
        texts=tuple(said),
    )


def judged(request: Request) -> Iterator[SeenText]:
    """Yield what a process of its own computes of each text. Raises NodeError."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.pair.chances"],
            cwd=ROOT,
            stdin=subprocess.PIPE,  # it stays open: the process ends when it is closed
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: its log says why
                process.stdin.write(json.dumps(asdict(request)) + "\n")
                process.stdin.flush()
            for text in request.texts:
                if not (line := _line_of(process)):
                    log.seek(0)
                    why = log.read().strip().splitlines() or [NO_ANSWER]
                    raise NodeError(f"the chances were not computed: {why[-1]}")
                found = from_json(Judged, line)
                ours = text.prompt, text.said, text.seed
                yield SeenText(*ours, found.overlaps, found.ranks, found.scores)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _line_of(process: "subprocess.Popen[str]") -> str:
    """Return the next line that a process writes; "" if it ends, or takes too long and is ended."""
    assert process.stdout is not None
    limit = threading.Timer(ANSWER_LIMIT_S, process.kill)
    limit.daemon = True
    limit.start()
    try:
        return process.stdout.readline()
    finally:
        limit.cancel()
