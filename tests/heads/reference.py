"""Multi-label BCE in float64 numpy, written from the definition: materialised logits and labels, no tricks."""

import numpy as np


def labels_of(targets, items):
    """[T, V] 0/1 from target sets; ids outside [0, V) are padding."""
    labels = np.zeros((len(targets), items))
    for row, ids in enumerate(np.asarray(targets)):
        for item in ids:
            if 0 <= item < items:
                labels[row, item] = 1
    return labels


def reference(h, table, targets, bias, weights, positive_weight=1.0, temperature=1.0, threshold=0.0):
    """Dict: per-token losses, weighted sum, its gradients, and (tp, fp, fn, tn) over tokens of positive weight."""
    h, table, weights = (np.asarray(x, np.float64) for x in (h, table, weights))
    bias = np.zeros(len(table)) if bias is None else np.asarray(bias, np.float64)
    z = h @ table.T / temperature + bias
    y = labels_of(targets, len(table))
    soft = np.logaddexp(0, z)
    losses = (positive_weight * y * np.logaddexp(0, -z) + (1 - y) * soft).sum(1)
    sigmoid = np.exp(z - soft)
    slope = ((1 - y) * sigmoid - positive_weight * y * np.exp(-z - np.logaddexp(0, -z))) * weights[:, None]
    active, above = (weights > 0)[:, None], z > threshold
    counts = [
        (active & part).sum() for part in (above & (y > 0), above & (y == 0), ~above & (y > 0), ~above & (y == 0))
    ]
    return {
        "losses": losses,
        "sum": (weights * losses).sum(),
        "hidden": slope @ table / temperature,
        "table": slope.T @ h / temperature,
        "bias": slope.sum(0),
        "weights": losses * (weights != 0),  # a masked token stays masked
        "counts": tuple(int(c) for c in counts),
        "ranks": ranks(z, y, weights),
        "margin": np.abs(z - threshold).min(),
    }


def ranks(z, labels, weights):
    """1 + the items above a token's best target; 0 for tokens without targets or positive weight."""
    best = np.where(labels > 0, z, -np.inf).max(1, keepdims=True)
    return np.where((labels > 0).any(1) & (weights > 0), 1 + (z > best).sum(1), 0)


def problem(seed, tokens=7, items=37, width=8, slots=4, scale=1.0, masked=0.3, bias=True):
    """Random arguments of a head: padding below and above the valid ids, repeats, masked tokens, odd weights."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, width)).astype(np.float32) * scale
    table = rng.normal(size=(items, width)).astype(np.float32)
    targets = rng.integers(-2, items + 2, (tokens, slots)).astype(np.int32)
    targets[:, -1] = targets[:, 0]
    weights = (rng.random(tokens) * (rng.random(tokens) >= masked)).astype(np.float32)
    return hidden, table, targets, rng.normal(size=items).astype(np.float32) if bias else None, weights
