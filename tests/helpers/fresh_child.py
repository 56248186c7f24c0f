# ruff: noqa: E402
"""What a process imports with the package and at its first uses, one use after the other; prints one dict as JSON.

`test_fresh_process.py` reads it.
"""

import importlib.util
import json
import os
import sys
import warnings

found = {}


def imported(name):
    """Note the modules that have been imported so far."""
    found[name] = sorted(sys.modules)


import torch
import torch.ao.pruning

imported("torch")
import sparsekit_ao

imported("package")
found["cuda is initialized"] = torch.cuda.is_initialized()

model = torch.nn.Sequential(torch.nn.Linear(8, 4))
sparsifier = sparsekit_ao.ScopeSparsifier()
sparsifier.prepare(model, None)
sparsifier.step()
model(torch.ones(1, 8))
sparsifier.check()
sparsifier.report()
sparsifier.load_state_dict(sparsifier.state_dict())
sparsifier.squash_mask()
imported("plain tensors")

import sparsekit_ao.plot

imported("plot")
from sparsekit_ao.selection import keep_mask

keep_mask(torch.randn(4, 8), 2)
imported("selection")

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
found["without triton"] = keep_mask(torch.tensor([[1.0, 2.0]]), 1).tolist()
try:
    keep_mask(torch.ones(1, 2), 1, impl="triton")
except sparsekit_ao.SparsityError as error:
    found["triton"] = str(error)
importlib.util.find_spec = find

warnings.simplefilter("ignore")
torch.set_num_threads(2)
scores = torch.randn(1, 1 << 19)
mask = keep_mask(scores, 1000)
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.equal(mask, keep_mask(scores, 1000)) else 1)
found["exit code of a fork"] = os.waitpid(pid, 0)[1]
print(json.dumps(found))
