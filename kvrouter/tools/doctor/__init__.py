"""`kvrouter doctor`: it finds why hits are zero or low, by connecting to workers as the router does.

It can also examine a running router.
"""

from kvrouter.tools.doctor.run import NoWorkersError, RouterError, run_doctor, run_doctor_on_router

__all__ = ["NoWorkersError", "RouterError", "run_doctor", "run_doctor_on_router"]
