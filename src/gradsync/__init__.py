"""gradsync: the cheapest way to synchronise every gradient tensor of a distributed PyTorch training job."""

from .attach import Attachment as Attachment
from .attach import attach as attach
from .attach import consensus as consensus
from .auto import AutoPlanner as AutoPlanner
from .characterization import Characterization as Characterization
from .characterization import characterize as characterize
from .cluster import Cluster as Cluster
from .cluster import Link as Link
from .comm import GroupError as GroupError
from .data_parallel import DistributedDataParallel as DistributedDataParallel
from .ddp import DDPState as DDPState
from .ddp import ddp_hook as ddp_hook
from .measurement import measure as measure
from .plan import Plan as Plan
from .profile import Profile as Profile

__version__ = "0.1.0"
