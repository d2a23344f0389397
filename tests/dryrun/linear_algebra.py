"""Factors and solves matrices on the GPU; prints the peak of each, forward and with its backward."""

from collections.abc import Callable

import torch
from torch import linalg

SQUARE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inverse": linalg.inv,
    "determinant": linalg.det,
    "logarithm": lambda x: linalg.slogdet(x)[1],
    "solved": lambda x: linalg.solve(x, x[..., :3]),
    "solved for a square": lambda x: linalg.solve(x, x),
    "solved from the right": lambda x: linalg.solve(x, x[..., :3, :], left=False),
    "negative power": lambda x: linalg.matrix_power(x, -2),
    "eigenvectors": lambda x: linalg.eigh(x)[1],
    "cholesky": lambda x: linalg.cholesky(x @ x.mT),
    "inverse by a factor": torch.cholesky_inverse,
    "solved by a factor": lambda x: torch.cholesky_solve(x[..., :3], x),
    "triangular": lambda x: linalg.solve_triangular(x, x[..., :3], upper=True),
}
ANY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "qr": lambda x: linalg.qr(x)[0],
    "svd": lambda x: linalg.svd(x, full_matrices=False)[0],
}
FORWARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "lu": lambda x: linalg.lu(x)[1],
    "singular values": linalg.svdvals,
    "least squares": lambda x: linalg.lstsq(x, x[..., :3])[0],
    "pseudoinverse": linalg.pinv,
}
SHAPES = ((300, 300), (6, 20, 20), (1, 20, 20), (3, 300, 300), (9, 10, 10), (5, 30, 20), (4, 300, 40))

weight = torch.ones(9, 9, device="cuda", requires_grad=True)
(weight @ linalg.solve_triangular(weight, weight, upper=True)).sum().backward()  # workspaces of cuBLAS
torch.manual_seed(0)
for shape in SHAPES:
    of_squares = {**SQUARE, "exponential": torch.matrix_exp} if len(shape) > 2 and shape[0] > 1 else SQUARE
    jobs = {**ANY, **FORWARD, **(of_squares if shape[-1] == shape[-2] else {})}
    for name, job in jobs.items():
        matrices = torch.randn(shape, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = job(matrices)
        peaks = [torch.cuda.max_memory_allocated() - before]
        if name not in FORWARD:
            result.backward(torch.ones_like(result))
            peaks.append(torch.cuda.max_memory_allocated() - before)
        print("PEAKS", name, shape, *peaks, flush=True)
        del result, matrices
