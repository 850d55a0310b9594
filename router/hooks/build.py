"""The hooks of the settings."""

from __future__ import annotations

import aiohttp

from router.hooks.hooks import Hooks
from router.hooks.key_check import Check, KeyCheck
from router.settings import Settings, WhenFailed
from router.settings.own_code import HOOKS, function_named


def build_hooks(settings: Settings, session: aiohttp.ClientSession) -> Hooks | None:
    """Return the hooks; None if the settings have none. `session`: reaches `key_url` and the keys of `jwt`."""
    hooks = settings.hooks
    if not (hooks.before or hooks.after or hooks.checks_keys):
        return None
    before, after = ([(name, function_named(name, HOOKS)) for name in names] for names in (hooks.before, hooks.after))
    check: Check | None = None
    if hooks.jwt is not None:
        from router.hooks.token_check import TokenCheck

        check = TokenCheck(hooks.jwt, session, hooks.deadline, settings.tenants.named)
    elif hooks.key_url is not None:
        check = KeyCheck(str(hooks.key_url), session, hooks.key_seconds, hooks.deadline)
    fails_open = hooks.on_error is WhenFailed.OPEN
    return Hooks(before, after, hooks.deadline, fails_open, check, settings.tenants.named)
