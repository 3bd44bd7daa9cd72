"""From measurements to a plan."""

from .compressing import CompressingPlanner as CompressingPlanner
from .compressing import cheapest_way as cheapest_way
from .default import SPARSE_SCHEMES as SPARSE_SCHEMES
from .default import default_plan as default_plan
from .default import default_plans as default_plans
from .measuring import MeasuringPlanner as MeasuringPlanner
