"""The Python API: `LLM`, with the names and signatures of vLLM.

An `LLM` owns two node processes. Its methods may be called from any number of threads at once;
programs with an event loop use `AsyncLLM`. The nodes generate up to `max_num_seqs` texts at once
and begin them in the order in which they were asked for; one call never has more texts open than
can be generated at once.
"""

import logging
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from coordinator.api import vllm as speculation
from coordinator.api.asking import Asking, Params, Prompt
from coordinator.api.chat import PromptForm
from coordinator.api.config import ALONE, PairConfig
from coordinator.api.config_base import named_as
from coordinator.api.conversations import Messages
from coordinator.api.outputs import RequestOutput
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.requests import Batch, Request, Step
from coordinator.api.vllm import (
    GENERATION,
    Bar,
    TargetTokenizer,
    UseTqdm,
    as_given,
    check_arguments,
    in_our_names,
    no_such_method,
    sampling_params_of,
)
from coordinator.api.vllm_metrics import Metric, Totals
from coordinator.api.without_effect import without_effect
from proto.errors import ClosedError, ConfigurationError, shown

logger = logging.getLogger(__name__)


class LLM:
    """A target and a drafter, loaded and warm. Close it, or use it as a context manager.

    model, drafter      folder or Hugging Face name; the drafter may be a head made for the model.
                        "auto" is what comes with the model (docs/heads.md).
                        Without any model: the embedded pair; without a drafter and a
                        speculative_config: plain decoding with the model alone
    target              another name for model
    revision            branch, tag or commit of the model
    speculative_config  a dict: "method" (draft_model; ngram: no draft model; medusa, eagle,
                        eagle3 or dflash: "model" is such a head; mtp: the layer in the target's
                        own checkpoint; or a policy), "model" and "revision" of the drafter,
                        "policy" (auto, sync, tree ... as `--policy`), "num_speculative_tokens",
                        "window", "adaptive", "rejection_sample_method" (coupled, standard, block);
                        for n-gram drafts "prompt_lookup_max", "prompt_lookup_min", "reference",
                        "remember" (earlier texts), and "also_ngram" for both kinds
    max_model_len       most tokens of prompt and answer; None: the model's own limit, or what the
                        memory holds
    generation_config   "auto": `generate` and `chat` without parameters take those in the model's
                        generation_config.json; "vllm" or None: our defaults
    settings            any other field of PairConfig: "dtype", "reproducible", "max_num_seqs",
                        "gpu_memory_utilization", "target_device", "drafter_home", "heads", ...

    Raises ConfigurationError, ModelError, IncompatibleError or NodeError, with a one-line message.
    """

    def __init__(
        self,
        model: str | None = None,
        drafter: str | None = None,
        *,
        target: str | None = None,
        revision: str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        generation_config: str | None = None,
        **settings: Any,
    ) -> None:
        if generation_config not in (None, "auto", "vllm"):
            raise ConfigurationError(
                f"{GENERATION}: expected auto or vllm, got {shown(generation_config)}"
            )
        wanted = speculation.read(speculative_config)
        if drafter is not None and wanted.model is not None:
            raise ConfigurationError(
                'the drafter is named twice: by drafter= and by speculative_config["model"]'
            )
        named = {
            "model": model,
            "target": target,
            "drafter": wanted.model if drafter is None else drafter,
            "revision": revision,
            "max_model_len": max_model_len,
        }
        given = {name: value for name, value in named.items() if value is not None}
        values = in_our_names({**given, **settings, **wanted.of_pair})
        config = named_as(PairConfig, as_given(given), **values)
        has_drafter = config.has_our_drafter or "drafter" in given or config.heads
        is_plain = speculative_config is None and not has_drafter
        self._speculation = ALONE if is_plain else wanted.settings
        self._speculation.check(config)
        wanted.check_kind(config)
        self.pair = Pair(config, with_drafter=self._speculation.drafts)
        for line in (*without_effect(config, self._speculation), *self.pair.notices()):
            logger.warning("%s", line)
        self.asking = Asking(self.pair, self._speculation)
        self.asking.warn = partial(logger.warning, "%s")
        if generation_config == "auto":
            self.asking.params = self.get_default_sampling_params()
        self._totals = Totals(config.target)
        self._close = weakref.finalize(self, self.pair.close)

    # -- blocking ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = False,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Generate texts for the prompts, up to `max_num_seqs` at once; return outputs in order.

        use_tqdm  show on stderr how many prompts are done; also a function that makes such a bar
        of_vllm   other arguments of vLLM's, such as lora_request: only their defaults are accepted

        A text that cannot be completed has the finish_reason "error", and `error` says why. Any
        other error ends all texts of this call and is raised: ConfigurationError, NodeError. So
        does Ctrl-C (KeyboardInterrupt), at once, however many texts are open; the nodes stay loaded
        and the LLM can be used again.
        """
        self._check_open()
        check_arguments("generate", of_vllm)
        return self._answers(self.asking.requests(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = False,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several by the target's chat template; return the outputs.

        chat_template  another template, or the name of one of the target's
        add_generation_prompt  end the prompt where the answer begins; None: unless the last message
                               is continued
        continue_final_message  continue the last message, in place of a new one
        tools          what the template is told that the answer may call, as in OpenAI's API
        chat_template_kwargs  further variables of the template, such as enable_thinking
        of_vllm        as for `generate`

        Raises ModelError if there is no usable template, and what `generate` raises.
        """
        self._check_open()
        check_arguments("chat", of_vllm)
        arguments = {} if chat_template_kwargs is None else chat_template_kwargs
        if tools is not None and isinstance(arguments, Mapping):
            arguments = {**arguments, "tools": tools}
        form = PromptForm(add_generation_prompt, continue_final_message, chat_template)
        requests = self.asking.chat_requests(
            messages, sampling_params, arguments=arguments, form=form
        )
        return self._answers(requests, use_tqdm)

    def _answers(self, requests: Sequence[Request], use_tqdm: UseTqdm) -> list[RequestOutput]:
        with (
            Bar(len(requests), use_tqdm) as bar,
            closing(Batch(self.pair, requests).steps()) as steps,
        ):
            for step in steps:
                self._saw(step)
                bar.show(step)
        return [request.whole() for request in requests]

    def _saw(self, step: Step) -> None:
        """Log what is wrong with a text, and count it at its end."""
        _warn(step)
        if step.is_last:
            self._totals.ended(step.part)

    def get_metrics(self) -> list[Metric]:
        """Return figures of all texts so far under vLLM's names: counters of tokens and drafts."""
        return self._totals.metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters in the model's generation_config.json, else our defaults.

        Raises ModelError, ConfigurationError.
        """
        config = self.pair.config
        return sampling_params_of(config.target, config.target_revision)

    def get_tokenizer(self, lora_request: None = None) -> TargetTokenizer:
        """Return the target's tokenizer. Raises ConfigurationError if it has none, ClosedError."""
        self._check_open()
        check_arguments("get_tokenizer", {"lora_request": lora_request})
        return TargetTokenizer(self.pair)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield what each target pass adds; the last part is `finished` and has the metrics.

        With `n` > 1 the parts of the texts are interleaved, and each has the `index` of its text.
        Leaving the loop early, or closing the generator, ends the texts on both nodes.

        Raises ConfigurationError, NodeError, ClosedError.
        """
        self._check_open()
        return self._parts(self.asking.request(prompt, sampling_params))

    def _parts(self, request: Request) -> Generator[RequestOutput, None, None]:
        self._check_open()
        with closing(Batch(self.pair, [request]).steps()) as steps:
            for step in steps:
                self._saw(step)
                yield step.part

    if not TYPE_CHECKING:  # a checker shall find a wrong name before the program runs

        def __getattr__(self, name: str) -> Any:
            """Say what to use in place of a method that is not here. Raises AttributeError."""
            raise no_such_method(name)

    # -- the pair ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ClosedError("this LLM was closed; make a new one")

    def close(self) -> None:
        """End both nodes and every text. May be called twice."""
        self._close()

    def __enter__(self) -> "LLM":
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._close.detach() is not None:
            self.pair.__exit__(kind, error, trace)


def _warn(step: Step) -> None:
    """Log a warning if a text could not be completed, so that it is not taken for a short one."""
    for made in step.part.outputs:
        if made.error is not None:
            logger.warning("a text could not be completed: %s", made.error)
