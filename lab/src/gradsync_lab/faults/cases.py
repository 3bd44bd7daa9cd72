"""Cases: a fault, the phase of training in which it strikes, and the job that it strikes, drawn from a seed."""

from __future__ import annotations

import random
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

TIMEOUT_S = 5.0  # of gradsync in a case's job
GRACE_S = 5.0  # beyond the timeout, within which every survivor must have raised
PAUSE_S = 2.5  # a rank that is stopped for so long goes on, as it is below the timeout
LINK_DOWN_S = 1.0
LINK_RATE, LOW_RATE, LOSS = "1gbit", "10mbit", 0.30
STEPS = {"exact": 12, "top_k": 12, "auto": 60, "averages": 16, "surviving averages": 16}
LINK_STEPS = 60  # of a job whose link fails, which must last longer than the link is down
ATTACH_S = 0.05  # time of an attach in which signals strike


class Fault(StrEnum):
    """The kinds of faults."""

    KILL = "kill"
    STOP = "stop"
    PAUSE = "stop 2.5 s"
    SLOW = "slow rank"
    EXCEPTION = "exception"
    MEMORY = "memory error"
    INTERRUPT = "Ctrl-C"
    FEWER = "fewer steps"
    UNLIKE = "unlike settings"
    ABSENT = "never attaches"
    LINK_PAUSE = "link down 1 s"
    LINK_DOWN = "link down"
    LINK_RATE = "link at 1 %"
    LINK_LOSS = "30 % loss"


class Phase(StrEnum):
    """The phases of a job, in their order, in which a fault strikes; `ANY`: a random time while it trains."""

    BEFORE = "before attach"
    ATTACH = "attach"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STATE = "state_dict"
    LOAD = "load_state_dict"
    DETACH = "detach"
    ANY = "any time"


IN_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
OF_STATE = (Phase.STATE, Phase.LOAD)
LINK_FAULTS = (Fault.LINK_PAUSE, Fault.LINK_DOWN, Fault.LINK_RATE, Fault.LINK_LOSS)
MUST_GO_ON = (Fault.PAUSE, Fault.SLOW, Fault.LINK_PAUSE)
TAKES_RANK = (Fault.KILL, Fault.STOP, Fault.LINK_DOWN)  # the victim is no member of the job that starts again
RAISES = (Fault.EXCEPTION, Fault.MEMORY, Fault.INTERRUPT)
PHASES: dict[Fault, tuple[Phase, ...]] = {
    Fault.KILL: tuple(Phase),
    Fault.STOP: tuple(Phase),
    Fault.PAUSE: (Phase.BEFORE, *IN_A_STEP, Phase.LOAD, Phase.ANY),
    Fault.SLOW: (Phase.BEFORE, *IN_A_STEP, Phase.LOAD),
    Fault.EXCEPTION: (Phase.BEFORE, Phase.ATTACH, *IN_A_STEP, Phase.LOAD),
    Fault.MEMORY: (Phase.ATTACH, *IN_A_STEP),
    Fault.INTERRUPT: (Phase.FORWARD, Phase.BACKWARD, Phase.ANY),
    Fault.FEWER: (Phase.DETACH,),
    Fault.UNLIKE: (Phase.ATTACH,),
    Fault.ABSENT: (Phase.ATTACH,),
    **dict.fromkeys(LINK_FAULTS, (Phase.ANY,)),
}


class Frontend(StrEnum):
    """The ways to put gradsync on a model."""

    ATTACH = "attach"
    DROP_IN = "drop-in class"
    HOOK = "DDP hook"
    AVERAGES = "averages"


PLANS = {frontend: ("exact", "top_k", "auto") for frontend in Frontend} | {
    Frontend.AVERAGES: ("averages", "surviving averages")
}


class Case(BaseModel):
    """One job and the fault that strikes it; pure data, so that it can be run again.

    Attributes:
        step: the step in which the fault strikes; of a link, the step after which it fails.
        call: with a phase `ATTACH`, the number of the look at the model's parameters in which an exception is raised.
        delay_s: with a phase `ATTACH` or `ANY`, the seconds after its beginning at which a signal strikes.
        unlike: with `Fault.UNLIKE`, the setting in which the victim differs.
        store_on_rank_0: the ranks meet at rank 0's store, else at one that outlives them, as torchrun's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    fault: Fault
    phase: Phase
    frontend: Frontend
    plan: str
    size: int
    victim: int
    steps: int
    step: int
    call: int = 1
    delay_s: float = 0.0
    unlike: str = ""
    store_on_rank_0: bool = False
    timeout_s: float = TIMEOUT_S

    @property
    def words(self) -> str:
        """The case in words, as for a line of progress."""
        return f"{self.fault} at {self.phase}, {self.frontend}, {self.plan}, rank {self.victim} of {self.size}"

    @property
    def is_of_link(self) -> bool:
        return self.fault in LINK_FAULTS

    @property
    def lost(self) -> bool:
        """Whether the victim cannot take part in the job that starts again."""
        return self.fault in TAKES_RANK

    @property
    def survivors(self) -> list[int]:
        """The ranks that must go on or raise: all but a victim that is dead, stopped, or the fault's own cause."""
        gone = self.fault not in (*MUST_GO_ON, *LINK_FAULTS, Fault.UNLIKE)
        return [rank for rank in range(self.size) if not (gone and rank == self.victim)]

    @property
    def again(self) -> list[int]:
        """The ranks that start again in the same processes."""
        return [rank for rank in range(self.size) if not (self.lost and rank == self.victim)]


def draw(seed: int, number: int, *, links: bool = False) -> Case:
    """Draws case number `number` of a seed: frontends take turns, all else is random.

    Args:
        links: whether the fault is one of a link; else it is one of a process.
    """
    of = random.Random(f"{seed} {number} {links}")
    frontend = list(Frontend)[number % len(Frontend)]
    fault = of.choice([each for each in Fault if (each in LINK_FAULTS) == links])
    phases = [p for p in PHASES[fault] if not (frontend is Frontend.HOOK and p in OF_STATE)]  # the hook has no state
    phase, plan, size = of.choice(phases), of.choice(PLANS[frontend]), of.choice((2, 3, 3, 4))
    steps = LINK_STEPS if links or phase is Phase.ANY else STEPS[plan]
    unlike = of.choice(("plan", "exclude") if frontend is Frontend.HOOK else ("plan", "exclude", "model"))
    return Case(
        number=number,
        fault=fault,
        phase=phase,
        frontend=frontend,
        plan=plan,
        size=size,
        victim=of.randrange(size),
        steps=steps,
        step=of.randrange(1, steps - 2),
        call=of.randrange(1, 4),
        delay_s=of.uniform(0.0, ATTACH_S if phase is Phase.ATTACH else 1.0),
        unlike=unlike if fault is Fault.UNLIKE else "",
        store_on_rank_0=of.random() < 0.5,
    )
