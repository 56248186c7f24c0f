"""The parametrization that masks a weight: registered, removed, computed; masks that a backward pass still needs."""

from .parametrization import (
    FROM,
    WeightMask,
    collector_paused,
    dense_weight,
    find_mask,
    installed,
    is_on_parameter,
    live_mask,
    parameter_under,
    rebuilt_originals,
    remove_mask,
    select,
    squash,
)
from .saved import is_intercepted, keep_saved, saving
