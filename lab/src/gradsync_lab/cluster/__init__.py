"""An emulated cluster on one machine: one network namespace per node, joined by links with limited rates.

Use: trying a training script on "8 nodes with 200 Mbit links" before renting them, and measuring. Linux only.
"""

from .cluster import Lab as Lab
from .cluster import LabUnavailableError as LabUnavailableError
from .cluster import LinkRate as LinkRate
from .scenario import Scenario as Scenario
