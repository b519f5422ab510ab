"""THE table of the flags that users of other programs type, and of what each means here.

The programs are vLLM, SGLang, llama.cpp, Hugging Face's `transformers` and ollama. A flag with an
equal here is read as ours (`OURS`), one that asks for what is done anyway is dropped (`DONE`), and
any other is answered in one line that says what to do here (`INSTEAD`). No help shows them. Pure.
"""

from collections.abc import Iterable, Mapping

from coordinator.api.params import MAX_TOKENS

# -- flags with an equal here ----------------------------------------------------------------------

PROMPT = "PROMPT"  # the argument of `generate`, in the place of a flag

# Our flag, or PROMPT: what other programs call it.
OURS: Mapping[str, tuple[str, ...]] = {
    "--target": (
        *("--model", "-m", "--model-path", "--model-id", "--model-name-or-path", "--force-model"),
        "--pretrained-model-name-or-path",
    ),
    "--target-revision": ("--revision", "--model-revision"),
    "--drafter": (
        *("--draft-model", "--assistant-model", "--speculative-model"),
        *("--speculative-draft-model-path", "--speculative-draft-model"),
        *("-md", "--model-draft", "--spec-draft-model"),
    ),
    "--drafter-revision": ("--speculative-draft-model-revision",),
    "--drafter-tensor-parallel-size": ("--speculative-draft-tensor-parallel-size",),
    "--target-device": ("--device", "-dev"),
    "--drafter-device": ("--device-draft", "-devd", "--spec-draft-device"),
    "--targets": ("--data-parallel-size", "-dp", "--dp", "--dp-size"),
    "--tensor-parallel-size": ("-tp", "--tp", "--tp-size"),
    "--dtype": ("--torch-dtype",),
    "--quantization": ("-q",),
    "--max-model-len": ("-c", "--ctx-size", "--context-length"),
    "--max-num-seqs": ("-np", "--parallel", "--max-running-requests"),
    "--gpu-memory-utilization": ("--mem-fraction-static",),
    "--reproducible": ("--enable-deterministic-inference",),
    "--speculative-config": ("-sc",),
    "--num-speculative-tokens": (
        *("--draft", "--draft-max", "--draft-n", "--spec-draft-n-max"),
        "--num-assistant-tokens",
    ),
    "--ngram-max": ("--ngram-prompt-lookup-max", "--prompt-lookup-max"),
    "--ngram-min": ("--ngram-prompt-lookup-min", "--prompt-lookup-min"),
    PROMPT: ("-p", "--prompt"),
    "--prompt-file": ("--prompts", "--texts"),  # our own former names
    "--max-tokens": ("-n", "--predict", "--n-predict", "--max-new-tokens"),
    "--temperature": ("--temp",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--seed": ("-s",),
    "--stop": ("-r", "--reverse-prompt"),
    "--json-schema": ("-jf", "--json-schema-file"),
    "--system": ("-sys", "--system-prompt"),
    "--verbose": ("-v",),
    "--served-model-name": ("-a", "--alias"),
    "--max-queue": ("--max-queued-requests",),
}
# Names of other programs: ours.
NAMES: Mapping[str, str] = {theirs: ours for ours, some in OURS.items() for theirs in some}

_OWN_QUANTISATION = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "mxfp4"),
    "auto",
)
# Values that are written otherwise here, by the flag as it was typed: our words in their place.
VALUES: Mapping[tuple[str, str], tuple[str, ...]] = {
    **{(name, "half"): ("--dtype", "float16") for name in ("--dtype", "--torch-dtype")},
    **{(name, "float"): ("--dtype", "float32") for name in ("--dtype", "--torch-dtype")},
    **{(name, "auto"): () for name in ("--device", "-dev", "--max-model-len")},
    **{(name, "cuda"): ("--target-device", "cuda:0") for name in ("--device", "-dev")},
    # As many as the target takes.
    **{(name, "-1"): ("--max-tokens", str(MAX_TOKENS)) for name in OURS["--max-tokens"]},
    **{(name, "0"): () for name in ("-c", "--ctx-size")},  # the model's own limit
    **{(name, "-1"): () for name in ("--max-model-len", "-np", "--parallel")},
    # What the checkpoint is anyway: its files say so.
    **{(name, one): () for name in ("--quantization", "-q") for one in _OWN_QUANTISATION},
}

# -- flags that need no equal ----------------------------------------------------------------------

# Flags without a value that ask for what is done anyway.
DONE = (
    *("--jinja", "--enable-auto-tool-choice", "-cb", "--cont-batching", "--continuous-batching"),
    *("--disable-log-requests", "--no-enable-log-requests", "--no-display-prompt"),
    *("--simple-io", "--metrics", "--enable-metrics", "--perf"),
    *("--kv-offload", "--enable-prompt-tokens-details", "--cache-prompt"),
)
# And those that ask for what one command does anyway.
DONE_BY: Mapping[str, tuple[str, ...]] = {
    "generate": ("-no-cnv", "--no-conversation"),
    "chat": ("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"),
}
# Flags without a value that mean this here.
SWITCHES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("--enforce-eager", "--disable-cuda-graph"), ("--backend", "fused")),
}
# Flags that mean this here with one of these values (in lower case; "": without a value), in our
# words; () is nothing at all.
BY_VALUE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # The files of a drafter tell whether it is a head, and of which kind.
    "--speculative-algorithm": {
        **dict.fromkeys(("eagle", "eagle3", "standalone"), ()),
        "ngram": ("--drafter", "ngram"),
    },
    "--spec-type": {
        **dict.fromkeys(("draft", "draft-simple", "draft-eagle3"), ()),
        **dict.fromkeys(("ngram", "ngram-simple", "ngram-cache"), ("--drafter", "ngram")),
        "none": ("--policy", "ar"),
    },
    **dict.fromkeys(("--flash-attn", "-fa"), dict.fromkeys(("on", "auto", "1", ""), ())),
    "--generation-config": {"vllm": ()},
    **dict.fromkeys(("--color", "-co"), dict.fromkeys(("on", "auto", ""), ())),
    "--nnodes": {"1": ()},
}

# -- flags without an equal ------------------------------------------------------------------------

_MEMORY = "--max-model-len, --max-num-seqs and --gpu-memory-utilization say what memory is for"
_PARTS = "prompts are read in parts whose size is chosen here; leave it out"
_GGUF = (
    "a GGUF file is downloaded first: --target FILE.gguf; from the hub --target NAME takes a model "
    "with safetensors"
)
_DIVIDED = "--target-device cuda:0-3 or --tensor-parallel-size 4 divides a model among GPUs"
_WHOLE = (
    "a model is on its device as a whole; --target-device and --drafter-device say on which, "
    "such as cuda:0 or cpu"
)
_SAMPLERS = "there is no such sampler; --temperature, --top-k, --top-p and --min-p choose tokens"
_ADAPTERS = "adapters are not loaded; merge yours into its model and give that folder as --target"
_THINKING = "the template switches thoughts: `{} chat --chat-template-kwargs JSON`"
_BACKEND = "--backend says which forward pass runs the models; its attention cannot be chosen"
_TLS = "the server speaks plain HTTP; a reverse proxy in front of it adds TLS"
_IMAGES = "only the language model of a model of several modalities is loaded; leave it out"

# What to do in the place of each flag. {} is the program as it was called.
INSTEAD: Mapping[str, str] = {
    name: line
    for line, names in {
        _WHOLE: (
            *("-ngl", "--gpu-layers", "--n-gpu-layers", "-ngld", "--gpu-layers-draft"),
            *("--n-gpu-layers-draft", "--spec-draft-ngl", "--cpu-moe", "-cmoe", "--n-cpu-moe"),
            *("-ncmoe", "--override-tensor", "-ot", "--device-map", "--num-gpu", "-nkvo"),
        ),
        _DIVIDED: ("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"),
        _GGUF: (
            *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url", "-dr"),
            *("--docker-repo", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"),
        ),
        "--target-device cpu:0-7 says which cores the target uses, one thread each": (
            *("-t", "--threads", "-tb", "--threads-batch", "-td", "--threads-draft"),
            *("--cpu-mask", "--cpu-range", "-C", "-Cr"),
        ),
        _PARTS: (
            *("-b", "--batch-size", "-ub", "--ubatch-size", "--max-num-batched-tokens"),
            *("--chunked-prefill-size", "--max-prefill-tokens", "--cb-max-batch-tokens"),
        ),
        _MEMORY: (
            *("--max-total-tokens", "--num-gpu-blocks-override", "--block-size", "--page-size"),
            *("--cb-block-size", "--cb-num-blocks", "--cb-max-memory-percent"),
            *("--kv-cache-memory-bytes", "--fit", "-fit", "--cache-ram", "-cram"),
        ),
        "weights are read as the device needs it; leave it out": (
            *("--mlock", "--no-mmap", "--load-mode", "-lm", "--numa", "--no-warmup"),
        ),
        "the cache has the number type of the model": (
            *("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
        ),
        "`{} chat` holds a conversation; `{} generate --chat` answers one prompt": (
            *("-cnv", "--conversation", "-i", "--interactive", "-st", "--single-turn"),
        ),
        "`- < FILE` continues the whole file; --prompt-file FILE continues each of its lines": (
            *("-f", "--file"),
        ),
        '--prompt-file FILE takes one prompt in each line, or JSON Lines with "prompt"': (
            *("--input-file", "--dataset-path", "--dataset-name"),
        ),
        "write `> FILE` behind the command; the text alone goes to standard output": (
            *("-o", "--output", "--output-file"),
        ),
        "the template is the target's own; put another into its folder as chat_template.jinja": (
            *("--chat-template", "--chat-template-file"),
        ),
        "`{} generate` has --regex PATTERN and --json-schema FILE; requests carry grammars, too": (
            *("--grammar", "--grammar-file", "--format", "-j"),
        ),
        _SAMPLERS: (
            *("--mirostat", "--mirostat-lr", "--mirostat-ent", "--typical", "--typical-p"),
            *("--xtc-probability", "--xtc-threshold", "--dry-multiplier", "--top-n-sigma"),
            *("--top-nsigma", "--samplers", "--dynatemp-range", "--num-beams", "--beam-size"),
        ),
        "--repetition-penalty counts all tokens of prompt and answer": ("--repeat-last-n",),
        "the target's own choices decide which drafts stay; leave it out": (
            *("--draft-min", "--draft-n-min", "--spec-draft-n-min", "--draft-p-min"),
            *("--spec-draft-p-min", "--speculative-accept-threshold-single"),
            "--speculative-accept-threshold-acc",
        ),
        "--num-speculative-tokens says how many drafts a pass verifies at most": (
            "--speculative-num-draft-tokens",
        ),
        "--window says how far the drafter runs ahead": ("--speculative-num-steps",),
        "--policy-option branches=N says how many continuations are drafted of one token": (
            "--speculative-eagle-topk",
        ),
        "--drafter ngram drafts by copying from the text; --num-speculative-tokens says how much": (
            "--prompt-lookup-num-tokens",
        ),
        "--tensor-parallel-size shares a model among GPUs": ("-pp", "--pp", "--pp-size"),
        "several hosts are joined with --ray or --nodes remote (docs/cluster.md)": (
            *("--nnodes", "--node-rank", "--dist-init-addr", "--rpc"),
            "--distributed-executor-backend",
        ),
        _ADAPTERS: (
            *("--lora", "--lora-scaled", "--enable-lora", "--lora-modules", "--lora-paths"),
            "--max-lora-rank",
        ),
        _IMAGES: (
            *("-mm", "--mmproj", "-mmu", "--mmproj-url", "--no-mmproj", "--image"),
            *("--limit-mm-per-prompt", "--mm-processor-kwargs", "--enable-multimodal"),
        ),
        _BACKEND: ("--attention-backend", "--attn-implementation", "--flash-attn", "-fa"),
        "--temperature above 0 samples": ("--do-sample",),
        "each request carries its own; the command `{} chat` has this flag": (
            "--chat-template-kwargs",
        ),
        "--drafter NAME takes a model or a head, --drafter ngram copies from the text": (
            *("--speculative-algorithm", "--spec-type"),
        ),
        "colours are used on a terminal; NO_COLOR=1 switches them off": ("--color", "-co"),
        "leave it out: GPUs run CUDA graphs anyway, and CPUs C++ of ours": (
            *("--compile", "--enable-torch-compile", "--compilation-config", "-O"),
        ),
        "the target's template says how it writes calls; leave it out": ("--tool-call-parser",),
        "--reasoning-parser NAME says how the target marks its thoughts": (
            *("--reasoning-format", "--enable-reasoning"),
        ),
        _THINKING: (
            *("--reasoning", "-rea", "--reasoning-budget", "--think", "--hidethinking"),
            "--reasoning-effort",
        ),
        "--allow-origin ORIGIN lets web pages in; may be given several times": (
            *("--allowed-origins", "--cors-origins", "--enable-cors"),
        ),
        _TLS: ("--ssl-keyfile", "--ssl-certfile", "--ssl-key-file", "--ssl-cert-file"),
        "settings are flags here; there is no file of them": ("--config",),
        "`{} status` shows where the logs are": (
            *("--log-level", "--uvicorn-log-level", "--log-file", "--log-disable"),
        ),
        "the models stay loaded until the command ends": ("--keepalive", "--model-timeout"),
        "the models are loaded by this command; a server is asked by a client of OpenAI's API": (
            *("--url", "--server-base"),
        ),
        "the shell makes line breaks: $'first\\nsecond'": ("-e", "--escape"),
        "the target's generation_config.json is not read by this command; give each as a flag": (
            "--override-generation-config",
        ),
        "texts are generated, and nothing else": (
            *("--embedding", "--embeddings", "--rerank", "--reranking", "--pooling", "--task"),
            *("--is-embedding", "--runner"),
        ),
        "config.json of the model says it; leave it out": ("--model-type", "--model-impl"),
        "leave it out": ("--rope-scaling", "--rope-scale", "--rope-freq-base", "--hf-overrides"),
    }.items()
    for name in names
}

# The same for a prompt, where a command takes none.
NO_PROMPT: Mapping[str, str] = {
    "chat": "messages come from the terminal or a pipe; --system TEXT is the system message",
    "serve": "clients send prompts; `{} generate TEXT` continues one here",
}

# -- commands --------------------------------------------------------------------------------------

# Commands of other programs, and what to type here. {} is the program as it was called.
COMMANDS: Mapping[str, str] = {
    name: line
    for line, names in {
        "`{} chat --target MODEL` talks to a model, `{} generate --target MODEL TEXT` continues a "
        "text": ("run", "cli", "llama-cli"),
        "`{} serve --target MODEL` starts a server": (
            *("server", "llama-server", "launch_server", "api_server", "launch"),
        ),
        "`{} generate --target MODEL TEXT` continues a text": ("complete", "completion", "predict"),
        "a model is downloaded on its first use: `{} chat --target NAME`": (
            "pull",
            "download",
        ),
        "models are folders, or names on the Hugging Face hub; `hf cache ls` lists those that were "
        "downloaded": ("list", "ls", "show", "rm", "create", "cp", "push"),
        "`{} status` shows what runs": ("ps",),
        "Ctrl-C ends a command with its models; `{} status` shows what runs": ("stop",),
        "`{} generate --prompt-file FILE --json` answers many prompts": ("run-batch",),
        "`{} measure` and `{} experiment` measure": ("bench", "benchmark"),
        "`{} --version` prints the version": ("version", "env"),
    }.items()
    for name in names
}


def every_name() -> Iterable[str]:
    """Yield every flag of another program in the table."""
    yield from (*NAMES, *DONE, *SWITCHES, *BY_VALUE, *INSTEAD)
