"""Turns the flags of `plan` into a case for the simulator, and its result into tables."""

import dataclasses
import math
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.cli.writers import WIDTH
from lab.pair.files import read as read_pair
from lab.pair.record import Kind, Measured
from lab.plan.likeness import BYTES_PER_PARAMETER, forwards_like, words_of
from lab.plan.settings import (
    MIN_TOKENS,
    USUAL_ACCEPTANCE,
    USUAL_DRAFT_HOST_US,
    USUAL_HOP_MS,
    USUAL_HOST_US,
    Costs,
    Texts,
)
from lab.testbeds.shapes import USUAL_DRAFTER, Published
from proto.errors import ConfigurationError
from proto.system import cannot_read, path_of
from rehearsal.acceptance import Trace, chances, cut, drawn, read, shares
from rehearsal.planning import (
    DRAFTER_ROWS,
    TARGET_ROWS,
    Case,
    Cell,
    Plan,
    roofline,
)
from rehearsal.planning import make_plan as make_plan
from rehearsal.setting import Forwards, NodeCosts

LIKE_FLAGS = {"target": "--like", "draft": "--drafter-like"}
NUM_SHOWN = 4  # ranks whose share is printed
MOST_OF_A_NAME = 30  # letters of a model's name that are printed
UNKNOWN = Forwards(((1, 0.0),))
USUAL = (
    NodeCosts(UNKNOWN, USUAL_HOST_US / 1e6),
    NodeCosts(UNKNOWN, USUAL_DRAFT_HOST_US / 1e6, USUAL_HOP_MS / 1e3),
)


def case_of(costs: Costs, texts: Texts) -> Case:
    """Return the case to simulate; coordinator on the target's host. Raises ConfigurationError."""
    measured = read_pair(path_of(costs.pair), "--pair") if costs.pair else None
    if measured is None and texts.temperature is not None:
        raise ConfigurationError("--temperature chooses texts of --pair: give that file as well")
    trace = _positions(texts, measured)
    if measured is None:
        return Case(*_with_flags(costs, None), trace, texts.num_texts)
    plain, apart, both = (_with_flags(costs, measured.costs(kind)) for kind in Kind)
    return Case(*both, trace, texts.num_texts, apart, plain[0])


def _with_flags(
    costs: Costs, known: tuple[NodeCosts, NodeCosts] | None
) -> tuple[NodeCosts, NodeCosts]:
    """Return the costs of target and drafter: as the flags say, else as known, else as usual.

    Raises ConfigurationError.
    """
    target, drafter = known or USUAL
    forward, step = (None, None) if known is None else (target.forward, drafter.forward)
    return (
        NodeCosts(
            _forwards(costs, "target", costs.target_ms, costs.verify_ms_per_token, forward),
            target.host_s if costs.host_us is None else costs.host_us / 1e6,
            timed_rows=TARGET_ROWS,
        ),
        NodeCosts(
            _forwards(costs, "draft", costs.draft_ms, costs.draft_ms_per_row, step),
            drafter.host_s if costs.draft_host_us is None else costs.draft_host_us / 1e6,
            drafter.hop_s if costs.hop_ms is None else costs.hop_ms / 1e3,
            DRAFTER_ROWS,
        ),
    )


def likenesses(costs: Costs) -> dict[str, Published]:
    """Return the model shape of "target" and "draft", if their costs are given by a model's name.

    Raises ConfigurationError if other costs of the same model are given as well.
    """
    made: dict[str, Published] = {}
    for name, like in (("target", costs.like), ("draft", costs.drafter_like)):
        given = [
            f"--{name}-{what}"
            for what in ("ms", "params")
            if getattr(costs, f"{name}_{what}") is not None
        ]
        if like is not None and given:
            raise ConfigurationError(
                f"{LIKE_FLAGS[name]} says what a forward takes: leave out {given[0]}"
            )
        if like is None and name == "draft" and not given and costs.like is not None:
            like = USUAL_DRAFTER.get(costs.like)
        if like is not None:
            made[name] = like
    return made


def _forwards(
    costs: Costs, name: str, ms: float | None, row_ms: float, known: Forwards | None
) -> Forwards:
    """Return a forward's time: given, of a named model, roofline, or else as it is known.

    Raises ConfigurationError.
    """
    names = ("params", "bytes", "bandwidth", "flops")
    params, num_bytes, bandwidth, flops = (getattr(costs, f"{name}_{what}") for what in names)
    if like := likenesses(costs).get(name):
        return forwards_like(like, num_bytes, bandwidth, flops)
    if (
        known is not None
        and not row_ms
        and (ms, params, num_bytes, bandwidth, flops) == (None,) * 5
    ):
        return known
    if ms is not None and params is None:
        return Forwards(((1, ms / 1e3),), row_ms / 1e3)
    if ms is not None or params is None or bandwidth is None:
        raise ConfigurationError(
            f"say what a forward takes: {LIKE_FLAGS[name]}, --{name}-ms, or --{name}-params and "
            f"--{name}-bandwidth"
        )
    return roofline(params, num_bytes or BYTES_PER_PARAMETER * params, bandwidth, flops or math.inf)


def _positions(texts: Texts, measured: Measured | None) -> Trace:
    """Return how the drafter ranks the tokens of the texts: recorded, or drawn from given chances.

    Raises ConfigurationError.
    """
    if not texts.trace and texts.acceptance is None and measured is not None:
        trace = measured.trace(texts.temperature or 0.0)
        return _long_enough(
            cut(trace, texts.num_texts, texts.num_tokens), "--pair: the file", texts
        )
    if not texts.trace:
        shares = chances(texts.acceptance or USUAL_ACCEPTANCE)
        return drawn(shares, texts.num_texts, texts.num_tokens)
    try:
        with path_of(texts.trace).open(encoding="utf-8") as file:
            recorded = cut(read(file), texts.num_texts, texts.num_tokens)
    except OSError as error:
        raise ConfigurationError(
            f"--trace: {texts.trace} cannot be read: {cannot_read(error)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--trace: {texts.trace} is no text, so no record") from error
    return _long_enough(recorded, f"--trace: {texts.trace}", texts)


def _long_enough(recorded: Trace, name: str, texts: Texts) -> Trace:
    """Return the texts. Raises ConfigurationError if they are too short to be rehearsed."""
    if len(recorded[0]) < MIN_TOKENS:
        raise ConfigurationError(
            f"{name} has {len(recorded[0])} tokens for each of {texts.num_texts} texts, "
            f"{MIN_TOKENS} are needed; record more"
        )
    return recorded


def as_record(case: Case, made: Plan) -> dict[str, Any]:
    """Return everything as a dictionary for JSON; times in milliseconds."""
    return {
        "acceptance": shares(case.trace),
        "target_ms": case.target.forward.of(1) * 1e3,
        "draft_ms": case.drafter.forward.of(1) * 1e3,
        "plain_tokens_per_second": made.plain.figures.tokens_per_second,
        "pays": made.winner is not None,
        "best": [_cell_record(made, cell) for cell in made.best],
        "cells": [_cell_record(made, cell) for cell in made.cells],
    }


def _cell_record(made: Plan, cell: Cell) -> dict[str, Any]:
    """Return the figures of one policy with one setting as a dictionary for JSON."""
    numbers = {"num_speculative_tokens": cell.k, "window": cell.window}
    figures = dataclasses.asdict(cell.figures)
    return {"policy": cell.policy, **numbers, "speedup": made.speedup(cell), **figures}


def show(costs: Costs, case: Case, made: Plan) -> None:
    """Print what was given, the table, and the conclusion."""
    if costs.pair:
        typer.echo(about(read_pair(path_of(costs.pair), "--pair")))
    roles = {"target": "target", "draft": "drafter"}
    for name, like in likenesses(costs).items():
        typer.echo(words_of(roles[name], like, getattr(costs, f"{name}_bandwidth")))
    typer.echo(_given(case) + "\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for words in ("\nK", "\nwindow", "\ntokens/s", "\nx plain", "tokens\na pass"):
        table.add_column(words, justify="right")
    for words in ("target\nbusy", "drafter\nbusy"):
        table.add_column(words, justify="right")
    for cell in (made.plain, *made.best):
        figures = cell.figures
        table.add_row(
            cell.policy,
            *("-" if number is None else str(number) for number in (cell.k, cell.window)),
            f"{figures.tokens_per_second:.4g}",
            f"{made.speedup(cell):.2f}",
            f"{figures.tokens_per_pass:.2f}",
            f"{figures.target_busy:.0%}",
            f"{figures.drafter_busy:.0%}",
        )
    Console(width=WIDTH).print(table)
    typer.echo("\n" + conclusion(made))


def about(measured: Measured) -> str:
    """Return which models a file of `measure` is of, in lines of at most 80 columns."""
    nodes = ("measured target", measured.target), ("measured drafter", measured.drafter)
    return "\n".join(
        f"{role}: {_ending(node.model)}, {node.dtype} on {node.device}" for role, node in nodes
    )


def _ending(name: str) -> str:
    """Return a model's name; of a long one its end, which tells models apart."""
    return name if len(name) <= MOST_OF_A_NAME else f"...{name[-MOST_OF_A_NAME:]}"


def _given(case: Case) -> str:
    """Return the costs and the acceptance in words, in lines of at most 80 columns."""
    target, drafter = case.target, case.drafter
    ranks = ", ".join(f"{share:.2f}" for share in shares(case.trace)[:NUM_SHOWN])
    first, *more = (f"{target.forward.of(rows) * 1e3:.4g}" for rows in (1, 5, 9))
    number = len(case.trace)
    texts = "a text" if number == 1 else f"{number} texts at once"
    return (
        f"target pass: {first} ms ({more[0]} with 5 rows, {more[1]} with 9); draft step: "
        f"{drafter.forward.of(1) * 1e3:.4g} ms\n"
        f"hop: {drafter.hop_s * 1e3:.4g} ms; host: {target.host_s * 1e6:.0f} us a pass, "
        f"{drafter.host_s * 1e6:.0f} us a draft step\n"
        f"acceptance, of the drafter's choices 1, 2, 3 ...: {ranks} ...\n"
        f"{texts} of {len(case.trace[0])} tokens"
    )


def conclusion(made: Plan) -> str:
    """Return advice on which policy to use, in lines of at most 80 columns."""
    winner = made.winner
    if winner is None:
        best = max(made.best, key=made.speedup)
        return (
            f"Speculation does not pay here: the best of it, {best.policy} with K = {best.k}, "
            f"writes {made.speedup(best):.2f}\nof plain decoding. Use --policy "
            f"{made.plain.policy}. (Where drafts do not pay, adaptive policies let\nthe drafter "
            "rest, and come close to plain decoding.)"
        )
    flags = f"--policy {winner.policy} --num-speculative-tokens {winner.k}"
    if winner.window is not None:
        flags += f" --window {winner.window}"
    return f"Best, {made.speedup(winner):.2f} x plain decoding:\n  {flags}"
