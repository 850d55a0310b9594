"""Tests against a real SGLang.

`make test-engine-sglang` installs SGLang for CPU (`installation.py`) and runs the tests marked `engine_sglang`.
"""
