"""Simulates papers' evaluations on clusters that are not here, and prints the figures with the published ones.

Times come from the schemes' lists of computations and transfers (`Scheme.steps`), which planners read too, and from the
planner's model of a machine (`planner.solver.problem`).
"""

from .bytecomp import bytecomp_tables as bytecomp_tables
from .ds_sync import ds_sync_tables as ds_sync_tables
from .gradientflow import gradientflow_tables as gradientflow_tables
from .mergecomp import mergecomp_tables as mergecomp_tables
from .tables import Figure as Figure
from .tables import Table as Table
from .zen import Communication as Communication
from .zen import zen_table as zen_table
