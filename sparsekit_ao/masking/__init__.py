"""The parametrization that masks a weight: registered, removed, computed; masks that a backward pass still needs."""

from .finish import finished
from .parametrization import (
    WeightMask,
    collector_paused,
    dense_state_dict,
    dense_weight,
    find_mask,
    installed,
    is_on_parameter,
    live_mask,
    parameter_under,
    rebuilt_originals,
    remove_mask,
    squash,
)
from .product import FROM, select
from .saved import is_intercepted, keep_saved, saving
