"""From measurements to a plan."""

from .default import default_plan as default_plan
from .default import default_plans as default_plans
