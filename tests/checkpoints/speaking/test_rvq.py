"""Books that are learned by running averages."""

import torch

from checkpoints.speaking.recipe.rvq import Codebook, ResidualQuantizer, SplitQuantizer


def clusters(count=400):
    """Points around four corners, and those."""
    corners = torch.tensor([[4.0, 4.0], [4.0, -4.0], [-4.0, 4.0], [-4.0, -4.0]])
    generator = torch.Generator().manual_seed(0)
    which = torch.randint(4, (count,), generator=generator)
    return corners[which] + 0.1 * torch.randn(count, 2, generator=generator), corners


def trained_book(points, size=4, steps=400):
    torch.manual_seed(0)
    book = Codebook(size, 2)
    book.seed(points)
    for _ in range(steps):
        book.update(points, book.nearest(points))
    return book


def test_a_book_finds_the_clusters():
    points, corners = clusters()
    book = trained_book(points, size=8)
    distance = torch.cdist(corners, book.rows).min(dim=1).values
    assert distance.max() < 0.2


def test_a_code_that_nothing_chooses_starts_anew_from_the_data():
    points, _ = clusters()
    book = trained_book(points)
    book.embedding_sum[0], book.cluster_usage[0] = torch.tensor([1e3, 1e3]), 1.0
    for _ in range(400):  # usage decays to below the limit, then the row is drawn anew
        book.update(points, book.nearest(points))
    assert book.rows[0].abs().max() < 6


def test_more_books_come_nearer():
    torch.manual_seed(0)
    quantizer, latent = ResidualQuantizer(6, 16, 8).train(), torch.randn(4, 8, 50)
    for _ in range(60):
        quantizer(latent)
    quantizer.eval()
    projected = quantizer.input_proj(latent)
    errors = []
    for kept in range(1, 7):
        quantized, _, _ = quantizer(latent, torch.full((4,), kept))
        errors.append((quantized - quantizer.output_proj(projected)).square().mean().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 4


def test_dropped_books_differ_by_row_and_leave_the_codes_alone():
    torch.manual_seed(0)
    quantizer, latent = SplitQuantizer(4, 16, 8).train(), torch.randn(2, 8, 30)
    quantizer(latent)
    quantizer.eval()
    whole, _, codes, _ = quantizer(latent)
    partly, first, partly_codes, _ = quantizer(latent, torch.tensor([4, 1]))
    assert torch.equal(codes, partly_codes)
    assert torch.equal(partly[0], whole[0])
    assert torch.allclose(partly[1], first[1])  # the other branch adds nothing


def test_listening_changes_no_book_and_training_does():
    torch.manual_seed(0)
    quantizer, latent = SplitQuantizer(3, 8, 8).train(), torch.randn(1, 8, 20)
    quantizer(latent)
    before = {name: t.clone() for name, t in quantizer.state_dict().items()}
    quantizer.eval()
    quantizer(latent + 1)
    assert all(torch.equal(before[name], t) for name, t in quantizer.state_dict().items())
    quantizer.train()
    quantizer(latent + 1)
    assert not torch.equal(
        before["rvq_first.vq.layers.0._codebook.embedding_sum"],
        quantizer.rvq_first.books[0].embedding_sum,
    )


def test_gradients_pass_through_the_quantiser_to_the_latent():
    torch.manual_seed(0)
    quantizer, latent = SplitQuantizer(3, 8, 8).train(), torch.randn(1, 8, 20, requires_grad=True)
    quantizer(latent)[0].square().sum().backward()
    assert latent.grad.abs().sum() > 0
