"""The API and the command from a folder elsewhere, also beside another package named `proto`.

Slipstream is installed with `pip install -e`, as by `make setup`; `test_wheel.py` has the wheel.
"""

import json

import pytest

from slipstream import __version__
from slipstream.finding import ROOT
from tests.slipstream.environments import Environment, make_environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Its path has a space, which a line `#!` would not take. Beside ours is another `proto`."""
    made = make_environment(tmp_path_factory.mktemp("machine"), "an environment")
    projects = ("-e", str(ROOT), "-e", str(ROOT / "lab"))
    made.install("--no-deps", "--no-build-isolation", "--no-index", *projects)
    plus = made.packages / "proto"
    plus.mkdir()
    (plus / "__init__.py").write_text("class Message:\n    pass\n")
    return made


def test_the_api_is_imported_by_a_script_in_another_folder(environment: Environment) -> None:
    said = environment.says(
        "import sys\n"
        "from slipstream import LLM, SamplingParams, ModelError\n"
        "import proto\n"
        "print(proto.__file__, SamplingParams(max_tokens=3).max_tokens, ModelError.__module__)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    assert said == f"{ROOT / 'proto' / '__init__.py'} 3 proto.errors"


def test_a_programs_own_modules_stay_its_own(environment: Environment) -> None:
    names = ("models", "engine", "node", "tests", "deploy", "rehearsal")
    for name in names:
        (environment.elsewhere / f"{name}.py").write_text("mine = True\n")
    said = environment.says(
        "import sys\nbefore = list(sys.path)\n"
        "from slipstream import LLM\n"
        f"import {', '.join(names)}\n"
        f"print(all(one.mine for one in ({', '.join(names)})), sys.path == before)"
    )
    assert said == "True True"
    for name in names:
        (environment.elsewhere / f"{name}.py").unlink()


def test_nothing_but_slipstream_is_seen_before_it_is_asked_for(environment: Environment) -> None:
    said = environment.says(
        "import importlib.util as util\n"
        "import proto\nprint(proto.Message.__name__)\n"
        "names = ('coordinator', 'engine', 'models', 'tests', 'deploy')\n"
        "print([name for name in names if util.find_spec(name)])\n"
    )
    assert said.split("\n") == ["Message", "[]"]


def test_import_slipstream_alone_leaves_every_name_to_others(environment: Environment) -> None:
    said = environment.says(
        "import sys\nfinders = list(sys.meta_path)\n"
        "import slipstream\n"
        "assert sys.meta_path == finders and slipstream.__version__\n"
        "import proto\nfrom proto import Message\n"
        "print(proto.__file__, Message.__name__)\n"
    )
    assert said == f"{environment.packages / 'proto' / '__init__.py'} Message"


@pytest.mark.parametrize("before", ["import proto", "import slipstream, proto"])
def test_another_proto_that_is_loaded_already_is_refused_in_a_line(
    environment: Environment, before: str
) -> None:
    said = environment.says(
        f"{before}\n"
        "try:\n    from slipstream import LLM\n"
        "except ImportError as error:\n    print(error)\n"
        "print(proto.Message.__name__)\n"  # it stays theirs
    )
    line, theirs = said.split("\n")
    assert line == (
        "Slipstream has a package named 'proto', and this process has already imported the "
        f"distribution proto-plus under that name, from {environment.packages / 'proto'}. One "
        "process can have only one of them: use Slipstream in a process of its own"
    )
    assert theirs == "Message"


def test_a_program_that_has_loaded_an_engine_of_its_own_is_told_when_it_starts_models(
    environment: Environment,
) -> None:
    (environment.elsewhere / "engine.py").write_text("mine = True\n")
    said = environment.says(
        "from slipstream import LLM, ConfigurationError\n"
        "import engine\n"
        "assert engine.mine\n"
        "try:\n    LLM()\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    (environment.elsewhere / "engine.py").unlink()
    assert said == (
        f"another package `engine` is loaded, from {environment.elsewhere / 'engine.py'}; "
        "use the two in processes of their own"
    )


@pytest.mark.process
def test_a_script_in_another_folder_starts_models_and_writes_a_text(
    environment: Environment,
) -> None:
    said = environment.says(
        "from slipstream import LLM, SamplingParams\n"
        "with LLM() as llm:\n"
        "    params = SamplingParams(temperature=0, max_tokens=8)\n"
        "    print(len(llm.generate('def f(', params)[0].outputs[0].token_ids))\n",
        limit_s=300,
    )
    assert said == "8"


@pytest.mark.parametrize("name", ["SamplingParams", "ModelError"])
def test_who_wants_the_other_proto_afterwards_is_told_whose_this_one_is(
    environment: Environment, name: str
) -> None:
    said = environment.says(
        f"import slipstream\nslipstream.{name}\n"
        "try:\n    from proto import Message\n"
        "except ImportError:\n    pass\n"
        "import proto\n"
        "try:\n    proto.Message\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    assert "it is Slipstream's, in this process, and the distribution proto-plus" in said


def test_who_wants_an_engine_of_its_own_afterwards_is_told_whose_this_one_is(
    environment: Environment,
) -> None:
    (environment.elsewhere / "engine.py").write_text("mine = True\n")
    said = environment.says(
        "from slipstream import LLM, ModelError\n"
        "try:\n    LLM(model='./no/such/folder')\n"
        "except ModelError:\n    pass\n"
        "import engine\n"
        "try:\n    engine.mine\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    (environment.elsewhere / "engine.py").unlink()
    assert "it is Slipstream's, in this process, and a module of yours" in said


def test_the_command_runs_in_another_folder_and_is_called_by_its_name(
    environment: Environment,
) -> None:
    version = environment.run("slipstream", "--version")
    assert (version.returncode, version.stdout) == (0, f"slipstream {__version__}\n")
    usage = environment.run("slipstream", "generate", "--help")
    assert usage.returncode == 0, usage.stderr
    assert "Usage: slipstream generate" in usage.stdout
    # A command of the lab, which loads more of our packages.
    wrong = environment.run("slipstream", "plan", "--target-ms", "many")
    assert wrong.returncode == 2
    assert "target-ms" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_name_that_slipstream_does_not_have_is_an_attribute_error() -> None:
    import slipstream

    assert all(hasattr(slipstream, name) for name in slipstream.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        slipstream.Llm  # noqa: B018


@pytest.mark.process
def test_a_text_is_written_from_another_folder_by_a_model_in_it(environment: Environment) -> None:
    """The model is named as it is seen from there; its node runs elsewhere."""
    (environment.elsewhere / "mine").symlink_to(ROOT / "models" / "target")
    models = ("--target", "mine", "--drafter", "ngram")
    done = environment.run(
        "slipstream", "generate", *models, "--max-tokens", "8", "--json", "def f(", limit_s=300
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 8
