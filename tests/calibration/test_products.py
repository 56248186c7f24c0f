"""Statistics of any weight that a product reads, compared with float64 references."""

import copy

import hf_models
import pytest
import torch
from networks import Net
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import ScopeSparsifier, prune
from sparsekit_ao.calibration import Recorder


def recorded(model, names, run, need="input_gram", token_mask=None):
    """{name: statistics} of one run of a model."""
    tensors = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
    recorder = Recorder(model, tensors)
    with torch.no_grad(), recorder.recording({name: [need] for name in names}) as recording:
        recording.token_mask = token_mask
        run(model)
    return {name: recorder.of(name) for name in names}


def gram_of(x):
    x = x.double().flatten(0, -2)
    return x.T @ x


def check(found, expected, tolerance=1e-6):
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, float(error)


EXPERTS = [f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


def one_by_one(experts, hidden, chosen, keep):
    """{name: [Gram matrix of each expert]}, {name: [its tokens]}, of experts that run one after another."""
    is_transposed = experts.is_transposed
    grams = {"gate_up_proj": [], "down_proj": []}
    tokens, experts, hidden = [], copy.deepcopy(experts).double(), hidden.double()
    for e in range(len(experts.gate_up_proj)):
        x = hidden[(chosen == e).any(1) & keep]
        up, down = experts.gate_up_proj[e], experts.down_proj[e]
        both = x @ (up if is_transposed else up.T)
        if getattr(experts, "has_bias", False):
            both = both + experts.gate_up_proj_bias[e]
        gated = experts._apply_gate(both)
        assert gated.shape[-1] == (down if is_transposed else down.T).shape[0]
        grams["gate_up_proj"].append(gram_of(x)), grams["down_proj"].append(gram_of(gated))
        tokens.append(len(x))
    return {name: torch.stack(g) for name, g in grams.items()}, tokens


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "GPT-OSS", "DeepSeek-V3"])
@torch.no_grad()
def test_experts_have_a_gram_matrix_each(name, implementation):
    (model, _), ids = hf_models.make(name), torch.randint(0, 50, (2, 24))
    model.set_experts_implementation(implementation)
    mlp = model.model.layers[1].mlp
    seen = []
    handle = mlp.experts.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append([*args, *kwargs.values()]), with_kwargs=True
    )
    keep = torch.ones(2, 24, dtype=torch.bool)
    keep[1, 15:] = False
    for mask in (None, keep):
        found = recorded(model, EXPERTS, lambda model: model(ids), token_mask=mask)
        hidden, chosen = seen[-1][:2]
        counted = keep.reshape(-1) if mask is not None else torch.ones(48, dtype=torch.bool)
        expected, tokens = one_by_one(mlp.experts, hidden.reshape(48, -1), chosen.reshape(48, -1), counted)
        for tensor in EXPERTS:
            statistics = found[tensor]
            assert statistics.tokens_of_groups.tolist() == tokens and statistics.tokens == sum(tokens)
            check(statistics.sums["input_gram"], expected[tensor.rpartition(".")[2]])
            weight = model.get_parameter(tensor)
            matrix = statistics.matrix(weight)
            assert torch.equal(matrix, weight.mT if name == "GPT-OSS" else weight)
            assert torch.equal(statistics.from_matrix(matrix), weight)
    handle.remove()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@torch.no_grad()
def test_masked_experts_are_recorded_as_dense_ones(implementation):
    (model, _), ids = hf_models.make("GPT-OSS"), torch.randint(0, 50, (2, 24))
    model.set_experts_implementation(implementation)
    dense = recorded(model, EXPERTS, lambda model: model(ids))
    sparsifier = ScopeSparsifier(pattern="2:4")
    sparsifier.prepare(model, [{"tensor_fqn": EXPERTS}])
    masked = recorded(model, EXPERTS, lambda model: model(ids))
    for name in EXPERTS:
        check(masked[name].sums["input_gram"], dense[name].sums["input_gram"].double())
    sparsifier.step()
    mask = sparsifier.mask(EXPERTS[0])  # 2:4 along the inputs, dimension 1
    assert (mask.unflatten(1, (-1, 4)).sum(2) == 2).all()


def test_an_expert_without_tokens_takes_the_mean_of_the_others():
    def run(m, x):
        return F.linear(x[:4], m.weight[0]).sum() + F.linear(x[4:], m.weight[2]).sum()

    experts, x = Net(run, weight=nn.Parameter(torch.randn(3, 4, 8))), torch.randn(10, 8)
    found = recorded(experts, ["weight"], lambda model: model(x))["weight"]
    assert found.tokens_of_groups.tolist() == [4, 0, 6] and found.tokens == 10
    mean = gram_of(x) / 10
    check(found.input_gram[1], mean * 0.8)  # 0.1 tokens for each of 8 inputs
    check(found.input_gram[0], gram_of(x[:4]) + mean * 0.8)
    check(found.input_square[1, 0], mean.diagonal() * 0.8)
    again = Recorder(None, {}, {"weight": found}).saved()["weight"]
    assert again["sums"]["tokens_of_groups"].tolist() == [4, 0, 6]


PRODUCTS = {
    "linear": (lambda x, w: F.linear(x, w), 1),
    "matmul": (lambda x, w: torch.matmul(x, w), 0),
    "@": (lambda x, w: x @ w, 0),
    "@ transposed": (lambda x, w: x @ w.T, 1),
    "mm": (lambda x, w: torch.mm(x.flatten(0, 1), w), 0),
    "weight first": (lambda x, w: w @ x.mT, 1),
    "weight first, transposed": (lambda x, w: w.mT @ x.mT, 0),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(8), x.flatten(0, 1), w), 0),
    "einsum": (lambda x, w: torch.einsum("bti,oi->bto", x, w), 1),
    "einsum with an ellipsis": (lambda x, w: torch.einsum("...i,io->...o", x, w), 0),
    "halves of the outputs": (lambda x, w: torch.cat([F.linear(x, w[:4]), F.linear(x, w[4:])], -1), 1),
    "halves of the inputs": (lambda x, w: F.linear(x[..., :4], w[:, :4]) + F.linear(x[..., 4:], w[:, 4:]), 1),
    "another dtype": (lambda x, w: F.linear(x.double(), w.double()), 1),
    "a copy": (lambda x, w: x @ w.clone(), 0),
    "expanded": (lambda x, w: torch.bmm(x, w.expand(2, 8, 8)), 0),
}


def raw(product):
    return Net(lambda m, x: product(x, m.w), w=nn.Parameter(torch.randn(8, 8)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_raw_parameters_by_any_product(name):
    product, input_dim = PRODUCTS[name]
    model, x = raw(product), torch.randn(2, 5, 8)
    found = recorded(model, ["w"], lambda model: model(x))["w"]
    gram = gram_of(x)
    if name == "halves of the inputs":  # each half has a product of its own
        gram = torch.block_diag(gram[:4, :4], gram[4:, 4:])
    check(found.input_gram[0], gram)
    assert found.tokens == 10
    assert torch.equal(found.matrix(model.w)[0], model.w if input_dim else model.w.T)


def test_a_weight_that_is_used_twice_adds_both():
    layers = {"embed": nn.Embedding(8, 4), **{name: nn.Linear(4, 8, bias=False) for name in ("head", "again")}}
    model = Net(lambda m, ids, x: (m.head(m.embed(ids)), m.again(x)), **layers)
    model.head.weight = model.again.weight = model.embed.weight
    ids, x = torch.tensor([[1, 2, 2]]), torch.randn(3, 4)
    found = recorded(model, ["head.weight"], lambda model: model(ids, x))["head.weight"]
    check(found.input_gram[0], gram_of(model.embed(ids).detach()) + gram_of(x))
    assert found.tokens == 6
    counted = recorded(model, ["embed.weight"], lambda model: model(ids, x), "input_square")["embed.weight"]
    assert counted.input_square[:, 0].tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def unfused(cell, x, reverse=False):
    """The hidden states that each step of a recurrent cell reads."""
    state, reads = None, []
    for step in reversed(x) if reverse else x:
        hidden = state[0] if isinstance(state, tuple) else state
        reads.append(torch.zeros(1, cell.hidden_size) if hidden is None else hidden)
        state = cell(step[None], state)
    return torch.cat(reads), state


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("form", ["batch first", "time first", "packed"])
@torch.no_grad()
def test_recurrent_layers_read_inputs_and_hidden_states(kind, form):
    layer = getattr(nn, kind)(5, 4, 2, bidirectional=True, batch_first=form != "time first").eval()
    lengths, x = [6, 4] if form == "packed" else [6, 6], torch.randn(2, 6, 5)
    names = [name for name, p in layer.named_parameters() if p.ndim == 2]

    def run(model):
        if form == "packed":
            return model(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
        return model(x if form == "batch first" else x.mT.transpose(1, 2).transpose(0, 1))

    found = recorded(layer, names, run)
    inputs = [x[b, :n] for b, n in enumerate(lengths)]
    for number in range(2):
        reads, outputs = {"": [], "_reverse": []}, []
        for one in inputs:
            both = []
            for suffix in ("", "_reverse"):
                cell = getattr(nn, f"{kind}Cell")(one.shape[1], 4)
                for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                    getattr(cell, part).copy_(getattr(layer, f"{part}_l{number}{suffix}"))
                before, last = unfused(cell, one, suffix != "")
                reads[suffix].append(before)
                last = last[0] if isinstance(last, tuple) else last
                after = torch.cat([before[1:], last])
                both.append(after.flip(0) if suffix else after)
            outputs.append(torch.cat(both, 1))
        for suffix in ("", "_reverse"):
            check(found[f"weight_ih_l{number}{suffix}"].input_gram[0], gram_of(torch.cat(inputs)), 1e-5)
            check(found[f"weight_hh_l{number}{suffix}"].input_gram[0], gram_of(torch.cat(reads[suffix])), 1e-5)
        inputs = outputs


@torch.no_grad()
def test_padding_of_a_recurrent_tagger_is_left_out_also_where_it_is_masked():
    layers = {"lstm": nn.LSTM(5, 4, batch_first=True), "head": nn.Linear(4, 3)}
    model, x = Net(lambda m, x: m.head(m.lstm(x)[0]), **layers), torch.randn(2, 6, 5)
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    names = ["lstm.weight_ih_l0", "lstm.weight_hh_l0", "head.weight"]
    dense = recorded(model, names, lambda model: model(x), token_mask=keep)
    check(dense[names[0]].input_gram[0], gram_of(x[keep]))
    assert {s.tokens for s in dense.values()} == {10}
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model, [{"tensor_fqn": names}])
    masked = recorded(model, names, lambda model: model(x), token_mask=keep)
    for name in names:
        check(masked[name].input_gram[0], dense[name].input_gram[0].double())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
@torch.no_grad()
def test_attention_fused_or_not(is_training, batch_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first).train(is_training)
    x = torch.randn(2, 5, 8)
    names = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"]
    found = recorded(layer, names, lambda model: model(x))
    check(found[names[0]].input_gram, gram_of(x).expand(3, 8, 8))
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    attention.load_state_dict(layer.self_attn.state_dict())
    nn.init.eye_(attention.out_proj.weight), nn.init.zeros_(attention.out_proj.bias)
    check(found[names[1]].input_gram[0], gram_of(attention(x, x, x)[0]), 1e-5)
    assert {s.tokens for s in found.values()} == {10}


def test_compiled_models_and_computed_weights_are_observed():
    linear = nn.Linear(4, 4, bias=False)
    model, x = torch.compile(nn.Sequential(linear), backend="eager"), torch.randn(3, 4)
    model(x)
    found = recorded(model, ["_orig_mod.0.weight"], lambda model: model(x))["_orig_mod.0.weight"]
    check(found.input_gram[0], gram_of(x))
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    check(recorded(normed, ["0.weight"], lambda model: model(x))["0.weight"].input_gram[0], gram_of(x))


def test_products_of_other_tensors_are_none_of_a_weight():
    model = raw(lambda x, w: (x @ x.mT @ x, w.sum()))
    found = recorded(model, ["w"], lambda model: model(torch.randn(2, 5, 8)))["w"]
    assert not found.sums


@pytest.mark.parametrize(
    ("equation", "shape"),
    [
        ("bti,oj->btioj", (8, 8)),  # nothing is summed
        ("bti,to->bo", (6, 8)),  # a sum over inputs that the weight does not read
        ("bti,bti->bt", (5, 6, 8)),  # a weight of its own for each token
    ],
)
def test_an_einsum_that_is_no_layer_is_not_taken_for_one(equation, shape):
    model = Net(lambda m, x: torch.einsum(equation, x, m.w), w=nn.Parameter(torch.randn(shape)))
    assert not recorded(model, ["w"], lambda model: model(torch.randn(5, 6, 8)))["w"].sums


@torch.no_grad()
def test_experts_that_all_read_all_tokens_leave_out_masked_ones():
    model = Net(lambda m, x: x.flatten(0, 1).expand(3, -1, -1) @ m.w, w=nn.Parameter(torch.randn(3, 8, 4)))
    x, keep = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    keep[1, 2:] = False
    found = recorded(model, ["w"], lambda model: model(x), token_mask=keep)["w"]
    assert found.tokens_of_groups.tolist() == [7, 7, 7]
    check(found.sums["input_gram"], gram_of(x[keep]).expand(3, 8, 8))


def test_copies_and_checkpoints_know_which_dimension_inputs_are():
    x, model, other = torch.randn(4, 8), raw(lambda x, w: x @ w), raw(lambda x, w: x @ w)
    sparsifiers = [ScopeSparsifier(0.5, score="wanda") for _ in range(2)]
    for sparsifier, each in zip(sparsifiers, (model, other), strict=True):
        sparsifier.prepare(each, [{"tensor_fqn": "w"}])
    sparsifiers[0].calibrate([x])
    sparsifiers[1].load_state_dict(sparsifiers[0].state_dict())
    for one in (*sparsifiers, copy.deepcopy(sparsifiers[0])):
        torch.testing.assert_close(one.statistics["w"].input_square[:, 0], x.square().sum(0))


def test_sparse_and_batched_tensors_pass_by():
    model = raw(lambda x, w: (torch.eye(8).to_sparse() @ x[0].T, torch.vmap(lambda row: w @ row)(x[0])))
    x = torch.randn(2, 5, 8)
    recorded(model, ["w"], lambda model: model(x))


def test_gathered_tokens_are_followed_through_what_is_computed_of_them():
    def gathered(m, x):
        flat = x.flatten(0, 1)
        rows = flat[torch.tensor([5, 0, 3, 3, 1])]
        wide = m.first(rows).relu().repeat_interleave(2, dim=1)
        return m.second(wide).index_select(0, torch.tensor([1]))

    model = Net(gathered, first=nn.Linear(4, 4), second=nn.Linear(8, 2))
    x, keep = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    found = recorded(model, ["first.weight", "second.weight"], lambda model: model(x), token_mask=keep)
    check(found["first.weight"].input_gram[0], gram_of(x.flatten(0, 1)[[0, 3, 3, 1]]))
    assert found["second.weight"].tokens == 4


TWO_PRODUCTS = {
    "linear and matmul": lambda m, x: m.fc(x) + m.mix @ x,
    "matmul and linear": lambda m, x: m.mix @ x + m.fc(x),
    "two matmuls": lambda m, x: x @ m.fc.weight.T + m.mix @ x,
    "two einsums": lambda m, x: torch.einsum("bti,oi->bto", x, m.fc.weight) + torch.einsum("st,bti->bsi", m.mix, x),
    "linear of the transpose": lambda m, x: m.fc(x) + F.linear(x.mT, m.mix).mT,
}


@pytest.mark.parametrize("tokens", [5, 6])
@pytest.mark.parametrize("case", TWO_PRODUCTS)
def test_products_along_different_dimensions_of_one_tensor_have_sums_of_their_own(case, tokens):
    torch.manual_seed(0)
    model = Net(TWO_PRODUCTS[case], fc=nn.Linear(6, 6))
    model.mix = nn.Parameter(torch.randn(tokens, tokens))
    x = torch.randn(8, tokens, 6)
    recorder = Recorder(model, {"fc.weight": (model.fc, "weight"), "mix": (model, "mix")})
    recorder.run([x], {"fc.weight": ["input_gram"], "mix": ["input_gram"]})
    for name, rows in {"fc.weight": x.flatten(0, 1), "mix": x.mT.flatten(0, 1)}.items():
        torch.testing.assert_close(recorder.of(name).sums["input_gram"][0], rows.T @ rows)
    _, report = prune(model, 0.5, batches=[x])
    assert len(report.rows) == 2 and not any(row.note for row in report.rows)
