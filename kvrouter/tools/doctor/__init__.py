"""`kvrouter doctor`: it finds why hits are zero or low, by connecting to workers as the router does.

It can also examine a running router.
"""

from kvrouter.tools.doctor.run import NoWorkersError, run_doctor, run_doctor_on_router
from kvrouter.tools.doctor.running_fleet import RouterError

__all__ = ["NoWorkersError", "RouterError", "run_doctor", "run_doctor_on_router"]
