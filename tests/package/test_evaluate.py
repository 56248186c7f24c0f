"""`evaluate` of `prune` and `shrink`: called on the dense and on the final model, logged, and stored in the report."""

import copy
import logging
import pathlib
import re
import sys
import types

import pytest
import torch
from pruned_models import Model, correlated

from sparsekit_ao import SparsityError, prune, shrink

CALLS = {
    "prune": lambda model, **options: prune(model, "2:4", batches=correlated(), **options),
    "prune in place": lambda model, **options: prune(model, 0.5, inplace=True, **options),
    "shrink": lambda model, **options: shrink(model, batches=correlated(), **options),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_report_has_what_it_returns_for_the_dense_and_the_final_model(call, caplog):
    model, called = Model().train(), []

    def evaluate(m):
        called.append(m)
        assert not torch.is_grad_enabled() and not any(module.training for module in m.modules())
        return {"nonzero": sum(int((p != 0).sum()) for p in m.parameters()), "mean": m(correlated()[0]).mean()}

    with torch.no_grad():
        mean = model.eval()(correlated()[0]).mean()
    with caplog.at_level(logging.INFO, "sparsekit_ao"):
        final, report = CALLS[call](model.train(), evaluate=evaluate)
    assert called[0] is model and called[1] is final and len(called) == 2 and final.training and model.training
    before, after = report.evaluation["nonzero"]
    assert after == sum(int((p != 0).sum()) for p in final.parameters()) < before
    assert report.evaluation["mean"][0] == pytest.approx(float(mean))
    assert str(report).startswith(f"nonzero: {before:.4g} for the dense model, {after:.4g} now")
    assert report.metrics()["evaluation/nonzero"] == after
    logged = "\n".join(caplog.messages)
    assert f"the dense model: nonzero {before:.4g}" in logged and f"model: nonzero {after:.4g}" in logged


@pytest.mark.parametrize("call", CALLS)
def test_one_number_and_bad_values(call):
    model = Model()
    before = [p.clone() for p in model.parameters()]
    for bad, text in ((0.5, "evaluate must be a function"), (lambda m: "good", "evaluate must return a number")):
        with pytest.raises(SparsityError, match=text):
            CALLS[call](model, evaluate=bad)
    assert all(map(torch.equal, before, model.parameters()))
    numbers = iter((0.75, torch.tensor(0.5)))
    report = CALLS[call](model, evaluate=lambda m: next(numbers))[1]
    assert report.evaluation == {"evaluation": (0.75, 0.5)}
    assert not CALLS[call](Model(), evaluate=lambda m: 1 / 0, dry_run=True)[1].evaluation


def fails(m):
    raise RuntimeError("out of\nmemory")


LATER = {  # {what: (what evaluate does with the final model, the reason in the warning)}
    "out of memory": (fails, "RuntimeError: out of memory"),
    "no text": (lambda m: next(iter(())), "StopIteration"),
    "another shape": (lambda m: m(torch.ones(3, 7)), "RuntimeError: "),
    "no number": (lambda m: "good", "SparsityError: .* must return a number"),
    "some numbers": (lambda m: {"evaluation": [1, 2]}, "SparsityError: .* must return a number"),
    "a key": (lambda m: {}["accuracy"], "KeyError: 'accuracy'"),
}


@pytest.mark.parametrize("what", LATER)
@pytest.mark.parametrize("call", CALLS)
def test_a_final_model_that_cannot_be_evaluated_is_returned_all_the_same(call, what):
    then, why = LATER[what]
    calls, model = [], Model()
    same = copy.deepcopy(model)

    def evaluate(m):
        calls.append(m)
        return 0.5 if len(calls) == 1 else then(m)

    with pytest.warns(UserWarning, match=f"evaluate failed \\({why}.*the report has NaN for it") as warned:
        final, report = CALLS[call](model, evaluate=evaluate)
    assert [w.filename for w in warned] == [__file__] and calls[1] is final
    wanted = CALLS[call](same)[0]
    assert all(map(torch.equal, final.parameters(), wanted.parameters()))
    assert str(report.evaluation) == "{'evaluation': (0.5, nan)}" and "evaluation: 0.5 for the dense" in str(report)
    with pytest.raises(ZeroDivisionError):  # before any work is done
        CALLS[call](Model(), evaluate=lambda m: 1 / 0)


def test_the_function_of_the_page_calls_lm_eval(monkeypatch):
    """With a stub of its interface."""
    page = (pathlib.Path(__file__).parents[2] / "docs/one_shot.md").read_text()
    names = {"tokenizer": "the tokenizer"}
    exec(re.search(r"```python\n(def evaluate\(.*?)```", page, re.DOTALL)[1], names)
    stub, huggingface = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.models.huggingface")
    stub.models = types.ModuleType("lm_eval.models")
    stub.models.huggingface = huggingface
    huggingface.HFLM = lambda *, pretrained, tokenizer: (pretrained, tokenizer)

    def simple_evaluate(*, model, tasks, limit):
        assert model[1] == "the tokenizer"
        share = sum(float((p != 0).float().mean()) for p in model[0].parameters()) / len([*model[0].parameters()])
        return {"results": {task: {"alias": task, "acc,none": share, "acc_stderr,none": 0.1} for task in tasks}}

    stub.simple_evaluate = simple_evaluate
    for module in (stub, stub.models, huggingface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    report = prune(Model(), "2:4", evaluate=names["evaluate"])[1]
    assert [*report.evaluation] == ["arc_easy", "hellaswag"]
    assert all(after < before for before, after in report.evaluation.values())
