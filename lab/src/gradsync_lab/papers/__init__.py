"""What schemes and plans would take on clusters that are not here, beside what papers published.

From the same `steps` that planning reads, and on the planner's machine.
"""

from .bytecomp import bytecomp_tables as bytecomp_tables
from .ds_sync import ds_sync_tables as ds_sync_tables
from .gradientflow import gradientflow_tables as gradientflow_tables
from .mergecomp import mergecomp_tables as mergecomp_tables
from .tables import Figure as Figure
from .tables import Table as Table
from .zen import Communication as Communication
from .zen import zen_table as zen_table
