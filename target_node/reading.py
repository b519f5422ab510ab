"""Reading the prompt: what is prefilled next, and what rows of the text tell of it (pure)."""

from collections.abc import Sequence

from engine.slots import Feed, SlotMap
from node.events import Send, SharedAction
from proto.messages import MAX_FEATURE_BYTES, Features, Logprobs, Open, PromptLogprobs
from proto.tree import CommittedText
from target_node.events import FeatureRows


def next_chunk(
    slots: SlotMap[int], text: Sequence[int], opened: Open, limit: int, *, is_alone: bool
) -> Sequence[int]:
    """The committed tokens to prefill next; empty if a pass with drafts can take what is missing.

    limit     most of them
    is_alone  the prompt but for its last token is prefilled in passes of its own, and nothing
              after it is prefilled at all (reproducible mode)
    """
    start, end = slots.prefix_len, opened.num_prompt - 1
    if (is_alone or opened.sampling.scores_prompt) and start < end:
        return text[start : min(end, start + limit)]
    return () if is_alone else slots.next_chunk(text, len(text), limit)


def scored_by(feed: Feed, opened: Open) -> tuple[int, ...]:
    """The tokens of the prompt that follow the rows of a prefill, if their logprobs are wanted."""
    if feed.masks is not None or not opened.sampling.scores_prompt:
        return ()
    start = feed.positions[0] + 1
    return opened.tokens[start : min(opened.num_prompt, start + len(feed.tokens))]


def tell_prompt(opened: Open, prefix_len: int, logprobs: Logprobs | None) -> Sequence[SharedAction]:
    """Send what a prefill that ended at `prefix_len` has found out about the tokens it scored."""
    if logprobs is None:
        return ()
    start = prefix_len - len(logprobs) + 1
    return (Send(PromptLogprobs(opened.session, opened.incarnation, start, logprobs)),)


def tell_features(
    opened: Open, text: CommittedText, start: int, rows: FeatureRows | None
) -> list[SharedAction]:
    """Send the features of rows that lie one behind another on the text, as far as it goes.

    start  position of the first row; its feature is the one before the token at `start + 1`
    """
    if rows is None:
        return []
    num_rows = min(rows.num_rows, len(text) - start - 1)
    most = max(1, MAX_FEATURE_BYTES * rows.num_rows // len(rows.data))
    told: list[SharedAction] = []
    for first in range(0, num_rows, most):
        end = min(first + most, num_rows)
        end_len, data = start + 1 + end, rows.part(first, end)
        end_hash, number = text.path_hashes[end_len], end - first
        session, incarnation = opened.session, opened.incarnation
        message = Features(session, incarnation, end_len, end_hash, number, rows.dtype, data)
        told.append(Send(message))
    return told
