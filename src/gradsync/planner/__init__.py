"""Planners: turn measurements of a job into plans."""

from .averaging import AveragingPlanner as AveragingPlanner
from .candidates import Search as Search
from .candidates import candidate_plans as candidate_plans
from .candidates import searched as searched
from .compressing import CompressingPlanner as CompressingPlanner
from .compressing import cheapest_way as cheapest_way
from .default import SPARSE_SCHEMES as SPARSE_SCHEMES
from .default import default_plan as default_plan
from .default import default_plans as default_plans
from .job import Job as Job
from .reasons import explain as explain
from .ways import Constraints as Constraints
from .ways import ways_of as ways_of
