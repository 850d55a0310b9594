"""CurveZMQ: encryption of event streams between parties that know each other's public keys.

A publisher is the CURVE server of its PUB and its ROUTER, a subscriber the client of both. Keys are in the files that
`zmq.auth.create_certificates` writes (so does `kvrouter keygen`): `NAME.key` holds the public one, `NAME.key_secret`
both.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85


class KeyPair(NamedTuple):
    """A public key and its secret key, as Z85 text (40 characters each)."""

    public: bytes
    secret: bytes


def create_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write `NAME.key` and `NAME.key_secret`, which only the owner may read, and return both paths.

    Raises OSError, and FileExistsError if one of the files exists.
    """
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (public, secret):
        if path.exists():
            raise FileExistsError(f"{path} exists already")
    umask = os.umask(0o077)
    try:
        create_certificates(folder, name)
    finally:
        os.umask(umask)
    public.chmod(0o644)
    return public, secret


def temporary_key_pair() -> KeyPair:
    """Return a new key pair, for a client whose key servers need not know."""
    return KeyPair(*zmq.curve_keypair())


def load_public_key(path: Path | str, field: str) -> str:
    """Return the public key in a file. Raises ValueError, which names `field`, the setting with the path."""
    return checked_key(_load(path, field)[0], f"{field}: {path}").decode()


def load_key_pair(path: Path | str, field: str) -> KeyPair:
    """Return the key pair in a secret key file. Raises ValueError, which names `field`, the setting with the path."""
    public, secret = _load(path, field)
    if secret is None:
        raise ValueError(f"{field}: {path} holds no secret key; name the file that ends in .key_secret")
    pair = KeyPair(checked_key(public, f"{field}: {path}"), checked_key(secret, f"{field}: {path}"))
    if zmq.curve_public(pair.secret) != pair.public:
        raise ValueError(f"{field}: {path}: the public key does not belong to the secret key")
    return pair


def load_public_keys(folder: Path | str, field: str) -> set[bytes]:
    """Return the public keys in all `*.key` files of a folder. Raises ValueError, which names the setting `field`."""
    if not Path(folder).is_dir():
        raise ValueError(f"{field}: {folder}: the folder does not exist")
    return {load_public_key(path, field).encode() for path in sorted(Path(folder).glob("*.key"))}


def checked_key(key: bytes | str, field: str) -> bytes:
    """Return the bytes of a key. Raises ValueError, which names `field`, if it is not a key of 40 characters."""
    try:
        text = key.encode("ascii") if isinstance(key, str) else key
        if len(text) == 40 and len(z85.decode(text)) == 32:
            return text
    except (ValueError, KeyError, struct.error):
        pass
    raise ValueError(f"{field}: not a CURVE key; expected 40 characters of Z85, as in the .key file of kvrouter keygen")


def be_server(socket: zmq.Socket[Any], pair: KeyPair) -> None:
    """Accept only encrypted connections on a socket. Call this before it is bound or connected."""
    socket.curve_server = 1
    socket.curve_publickey, socket.curve_secretkey = pair


def be_client(socket: zmq.Socket[Any], server_key: str, pair: KeyPair) -> None:
    """Connect a socket only to the owner of a public key. Call this before it is connected."""
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey, socket.curve_secretkey = pair


def _load(path: Path | str, field: str) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except (OSError, ValueError) as error:
        if os.path.isfile(path):
            reason = "no key of CURVE, such as `kvrouter keygen` writes"
        else:
            reason = "Is a directory" if os.path.isdir(path) else "it does not exist"
        raise ValueError(f"{field}: {path}: {reason}") from error
