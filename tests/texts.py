"""Messages about one small text, for the tests of the machines."""

from collections.abc import Sequence
from dataclasses import replace

from proto.messages import (
    Ack,
    Cause,
    Draft,
    Hit,
    Limits,
    Open,
    Policy,
    SamplingSpec,
    Verdict,
)
from proto.tree import EMPTY_HASH, path_hash
from tests.policies import pipelined, synchronous

KEY = bytes(range(16))
SPEC = SamplingSpec()
STOP = 99
LIMITS = Limits(max_len=40, stop_ids=(STOP,))
SYNC_4 = synchronous(4)
PIPELINED = replace(pipelined(8, 16), group=1)


def key_of(session: int) -> bytes:
    """The key of a text."""
    return KEY if session == 1 else session.to_bytes(len(KEY), "little")


def name(*path: int, session: int = 1) -> int:
    """The hash of a path."""
    hash_ = EMPTY_HASH
    for token in path:
        hash_ = path_hash(hash_, token, key_of(session))
    return hash_


def opening(
    *tokens: int,
    incarnation: int = 1,
    session: int = 1,
    policy: Policy = SYNC_4,
    num_prompt: int | None = None,
    limits: Limits = LIMITS,
) -> Open:
    """Open of this text, all of it prompt if nothing else is said."""
    if num_prompt is None:
        num_prompt = len(tokens)
    key = key_of(session)
    return Open(session, incarnation, key, tokens, num_prompt, SPEC, policy, limits)


def draft(
    parent: Sequence[int],
    *tokens: int,
    number: int = 1,
    first_number: int | None = None,
    incarnation: int = 1,
    done: bool = False,
    model_us: int = 0,
    num_steps: int | None = None,
    session: int = 1,
) -> Draft:
    """A chain of drafts below the path `parent`; a step each, if nobody says."""
    return Draft(
        session=session,
        incarnation=incarnation,
        source=0,
        first_number=number if first_number is None else first_number,
        number=number,
        parent_hash=name(*parent, session=session),
        parent_len=len(parent),
        tokens=tokens,
        parents=tuple(range(-1, len(tokens) - 1)),
        scores=(-0.5,) * len(tokens),
        done=done,
        model_us=model_us,
        num_steps=len(tokens) if num_steps is None else num_steps,
    )


def verdict(
    base: Sequence[int],
    *tokens: int,
    acked: int | None = None,
    acked_life: int = 1,
    incarnation: int = 1,
    cause: Cause = Cause.READY,
    num_drafted: int = 0,
    num_accepted: int = 0,
    num_rolled_back: int = 0,
    num_stale: int = 0,
    durations_us: tuple[int, int, int] = (0, 0, 0),
    rejected: tuple[int, ...] = (),
    session: int = 1,
    hit: Hit | None = None,
    awaits: int = 0,
) -> Verdict:
    """The text `base` goes on with `tokens`. hit: if not what the other figures say."""
    if hit is None:
        is_alone = cause in (Cause.ALONE, Cause.RESTING)
        hit = Hit.HIT if num_accepted else Hit.NOBODY if is_alone else Hit.TIMING
    return Verdict(
        session,
        incarnation,
        len(base),
        name(*base, session=session),
        tokens,
        () if acked is None else (Ack(0, acked_life, acked),),
        cause,
        num_drafted,
        num_accepted,
        num_rolled_back,
        num_stale,
        *durations_us,
        rejected=rejected,
        hit=hit,
        num_awaited=awaits,
    )
