"""Files of CURVE keys: written keys can be read, and errors name the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvevents.curve import checked_key, create_key_pair, load_key_pair, load_public_key, load_public_keys

KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"  # the example of ZeroMQ's documentation


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return create_key_pair(tmp_path, "some")


def test_key_pair_is_read_as_written(files: tuple[Path, Path]) -> None:
    public, secret = files
    pair = load_key_pair(secret, "key")
    assert load_public_key(public, "key") == load_public_key(secret, "key") == pair.public.decode()
    assert len(pair.public) == len(pair.secret) == 40
    assert load_public_keys(public.parent, "keys") == {pair.public}


def test_key_has_40_characters_of_z85() -> None:
    assert checked_key(KEY, "key") == KEY.encode()
    for wrong in ("", KEY[:-1], KEY + "aaaaa", KEY[:-1] + "~", KEY[:-1] + "é", "#" * 40, "\n" * 40):
        with pytest.raises(ValueError, match="key: not a CURVE key"):
            checked_key(wrong, "key")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "certificate"),
        ("", "No public key"),
        ("hello", "No public key"),
        (f'public-key = "{KEY}"', "holds no secret key"),
        ('public-key = "short"\nsecret-key = "short"', "not a CURVE key"),
        (f'public-key = "{KEY}"\nsecret-key = "short"', "not a CURVE key"),
        (f'public-key = "{KEY}"\nsecret-key = "{KEY}"', "does not belong to"),
    ],
)
def test_error_of_a_key_file_names_its_setting(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "bad.key_secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"^curve_key_file: {path}.*{message}"):
        load_key_pair(path, "curve_key_file")


def test_folder_is_rejected_as_key_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^field: {tmp_path}: Is a directory"):
        load_public_key(tmp_path, "field")


def test_invalid_key_file_rejects_its_folder(files: tuple[Path, Path]) -> None:
    (files[0].parent / "bad.key").write_text("nothing")
    with pytest.raises(ValueError, match=r"^field: .*bad\.key"):
        load_public_keys(files[0].parent, "field")
