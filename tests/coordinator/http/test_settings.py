"""The API keys of a server, and the proxies that it believes."""

from pathlib import Path

import pytest

from coordinator.http.settings import KEY_VARIABLE, ServeConfig
from proto.errors import ConfigurationError

ONE, TWO, THREE = (f"key-number-{number}-of-a-user" for number in "123")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def keys_file(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    return path


def test_keys_come_from_flags_and_a_file_with_a_key_in_each_line(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"{TWO}\n\n  {THREE}  \r\n{ONE}\n")
    config = ServeConfig(host="0.0.0.0", api_key=(ONE,), api_key_file=file)
    assert config.read_keys() == (ONE, TWO, THREE)
    assert ServeConfig(api_key_file=str(file)).read_keys() == (TWO, THREE, ONE)


def test_the_variable_has_a_key_where_nothing_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, ONE)
    assert ServeConfig().read_keys() == (ONE,)
    assert ServeConfig(api_key=TWO).read_keys() == (TWO,)


@pytest.mark.parametrize(
    "text", ["", "\n \n", "short\n", f"{ONE}\nshort\n", f"{ONE} {TWO}\n", "é" * 20]
)
def test_a_file_with_a_line_that_is_no_key_is_refused_without_a_word_of_its_keys(
    tmp_path: Path, text: str
) -> None:
    file = keys_file(tmp_path, text)
    with pytest.raises(ConfigurationError, match="at least 16") as refused:
        ServeConfig(api_key_file=file).read_keys()
    assert str(file) in str(refused.value)
    assert not any(word in str(refused.value) for word in (ONE, "short"))


def test_a_key_on_the_command_line_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^--api-key holds no API key"):
        ServeConfig(api_key="short").read_keys()


@pytest.mark.parametrize("text", ["*", "proxy.example", "10.0.0.0/33"])
def test_a_proxy_is_named_by_its_address_or_network(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--forwarded-allow-ips"):
        ServeConfig(forwarded_allow_ips=text)
    assert ServeConfig(forwarded_allow_ips="10.0.0.0/8").forwarded_allow_ips == ("10.0.0.0/8",)


def test_settings_that_do_nothing_beside_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeConfig().without_effect(()) == []
    open_to_all = ServeConfig(host="0.0.0.0", insecure=True, forwarded_allow_ips=("10.0.0.1",))
    assert open_to_all.without_effect(()) == []
    assert [line.split(":")[0] for line in open_to_all.without_effect((ONE,))] == [
        "--insecure has no effect",
        "--forwarded-allow-ips has no effect",
    ]
    assert ServeConfig(allowed_host=("me",)).without_effect(()) == []
    (line,) = ServeConfig(host="10.0.0.1", allowed_host=("me",)).without_effect((ONE,))
    assert line == "--allowed-host has no effect: at --host 10.0.0.1 every name is allowed"
    monkeypatch.setenv(KEY_VARIABLE, ONE)
    assert ServeConfig().without_effect((ONE,)) == []
    (line,) = ServeConfig(api_key=TWO).without_effect((TWO,))
    assert line.startswith(f"the key in {KEY_VARIABLE} does not count")
