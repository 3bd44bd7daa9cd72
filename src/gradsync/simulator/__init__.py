"""What schemes would take on clusters that are not here, from the same `steps` that planning reads."""

from .zen import Communication as Communication
from .zen import zen_table as zen_table
