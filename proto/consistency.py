"""Rules between the fields of one message: the encoder and the decoder both ask."""

from itertools import pairwise

from proto import messages as m


def check(message: m.Message) -> None:
    """Rules between fields. Raises ValueError."""
    match message:
        case m.Draft():
            count = len(message.tokens)
            if len(message.parents) != count or len(message.scores) != count:
                raise ValueError("tokens, parents and scores differ in length")
            if any(parent >= index for index, parent in enumerate(message.parents)):
                raise ValueError("a parent must come before its child")
            if message.first_number > message.number:
                raise ValueError("first_number is above number")
            if message.source in m.OWN_SOURCES:
                raise ValueError("what the target drafts by itself does not travel")
            _check_proposals(message)
        case m.Verdict():
            if message.num_accepted > message.num_drafted:
                raise ValueError("more tokens accepted than drafted")
            if len(message.rejected) > message.num_drafted - message.num_accepted:
                raise ValueError("more tokens rejected than drafted")
            if len(message.sources) not in (0, message.num_accepted):
                raise ValueError("not every accepted token has a source")
            if message.base_len + len(message.tokens) > m.MAX_TEXT_LEN:
                raise ValueError("the text is too long")
            if message.logprobs is not None:
                _check_rows(message.logprobs, len(message.tokens))
        case m.Features():
            if message.num_rows >= message.end_len:
                raise ValueError("the first token has no feature before it")
            if len(message.data) % message.num_rows:
                raise ValueError("the features differ in length")
        case m.PromptLogprobs():
            if message.start < 1:
                raise ValueError("the first token has no logprob")
            _check_rows(message.logprobs, len(message.logprobs))
        case m.Open():
            if len(message.sampling.bias_ids) != len(message.sampling.bias_values):
                raise ValueError("bias_ids and bias_values differ in length")
            if not 1 <= message.num_prompt <= len(message.tokens):
                raise ValueError("num_prompt must be in 1..number of tokens")
            if len(message.tokens) >= message.limits.max_len:
                raise ValueError("a text of its greatest length is not opened")
            if message.sampling.is_greedy and message.rule is not m.Rule.COUPLED:
                raise ValueError("a greedy text has no ratio to judge drafts by")
            if message.rule is not m.Rule.COUPLED and message.policy.branches > 1:
                raise ValueError("a tree needs coupled verification")
            lookup = message.lookup
            if lookup is not None and lookup.ngram_min > lookup.ngram_max:
                raise ValueError("ngram_min is above ngram_max")
            if lookup is not None and lookup.remember and message.rule is not m.Rule.COUPLED:
                raise ValueError("copies of earlier texts need coupled verification")
        case _:
            pass


def _check_proposals(draft: m.Draft) -> None:
    """A token that was sampled from its proposal has a chance in it. Raises ValueError."""
    if not draft.proposals:
        return
    if len(draft.proposals) != len(draft.tokens):
        raise ValueError("tokens and proposals differ in number")
    for token, proposal in zip(draft.tokens, draft.proposals, strict=True):
        if len(proposal.ids) != len(proposal.probs):
            raise ValueError("ids and probabilities of a proposal differ in number")
        if any(one >= other for one, other in pairwise(proposal.ids)):
            raise ValueError("the ids of a proposal must ascend")
        if dict(zip(proposal.ids, proposal.probs, strict=True)).get(token, 0.0) <= 0.0:
            raise ValueError("a token has no chance in its own proposal")


def _check_rows(logprobs: m.Logprobs, num_rows: int) -> None:
    """Raises ValueError unless there are so many rows of equal width."""
    width = logprobs.width
    is_even = len(logprobs.ids) == len(logprobs.values) == num_rows * width
    if len(logprobs) != num_rows or not is_even or (num_rows and width > 1 + m.MAX_LOGPROBS):
        raise ValueError("ids, values and ranks of the logprobs do not fit each other")
