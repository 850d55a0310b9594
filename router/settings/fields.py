"""Types of settings that several sections use, each with its check."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from kvevents.curve import load_key_pair, load_public_key, load_public_keys
from kvevents.endpoints import parse_endpoint
from kvevents.sources import MOST_BLOCK_SIZE
from router.http.worker_url import canonical_url, checked_key, key_in_environment, key_in_file
from router.settings.own_code import NAME

# Maximum length of the name of a model or an adapter, in characters.
LONGEST_NAME = 512
# Names of workers: never a URL, and usable in headers and labels without escapes.
WORKER_NAME = re.compile(r"^[A-Za-z0-9](?:[A-Za-z0-9._:@-]{0,251}[A-Za-z0-9])?$")
# Hosts that requests name to a worker.
PULL_HOST = re.compile(r"^[A-Za-z0-9.:_-]{1,255}$")
# Names of service levels: usable as a label of metrics and as the value of a header.
SERVICE_LEVEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
KEY_HASH = r"^[0-9a-f]{64}$"
ROUTE = r"^(GET|POST|PUT|PATCH|DELETE) /[!-~]*$"
# Headers with credentials: functions of one's own and reports of sessions do not show them.
CREDENTIAL_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
HEADER_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}$"
# Each pattern in words, for messages.
FORMS = {
    WORKER_NAME.pattern: "a name of letters, digits and any of . _ : @ -, which is no URL",
    SERVICE_LEVEL_NAME: "a name of letters, digits and any of . _ -",
    NAME: "package.module:function, or the name of a policy",
    PULL_HOST.pattern: "the name or the address of a host",
    KEY_HASH: "the hash of a key, which `kvrouter hash-key` prints",
    HEADER_NAME: "the name of a header",
    ROUTE: "a method and a path, such as POST /v1/mine",
}
NonNegative = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
ListeningPort = Annotated[int, Field(ge=0, le=65535)]
ModelName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
BlockSize = Annotated[int, Field(ge=1, le=MOST_BLOCK_SIZE)]


class Section(BaseModel):
    """A section of the settings: immutable, and without unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number, which Pydantic would read as 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            types = _types_of(cls.model_fields[info.field_name].annotation)
            if bool not in types and not types.isdisjoint((int, float)):
                raise ValueError("expected a number, not true or false")
        return value


def _types_of(annotation: Any) -> set[Any]:
    """Return the types in an annotation: those of a union, without their constraints."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _types_of(parts[0])
    return set().union(*map(_types_of, parts)) if get_origin(annotation) in (Union, UnionType) else {annotation}


def _public_key_file(path: Path) -> Path:
    load_public_key(path, "key file")
    return path


def _key_pair_file(path: Path) -> Path:
    load_key_pair(path, "key file")
    return path


def _network(text: str) -> str:
    try:
        ip_network(text)
    except ValueError as error:
        raise ValueError("expected a network such as 10.0.0.0/8, without bits behind its prefix") from error
    return text


def _root_path(path: str) -> str:
    root = path.rstrip("/")
    if root and re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root) is None:
        raise ValueError("expected a path such as /llm")
    return root


def _cors_origin(origin: str) -> str:
    if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin) is None:
        raise ValueError("expected an origin such as https://chat.example.com, without a path, or *")
    return origin


def _api_key(key: SecretStr) -> SecretStr:
    if key.get_secret_value():  # An empty key means that no key is sent.
        checked_key(key.get_secret_value(), "api_key")
    return key


def _api_key_file(path: Path) -> Path:
    key_in_file(path)
    return path


def _api_key_env(variable: str) -> str:
    key_in_environment(variable)
    return variable


def _url(given: Any) -> str:
    return canonical_url(str(given))


def _endpoint(text: str) -> str:
    return str(parse_endpoint(text))


def _key_folder(path: Path) -> Path:
    try:
        load_public_keys(path, "publisher_keys")
    except OSError as error:
        raise ValueError(error.strerror) from error
    return path


Network = Annotated[str, AfterValidator(_network)]
RootPath = Annotated[str, AfterValidator(_root_path)]
CorsOrigin = Annotated[str, AfterValidator(_cors_origin)]
# Pydantic parses some URLs differently from other clients, so a URL is made canonical first.
HttpUrl = Annotated[AnyHttpUrl, BeforeValidator(_url)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
PublicKeyFile = Annotated[Path, AfterValidator(_public_key_file)]
KeyFolder = Annotated[Path, AfterValidator(_key_folder)]
KeyPairFile = Annotated[Path, AfterValidator(_key_pair_file)]
ApiKey = Annotated[SecretStr, AfterValidator(_api_key)]
ApiKeyFile = Annotated[Path, AfterValidator(_api_key_file)]
ApiKeyVariable = Annotated[str, AfterValidator(_api_key_env)]
