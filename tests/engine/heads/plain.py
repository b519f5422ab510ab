"""What an EAGLE head says, computed row by row from the papers: no cache, no mask, no slot.

A row is made of the rows above it on its path, its token and what it is given. Written with sums
and products alone; nothing of the engine is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.engine.heads.checkpoints import DIM, EPSILON, NUM_HEADS, NUM_KV_HEADS, THETA, Tensors

Given = torch.Tensor | bytes | None
"""the target's feature before a row; b"": what the row above has predicted; None: nothing known"""


@dataclass(frozen=True)
class PlainRow:
    """A row that is not absent: keys and values by head, and what it hands on."""

    keys: torch.Tensor
    values: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class PlainHead:
    """The weights by the names of tests/engine/heads/checkpoints.py, and what is the target's."""

    weights: Tensors
    embeddings: torch.Tensor
    lm_head: torch.Tensor
    residual_is_normed: bool = False
    output_is_normed: bool = False

    @property
    def is_third(self) -> bool:
        return "lm_head" in self.weights

    def row(self, above: Sequence[PlainRow | None], token: int, given: Given) -> PlainRow | None:
        """The row of a token behind the rows `above`; None if it is absent."""
        position, w = len(above), self.weights
        if position == 0 or given is None:
            return None
        if isinstance(given, bytes):
            before = above[-1]
            if before is None:
                return None
            state = before.state
        else:
            state = self._state_of(given)
        embedded = self.embeddings[token]
        if self.is_third:
            normed = _norm(state, w["hidden norm"])
            entering = torch.cat((_norm(embedded, w["embedding norm"]), normed))
            residual = normed if self.residual_is_normed else state
        else:
            entering = w["fc"] @ torch.cat((embedded, state)) + w.get("fc bias", torch.zeros(()))
            residual = entering
        queries = w["q"] @ entering + w.get("q bias", torch.zeros(()))
        keys = _turned((w["k"] @ entering).view(NUM_KV_HEADS, DIM), position)
        values = (w["v"] @ entering).view(NUM_KV_HEADS, DIM)
        seen = [*(row for row in above if row is not None), PlainRow(keys, values, state)]
        attended = _attended(_turned(queries.view(NUM_HEADS, DIM), position), seen)
        hidden = residual + w["o"] @ attended
        inner = _norm(hidden, w["post norm"])
        gate = w["gate"] @ inner
        hidden = hidden + w["down"] @ (gate * torch.sigmoid(gate) * (w["up"] @ inner))
        if self.output_is_normed:
            hidden = _norm(hidden, w["norm"])
        return PlainRow(keys, values, hidden)

    def logits(self, row: PlainRow) -> torch.Tensor:
        """[V] of the target's vocabulary."""
        if not self.is_third:
            return self.lm_head @ row.state
        found = torch.full((len(self.embeddings),), -torch.inf)
        normed = row.state if self.output_is_normed else _norm(row.state, self.weights["norm"])
        found[self.weights["targets"]] = self.weights["lm_head"] @ normed
        return found

    def rows(self, tokens: Sequence[int], given: Sequence[Given]) -> list[PlainRow | None]:
        """All rows of a text, from its start."""
        made: list[PlainRow | None] = []
        for token, feature in zip(tokens, given, strict=True):
            made.append(self.row(made, token, feature))
        return made

    def _state_of(self, feature: torch.Tensor) -> torch.Tensor:
        if not self.is_third or "fc" not in self.weights:
            return feature
        if "feature norm 0" in self.weights:
            norms = (self.weights[f"feature norm {number}"] for number in range(3))
            feature = torch.cat(
                [_norm(*pair) for pair in zip(feature.chunk(3), norms, strict=True)]
            )
        norm = self.weights.get("input norm")
        return self.weights["fc"] @ (feature if norm is None else _norm(feature, norm))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean() + EPSILON).sqrt()


def _turned(heads: torch.Tensor, position: int) -> torch.Tensor:
    """The rotary embedding: each pair of coordinates is turned by its own frequency."""
    half = DIM // 2
    angles = position / THETA ** (torch.arange(half) / half)
    first, second = heads[:, :half], heads[:, half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


def _attended(queries: torch.Tensor, seen: Sequence[PlainRow]) -> torch.Tensor:
    group = NUM_HEADS // NUM_KV_HEADS
    parts = []
    for head, query in enumerate(queries):
        scores = torch.stack([row.keys[head // group] @ query for row in seen]) / DIM**0.5
        values = torch.stack([row.values[head // group] for row in seen])
        parts.append(scores.softmax(0) @ values)
    return torch.cat(parts)
