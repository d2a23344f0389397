"""What kernels take that read or write elements at indices, compare points, or draw random numbers."""

from __future__ import annotations

from math import prod

import torch

from tb_memplugin.estimate.kernels.sorting import sort_bytes
from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel, copied_bytes, operators

_WITHOUT_SORTING = 3072
"""With at most this many indices, an embedding's gradient needs no buffers for sorting."""

_MAXIMUM = 2
"""The mode of `embedding_bag` that takes the maximum, whose derivative sorts nothing."""

_ROWS_A_THREAD = 10
"""The constant NROWS_PER_THREAD of EmbeddingBackwardKernel.cu."""


def _accumulated_at(call: Call) -> Buffers:
    """Return what adds values at indices, as the derivative of indexing does.

    These are the indices, a contiguous copy of the values, the sorted indices with their order, and what
    they are sorted with.
    """
    if not call["accumulate"] or all(index is None for index in call["indices"]):
        return ()
    rows, dimension, shapes, masked = 1, 0, list[torch.Size](), False
    for index in call["indices"]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        dimensions = index.dim() if is_mask else 1
        if index is not None:
            rows *= prod(call.out.shape[dimension : dimension + dimensions])
            shapes.append(index.shape)
        dimension, masked = dimension + dimensions, masked or is_mask
    if not rows or not call.out.numel():
        return ()
    if masked:  # it selects as many rows as there are values
        count = call["values"].numel() // (call.out.numel() // rows)
    else:
        count = prod(torch.broadcast_shapes(*shapes))
    if not count:
        return ()
    temporary = sort_bytes(count, 8, 8, call.gpu, bits=max(1, (rows - 1).bit_length()))
    return [8 * count, copied_bytes(call["values"]), *[8 * count] * 3, temporary]


def _scattered(call: Call) -> Buffers:
    """Return the prefix sum of the mask in 8 bytes each, and the expanded mask if it is broadcast."""
    elements = call.out.numel()
    return [elements if call["mask"].numel() < elements else 0, 8 * elements]


def _bags(call: Call) -> Buffers:
    """Return a copy of the gradient, and what sums and means of bags sort."""
    gradient = call["grad"]
    return [copied_bytes(gradient), *(_sorted(call, gradient) if call["mode"] != _MAXIMUM else ())]


def _embedding(call: Call) -> Buffers:
    """Return a copy of the gradient, and what many indices are sorted with."""
    gradient = call["grad_output"]
    sorts = call["indices"].numel() > _WITHOUT_SORTING or call["scale_grad_by_freq"]
    return [copied_bytes(gradient), *(_sorted(call, gradient) if sorts else ())]


def _sorted(call: Call, gradient: torch.Tensor) -> list[int]:
    """Return the sorted indices, segments of equal indices, and a float32 row for each partial sum.

    Gradients that are scaled by how often an index occurs need these numbers first.
    """
    indices = call["indices"]
    count, width, index = indices.numel(), gradient.shape[-1], indices.element_size()
    counts = [indices.nbytes] * bool(call["scale_grad_by_freq"])
    segments = min(count, call["num_weights"])
    partial = count // _ROWS_A_THREAD + segments
    sums = partial * width * max(4, gradient.element_size())
    return [*counts, *[count * index] * 3, 8, segments * index, segments * index, 8, partial * index, sums]


def _averaged(call: Call) -> Buffers:
    """Return how many elements meet at each index, ones that are counted, and a mask."""
    if call["reduce"] != "mean":
        return ()
    out = call.out
    return [out.nbytes, call["src"].numel() * out.element_size(), out.numel()]


def _searched(call: Call) -> Buffers:
    """Return contiguous copies of the sorted rows and of what is looked for."""
    return [copied_bytes(call["sorted_sequence"]), copied_bytes(call["self"])]


def _points(call: Call) -> list[int]:
    """Return contiguous copies of both sets of points, as many batches of each as both have together."""
    pair = (call["x1"], call["x2"])
    batch = torch.broadcast_shapes(*(points.shape[:-2] for points in pair))
    return [copied_bytes(points.expand(*batch, *points.shape[-2:])) for points in pair]


def _differences(call: Call) -> Buffers:
    """Return a gradient for each coordinate of each pair of points; of two sets, also their copies."""
    out, coordinates = call.out, call.out.shape[-1] * call.out.element_size()
    if call.get("x1") is None:
        return [out.shape[0] * (out.shape[0] - 1) * coordinates]
    return [*_points(call), call.args[0].numel() * coordinates]  # "grad", since 2.15 "grad_output"


def _distances(call: Call) -> Buffers:
    """Return the two matrices that are multiplied: the points with two columns more."""
    return [
        points.numel() // points.shape[-1] * (points.shape[-1] + 2) * points.element_size()
        for points in (call["x1"], call["x2"])
    ]


def _probabilities(call: Call) -> Buffers:
    """Return the probabilities in float32."""
    probabilities = call.get("p")
    probabilities = call["self"] if probabilities is None else probabilities
    if probabilities.device.type != "cuda" or probabilities.dtype in (torch.float32, torch.float64):
        return ()
    return [4 * probabilities.numel()]


def _drawn(call: Call) -> Buffers:
    """Return random numbers for each probability and the largest, or three tensors of probabilities."""
    probabilities, several = call["self"], call["num_samples"] > 1
    size = probabilities.nbytes
    if call["replacement"] and several:
        return [size] * 3
    return [size, call.out.numel() * probabilities.element_size() * several]


KERNELS = (
    Kernel(
        operators("embedding_dense_backward"),
        _embedding,
        source="cuda/Embedding.cu:embedding_dense_backward_cuda",
    ),
    Kernel(
        operators("_embedding_bag_backward"),
        _bags,
        source="cuda/EmbeddingBag.cu:_embedding_bag_dense_backward_cuda",
        rare="nn.EmbeddingBag in training",
    ),
    Kernel(
        operators("masked_scatter", "masked_scatter_"),
        _scattered,
        source="cuda/IndexKernel.cpp:masked_scatter__cuda",
        rare="models of images and text, which write image tokens with masked_scatter",
    ),
    Kernel(
        operators("index_put", "index_put_", "_index_put_impl_"),
        _accumulated_at,
        source="cuda/Indexing.cu:index_put_with_sort_kernel",
    ),
    Kernel(
        operators("scatter_reduce.two"),
        _averaged,
        source="TensorAdvancedIndexing.cpp:scatter_reduce_two",
        rare="graph networks that average neighbours with scatter_reduce",
    ),
    Kernel(
        operators("searchsorted.Tensor"),
        _searched,
        source="cuda/Bucketization.cu:searchsorted_out_cuda",
        rare="searchsorted of what is not contiguous",
    ),
    Kernel(
        operators("_cdist_backward", "_pdist_backward"),
        _differences,
        source="cuda/DistanceKernel.cu:cdist_backward_kernel_impl, pdist_backward_kernel_impl",
        rare="training through cdist or pdist",
    ),
    Kernel(
        operators("_cdist_forward"),
        _points,
        source="Distance.cpp:cdist_impl",
        rare="cdist of points that are not contiguous",
    ),
    Kernel(
        operators("_euclidean_dist"),
        _distances,
        source="Distance.cpp:_euclidean_dist",
        on="",
        rare="cdist of more than 25 points",
    ),
    Kernel(
        operators("bernoulli", "bernoulli.Tensor", "bernoulli_.Tensor"),
        _probabilities,
        source="cuda/DistributionTemplates.h:bernoulli_kernel",
        rare="bernoulli of probabilities in half precision",
    ),
    Kernel(
        operators("multinomial"),
        _drawn,
        source="Distributions.cpp:multinomial_out, cuda/MultinomialKernel.cu",
        rare="sampling of tokens with multinomial",
    ),
)
