"""Says which settings do nothing, or count as another value, in the combination that was given.

Nothing here refuses anything: a text is written all the same, and a line says what was not heeded.
A setting counts as given if its value is not the default.
"""

from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from coordinator.api.config import NGRAM, PairConfig, SpeculationConfig
from coordinator.api.config_base import called
from coordinator.api.models.named import DEFAULT, drafter_of, heads_of
from coordinator.api.params import SamplingParams
from proto.messages import GREEDY_BELOW, Hello, Policy, Role
from proto.policies import POLICIES

# Settings that mean something only if anything is drafted.
OF_DRAFTS = (
    *("num_speculative_tokens", "window", "policy_option", "adaptive", "verify"),
    *("also_ngram", "ngram_max", "ngram_min", "remember"),
)
# Of the pair: settings that mean something only if a drafter has a process of its own.
OF_THE_DRAFTER = (
    *("drafters", "drafter_device", "drafter_tensor_parallel_size", "drafter_restarts"),
    *("max_draft_candidates", "require_same_tokenizer"),
)
# Those that a drafter in the target's process has as well.
OF_DRAFT_STEPS = ("drafter_dtype", "simulate_draft_ms", "simulate_draft_ms_per_row")
OF_MODELS = (
    *("drafter", "drafter_revision", "drafter_home", "heads", "heads_revision"),
    "drafter_quantization",
)
OF_COPIES = ("ngram_max", "ngram_min")
OF_LUCK = ("top_k", "top_p", "min_p")
OF_TREES = ("branches", "width", "detours", "subtree")
PRICES = {"prices_rows", "prices_waits", "prices_awaited", "rest_after"}


def without_effect(
    pair: PairConfig,
    speculation: SpeculationConfig,
    params: SamplingParams | None = None,
    *,
    is_remote: bool = False,
) -> list[str]:
    """Return a line for each reason why settings that were given are not heeded.

    params     of all texts that will be asked for; None: they are not known
    is_remote  the nodes are started by hand
    """
    lines = [] if params is None else of_params(params)
    if is_remote:
        lines += _line(
            _given(pair, ["target_restarts", "drafter_restarts"]), "nodes are started by hand"
        )
    if pair.link_seed and not pair.link:
        lines += _line(_given(pair, ["link_seed"]), f"there is no {called('link')}")
    if not speculation.drafts:
        names = (*OF_MODELS, *OF_THE_DRAFTER, *OF_DRAFT_STEPS)
        given = [*_given(speculation, OF_DRAFTS), *_given(pair, names)]
        return lines + _line(given, f"nothing is drafted ({called('policy')} {speculation.policy})")
    lines += _without_a_drafter(pair, speculation)
    if not speculation.uses_ngrams(pair):
        why = f"nothing is copied; {called('also_ngram')} or {called('drafter')} {NGRAM} does that"
        lines += _line(_given(speculation, OF_COPIES), why)
    return lines + _of_policy(pair, speculation)


def of_params(params: SamplingParams) -> list[str]:
    """Return a line if sampling parameters are not heeded, else []."""
    if params.temperature >= GREEDY_BELOW:
        return []
    why = f"at {called('temperature')} 0 the likeliest token is taken; raise it to sample"
    return _line(_given(params, OF_LUCK), why)


def of_devices(pair: PairConfig, target: Hello, drafters: Sequence[Hello]) -> list[str]:
    """Return a line for each setting that is for CPUs, of a model that runs on a GPU.

    These are a placement among cores, and the rounding of a head: there it is not rounded.
    """
    lines = []
    if not target.device.startswith("cpu"):
        lines = _line(_given(pair, ["placement"]), f"the target runs on {target.device}")
    if not pair.drafter_is_head and not pair.heads:
        return lines
    whose = [target] if pair.home_drafter else drafters
    elsewhere = next((one.device for one in whose if not one.device.startswith("cpu")), None)
    if elsewhere is not None:
        lines += _line(_given(pair, ["drafter_quantization"]), f"the head runs on {elsewhere}")
    return lines


def _without_a_drafter(pair: PairConfig, speculation: SpeculationConfig) -> list[str]:
    """Return the lines about settings of a drafter's process, if there is none."""
    if pair.has_draft_process:
        return []
    is_ngram = pair.drafter == NGRAM
    names = [*OF_THE_DRAFTER, *(() if pair.home_drafter else OF_DRAFT_STEPS)]
    given = [*_given(pair, names), *_given(speculation, ["window"])]
    if Role.DRAFTER in pair.links:
        given.append(called("link"))
    what = f"the drafter {NGRAM} is no model" if is_ngram else "the drafter runs in it"
    return _line(given, f"nothing runs beside the target's process: {what}")


def _of_policy(pair: PairConfig, speculation: SpeculationConfig) -> list[str]:
    """Return the lines about settings that the policy or the rule does not heed."""
    row, policy = POLICIES[speculation.policy], speculation.make(pair)
    name = f"{called('policy')} {row.name}"
    lines, options = [], speculation.policy_option
    if speculation.window is not None and pair.has_draft_process:
        lines += _window(speculation.window, policy, name, runs_ahead=row.runs_ahead)
    if not (speculation.adaptive or row.is_adaptive or PRICES & options.keys()):
        lines += _line(_given(speculation, ["adaptive"]), f"{name} weighs no measured costs")
    if speculation.verify == "coupled":
        why = f"only {called('verify')} token and block use it"
        return lines + _line(_given(pair, ["max_draft_candidates"]), why) + _cut(options, policy)
    trees = [option for option in OF_TREES if option in options]
    is_chosen = row.is_tree and speculation.policy != SpeculationConfig().policy
    if is_chosen or trees:
        what = f"{called('policy_option')} {', '.join(trees)}" if trees else name
        lines.append(
            f"a chain is drafted and no tree, in spite of {what}: {called('verify')} "
            f"{speculation.verify} can judge a chain only"
        )
    return lines + _cut(options, policy)


def _window(window: int, policy: Policy, name: str, *, runs_ahead: bool) -> list[str]:
    if not runs_ahead:
        return _line([called("window")], f"under {name} the drafter waits for each verdict")
    if window >= policy.window:
        return []
    return [
        f"{called('window')} {window} counts as {policy.window}: it is never below "
        f"{called('num_speculative_tokens')}"
    ]


def _cut(options: Mapping[str, float], policy: Policy) -> list[str]:
    """Return a line for each option of the policy that counts as a lower number."""
    most = policy.num_speculative_tokens
    return [
        f"{called('policy_option')} {name}={options[name]:g} counts as {most}: no pass has more "
        f"drafts ({called('num_speculative_tokens')})"
        for name in ("launch_min", "launch_accepted")
        if options.get(name, 0) > most
    ]


def _given(config: BaseModel, names: Iterable[str]) -> list[str]:
    """Return those of the settings that are not the default, as whoever gave them calls them."""
    found = []
    for name in names:
        if name == "drafter" and isinstance(config, PairConfig) and config.found_drafter:
            continue
        value = getattr(config, name)
        default = type(config).model_fields[name].get_default(call_default_factory=True)
        if default == DEFAULT and isinstance(config, PairConfig):
            of_target = heads_of if name == "heads" else drafter_of
            default = of_target(DEFAULT, config.target)
        if name == "heads" and not value:  # whoever names a drafter has none
            continue
        if value != default:
            found.append(called(name, is_off=value is False))
    return found


def _line(given: list[str], why: str) -> list[str]:
    """Return the line that these settings do nothing; [] if none was given."""
    if not given:
        return []
    return [f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {why}"]
