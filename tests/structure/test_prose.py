"""The checker of the project's prose, and the number of findings that are allowed."""

from __future__ import annotations

from pathlib import Path

import prose
import pytest

# The findings that are left. The number only falls.
ALLOWED = 0


def test_prose_has_no_more_findings_than_allowed() -> None:
    found = [each for path in prose.checked_files() for each in prose.findings(path)]
    assert len(found) <= ALLOWED, "\n".join(map(str, found[:50]))


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ('def f():\n    """The blocks of a target."""\n', "begin with a verb"),
        ('class A:\n    """What a target holds."""\n', "docstring's opening"),
        ('def f():\n    """Return what nobody asked for."""\n', "'nobody'"),
        ("x = 1  # told by the worker\n", "'told'"),
        ("x = 1  # Of a prompt, some hashes are read.\n", "'# Of a prompt"),
        ('def f():\n    """Return one. Of several processes, only the first writes."""\n', "'. Of several processes"),
        ("# By which clients send a key.\n", "'# By which"),
        ('raise ValueError("no worker was told about this")\n', "'told'"),
        ('def f():\n    """Return' + " one" * 25 + '."""\n', "26 words in a sentence"),
    ],
)
def test_prose_reports_broken_rules(source: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(source)
    assert any(each.advice.startswith(advice) for each in prose.findings(file))


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the blocks of a target."""\n',
        'class A:\n    @property\n    def b(self):\n        """The blocks of a target."""\n',
        'def f():\n    """Return the share of a target. Most of a prompt, if any, counts."""\n',
        'def f():\n    """Return `nobody`, as "told" in the header."""\n',
    ],
)
def test_prose_exempts_properties_code_and_quotations(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(source)
    assert list(prose.findings(file)) == []
