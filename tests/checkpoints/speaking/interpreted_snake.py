"""The activation's kernels, run by Triton's interpreter, beside the plain formula and its gradients.

    TRITON_INTERPRET=1 python -m tests.checkpoints.speaking.interpreted_snake

Prints one JSON object: the largest error of the output and of each gradient, per case.
"""

import json

import torch

from checkpoints.speaking.recipe.codec_model import Snake
from checkpoints.speaking.recipe.snake_kernel import fused_snake

CASES = {"one program": (1, 16, 30), "many, the last not full": (3, 64, 170), "widest": (2, 256, 9)}


def errors(rows, channels, steps, is_sliced):
    torch.manual_seed(0)
    snake = Snake(channels)
    torch.nn.init.normal_(snake.alpha, std=0.5)
    torch.nn.init.normal_(snake.beta, std=0.5)
    x = torch.randn(rows, channels, steps + 3) * 3
    x = (x[..., :steps] if is_sliced else x[..., :steps].contiguous()).requires_grad_()
    weight = torch.randn(rows, channels, steps)
    wanted = [x, snake.alpha, snake.beta]
    expected = snake(x)
    found = fused_snake(x, snake.alpha, snake.beta, 1e-9)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad((found * weight).sum(), wanted),
        torch.autograd.grad((expected * weight).sum(), wanted),
        strict=True,
    )
    pairs = [(a.detach(), b.detach()) for a, b in pairs]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


if __name__ == "__main__":
    print(json.dumps({name: errors(*sizes, name != "one program") for name, sizes in CASES.items()}))
