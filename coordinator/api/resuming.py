"""Checks whether an answer can go on behind tokens that another server has written of it.

These may be the whole answer: its server was lost before it said why the text has ended.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from coordinator.api.config_base import called
from coordinator.api.params import SamplingParams
from coordinator.api.structured import StructuredOutputsParams
from proto.errors import ConfigurationError
from proto.messages import GREEDY_BELOW, FinishReason, Role

if TYPE_CHECKING:
    from coordinator.api.pair import Pair


def review_written(
    written: Sequence[int],
    params: SamplingParams,
    num_ids: int,
    stop_ids: Collection[int],
    room: int,
) -> FinishReason | None:
    """Return why an answer that begins with these tokens is complete; None: more follows.

    num_ids   token ids from this number on are none of the target's
    stop_ids  tokens that end the text
    room      tokens that fit behind the prompt

    Raises ConfigurationError if no answer with these parameters begins so.
    """
    if (wrong := next((one for one in written if not 0 <= one < num_ids), None)) is not None:
        raise ConfigurationError(f"token id {wrong}: the target has ids from 0 to {num_ids - 1}")
    if len(written) > min(params.max_tokens, room):
        limit = f"{called('max_tokens')} is {params.max_tokens}"
        if room < params.max_tokens:
            limit = f"{room} fit behind the prompt"
        raise ConfigurationError(f"{len(written)} tokens are written already, but {limit}")
    if (ended := next((one for one in written[:-1] if one in stop_ids), None)) is not None:
        raise ConfigurationError(f"token id {ended} ends the text: nothing follows it")
    if written and written[-1] in stop_ids:  # on the last allowed position, too, this counts
        return FinishReason.STOP
    if len(written) == min(params.max_tokens, room):
        return FinishReason.LENGTH
    if params.seed is None and params.temperature >= GREEDY_BELOW:
        line = "a text that is sampled goes on as it began only with its"
        raise ConfigurationError(f"{line} {called('seed')}; give it")
    return None


def check_form(written: Sequence[int], form: StructuredOutputsParams, pair: "Pair") -> None:
    """Raise ConfigurationError if these tokens are no beginning of a text of this form.

    Nothing is said of added tokens, which a grammar may name: the target finds out. Also raises
    BusyError.
    """
    grammars, tokenization = pair.grammars, pair.tokenization
    assert tokenization is not None, "there are grammars, so there is a tokenizer"
    said = list(map(tokenization.bytes_of, written))
    if None in said or not tokenization.raw.get_added_tokens_decoder().keys().isdisjoint(written):
        return
    grammars.refuse_unfitting(form, [one for one in said if one is not None])


def is_exact(pair: "Pair") -> bool:
    """True if a target of the pair, whichever it is, would write a text's tokens again as before.

    That holds for exact targets of the same digest, and on one device with --reproducible.
    """
    hellos = pair.service.registry.hellos(Role.TARGET)
    bits = {hello.bits for hello in hellos}
    return len(bits) == 1 and (pair.config.reproducible or "" not in bits)
