"""The longest text that a target can take, and the messages where memory allows less."""

from collections.abc import Sequence

from coordinator.api.config import PairConfig
from coordinator.api.config_base import called
from coordinator.api.models.folders import limited, text_part
from coordinator.api.models.heads import find_config, read
from coordinator.api.params import MAX_TOKENS, SamplingParams
from proto.messages import MAX_TEXT_LEN, Hello

# Names in config.json.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "model_max_length")


def longest_of(model: str, revision: str | None, asked: int = MAX_TEXT_LEN) -> int | None:
    """Return the most tokens that a model takes, by its config.json; None: not known.

    The limit that the node reports after loading is the one that counts
    (`engine.checkpoint.model.max_model_len`).

    asked  maximum length of a text that is asked for: some models take long texts only then
    """
    path = find_config(model, revision)
    config = {} if path is None else read(path)
    text = text_part(config)
    lengths = [text[name] for name in LENGTHS if type(text.get(name)) is int]
    if not lengths:
        return None
    return limited(config, min(*lengths, MAX_TEXT_LEN), asked)


def too_long(config: PairConfig, num_tokens: int, max_len: int, *, has_heads: bool = False) -> str:
    """Return the message for a prompt that is too long: the limit, and what to do about it.

    num_tokens  tokens of the prompt
    max_len     most tokens of a text, with the answer
    has_heads   heads run in the target's process
    """
    own = longest_of(config.target, config.target_revision)
    if own is not None and num_tokens >= own:
        return f"the model itself takes {own} at most, with the answer; shorten it"
    more = how_longer(config, max_len, has_heads=has_heads)
    return f"texts have {max_len} at most here, with the answer; shorten it" + (
        f", or {more}" if more else ""
    )


def how_longer(config: PairConfig, max_len: int, *, has_heads: bool = False) -> str:
    """Return advice on how to allow longer texts; "" if the model itself takes no more."""
    own = longest_of(config.target, config.target_revision)
    if own is not None and max_len >= own:
        return ""
    most = "" if own is None else f" (the model takes {own})"
    is_usual = max_len == longest_of(config.target, config.target_revision, 0)
    if config.max_model_len is not None or config.reproducible or is_usual:
        return f"raise --max-model-len{most}"
    if has_heads:
        return "leave out the heads in the target's process, which take no more"
    # The user did not set this limit: the usual share of the memory holds no more.
    return f"ask for more with --max-model-len{most}"


def _or_more(config: PairConfig) -> str:
    """Return " or a higher ..." of the setting that has limited the memory; "": none has."""
    limits = config.gpu_memory_utilization is not None and config.gpu_memory_utilization < 1
    return " or a higher --gpu-memory-utilization" if limits else ""


def cut_answers(
    params: SamplingParams, max_len: int, nums_prompt: Sequence[int], advice: str = ""
) -> list[str]:
    """Return a line if answers cannot become as long as the parameters ask for, else [].

    max_len      most tokens of a text and its prompt
    nums_prompt  numbers of tokens of the prompts
    advice       how texts can be longer (`how_longer`)
    """
    asked = params.max_tokens
    # The default, and "as many as fit", ask for no length.
    if asked in (SamplingParams.model_fields["max_tokens"].default, MAX_TOKENS):
        return []
    rooms = [max_len - num for num in nums_prompt if max_len - num < asked]
    if not rooms:
        return []
    which = "" if len(nums_prompt) == 1 else f" after {len(rooms)} of {len(nums_prompt)} prompts"
    line = (
        f"{called('max_tokens')} {asked} is more than fits{which}: prompt and answer have "
        f"{max_len} tokens together, so an answer ends after {min(rooms)} at the latest"
    )
    return [f"{line}; {advice}" if advice else line]


def not_smaller(target: Hello, drafters: Sequence[Hello]) -> list[str]:
    """Return a line if a drafter is no smaller than its target, so that drafts save no time."""
    models = [one for one in drafters if not (one.layers or one.simulated_us)]  # no heads
    largest = max((one.num_parameters for one in models), default=0)
    if largest < target.num_parameters or target.simulated_us or not models:
        return []
    sizes = _millions(largest), _millions(target.num_parameters)
    return [
        f"the drafter ({sizes[0]} parameters) is not smaller than the target ({sizes[1]}): a draft "
        "takes as long as a token of the target, so drafts save no time; are the two exchanged?"
    ]


def _millions(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def shortened(config: PairConfig, target: Hello, drafters: Sequence[Hello]) -> list[str]:
    """Return a line for each limit that the user did not set: on texts, and on drafts."""
    longest, lines = target.max_model_len, []
    if (num_seqs := target.num_lanes) < config.num_seqs and not target.has_heads:
        lines.append(
            f"{num_seqs} texts of {longest} tokens are written at once, not {config.num_seqs}: "
            f"there is no memory for more; a lower --max-model-len{_or_more(config)} makes room"
        )
    if config.max_model_len is not None:
        return lines
    limit = longest_of(config.target, config.target_revision)
    usual = longest_of(config.target, config.target_revision, 0)
    if usual is not None and limit is not None and longest == usual < limit:
        lines.append(
            f"texts have at most {longest} tokens: their rope factors are for short ones; "
            f"--max-model-len allows {limit}"
        )
    elif limit is not None and longest < limit and not config.reproducible:
        why = "" if target.has_heads else ": there is no memory for more"
        lines.append(
            f"texts have at most {longest} tokens, of the {limit} that the target can take"
            f"{why}; --max-model-len says how many there should be"
        )
    shortest = min((drafter.max_model_len for drafter in drafters), default=longest)
    if shortest < longest:
        lines.append(f"the drafter drafts up to token {shortest}")
    return lines
