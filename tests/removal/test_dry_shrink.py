"""A dry run of `shrink` has the sizes of the real one, and changes nothing."""

import copy

import pytest
import torch
from networks import NETWORKS
from transformers import LlamaConfig, LlamaForCausalLM

from sparsekit_ao import shrink


def llama():
    keys = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 50}
    return LlamaForCausalLM(LlamaConfig(**keys, num_hidden_layers=5, num_key_value_heads=2)).eval()


IDS = [torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(k)) for k in range(3)]
CASES = {
    "llama": (llama, lambda: None, {"ratio": 0.5, "batches": IDS, "recover": True}),
    "llama, flops": (llama, lambda: IDS[0], {"ratio": 0.3, "budget": "flops", "keep_config": False}),
    "llama, named": (llama, lambda: IDS[0], {"ratio": {"mlp": 0.25}, "score": "norm"}),
    **{name: (*NETWORKS[name], {"ratio": 0.5}) for name in ("MobileNetV2", "DenseNet") if name in NETWORKS},
}


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_has_the_sizes_of_the_real_one_and_changes_nothing(case):
    torch.manual_seed(0)
    make, inputs, options = CASES[case]
    model = make()
    example, before, state = inputs(), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    same, plan = shrink(model, example, **options, dry_run=True)
    assert same is model and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = shrink(model, example, **options)[1]
    assert (plan.before, plan.after) == (report.before, report.after) and plan.after.parameters < plan.before.parameters
    assert plan.couplings == report.couplings and plan.left_out == report.left_out and plan.frozen == report.frozen
    assert str(plan).startswith("dry run: nothing was removed") and "largest relative difference" not in str(plan)


def test_a_dry_run_reads_the_first_batch_alone():
    seen = []

    def forward(model, batch):
        seen.append(batch)
        return model(batch)

    shrink(llama(), batches=IDS, forward=forward, recover=True, dry_run=True)
    assert seen and all(torch.equal(batch, IDS[0]) for batch in seen)
