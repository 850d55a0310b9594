"""Mistakes in settings, in words: the place of each, the value that was found, and the probable intention."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from re import fullmatch
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from http_api.mistakes import MAPPINGS, expected
from router.settings.fields import FORMS

_UNKNOWN: Final = "extra_forbidden"
_LONGEST_FOUND: Final = 200  # characters
# The option of `kvrouter serve` for a setting.
_OPTIONS: Final = {
    "server.host": "--host",
    "server.port": "--port",
    "server.processes": "--processes",
    "server.root_path": "--root-path",
    "policy.name": "--policy",
    "picker.port": "--grpc-port",
    "index.peer": "--peer",
}


def mistakes(
    error: ValidationError,
    settings: type[BaseModel],
    hidden: Collection[str] = (),
    *,
    between_sections: bool = True,
    source: object = None,
) -> list[str]:
    """Return one line for each mistake.

    - `hidden`: places whose values are not shown.
    - `between_sections`: whether to include checks that several sections are part of.
    - `source`: the file or "environment", which begins a line; "options": the option begins it; `None`: the place does.
    """
    return [
        _from(source, mistake, _line(mistake, settings, hidden))
        for mistake in error.errors()
        if mistake["loc"] or between_sections
    ]


def _from(source: object, mistake: Any, line: str) -> str:
    if source is None:
        return line
    if source == "options":
        place = _place(mistake)
        if fullmatch(r"workers\.\d+\.url", place):
            return f"--worker{line.removeprefix(place)}"
        for setting, option in _OPTIONS.items():
            if place == setting:
                return f"{option}{line.removeprefix(place)}"
    return f"{source}: {line}"


def _place(mistake: Any) -> str:
    return ".".join(str(step) for step in mistake["loc"] if step != "[key]")


def _line(mistake: Any, settings: type[BaseModel], hidden: Collection[str]) -> str:
    place = _place(mistake)
    if not place:
        return expected(mistake, FORMS)
    if mistake["type"] == _UNKNOWN:
        return f"{place}: unknown setting{_meant(mistake['loc'], settings)}"
    found = _found(place, mistake["input"], hidden)
    return f"{place}: {expected(mistake, FORMS)}{_example(mistake, settings, found)}{found}"


def _example(mistake: Any, settings: type[BaseModel], found: str) -> str:
    """Return what to write where a mapping, or a list of them, was expected in place of a text."""
    kind, text = mistake["type"], mistake["input"]
    if not isinstance(text, str) or len(text) > _LONGEST_FOUND or not (kind in MAPPINGS or kind == "list_type"):
        return ""
    field = next((each for each in ("url", "name") if each in _fields_at(settings, [*mistake["loc"]])), None)
    if field is None:
        return ""
    return f": write `{'- ' if kind == 'list_type' else ''}{field}: {'…' if 'hidden' in found else text}`"


def _found(place: str, given: Any, hidden: Collection[str]) -> str:
    """Return the value at a place in words, unless it is or may contain a secret."""
    if isinstance(given, dict | list):
        return ""
    if given is None:
        return " (found nothing)"
    is_hidden = place in hidden or place.endswith("api_key") or "@" in str(given)
    return " (the value is hidden)" if is_hidden else f" (found {repr(given)[:_LONGEST_FOUND]})"


def _meant(loc: tuple[int | str, ...], settings: type[BaseModel]) -> str:
    """Return a hint in words: the setting with the most similar name, else the names that exist at this place."""
    *above, name = loc
    known = _fields_at(settings, above)
    if near := get_close_matches(str(name), known, 1):
        return f"; did you mean {'.'.join([*map(str, above), near[0]])}?"
    elsewhere = [path for path in setting_names(settings) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; there are {', '.join(known)}" if known else ""


def setting_names(settings: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the path of every setting, such as `server.port`, without the items of lists and maps."""
    for name, about in settings.model_fields.items():
        yield above + name
        if isinstance(about.annotation, type) and issubclass(about.annotation, BaseModel):
            yield from setting_names(about.annotation, f"{above}{name}.")


def _fields_at(settings: type[BaseModel], above: list[int | str]) -> list[str]:
    """Return the names of the settings that exist at a place."""
    section: Any = settings
    for step in above:
        if isinstance(section, type) and issubclass(section, BaseModel):
            field = section.model_fields.get(str(step))
            section = field.annotation if field else None
        else:  # A list or a mapping: continue with the type of its items.
            section = next((each for each in get_args(section) if _section_in(each) is not None), None)
        section = _without_none(section)
    section = _section_in(section) if not isinstance(section, type) else section
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


def _without_none(annotation: Any) -> Any:
    kinds = [each for each in get_args(annotation) if each is not type(None)]
    return kinds[0] if kinds and type(None) in get_args(annotation) else annotation


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation names, directly or as an item type."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for each in get_args(annotation) if (found := _section_in(each)) is not None), None)
