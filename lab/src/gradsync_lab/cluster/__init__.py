"""An emulated cluster on one machine: a network namespace a node, joined by shaped links.

For trying a training script on "8 nodes with 200 Mbit links" before renting them, and for measuring. Linux only.
"""

from .cluster import Lab as Lab
from .cluster import LabUnavailableError as LabUnavailableError
from .cluster import LinkRate as LinkRate
from .scenario import Scenario as Scenario
