from __future__ import annotations

import numpy as np
import pytest
import torch
from model_fixtures import conversation, gradients, packed, plain_loss, small_gpt
from train_fixtures import ranks

from chatmill.load.batch import Batch
from chatmill.train.config import OptimizerConfig
from chatmill.train.distributed import World, whole
from chatmill.train.gpt import GPT
from chatmill.train.step import StepCounts, Stepper, count_batch, micro_batches, seed_step

CPU = torch.device("cpu")
LENGTH = 40


def a_batch(rows: int = 8) -> Batch:
    made = []
    for row in range(rows):
        made.append([conversation(4 + (row * 5 + number) % 9, seed=10 * row + number) for number in range(1 + row % 3)])
    return packed(made, LENGTH)


def uneven(per_rank: int = 2) -> Batch:
    rows = [[(ids, [0.0] * len(ids))] for ids in ([5, 6, 7, 8], [9, 10, 11])]
    rows += [[([1, 2, 3], [0.0, 1.0, 0.0])], [([4, 5, 6, 7], [0.0, 0.0, 0.0, 1.0])]]
    rows += [[(list(range(1, 12)), [0.0] + [1.0] * 10)], [(list(range(20, 31)), [0.0] + [1.0] * 10)]]
    assert len(rows) == 3 * per_rank
    batch = packed(rows, 16)
    assert [int(part.loss_mask.sum()) for part in batch.split(3)] == [0, 2, 20]
    return batch


def a_stepper(model: GPT, world: World | None = None, *, sharded: bool = False, grad_clip: float = 0.0) -> Stepper:
    world = world or World(0, 1, CPU)
    module = world.distribute(model, sharded=sharded, compute=None)
    return Stepper(model, module, world, OptimizerConfig(learning_rate=0.1, grad_clip=grad_clip))


def reference(batch: Batch) -> tuple[float, list[torch.Tensor]]:
    model = small_gpt()
    total, weight = plain_loss(model, batch)
    return float(total.detach()) / weight, gradients(model, total / weight)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_do_not_depend_on_micro_batches(count):
    batch = a_batch()
    loss, expected = reference(batch)
    stepper = a_stepper(small_gpt())
    parts = micro_batches(batch, count, CPU)
    found, _ = stepper.gradients(parts, weight=count_batch(batch, parts).weight)
    assert abs(float(found) - loss) < 1e-5
    for parameter, gradient in zip(stepper.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_do_not_depend_on_the_ranks_even_if_one_trains_nothing(sharded, count):
    batch = uneven()
    loss, expected = reference(batch)

    def work(rank: int) -> list:
        world = World(rank, 3, CPU)
        stepper = a_stepper(small_gpt(), world, sharded=sharded)
        mine = batch.split(3)[rank]
        parts = micro_batches(mine, count, CPU)
        weight, *_ = world.sums(count_batch(mine, parts))
        found, _ = stepper.gradients(parts, weight=weight)
        return [float(found), [whole(parameter.grad).tolist() for parameter in stepper.model.parameters()]]

    for found, grads in ranks(3, work):
        assert abs(found - loss) < 1e-6
        for gradient, right in zip(grads, expected, strict=True):
            np.testing.assert_allclose(np.array(gradient), right.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_three_ranks_step_like_one(sharded):
    batch = uneven()

    def after(world: World, rows: Batch) -> list[list]:
        stepper = a_stepper(small_gpt(), world, sharded=sharded, grad_clip=0.5)
        for lr in (0.01, 0.02):
            parts = micro_batches(rows, 2, CPU)
            weight, *_ = world.sums(count_batch(rows, parts))
            norm = stepper.step(parts, weight=weight, lr=lr).read().grad_norm
        return [norm, *(whole(parameter.detach()).tolist() for parameter in stepper.model.parameters())]

    norm, *alone = after(World(0, 1, CPU), batch)
    for found, *parameters in ranks(3, lambda rank: after(World(rank, 3, CPU), batch.split(3)[rank])):
        assert abs(found - norm) < 1e-5
        for mine, right in zip(parameters, alone, strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(right), rtol=0, atol=1e-5)


def test_a_batch_without_trained_tokens_has_a_gradient_of_zero():
    batch = packed([[([1, 2, 3], [0.0] * 3)], [([4, 5], [0.0] * 2)]], 8)
    stepper = a_stepper(small_gpt())
    parts = micro_batches(batch, 2, CPU)
    assert count_batch(batch, parts) == StepCounts(weight=0.0, trained=0, tokens=5, untrained_rows=2)
    loss, _ = stepper.gradients(parts, weight=0.0)
    assert float(loss) == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in stepper.model.parameters())
    read = stepper.step(parts, weight=0.0, lr=0.1).read()
    assert (read.loss, read.grad_norm) == (0.0, 0.0)
    assert all(torch.isfinite(p).all() for p in stepper.model.parameters())


def test_the_contents_of_a_batch_are_counted():
    rows = [[([1, 2, 3], [0.0, 1.0, 0.5])], [([4, 5], [0.0, 0.0]), ([6, 7, 8], [1.0, 0.0, 0.0])], []]
    batch = packed(rows, 9)
    counts = count_batch(batch, micro_batches(batch, 3, CPU))
    # The first token of a conversation is never predicted, so the second row has no loss. The third row is empty.
    assert counts == StepCounts(weight=1.5, trained=2, tokens=8, untrained_rows=1)


def test_every_conversation_has_its_own_loss():
    batch = a_batch()
    stepper = a_stepper(small_gpt())
    parts = micro_batches(batch, 2, CPU)
    rows = stepper.step(parts, weight=1.0, lr=0.0, rows=True).read().rows()
    found = {}
    model = small_gpt()
    for row, ids in enumerate(batch.episode_ids.tolist()):
        for segment, episode in enumerate(ids):
            if episode >= 0:
                only = batch.segments == segment
                only[:row], only[row + 1 :] = False, False
                y, weights = batch.y.where(only, -100), batch.weights.where(only, 0)
                total, weight = plain_loss(model, batch._replace(y=y, weights=weights))
                if weight:
                    found[row, episode] = (float(total.detach()) / weight, weight)
    assert len(rows) == len(found)
    for mine, ((_, episode), (loss, weight)) in zip(rows, sorted(found.items()), strict=True):
        assert (mine.episode, mine.weight) == (episode, weight)
        assert abs(mine.loss - loss) < 1e-5


def test_only_matrices_have_weight_decay():
    model = small_gpt()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stepper = a_stepper(model)
    batch = packed([[([1, 2], [0.0, 0.0])]], 4)
    stepper.step(micro_batches(batch, 1, CPU), weight=0.0, lr=0.5)
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.1) if parameter.ndim > 1 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_gradients_are_clipped_to_the_norm():
    batch = a_batch()
    stepper = a_stepper(small_gpt(), grad_clip=1e-3)
    free = a_stepper(small_gpt())
    parts = micro_batches(batch, 1, CPU)
    weight = count_batch(batch, parts).weight
    norm = stepper.step(parts, weight=weight, lr=0.0).read().grad_norm
    _, expected = reference(batch)
    length = torch.stack([gradient.square().sum() for gradient in expected]).sum().sqrt()
    assert abs(norm - float(length)) < 1e-4
    assert norm == free.step(parts, weight=weight, lr=0.0).read().grad_norm
    # AdamW's moments are computed from the clipped gradients.
    moments = [stepper.optimizer.state[p]["exp_avg"] for p in stepper.model.parameters()]
    given = torch.stack([moment.square().sum() for moment in moments]).sum().sqrt() / 0.1
    assert abs(float(given) - 1e-3) < 1e-6


def test_random_numbers_depend_only_on_seed_step_and_rank():
    def draw(*place: int) -> float:
        seed_step(*place)
        return float(torch.rand(()))

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4)}) == 4
