"""`sync` as it is usually run, as a peer for the benchmark: one loop, one process.

    python -m lab.experiments.peers.one_process TARGET DRAFTER DTYPE DEVICE [TARGET_MS
        TARGET_MS_PER_ROW DRAFT_MS DRAFT_MS_PER_ROW]

There is no coordinator, no socket and no tree: the drafter drafts a chain of K tokens, the target
verifies it in one pass, and so on. The engine is the product's, and so is the coupled choice
(`engine/choice/coupling.py`), so the texts are those of the target alone, sampled ones too. What
this peer shows is what the product's three processes cost, and what they bring.

DEVICE is a GPU, or cpu: all cores that it is given. With the four numbers both devices are
simulated (`node/forwards.py`), and the loop waits for the end of each forward. JSON lines come in
and go out as in `huggingface.py`; `mode` is plain or assisted. An answer has all fields of `Text`.
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
from node.economics import PREFILL_CHUNK, PREFILL_CHUNKS
from node.forwards import SimulatedDevice
from node.loop import load
from proto.messages import Role
from proto.node_config import NodeConfig

Chosen = TypeVar("Chosen")

DEFAULT_K = 4
MAX_ROWS = 64  # of a pass with masks: as many as a mask has bits


@dataclass(slots=True)
class Text:
    """A text that was written.

    times, counts  seconds since it was asked for, and how many tokens came then
    num_passes     of the target, the prompt's left out
    num_accepted   drafts that are in the text
    late_s         by how much the simulated devices were late, together
    launches       for each forward: the end of the one before it, its launch, its end
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_passes: int = 0
    num_accepted: int = 0
    late_s: float = 0.0
    launches: list[tuple[float, float, float]] = field(default_factory=list)


class Model:
    """One of the two models, with the text in lane 0: the slot of a token is its position.

    num_ids  tokens that the model has in its embedding; the other model may have more
    num_threads  of this process while it computes; 0: as they are
    chunk    most tokens of a prompt that are read at once
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
        self.num_cached = 0  # tokens of the text that are in the lane
        self.began = 0.0  # when the device was given the rows of its newest forward
        self._num_ids = num_ids
        self._num_threads = num_threads

    def run(self, text: Sequence[int], num_asked: int) -> torch.Tensor:
        """Run what is not cached of a text; returns the logits at the last rows [num_asked, V]."""
        if self._num_threads and torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        where = tuple(range(self.num_cached, len(text)))
        count = len(where)
        tokens = tuple(min(token, self._num_ids - 1) for token in text[self.num_cached :])
        # A chunk of a prompt sees what is before it, a few rows have masks as those of a tree have.
        masks = tuple((2 << row) - 1 for row in range(count)) if count <= MAX_ROWS else None
        feed = Feed(tokens, where, where, self.num_cached, masks)
        self.num_cached = len(text)
        laid_out = self.executor.lay_out([feed], [range(count - num_asked, count)])
        self.began = time.perf_counter()
        return self.executor.forward(laid_out).logits


class OneProcess:
    """Both models, and the loop.

    choose, rank  as in `engine/choice/coupling.py`
    num_valid     ids from here on are never drafted
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
        self._text = Text()

    def write(
        self, prompt: Sequence[int], num_tokens: int, *, k: int, sampling: Sampling, seed: int
    ) -> Text:
        """Write exactly so many tokens; `k`: drafts of a pass, 0 for the target alone."""
        started = time.perf_counter()
        self._text = made = Text()
        self.target.num_cached = self.drafter.num_cached = 0
        text = list(prompt)
        self._read(self.target, text)
        while (left := num_tokens - len(made.tokens)) > 0:
            # Without a first token there is nothing to draft behind: the prompt's pass is alone.
            drafts = self._drafted(text, min(k, left - 1), sampling, seed) if made.tokens else []
            chosen = self._verified(text, drafts, sampling, seed)
            pairs = zip(drafts, chosen, strict=False)
            num_accepted = next((i for i, (d, c) in enumerate(pairs) if d != c), len(drafts))
            new = chosen[: num_accepted + 1]
            text += new
            # Nobody has read the last token; what was read in its place or behind it is wrong.
            for model in (self.target, self.drafter):
                model.num_cached = min(model.num_cached, len(text) - 1)
            made.num_passes += bool(made.tokens)
            made.num_accepted += num_accepted
            made.tokens += new
            made.times.append(time.perf_counter() - started)
            made.counts.append(len(new))
        return made

    def _read(self, model: Model, text: Sequence[int]) -> None:
        """Put the text into the lane but for its last tokens, one forward for each chunk."""
        while len(text) - model.num_cached > MAX_MISSING:
            end = min(len(text) - 1, model.num_cached + model.chunk)
            self._timed(model, text[:end], 0, lambda _: None)

    def _drafted(self, text: Sequence[int], count: int, sampling: Sampling, seed: int) -> list[int]:
        """A chain of so many drafts behind the text."""
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
        """What the target chooses after the text, and after each draft."""
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
        """Run a forward and make a choice of its logits, in the time that its device takes."""
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
    """Generate exactly `max_tokens` tokens."""
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
    """Both models as the product's nodes load them. Raises as `node.loop.load`."""
    models, engines = {}, {}
    devices = {Role.TARGET: target_device, Role.DRAFTER: drafter_device}
    names = {Role.TARGET: target, Role.DRAFTER: drafter}
    for role, name in names.items():
        is_timed = role is Role.DRAFTER and device == "cpu"  # as the coordinator has it
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
    """Answer until standard input ends."""
    gc.freeze()
    print(json.dumps({"ready": ready}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(both, json.loads(line))), flush=True)


def devices_of(milliseconds: Sequence[str]) -> tuple[SimulatedDevice, SimulatedDevice]:
    """The target's and the drafter's device, of their times and those of their rows."""
    seconds = [float(one) / 1e3 for one in milliseconds] or [0.0] * 4
    return SimulatedDevice(*seconds[:2]), SimulatedDevice(*seconds[2:])


def main() -> None:
    """Load and serve."""
    target, drafter, dtype, device, *milliseconds = sys.argv[1:]
    both = loaded(target, drafter, dtype, device, *devices_of(milliseconds))
    serve(both, cast(str, torch.__version__))


if __name__ == "__main__":
    main()
