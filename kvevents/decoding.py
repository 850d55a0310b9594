"""Decodes JSON and msgpack of workers, engines, masters and peers. Whatever is wrong with the bytes, the error is one.

msgspec has other errors beside its own: UnicodeDecodeError for invalid UTF-8, RecursionError for deep nesting,
OverflowError for numbers. A reader of others' bytes that forgets one of them fails a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
Encoded = bytes | bytearray | memoryview | str | msgspec.Raw


@overload
def read_json(data: Encoded, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def read_json(data: Encoded, kind: Any = Any, *, strict: bool = True) -> Any: ...
def read_json(data: Encoded, kind: Any = Any, *, strict: bool = True) -> Any:
    """Return the value of type `kind` that JSON encodes. Raises msgspec.DecodeError.

    - `strict`: False also reads numbers in strings.
    """
    try:
        return msgspec.json.decode(data, type=kind, strict=strict)
    except msgspec.DecodeError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise msgspec.DecodeError(str(error)) from error


@overload
def json_reader(kind: type[T]) -> Callable[[Encoded], T]: ...
@overload
def json_reader(kind: Any) -> Callable[[Encoded], Any]: ...
def json_reader(kind: Any) -> Callable[[Encoded], Any]:
    """Return a function that reads JSON of type `kind`. It raises msgspec.DecodeError."""
    return _guarded(msgspec.json.Decoder(kind).decode)


@overload
def msgpack_reader(kind: type[T]) -> Callable[[Encoded], T]: ...
@overload
def msgpack_reader(kind: Any) -> Callable[[Encoded], Any]: ...
def msgpack_reader(kind: Any) -> Callable[[Encoded], Any]:
    """Return a function that reads msgpack of type `kind`. It raises msgspec.DecodeError."""
    return _guarded(msgspec.msgpack.Decoder(kind).decode)


def _guarded(decode: Callable[[Any], Any]) -> Callable[[Encoded], Any]:
    def read(data: Encoded) -> Any:
        try:
            return decode(data)
        except msgspec.DecodeError:
            raise
        except (ValueError, RecursionError, OverflowError) as error:
            raise msgspec.DecodeError(str(error)) from error

    return read
