"""Settings: defaults, file, environment, options, and the errors for settings that cannot be used."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel

from kvevents.curve import create_key_pair
from router.app.embedded_index import running_indexer
from router.settings import ConfigError, PolicyName, Settings, WorkerSettings, load_settings

SECRET = "sk-of-a-worker"
CONFIG_YAML = Path(__file__).parents[3] / "config.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def listed_fields(section: type[BaseModel], listed: dict[str, Any], path: str = "") -> None:
    """Assert that a mapping names every field of a section, with its default, and no other."""
    assert set(listed) == set(section.model_fields), path
    for name, field in section.model_fields.items():
        default = field.get_default()
        if isinstance(default, BaseModel):
            listed_fields(type(default), listed[name], f"{path}{name}.")
        else:
            assert listed[name] == default, f"{path}{name}"


def test_config_yaml_lists_every_setting_with_its_default() -> None:
    listed_fields(Settings, yaml.safe_load(CONFIG_YAML.read_text()))
    assert load_settings(CONFIG_YAML) == Settings()


def test_settings_without_a_file_or_with_an_empty_file_are_the_defaults(file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert load_settings(None) == load_settings(file) == Settings()


def test_file_overrides_defaults_of_named_settings(file: Path) -> None:
    file.write_text(
        """
        server: {port: 9000}
        policy: {name: round_robin}
        models: {m: {tokenizer: /models/m}}
        workers:
          - url: http://10.0.0.1:8000
          - url: http://10.0.0.2:8000
            model: m
            block_size: 32
            streams: [{endpoint: "tcp://10.0.0.2:5557"}]
        """
    )
    settings = load_settings(file)
    assert (settings.server.port, settings.server.host) == (9000, "127.0.0.1")
    assert settings.policy.name is PolicyName.ROUND_ROBIN
    assert settings.models["m"].tokenizer == "/models/m"
    assert [str(worker.url) for worker in settings.workers] == ["http://10.0.0.1:8000/", "http://10.0.0.2:8000/"]
    (stream,) = settings.workers[1].streams or []
    assert (stream.dp_rank, stream.endpoint) == (0, "tcp://10.0.0.2:5557")
    assert (stream.replay_endpoint, stream.topic) == (None, "")


def test_environment_can_list_workers_as_json_and_set_the_fleets_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTER_WORKERS", '[{"url": "http://10.0.0.1:8000"}]')
    monkeypatch.setenv("KVROUTER_FLEET__API_KEY", SECRET)
    settings = load_settings(None)
    assert [str(worker.url) for worker in settings.workers] == ["http://10.0.0.1:8000/"]
    assert settings.fleet.api_key.get_secret_value() == SECRET


def test_options_override_the_environment_and_the_environment_overrides_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("server: {port: 9000, host: 127.0.0.2, max_body_bytes: 5}\npolicy: {name: round_robin}")
    monkeypatch.setenv("KVROUTER_SERVER__PORT", "9001")
    monkeypatch.setenv("KVROUTER_SERVER__MAX_BODY_BYTES", "1000")
    monkeypatch.setenv("KVROUTER_POLICY__NAME", "least_loaded")
    settings = load_settings(file, {"server": {"port": 9002}, "workers": [{"url": "http://w:1"}]})
    assert (settings.server.port, settings.server.max_body_bytes, settings.server.host) == (9002, 1000, "127.0.0.2")
    assert settings.policy.name is PolicyName.LEAST_LOADED
    assert [str(worker.url) for worker in settings.workers] == ["http://w:1/"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("server: {prot: 1}", "server.prot"),
        ("sever: {port: 1}", "sever"),
        ("server: {root_path: llm}", "server.root_path"),
        ("server: {root_path: /a b}", "server.root_path"),
        ("server: {cors_origins: ['https://a.example/path']}", "server.cors_origins.0"),
        ("server: {port: many}", "server.port"),
        ("server: {port: 70000}", "server.port"),
        ("server: 8080", "server"),
        ("policy: {name: best}", "policy.name"),
        ("policy: {eviction: -1}", "policy.eviction"),
        ("proxy: {attempts: 0}", "proxy.attempts"),
        ("proxy: {session_headers: [X-Team, Authorization]}", "proxy.session_headers.1"),
        ("workers: [{url: 10.0.0.1:8000}]", "workers.0.url"),
        ("workers: [{url: 'ftp://w:1'}]", "workers.0.url"),
        ("workers: [{url: 'http://w:1'}, {model: m}]", "workers.1.url"),
        ("workers: [{url: 'http://w:1', streams: [{dp_rank: -1, endpoint: x}]}]", "workers.0.streams.0.dp_rank"),
        ("workers: http://w:1", "workers"),
        ("workers: [{url: 'http://w:1', name: a}, {url: 'http://w:2', name: a}]", "workers"),
        ("workers: [{url: 'http://w:1', name: a/b}]", "workers.0.name"),
        ("workers: [{url: 'http://w:1', api_key: 1}]", "workers.0.api_key"),
        ("workers: [{url: 'http://w:1', api_key_file: /nowhere}]", "workers.0.api_key_file"),
        ("workers: [{url: 'http://w:1', api_key_env: NO_SUCH_VARIABLE}]", "workers.0.api_key_env"),
        ("fleet: {api_key: a, api_key_env: HOME}", "fleet"),
    ],
)
def test_error_names_file_and_setting(file: Path, text: str, field: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    assert str(refused.value).startswith(f"{file}: {field}: ")


def test_environment_can_set_what_a_section_of_the_file_requires(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"tenants: {{named: {{team: {{keys: ['{'ab' * 32}']}}}}}}")
    with pytest.raises(ConfigError, match=r"tenants: set server\.token too"):
        load_settings(file)
    monkeypatch.setenv("KVROUTER_SERVER__TOKEN", "t")
    assert load_settings(file).tenants.named["team"].priority == 0


def test_error_lists_all_mistakes_of_a_file(file: Path) -> None:
    file.write_text("server: {prot: 1, host: 7}\npolicy: {name: best}\nworkers: [{url: 'http://w:1', wieght: 2}]")
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    lines = str(refused.value).splitlines()
    assert sorted(line.removeprefix(f"{file}: ").split(":")[0] for line in lines) == [
        "policy.name",
        "server.host",
        "server.prot",
        "workers.0.wieght",
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("sever: {port: 1}", "server"),
        ("server: {prot: 1}", "server.port"),
        ("port: 1", "server.port"),
        ("workers: [{url: 'http://w:1', wieght: 2}]", "workers.0.weight"),
        ("workers: [{url: 'http://w:1', streams: [{endpiont: 'tcp://w:1'}]}]", "workers.0.streams.0.endpoint"),
        ("models: {m: {tokeniser: x}}", "models.m.tokenizer"),
        ("tenants: {named: {t: {keys: [], model: x}}}", "tenants.named.t.models"),
    ],
)
def test_unknown_setting_suggests_the_most_similar_name(file: Path, text: str, meant: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"unknown setting; did you mean {re.escape(meant)}\?"):
        load_settings(file)


def test_unknown_setting_without_similar_name_lists_existing_names(file: Path) -> None:
    file.write_text("logs: {zzzzzz: 1}")
    with pytest.raises(ConfigError, match=r"logs\.zzzzzz: unknown setting; there are access"):
        load_settings(file)


@pytest.mark.parametrize("text", ["- a list", "just words", "8080: {port: 1}", "server: {port: 1", "\x00"])
def test_file_without_mapping_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=str(file)):
        load_settings(file)


def test_missing_file_and_invalid_utf8_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"{file}: No such file"):
        load_settings(file)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=f"{file}: not YAML"):
        load_settings(file)


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("KVROUTER_SERVER__PORT", "many", "server.port"),
        ("KVROUTER_SERVER__PROT", "1", "server.prot"),
        ("KVROUTER_WORKERS", "http://w:1", "workers"),
    ],
)
def test_error_names_bad_environment_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"^environment: .*{field}"):
        load_settings(None)


def test_error_names_bad_option(file: Path) -> None:
    file.write_text("policy: {name: round_robin}")
    with pytest.raises(ConfigError, match=r"^--policy: .*'best'"):
        load_settings(file, {"policy": {"name": "best"}})


@pytest.mark.parametrize("models", ["{a: {aliases: [b]}, b: {}}", "{a: {aliases: [c]}, b: {aliases: [c]}}"])
def test_duplicate_alias_is_refused(file: Path, models: str) -> None:
    file.write_text(f"models: {models}")
    with pytest.raises(ConfigError, match=r"models.*an alias names one model"):
        load_settings(file)


@pytest.mark.parametrize("url", ["http://:secret@redis:6379", "redis://:secret@redis:port", "redis://:secret@r/0?db=x"])
def test_error_of_redis_url_hides_its_password(file: Path, url: str) -> None:
    file.write_text(f"replicas: {{redis: '{url}'}}")
    with pytest.raises(ConfigError, match=r"replicas\.redis: ") as refused:
        load_settings(file)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        f"workers: [{{url: 'http://u:{SECRET}@@w'}}]",
        f"workers: [{{url: 'http://u:{SECRET}@w', api_key: x}}]",
        f"workers: [{{url: 'http://u:{SECRET}@w', api_key_file: /nowhere}}]",
        f"workers: [{{url: 'http://{SECRET}@w', weight: 0}}]",
        f"workers: [{{url: 'http://w', api_key: '{SECRET} with a space'}}]",
        f"workers: [{{url: 'http://w', api_key: {SECRET}, nonsense: 1}}]",
        f"workers: [{{url: 'http://w', api_key: [{SECRET}]}}]",
        f"workers: [{{url: 'http://w', api_key: {SECRET}, name: a}}, {{url: 'http://v', name: a}}]",
        f"fleet: {{api_key: {SECRET}, api_key_env: HOME}}",
        f"fleet: {{api_key: {{a: {SECRET}}}}}",
        f"fleet: {{api_key: {SECRET}}}\ntenants: {{named: {{a: {{keys: ['{'0' * 64}']}}}}}}",
    ],
)
def test_errors_contain_no_api_key(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    assert SECRET not in str(refused.value)


def test_repr_and_dumps_of_settings_contain_no_api_key(file: Path) -> None:
    file.write_text(f"fleet: {{api_key: {SECRET}}}\nworkers: [{{url: 'http://u:{SECRET}@w'}}]")
    settings = load_settings(file)
    assert settings.fleet.api_key.get_secret_value() == SECRET
    shown = f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    assert SECRET not in shown
    assert b64encode(f"u:{SECRET}".encode()).decode() not in shown


@given(user=st.text(min_size=1), password=st.text())
def test_user_info_of_url_becomes_basic_api_key(user: str, password: str) -> None:
    assume(all(letter < "\ud800" or letter > "\udfff" for letter in user + password))
    worker = WorkerSettings(url=f"http://{quote(user, safe='')}:{quote(password, safe='')}@w:8000/base")
    assert str(worker.url) == "http://w:8000/base"
    scheme, _, credentials = worker.api_key.get_secret_value().partition(" ")
    assert (scheme, b64decode(credentials).decode()) == ("Basic", f"{user}:{password}")


def test_curve_key_files_are_loaded_with_settings(tmp_path: Path) -> None:
    public, secret = create_key_pair(tmp_path, "some")
    stream = {"endpoint": "tcp://127.0.0.1:5557", "curve_server_key_file": str(public)}
    overrides = {
        "workers": [{"url": "http://127.0.0.1:1", "streams": [stream]}],
        "events": {"curve_secret_key_file": str(secret)},
    }
    settings = load_settings(None, overrides)
    (configured,) = settings.workers[0].streams or []
    assert configured.curve_server_key_file == public
    for used in (settings, Settings()):
        with running_indexer(used) as indexer:
            assert indexer.registered() == []


@pytest.mark.parametrize("content", [None, "nothing"])
def test_error_names_unreadable_curve_key_file(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "bad.key"
    if content is not None:
        path.write_text(content)
    stream = {"endpoint": "tcp://127.0.0.1:5557", "curve_server_key_file": str(path)}
    with pytest.raises(ConfigError, match=f"workers.0.streams.0.curve_server_key_file: .*{path}"):
        load_settings(None, {"workers": [{"url": "http://127.0.0.1:1", "streams": [stream]}]})
    with pytest.raises(ConfigError, match=f"events.curve_secret_key_file: .*{path}"):
        load_settings(None, {"events": {"curve_secret_key_file": str(path)}})


def test_public_key_file_is_refused_as_secret_key_file(tmp_path: Path) -> None:
    public, _ = create_key_pair(tmp_path, "some")
    with pytest.raises(ConfigError, match="holds no secret key"):
        load_settings(None, {"events": {"curve_secret_key_file": str(public)}})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"server": {"port": True}}, "server.port"),
        ({"server": {"admin_port": True}}, "server.admin_port"),
        ({"workers": [{"url": "http://a:1", "pull_port": True}]}, "pull_port"),
        ({"workers": [{"url": "http://a:1", "bootstrap_port": True}]}, "bootstrap_port"),
        ({"workers": [{"url": "http://a:1", "weight": True}]}, "weight"),
        ({"fleet": {"probe_interval": True}}, "fleet.probe_interval"),
    ],
)
def test_true_is_no_number(file: Path, settings: dict[str, Any], named: str) -> None:
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=named):
        load_settings(file)
