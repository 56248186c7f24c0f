"""Printed reports: rows and lines that are equal but for the numbers in their names share one."""

import re

import pytest
import torch
from grids import nightly_except
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from sparsekit_ao import export, prune, shrink

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 24}
IDS = {"input_ids": torch.arange(12).reshape(2, 6)}


class Residual(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


MODELS = {
    "Llama": lambda: (LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, **SMALL)), IDS),
    "BERT": lambda: (BertModel(BertConfig(num_hidden_layers=5, **SMALL)), IDS),
    "blocks": lambda: (nn.Sequential(*(Residual(16) for _ in range(12))), torch.randn(3, 8)),
    "two sizes": lambda: (
        nn.Sequential(*map(Residual, [16] * 5 + [24] * 5)),
        torch.randn(3, 8),
    ),
}


def plain(line):
    return re.sub(r"\d+", "0", line)


@pytest.mark.parametrize("name", nightly_except(MODELS, "BERT", "blocks", "two sizes"))
def test_equal_rows_of_many_layers_are_one_row_with_a_pattern(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    reports = [
        shrink(model.eval(), inputs, 0.5, dry_run=name in ("Llama", "BERT"), progress=False)[1],
        prune(model, "2:4", batches=[inputs], dry_run=True, progress=False)[1],
        export.report(model),
    ]
    for report in reports:
        assert len(report) >= 5  # of one kind
        rows = report.table(folds=True).splitlines()
        folded = [row for row in rows if re.search(r"\*.* \(\d+\)", row)]
        counts = [int(re.findall(r"\((\d+)\)", row)[-1]) for row in folded]
        assert folded and all(count > 3 for count in counts)
        assert sum(counts) + len(rows) - 1 - len(folded) == len(report)
        rest = [plain(row) for row in rows if row not in folded]
        assert all(rest.count(row) <= 3 for row in rest)
        assert len(report.table().splitlines()) == len(report) + 1 and report._repr_html_().count("<tr>") == len(rows)
        lines = [plain(line) for line in report.below()]
        assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_equal_rows_stay_as_they_are(layers):
    model = nn.Sequential(*(nn.Sequential(Residual(16)) for _ in range(layers)))
    for report in (shrink(model, torch.randn(3, 8), 0.5, progress=False)[1], export.report(model)):
        assert report.table(folds=True) == report.table()


def test_reasons_name_patterns():
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **SMALL)).eval()
    with pytest.warns(UserWarning, match="only .* of the weights were pruned"):
        report = prune(model, "4:32", progress=False)[1]
    assert "left out: model.layers.*.self_attn.q_proj.weight (8), " in str(report)
