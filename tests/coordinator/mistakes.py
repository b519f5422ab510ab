"""The mistakes of a newcomer as command lines, each with the line that it gets, or how that begins.

`~` stands for the folder of `mistaken.make_all`, {free} and {taken} for ports, {root} for that of
the experiments that ship.
"""

from proto.installation import MODELS

DRAFTER = ["--drafter", "~/sound"]
ALONE = ["--policy", "ar"]
POLICIES = "auto, ar, sync, pearl, amusd, pipelined, ssd, tree"
PLAN = ["plan", "--target-ms", "30", "--draft-ms", "2", "--trace"]
GET = "get it again"
FULL = "use a model with plain full attention"
HEAD = "use a head made for this target"
UP = "bring one up (docs/cluster.md), or leave --ray out: then both processes run on this machine"
KEYS = "make keys with `python -m coordinator keys new DIR`"
NAME = "choose a drafter with the target's tokenizer: --drafter NAME, or --drafter ngram (no model)"

GENERATE: list[tuple[list[str], str]] = [
    # What is asked for
    ([], "give either PROMPT, --prompt-file or --prompt-ids"),
    (
        ["Once", "upon", "a", "time"],
        "too many arguments: upon a time; a text of several words needs quotes around it",
    ),
    ([""], "the prompt is empty: give at least one token"),
    (["--prompt-ids", "one"], "--prompt-ids: expected numbers like 1,2,3, got 'one'"),
    (["--prompt-ids", "5,70000"], "prompt ids must lie in 0..4095"),
    (
        ["--prompt-ids", ",".join(["5"] * 3000)],
        "the prompt has 3000 tokens, but the model itself takes 2048 at most, with the answer; "
        "shorten it\n",
    ),
    (
        ["--prompt-ids", ",".join(["5"] * 300), "--max-model-len", "200"],
        "the prompt has 300 tokens, but texts have 200 at most here, with the answer; shorten it, "
        "or raise --max-model-len (the model takes 2048)\n",
    ),
    (
        ["--prompt-ids", ",".join(["5"] * 300), "--max-model-len", "200", "--target", "~/nowhere"],
        "~/nowhere: no such folder",
    ),
    (["--prompt-file", "~/none.txt"], "cannot read ~/none.txt: No such file or directory"),
    (["--prompt-file", "~"], "cannot read ~: Is a directory; give a file"),
    (["--prompt-file", "~/empty.txt/x"], "cannot read ~/empty.txt/x: Not a directory; a part of"),
    (["--prompt-file", "~/empty.txt"], "~/empty.txt has no prompts: every line is empty"),
    (
        ["--prompt-file", "~/prompts.jsonl"],
        "~/prompts.jsonl, line 2: not JSON (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1))",
    ),
    (["--prompt-file", "~/text.jsonl"], '~/text.jsonl, line 1: expected an object with a "prompt"'),
    (["--prompt-file", "~/latin.txt"], "~/latin.txt is not UTF-8 (byte 3)"),
    (["a", "--chat", "--target", "~/no-template", *DRAFTER], "the chat template of"),
    (["a", "--reference", "~/none.txt", "--also-ngram"], "cannot read ~/none.txt: No such file"),
    # Numbers and words
    (["a", "--polcy", "auto"], "there is no option --polcy; did you mean --policy?"),
    (["a", "--max-token=5"], "there is no option --max-token; did you mean --max-tokens?"),
    (
        ["a", "--wibble"],
        "there is no option --wibble; `python -m coordinator generate --help-all` lists them",
    ),
    (
        ["a", "--policy", "pipeline"],
        f"--policy: expected one of {POLICIES}, got 'pipeline'; did you mean pipelined?",
    ),
    (
        ["a", "--dtype", "bf16"],
        "--dtype: expected one of auto, float32, bfloat16, float16, got 'bf16'; did you mean "
        "bfloat16?",
    ),
    (
        ["a", "--max-tokens", "0"],
        "--max-tokens: expected at least 1, got 0",
    ),
    (["a", "--max-tokens", "many"], "--max-tokens: expected a whole number, got 'many'"),
    (["a", "--max-tokens", "1.5"], "--max-tokens: expected a whole number, got '1.5'"),
    (["a", "--temperature", "hot"], "--temperature: expected a number, got 'hot'"),
    (["a", "--temperature", "nan"], "--temperature: expected a finite number, got nan"),
    (["a", "--max-tokens"], "--max-tokens needs a value; --help-all says which"),
    (["a", "--modes", "a/b"], "there is no option --modes; did you mean --target?"),
    (["a", "--json=5"], "--json has no value; write it alone"),
    (
        ["a", "--backend", "fusd"],
        "--backend: expected one of auto, fused, graphs, reference, got 'fusd'; did you "
        "mean fused?",
    ),
    (
        ["a", "--backend", "compiled"],
        "--backend: compiled is gone, because fused is as fast on CPUs; leave it out\n",
    ),
    (
        ["a", "--verify", "cuopled"],
        "--verify: expected one of coupled, token, block, got 'cuopled'; did you mean coupled?",
    ),
    (
        ["a", "--drafter-dtype", "fast"],
        "--drafter-dtype: expected one of auto, float32, bfloat16, float16, fastest, got 'fast'; "
        "did you mean fastest?",
    ),
    (
        ["a", "--nodes", "remot"],
        "--nodes: expected one of local, remote, got 'remot'; did you mean remote?",
    ),
    (
        ["a", "--drafter-home", "traget"],
        "--drafter-home: expected one of own, target, got 'traget'; did you mean target?",
    ),
    (
        ["a", "--temperature", "-1"],
        "--temperature: expected at least 0, got",
    ),
    (["a", "--top-p", "1.5"], "--top-p: expected at most 1, got 1.5"),
    (["a", "--max-model-len", "0"], "--max-model-len: expected at least 2"),
    (["a", "--n", "3"], "--n is 3, but at temperature 0 all texts are the same; raise the"),
    (["a", "--logprobs", "2"], "--logprobs and --prompt-logprobs are shown with --json"),
    (["a", "--stop-token-ids", "70000"], "--stop-token-ids: token ids must lie in 0..4095"),
    (
        ["a", "--min-tokens", "9", "--max-tokens", "4"],
        "--min-tokens is 9; it must be at most --max",
    ),
    (["a", "--ngram-min", "5"], "--ngram-min is 5, which is above --ngram-max, 4\n"),
    (["a", "--reference", "~/text.jsonl"], "--reference is a text for n-gram drafts; choose the"),
    (["a", "--remember", "--verify", "token"], "--remember needs coupled verification, not token:"),
    (["a", "--bad-words", "x" * 300], "--bad-words: expected at most 256 characters, got"),
    (["a", "--regex", ""], "--regex is empty; leave it out\n"),
    (["a", "--regex", "x" * 70_000], "--regex has 70000 characters; make it shorter than 65536\n"),
    (
        ["a", "--regex", "x", "--json-schema", "~/text.jsonl"],
        "an answer has one form: give --json-schema or --regex\n",
    ),
    (
        ["a", "--min-tokens", "2", "--regex", "x"],
        "--min-tokens does not go with --regex, which says where the text may end\n",
    ),
    (
        ["a", "--reproducible", "--num-speculative-tokens", "20"],
        "--num-speculative-tokens is 20; with --reproducible it must be below 16, the rows of",
    ),
    (
        ["a", "--policy-option", "widht=4"],
        "--policy-option: there is no 'widht'; there are launch_min, launch_accepted, group, "
        "width, branches, detours, subtree, min_score, prices_rows, prices_waits, prices_awaited, "
        "rest_after; did you mean width?",
    ),
    (["a", "--link", "drafter:delay=5"], "--link:"),
    (["a", "--link", "darfter:delay=5ms"], "--link: "),
    # Models
    *(
        (
            ["a", "--target", str(MODELS / name)],
            f"{MODELS / name} is a head of the kind {name}: it drafts for one model; give that as "
            "the target, this as the drafter\n",
        )
        for name in ("medusa", "eagle", "eagle3")
    ),
    (
        ["a", "--target", "~/none"],
        "~/none: no such folder; give a model's folder or its name on the hub",
    ),
    (
        ["a", "--target", "~/sonud"],
        "~/sonud: no such folder; give a model's folder or its name on the hub; did you mean "
        "~/sound?",
    ),
    (
        ["a", "--target", "~nosuchuser/x"],
        "~nosuchuser/x: no such folder; give a model's folder or its name on the hub",
    ),
    (
        ["a", "--drafter", "~nosuchuser/x"],
        "~nosuchuser/x: no such folder; give a model's folder or its name on the hub",
    ),
    (["a", "--heads", "~nosuchuser/x"], "~nosuchuser/x: no such folder; give a model's folder or"),
    (["a", "--target", "x" * 5000], "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"),
    (
        ["a", "--target", "~/model.gguf"],
        "~/model.gguf: it is no GGUF file; get the file again\n",
    ),
    (
        ["a", "--target", "someone/model"],
        "someone/model: no such folder here, and the hub cannot be reached; give a local folder",
    ),
    (
        ["a", "--target", "~/sound", "--target-revision", "main"],
        "--target-revision is for a model on the hub, but ~/sound is a folder; leave it out",
    ),
    (
        ["a", "--target", "~/no-config"],
        "~/no-config: no config.json in ~/no-config; is it the folder of a model?",
    ),
    (
        ["a", "--target", "~/garbled"],
        "~/garbled/config.json: it is no JSON (Expecting value: line 1 column 16 (char 15)); "
        + GET,
    ),
    (["a", "--target", "~/listed"], f"~/listed/config.json: it holds no JSON object but []; {GET}"),
    (
        ["a", "--target", "~/no-heads"],
        "~/no-heads/config.json: num_attention_heads is 0; it must be a whole number from 1 on",
    ),
    (
        ["a", "--target", "~/typo"],
        '~/typo/config.json: model_type is "lama", of which transformers has no causal language '
        "model; use another; did you mean llama?",
    ),
    (["a", "--target", "~/no-type"], "~/no-type/config.json: model_type is null, and it must name"),
    (
        ["a", "--target", "~/recurrent"],
        "~/recurrent: rwkv has recurrent states that it keeps outside of transformers' caches; "
        + FULL,
    ),
    (["a", "--target", "~/t5"], "~/t5: it is an encoder-decoder model; use a decoder-only one"),
    (
        ["a", "--target", "~/sliding"],
        "~/sliding: moshi has sliding-window attention (4096 tokens), of which this engine does "
        "not know the masks; " + FULL,
    ),
    (
        ["a", "--target", "~/vision"],
        '~/vision/config.json: model_type is "clip", of which transformers has no causal language '
        "model; use another",
    ),
    (
        ["a", "--target", "~/packed"],
        '~/packed/config.json: quantization_config.quant_method is "hqq"; fp8, compressed-tensors, '
        "modelopt, gptq, awq, mxfp4 and bitsandbytes (nf4) are covered: use one of these, or plain "
        "weights",
    ),
    (
        ["a", "--target", "~/no-weights", *DRAFTER],
        "~/no-weights: no *.safetensors in ~/no-weights; only safetensors and GGUF are read: "
        "convert it (save_pretrained)",
    ),
    (["a", "--target", "~/nowhere.gguf"], "~/nowhere.gguf: no such file; give a GGUF file or a"),
    # Rounded weights
    (["a", "--quantization", "int2"], "--quantization: expected one of int8, int4, got 'int2'"),
    (
        ["a", "--target", "~/gptq", "--quantization", "int8"],
        "~/gptq: quantization int8 is for plain weights, and these are quantised; leave it out\n",
    ),
    (
        ["a", "--target", "~/sound", "--quantization", "int4", "--backend", "graphs"],
        "~/sound: quantization int4 is not for the backend graphs; use fused\n",
    ),
    (
        ["a", "--target", "~/sound", "--quantization", "int4", "--tensor-parallel-size", "2"],
        "~/sound: quantization int4 is for a model in one process; give it one device\n",
    ),
    (
        ["a", "--drafter", "ngram", "--drafter-quantization", "int4"],
        "--drafter-quantization is for a draft model or an EAGLE head, and the drafter is none; "
        "leave it out\n",
    ),
    (["a", "--target", "~/pickled"], "~/pickled: no *.safetensors in ~/pickled; only safetensors"),
    (
        ["a", "--target", "~/torn"],
        "~/torn/model.safetensors: cannot be read: it should hold 1836288 bytes of numbers, and "
        f"holds 97848; {GET}",
    ),
    (["a", "--target", "~/pointer"], "~/pointer/model.safetensors: cannot be read:"),
    (["a", "--drafter", "~/torn"], "~/torn/model.safetensors: cannot be read:"),
    (
        ["a", "--target", "~/sharded"],
        "~/sharded/model.safetensors.index.json: it names model-00002-of-00002.safetensors, which "
        f"is not there; {GET}",
    ),
    (["a", "--target", "~/adapter"], "~/adapter/adapter_config.json: the folder holds an adapter;"),
    # Tokenizers
    (
        ["a", "--target", "~/bytewise", "--drafter", "toy"],
        "the drafter that comes with Slipstream is for its own target, not for ~/bytewise (the "
        f"drafter's vocabulary has 4096 tokens, the target's 257); {NAME}",
    ),
    (
        ["a", "--target", "~/sound", "--drafter", "~/bytewise", "--verify", "block"],
        "--verify block needs a drafter with the target's tokenizer; use coupled",
    ),
    (
        ["a", "--target", "~/sound", "--drafter", "~/bytewise", "--require-same-tokenizer"],
        f"the drafter's vocabulary has 257 tokens, the target's 4096; {NAME}",
    ),
    (
        ["a", "--target", "~/sound", "--drafter", "~/wordless"],
        f"~/wordless has no tokenizer.json, and ~/sound has one; {NAME}",
    ),
    (
        ["a", "--target", "~/torn-words", *ALONE],
        "~/torn-words/tokenizer.json: cannot be read: EOF while parsing",
    ),
    (
        ["a", "--target", "~/small", *ALONE],
        "~/small/tokenizer.json: it has 4096 tokens, but the model 100 (vocab_size in "
        "config.json); they are of two models",
    ),
    (
        ["a", "--target", "~/wordless", *ALONE],
        "~/wordless has no tokenizer.json; give the prompt as token ids (--prompt-ids)",
    ),
    # Heads
    (
        ["a", "--target", "~/sound", "--drafter", "~/eagle"],
        f"~/eagle/config.json: hidden_size is 4096, but that of ~/sound is 128; {HEAD}",
    ),
    (
        ["a", "--target", "~/sound", "--drafter", "~/eagle-words"],
        f"~/eagle-words/config.json: vocab_size is 128256, but that of ~/sound is 4096; {HEAD}",
    ),
    (
        ["a", "--target", "~/sound", "--drafter", "~/medusa"],
        "~/medusa: 0.0.linear.weight is [4096, 4096], and the hidden size of ~/sound is 128; "
        + HEAD,
    ),
    (["a", "--heads", "~/empty-head"], "~/empty-head"),
    (["a", "--heads", "~/sound"], "--heads: ~/sound is none of Medusa, EAGLE, EAGLE-3, DFlash;"),
    (
        ["a", "--drafter", "ngram", "--drafter-home", "target"],
        "--drafter-home says where a draft model or a head (Medusa, EAGLE, EAGLE-3, DFlash) runs",
    ),
    # Devices
    (
        ["a", "--target-device", "gpu"],
        "unknown target device 'gpu': use cpu, cpu:N or cpu:N-M (these cores), cuda:N (GPU N) or "
        "cuda:N-M (a part on each)",
    ),
    (
        ["a", "--drafter-device", "cuda:0"],
        "drafter device cuda:0: there is no GPU to use (the torch that is installed is one for "
        "CPUs alone); use cpu, or no device",
    ),
    (
        ["a", "--target-device", "cpu:9"],
        "target device cpu:9: there is no such core; those here are cpu:0 to cpu:3",
    ),
    (
        ["a", "--target-device", "cpu:3-1"],
        "target device cpu:3-1: 3-1 is no range; the lower number",
    ),
    # Other hosts, and files to write
    (
        ["a", "--ray", "127.0.0.1:{free}"],
        f"there is no Ray cluster at 127.0.0.1:{{free}} (Connection refused); {UP}",
    ),
    (["a", "--ray", "nowhere"], "--ray: expected auto or HOST:PORT, got 'nowhere'"),
    (
        ["a", "--nodes", "remote", "--listen", "tcp://127.0.0.1:{taken}"],
        "cannot listen on tcp://127.0.0.1:{taken}: Address already in use; is another coordinator "
        "running there?",
    ),
    (["a", "--nodes", "remote"], "--nodes remote needs --listen tcp://ADDRESS:PORT"),
    (
        ["a", "--placement", "shared", "--target-device", "cpu:0"],
        "--placement is for default devices; leave it out, or name no device",
    ),
    (
        ["a", "--placement", "shared", "--reproducible"],
        "--placement shared goes not with --reproducible, which has fixed cores; leave one out",
    ),
    (
        ["a", "--nodes", "remote", "--listen", "tcp://0.0.0.0:5000", "--keys", "~/keys"],
        f"cannot read the key ~/keys/target.key: there is no such file; {KEYS}",
    ),
    (
        ["a", "--trace", "~/none/t.json"],
        "--trace: ~/none/t.json cannot be written: No such file or directory; make its folder",
    ),
]

OTHERS: list[tuple[list[str], str]] = [
    (["generat", "a"], "there is no command 'generat'; did you mean generate?"),
    (
        ["def f(x):"],
        "there is no command 'def f(x):'; there are demo, generate, ",
    ),
    (
        ["verify-lossless", "--policy", "snyc"],
        "--policy: expected one of auto, sync, pearl, amusd, pipelined, ssd, tree, got 'snyc'; "
        "did you mean sync?",
    ),
    (
        ["testbed", "--out", "~/made", "--like", "llama"],
        "--like: expected one of 0.5b, llama-3.2-1b, llama-3.2-3b, llama-3.1-8b, llama-3.1-70b, "
        "llama-3.1-405b, qwen3-0.6b, qwen3-32b, got 'llama'; did you mean llama-3.2-1b?",
    ),
    (["verify-lossless", "--target", "~/none"], "~/none: no such folder; give a model's folder or"),
    (["experiment", "benhc"], "there is no experiment benhc; those that ship are asynchronous, "),
    (["experiment", "~/garbled.toml"], "~/garbled.toml is not TOML: "),
    (["train-head"], "--out is missing; `python -m coordinator train-head --help` says what it is"),
    (["train-head", "--out", "~/sound"], "--out: ~/sound holds something else; name a new or"),
    (
        ["train-head", "--out", "~/head", "--kind", "eagle2"],
        "--kind: expected one of eagle3, eagle, medusa, dflash, got 'eagle2'; did you mean eagle?",
    ),
    (["experiment"], "FILE is missing; `python -m coordinator experiment --help` says what it is"),
    (["experiment", "bench", "--limit", "0"], "--limit: expected at least 1, got '0'"),
    (["keys", "new"], "DIR is missing; `python -m coordinator keys new --help` says what it is"),
    (
        ["trace-summary", "~/no-trace.json", "--text", "a"],
        "--text: expected a whole number, got 'a",
    ),
    (
        [*PLAN, "~nosuchuser/x"],
        "--trace: ~nosuchuser/x cannot be read: No such file or",
    ),
    ([*PLAN, "~"], "--trace: ~ cannot be read: Is a directory; give a file"),
    (["trace-summary", "~"], "~ cannot be read: Is a directory; give a file"),
    (
        ["experiment", "bench", "--set", "polcy=sync"],
        "{root}bench.toml: there is no setting 'polcy'",
    ),
    (["experiment", "bench", "--set", "policy"], "--set: expected NAME=VALUE, got 'policy'"),
    (
        ["experiment", "bench", "--prompt-file", "~/none.txt"],
        "cannot read ~/none.txt: No such file or",
    ),
    (["trace-summary", "~/none.json"], "~/none.json cannot be read: No such file or directory"),
    (["trace-summary", "~/no-trace.json"], "~/no-trace.json"),
    (["plan", "--target-ms", "0"], "--target-ms: expected at least 0.001"),
    (["chat", "--target", "~/none"], "~/none: no such folder; give a model's folder or its name"),
    (["chat", "--target", "~nosuchuser/x"], "~nosuchuser/x: no such folder; give a model's"),
    (["chat", "--target", "~/sonud"], "~/sonud: no such folder; give a model's folder or its name"),
    (["keys", "nwe"], "there is no command 'nwe'; did you mean new?"),
]
