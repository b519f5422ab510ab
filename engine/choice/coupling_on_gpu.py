"""The coupled choice where the logits are: on a GPU, so that a token crosses and no row of logits.

It computes what `coupling.py` computes, operator by operator: the same hash in the same integers
(torch has no unsigned multiplication, but two's complement wraps alike), the noise in float64, one
rounding to float32, equal scores to the lowest id. Everything of a pass crosses at once, in one
small tensor, so that the host waits for the device once. Where passes are CUDA graphs, a choice
is one as well (`logit_graphs.py`): a sampled one is some fifty small kernels.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from engine.choice.logit_graphs import Captures
from engine.choice.sampling import LARGEST, LOWEST, NOT_FINITE, Sampling
from engine.device import send
from engine.errors import NotFinite

# Of the noise's format, which `coupling.py` specifies.
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN = 0x9E3779B97F4A7C15
_LAST_ID = (1 << 32) - 1


def choose_there(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    *,
    beta: float = 1.0,
    num_valid: int | None = None,
) -> tuple[list[int], list[float]]:
    """Return each row's token and log softmax(beta * score) of it, as `coupling.rank_scored`.

    logits  [n, V] float32, any device
    keys    [n] 64-bit keys of the rows' noise
    beta    sharpness of the second result alone

    Raises:
        NotFinite: the logits are not finite.
    """
    what = Choice(_kind_of(sampling), beta, _within(num_valid, logits))
    return chosen_there(_run(what, logits, choice_inputs(sampling, keys)))


def chosen_there(found: torch.Tensor) -> tuple[list[int], list[float]]:
    """Fetch tokens and their scores from what `Choice.of` has found for n rows.

    Raises:
        NotFinite: the logits were not finite.
    """
    tokens, scores, tops = found.t().tolist()
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
) -> tuple[list[list[int]], list[list[float]]]:
    """Return what `coupling.rank_scored` returns.

    Raises:
        NotFinite: the logits are not finite.
    """
    what = Choice(_kind_of(sampling), beta, _within(num_valid, logits), num_ranked)
    rows = _run(what, logits, choice_inputs(sampling, keys)).tolist()
    check_tops([row[-1] for row in rows])
    num = len(rows[0]) // 2 if rows else 0
    tokens, logs = [], []
    for row in rows:
        kept = [(row[i], row[num + i]) for i in range(num) if row[num + i] > -math.inf]
        tokens.append([int(token) for token, _ in kept])
        logs.append([max(value, LOWEST) for _, value in kept])
    return tokens, logs


@dataclass(frozen=True, slots=True)
class Choice:
    """What is computed of logits, but for keys and temperature, which are numbers on the device.

    sampling    with the temperature 1 or 0
    num_ranked  tokens of each row
    """

    sampling: Sampling
    beta: float
    num_valid: int | None
    num_ranked: int = 1

    def of(self, logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return [n, 2 m + 1] float64: tokens, their scores, the largest logit of each row.

        logits  [n, V] float32
        inputs  of `choice_inputs`, on the same device
        """
        scores, ids, top = self._scores(logits, inputs)
        if self.num_ranked == 1:
            best = scores.amax(dim=1, keepdim=True)
            # Of NaN none is the best. What is found there is no choice, but a chain reads it.
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
        """Return scaled logits plus noise [n, m], the ids they are of [n, m], the top logits."""
        if self.sampling.is_greedy:
            rows = logits[:, : self.num_valid]
            return rows, _ids_of(rows), rows.amax(dim=1)
        temperature = inputs[-1:].view(torch.float64).float()
        scores, ids, top = scores_there(logits, self.sampling, self.num_valid, temperature)
        return scores + _gumbel(_bits(inputs[:-1, None], ids)), ids, top


def choice_inputs(sampling: Sampling, keys: Sequence[int]) -> torch.Tensor:
    """Return [n + 1] int64 on the host: the rows' keys, and the bits of the temperature."""
    (bits,) = struct.unpack("<q", struct.pack("<d", sampling.temperature))
    return torch.tensor([*map(_signed, keys), bits])


def choice_of(sampling: Sampling, beta: float, num_valid: int | None) -> Choice:
    """What `choose_there` computes."""
    return Choice(_kind_of(sampling), beta, num_valid)


@lru_cache(maxsize=64)
def _kind_of(sampling: Sampling) -> Sampling:
    if sampling.is_greedy:
        return Sampling()
    return replace(sampling, temperature=1.0)


def _within(num_valid: int | None, logits: torch.Tensor) -> int | None:
    """None where all tokens may be chosen: one recording for both ways to say so."""
    return None if num_valid is None or num_valid >= logits.shape[1] else num_valid


def _run(what: Choice, logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    captures = _captures.get(logits.device)
    with torch.inference_mode():
        if captures is not None:
            return captures.run(what, what.of, logits, inputs)
        return what.of(logits, send(inputs, logits.device))


_captures: dict[torch.device, Captures] = {}


def capture_on(device: torch.device, captures: Captures | None) -> None:
    """From now on choices on this device are recorded; None: no longer."""
    if captures is None:
        _captures.pop(device, None)
    else:
        _captures[device] = captures


def scores_there(
    logits: torch.Tensor,
    sampling: Sampling,
    num_valid: int | None = None,
    temperature: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scaled logits with -inf where a token is cut, the ids that they are of, the tops.

    The first two are [n, m]: of all tokens by id, or, if there are cuts, of those that may stay,
    best first. Not for greedy.

    temperature  [1] float32, on the device; None: that of `sampling`
    """
    if temperature is None:
        # A tensor: a device multiplies by the reciprocal of a number, and rounds otherwise.
        temperature = torch.full((1,), sampling.temperature, device=logits.device)
    rows = logits[:, :num_valid]
    top = rows.amax(dim=1)
    scores = rows - (top - top.clamp(-LARGEST, LARGEST))[:, None]  # as `scaled` does
    scores = scores / temperature
    if sampling.cuts:
        return *_cut(scores, sampling), top
    return scores, _ids_of(rows), top


def check_tops(tops: Sequence[float]) -> None:
    """Raise NotFinite if the largest logit of a row is not finite."""
    if not all(map(math.isfinite, tops)):
        raise NotFinite(NOT_FINITE)


def most_likely_there(
    scores: torch.Tensor, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest scores of each row [n, m], best first, and their ids.

    Of equal ones the lowest id comes first, which torch's own `topk` does not promise: what is
    ranked are integers of 64 bits, the score's order above the id's.

    scores  float32, no NaN
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero is zero
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    best = ((order << 32) | (_LAST_ID - ids)).topk(min(count, scores.shape[1]), dim=1).values
    found = (best >> 32).int()
    return (found ^ ((found >> 31) & 0x7FFFFFFF)).view(torch.float32), _LAST_ID - (best & _LAST_ID)


def _ids_of(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.shape[1], device=rows.device).expand_as(rows)


def _cut(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores, ids) [n, m], best first, with -inf behind what min-p, top-k, top-p leave."""
    if sampling.min_p > 0.0:
        first = scores.amax(dim=1, keepdim=True)
        is_out = scores - first < torch.full((), math.log(sampling.min_p), device=scores.device)
        scores = scores.masked_fill(is_out, -math.inf)
    if sampling.top_k > 0:
        scores, ids = most_likely_there(scores, _ids_of(scores), sampling.top_k)
    else:
        scores, ids = scores.sort(dim=1, descending=True, stable=True)
    first = scores[:, :1]
    if sampling.top_p < 1.0:
        weights = (scores - first).double().exp()
        mass = weights.cumsum(dim=1)
        # A token stays as long as those before it do not hold the share yet.
        is_out = mass[:, :-1] >= sampling.top_p * mass[:, -1:]
        scores = torch.cat((first, scores[:, 1:].masked_fill(is_out, -math.inf)), dim=1)
    return scores, ids


def _bits(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the 52 hash bits of `ids` [n, m], each row under its key [n, 1]."""
    mixed = (ids + 1) * _signed(GOLDEN) + words
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return _shifted(mixed ^ _shifted(mixed, 31), 12)


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros, where torch fills with the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """The same 64 bits as a number of two's complement."""
    return word - (1 << 64) if word >> 63 else word


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    v = (bits.double() + 0.5) * 2.0**-52
    return -(-(-v).log1p()).log().float()
