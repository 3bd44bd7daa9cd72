"""Changes to optimisers: momenta, frozen elements, LARS, steps inside backward."""

from .lars import LARS as LARS
from .momentum import take_momentum as take_momentum
