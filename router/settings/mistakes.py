"""Error texts for settings: the place of each mistake, the value that was found, and the probable intention."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_UNKNOWN = "extra_forbidden"


def mistakes(
    error: ValidationError, settings: type[BaseModel], hidden: Collection[str], between_sections: bool = True
) -> list[str]:
    """Return one line for each mistake of a failed validation.

    - `hidden`: places whose values are secret and are not shown.
    - `between_sections`: include mistakes of checks that compare sections.
    """
    return [_line(each, settings, hidden) for each in error.errors() if each["loc"] or between_sections]


def _line(mistake: Any, settings: type[BaseModel], hidden: Collection[str]) -> str:
    place = ".".join(map(str, mistake["loc"]))
    if not place:
        return str(mistake["msg"])
    if mistake["type"] == _UNKNOWN:
        return f"{place}: unknown setting{_meant(mistake['loc'], settings)}"
    return f"{place}: {mistake['msg']}{_found(place, mistake['input'], hidden)}"


def _found(place: str, given: Any, hidden: Collection[str]) -> str:
    """Return the value at a place in words, unless it is or may contain a secret."""
    if isinstance(given, dict | list):
        return ""
    is_hidden = place in hidden or place.endswith("api_key") or "@" in str(given)
    return " (the value is hidden)" if is_hidden else f" (found {given!r})"


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
    for name, field in settings.model_fields.items():
        yield above + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{above}{name}.")


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
