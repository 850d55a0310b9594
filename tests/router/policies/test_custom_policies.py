"""Policies of one's own: functions that replace the default's cost or add to it, and their failures."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest

from indexer import Target
from kvrouter.policies import VERSION
from kvrouter.policies import Candidate as Seen
from kvrouter.policies import Request as Asked
from router.policies import Candidate, Decision, NamedPolicy, Request, policy_named
from router.policies.custom import CustomFunction, CustomPolicy
from router.policies.rates import Rates
from router.policies.records import CostUnit
from router.settings import ConfigError, load_settings

ASKED = Asked("m", 1000, 100.0, "session", "", {})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of modules, whose modules are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def settings(folder: Path, policy: str) -> Any:
    file = folder / "config.yaml"
    file.write_text(f"policy: {policy}")
    return load_settings(file).policy


def candidates(*loads: int) -> list[Candidate]:
    return [Candidate(Target(f"http://{number}", 0, "m"), pending=load) for number, load in enumerate(loads)]


def decide(policy: NamedPolicy, given: list[Candidate], labels: Sequence[dict[str, str]] = ()) -> Decision | None:
    assert policy.custom is not None
    seen = [
        Seen(each.target.worker, each.target.worker, 0, labels[place] if labels else {}, pending=each.pending)
        for place, each in enumerate(given)
    ]
    return policy.custom.decide(policy.choose, given, Request(ASKED.tokens), seen, ASKED)


def test_the_interface_has_a_version() -> None:
    assert VERSION == 1


def test_a_function_adds_to_the_cost_of_the_default(module: Path) -> None:
    (module / "adds.py").write_text("def ten(candidates, request): return [5000.0, 0.0]")
    policy = policy_named(settings(module, '{extra: ["adds:ten"]}'), Random(1))
    first, second = candidates(0, 1000)
    decision = decide(policy, [first, second])
    assert decision is not None
    assert decision.chosen is second
    assert decision.unit is CostUnit.TOKENS
    assert decision.terms(first)["adds:ten"] == 5000.0
    assert decision.terms(first)["prefill"] == 1000
    assert policy.custom is not None
    assert policy.custom.added(decision) == 0.0


def test_added_tokens_are_converted_where_the_cost_is_in_seconds(module: Path) -> None:
    (module / "adds_seconds.py").write_text("def ten(candidates, request): return [5000.0, 0.0]")
    policy = policy_named(settings(module, '{extra: ["adds_seconds:ten"]}'), Random(1))
    given = candidates(0, 0)
    given[0].rates, given[1].rates = Rates(token=1e-5), Rates(token=3e-5)
    decision = decide(policy, given)
    assert decision is not None
    assert decision.unit is CostUnit.SECONDS
    assert decision.terms(given[0])["adds_seconds:ten"] == pytest.approx(5000 * 2e-5)


def test_a_function_replaces_the_cost_of_the_default(module: Path) -> None:
    (module / "mine.py").write_text("def most(candidates, request): return [-each.pending for each in candidates]")
    policy = policy_named(settings(module, '{name: "mine:most"}'), Random(1))
    given = candidates(0, 700, 20)
    decision = decide(policy, given)
    assert decision is not None
    assert decision.chosen is given[1]
    assert decision.terms(given[1]) == {"mine:most": -700.0}
    assert not policy.spec.late_binding


def test_an_infinite_number_excludes_a_candidate(module: Path) -> None:
    (module / "excludes.py").write_text(
        "from math import inf\n"
        "def eu(candidates, request): return [0 if each.labels.get('r') == 'eu' else inf for each in candidates]"
    )
    policy = policy_named(settings(module, '{extra: ["excludes:eu"]}'), Random(1))
    given = candidates(0, 9000)
    decision = decide(policy, given, [{"r": "us"}, {"r": "eu"}])
    assert decision is not None
    assert decision.chosen is given[1]
    assert decision.candidates == [given[1]]
    assert decision.excluded == [(given[0], "excludes:eu")]
    assert decide(policy, given, [{}, {}]) is None


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("return [1.0]", "it returned 1 numbers for 2 candidates"),
        ("return (0.0 if number < 3 else 1 / 0 for number in range(1000))", "it returned more than 2 numbers"),
        ("return __import__('itertools').repeat(0.0, 1000)", "it returned more than 2 numbers"),
        ("return ['a', 'b']", "ValueError"),
        ("return None", "TypeError"),
        ("return [float('nan'), 0]", "it returned nan"),
        ("return [float('-inf'), 0]", "it returned -inf"),
        ("raise SystemExit(1)", "SystemExit"),
    ],
)
@pytest.mark.parametrize("setting", ['{{extra: ["{0}"]}}', '{{name: "{0}"}}'])
def test_an_error_costs_nothing_and_is_a_finding(module: Path, code: str, problem: str, setting: str) -> None:
    (module / "fails.py").write_text(f"def score(candidates, request):\n    {code}")
    policy = policy_named(settings(module, setting.format("fails:score")), Random(1))
    given = candidates(900, 0)
    decision = decide(policy, given)
    assert decision is not None
    assert decision.chosen is policy.choose(given, Request(ASKED.tokens)).chosen is given[1]
    assert policy.custom is not None
    (finding,) = policy.custom.findings()
    assert finding["finding"] == "policy_failed"
    assert finding["policy"] == "fails:score"
    assert problem in finding["detail"]


def test_a_coroutine_function_is_an_error(module: Path) -> None:
    (module / "waits.py").write_text("async def score(candidates, request): return [0.0, 0.0]")
    policy = policy_named(settings(module, '{extra: ["waits:score"]}'), Random(1))
    assert decide(policy, candidates(0, 0)) is not None
    assert policy.custom is not None
    assert "coroutine" in policy.custom.findings()[0]["detail"]


def test_other_functions_count_if_one_fails(module: Path) -> None:
    (module / "two.py").write_text(
        "def bad(candidates, request): raise KeyError('x')\ndef good(candidates, request): return [9e9, 0]"
    )
    policy = policy_named(settings(module, '{extra: ["two:bad", "two:good"]}'), Random(1))
    given = candidates(0, 1000)
    decision = decide(policy, given)
    assert decision is not None
    assert decision.chosen is given[1]


class Clock:
    """A clock that a function moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(seconds: list[float], clock: Clock) -> CustomFunction:
    """Return a function whose calls last these seconds, one after the other."""
    left = iter(seconds)

    def score(candidates: Any, request: Any) -> list[float]:  # noqa: ARG001
        clock.now += next(left)
        return [0.0]

    return CustomFunction("slow:score", score, 0.005, clock)


def test_a_slow_function_is_switched_off_and_reported() -> None:
    clock = Clock()
    function = timed([0.02] * 9, clock)
    answers = [function.numbers([], ASKED) for _ in range(9)]
    assert answers.count(None) == 9  # one number for no candidate is an error, slow or not
    assert function.switched_off
    assert (function.slow, function.errors) == (5, 5)
    assert [each["finding"] for each in function.findings()] == ["policy_switched_off", "policy_failed"]
    clock.now += 400
    assert [each["finding"] for each in function.findings()] == ["policy_switched_off"]


def test_a_function_that_is_rarely_slow_stays() -> None:
    function = timed(([0.02] + [0.001] * 30) * 20, Clock())
    for _ in range(31 * 20):
        function.numbers([], ASKED)
    assert not function.switched_off
    assert function.slow == 20


def test_a_switched_off_function_is_not_called() -> None:
    clock = Clock()
    function = timed([1.0] * 5, clock)
    policy = CustomPolicy([function], replaces=False, random=Random(1))
    default = policy_named(load_settings(None).policy, Random(1)).choose
    given = candidates(0)
    seen = [Seen("w", "http://0", 0, {})]
    for _ in range(7):  # the sixth call would end the iterator
        assert policy.decide(default, given, Request(10), seen, ASKED) is not None
    assert function.switched_off
    assert function.errors == 0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("{name: kv-aware}", r"policy\.name: .*did you mean kv_aware"),
        ("{name: best}", r"policy\.name: .*no installed package provides it.*package.module:function"),
        ('{name: "nowhere:policy"}', r"policy\.name: .*no module nowhere: install its package, or add its folder"),
        ('{extra: ["broken:score"]}', r"policy\.extra\.0: .*import of broken raised ValueError: no"),
        ('{extra: ["fine:other"]}', r"policy\.extra\.0: .*fine has no function 'other'"),
        ('{extra: ["fine:value"]}', r"policy\.extra\.0: .*fine has no function 'value'"),
        ('{name: least_loaded, extra: ["fine:score"]}', r"policy: .*scorers add to the cost of kv_aware"),
        ('{name: "fine:score", extra: ["fine:score"]}', r"policy: .*scorers add to the cost of kv_aware"),
    ],
)
def test_mistakes_are_refused_with_the_setting_and_what_to_do(module: Path, policy: str, message: str) -> None:
    (module / "broken.py").write_text("raise ValueError('no')")
    (module / "fine.py").write_text("value = 1\ndef score(candidates, request): return []")
    with pytest.raises(ConfigError, match=message):
        settings(module, policy)


def test_an_entry_point_of_an_installed_package_is_a_name(module: Path) -> None:
    (module / "installed.py").write_text("def score(candidates, request): return [len(candidates)] * len(candidates)")
    package = module / "acme_policies-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-policies\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[kvrouter.policies]\nacme_cost = installed:score\n")
    assert any(each.name == "acme-policies" for each in Distribution.discover(path=[str(module)]))
    policy = policy_named(settings(module, "{name: acme_cost}"), Random(1))
    given = candidates(0, 0)
    decision = decide(policy, given)
    assert decision is not None
    assert decision.terms(given[0]) == {"acme_cost": 2.0}


def test_an_infinite_number_is_not_added_to_another(module: Path) -> None:
    (module / "mixed.py").write_text(
        "from math import inf\ndef a(c, r): return [inf, 1.0]\ndef b(c, r): return [-5.0, 2.0]"
    )
    policy = policy_named(settings(module, '{extra: ["mixed:b", "mixed:a"]}'), Random(1))
    given = candidates(0, 0)
    decision = decide(policy, given)
    assert decision is not None
    assert decision.excluded == [(given[0], "mixed:a")]
    terms = decision.terms(given[1])
    assert (terms["mixed:a"], terms["mixed:b"]) == (1.0, 2.0)
    assert inf not in terms.values()
    assert nan not in terms.values()


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    "error",
    [CancelledError(), GeneratorExit(), BaseException("all"), SystemExit(1), UnreadableError(), ValueError("\ud800")],
    ids=lambda error: type(error).__name__,
)
def test_no_error_but_a_keyboard_interrupt_leaves_a_function(error: BaseException) -> None:
    def fails(*_: object) -> list[float]:
        raise error

    function = CustomFunction("mine", fails, 1.0)
    assert function.numbers([], ASKED) is None
    assert type(error).__name__ in function.findings()[0]["detail"].encode().decode()


def test_a_keyboard_interrupt_leaves_a_function() -> None:
    def interrupted(*_: object) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CustomFunction("mine", interrupted, 1.0).numbers([], ASKED)


def test_an_entry_point_without_a_function_is_refused(module: Path) -> None:
    info = module / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvrouter.policies]\nno_colon = mine\n")
    with pytest.raises(ConfigError, match="names no function"):
        settings(module, "{name: no_colon}")
