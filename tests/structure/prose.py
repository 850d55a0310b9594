"""A checker of the project's prose: `python tests/structure/prose.py [PATH …]` prints the sentences that break a rule.

It reads docstrings, comments, messages and help texts of Python files, comments of YAML and C++ files, and the text of
Markdown files. Code in backticks and quotations are exempt. `PATTERNS` is the one list of what is not written.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# The longest sentence, and the longest cell of a table, in words.
LONGEST_SENTENCE = 25
LONGEST_CELL = 15

# The beginning of a sentence: of the text, a comment, an item or a cell, or after the end of another sentence.
_BEGINS = r"(?:^|[.!?:]\s+|#+ |\n\s*\n\s*|[-*|] )"

# What is not written, as regular expressions, each with what to write in its place.
PATTERNS = {
    r"\b(no|some|any|every)body\b": "name the thing: worker, client, caller",
    r"\b(whoever|whomever|whom)\b": "name the thing",
    r"(?<!clients )(?<!users )(?<!people )(?<!operators )(?<!engineers )(?<!readers )\bwho\b": "which, that",
    r"\bso (many|long|much|few|often)\b(?! (as|that)\b)": "name the number and its unit",
    r"\bso long as\b": "while, if",
    r"\bsuch as (are|is|have|has|do|does)\b": "which, that",
    r"\b(as|of|for|in|with|to|by|no|any) such\b(?! as\b)": "name the thing",
    r"\bthat long\b": "name the number and its unit",
    r"\b(tell|tells|told|telling)\b": "report, state, send",
    r"\bmay be told\b": "can be reported",
    r"\b(came|comes|coming)\b(?! from\b)": "arrive, receive",
    r"\bas (it|they) (come|comes|came)\b": "on arrival, unchanged",
    r"\b(goes|went|gone|going)\b(?! through\b)": "is sent, continues, is removed",
    r"\btook\b": "used, received, lasted",
    r"\blet(s|ting)? go\b": "release, drop",
    r"\b(give|gives|gave|given|giving) up\b(?! after\b)": "stop, cancel, give up after a time",
    r"\b(stand|stands|stood|standing) (there|here|in|for|still|alone)\b": "is, are",
    r"\bmak(e|es|ing) sense\b": "be useful, be valid",
    r"\b(is|are|was|were|there be) none\b": "does not exist, there is no …",
    r"\b(made|begun|asked|begins|begin|computed) anew\b": "again, rebuild",
    r"\b(of|for|in|by|to) which there\b": "say it in two sentences",
    r"\bhad better\b|\bbetter (go|goes|wait|waits)\b": "should",
    r"\bnot any more\b|\bany more$": "no longer",
    r"\bin vain\b": "without effect",
    r"\bput right\b": "correct",
    r"\b(the|an?) (other|others) one who\b": "which",
    r"\bspeculation\b(?!_)|\bspeculative holdings?\b": "in-flight prefix",
    r"\bpromises?\b(?!_)|\bpromised\b": "SLO, guarantee",
    r"\blane\b": "HTTP connection",
    r"\bthe door\b": "auth gate",
    rf"{_BEGINS}(?-i:Of) (a|an|the|each|several|two|all|any|some|those|such|one)\b[^.:;]*,": "subject first: If …, …",
    rf"{_BEGINS}(?-i:By|Of|In|With|To|From|For|At|On) (which|whom)\b": "a whole sentence: … sends it by …",
}
# How no docstring begins: its first words need another sentence.
OPENINGS = r"(The same|Those|These|Of|That|This|As above|As|What|Who|Whose|Whom|Whether|How|Why|Where|It|They|Its)\b"

# The verbs with which docstrings of functions begin.
VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())

# All patterns as one, for texts without a finding. Most begin at a word's boundary, which is looked for once.
_ANY = re.compile(
    rf"\b(?:{'|'.join(each.removeprefix(chr(92) + 'b') for each in PATTERNS if not each.startswith(_BEGINS))})|"
    + "|".join(each for each in PATTERNS if each.startswith(_BEGINS)),
    re.IGNORECASE,
)

_CODE = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"\n]*\"|“[^”]*”")
# A string of Python, which may hold the mark of a comment, or a comment.
_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#[^\n]*', re.DOTALL
)
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+|\n\s*\n|\n\s*[-*] |\n {4,}")


class Finding(NamedTuple):
    """One broken rule: its file, line, and what to do."""

    path: str
    line: int
    advice: str
    text: str


def findings(path: Path) -> Iterator[Finding]:
    """Find the broken rules of one file."""
    read = {
        ".py": _python,
        ".md": _markdown,
        ".yaml": _comments,
        ".yml": _comments,
        ".cpp": _comments,
        ".hpp": _comments,
    }
    name = str(path.relative_to(ROOT))
    for line, advice, text in read[path.suffix](path, path.read_text()):
        yield Finding(name, line, advice, " ".join(text.split())[:110])


def checked_files() -> list[Path]:
    """List the files whose prose is checked: all of the project's but generated ones and data."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    endings = (".py", ".md", ".yaml", ".cpp", ".hpp")
    left_out = ("CHANGELOG.md", "docs/reference/", "tests/data/", "tests/structure/prose.py", ".github/")
    return [
        ROOT / name
        for name in tracked
        if name.endswith(endings) and not name.startswith(left_out) and "_pb2" not in name and "/crds/" not in name
    ]


def _python(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(text)
    of_tests = "tests" in path.relative_to(ROOT).parts
    docstrings: set[int] = set()
    for node in statements(tree) if of_tests else ast.walk(tree):  # parents before children
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                first = node.body[0]
                assert isinstance(first, ast.Expr)
                docstrings.add(id(first.value))
                yield from ((first.lineno, advice, found) for advice, found in _in_docstring(docstring, node, path))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and _is_prose(node.value)
        ):
            yield from ((node.lineno, advice, found) for advice, found in _in_words(node.value))
    if "#" not in text:
        return
    for match in _STRING_OR_COMMENT.finditer(text):
        comment = match.group()
        if comment.startswith("#") and not comment.startswith(("# noqa", "# type:", "#!")):
            found_here = list(_in_words(comment))
            line = text.count("\n", 0, match.start()) + 1 if found_here else 0
            yield from ((line, advice, found) for advice, found in found_here)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module or a statement, and all statements in it, without their expressions."""
    yield node
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, name, None)
        if isinstance(inner, list):
            for each in inner:
                yield from statements(each)


def _in_docstring(docstring: str, node: ast.AST, path: Path) -> Iterator[tuple[str, str]]:
    words = docstring.split()
    if re.match(OPENINGS, docstring):
        yield "docstring's opening", docstring
    elif (
        _is_function(node)
        and "tests" not in path.relative_to(ROOT).parts
        and words[0].strip(".,;:").lower() not in VERBS
    ):
        yield "begin with a verb", docstring
    yield from _in_words(docstring)
    yield from _long_sentences(docstring)


def _is_function(node: ast.AST) -> bool:
    """Return whether a node is a function whose docstring begins with a verb: properties are nouns."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not any(
        "property" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _is_prose(value: str) -> bool:
    """Return whether a string constant is a sentence: a message, a help text."""
    return len(value.split()) >= 4 and re.search(r"[a-z]{2,} [a-z]{2,} ", value) is not None


def _in_words(text: str) -> Iterator[tuple[str, str]]:
    plain = _CODE.sub("`", text)
    if not _ANY.search(plain):
        return
    for pattern, advice in PATTERNS.items():
        for match in re.finditer(pattern, plain, re.IGNORECASE):
            yield f"{match.group()!r}: {advice}", plain[max(match.start() - 50, 0) : match.end() + 40]


def _long_sentences(text: str) -> Iterator[tuple[str, str]]:
    for sentence in _SENTENCE.split(_CODE.sub("`", text)):
        if (count := len(sentence.split())) > LONGEST_SENTENCE:
            yield f"{count} words in a sentence", sentence


def _comments(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    mark = "//" if path.suffix in (".cpp", ".hpp") else "#"
    for number, line in enumerate(text.splitlines(), 1):
        if mark in line:
            yield from ((number, advice, found) for advice, found in _in_words(line.split(mark, 1)[1]))


def _markdown(_: Path, text: str) -> Iterator[tuple[int, str, str]]:
    kept = re.sub(r"^```.*?^```", lambda block: "\n" * block.group().count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    kept = re.sub(r"\]\([^)]*\)", "]", kept)
    number = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?=[-*|#] ?|\d+\. ))", kept):
        if paragraph.lstrip().startswith("|"):
            for cell in _CODE.sub("`", paragraph).split("|"):
                if (count := len(cell.split())) > LONGEST_CELL:
                    yield number, f"{count} words in a cell", cell
        else:
            yield from ((number, advice, found) for advice, found in _long_sentences(paragraph))
        yield from ((number, advice, found) for advice, found in _in_words(paragraph))
        number += paragraph.count("\n")


if __name__ == "__main__":
    named = [Path(argument).resolve() for argument in sys.argv[1:]]
    found = [
        each
        for path in checked_files()
        if not named or any(path == one or one in path.parents for one in named)
        for each in findings(path)
    ]
    for each in found:
        print(f"{each.path}:{each.line}: {each.advice}: {each.text}")
    print(len(found), "findings")
