"""The coupled choice for logits on a GPU: only the chosen tokens are copied to the host.

It computes the same as `coupling.py`, operator by operator: the same hash on the same integers
(torch has no unsigned multiplication, but two's complement wraps alike), the noise in float64, one
rounding to float32, and of equal scores the lowest id wins. The results of a pass are copied
together in one small tensor, so that the host waits for the device once. Where passes are CUDA
graphs, the usual choices are too (`logit_graphs.py`): a sampled one is some fifty small kernels.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from engine.choice.logit_graphs import Captures
from engine.choice.sampling import LARGEST, LOWEST, NOT_FINITE, Sampling
from engine.device import Coming, send
from engine.errors import NotFinite

# Constants of the noise's format, which `coupling.py` specifies.
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN = 0x9E3779B97F4A7C15
_LAST_ID = (1 << 32) - 1
FEWEST_KEPT = 64  # top-k ranks this many tokens, or the next power of two that is at least k

_Made = TypeVar("_Made")
Later = Callable[[], _Made]
"""What ends something that was begun: it waits for the GPU, and returns what came of it."""


def choose_there(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    *,
    beta: float = 1.0,
    num_valid: int | None = None,
) -> Later[tuple[list[int], list[float]]]:
    """Begin to choose a token at each row; returns what returns them, and their log scores.

    They are those of `coupling.rank_scored`. The score is log softmax(beta (s + g)) of the token: s
    are the scaled logits, g is the noise.

    logits  [n, V] float32, any device
    keys    [n] 64-bit keys of the rows' noise (`coupling.row_keys`)
    beta    sharpness of the log scores; does not change the tokens
    num_valid  only ids below it may be chosen; None: all

    What is returned raises:
        NotFinite: the logits are not finite.
    """
    what = choice_of(sampling, beta, num_valid)
    return chosen_there(_run(what, logits, choice_inputs(sampling, keys, num_valid)))


def chosen_there(found: torch.Tensor) -> Later[tuple[list[int], list[float]]]:
    """Begin to copy the result of `Choice.of`, [n, 3]; returns what returns tokens and scores.

    Later choices may overwrite `found` at once. What is returned raises:
        NotFinite: the logits were not finite.
    """
    return partial(_chosen, Coming(found))


def _chosen(coming: Coming) -> tuple[list[int], list[float]]:
    tokens, scores, tops = coming.here().t().tolist()
    check_tops(tops)
    return [int(token) for token in tokens], scores


def rank_there(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    num_ranked: int,
    *,
    beta: float,
    num_valid: int | None = None,
) -> Later[tuple[list[list[int]], list[list[float]]]]:
    """Begin to rank the `num_ranked` best tokens per row; returns what returns them and scores.

    They are those of `coupling.rank_scored`; arguments as for `choose_there`.

    What is returned raises:
        NotFinite: the logits are not finite.
    """
    what = choice_of(sampling, beta, num_valid, num_ranked)
    found = _run(what, logits, choice_inputs(sampling, keys, num_valid))
    return partial(_ranked, Coming(found))


def _ranked(coming: Coming) -> tuple[list[list[int]], list[list[float]]]:
    rows = coming.here().tolist()
    check_tops([row[-1] for row in rows])
    num = len(rows[0]) // 2 if rows else 0
    tokens, logs = [], []
    for row in rows:
        kept = [(row[i], row[num + i]) for i in range(num) if row[num + i] > -math.inf]
        tokens.append([int(token) for token, _ in kept])
        logs.append([max(value, LOWEST) for _, value in kept])
    return tokens, logs


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which cuts (top-k, top-p, min-p) a choice has; their values are inputs (`Settings`).

    So there are only a few different `Cuts`, and the usual ones are recorded as CUDA graphs.

    num_kept   number of tokens ranked for top-k, a power of two and at least k; 0: no top-k
    by_top_p   True if there is a top-p cut
    by_min_p   True if there is a min-p cut
    by_id      True if only ids below a limit are tokens
    """

    num_kept: int = 0
    by_top_p: bool = False
    by_min_p: bool = False
    by_id: bool = False

    @property
    def are_sorted(self) -> bool:
        """True if the tokens that stay are ordered best first; False: by id."""
        return self.num_kept > 0 or self.by_top_p or self.by_min_p


def cuts_of(sampling: Sampling, num_valid: int | None) -> Cuts:
    """Return which cuts these settings have; `num_valid` None: all ids are tokens."""
    num_kept = (
        0 if sampling.top_k == 0 else max(FEWEST_KEPT, 1 << (sampling.top_k - 1).bit_length())
    )
    return Cuts(num_kept, sampling.top_p < 1.0, sampling.min_p > 0.0, num_valid is not None)


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of a request's sampling settings, as device tensors of one element each.

    temperature  float32
    top_k        int64
    top_p        float64
    min_log      float32: the logarithm of min-p; -inf without min-p
    num_valid    int64: only ids below it are tokens
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_log: torch.Tensor
    num_valid: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor) -> "Settings":
        """Return the settings encoded by `numbers_of`; numbers [NUM_SETTINGS] int64."""
        temperature, top_k, top_p, min_log, num_valid = torch.split(numbers, 1)
        # One rounding to float32, and division by a tensor: dividing by a Python number multiplies
        # by its reciprocal on a GPU, which rounds differently.
        floats = [number.view(torch.float64) for number in (temperature, top_p, min_log)]
        return cls(floats[0].float(), top_k, floats[1], floats[2].float(), num_valid)


NUM_SETTINGS = 5


def numbers_of(sampling: Sampling, num_valid: int | None) -> list[int]:
    """Return the settings encoded as integers for `Settings.of`; floats as their float64 bits."""
    min_log = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    temperature, top_p, least = map(_as_integer, (sampling.temperature, sampling.top_p, min_log))
    return [temperature, sampling.top_k, top_p, least, num_valid or 0]


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of choice of tokens from logits; noise keys and settings' values are inputs of `of`.

    is_greedy   True: no noise, the largest logits win
    cuts        which cuts there are
    beta        sharpness of the log scores
    num_ranked  number of best tokens returned per row
    """

    is_greedy: bool
    cuts: Cuts
    beta: float
    num_ranked: int = 1

    def of(self, logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return [n, 2 m + 1] float64: per row m tokens, their log scores, and its largest logit.

        m is `num_ranked`, or fewer where the cuts rank fewer tokens.

        logits  [n, V] float32
        inputs  [n + NUM_SETTINGS] int64 on the same device (`choice_inputs`)
        """
        scores, ids, top = self._scores(logits, inputs)
        if self.num_ranked == 1:
            best = scores.amax(dim=1, keepdim=True)
            # In a row with NaN no score equals the best. Then the id is meaningless, but it must be
            # valid, because a chain of draft steps uses it as a token.
            beyond = logits.shape[1] - 1
            found = ids.masked_fill(scores != best, beyond).amin(dim=1, keepdim=True)
        else:
            best, found = most_likely_there(scores, ids, self.num_ranked)
        total = ((scores - best[:, :1]) * self.beta).exp().sum(dim=1, keepdim=True).log()
        values = (best - best[:, :1]) * self.beta - total
        return torch.cat((found.double(), values.double(), top.double()[:, None]), dim=1)

    def _scores(
        self, logits: torch.Tensor, inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scaled logits plus noise [n, m], their token ids [n, m], the largest logits [n].

        For greedy the logits themselves.
        """
        keys, settings = inputs[:-NUM_SETTINGS], Settings.of(inputs[-NUM_SETTINGS:])
        if self.is_greedy:
            rows = _below(logits, self.cuts, settings)
            return rows, _ids_of(rows), rows.amax(dim=1)
        scores, ids, top = scores_there(logits, self.cuts, settings)
        return scores + _gumbel(_bits(keys[:, None], ids)), ids, top


def record_choices(
    choices: Iterable[Choice], logits: torch.Tensor, row_counts: Sequence[int]
) -> None:
    """Record choices over the first rows of logits [n, V], if choices on their device are recorded.

    Call it only at load.

    row_counts  numbers of rows; one recording is made for each
    """
    captures = _captures.get(logits.device)
    if captures is None:
        return
    with torch.inference_mode():
        for choice in choices:
            for num_rows in row_counts:
                inputs = choice_inputs(Sampling(1.0), [0] * num_rows, logits.shape[1])
                captures.record(choice, choice.of, logits[:num_rows], inputs)


def try_choices(choices: Iterable[Choice], logits: torch.Tensor) -> None:
    """Run choices on logits [n, V] without recording, so that the device loads their kernels.

    Runs each for one row and for all rows, for which libraries may have kernels of their own.
    """
    with torch.inference_mode():
        for choice in choices:
            for rows in (logits[:1], logits):
                inputs = choice_inputs(Sampling(1.0), [0] * len(rows), logits.shape[1])
                choice.of(rows, send(inputs, logits.device))


def choice_inputs(
    sampling: Sampling, keys: Sequence[int], num_valid: int | None = None
) -> torch.Tensor:
    """Return a choice's inputs, int64 [n + NUM_SETTINGS] on the host: keys [n], settings."""
    return torch.tensor([*map(_signed, keys), *numbers_of(sampling, num_valid)])


def choice_of(
    sampling: Sampling, beta: float, num_valid: int | None, num_ranked: int = 1
) -> Choice:
    """Return the kind of choice for these settings, used by `choose_there` and `rank_there`."""
    if sampling.is_greedy:
        return Choice(True, Cuts(by_id=num_valid is not None), beta, num_ranked)
    return Choice(False, cuts_of(sampling, num_valid), beta, num_ranked)


def _as_integer(value: float) -> int:
    """Return the bits of a float64 as a signed 64-bit integer."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _run(what: Choice, logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return `what.of(logits, inputs)`, replayed from a CUDA graph if there is one."""
    captures = _captures.get(logits.device)
    with torch.inference_mode():
        if captures is not None:
            return captures.run(what, what.of, logits, inputs)
        return what.of(logits, send(inputs, logits.device))


_captures: dict[torch.device, Captures] = {}


def capture_on(device: torch.device, captures: Captures | None) -> None:
    """Let choices on `device` be recorded by `captures` from now on; None: stop recording."""
    if captures is None:
        _captures.pop(device, None)
    else:
        _captures[device] = captures


def scores_there(
    logits: torch.Tensor, cuts: Cuts, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scaled logits (-inf where cut) [n, m], their token ids [n, m], largest logits [n].

    Without sorting cuts m = V and the order is by id; with `cuts.are_sorted` they are the tokens
    that may stay, best first. Not for greedy.

    logits  [n, V] float32
    """
    rows = _below(logits, cuts, settings)
    top = rows.amax(dim=1)
    scores = rows - (top - top.clamp(-LARGEST, LARGEST))[:, None]  # as `scaled` does
    scores = scores / settings.temperature
    if cuts.are_sorted:
        return *_cut(scores, cuts, settings), top
    return scores, _ids_of(rows), top


def scores_of(
    logits: torch.Tensor, sampling: Sampling, num_valid: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `scores_there` returns, for settings known on the host."""
    numbers = torch.tensor(numbers_of(sampling, num_valid))
    settings = Settings.of(send(numbers, logits.device))
    return scores_there(logits, cuts_of(sampling, num_valid), settings)


def check_tops(tops: Sequence[float]) -> None:
    """Raise NotFinite if the largest logit of a row is not finite."""
    if not all(map(math.isfinite, tops)):
        raise NotFinite(NOT_FINITE)


def most_likely_there(
    scores: torch.Tensor, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest scores of each row, best first, and their ids; each [n, count].

    Of equal scores the lowest id comes first, which torch's own `topk` does not promise. So 64-bit
    integers are ranked, with the score in the high bits and the id in the low ones.

    scores  [n, m] float32, no NaN
    ids     [n, m] int64
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero is zero
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    best = ((order << 32) | (_LAST_ID - ids)).topk(min(count, scores.shape[1]), dim=1).values
    found = (best >> 32).int()
    return (found ^ ((found >> 31) & 0x7FFFFFFF)).view(torch.float32), _LAST_ID - (best & _LAST_ID)


def _below(logits: torch.Tensor, cuts: Cuts, settings: Settings) -> torch.Tensor:
    """Return logits [n, V] with -inf for ids from `num_valid` on, if the cuts limit ids."""
    if not cuts.by_id:
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(ids >= settings.num_valid, -math.inf)


def _ids_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the token ids of `rows` [n, V]: 0 to V - 1 in each row, int64."""
    return torch.arange(rows.shape[1], device=rows.device).expand_as(rows)


def _cut(scores: torch.Tensor, cuts: Cuts, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores, ids) [n, m], best first; tokens cut by min-p, top-k or top-p are at -inf."""
    if cuts.by_min_p:
        first = scores.amax(dim=1, keepdim=True)
        scores = scores.masked_fill(scores - first < settings.min_log, -math.inf)
    if cuts.num_kept > 0:
        scores, ids = most_likely_there(scores, _ids_of(scores), cuts.num_kept)
        order = torch.arange(scores.shape[1], device=scores.device)
        scores = scores.masked_fill(order >= settings.top_k, -math.inf)
    else:
        scores, ids = scores.sort(dim=1, descending=True, stable=True)
    first = scores[:, :1]
    if cuts.by_top_p:
        weights = (scores - first).double().exp()
        mass = weights.cumsum(dim=1)
        # A token stays if the tokens before it hold less than top_p together.
        is_out = mass[:, :-1] >= settings.top_p * mass[:, -1:]
        scores = torch.cat((first, scores[:, 1:].masked_fill(is_out, -math.inf)), dim=1)
    return scores, ids


def _bits(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the 52 hash bits of `ids` [n, m], each row under its key [n, 1]."""
    mixed = (ids + 1) * _signed(GOLDEN) + words
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return _shifted(mixed ^ _shifted(mixed, 31), 12)


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Return int64 words shifted right with zeros; torch's own shift fills with the sign bit."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """Return an unsigned 64-bit word as the signed integer with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel noise, float32, computed from words of 52 hash bits each."""
    v = (bits.double() + 0.5) * 2.0**-52
    return -(-(-v).log1p()).log().float()
