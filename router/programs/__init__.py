"""Sessions of agents as wholes: their working sets, and the calls that wait so that caches do not thrash."""

from router.programs.gate import Gate, RankCapacity
from router.programs.records import Call, key_of
from router.programs.sessions import Sessions
from router.programs.working_sets import marks_of

__all__ = ["Call", "Gate", "RankCapacity", "Sessions", "key_of", "marks_of"]
