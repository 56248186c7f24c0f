"""The parametrization that masks a weight: registered, removed, computed; masks that a backward pass still needs."""

from .merging import refuse_merge
from .parametrization import (
    WeightMask,
    collector_paused,
    dense_state_dict,
    dense_weight,
    find_mask,
    installed,
    is_on_parameter,
    live_mask,
    other_names,
    parameter_under,
    parameters_under,
    parametrized_names,
    remove_mask,
    under_all_names,
    used_weight,
)
from .product import FROM, marked, select
from .saved import is_intercepted, keep_saved, saving
from .squash import rebuilt_originals, refuse_unwritable, removed, write_zeros
