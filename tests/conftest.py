"""Every run tries the same examples, so that a run says something about the change it tests.

`pytest --hypothesis-profile=default` looks for new ones.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
