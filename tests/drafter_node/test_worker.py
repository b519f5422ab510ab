"""Steps that follow each other at once: on a GPU several of them are one recording."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from drafter_node.compute import Compute, Part, Proposed
from drafter_node.worker import Worker
from engine.choice.coupling_on_gpu import NUM_SETTINGS, Choice
from engine.forward.forward import Output
from engine.layout.slots import Feed
from proto.messages import Rule
from tests.policies import synchronous
from tests.texts import STOP, opening

VOCAB = 200


class Model:
    """Says one token after the other, step by step or several steps at once."""

    num_received = 0

    def __init__(self, *tokens: int, can_chain: bool = True) -> None:
        self.tokens = list(tokens)
        self.chains = can_chain
        self.calls: list[int] = []  # rows, or steps below zero

    def run(self, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> Output:
        self.calls.append(len(feeds[0].tokens))
        logits = torch.zeros(1, VOCAB)
        logits[0, self.tokens.pop(0)] = 20.0
        return Output(logits)

    def can_chain(self, feeds: Sequence[Feed], choice: Choice) -> bool:
        assert choice.num_ranked == 1
        return self.chains and len(feeds) > 1

    def run_chain(
        self, feeds: Sequence[Feed], choice: Choice, inputs: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        assert len(inputs) == len(feeds) + NUM_SETTINGS
        self.calls.append(-len(feeds))
        return [self.tokens.pop(0) for _ in feeds], [-0.1] * len(feeds)

    def done(self) -> int:
        return 7

    def wait(self) -> None:
        pass


def worker_of(model: Model, *, is_called: bool = False) -> Worker:
    config: Any = SimpleNamespace(max_candidates=8)
    engine: Any = SimpleNamespace(loaded=SimpleNamespace(vocab_size=VOCAB))
    forwards: Any = model
    return Worker(config, engine, forwards, VOCAB, lambda: is_called)


def propose(model: Model, part: Part, *, is_called: bool = False) -> Proposed:
    return worker_of(model, is_called=is_called).compute(Compute(1, (part,)))


def chain(num_ahead: int, **changes: Any) -> Part:
    feeds = [Feed((0,), (5 + i,), (5 + i,), 5, ((2 << i) - 1,)) for i in range(num_ahead + 1)]
    first = replace(feeds[0], tokens=(9,))
    opened = opening(1, 2, 3, 4, 9, policy=synchronous(8))
    part = Part(opened, 1, [1, 2, 3, 4, 9], first, 1, ahead=tuple(feeds[1:]), least=-9.0)
    return replace(part, **changes)


def tokens_of(proposed: Proposed) -> list[int]:
    return [children.tokens[0] for children in proposed.children[0]]


def test_several_steps_are_one_call_and_say_what_single_steps_say() -> None:
    cases = ((1, [1, 1]), (2, [1, -2]), (3, [1, -3]), (4, [1, -4]), (7, [1, -4, -3]))
    for num_ahead, calls in cases:
        said = range(50, 51 + num_ahead)
        at_once, singly = Model(*said), Model(*said, can_chain=False)
        found = propose(at_once, chain(num_ahead))
        assert at_once.calls == calls
        assert tokens_of(found) == tokens_of(propose(singly, chain(num_ahead))) == list(said)
        assert singly.calls == [1] * (num_ahead + 1)
        assert (found.num_steps, found.model_us) == (num_ahead + 1, 7 * len(calls))


def test_what_was_drafted_behind_the_end_of_the_text_is_not_said() -> None:
    model = Model(50, 51, STOP, 53, 54)
    found = propose(model, chain(4))
    assert tokens_of(found) == [50, 51, STOP]
    assert found.num_steps == 5, "they were made all the same"
    assert model.calls == [1, -4]


def test_a_message_that_has_come_ends_the_chain() -> None:
    model = Model(50, 51, 52)
    assert tokens_of(propose(model, chain(2), is_called=True)) == [50]
    assert model.calls == [1]


def test_a_message_that_was_handled_while_a_gpu_made_the_first_step_ends_the_chain() -> None:
    model = Model(50, 51, 52)
    ends = worker_of(model)._in_two(Compute(1, (chain(2),)))
    model.num_received += 1
    assert tokens_of(ends()) == [50]
    assert model.calls == [1]


def test_the_classical_rules_are_sampled_step_by_step() -> None:
    part = chain(2, sampled_in=1)
    opened = replace(
        part.opened,
        rule=Rule.TOKEN,
        sampling=replace(part.opened.sampling, temperature=1.0),
    )
    model = Model(50, 51, 52)
    propose(model, replace(part, opened=opened))
    assert model.calls == [1, 1, 1]
