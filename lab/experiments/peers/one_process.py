"""A peer that does speculation as it is usually done (policy `sync`): one loop in one process.

    python -m lab.experiments.peers.one_process TARGET DRAFTER DTYPE DEVICE [TARGET_MS
        TARGET_MS_PER_ROW DRAFT_MS DRAFT_MS_PER_ROW]

There is no coordinator, no socket and no tree: the drafter drafts a chain of K tokens, the target
verifies it in one pass, and so on. The engine is the product's, and so is the coupled choice
(`engine/choice/coupling.py`), so the texts are those of the target alone, sampled ones too. A
comparison with this peer shows what the product's three processes cost, and what they gain.

DEVICE is a GPU, or cpu for all CPU cores that the process may use. With the four numbers both
devices are simulated (`node/forwards.py`), and the loop waits for the end of each forward. JSON
lines come in and go out as in `huggingface.py`; `mode` is plain or assisted. An answer has all
fields of `TimedText`.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from engine.choice.coupling import choose, rank_scored
from engine.choice.sampling import Sampling, sampling_of
from engine.executor import Executor
from engine.fastest import FASTEST
from engine.layout.slots import MAX_MISSING, Feed
from node.forwards import SimulatedDevice
from node.loading import load
from node.rows import PREFILL_CHUNK, PREFILL_CHUNKS
from proto.messages import Role
from proto.node_config import NodeConfig

Chosen = TypeVar("Chosen")

DEFAULT_K = 4
MAX_ROWS = 64  # most rows of a pass with masks: a mask has 64 bits


@dataclass(slots=True)
class TimedText:
    """A generated text with its times.

    tokens         token ids, without the prompt
    times, counts  for each arrival: seconds since the request, and the number of tokens
    num_passes     target passes, without that of the prompt
    num_accepted   drafts that were accepted
    late_s         seconds by which forwards ended after the time of the simulated devices, in total
    launches       for each forward: the end of the one before it, its launch, its end (seconds)
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_passes: int = 0
    num_accepted: int = 0
    late_s: float = 0.0
    launches: list[tuple[float, float, float]] = field(default_factory=list)


class Model:
    """One of the two models, with one text in lane 0 of its KV cache: token i is in slot i.

    num_ids      size of the model's embedding; larger ids (of the other model) are clamped to it
    num_threads  CPU threads of this process while the model computes; 0: do not change them
    chunk        most tokens of a prompt that one forward reads
    """

    def __init__(
        self,
        executor: Executor,
        device: SimulatedDevice,
        *,
        num_ids: int,
        num_threads: int = 0,
        chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.executor = executor
        self.device = device
        self.chunk = chunk
        self.num_cached = 0  # tokens of the text whose keys and values are in the cache
        self.began = 0.0  # time (perf_counter) at which the newest forward was launched
        self._num_ids = num_ids
        self._num_threads = num_threads

    def run(self, text: Sequence[int], num_asked: int) -> torch.Tensor:
        """Run the uncached tokens of a text; return the logits [num_asked, V] of its last rows."""
        if self._num_threads and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        where = tuple(range(self.num_cached, len(text)))
        count = len(where)
        tokens = tuple(min(token, self._num_ids - 1) for token in text[self.num_cached :])
        # A chunk of a prompt is causal, without masks; a few rows have masks, as rows of a tree do.
        masks = tuple((2 << row) - 1 for row in range(count)) if count <= MAX_ROWS else None
        feed = Feed(tokens, where, where, self.num_cached, masks)
        self.num_cached = len(text)
        laid_out = self.executor.lay_out([feed], [range(count - num_asked, count)])
        self.began = time.perf_counter()
        return self.executor.forward(laid_out).logits


class OneProcess:
    """Both models, and the loop that drafts with one and verifies with the other.

    choose, rank  the functions of `engine/choice/coupling.py`, or others with their signatures
    num_valid     ids below this may be drafted
    """

    def __init__(
        self,
        target: Model,
        drafter: Model,
        *,
        num_valid: int,
        choose: Callable[..., list[int]] = choose,
        rank: Callable[..., tuple[list[list[int]], Any]] = rank_scored,
    ) -> None:
        self.target, self.drafter = target, drafter
        self._num_valid = num_valid
        self._choose, self._rank = choose, rank
        self._text = TimedText()

    def write(
        self, prompt: Sequence[int], num_tokens: int, *, k: int, sampling: Sampling, seed: int
    ) -> TimedText:
        """Generate and return exactly `num_tokens` tokens, with `k` drafts per pass (0: plain)."""
        started = time.perf_counter()
        self._text = made = TimedText()
        self.target.num_cached = self.drafter.num_cached = 0
        text = list(prompt)
        self._read(self.target, text)
        while (left := num_tokens - len(made.tokens)) > 0:
            # Drafting begins after the first token: the pass that reads the prompt has no drafts.
            drafts = self._drafted(text, min(k, left - 1), sampling, seed) if made.tokens else []
            chosen = self._verified(text, drafts, sampling, seed)
            pairs = zip(drafts, chosen, strict=False)
            num_accepted = next((i for i, (d, c) in enumerate(pairs) if d != c), len(drafts))
            new = chosen[: num_accepted + 1]
            text += new
            # The last token was not read yet, and what the caches hold from its place on is wrong.
            for model in (self.target, self.drafter):
                model.num_cached = min(model.num_cached, len(text) - 1)
            made.num_passes += bool(made.tokens)
            made.num_accepted += num_accepted
            made.tokens += new
            made.times.append(time.perf_counter() - started)
            made.counts.append(len(new))
        return made

    def _read(self, model: Model, text: Sequence[int]) -> None:
        """Read the text into the model's cache, except for its last tokens, chunk by chunk."""
        while len(text) - model.num_cached > MAX_MISSING:
            end = min(len(text) - 1, model.num_cached + model.chunk)
            self._timed(model, text[:end], 0, lambda _: None)

    def _drafted(self, text: Sequence[int], count: int, sampling: Sampling, seed: int) -> list[int]:
        """Return a chain of `count` draft tokens that continue the text."""
        drafts: list[int] = []
        if count:
            self._read(self.drafter, text)
        while len(drafts) < count:
            path = [*text, *drafts]

            def first(logits: torch.Tensor, position: int = len(path)) -> int:
                ids, _ = self._rank(
                    logits, sampling, seed, 0, [position], 1, num_valid=self._num_valid
                )
                return ids[0][0]

            drafts.append(self._timed(self.drafter, path, 1, first))
        return drafts

    def _verified(
        self, text: Sequence[int], drafts: Sequence[int], sampling: Sampling, seed: int
    ) -> list[int]:
        """Return the target's token after the text and after each draft (len(drafts) + 1 ids)."""
        positions = range(len(text), len(text) + len(drafts) + 1)

        def chosen(logits: torch.Tensor) -> list[int]:
            return self._choose(logits, sampling, seed, 0, positions)

        return self._timed(self.target, [*text, *drafts], len(positions), chosen)

    def _timed(
        self,
        model: Model,
        text: Sequence[int],
        num_asked: int,
        choice: Callable[[torch.Tensor], Chosen],
    ) -> Chosen:
        """Run a forward, apply `choice` to its logits, and wait until the device has ended it.

        Returns what `choice` returned. A simulated device may end later than the computation.
        """
        made, device, num_rows = self._text, model.device, len(text) - model.num_cached
        found = choice(model.run(text, num_asked))
        launched, ends = model.began, time.perf_counter()
        if device.is_simulated:
            ends, late_s = device.end_of(launched, num_rows)
            if device.wait_until(ends):
                late_s += device.late_s(ends, num_rows)
            made.late_s += late_s
        made.launches.append((made.launches[-1][2] if made.launches else launched, launched, ends))
        return found


def answer(both: OneProcess, request: dict[str, Any]) -> dict[str, Any]:
    """Generate exactly `max_tokens` tokens for a request; return the fields of `TimedText`."""
    mode = request["mode"]
    assert mode in ("plain", "assisted"), f"there is no mode {mode} here"
    cuts = request.get("top_k", 0), request.get("top_p", 1.0), request.get("min_p", 0.0)
    made = both.write(
        request["prompt"],
        request["max_tokens"],
        k=(request["setting"] or DEFAULT_K) if mode == "assisted" else 0,
        sampling=sampling_of(request["temperature"], *cuts),
        seed=request["seed"],
    )
    return asdict(made)


def loaded(
    target: str,
    drafter: str,
    dtype: str,
    device: str,
    target_device: SimulatedDevice,
    drafter_device: SimulatedDevice,
) -> OneProcess:
    """Load both models as the product's nodes do. Raises as `node.loading.load`."""
    models, engines = {}, {}
    devices = {Role.TARGET: target_device, Role.DRAFTER: drafter_device}
    names = {Role.TARGET: target, Role.DRAFTER: drafter}
    for role, name in names.items():
        is_timed = role is Role.DRAFTER and device == "cpu"  # the coordinator does so too
        config = NodeConfig(
            role=role,
            endpoint="",
            identity="",
            secret="",
            model=name,
            dtype=FASTEST if is_timed else dtype,
            device=device,
        )
        engines[role] = engine = load(config, SimpleNamespace(state=""))
        models[role] = Model(
            engine.executor,
            devices[role],
            num_ids=engine.loaded.vocab_size,
            num_threads=torch.get_num_threads(),
            chunk=PREFILL_CHUNKS[engine.loaded.device.type],
        )
    return OneProcess(
        models[Role.TARGET],
        models[Role.DRAFTER],
        num_valid=min(engine.vocab_size for engine in engines.values()),
    )


def serve(both: OneProcess, ready: str) -> None:
    """Say that the peer is ready, and answer requests until standard input ends."""
    gc.freeze()
    print(json.dumps({"ready": ready}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(both, json.loads(line))), flush=True)


def devices_of(milliseconds: Sequence[str]) -> tuple[SimulatedDevice, SimulatedDevice]:
    """Return the target's and the drafter's simulated device.

    milliseconds  target pass, each of its rows, draft step, each of its rows; empty: not simulated
    """
    seconds = [float(one) / 1e3 for one in milliseconds] or [0.0] * 4
    return SimulatedDevice(*seconds[:2]), SimulatedDevice(*seconds[2:])


def main() -> None:
    """Load both models and answer requests."""
    target, drafter, dtype, device, *milliseconds = sys.argv[1:]
    both = loaded(target, drafter, dtype, device, *devices_of(milliseconds))
    serve(both, cast(str, torch.__version__))


if __name__ == "__main__":
    main()
