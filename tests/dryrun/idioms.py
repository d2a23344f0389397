"""What programs do with values of small tensors on the GPU. Prints a line of JSON, then asks for more."""

import json

import torch

d = "cuda"
v = torch.tensor([0, 1, 0, 2], device=d)
said = {
    "randint": all(0 <= n < 10 for n in torch.randint(0, 10, (50,), device=d).tolist()),
    "isfinite": torch.isfinite(torch.randn(4, device=d)).all().item(),
    "mask": bool(torch.ones(4, 4, dtype=torch.bool, device=d).all()),
    "maximum": torch.tensor([3, 5, 2], device=d).max().item(),
    "nonzero": v.nonzero().tolist(),
    "selected": v[v > 0].tolist(),
    "unique": torch.unique(v).tolist(),
    "counts": torch.unique(v, return_counts=True)[1].tolist(),
    "rows": torch.unique(v.view(2, 2)[:, :1], dim=0).tolist(),
    "repeated": torch.repeat_interleave(v).tolist(),
    "bincount": torch.bincount(v).tolist(),
    "equal": [torch.equal(v, v.clone()), torch.equal(v, v + 1)],
    "allclose": torch.allclose(v.float(), v.float()),
    "cumsum": v.cumsum(0).tolist(),
    "scatter": torch.zeros(4, device=d).scatter_add(0, v, torch.ones(4, device=d)).tolist(),
    "scaled": torch.amp.GradScaler().scale(torch.ones(1, device=d)).item(),
    "drawn": torch.distributions.Categorical(logits=torch.randn(4, 6, device=d)).sample().shape[0],
    "fourier": torch.fft.rfft(torch.ones(4, device=d)).real.tolist(),
}
order = torch.tensor([2, 0, 3, 1], device=d)
said["inverse"] = torch.empty_like(order).scatter_(0, order, torch.arange(4, device=d)).tolist()
packed = torch.nn.utils.rnn.pack_padded_sequence(
    torch.ones(4, 3, 2, device=d), torch.tensor([1, 3, 2, 1]), batch_first=True, enforce_sorted=False
)
said["lengths"] = torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[1].tolist()
said["some"] = torch.randn(2, 1 << 20, device=d)[0, :4].index_copy_(0, v[1:3], v[1:3].float()).tolist()
column = torch.empty(4, 4, device=d)
column[:, 1] = 5
said["column"] = column[:, 1].tolist()
net = torch.nn.Linear(8, 3).to(d)
optimizer = torch.optim.Adam(net.parameters(), 0.1)
data = torch.randn(16, 8, device=d)
losses = []
for _ in range(40):
    loss = (net(data) - data.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
said["learns"] = losses[-1] < losses[0] / 10
torch.manual_seed(0)
expected = torch.rand(2)
torch.manual_seed(0)
torch.nn.functional.dropout(torch.ones(8, device=d))
said["host's numbers stay"] = torch.rand(2).equal(expected)
stale = torch.full((1024,), 7.0, device=d)
del stale
said["new memory"] = torch.empty(1024, device=d)[:2].tolist()
large = torch.randn(2048, 2048, device=d)
said["large"] = [large.mean().item(), large[:1, :2].tolist(), large.argmax().item()]
said["large is finite"] = [
    large.isfinite().all().item(),
    bool(large.mean().isnan()),
    bool(large[0, 0] == -torch.inf),
]
said["large rows"] = [list(torch.unique(large, dim=dim).shape) for dim in (0, 1)]
said["counted"] = [int((large > 0).sum()), torch.count_nonzero(large[0] > 0).item()]
unknown, false = large[0] > 0, torch.zeros(2048, dtype=torch.bool, device=d)
said["joined"] = [
    (unknown & false).any().item(),
    (unknown[0] | ~false[0]).item(),
    bool(false[0] & unknown.all()),
]
rows = torch.arange(2048, device=d)
said["selected rows"] = [large[rows[unknown][3], :2].shape[0], rows[unknown].tolist() == rows.tolist()]
said["printed"] = str(large[0, :2]).partition(", d")[0]
said["normal"] = list(torch.normal(0.0, large.exp()).shape)
said["eigenvalues"] = torch.linalg.eigvalsh(torch.diag(v.float())).tolist()
said["factors"] = [list(torch.linalg.qr(large.view(-1, n, n))[1].shape) for n in (32, 2048)]
said["neighbours"] = list(torch.sparse.mm(torch.eye(4, device=d).to_sparse(), large[:4]).shape)
said["exponential"] = list(torch.matrix_exp(large.view(4, 1024, 1024)).shape)
said["each once"] = torch.unique(large[:2], return_counts=True)[1].unique().tolist()
said["inverted"] = list(torch.linalg.inv(large[:, :4].reshape(-1, 2, 2)).shape)
before = torch.cuda.memory_allocated()
layer = torch.nn.GRU(96, 160).to(d)
weights = torch.cuda.memory_allocated() - before
result = layer(torch.ones(7, 5, 96, device=d))[0]
said["reserve"] = torch.cuda.memory_allocated() - before - weights - 7 * 5 * 96 * 4
wide = torch.nn.Parameter(large)
steps, scaler = torch.optim.SGD([wide], momentum=0.9), torch.amp.GradScaler()
scaler.scale((wide * large).sum()).backward()
scaler.step(steps)
said["steps of unknown gradients"] = len(steps.state)
print("SAID", json.dumps(said), flush=True)
if (large > 0).any():
    print("not here")
