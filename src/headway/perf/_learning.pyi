import numpy as np

layout: int

def learn(
    state: np.ndarray,
    above: int,
    width: int,
    beyond: int,
    sampled: int,
    attended: int,
    read: int,
    predicted_s: float,
    error: float,
    /,
) -> list[float]: ...
