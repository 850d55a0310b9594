"""`kvrouter doctor`: connects to workers as the router would, and names why their hits are zero or low.

Or it asks a router that runs.
"""

from kvrouter.tools.doctor.run import NoWorkersError, run_doctor, run_doctor_on_router
from kvrouter.tools.doctor.running_fleet import RouterError

__all__ = ["NoWorkersError", "RouterError", "run_doctor", "run_doctor_on_router"]
