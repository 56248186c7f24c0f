"""Compacted models exported by torch.export and to ONNX give the outputs of the compacted model.

torch.export of one runs by default, ten of both with SPARSEKIT_AO_EXHAUSTIVE=1 in the environment; a tutorial, which
is tested too, exports a compacted Llama to ONNX.
"""

import hf_models
import pytest
import torch
from discovered import fill
from grids import EXHAUSTIVE
from networks import NETWORKS
from torch import nn

from sparsekit_ao.removal import shrink

ALL = ("ResNet", "DenseNet", "MobileNet v3", "U-Net", "ViT", "LSTM", "Llama", "GPT-2", "BERT", "OPT")


class Tensors(nn.Module):
    """A transformers model with positional tensors in, and one tensor out."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs, strict=True)), use_cache=False)[0]


def shrunk(name):
    if name in NETWORKS:
        torch.manual_seed(0)
        network, inputs = NETWORKS[name]
        x = inputs()
        return shrink(fill(network()), x)[0].eval(), (x,)
    model, inputs = hf_models.make(name)
    small, report = shrink(model, inputs)
    assert report.after.parameters < report.before.parameters
    return Tensors(small, tuple(inputs)).eval(), tuple(inputs.values())


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # of torch, of every LSTM
@pytest.mark.parametrize("name", ALL if EXHAUSTIVE else ("VGG",))
def test_torch_export(name):
    small, inputs = shrunk(name)
    with torch.no_grad():
        program = torch.export.export(small, inputs).module()
        torch.testing.assert_close(program(*inputs), small(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")  # of torch
@pytest.mark.parametrize("name", ALL if EXHAUSTIVE else ())
def test_onnx(name, tmp_path):
    import onnxruntime

    small, inputs = shrunk(name)
    path = tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(small, inputs, path, dynamo=True, verbose=False)
        want = small(*inputs).numpy()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    found = session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))[0]
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(want), rtol=1e-4, atol=1e-5)
