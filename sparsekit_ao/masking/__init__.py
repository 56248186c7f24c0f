"""The parametrization that masks a weight: registered, computed, removed."""

from .squash import rebuilt_originals, refuse_uninvertible, removed, write_masked, write_zeros
from .weight_mask import (
    WeightMask,
    dense_state_dict,
    dense_state_dict_of,
    dense_weight,
    find_mask,
    installed,
    is_parameter,
    mark_masked,
    other_names,
    parameters_under,
    parametrized_names,
    placed_mask,
    remove_mask,
    select,
    shape_of,
    under_all_names,
    used_weight,
)
