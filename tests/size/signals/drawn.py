"""What the micro-batches of an update measure, drawn at random."""

import math


def noise(rng, scale, size, num_parts=4, dims=50):
    """Return S and G2 as random parts of a batch give them, with all their scatter; the squared gradient is 1."""
    num_parts = min(num_parts, size)
    each = size / num_parts
    gradients = rng.normal(size=(num_parts, dims)) * math.sqrt(scale / dims / each)
    gradients[:, 0] += 1.0
    q, gb = each * (gradients**2).sum(), (gradients.mean(axis=0) ** 2).sum()
    s = (q - size * gb) / (num_parts - 1)
    return {"noise_s": float(s), "noise_g2": float(gb - s / size)}
