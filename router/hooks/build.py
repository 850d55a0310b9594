"""The hooks of the settings."""

from __future__ import annotations

import aiohttp

from router.hooks.hooks import Hooks
from router.hooks.key_check import KeyCheck
from router.settings import Settings, WhenFailed
from router.settings.own_code import HOOKS, function_named


def build_hooks(settings: Settings, session: aiohttp.ClientSession) -> Hooks | None:
    """Return the hooks; None if the settings have none. `session`: sends keys to `hooks.key_url`."""
    hooks = settings.hooks
    if not (hooks.before or hooks.after or hooks.key_url):
        return None
    before, after = ([(name, function_named(name, HOOKS)) for name in names] for names in (hooks.before, hooks.after))
    check = None
    if hooks.key_url is not None:
        check = KeyCheck(str(hooks.key_url), session, hooks.key_seconds, hooks.deadline)
    fails_open = hooks.on_error is WhenFailed.OPEN
    return Hooks(before, after, hooks.deadline, fails_open, check, settings.tenants.named)
