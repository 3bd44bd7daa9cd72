from . import compressors as compressors
from . import planner as planner
from . import schemes as schemes
from . import state as state
from .characterization.figures import Characterization as Characterization
from .characterization.figures import characterize as characterize
from .comm import GroupError as GroupError
from .costs.cluster import Cluster as Cluster
from .costs.cluster import Link as Link
from .engine.totals import Totals as Totals
from .frontends.attach import Attachment as Attachment
from .frontends.attach import attach as attach
from .frontends.attach import attachment_of as attachment_of
from .frontends.attach import consensus as consensus
from .frontends.data_parallel import DistributedDataParallel as DistributedDataParallel
from .frontends.ddp import DDPState as DDPState
from .frontends.ddp import ddp_hook as ddp_hook
from .frontends.outer import OuterOptimizer as OuterOptimizer
from .frontends.reduce_scatter import CompressedReduceScatter as CompressedReduceScatter
from .plans.plan import Plan as Plan
from .plans.profile import Profile as Profile
from .tuning.auto import AutoPlanner as AutoPlanner
from .tuning.measurement import measure as measure

__version__: str
