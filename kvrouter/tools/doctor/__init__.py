"""`kvrouter doctor`: connects to workers as the router would, and names why their hits are zero or low."""

from kvrouter.tools.doctor.run import run_doctor

__all__ = ["run_doctor"]
